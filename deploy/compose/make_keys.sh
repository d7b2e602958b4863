#!/bin/sh
# Makes the keys of Prometheus, of the demo's engine, of the gateway and of the subscriber, once: the job `keys` runs it when a manager is ready. A key that
# the managers do not know, because the store was emptied, is made again.
set -eu
umask 077

# key FILE GROUP NAME OPTION…: GROUP also reads FILE, "" for no group.
key() {
  file=$1 group=$2 name=$3
  shift 3
  if [ -s "$file" ]; then
    code=0
    KVCM_KEY_FILE='' KVCM_KEY=$(cat "$file") kvcm whoami > /dev/null || code=$?
    [ "$code" -ne 0 ] || return 0
    [ "$code" -eq 3 ] || exit "$code"
  fi
  kvcm key create --name "$name-$(date +%s)" --out "$file.new" --force "$@" > /dev/null
  if [ -n "$group" ]; then
    chgrp "$group" "$file.new"
    chmod 440 "$file.new"
  fi
  mv "$file.new" "$file"
}

key "$1/prometheus.key" 10011 prometheus --role viewer
key "$2/engine.key" "" demo-engine --role engine --group default --verb match --verb write
key "$2/gateway.key" "" gateway --role engine --group default --verb score
key "$2/subscriber.key" "" subscriber --role engine --group default --verb report
# What clients show to the gateway: any text, of which managers know nothing.
[ -s "$2/clients.key" ] || python -c 'import secrets; print(secrets.token_urlsafe(32))' > "$2/clients.key"
