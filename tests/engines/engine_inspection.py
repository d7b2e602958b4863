"""State of our connector inside vLLM, for tests."""

from __future__ import annotations

import json
from typing import Any

from vllm import SamplingParams
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from kvcm.connectors.keys import HashKeys
from kvcm.connectors.reuse.statistics import merged
from kvcm.connectors.vllm.connector import identity_of, weights_of
from kvcm.connectors.vllm.options import VllmOptions


def namespace(worker: Any) -> str:
    """Return the namespace of all block keys, in hex; runs in a worker."""
    connector = get_kv_transfer_group()
    config = connector._vllm_config
    options = VllmOptions.parse(config.kv_transfer_config.kv_connector_extra_config)
    return identity_of(config, connector._worker._plan, options).namespace(weights_of(config, options)).hex()


def change_weights(worker: Any, layer: str, scale: float, element: int | None) -> None:
    """Scale weights in place, past PyTorch's counter; runs in a worker."""
    weights = worker.get_model().get_submodule(layer).weight.data
    (weights if element is None else weights.view(-1)[element : element + 1]).mul_(scale)


def set_weights_version(worker: Any, name: str) -> None:
    """Name the weights; runs in a worker."""
    get_kv_transfer_group().set_weights_version(name)


def block_keys(config: Any, namespace: bytes, tokens: list[int], **prompt: Any) -> list[int]:
    """Return the keys of the full blocks of a prompt, as the scheduler's side of the connector makes them."""
    hash_fn = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
    init_none_hash(hash_fn)
    hasher = get_request_block_hasher(config.cache_config.block_size, hash_fn)
    request = Request("look", tokens, SamplingParams(max_tokens=1), None, block_hasher=hasher, **prompt)
    return list(HashKeys(namespace).keys(request.block_hashes))


def counts(core: Any) -> dict[str, Any]:
    """Return the counters of both sides of the connector."""
    sides = (core.scheduler.connector, get_kv_transfer_group())
    return merged(*(side._statistics.total() for side in sides))


def plain(event: Any) -> dict[str, Any]:
    """Return the fields of an event of stored blocks."""
    names = ("parent_block_hash", "token_ids", "block_size", "medium")
    shown = {name: getattr(event, name) for name in names} | {"block_hashes": list(event.block_hashes)}
    return json.loads(json.dumps(shown, default=bytes.hex))  # type: ignore[no-any-return]
