#!/bin/sh
# SGLang's experimental router asks KVCM which worker holds how much of a prompt.
#
#   docs/examples/routers/sglang_router.sh INSTANCE_ID TOKENIZER WORKER_URL...
#
# For routers that need the endpoint alone; newer ones also want the index to report itself to them ten times in a
# second, and `kvcm scorer` does not. Run here: the scorer, with requests as the router sends them. Not run here: the router.
#
# Each worker: python -m sglang.launch_server --model-path MODEL --port 30000 --page-size 16 --kv-events-config
#     '{"publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5657"}'
# and beside it: kvcm-subscriber --manager 127.0.0.1:6381 --instance-id INSTANCE_ID --engine sglang
#     --engine-address 10.0.0.1:30000 --engine-url http://10.0.0.1:30000
#
# `http://` and the engine address of the subscriber must make the worker's URL, byte for byte; else --worker-prefix or
# --worker of `kvcm scorer` say how.
set -eu
[ $# -ge 3 ] || { echo "usage: $0 INSTANCE_ID TOKENIZER WORKER_URL..." >&2; exit 2; }
instance=$1 tokenizer=$2
shift 2

kvcm scorer --manager "${KVCM_MANAGER:-127.0.0.1:6381}" --kv-indexer "127.0.0.1:50051=$instance" &
scorer=$!
trap 'kill $scorer' EXIT

sgl-router --model-id "$instance" --tokenizer-path "$tokenizer" --worker-urls "$@" \
  --policy cache_aware_zmq --kv-indexer-endpoint http://127.0.0.1:50051
