"""Plans an execution buffer of blocks: each one read in the cache or on the host, and admitted where it was not cached.

Steady tokens come first, the same runs for all heads of a row; behind them the pieces of the selected blocks. A piece
is as many tokens of a block as surely lie together at every position of a block in the arena.

Implementations: the reference in torch, and Triton, in one launch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvcm.gpu_tier.errors import ConfigError
from kvcm.gpu_tier.kernels import registry
from kvcm.gpu_tier.kernels.cluster_expand import SelectedBlocks
from kvcm.gpu_tier.kernels.operands import check_contiguous
from kvcm.gpu_tier.kernels.token_runs import SteadyPlan
from kvcm.gpu_tier.types import CopyRuns

__all__ = ["BlockPlaces", "BlockPlan", "block_runs"]

# What the plan of an execution buffer of blocks is made from, and what comes out.


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
        """Allocate a plan of so many steady runs and pieces of a line."""
        lens = torch.empty(rows, heads, dtype=torch.int32, device=counters.device)
        runs, admissions = (_empty(rows * heads, width, counters.device) for width in (steady + pieces, pieces))
        return cls(runs, lens, admissions, counters)


def _empty(lines: int, width: int, device: torch.device) -> CopyRuns:
    kind, dst, tokens = torch.empty(3, lines, width, dtype=torch.int32, device=device)
    src = torch.empty(lines, width, dtype=torch.int64, device=device)
    return CopyRuns(kind, src, dst, tokens, torch.empty(lines, dtype=torch.int32, device=device))


def block_runs(
    blocks: SelectedBlocks, requests: Tensor, active: Tensor, steady: SteadyPlan, places: BlockPlaces, out: BlockPlan,
    *, impl: str = "auto",
) -> None:  # fmt: skip
    """Plan a step of one layer.

    Args:
        blocks: the selected blocks.
        requests: ``int64 [B]`` row of each request in the tables; of rows that are not active anything.
        active: ``bool [B]`` rows to plan; the others get no runs.
        steady: runs of the steady tokens.
        places: where blocks are.
        out: the plan, and the copies that admit missing blocks; counters are added to.
        impl: auto, reference or triton.

    Raises:
        ConfigError: shapes do not fit.
    """
    rows, heads, width = blocks.ids.shape
    if places.block_tokens % places.piece:
        raise ConfigError("piece", places.piece, f"must divide the {places.block_tokens} tokens of a block")
    pieces = width * (places.block_tokens // places.piece)
    shapes = (rows * heads, steady.kind.shape[1] + pieces), (rows * heads, pieces)
    if (out.runs.kind.shape, out.admissions.kind.shape) != shapes:
        raise ConfigError("out", (*out.runs.kind.shape, *out.admissions.kind.shape), f"must be {shapes}")
    if requests.shape != (rows,) or active.shape != (rows,) or active.dtype is not torch.bool:
        found = tuple(requests.shape), (active.dtype, *active.shape)
        raise ConfigError("requests, active", found, f"must be [{rows}], the second one bool")
    if places.place.shape != blocks.ids.shape or places.loaded.shape[:2] != (rows, heads):
        found = tuple(places.place.shape), tuple(places.loaded.shape)
        raise ConfigError("places", found, f"must be of {rows} rows and {heads} heads")
    check_contiguous(
        ids=blocks.ids, requests=requests, active=active, place=places.place, loaded=places.loaded, slots=places.slots,
        kind=steady.kind, src=steady.src, dst=steady.dst, evicted=places.evicted,
    )  # fmt: skip
    registry.get("block_runs", requests.device, impl)(blocks, requests, active, steady, places, out)
