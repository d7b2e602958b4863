"""The life of a request: what is held in each state, and that nothing is held after the end, however that comes."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import retrieval_cases
import torch
from clock_runtime import ClockRuntime
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_traffic import Shape, Traffic
from thoroughness import examples

import gpu_tier.assembly
from gpu_tier.errors import ConfigError, PoolExhaustedError, StateError
from gpu_tier.trackers import RequestState

ALGORITHMS: dict[str, dict[str, Any]] = {
    "full": {"algorithm": "full"},
    "full_offload": {"algorithm": "full_offload", "algo": {"chunk_tokens": 24}},
    "oracle": {"algorithm": "oracle", "algo": {"k": 16}},
    "quest": {"algorithm": "quest", "algo": {"page": 4, "token_budget": 24, "skip_layers": 1}},
    "dsa": {
        "algorithm": "dsa",
        "top_k": 16,
        "min_sparse_prompt_len": 16,
        "algo": {"index_heads": 4, "index_dim": 16},
    },
    "snapkv": {"algorithm": "snapkv", "algo": {"w_obs": 4, "cap": 16, "kernel": 3}},
    "snapkv retrievable": {
        "algorithm": "snapkv",
        "algo": {"w_obs": 4, "cap": 16, "kernel": 3, "mode": "retrievable", "reselect_every": 5},
    },
    **retrieval_cases.CASES,
}


def in_state(state: RequestState, name: str, runtime: ClockRuntime) -> tuple[Traffic, int]:
    """Return a request in a state, beside one that decodes."""
    traffic = Traffic(Shape(), ALGORITHMS[name])
    other = traffic.begin(50, seed=9)
    traffic.prompt([other])
    request = traffic.begin(8 if state is RequestState.DENSE else 70, seed=1)
    if state is RequestState.PREFILL:
        traffic.prefill([request], [33])
    if state in (RequestState.STAGING, RequestState.SPARSE, RequestState.DENSE):
        runtime.holds_offloads = state is RequestState.STAGING
        traffic.prompt([request], chunk=33)
        traffic.decode([request])
    return traffic, request


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ("registered", "aborted"),
        ("prefill", "retracted"),
        ("staging", "aborted"),
        ("sparse", "finished"),
        ("dense", "retracted"),
    ],
)
def test_an_end_in_any_state_leaves_nothing_behind(
    name: str, state: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = ClockRuntime()
    monkeypatch.setattr(gpu_tier.assembly, "runtime_for", lambda _: runtime)
    traffic, request = in_state(RequestState(state), name, runtime)
    others = [r for r in traffic.sequences if r != request]
    found = traffic.coordinator.trackers[request].state
    expects_other = {  # algorithms that have no such state
        ("full", "sparse"): RequestState.DENSE,
        ("full", "staging"): RequestState.DENSE,
        ("full_offload", "dense"): RequestState.SPARSE,
        ("snapkv", "staging"): RequestState.SPARSE,
        ("retroinfer", "staging"): RequestState.SPARSE,
        ("retroinfer gpu control", "staging"): RequestState.SPARSE,
        ("retroinfer device", "staging"): RequestState.SPARSE,
        ("pqcache device", "staging"): RequestState.SPARSE,
    }
    assert found is expects_other.get((name, state), RequestState(state))
    traffic.end(request, reason)
    traffic.end(request, reason)  # the second time nothing happens
    traffic.decode(others)  # and others go on
    traffic.end(others[0])
    traffic.assert_empty()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_row_that_is_used_again_shows_nothing_of_its_former_request(name: str) -> None:
    def outputs(traffic: Traffic) -> torch.Tensor:
        request = traffic.begin(45, seed=7)
        traffic.prompt([request], chunk=20)
        out = torch.stack([traffic.decode([request]) for _ in range(8)])
        traffic.end(request)
        return out

    fresh = outputs(Traffic(Shape(), ALGORITHMS[name]))
    used = Traffic(Shape(), ALGORITHMS[name])
    former = used.begin(90, seed=3)
    used.prompt([former])
    for _ in range(6):
        used.decode([former])
    used.end(former)
    torch.testing.assert_close(outputs(used), fresh, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_request_without_room_holds_nothing(name: str) -> None:
    traffic = Traffic(Shape(device_pages=30, max_tokens=512), {**ALGORITHMS[name], "host_to_device_ratio": 1.0})
    with pytest.raises(PoolExhaustedError, match=r"pages left, \d+ were asked for; raise"):
        traffic.begin(400, seed=1)
    traffic.assert_empty()


def test_a_decode_without_room_loses_nothing_and_goes_on_after_a_retraction() -> None:
    traffic = Traffic(Shape(device_pages=8), {"algorithm": "full"})
    requests = [traffic.begin(n, seed=n) for n in (30, 31)]
    traffic.prompt(requests)
    traffic.decode(requests)
    with pytest.raises(PoolExhaustedError, match="device pool has 0 of 8 pages left"):
        traffic.decode(requests)
    traffic.end(requests[1], "retracted")
    out = traffic.decode(requests[:1])
    torch.testing.assert_close(out[:, 0], traffic.exact(requests[0], 31), rtol=1e-4, atol=1e-4)


def test_a_dense_request_goes_on_densely_while_there_is_no_room_to_stage_it() -> None:
    traffic = Traffic(Shape(), {**ALGORITHMS["quest"], "host_bytes": Shape().geometry.page_bytes * 2})
    request = traffic.begin(10, seed=1)
    traffic.prompt([request])
    for step in range(60):
        out = traffic.decode([request])
        torch.testing.assert_close(out[:, 0], traffic.exact(request, 10 + step), rtol=1e-4, atol=1e-4)
    assert traffic.coordinator.trackers[request].state is RequestState.DENSE


def test_a_dense_request_becomes_sparse_when_it_outgrows_the_buffer() -> None:
    traffic = Traffic(Shape(), ALGORITHMS["quest"])
    request = traffic.begin(10, seed=1)
    traffic.prompt([request])
    tracker = traffic.coordinator.trackers[request]
    while tracker.state is RequestState.DENSE:
        traffic.decode([request])
    assert tracker.seq_len - 1 == traffic.config.device_buffer_size + 1
    assert not traffic.coordinator.manager.dense.blocks(request)


def test_hooks_out_of_order_are_refused() -> None:
    traffic = Traffic(Shape(), {"algorithm": "full"})
    c = traffic.coordinator
    request = traffic.begin(20, seed=1)
    with pytest.raises(StateError, match="is registered"):
        c.plan_decode([request])
    with pytest.raises(StateError, match="is registered"):
        c.prompt_finished(request)
    with pytest.raises(ConfigError, match="extend_lens=21"):
        c.plan_prefill([request], [21])
    traffic.prefill([request], [10])
    with pytest.raises(StateError, match="10 of its prompt's 20"):
        c.prompt_finished(request)
    batch = c.plan_prefill([request], [10])
    with pytest.raises(StateError, match="forward_begin"):
        c.forward_end(batch)
    with pytest.raises(StateError, match="not known"):
        c.plan_decode([3])
    with pytest.raises(ConfigError, match="n_prompt=300"):
        c.on_request_begin(300)


def test_a_request_cannot_grow_beyond_the_most_tokens() -> None:
    traffic = Traffic(Shape(max_tokens=32), {"algorithm": "full"})
    request = traffic.begin(31, seed=1)
    traffic.prompt([request])
    traffic.decode([request])
    with pytest.raises(ConfigError, match="max_tokens=32"):
        traffic.decode([request])


def test_only_exact_tokens_count_as_publishable() -> None:
    for name, exact in (("full", 36), ("full_offload", 36), ("quest", 30)):
        traffic = Traffic(Shape(), {**ALGORITHMS[name], "min_sparse_prompt_len": 1})
        request = traffic.begin(30, seed=1)
        traffic.prompt([request], chunk=16)
        for _ in range(6):
            traffic.decode([request])
        assert traffic.coordinator.trackers[request].exact_tokens == exact, name


@settings(max_examples=examples(120), deadline=None)
@given(data=st.data(), name=st.sampled_from(sorted(ALGORITHMS)))
def test_any_order_of_requests_leaves_nothing_behind(data: st.DataObject, name: str) -> None:
    traffic = Traffic(Shape(layers=2, max_tokens=128), ALGORITHMS[name])
    c = traffic.coordinator
    for number in range(data.draw(st.integers(1, 14))):
        live = list(traffic.sequences)
        prompts = [r for r in live if c.trackers[r].seq_len < c.trackers[r].n_prompt]
        ready = [r for r in live if r not in prompts]
        verbs = ["begin"] + ["prefill"] * bool(prompts) + ["decode"] * bool(ready) + ["end"] * bool(live)
        verb = data.draw(st.sampled_from(verbs))
        if verb == "begin":
            try:
                traffic.begin(data.draw(st.integers(1, 100)), seed=number + 1)
            except PoolExhaustedError:
                assert live
        elif verb == "prefill":
            chosen = data.draw(st.lists(st.sampled_from(prompts), min_size=1, unique=True))
            left = [c.trackers[r].n_prompt - c.trackers[r].seq_len for r in chosen]
            traffic.prefill(chosen, [data.draw(st.integers(1, n)) for n in left])
            for r in chosen:
                if c.trackers[r].seq_len == c.trackers[r].n_prompt:
                    c.prompt_finished(r)
        elif verb == "decode":
            for _ in range(data.draw(st.integers(1, 3))):
                traffic.decode(data.draw(st.permutations(ready)), pad_to=data.draw(st.integers(0, 6)))
        else:
            traffic.end(data.draw(st.sampled_from(live)), data.draw(st.sampled_from(["finished", "aborted"])))
    for request in list(traffic.sequences):
        traffic.end(request)
    traffic.assert_empty()


def test_an_algorithm_without_a_fixed_set_says_so() -> None:
    traffic = Traffic(Shape(), ALGORITHMS["quest"])
    with pytest.raises(StateError, match="Quest keeps no fixed set"):
        traffic.coordinator.algorithm.static_items(0, 0)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_coordinator_gives_back_host_memory_and_threads(name: str) -> None:
    traffic = Traffic(Shape(), ALGORITHMS[name])
    request = traffic.begin(50, seed=1)
    traffic.prompt([request])
    traffic.decode([request])
    traffic.end(request)
    threads = threading.active_count()
    traffic.coordinator.close()
    traffic.coordinator.close()
    blocks = traffic.coordinator.manager.blocks
    assert not traffic.coordinator.manager.host.data.numel()
    assert blocks is None or blocks.store is None or not blocks.store.data.numel()
    assert threading.active_count() < threads or name != "pqcache"
