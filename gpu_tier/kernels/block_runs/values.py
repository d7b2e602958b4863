"""What the plan of an execution buffer of blocks is made from, and what comes out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_tier.types import CopyRuns

__all__ = ["BlockPlaces", "BlockPlan"]


@dataclass(frozen=True, slots=True)
class BlockPlaces:
    """Where the selected blocks of a layer are after the step.

    Attributes:
        place: ``int32 [B, H, W]`` place of each in the cache, -1 behind the last.
        loaded: ``uint8 [B, H, C]`` 1 for places whose block was not there before.
        evicted: ``int32 [B, H, W]`` blocks that were given up, -1 behind them.
        slots: ``int32 [R, C·block_tokens]`` device slot of each token of the places.
        block_tokens: tokens of a block.
        piece: tokens of a run; divides them.
    """

    place: Tensor
    loaded: Tensor
    evicted: Tensor
    slots: Tensor
    block_tokens: int
    piece: int


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """A plan.

    Attributes:
        runs: ``[B·H, U + V]``: the steady runs, then V pieces; the kind of empty ones is -1.
        lens: ``int32 [B, H]`` tokens of each row and head.
        admissions: ``[B·H, V]`` copies out of the execution buffer; the kind of pieces that were cached is -1.
        counters: ``int64 [6]`` to which are added: blocks, those that were cached, their tokens, those that were
            cached, blocks that were not cached, blocks given up.
    """

    runs: CopyRuns
    lens: Tensor
    admissions: CopyRuns
    counters: Tensor

    @classmethod
    def empty(cls, rows: int, heads: int, steady: int, pieces: int, counters: Tensor) -> BlockPlan:
        """Return room for a plan of so many steady runs and pieces of a line."""
        lens = torch.empty(rows, heads, dtype=torch.int32, device=counters.device)
        runs, admissions = (_empty(rows * heads, width, counters.device) for width in (steady + pieces, pieces))
        return cls(runs, lens, admissions, counters)


def _empty(lines: int, width: int, device: torch.device) -> CopyRuns:
    kind, dst, tokens = torch.empty(3, lines, width, dtype=torch.int32, device=device)
    src = torch.empty(lines, width, dtype=torch.int64, device=device)
    return CopyRuns(kind, src, dst, tokens, torch.empty(lines, dtype=torch.int32, device=device))
