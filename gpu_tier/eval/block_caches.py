"""Hit rates of the block caches of RetroInfer and PQCache on what the algorithms select on a sample.

PQCache's policy itself runs, over one layer and one KV head whose rows hold one number each: what is cached follows
from which tokens are selected alone. Of RetroInfer's it is the rule (`gpu_tier.eval.cluster_cache`). Hit rates leave
the first step out, which finds an empty cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gpu_tier.config import PQCacheConfig, RetroInferConfig, SparseConfig
from gpu_tier.eval.cluster_cache import ClusterCache
from gpu_tier.eval.driven import Driven
from gpu_tier.eval.methods import PAGE
from gpu_tier.geometry import KVGeometry, KVKind, Layout
from gpu_tier.manager.execution_buffer import ExecutionBuffer
from gpu_tier.manager.host_tokens import HostTokens
from gpu_tier.manager.policy import BlockPolicy
from gpu_tier.manager.token_blocks import TokenBlockPolicy
from gpu_tier.pools.device_pool import DeviceKVPool
from gpu_tier.pools.host_pool import HostKVPool
from gpu_tier.pools.transfer import KVTransfer
from gpu_tier.rows import KVDtype
from gpu_tier.runtime import NullRuntime
from gpu_tier.types import ForwardBatch, Selection

__all__ = ["BlockHits", "pq_hits", "wave_hits"]

_NUMBER = KVGeometry(KVKind.MHA, 1, 1, 1, 1, KVDtype.F32, PAGE)
_WAVE_BLOCK = 8  # tokens of 2 KB of keys of 128 bf16 numbers


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
    """Return what the wave buffer's rule does on selections of clusters.

    Args:
        driven: the algorithm that chose them.
        selections: of each step.
        settings: of the cache; blocks have 8 tokens, as of 128 bf16 numbers.
    """
    n, sizes = len(driven.sample.k), driven.cluster_sizes.tolist()
    blocks = [-(-size // _WAVE_BLOCK) for size in sizes]
    cache = ClusterCache(blocks, int(settings.cache_ratio * n) // _WAVE_BLOCK, settings.policy)
    chosen = [selection.indices[0, 0, : int(selection.lengths[0, 0])].tolist() for selection in selections]
    found = [cache.step(clusters) for clusters in chosen]
    warm = list(zip(chosen[1:], found[1:], strict=True))
    selected = sum(len(clusters) for clusters, _ in warm)
    tokens = sum(sizes[cluster] for clusters, _ in warm for cluster in clusters)
    hit_tokens = sum(sizes[cluster] for _, (hits, _) in warm for cluster in hits)
    return BlockHits(
        clusters=sum(len(hits) for _, (hits, _) in warm) / selected,
        tokens=hit_tokens / tokens,
        host_share=(tokens - hit_tokens) / len(warm) / n,
        admitted=sum(admitted for _, (_, admitted) in warm) / len(warm),
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
