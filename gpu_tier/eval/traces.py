"""S2: selections without keys, for caches at any scale, and the hit rate of a buffer on them.

A trace says how much of a selection stays from step to step and how much of the rest comes back after it left. What a
buffer can gain over "keep the last selection" is what comes back: without returns a larger buffer gains nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_tier.errors import ConfigError
from gpu_tier.geometry import KVGeometry, KVKind
from gpu_tier.manager.lru_state import LruCounters, LruDiffPolicy
from gpu_tier.rows import KVDtype
from gpu_tier.runtime import NullRuntime
from gpu_tier.types import ForwardBatch, Mode, Selection, Unit

__all__ = ["WARM_UP_STEPS", "simulate", "trace"]

WARM_UP_STEPS = 10
"""First steps of a trace that hit rates leave out."""

_RETURN_AFTER = (2, 6)


def trace(n: int, k: int, overlap: float, return_fraction: float, steps: int, seed: int) -> Tensor:
    """Return the selections of a decode, ``int32 [steps, k]``, ascending ids in each.

    Each step keeps ``overlap · k`` random items of the last one. Of the others, `return_fraction` left the selection
    within the last 2 to 6 steps (as far as there are such), and the rest are random items that none of those steps had.

    Args:
        n: items to select from.
        k: items of a selection.
        overlap: share of a selection that the next one keeps.
        return_fraction: share of the newcomers that come back.
        steps: selections.
        seed: of the random numbers.

    Raises:
        ConfigError: a share is not in [0, 1], or n is too small for fresh items in each step.
    """
    for field, value in (("overlap", overlap), ("return_fraction", return_fraction)):
        if not 0 <= value <= 1:
            raise ConfigError(field, value, "must be 0 to 1")
    if not k >= 1 or n < (_RETURN_AFTER[1] + 2) * k:
        raise ConfigError("n", n, f"must be at least {_RETURN_AFTER[1] + 2} times k={k}")
    random = torch.Generator().manual_seed(seed)
    chosen = [torch.randperm(n, generator=random)[:k]]
    for _ in range(steps - 1):
        chosen.append(_next_selection(chosen[-_RETURN_AFTER[1] :], n, k, overlap, return_fraction, random))
    return torch.stack([ids.sort().values for ids in chosen]).int()


def _next_selection(
    recent: list[Tensor], n: int, k: int, overlap: float, return_fraction: float, random: torch.Generator
) -> Tensor:
    last = recent[-1]
    kept = _sample(last, round(overlap * k), random)
    seen = torch.zeros(n, dtype=torch.bool)
    for ids in recent[: -_RETURN_AFTER[0] + 1]:
        seen[ids] = True
    seen[last] = False
    left = seen.nonzero()[:, 0]
    back = _sample(left, round(return_fraction * (k - len(kept))), random)
    seen[last] = True
    fresh = _sample((~seen).nonzero()[:, 0], k - len(kept) - len(back), random)
    return torch.cat([kept, back, fresh])


def _sample(ids: Tensor, count: int, random: torch.Generator) -> Tensor:
    return ids[torch.randperm(len(ids), generator=random)[:count]]


def simulate(selections: Tensor, capacity: int, *, loads_hottest: bool = False, kernels: str = "auto") -> float:
    """Return the hit rate of an LRU diff buffer on a trace, without its first 10 steps.

    All items are in host memory, and the newest one is never selected: only the trace decides.

    Args:
        selections: ``int [steps, k]`` of `trace`, or ids of real selections; -1 is padding.
        capacity: items of the buffer, at least k.
        loads_hottest: whether loaded items are hotter than hits.
        kernels: which implementation of the diff runs.

    Raises:
        ConfigError: the buffer is smaller than a selection, or the trace has no step after its first 10.
    """
    if len(selections) <= WARM_UP_STEPS:
        raise ConfigError("selections", len(selections), f"a trace needs more than {WARM_UP_STEPS} steps")
    policy, batch = _one_request(int(selections.max()) + 1, capacity, loads_hottest=loads_hottest, kernels=kernels)
    cold = policy.counters
    for step, ids in enumerate(selections.int()):
        if step == WARM_UP_STEPS:
            cold = policy.counters
        selection = Selection(Unit.TOKEN, 1, ids[None, None], (ids >= 0).sum(dtype=torch.int32).reshape(1, 1))
        policy.resolve(0, batch, selection, torch.ones(1, dtype=torch.bool))
    total = policy.counters
    counted = (total.selected - cold.selected, total.hits - cold.hits, total.loads - cold.loads)
    return LruCounters(*counted, promotions=0).hit_rate


def _one_request(n: int, capacity: int, *, loads_hottest: bool, kernels: str) -> tuple[LruDiffPolicy, ForwardBatch]:
    geometry = KVGeometry(KVKind.MHA, 1, 1, 1, 1, KVDtype.F32, page_size=1)
    policy = LruDiffPolicy(
        geometry, capacity=capacity, unit_tokens=1, selecting_heads=1, max_requests=1, max_items=n + 1,
        host_loc=torch.arange(n + 1)[None], runtime=NullRuntime(), loads_hottest=loads_hottest, kernels=kernels,
    )  # fmt: skip
    policy.admit(0, torch.arange(capacity), torch.tensor([capacity, capacity + 1]), n)
    one = torch.zeros(1, dtype=torch.int64)
    seq_lens = torch.tensor([n + 1], dtype=torch.int32)
    batch = ForwardBatch(
        mode=Mode.DECODE, req_pool_indices=one, seq_lens=seq_lens, out_cache_loc=one, positions=one + n,
        num_real_reqs=torch.ones(1, dtype=torch.int32), requests=(0,), lengths=(n + 1,), extend_lens=(1,),
    )  # fmt: skip
    return policy, batch
