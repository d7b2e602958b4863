"""The content of vLLM's own prefix cache, byte by byte: for tests that compare it with the stored blocks.

Only of an engine in this process: the scheduler knows which block holds what, the worker has the memory.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from vllm import SamplingParams
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.core.kv_cache_utils import BlockHashListWithBlockSize, get_block_hash
from vllm.v1.request import Request


def groups(core: Any) -> list[dict[str, Any]]:
    """Return the groups of layers that have block ids of their own."""
    return [
        {
            "kind": type(group.kv_cache_spec).__name__,
            "block_tokens": group.kv_cache_spec.block_size,
            "layers": list(group.layer_names),
        }
        for group in core.scheduler.kv_cache_config.kv_cache_groups
    ]


def cached_hashes(core: Any) -> list[str]:
    """Return the hash of each block that can be a hit now, in hex; only of an engine with one group of layers."""
    pool = core.scheduler.kv_cache_manager.block_pool
    return sorted({get_block_hash(block.block_hash).hex() for block in pool.blocks if block.block_hash is not None})


def cached_blocks(core: Any, prompt: list[int], directory: Path | None) -> list[list[dict[str, Any] | None]]:
    """Return for each group the full blocks of a prompt: their hash, where they are, and a digest per layer.

    Args:
        core: the engine's core.
        prompt: token ids.
        directory: gets the bytes of each block, its layers one after the other, in a file `GROUP-INDEX`.
    """
    request = Request("look", prompt, SamplingParams(max_tokens=1), None, block_hasher=core.request_block_hasher)
    memory = _memory_by_layer(core)
    found = []
    for number, group in enumerate(core.scheduler.kv_cache_config.kv_cache_groups):
        layers = [memory[name] for name in group.layer_names]
        blocks = []
        for index, block_hash in enumerate(_hashes(core, request, group.kv_cache_spec.block_size)):
            block = _block(core, block_hash, number, layers)
            if block is not None and directory is not None:
                (directory / f"{number}-{index}").write_bytes(b"".join(block["bytes"]))
            blocks.append(None if block is None else _described(block))
        found.append(blocks)
    return found


def _hashes(core: Any, request: Request, block_tokens: int) -> list[bytes]:
    hashed_tokens = core.scheduler.kv_cache_manager.block_pool.hash_block_size
    if block_tokens == hashed_tokens:
        return list(request.block_hashes)
    chained = BlockHashListWithBlockSize(request.block_hashes, hashed_tokens, block_tokens)
    return [chained[index] for index in range(len(chained))]


def _block(core: Any, block_hash: bytes, group: int, layers: list[torch.Tensor]) -> dict[str, Any] | None:
    cached = core.scheduler.kv_cache_manager.block_pool.get_cached_block(block_hash, [group])
    if cached is None:
        return None
    number = cached[0].block_id
    parts = [layer[number].contiguous().view(torch.uint8).numpy().tobytes() for layer in layers]
    return {"hash": block_hash.hex(), "block_id": number, "bytes": parts}


def _described(block: dict[str, Any]) -> dict[str, Any]:
    return {
        "hash": block["hash"],
        "block_id": block["block_id"],
        "layers": [hashlib.sha256(part).hexdigest() for part in block["bytes"]],
    }


def _memory_by_layer(core: Any) -> dict[str, torch.Tensor]:
    """The worker keeps the memory in the order of the layers; its first dimension is the block."""
    memory = core.model_executor.driver_worker.worker.model_runner.kv_caches
    names = [name for group in core.scheduler.kv_cache_config.kv_cache_groups for name in group.layer_names]
    return dict(zip(sorted(names, key=extract_layer_index), memory, strict=True))
