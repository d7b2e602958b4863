"""Plans an execution buffer of single tokens: for each selected token whether a block cache has it, and where.

Steady tokens come first, the same runs for all heads of a row; behind them one run per selected token, in the order of
the selection. A token lies in block ``(token - sink) // unit`` of its request: if that has a place in the cache, the
token is read there, else in its host slot.

Implementations: the reference in torch, and Triton, in one launch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_tier.errors import ConfigError
from gpu_tier.kernels import registry
from gpu_tier.kernels.memory import check_contiguous
from gpu_tier.kernels.token_runs.values import SteadyPlan, TokenPlaces, TokenPlan

__all__ = ["SteadyPlan", "TokenPlaces", "TokenPlan", "token_runs"]


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
