"""The ordering rules O1 to O4: what streams and events guarantee, and not what a CPU happens to do in order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from clock_runtime import ClockRuntime
from marked_traffic import MarkedTraffic

from gpu_tier.manager import stream
from gpu_tier.pools.transfer import KVTransfer
from gpu_tier.trackers import RequestState

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
