"""The ordering rules O1 to O4: what streams and events guarantee, also on a host far ahead of its device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from drawn_tokens import DrawnTokens
from layer_traffic import MarkedTraffic, Shape
from retrieval_cases import BLOCKS

from kvcm.gpu_tier.algorithms import registry
from kvcm.gpu_tier.manager import stream
from kvcm.gpu_tier.request_lifecycle import RequestState

# Buffers as small as a step allows: tokens that are not promoted have to be loaded soon.
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
ORACLE: dict[str, Any] = {"algorithm": "oracle", "algo": {"k": 16}, "device_buffer_size": 20}
LRU = {"oracle": ORACLE, "quest": QUEST, "dsa": {**DSA, "device_buffer_size": 20}}
STEPS, LAYERS = 8, range(3)


def decode(traffic: MarkedTraffic, *lengths: int) -> MarkedTraffic:
    """Decode requests of these lengths."""
    requests = [traffic.begin(n, seed=n) for n in lengths]
    traffic.prompt(requests)
    for _ in range(STEPS):
        traffic.decode(requests)
    return traffic


@pytest.mark.parametrize("name", ["quest", "dsa"])  # the oracle reads all keys, and waits for their copies
def test_o1_tokens_not_on_the_host_are_never_evicted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    traffic = MarkedTraffic(LRU[name], monkeypatch)
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
    traffic.runtime.holds_offloads = True
    held_from = manager.host_tokens.backed_up(request)
    for _ in range(4):
        traffic.decode([request])
    assert manager.host_tokens.backed_up(request) <= held_from + 1
    traffic.runtime.let_go()
    traffic.decode([request])
    assert manager.host_tokens.backed_up(request) >= held_from + 4
    assert evicted  # otherwise nothing was tested


@pytest.mark.parametrize("config", [ORACLE, BLOCKS["pqcache"]], ids=["buffer", "blocks"])
def test_o1_dense_until_the_prompt_is_on_the_host(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    traffic = MarkedTraffic(config, monkeypatch)
    traffic.runtime.holds_offloads = True
    request = traffic.begin(70, seed=1)
    traffic.prompt([request])
    tracker = traffic.coordinator.trackers[request]
    for _ in range(3):
        out = traffic.decode([request])
        assert tracker.state is RequestState.STAGING
        exact = traffic.exact(request, tracker.seq_len - 1)
        torch.testing.assert_close(out[:, 0], exact, rtol=1e-5, atol=1e-5)
    traffic.runtime.let_go()
    traffic.decode([request])
    assert tracker.state is RequestState.SPARSE
    assert not traffic.coordinator.manager.dense.blocks(request)


@pytest.mark.parametrize("name", LRU)
def test_o2_to_o4_a_layers_fetch_attention_and_commit_are_in_order(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find = decode(MarkedTraffic(LRU[name], monkeypatch), 70).runtime.find
    for step in range(1, STEPS + 1):
        for layer in LAYERS:
            load, attend = find("load", step, layer), find("attend", step, layer)
            assert load.stream == "h2d"
            assert load.happened_before(attend)
            assert not attend.happened_before(load)  # the marks show the order, the test does not assume it
            assert attend.happened_before(find("commit", step, layer))
            assert step == STEPS or attend.happened_before(find("load", step + 1, layer))


@pytest.mark.parametrize("name", LRU)
def test_o3_a_newest_slot_is_rewritten_only_after_its_host_copy(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find = decode(MarkedTraffic(LRU[name], monkeypatch), 70).runtime.find
    for step in range(1, STEPS - 1):
        store = find("store", step, 0)
        assert store.stream == "d2h"
        assert all(find("write_kv", step, layer).happened_before(store) for layer in LAYERS)
        assert all(store.happened_before(find("write_kv", step + 2, layer)) for layer in LAYERS)


def test_a_streamed_piece_waits_for_its_last_tokens_copy_and_its_buffers_use(monkeypatch: pytest.MonkeyPatch) -> None:
    traffic = MarkedTraffic({"algorithm": "full_offload", "algo": {"chunk_tokens": 16}}, monkeypatch)
    streamed, attention = traffic.coordinator._stream, stream.decode_attn_paged
    assert streamed is not None
    load = streamed._transfer.load

    def marked_load(*args: Any, **kwargs: Any) -> None:
        traffic.runtime.mark("piece", traffic.step)
        load(*args, **kwargs)

    def marked_attention(*args: Any, **kwargs: Any) -> None:
        traffic.runtime.mark("read", traffic.step)
        attention(*args, **kwargs)

    monkeypatch.setattr(streamed._transfer, "load", marked_load)
    monkeypatch.setattr(stream, "decode_attn_paged", marked_attention)
    decode(traffic, 70)
    for step in range(1, STEPS + 1):
        pieces, reads = (
            [mark for mark in traffic.runtime.marks if mark.label == (label, step)] for label in ("piece", "read")
        )
        assert len(pieces) == len(reads) == 3 * 5  # layers, pieces of 16 tokens
        for read, overwriting in zip(reads, pieces[2:], strict=False):  # two buffers by turns
            assert read.happened_before(overwriting)
        if step > 1:
            copied = traffic.runtime.find("store", step - 1, 0)
            assert all(copied.happened_before(piece) for piece in pieces)


def drawn_blocks(monkeypatch: pytest.MonkeyPatch, **algo: Any) -> MarkedTraffic:
    """Decode with tokens that are drawn, through the cache of token blocks."""
    monkeypatch.setitem(registry.ALGORITHMS, "pqcache", DrawnTokens)
    small = {"init": 4, "token_budget": 12, "local_ratio": 0.25, "cache_tokens": 16, "block": 4, "k_cache": 3}
    config = {"algorithm": "pqcache", "min_sparse_prompt_len": 24, "algo": {**small, **algo}}
    return decode(MarkedTraffic(config, monkeypatch), 70, 9)


def test_o1_a_steady_place_is_written_again_only_after_its_tokens_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    for ratio, local in ((0.25, 3), (0.17, 2), (0.09, 1)):
        traffic = drawn_blocks(monkeypatch, local_ratio=ratio)
        find, blocks = traffic.runtime.find, traffic.coordinator.manager.blocks
        assert blocks is not None
        assert blocks.shortest_ring([0]) == local
        for step in range(1, STEPS - local + 1):
            store = find("store", step, 0)
            assert store.stream == "d2h"
            assert all(store.happened_before(find("write_kv", step + local, layer)) for layer in LAYERS)
            assert all(store.happened_before(find("gather", step + local, layer)) for layer in LAYERS)


@pytest.mark.parametrize("name", BLOCKS)
def test_o2_to_o4_a_layers_tokens_are_gathered_before_its_attention_and_wait_for_the_layer_before(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = decode(MarkedTraffic(BLOCKS[name], monkeypatch), 70, 9).runtime.find
    committed = None
    for step in range(1, STEPS + 1):
        for layer in LAYERS:
            gather, attend = find("gather", step, layer), find("attend", step, layer)
            assert gather.stream == "h2d"
            assert find("write_kv", step, layer).happened_before(gather)
            assert committed is None or committed.happened_before(gather)
            assert gather.happened_before(attend)
            committed = find("commit", step, layer)
            assert attend.happened_before(committed)


def test_o4_admissions_follow_their_places_readers_and_precede_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    find = drawn_blocks(monkeypatch).runtime.find
    for step in range(1, STEPS):
        for layer in LAYERS:
            load = find("load", step, layer)
            assert find("gather", step, layer).happened_before(load)
            assert load.happened_before(find("gather", step + 1, layer))
            if layer < LAYERS[-1]:  # beside the next layers, as the marks show
                assert not load.happened_before(find("attend", step, layer + 1))


@pytest.mark.parametrize("name", [name for name in BLOCKS if name.startswith("retroinfer")])
def test_estimates_are_computed_beside_the_copies(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    traffic = MarkedTraffic(BLOCKS[name], monkeypatch)
    runtime, estimate = traffic.runtime, traffic.coordinator.algorithm.estimate

    def marked(*args: Any) -> Any:
        runtime.mark("estimate", traffic.step, traffic.layer)
        return estimate(*args)

    monkeypatch.setattr(traffic.coordinator.algorithm, "estimate", marked)
    decode(traffic, 70, 60)
    for step in range(1, STEPS + 1):
        for layer in LAYERS:
            made, gather = runtime.find("estimate", step, layer), runtime.find("gather", step, layer)
            assert not made.happened_before(gather)
            assert not gather.happened_before(made)


SHAPE = Shape(layers=2, max_tokens=160)
CASES = {"dsa": DSA, "quest": QUEST}
CASES |= {f"{name}, nothing promoted": {**case, "promote_newest": False} for name, case in CASES.items()}


def decoded_ahead(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, *, is_ahead: bool) -> torch.Tensor:
    traffic = MarkedTraffic(config, monkeypatch, SHAPE)
    requests = [traffic.begin(n, seed=n) for n in (70, 33)]
    traffic.prompt(requests)
    traffic.decode(requests)
    traffic.runtime.holds_offloads = is_ahead
    seen = [traffic.coordinator.manager.host_tokens.backed_up(request) for request in requests]
    out = torch.stack([traffic.decode(requests) for _ in range(40)])
    now = [traffic.coordinator.manager.host_tokens.backed_up(request) for request in requests]
    assert (now == seen) is is_ahead  # what the host may read is what it has seen
    for request in requests:
        traffic.end(request)
    traffic.assert_empty()
    return out


@pytest.mark.parametrize("name", CASES)
def test_tokens_whose_copy_may_not_have_ended_are_selected_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = decoded_ahead(CASES[name], monkeypatch, is_ahead=True)
    assert torch.equal(ahead, decoded_ahead(CASES[name], monkeypatch, is_ahead=False))


@pytest.mark.parametrize("name", CASES)
def test_loads_follow_their_copies_on_every_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    traffic = MarkedTraffic(CASES[name], monkeypatch, SHAPE)
    runtime, manager = traffic.runtime, traffic.coordinator.manager
    offload, resolve = manager.offload, manager.resolve
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

    monkeypatch.setattr(manager, "offload", copied)
    monkeypatch.setattr(manager, "resolve", resolved)
    request = traffic.begin(70, seed=1)
    traffic.prompt([request])
    traffic.decode([request])
    runtime.holds_offloads = True
    for _ in range(20):
        traffic.decode([request])
    assert loaded > 20


def test_a_prompt_partly_on_the_host_alone_is_never_decoded_densely(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last copy is still on its way when the prompt ends: it waits, since its first pages were given up."""
    traffic = MarkedTraffic({**QUEST, "prefill_window_tokens": 20}, monkeypatch, SHAPE)
    request = traffic.begin(60, seed=1)
    traffic.runtime.holds_offloads = True
    traffic.prompt([request], 7)
    traffic.decode([request])
    assert traffic.coordinator.trackers[request].state is RequestState.SPARSE
