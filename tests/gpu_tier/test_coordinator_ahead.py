"""A host that is far ahead of its device: nothing that it has not seen end is lost, read too early, or read by it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from clock_runtime import ClockRuntime
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from layer_traffic import Shape, Traffic
from thoroughness import examples

import gpu_tier.assembly
from gpu_tier.errors import PoolExhaustedError
from gpu_tier.trackers import RequestState

SHAPE = Shape(layers=2, max_tokens=160)
# Buffers as small as a step allows: what is not promoted has to be loaded soon.
DSA: dict[str, Any] = {
    "algorithm": "dsa",
    "top_k": 16,
    "device_buffer_size": 16,
    "min_sparse_prompt_len": 16,
    "algo": {"index_heads": 4, "index_dim": 16},
}
QUEST: dict[str, Any] = {
    "algorithm": "quest",
    "device_buffer_size": 24,
    "algo": {"page": 4, "token_budget": 24, "skip_layers": 0},
}
CASES = {
    "dsa": DSA,
    "dsa, nothing promoted": {**DSA, "promote_newest": False},
    "quest": QUEST,
    "quest, nothing promoted": {**QUEST, "promote_newest": False},
}


def traffic_of(config: dict[str, Any], runtime: ClockRuntime, monkeypatch: pytest.MonkeyPatch) -> Traffic:
    monkeypatch.setattr(gpu_tier.assembly, "runtime_for", lambda _: runtime)
    return Traffic(SHAPE, config)


def decoded(config: dict[str, Any], steps: int, monkeypatch: pytest.MonkeyPatch, *, is_ahead: bool) -> torch.Tensor:
    runtime = ClockRuntime()
    traffic = traffic_of(config, runtime, monkeypatch)
    requests = [traffic.begin(n, seed=n) for n in (70, 33)]
    traffic.prompt(requests)
    traffic.decode(requests)
    runtime.holds_offloads = is_ahead
    seen = [traffic.coordinator.manager.host_tokens.backed_up(request) for request in requests]
    out = torch.stack([traffic.decode(requests) for _ in range(steps)])
    now = [traffic.coordinator.manager.host_tokens.backed_up(request) for request in requests]
    assert (now == seen) is is_ahead  # what the host may read is what it has seen
    for request in requests:
        traffic.end(request)
    traffic.assert_empty()
    return out


@pytest.mark.parametrize("name", CASES)
def test_tokens_whose_copy_the_host_has_not_seen_end_are_selected_all_the_same(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead = decoded(CASES[name], 40, monkeypatch, is_ahead=True)
    assert torch.equal(ahead, decoded(CASES[name], 40, monkeypatch, is_ahead=False))


@pytest.mark.parametrize("name", CASES)
def test_what_is_loaded_has_been_copied_before_on_every_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = ClockRuntime()
    traffic = traffic_of(CASES[name], runtime, monkeypatch)
    manager, offload, resolve = (
        traffic.coordinator.manager, traffic.coordinator.manager.offload, traffic.coordinator.manager.resolve
    )  # fmt: skip
    copies: list[tuple[int, dict[str, int]]] = []
    loaded = 0

    def copied(requests: Any, starts: Any, stops: Any, slots: Any) -> Any:
        ticket = offload(requests, starts, stops, slots)
        runtime.fence(ticket.done, "probe")  # the clock of its end
        copies.append((stops[0], dict(runtime.record("probe").clock)))  # type: ignore[attr-defined]
        return ticket

    def resolved(*args: Any) -> Any:
        nonlocal loaded
        plan = resolve(*args)
        now = runtime.record("compute").clock  # type: ignore[attr-defined]
        newest = max((stop for stop, clock in copies if now.get("d2h", 0) >= clock.get("d2h", 0)), default=0)
        host = manager.host_tokens
        known = host.host_loc[request]
        assert int((known >= 0).sum()) * host.unit <= max(newest, host.backed_up(request))
        loaded += int(plan.misses.count.sum())
        return plan

    store = manager.transfer.store

    def stored(*args: Any, **kwargs: Any) -> None:
        runtime.mark("store")
        store(*args, **kwargs)

    for owner, method, ours in (
        (manager, "offload", copied), (manager, "resolve", resolved), (manager.transfer, "store", stored)
    ):  # fmt: skip
        monkeypatch.setattr(owner, method, ours)
    request = traffic.begin(70, seed=1)
    traffic.prompt([request])
    traffic.decode([request])
    runtime.holds_offloads = True
    for _ in range(20):
        traffic.decode([request])
    assert loaded > 20


def test_a_streamed_step_reads_the_last_token_only_after_its_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = ClockRuntime()
    monkeypatch.setattr(gpu_tier.assembly, "runtime_for", lambda _: runtime)
    traffic = Traffic(SHAPE, {"algorithm": "full_offload", "algo": {"chunk_tokens": 24}})
    manager, stream, step = traffic.coordinator.manager, traffic.coordinator._stream, 0
    assert stream is not None
    load, store = stream._transfer.load, manager.transfer.store

    def loads(*args: Any, **kwargs: Any) -> None:
        runtime.mark("load", step)
        load(*args, **kwargs)

    def stores(*args: Any, **kwargs: Any) -> None:
        runtime.mark("store", step)
        store(*args, **kwargs)

    monkeypatch.setattr(stream._transfer, "load", loads)
    monkeypatch.setattr(manager.transfer, "store", stores)
    request = traffic.begin(50, seed=1)
    traffic.prompt([request])
    for number in range(1, 5):
        step = number
        traffic.decode([request])
    for step in range(1, 4):
        copied = runtime.find("store", step)
        later = [mark for mark in runtime.marks if mark.label == ("load", step + 1)]
        assert later
        assert all(copied.happened_before(mark) for mark in later)


LIVES = CASES | {
    "full_offload": {"algorithm": "full_offload", "algo": {"chunk_tokens": 24}},
    "snapkv": {"algorithm": "snapkv", "algo": {"w_obs": 4, "cap": 16, "kernel": 3}},
    "window": {**QUEST, "prefill_window_tokens": 20},
}


@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), name=st.sampled_from(sorted(LIVES)))
def test_any_order_of_requests_whenever_copies_end(
    data: st.DataObject, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step checks what it reads; some copies end late, others only when somebody waits for them."""
    runtime = ClockRuntime()
    runtime.holds_offloads = True
    traffic = traffic_of(LIVES[name], runtime, monkeypatch)
    trackers = traffic.coordinator.trackers
    for number in range(data.draw(st.integers(4, 30))):
        live = list(traffic.sequences)
        prompts = [r for r in live if trackers[r].seq_len < trackers[r].n_prompt]
        ready = [r for r in live if r not in prompts and trackers[r].seq_len < 150]
        verbs = ["begin"] * (len(live) < 3) + ["prompt"] * bool(prompts) + ["decode"] * 3 * bool(ready) + ["let go"]
        verb = data.draw(st.sampled_from([*verbs, "end"] if live else verbs))
        try:
            if verb == "begin":
                traffic.begin(data.draw(st.integers(1, 100)), seed=number + 1)
            elif verb == "prompt":
                traffic.prompt([data.draw(st.sampled_from(prompts))], data.draw(st.integers(5, 60)))
            elif verb == "decode":
                traffic.decode(data.draw(st.lists(st.sampled_from(ready), min_size=1, unique=True)))
            elif verb == "end":
                traffic.end(data.draw(st.sampled_from(live)))
            else:
                runtime.let_go()
        except PoolExhaustedError:
            assert len(live) > 1
    for request in list(traffic.sequences):
        traffic.end(request)
    traffic.assert_empty()


def test_a_prompt_of_which_a_part_is_on_the_host_alone_is_never_decoded_densely(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its last copy is still on its way when the prompt ends: it waits, since its first pages were given up."""
    runtime = ClockRuntime()
    traffic = traffic_of(LIVES["window"], runtime, monkeypatch)
    request = traffic.begin(60, seed=1)
    runtime.holds_offloads = True
    traffic.prompt([request], 7)
    traffic.decode([request])
    assert traffic.coordinator.trackers[request].state is RequestState.SPARSE
