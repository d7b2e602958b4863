"""Which residency the settings name, how host memory is divided, and figures of what traffic did."""

from __future__ import annotations

from typing import Any

import pytest
from drawn_tokens import DrawnTokens
from layer_traffic import Shape, Traffic
from prometheus_client.parser import text_string_to_metric_families
from retrieval_cases import PQ, WAVE

from kvcm.gpu_tier.algorithms import registry
from kvcm.gpu_tier.assembly import build, host_split, resolved
from kvcm.gpu_tier.config import SparseConfig
from kvcm.gpu_tier.errors import ConfigError
from kvcm.gpu_tier.manager.prefixes import PrefixCounters
from kvcm.gpu_tier.manager.residency import DeviceResidentPolicy
from kvcm.gpu_tier.manager.token_blocks import TokenBlockPolicy
from kvcm.gpu_tier.metrics import figures, prometheus_text

SHAPE = Shape(max_requests=2, max_tokens=64)


PAGE_BYTES = SHAPE.geometry.page_bytes


def config_of(algorithm: str, **settings: Any) -> SparseConfig:
    algo = {"pqcache": PQ, "retroinfer": WAVE}.get(algorithm, {})
    algo = {**algo, **settings.pop("algo", {})}
    return SparseConfig.parse({"algorithm": algorithm, "page_size": SHAPE.page, "algo": algo, **settings})


def policy_of(config: SparseConfig, device_pages: int) -> object:
    coordinator = build(
        config, SHAPE.geometry, num_q_heads=SHAPE.q_heads, sm_scale=1.0, device_pages=device_pages,
        max_requests=SHAPE.max_requests, max_tokens=SHAPE.max_tokens,
    )  # fmt: skip
    assert (coordinator.manager.blocks is not None) is (coordinator.config.residency == "blocks")
    return coordinator.manager.policy


def test_auto_is_the_device_if_all_that_requests_may_need_fits() -> None:
    config = config_of("pqcache", residency="auto")
    assert isinstance(policy_of(config, 16), DeviceResidentPolicy)
    assert isinstance(policy_of(config, 15), TokenBlockPolicy)


REFUSED = [
    ("quest", {"residency": "blocks"}, "only retroinfer and pqcache"),
    ("dsa", {"residency": "auto"}, "only retroinfer and pqcache"),
    ("pqcache", {"residency": "static"}, "only snapkv"),
    ("pqcache", {"residency": "stream"}, "full_offload"),
    ("retroinfer", {"residency": "lru"}, "clusters differ in size"),
    ("retroinfer", {"residency": "blocks", "algo": {"mode": "gpu_only"}}, "mode='gpu_only' is residency device"),
]


@pytest.mark.parametrize(("algorithm", "settings", "message"), REFUSED)
def test_combinations_that_make_no_sense_are_refused(algorithm: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        resolved(config_of(algorithm, **settings), 64, 64)
    assert caught.value.field == "residency"


def test_the_mode_of_retroinfer_is_a_residency() -> None:
    for mode, expected in (("offload", "blocks"), ("gpu_only", "device"), ("auto", "blocks")):
        assert resolved(config_of("retroinfer", algo={"mode": mode}), 63, 64).residency == expected
    assert resolved(config_of("retroinfer", algo={"mode": "auto"}), 64, 64).residency == "device"


def test_host_memory_of_clusters_is_in_cluster_order() -> None:
    config = config_of("retroinfer", host_bytes=20 * PAGE_BYTES)
    split = host_split(config, SHAPE.geometry, 0, publishes=False)
    assert (split.pages, split.store_bytes, split.tokens) == (1, 19 * PAGE_BYTES, 20 * SHAPE.page)
    for changes, publishes in (({}, True), ({"prefill_window_tokens": 16}, False)):
        split = host_split(config.replaced(**changes), SHAPE.geometry, 0, publishes=publishes)
        assert (split.pages, split.store_bytes) == (10, 10 * PAGE_BYTES)


@pytest.mark.parametrize("settings", [{"algo": {"mode": "gpu_only"}}, {}])
def test_host_memory_of_others_is_in_token_order(settings: dict[str, Any]) -> None:
    algorithm = "retroinfer" if settings else "pqcache"
    split = host_split(config_of(algorithm, host_to_device_ratio=0.5, **settings), SHAPE.geometry, 40 * PAGE_BYTES,
                       publishes=False)  # fmt: skip
    assert (split.pages, split.store_bytes) == (20, 0)


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
    expected = {"prefix_tokens": 3, "short_loads": 3, "sidecar_miss_tokens": 4, "published_pages": 5 + 6 + 7}
    assert found == {f"kvcm_gpu_tier_{name}_total": count for name, count in expected.items()}
