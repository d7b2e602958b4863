"""Recomputes what another engine stored and compares it block by block.

Floating point gives the same bits only for the same sums in the same order. So the KV is recomputed in the pieces in
which it was computed: per turn the tokens behind the loaded prefix at once, then each generated token for itself.
Beside it, the same text is computed from scratch in one piece; there the last bits may differ, and the greatest
difference is reported.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from model import BLOCK_TOKENS
from transformers import DynamicCache, LlamaForCausalLM

from kvcm.connectors.client import ManagerClient
from kvcm.connectors.transformers import KVReuse

__all__ = ["compare_store"]


def compare_store(model: LlamaForCausalLM, reuse: KVReuse, client: ManagerClient, turns: Sequence[dict]) -> dict:
    """Compare all blocks that an engine stored with KV computed here.

    Args:
        model: the same model.
        reuse: computes the keys of blocks.
        client: of the manager, for the places of blocks.
        turns: of that engine, in order: `prompt`, `tokens` (generated), `loaded_tokens`.

    Returns:
        Number of `blocks`, how many are `equal` bit by bit, and `scratch_difference`: the greatest difference to the KV
        of the last prompt computed in one piece, relative to the greatest absolute value.
    """
    blocks = equal = 0
    stored: dict[int, bytes] = {}
    for key, expected in _recomputed(model, reuse, turns):
        blocks += 1
        stored[key] = _read(client, key)
        equal += stored[key] == expected
    return {
        "blocks": blocks,
        "equal": equal,
        "scratch_difference": _scratch_difference(model, reuse, turns[-1], stored),
    }


@torch.no_grad()
def _recomputed(model: LlamaForCausalLM, reuse: KVReuse, turns: Sequence[dict]) -> Iterator[tuple[int, bytes]]:
    """Yield key and bytes of each block in the order in which the blocks were filled."""
    cache = DynamicCache(config=model.config)
    for turn in turns:
        tokens = [*turn["prompt"], *turn["tokens"]]
        loaded, prompt = turn["loaded_tokens"], len(turn["prompt"])
        if cache.get_seq_length() > loaded:
            cache.crop(loaded - cache.get_seq_length())
        for start, end in [(loaded, prompt), *((at, at + 1) for at in range(prompt, len(tokens) - 1))]:
            model(torch.tensor([tokens[start:end]]), past_key_values=cache, logits_to_keep=1)
        keys = reuse.block_keys(tokens[:-1])
        for block in range(loaded // BLOCK_TOKENS, len(keys)):
            yield keys[block], _block_bytes(cache, block)


@torch.no_grad()
def _scratch_difference(model: LlamaForCausalLM, reuse: KVReuse, turn: dict, stored: dict[int, bytes]) -> float:
    cache = DynamicCache(config=model.config)
    model(torch.tensor([list(turn["prompt"])]), past_key_values=cache, logits_to_keep=1)
    greatest = difference = 0.0
    for block, key in enumerate(reuse.block_keys(list(turn["prompt"]))):
        computed = np.frombuffer(_block_bytes(cache, block), np.float32)
        difference = max(difference, float(np.abs(computed - np.frombuffer(stored[key], np.float32)).max()))
        greatest = max(greatest, float(np.abs(computed).max()))
    return difference / greatest


def _block_bytes(cache: DynamicCache, block: int) -> bytes:
    """Return a block in the stored format, [layer][K, V][head][token][dim], by plain indexing."""
    tokens = slice(block * BLOCK_TOKENS, (block + 1) * BLOCK_TOKENS)
    parts = [tensor[0, :, tokens] for layer in cache.layers for tensor in (layer.keys, layer.values)]
    return torch.stack(parts).numpy().tobytes()


def _read(client: ManagerClient, key: int) -> bytes:
    """Read a block's range of its file with nothing but the manager's answer; b"" when it is not there."""
    locations = client.match([key], timeout_seconds=10).locations
    if not locations or locations[0] is None:
        return b""
    (uri,) = locations[0].uris.values()
    with Path(uri.path).open("rb") as file:
        file.seek(uri.offset)
        return file.read(uri.size)
