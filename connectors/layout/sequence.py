"""Blocks of a KV cache that keeps a whole sequence per layer, as `transformers` does."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["sequence_block"]


def sequence_block(
    layers: Sequence[tuple[torch.Tensor, torch.Tensor]], block: int, block_tokens: int
) -> list[torch.Tensor]:
    """Return views of K and V of each layer for tokens `[block * block_tokens, (block + 1) * block_tokens)`.

    Args:
        layers: K and V, each of shape [kv_head, token, head_dim].
        block: index of the block.
        block_tokens: tokens per block.
    """
    start = block * block_tokens
    return [tensor.narrow(1, start, block_tokens) for pair in layers for tensor in pair]
