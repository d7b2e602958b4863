"""Hit rates of the block caches of RetroInfer and PQCache on what the algorithms select on a sample.

The policies themselves run, over one layer and one KV head whose rows hold one number each: what is cached follows from
which tokens are selected alone. Hit rates leave the first step out, which finds an empty cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gpu_tier.config import PQCacheConfig, RetroInferConfig, SparseConfig
from gpu_tier.eval.driven import Driven
from gpu_tier.eval.methods import PAGE
from gpu_tier.geometry import KVGeometry, KVKind, Layout
from gpu_tier.manager.execution_buffer import ExecutionBuffer
from gpu_tier.manager.host_tokens import HostTokens
from gpu_tier.manager.policy import BlockPolicy
from gpu_tier.manager.token_blocks import TokenBlockPolicy
from gpu_tier.manager.wave_buffer import WaveBuffer
from gpu_tier.manager.wave_store import WaveStore
from gpu_tier.pools.device_pool import DeviceKVPool
from gpu_tier.pools.host_pool import HostKVPool
from gpu_tier.pools.transfer import KVTransfer
from gpu_tier.rows import KVDtype
from gpu_tier.runtime import NullRuntime
from gpu_tier.types import ForwardBatch, Selection

__all__ = ["BlockHits", "pq_hits", "wave_hits"]

_NUMBER = KVGeometry(KVKind.MHA, 1, 1, 1, 1, KVDtype.F32, PAGE)
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

    Args:
        driven: the algorithm that chose them.
        selections: of each step.
        settings: of the cache; blocks have 8 tokens, as of 128 bf16 numbers.
    """
    n, runtime = len(driven.sample.k), NullRuntime()
    block_bytes = _WAVE_BLOCK * _NUMBER.parts[0].row_bytes
    settings = replace(settings, block_bytes=block_bytes, cpu_threads=1)
    host_bytes = _MORE_HOST * n * _NUMBER.token_bytes
    execution = ExecutionBuffer(_NUMBER, 1, driven.algorithm.max_execution_tokens, runtime)
    arena = _arena(2 * n)
    policy = WaveBuffer(
        _NUMBER, settings, WaveStore(_NUMBER, settings, host_bytes, runtime), arena, execution, _Rows(n), runtime,
        max_requests=1,
    )  # fmt: skip
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
    tokens = HostTokens(host, 1, n, 1, runtime.device)
    execution = ExecutionBuffer(_NUMBER, 1, driven.algorithm.max_execution_tokens, runtime)
    transfer = KVTransfer(host, arena, runtime, SparseConfig("pqcache", page_size=PAGE, algo=settings))
    policy = TokenBlockPolicy(settings, execution, tokens, transfer, runtime, max_requests=1, max_tokens=n)
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
    assert places <= arena.num_slots, "the arena has room for the steady tokens and the cache"
    policy.admit(0, ring, torch.arange(places, dtype=torch.int32))


def _step(policy: BlockPolicy, batch: ForwardBatch, selection: Selection) -> None:
    policy.announce(0, batch, selection)
    plan = policy.resolve(0, batch, selection, torch.ones(1, dtype=torch.bool))
    policy.commit(0, plan)
