"""What is known of clusters, and the blocks that some of them are expanded to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["ClusterPages", "SelectedBlocks"]


@dataclass(frozen=True, slots=True)
class ClusterPages:
    """The clusters and blocks of a layer, in pages: number n is place ``n % E`` of page ``table[request, n // E]``.

    Attributes:
        table: ``int32 [R, P]`` pages of each request, -1 where it has none.
        firsts: ``int32 [pages, H, E]`` first block of each cluster.
        sizes: ``int32 [pages, H, E]`` its tokens.
        hosts: ``int32 [pages, H, E']`` where each block is on the host, in blocks.
        block_tokens: tokens of a block.
    """

    table: Tensor
    firsts: Tensor
    sizes: Tensor
    hosts: Tensor
    block_tokens: int


@dataclass(frozen=True, slots=True)
class SelectedBlocks:
    """The blocks of the selected clusters of each row and head, in the order of the clusters, ``int32 [B, H, W]`` each.

    Attributes:
        ids: number of the block in its request, layer and head; -1 behind the last.
        tokens: tokens in it, 0 behind the last.
        hosts: where it is on the host, in blocks; 0 behind the last.
        offsets: selected tokens before its first one, 0 behind the last.
        lengths: ``int32 [B, H]`` blocks.
        totals: ``int32 [B, H]`` their tokens.
    """

    ids: Tensor
    tokens: Tensor
    hosts: Tensor
    offsets: Tensor
    lengths: Tensor
    totals: Tensor

    @classmethod
    def empty(cls, rows: int, heads: int, width: int, device: torch.device) -> SelectedBlocks:
        """Return room for so many blocks of each row and head."""
        wide = torch.empty(4, rows, heads, width, dtype=torch.int32, device=device)
        counts = torch.empty(2, rows, heads, dtype=torch.int32, device=device)
        return cls(*wide, *counts)
