"""The ordering rules O1 to O4 where layers share an execution buffer: what streams and events guarantee."""

from __future__ import annotations

from typing import Any

import pytest
from clock_runtime import ClockRuntime
from drawn_tokens import DrawnTokens
from marked_traffic import MarkedTraffic
from retrieval_cases import BLOCKS

from gpu_tier.algorithms import registry
from gpu_tier.trackers import RequestState

STEPS, LAYERS = 8, range(3)
ALGO = {"init": 4, "token_budget": 12, "local_ratio": 0.25, "cache_tokens": 16, "block": 4, "k_cache": 3}


def decoded(monkeypatch: pytest.MonkeyPatch, **algo: Any) -> tuple[ClockRuntime, MarkedTraffic]:
    """Decode with tokens that are drawn, through the cache of token blocks."""
    monkeypatch.setitem(registry.ALGORITHMS, "pqcache", DrawnTokens)
    return run({"algorithm": "pqcache", "min_sparse_prompt_len": 24, "algo": {**ALGO, **algo}}, monkeypatch)


def run(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> tuple[ClockRuntime, MarkedTraffic]:
    runtime = ClockRuntime()
    traffic = MarkedTraffic(runtime, config, monkeypatch)
    requests = [traffic.begin(n, seed=n) for n in (70, 9)]
    traffic.prompt(requests)
    for _ in range(STEPS):
        traffic.decode(requests)
    return runtime, traffic


def test_o1_a_steady_place_is_written_again_only_after_its_tokens_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    for ratio, local in ((0.25, 3), (0.17, 2), (0.09, 1)):
        runtime, traffic = decoded(monkeypatch, local_ratio=ratio)
        blocks = traffic.coordinator.manager.blocks
        assert blocks is not None
        assert blocks.shortest_ring([0]) == local
        for step in range(1, STEPS - local + 1):
            store = runtime.find("store", step, 0)
            assert store.stream == "d2h"
            assert all(store.happened_before(runtime.find("write", step + local, layer)) for layer in LAYERS)
            assert all(store.happened_before(runtime.find("gather", step + local, layer)) for layer in LAYERS)


def test_o1_a_request_stays_dense_until_its_prompt_is_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.ALGORITHMS, "pqcache", DrawnTokens)
    runtime = ClockRuntime()
    runtime.holds_offloads = True
    traffic = MarkedTraffic(runtime, {"algorithm": "pqcache", "min_sparse_prompt_len": 24, "algo": ALGO}, monkeypatch)
    request = traffic.begin(70, seed=1)
    traffic.prompt([request])
    for _ in range(3):
        traffic.decode([request])
        assert traffic.coordinator.trackers[request].state is RequestState.STAGING
    runtime.let_go()
    traffic.decode([request])
    assert traffic.coordinator.trackers[request].state is RequestState.SPARSE
    assert not traffic.coordinator.manager.dense.blocks(request)


@pytest.mark.parametrize("name", BLOCKS)
def test_o2_a_layers_tokens_are_gathered_before_its_attention(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, _ = run(BLOCKS[name], monkeypatch)
    for step in range(1, STEPS + 1):
        for layer in LAYERS:
            gather, write = runtime.find("gather", step, layer), runtime.find("write", step, layer)
            assert gather.stream == "h2d"
            assert write.happened_before(gather)
            assert gather.happened_before(runtime.find("attend", step, layer))


@pytest.mark.parametrize("name", BLOCKS)
def test_o3_o4_the_next_layers_tokens_wait_for_what_reads_this_layers(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime, _ = run(BLOCKS[name], monkeypatch)
    for step in range(1, STEPS + 1):
        for layer in LAYERS:
            following = ("gather", step, layer + 1) if layer < LAYERS[-1] else ("gather", step + 1, LAYERS[0])
            attend, commit = runtime.find("attend", step, layer), runtime.find("commit", step, layer)
            assert attend.happened_before(commit)
            if step < STEPS or layer < LAYERS[-1]:
                assert commit.happened_before(runtime.find(*following))


def test_o4_admissions_come_after_what_reads_their_places_and_before_the_layers_next_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime, _ = decoded(monkeypatch)
    for step in range(1, STEPS):
        for layer in LAYERS:
            load = runtime.find("load", step, layer)
            assert runtime.find("gather", step, layer).happened_before(load)
            assert load.happened_before(runtime.find("gather", step + 1, layer))
            if layer < LAYERS[-1]:  # beside the next layers: the marks can tell
                assert not load.happened_before(runtime.find("attend", step, layer + 1))


@pytest.mark.parametrize("name", [name for name in BLOCKS if name.startswith("retroinfer")])
def test_estimates_are_computed_beside_the_copies(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = ClockRuntime()
    traffic = MarkedTraffic(runtime, BLOCKS[name], monkeypatch)
    estimate = traffic.coordinator.algorithm.estimate

    def marked(*args: Any) -> Any:
        runtime.mark("estimate", traffic.step, traffic.layer)
        return estimate(*args)

    monkeypatch.setattr(traffic.coordinator.algorithm, "estimate", marked)
    requests = [traffic.begin(n, seed=n) for n in (70, 60)]
    traffic.prompt(requests)
    for _ in range(STEPS):
        traffic.decode(requests)
    for step in range(1, STEPS + 1):
        for layer in LAYERS:
            made, gather = runtime.find("estimate", step, layer), runtime.find("gather", step, layer)
            assert not made.happened_before(gather)
            assert not gather.happened_before(made)
