"""The ordering rules O1 to O4: what streams and events guarantee, also on a host far ahead of its device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from drawn_tokens import DrawnTokens
from layer_traffic import ClockRuntime, MarkedTraffic, Shape, Traffic
from retrieval_cases import BLOCKS

import kvcm.gpu_tier.assembly
from kvcm.gpu_tier.algorithms import registry
from kvcm.gpu_tier.manager import stream
from kvcm.gpu_tier.pools.transfer import KVTransfer
from kvcm.gpu_tier.request_lifecycle import RequestState

LRU: dict[str, dict[str, Any]] = {
    "oracle": {"algorithm": "oracle", "algo": {"k": 16}, "device_buffer_size": 20},
    "quest": {"algorithm": "quest", "algo": {"page": 4, "token_budget": 24, "skip_layers": 0}},
}


LRU["dsa"] = {
    "algorithm": "dsa",
    "top_k": 16,
    "device_buffer_size": 20,
    "min_sparse_prompt_len": 16,
    "algo": {"index_heads": 4, "index_dim": 16},
}


STEPS = 6


def decoded(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> tuple[ClockRuntime, MarkedTraffic]:
    runtime = ClockRuntime()
    traffic = MarkedTraffic(runtime, config, monkeypatch)
    request = traffic.begin(70, seed=1)
    traffic.prompt([request])
    for _ in range(STEPS):
        traffic.decode([request])
    return runtime, traffic


@pytest.mark.parametrize("name", ["quest", "dsa"])  # the oracle reads all keys, and waits for their copies
def test_o1_what_is_not_on_the_host_is_never_evicted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = ClockRuntime()
    traffic = MarkedTraffic(runtime, LRU[name], monkeypatch)
    manager, resolve = traffic.coordinator.manager, traffic.coordinator.manager.resolve
    evicted: list[int] = []

    def watched(*args: Any) -> Any:
        plan = resolve(*args)
        assert plan.evicted_items is not None
        items = plan.evicted_items[plan.evicted_items >= 0].tolist()
        unit = traffic.coordinator.algorithm.unit_tokens
        assert all((item + 1) * unit <= manager.host_tokens.backed_up(request) for item in items)
        evicted.extend(items)
        return plan

    monkeypatch.setattr(manager, "resolve", watched)
    request = traffic.begin(70, seed=1)
    traffic.prompt([request])
    traffic.decode([request])
    runtime.holds_offloads = True
    held_from = manager.host_tokens.backed_up(request)
    for _ in range(4):
        traffic.decode([request])
    assert manager.host_tokens.backed_up(request) <= held_from + 1
    runtime.let_go()
    traffic.decode([request])
    assert manager.host_tokens.backed_up(request) >= held_from + 4
    assert evicted  # otherwise nothing was tested


def test_o1_a_request_stays_dense_until_its_prompt_is_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = ClockRuntime()
    runtime.holds_offloads = True
    traffic = MarkedTraffic(runtime, LRU["oracle"], monkeypatch)
    request = traffic.begin(70, seed=1)
    traffic.prompt([request])
    tracker = traffic.coordinator.trackers[request]
    for _ in range(3):
        out = traffic.decode([request])
        assert tracker.state is RequestState.STAGING
        exact = traffic.exact(request, tracker.seq_len - 1)
        torch.testing.assert_close(out[:, 0], exact, rtol=1e-5, atol=1e-5)
    runtime.let_go()
    traffic.decode([request])
    assert tracker.state is RequestState.SPARSE
    assert not traffic.coordinator.manager.dense.blocks(request)


@pytest.mark.parametrize("name", LRU)
def test_o2_a_layers_fetch_is_complete_before_its_attention(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, _ = decoded(LRU[name], monkeypatch)
    for step in range(1, STEPS + 1):
        for layer in range(3):
            load, attend = runtime.find("load", step, layer), runtime.find("attend", step, layer)
            assert load.stream == "h2d"
            assert load.happened_before(attend)


def test_o2_a_fetch_need_not_wait_for_the_attention_of_the_layer_before_to_be_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime, _ = decoded(LRU["oracle"], monkeypatch)
    load, attend = runtime.find("load", 2, 1), runtime.find("attend", 2, 1)
    assert not attend.happened_before(load)  # the marks can tell: order is not assumed


@pytest.mark.parametrize("name", LRU)
def test_o3_the_next_fetch_waits_for_the_attention_that_reads_the_buffer(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime, _ = decoded(LRU[name], monkeypatch)
    for step in range(1, STEPS):
        for layer in range(3):
            assert runtime.find("attend", step, layer).happened_before(runtime.find("load", step + 1, layer))


@pytest.mark.parametrize("name", LRU)
def test_o3_a_newest_slot_is_written_again_only_after_its_copy_to_the_host(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime, _ = decoded(LRU[name], monkeypatch)
    for step in range(1, STEPS - 1):
        store = runtime.find("store", step, 0)
        assert store.stream == "d2h"
        assert all(runtime.find("write", step, layer).happened_before(store) for layer in range(3))
        assert all(store.happened_before(runtime.find("write", step + 2, layer)) for layer in range(3))


@pytest.mark.parametrize("name", LRU)
def test_o4_a_commit_comes_after_the_attention_of_its_layer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, _ = decoded(LRU[name], monkeypatch)
    for step in range(1, STEPS + 1):
        for layer in range(3):
            assert runtime.find("attend", step, layer).happened_before(runtime.find("commit", step, layer))


def test_a_streamed_piece_is_overwritten_only_after_attention_has_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = ClockRuntime()
    traffic = MarkedTraffic(runtime, {"algorithm": "full_offload", "algo": {"chunk_tokens": 16}}, monkeypatch)
    load, attention = KVTransfer.load, stream.decode_attn_paged

    def marked_load(transfer: KVTransfer, *args: Any, **kwargs: Any) -> None:
        runtime.mark("piece")
        load(transfer, *args, **kwargs)

    def marked_attention(*args: Any, **kwargs: Any) -> None:
        runtime.mark("read")
        attention(*args, **kwargs)

    monkeypatch.setattr(KVTransfer, "load", marked_load)
    monkeypatch.setattr(stream, "decode_attn_paged", marked_attention)
    request = traffic.begin(70, seed=1)
    traffic.prompt([request])
    traffic.decode([request])
    loads, reads = ([mark for mark in runtime.marks if mark.label == (label,)] for label in ("piece", "read"))
    assert len(loads) == len(reads) == 3 * 5  # layers, pieces of 16 tokens
    for read, overwriting in zip(reads, loads[2:], strict=False):  # two buffers by turns
        assert read.happened_before(overwriting)


BLOCK_STEPS, LAYERS = 8, range(3)


ALGO = {"init": 4, "token_budget": 12, "local_ratio": 0.25, "cache_tokens": 16, "block": 4, "k_cache": 3}


def decoded_blocks(monkeypatch: pytest.MonkeyPatch, **algo: Any) -> tuple[ClockRuntime, MarkedTraffic]:
    """Decode with tokens that are drawn, through the cache of token blocks."""
    monkeypatch.setitem(registry.ALGORITHMS, "pqcache", DrawnTokens)
    return run({"algorithm": "pqcache", "min_sparse_prompt_len": 24, "algo": {**ALGO, **algo}}, monkeypatch)


def run(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> tuple[ClockRuntime, MarkedTraffic]:
    runtime = ClockRuntime()
    traffic = MarkedTraffic(runtime, config, monkeypatch)
    requests = [traffic.begin(n, seed=n) for n in (70, 9)]
    traffic.prompt(requests)
    for _ in range(BLOCK_STEPS):
        traffic.decode(requests)
    return runtime, traffic


def test_o1_a_steady_place_is_written_again_only_after_its_tokens_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    for ratio, local in ((0.25, 3), (0.17, 2), (0.09, 1)):
        runtime, traffic = decoded_blocks(monkeypatch, local_ratio=ratio)
        blocks = traffic.coordinator.manager.blocks
        assert blocks is not None
        assert blocks.shortest_ring([0]) == local
        for step in range(1, BLOCK_STEPS - local + 1):
            store = runtime.find("store", step, 0)
            assert store.stream == "d2h"
            assert all(store.happened_before(runtime.find("write", step + local, layer)) for layer in LAYERS)
            assert all(store.happened_before(runtime.find("gather", step + local, layer)) for layer in LAYERS)


def test_o1_a_request_stays_dense_until_its_prompt_is_on_the_host_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
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
    for step in range(1, BLOCK_STEPS + 1):
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
    for step in range(1, BLOCK_STEPS + 1):
        for layer in LAYERS:
            following = ("gather", step, layer + 1) if layer < LAYERS[-1] else ("gather", step + 1, LAYERS[0])
            attend, commit = runtime.find("attend", step, layer), runtime.find("commit", step, layer)
            assert attend.happened_before(commit)
            if step < BLOCK_STEPS or layer < LAYERS[-1]:
                assert commit.happened_before(runtime.find(*following))


def test_o4_admissions_come_after_what_reads_their_places_and_before_the_layers_next_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime, _ = decoded_blocks(monkeypatch)
    for step in range(1, BLOCK_STEPS):
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
    for _ in range(BLOCK_STEPS):
        traffic.decode(requests)
    for step in range(1, BLOCK_STEPS + 1):
        for layer in LAYERS:
            made, gather = runtime.find("estimate", step, layer), runtime.find("gather", step, layer)
            assert not made.happened_before(gather)
            assert not gather.happened_before(made)


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
    monkeypatch.setattr(kvcm.gpu_tier.assembly, "runtime_for", lambda _: runtime)
    return Traffic(SHAPE, config)


def decoded_ahead(
    config: dict[str, Any], steps: int, monkeypatch: pytest.MonkeyPatch, *, is_ahead: bool
) -> torch.Tensor:
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
    ahead = decoded_ahead(CASES[name], 40, monkeypatch, is_ahead=True)
    assert torch.equal(ahead, decoded_ahead(CASES[name], 40, monkeypatch, is_ahead=False))


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
    monkeypatch.setattr(kvcm.gpu_tier.assembly, "runtime_for", lambda _: runtime)
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
