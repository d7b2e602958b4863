"""Hit rates of block caches on what the algorithms select are those of a plain model of the same rules."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from cluster_cache import ClusterCache

from gpu_tier.config import PQCacheConfig, RetroInferConfig, SparseConfig
from gpu_tier.eval.block_caches import pq_hits, wave_hits
from gpu_tier.eval.driven import Driven
from gpu_tier.eval.methods import OBSERVED, pq_top, wave_share
from gpu_tier.eval.synth import Regime, kv
from gpu_tier.types import Selection

TOKENS, BLOCK = 8192, 8
WAVE = wave_share(0.018)
PQ = pq_top(4, 8, 819)


@cache
def chosen(algorithm: str) -> tuple[Driven, list[Selection]]:
    algo = WAVE if algorithm == "retroinfer" else PQ
    driven = Driven(SparseConfig(algorithm, algo=algo), kv(TOKENS, 128, 24, 4, Regime.MID, 0, OBSERVED))
    return driven, driven.selections()


def ids(selection: Selection) -> list[int]:
    return selection.indices[0, 0, : int(selection.lengths[0, 0])].tolist()


def plain_rate(capacity: int, policy: str) -> float:
    """Return the hit rate of clusters in a plain cache of so many blocks, the first step left out."""
    driven, selections = chosen("retroinfer")
    cache = ClusterCache([-(-size // BLOCK) for size in driven.cluster_sizes.tolist()], capacity, policy)
    hits = [len(cache.step(ids(selection))[0]) for selection in selections]
    return sum(hits[1:]) / sum(len(ids(selection)) for selection in selections[1:])


@pytest.mark.parametrize("ratio", [0.05])
@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("policy", ["lru", "lfu", "fifo"])
def test_the_wave_buffer_hits_as_a_plain_cache_of_clusters(ratio: float, is_async: bool, policy: str) -> None:
    settings = replace(WAVE, cache_ratio=ratio, async_update=is_async, policy=policy)
    found = wave_hits(*chosen("retroinfer"), settings)
    assert found.clusters == plain_rate(int(ratio * TOKENS) // BLOCK, policy)
    assert 0 < found.host_share < 0.02


def test_without_a_cache_all_comes_from_the_host() -> None:
    wave = wave_hits(*chosen("retroinfer"), replace(WAVE, cache_ratio=0.0))
    pq = pq_hits(*chosen("pqcache"), replace(PQ, cache_tokens=0))
    assert (wave.clusters, wave.tokens, pq.tokens) == (0, 0, 0)
    sizes = chosen("retroinfer")[0].cluster_sizes
    retrieved = [int(sizes[ids(selection)].sum()) for selection in chosen("retroinfer")[1][1:]]
    assert wave.host_share == pytest.approx(sum(retrieved) / len(retrieved) / TOKENS)
    assert pq.host_share == pytest.approx(819 / TOKENS)


def test_a_cache_of_everything_loads_everything_once() -> None:
    driven, selections = chosen("pqcache")
    found = pq_hits(driven, selections, replace(PQ, cache_tokens=TOKENS, k_cache=TOKENS // 128))
    missed, seen = 0, set[int]()
    for step, selection in enumerate(selections):
        blocks = [(token - PQ.init) // 128 for token in ids(selection)]
        missed += sum(block not in seen for block in blocks) if step else 0
        # Blocks that reach into the local window are never admitted.
        seen |= {block for block in blocks if PQ.init + (block + 1) * 128 <= TOKENS - 64}
    assert found.host_share == pytest.approx(missed / (len(selections) - 1) / TOKENS)


@pytest.mark.parametrize(
    ("less", "more"),
    [(replace(PQ, cache_tokens=1024, k_cache=8), PQ), (replace(PQ, k_cache=2), PQ)],
    ids=["places", "wanted"],
)
def test_more_of_pqcaches_cache_hits_more(less: PQCacheConfig, more: PQCacheConfig) -> None:
    few, many = (pq_hits(*chosen("pqcache"), settings) for settings in (less, more))
    assert few.tokens < many.tokens
    assert few.host_share > many.host_share


def test_what_pqcache_admits_comes_from_the_host_and_what_retroinfer_admits_does_not() -> None:
    assert pq_hits(*chosen("pqcache"), PQ).admitted_share > 0
    settings: RetroInferConfig = WAVE
    wave = wave_hits(*chosen("retroinfer"), settings)
    assert wave.admitted > 0
    assert wave.admitted_share == 0
