"""Plans an execution buffer of single tokens: for each selected token whether a block cache has it, and where.

Steady tokens come first, the same runs for all heads of a row; behind them one run per selected token, in the order of
the selection. A token lies in block ``(token - sink) // unit`` of its request: if that has a place in the cache, the
token is read there, else in its host slot.

Implementations: the reference in torch, and Triton, in one launch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvcm.gpu_tier.errors import ConfigError
from kvcm.gpu_tier.kernels import registry
from kvcm.gpu_tier.kernels.operands import check_contiguous
from kvcm.gpu_tier.types import CopyRuns

__all__ = ["SteadyPlan", "TokenPlaces", "TokenPlan", "token_runs"]

# What the plan of an execution buffer of single tokens is made from, and what comes out.


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
        """Allocate a plan of so many runs a line."""

        def table(dtype: torch.dtype) -> Tensor:
            return torch.empty(rows * heads, width, dtype=dtype, device=counters.device)

        runs = CopyRuns(
            table(torch.int32), table(torch.int64), table(torch.int32), table(torch.int32),
            torch.empty(rows * heads, dtype=torch.int32, device=counters.device),
        )  # fmt: skip
        return cls(runs, torch.empty(rows, heads, dtype=torch.int32, device=counters.device), counters)


def token_runs(
    indices: Tensor, lengths: Tensor, requests: Tensor, active: Tensor, steady: SteadyPlan, places: TokenPlaces,
    out: TokenPlan, *, impl: str = "auto",
) -> None:  # fmt: skip
    """Plan a step of one layer.

    Args:
        indices: ``int32 [B, H, K]`` selected tokens, left-aligned, -1 behind them; none before the sink's end.
        lengths: ``int32 [B, H]`` how many there are.
        requests: ``int64 [B]`` row of each request in the tables; of rows that are not active anything.
        active: ``bool [B]`` rows to plan; the others get no runs.
        steady: runs of the steady tokens.
        places: where tokens are.
        out: the plan; counters are added to.
        impl: auto, reference or triton.

    Raises:
        ConfigError: shapes do not fit.
    """
    rows, heads, width = indices.shape
    runs = (rows * heads, steady.kind.shape[1] + width)
    if lengths.shape != (rows, heads) or requests.shape != (rows,) or active.shape != (rows,):
        shapes = tuple(lengths.shape), tuple(requests.shape), tuple(active.shape)
        raise ConfigError("lengths, requests, active", shapes, f"must be [{rows}, {heads}], [{rows}], [{rows}]")
    if out.runs.kind.shape != runs or out.lens.shape != (rows, heads):
        raise ConfigError("out", (*out.runs.kind.shape, *out.lens.shape), f"must be {runs} and [{rows}, {heads}]")
    if places.place_of.shape[1] not in (1, heads):
        raise ConfigError("places", places.place_of.shape[1], f"must have 1 or {heads} heads")
    if active.dtype is not torch.bool:
        raise ConfigError("active", active.dtype, "must be bool")
    check_contiguous(
        indices=indices, lengths=lengths, requests=requests, active=active, place_of=places.place_of,
        slots=places.slots, host_loc=places.host_loc, kind=steady.kind, src=steady.src, dst=steady.dst,
    )  # fmt: skip
    registry.get("token_runs", indices.device, impl)(indices, lengths, requests, active, steady, places, out)
