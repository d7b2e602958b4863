"""Hit rates of device buffers and block caches, on traces without keys (S2) and on selections of algorithms.

A trace says how much of a selection stays from step to step and how much of the rest comes back after it left. What a
buffer can gain over "keep the last selection" is what comes back: without returns a larger buffer gains nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvcm.gpu_tier.config import PQCacheConfig, RetroInferConfig, SparseConfig
from kvcm.gpu_tier.errors import ConfigError
from kvcm.gpu_tier.eval.methods import PAGE
from kvcm.gpu_tier.eval.quality import Driven, attention_weights
from kvcm.gpu_tier.eval.synth import KVSample
from kvcm.gpu_tier.geometry import KVDtype, KVGeometry, KVKind, Layout
from kvcm.gpu_tier.manager.execution_buffer import ExecutionBuffer
from kvcm.gpu_tier.manager.host_tokens import HostTokens
from kvcm.gpu_tier.manager.residency import BlockPolicy, LruCounters, LruDiffPolicy
from kvcm.gpu_tier.manager.token_blocks import TokenBlockPolicy
from kvcm.gpu_tier.manager.wave_buffer import WaveBuffer
from kvcm.gpu_tier.manager.wave_store import WaveStore
from kvcm.gpu_tier.pools.device_pool import DeviceKVPool
from kvcm.gpu_tier.pools.host_pool import HostKVPool
from kvcm.gpu_tier.pools.transfer import KVTransfer
from kvcm.gpu_tier.runtime import NullRuntime
from kvcm.gpu_tier.types import ForwardBatch, Mode, Selection, Unit

__all__ = ["BlockHits", "HitRate", "exact_selections", "hit_rates", "pq_hits", "simulate", "trace", "wave_hits"]

_WARM_UP_STEPS = 10
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
        chosen.append(
            _next_selection(
                history=chosen[-_RETURN_AFTER[1] :],
                n=n,
                k=k,
                overlap=overlap,
                return_fraction=return_fraction,
                random=random,
            )
        )
    return torch.stack([ids.sort().values for ids in chosen]).int()


def _next_selection(
    history: list[Tensor], n: int, k: int, overlap: float, return_fraction: float, random: torch.Generator
) -> Tensor:
    last = history[-1]
    kept = _sample(last, round(overlap * k), random)
    seen = torch.zeros(n, dtype=torch.bool)
    for ids in history[: -_RETURN_AFTER[0] + 1]:
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
    if len(selections) <= _WARM_UP_STEPS:
        raise ConfigError("selections", len(selections), f"a trace needs more than {_WARM_UP_STEPS} steps")
    policy, batch = _one_request(int(selections.max()) + 1, capacity, loads_hottest=loads_hottest, kernels=kernels)
    cold = policy.counters
    for step, ids in enumerate(selections.int()):
        if step == _WARM_UP_STEPS:
            cold = policy.counters
        selection = Selection(
            unit=Unit.TOKEN,
            unit_tokens=1,
            indices=ids[None, None],
            lengths=(ids >= 0).sum(dtype=torch.int32).reshape(1, 1),
        )
        policy.resolve(0, batch, selection, torch.ones(1, dtype=torch.bool))
    total = policy.counters
    counted = (total.selected - cold.selected, total.hits - cold.hits, total.loads - cold.loads)
    return LruCounters(*counted, promotions=0).hit_rate


def _one_request(n: int, capacity: int, *, loads_hottest: bool, kernels: str) -> tuple[LruDiffPolicy, ForwardBatch]:
    geometry = KVGeometry(
        kind=KVKind.MHA, num_layers=1, num_kv_heads=1, head_dim=1, v_head_dim=1, dtype=KVDtype.F32, page_size=1
    )
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


# Hit rates of the LRU diff buffer on selections that exact attention makes on S1.


@dataclass(frozen=True, slots=True)
class HitRate:
    """The hit rate of one buffer.

    A hit rate belongs to a trace and to a way of counting: here items of a selection that were on the device, over
    items selected, without the first steps, which start from a buffer that holds the prompt's last tokens.

    Attributes:
        selected: items of a selection, k.
        capacity: items of the buffer, C.
        rate: hits over selected items.
    """

    selected: int
    capacity: int
    rate: float

    @property
    def ratio(self) -> float:
        """C / k."""
        return self.capacity / self.selected


def exact_selections(sample: KVSample, k: int) -> Tensor:
    """Return the true top k of each step by the weight summed over the group, ``int32 [T, k]`` in ascending order."""
    mass = attention_weights(sample.q, sample.k, sample.scale).sum(1)
    return mass.topk(k).indices.sort(-1).values.int()


def hit_rates(selections: Tensor, ratios: Sequence[float], *, loads_hottest: bool = False) -> list[HitRate]:
    """Return the hit rate of buffers of `ratios` times a selection of ``selections int32 [T, k]``."""
    k = selections.shape[1]
    capacities = [round(ratio * k) for ratio in ratios]
    return [HitRate(k, c, simulate(selections, c, loads_hottest=loads_hottest)) for c in capacities]


# Hit rates of the block caches of RetroInfer and PQCache on what the algorithms select on a sample.

_NUMBER = KVGeometry(
    kind=KVKind.MHA, num_layers=1, num_kv_heads=1, head_dim=1, v_head_dim=1, dtype=KVDtype.F32, page_size=PAGE
)
_WAVE_BLOCK = 8  # tokens of 2 KB of keys of 128 bf16 numbers
_MORE_HOST = 2


@dataclass(frozen=True, slots=True)
class BlockHits:
    """What a cache did after the first step.

    Attributes:
        clusters: share of the selected clusters that were cached; of tokens for PQCache.
        tokens: share of the selected tokens that were.
        host_share: bytes of misses from the host of a step, over the KV's of the whole context, the mean.
        admitted: items that came into the cache in a step, the mean: clusters, or blocks.
        admitted_share: bytes that came from the host for that, like `host_share`; RetroInfer copies what it admits out
            of the execution buffer.
    """

    clusters: float
    tokens: float
    host_share: float
    admitted: float
    admitted_share: float


def wave_hits(driven: Driven, selections: Sequence[Selection], settings: RetroInferConfig) -> BlockHits:
    """Return what the wave buffer does on selections of clusters.

    The policies themselves run, over one layer and one KV head whose rows hold one number each: the cached set follows
    from which tokens are selected alone. Hit rates leave the first step out, which finds an empty cache.

    Args:
        driven: the algorithm that chose them.
        selections: of each step.
        settings: of the cache; blocks have 8 tokens, as of 128 bf16 numbers.
    """
    n, runtime = len(driven.sample.k), NullRuntime()
    block_bytes = _WAVE_BLOCK * _NUMBER.parts[0].row_bytes
    settings = replace(settings, block_bytes=block_bytes, cpu_threads=1)
    host_bytes = _MORE_HOST * n * _NUMBER.token_bytes
    execution = ExecutionBuffer(
        geometry=_NUMBER, rows=1, tokens_per_row=driven.algorithm.max_execution_tokens, runtime=runtime
    )
    arena = _arena(2 * n)
    policy = WaveBuffer(
        geometry=_NUMBER,
        settings=settings,
        store=WaveStore(_NUMBER, settings, host_bytes, runtime),
        arena=arena,
        execution=execution,
        rows=_Rows(n),
        runtime=runtime,
        max_requests=1,
    )
    policy.hold(0, n)
    for segment in driven.segments:
        policy.store(0, 0, segment)
    _admit(policy, driven, arena)
    _step(policy, driven.step, selections[0])
    cold = policy.counters
    for selection in selections[1:]:
        _step(policy, driven.step, selection)
    warm, steps = policy.counters, len(selections) - 1
    policy.close()
    return BlockHits(
        clusters=(warm.cluster_hits - cold.cluster_hits) / (warm.clusters - cold.clusters),
        tokens=(warm.token_hits - cold.token_hits) / (warm.tokens - cold.tokens),
        host_share=(warm.host_bytes - cold.host_bytes) / steps / (n * _NUMBER.token_bytes),
        admitted=(warm.admissions - cold.admissions) / steps,
        admitted_share=0.0,
    )


def pq_hits(driven: Driven, selections: Sequence[Selection], settings: PQCacheConfig) -> BlockHits:
    """Return what PQCache's block cache does on selections of tokens; bytes from the host are those of misses.

    Args:
        driven: the algorithm that chose them.
        selections: of each step.
        settings: of the cache.
    """
    n, runtime = len(driven.sample.k), NullRuntime()
    arena = _arena(2 * n + settings.cache_tokens)
    host = HostKVPool(_NUMBER, -(-n // PAGE), Layout.LAYER_FIRST, runtime)
    tokens = HostTokens(pool=host, max_requests=1, max_tokens=n, unit_tokens=1, device=runtime.device)
    execution = ExecutionBuffer(
        geometry=_NUMBER, rows=1, tokens_per_row=driven.algorithm.max_execution_tokens, runtime=runtime
    )
    transfer = KVTransfer(host, arena, runtime, SparseConfig("pqcache", page_size=PAGE, algo=settings))
    policy = TokenBlockPolicy(
        settings=settings,
        execution=execution,
        host_tokens=tokens,
        transfer=transfer,
        runtime=runtime,
        max_requests=1,
        max_tokens=n,
    )
    tokens.cover(0, n)
    tokens.locate([0], [n])
    _admit(policy, driven, arena)
    _step(policy, driven.step, selections[0])
    cold = policy.counters
    for selection in selections[1:]:
        _step(policy, driven.step, selection)
    warm, steps = policy.counters, len(selections) - 1
    selected, hits = warm.selected - cold.selected, warm.hits - cold.hits
    admitted = (warm.admissions - cold.admissions) / steps
    return BlockHits(
        clusters=hits / selected,
        tokens=hits / selected,
        host_share=(selected - hits) / steps / n,
        admitted=admitted,
        admitted_share=admitted * (settings.block if settings.cache_unit == "block" else 1) / n,
    )


class _Rows:
    """Reads rows that hold nothing of interest."""

    def __init__(self, n_tokens: int) -> None:
        self._rows = torch.zeros(n_tokens, 1, _NUMBER.parts[0].row_bytes, dtype=torch.uint8)

    def raw(self, layer_id: int, part: int, request: int, start: int, stop: int) -> Tensor:
        """See `RawRows`."""
        return self._rows[start:stop]


def _arena(tokens: int) -> DeviceKVPool:
    return DeviceKVPool(_NUMBER, -(-tokens // PAGE), NullRuntime())


def _admit(policy: BlockPolicy, driven: Driven, arena: DeviceKVPool) -> None:
    n = len(driven.sample.k)
    ring = driven.algorithm.steady_ring(n)
    places = ring.capacity + policy.cache_slots(n)
    assert places <= arena.num_slots, "the arena holds the steady tokens and the cache"
    policy.admit(0, ring, torch.arange(places, dtype=torch.int32))


def _step(policy: BlockPolicy, batch: ForwardBatch, selection: Selection) -> None:
    policy.announce(0, batch, selection)
    plan = policy.resolve(0, batch, selection, torch.ones(1, dtype=torch.bool))
    policy.commit(0, plan)
