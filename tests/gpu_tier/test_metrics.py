"""Figures say what traffic did."""

from __future__ import annotations

import pytest
from drawn_tokens import DrawnTokens
from layer_traffic import Shape, Traffic
from prometheus_client.parser import text_string_to_metric_families

from gpu_tier.algorithms import registry
from gpu_tier.manager.prefixes import PrefixCounters
from gpu_tier.metrics import figures, prometheus_text


def values(traffic: Traffic) -> dict[tuple[str, ...], float]:
    return {(f.name, *(v for _, v in f.labels)): f.value for f in figures(traffic.coordinator)}


def test_figures_follow_the_traffic() -> None:
    traffic = Traffic(Shape(), {"algorithm": "quest", "algo": {"page": 4, "token_budget": 24, "skip_layers": 0}})
    start = values(traffic)
    assert not any(value for (name, *_), value in start.items() if name.endswith("_total"))
    requests = [traffic.begin(n, seed=n) for n in (8, 70)]
    assert values(traffic)["kvcm_gpu_tier_requests", "registered"] == 2
    traffic.prompt(requests)
    for _ in range(10):
        traffic.decode(requests)
    now = values(traffic)
    assert now["kvcm_gpu_tier_requests", "sparse"] == now["kvcm_gpu_tier_requests", "dense"] == 1
    assert now["kvcm_gpu_tier_decoded_tokens_total", "sparse"] == 10
    assert now["kvcm_gpu_tier_decoded_tokens_total", "dense"] == 10
    selected, hits, loads = (now[f"kvcm_gpu_tier_{name}_items_total",] for name in ("selected", "hits", "loads"))
    assert selected == hits + loads
    assert selected == 10 * 3 * 6  # steps, layers, pages of the budget
    token = traffic.shape.geometry.token_bytes
    assert now["kvcm_gpu_tier_transferred_bytes_total", "d2h"] == 80 * token  # the sparse request: prompt and decoded
    # Of the 17 full pages the 12 latest fill the buffer from the device; only misses come from the host.
    assert now["kvcm_gpu_tier_transferred_bytes_total", "h2d"] == loads * 4 * token / 3
    assert now["kvcm_gpu_tier_pages", "host", "used"] == 10
    for request in requests:
        traffic.end(request)
    end = values(traffic)
    assert end["kvcm_gpu_tier_pages", "device", "used"] == end["kvcm_gpu_tier_pages", "host", "used"] == 0
    assert end["kvcm_gpu_tier_representation_bytes",] == 0


def test_figures_of_a_block_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.ALGORITHMS, "pqcache", DrawnTokens)
    algo = {"init": 4, "token_budget": 16, "cache_tokens": 16, "block": 4, "k_cache": 3}
    traffic = Traffic(Shape(), {"algorithm": "pqcache", "min_sparse_prompt_len": 24, "algo": algo})
    request = traffic.begin(70, seed=1)
    traffic.prompt([request])
    start = values(traffic)
    for _ in range(10):
        traffic.decode([request])
    now, blocks = values(traffic), traffic.coordinator.manager.blocks
    assert blocks is not None
    names = ("selected", "hits", "loads", "admitted", "evicted")
    selected, hits, loads, admitted, evicted = (now[f"kvcm_gpu_tier_{name}_items_total",] for name in names)
    assert selected == hits + loads == 10 * 3 * 2 * 8  # steps, layers, heads, tokens
    assert min(hits, evicted) > 0
    assert admitted >= evicted
    row = traffic.shape.geometry.token_layer_bytes / 2
    way = ("kvcm_gpu_tier_transferred_bytes_total", "h2d")
    assert now[way] - start[way] == loads * row + admitted * 4 * 2 * row
    assert now["kvcm_gpu_tier_pool_bytes", "execution"] == blocks.execution.nbytes
    assert now["kvcm_gpu_tier_pages", "clusters", "total"] == 0


def test_the_text_is_prometheus_format() -> None:
    traffic = Traffic(Shape(), {"algorithm": "full"})
    for prefixes in (None, PrefixCounters()):
        families = list(text_string_to_metric_families(prometheus_text(traffic.coordinator, prefixes)))
        assert len({family.name for family in families}) == len(families) > 8
        assert sum(len(family.samples) for family in families) == len(figures(traffic.coordinator, prefixes))


def test_prefixes_are_counted() -> None:
    traffic = Traffic(Shape(), {"algorithm": "full"})
    counters = PrefixCounters(*range(1, 8))
    found = {f.name: 0.0 for f in figures(traffic.coordinator, counters) if f not in figures(traffic.coordinator)}
    for figure in figures(traffic.coordinator, counters):
        if figure.name in found:
            found[figure.name] += figure.value
    assert found == {
        "kvcm_gpu_tier_prefix_tokens_total": 3,
        "kvcm_gpu_tier_short_loads_total": 3,
        "kvcm_gpu_tier_sidecar_miss_tokens_total": 4,
        "kvcm_gpu_tier_published_pages_total": 5 + 6 + 7,
    }
