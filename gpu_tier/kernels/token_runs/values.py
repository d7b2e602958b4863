"""What the plan of an execution buffer of single tokens is made from, and what comes out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_tier.types import CopyRuns

__all__ = ["SteadyPlan", "TokenPlaces", "TokenPlan"]


@dataclass(frozen=True, slots=True)
class SteadyPlan:
    """The steady runs of a batch on the device, the same for all heads.

    Attributes:
        kind: ``int32 [B, U]`` `Source.STEADY`, -1 behind a row's runs.
        src: ``int64 [B, U]`` slot in the arena of each run's first token.
        dst: ``int32 [B, U]`` slot of it in the execution buffer.
        tokens: ``int32 [B, U]`` tokens of the run, 0 behind a row's runs.
        end: ``int32 [B]`` slot in the execution buffer behind the row's steady tokens.
        total: ``int32 [B]`` steady tokens of the row.
    """

    kind: Tensor
    src: Tensor
    dst: Tensor
    tokens: Tensor
    end: Tensor
    total: Tensor


@dataclass(frozen=True, slots=True)
class TokenPlaces:
    """Where the tokens of a layer are.

    Attributes:
        place_of: ``int32 [R, Hs, N]`` place of each block in the cache, -1 where it is not cached; one head or all.
        slots: ``int32 [R, C]`` device slot of each token of the places.
        host_loc: ``int64 [R', T]`` host slot of each token, -1 while it has none.
        sink: first token of block 0.
        unit: tokens of a block, and of a place.
    """

    place_of: Tensor
    slots: Tensor
    host_loc: Tensor
    sink: int
    unit: int


@dataclass(frozen=True, slots=True)
class TokenPlan:
    """A plan.

    Attributes:
        runs: ``[B·H, U + K]``: the steady runs, then the tokens; of those that are nowhere the kind is -1.
        lens: ``int32 [B, H]`` tokens of each row and head.
        counters: ``int64 [3]`` to which selected tokens, those that are cached and those that are nowhere are added.
    """

    runs: CopyRuns
    lens: Tensor
    counters: Tensor

    @classmethod
    def empty(cls, rows: int, heads: int, width: int, counters: Tensor) -> TokenPlan:
        """Return room for a plan of so many runs a line."""

        def table(dtype: torch.dtype) -> Tensor:
            return torch.empty(rows * heads, width, dtype=dtype, device=counters.device)

        runs = CopyRuns(
            table(torch.int32), table(torch.int64), table(torch.int32), table(torch.int32),
            torch.empty(rows * heads, dtype=torch.int32, device=counters.device),
        )  # fmt: skip
        return cls(runs, torch.empty(rows, heads, dtype=torch.int32, device=counters.device), counters)
