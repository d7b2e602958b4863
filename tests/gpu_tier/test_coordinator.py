"""The life of a request: memory held in each state and after refusals, and an engine's own metadata."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import retrieval_cases
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_traffic import ClockRuntime, Shape, Traffic, refuse_each_once
from retrieval_cases import ALGORITHMS as SETTINGS
from retrieval_cases import BLOCKS
from retrieval_cases import CASES as RETRIEVAL
from thoroughness import examples
from torch import Tensor

import kvcm.gpu_tier.assembly
from kvcm.gpu_tier.backend import BackendAdaptor, DenseRows, EngineMetadata, FlashAdaptor, TokenAdaptor
from kvcm.gpu_tier.errors import ConfigError, PoolExhaustedError, StateError
from kvcm.gpu_tier.request_lifecycle import RequestState
from kvcm.gpu_tier.types import PagedMeta, ResidencyPlan, Selection, TokenMeta

ALGORITHMS: dict[str, dict[str, Any]] = {
    **{name: case for name, case in SETTINGS.items() if name not in ("quest per head", "streaming_llm")},
    **retrieval_cases.CASES,
}


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
def test_a_request_without_space_holds_nothing(name: str) -> None:
    traffic = Traffic(Shape(device_pages=30, max_tokens=512), {**ALGORITHMS[name], "host_to_device_ratio": 1.0})
    with pytest.raises(PoolExhaustedError, match=r"pages left, \d+ were asked for; raise"):
        traffic.begin(400, seed=1)
    traffic.assert_empty()


def test_a_decode_without_space_loses_nothing_and_goes_on_after_a_retraction() -> None:
    traffic = Traffic(Shape(device_pages=8), {"algorithm": "full"})
    requests = [traffic.begin(n, seed=n) for n in (30, 31)]
    traffic.prompt(requests)
    traffic.decode(requests)
    with pytest.raises(PoolExhaustedError, match="device pool has 0 of 8 pages left"):
        traffic.decode(requests)
    traffic.end(requests[1], "retracted")
    out = traffic.decode(requests[:1])
    torch.testing.assert_close(out[:, 0], traffic.exact(requests[0], 31), rtol=1e-4, atol=1e-4)


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
    with pytest.raises(ConfigError, match="name each request once"):
        c.plan_prefill([request, request], [5, 5])
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
    traffic.prompt([request])
    with pytest.raises(ConfigError, match="name each request once"):
        c.plan_decode([request, request])


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


def late_traffic(name: str, *, holds_offloads: bool) -> tuple[Traffic, ClockRuntime]:
    runtime = ClockRuntime()
    runtime.holds_offloads = holds_offloads
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kvcm.gpu_tier.assembly, "runtime_for", lambda _: runtime)
        return Traffic(Shape(layers=2, max_tokens=128), ALGORITHMS[name]), runtime


def begun(traffic: Traffic, n_prompt: int, seed: int, others: list[int]) -> None:
    """Take a request in, if there are pages for it beside the others."""
    try:
        traffic.begin(n_prompt, seed)
    except PoolExhaustedError:
        assert others


@settings(max_examples=examples(120), deadline=None)
@given(data=st.data(), name=st.sampled_from(sorted(ALGORITHMS)))
def test_any_order_of_requests_leaves_nothing_behind(data: st.DataObject, name: str) -> None:
    """Every step checks what it reads; some copies end late, others only when they are waited for."""
    traffic, runtime = late_traffic(name, holds_offloads=data.draw(st.booleans()))
    c = traffic.coordinator
    for number in range(data.draw(st.integers(1, 14))):
        live = list(traffic.sequences)
        prompts = [r for r in live if c.trackers[r].seq_len < c.trackers[r].n_prompt]
        ready = [r for r in live if r not in prompts]
        verbs = ["begin", "let go"] + ["prefill"] * bool(prompts) + ["decode"] * bool(ready) + ["end"] * bool(live)
        verb = data.draw(st.sampled_from(verbs))
        if verb == "begin":
            begun(traffic, data.draw(st.integers(1, 100)), number + 1, live)
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
        elif verb == "let go":  # copies to the host end
            runtime.let_go()
        else:
            request = data.draw(st.sampled_from(live))
            traffic.end(request, data.draw(st.sampled_from(["finished", "aborted", "retracted"])))
            c.on_request_end(request, "finished")  # the second time nothing happens
    for request in list(traffic.sequences):
        traffic.end(request)
    traffic.assert_empty()


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


CASES: dict[str, dict[str, Any]] = {
    **SETTINGS,
    "oracle": {**SETTINGS["oracle"], "device_buffer_size": 20},
    "quest, a window": {**SETTINGS["quest"], "prefill_window_tokens": 20},
    "quest device": {**SETTINGS["quest"], "residency": "device"},
    "dsa": {**SETTINGS["dsa"], "device_buffer_size": 20},
}


SHAPE = Shape(layers=2, max_requests=4)


REFUSED: dict[str, dict[str, Any]] = {
    **{name: CASES[name] for name in ("full_offload", "oracle", "quest", "quest, a window", "quest device", "snapkv")},
    **{name: RETRIEVAL[name] for name in ("retroinfer", "retroinfer device", "pqcache", "pqcache lru")},
    "retroinfer gpu control, a window": {**BLOCKS["retroinfer gpu control"], "prefill_window_tokens": 20},
}


@pytest.mark.ci
@pytest.mark.parametrize("name", REFUSED)
def test_every_allocation_may_be_refused_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    has_prefix = name in ("oracle", "quest", "quest device", *BLOCKS)
    refuse_each_once(SHAPE, REFUSED[name], monkeypatch, has_prefix=has_prefix)


@pytest.mark.parametrize("name", ["quest", "dsa", "oracle", "full_offload"])
def test_what_staging_had_got_before_it_was_refused_is_given_back(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = {"device_buffer_size": 40} if name == "full_offload" else {}
    traffic = Traffic(SHAPE, {**CASES[name], **buffer, "min_sparse_prompt_len": 30})
    request = traffic.begin(28, seed=1)
    traffic.prompt([request])
    tracker, manager = traffic.coordinator.trackers[request], traffic.coordinator.manager
    limit = max(traffic.config.device_buffer_size, 30)
    while tracker.seq_len <= limit:
        traffic.decode([request])

    def refuse(*args: Any) -> None:
        raise PoolExhaustedError("refused by the test")

    for owner in (manager.host_tokens, manager.buffers):
        with monkeypatch.context() as refusing:
            refusing.setattr(owner, "cover", refuse)
            out = traffic.decode([request])
        assert tracker.state is RequestState.DENSE
        assert not manager.host_tokens.holds(request)
        assert request not in manager.buffers
        torch.testing.assert_close(out[:, 0], traffic.exact(request, tracker.seq_len - 1), rtol=1e-4, atol=1e-4)
    traffic.decode([request])
    assert tracker.state is RequestState.SPARSE
    traffic.end(request)
    traffic.assert_empty()


def test_pages_of_a_window_stay_with_their_prompt() -> None:
    """A prompt that was admitted gets to its end, although its free pages are allocated meanwhile."""
    traffic = Traffic(SHAPE, {**CASES["quest, a window"], "min_sparse_prompt_len": 16})
    pages = traffic.coordinator.manager.device.allocator
    request = traffic.begin(120, seed=1)
    taken = pages.alloc(pages.available)
    left = 120
    for chunk in (5, 20, 13, 20, 20, 20, 20, 2):
        traffic.prefill([request], [chunk])
        left -= chunk
        taken += pages.alloc(pages.available)
    assert not left
    traffic.coordinator.prompt_finished(request)
    traffic.decode([request])
    pages.free(taken)
    traffic.end(request)
    traffic.assert_empty()


def test_a_pass_with_a_request_that_ends_is_dropped_and_planned_again() -> None:
    undisturbed, traffic = (Traffic(SHAPE, {**CASES["quest"], "min_sparse_prompt_len": 16}) for _ in range(2))
    c = traffic.coordinator
    for each in (undisturbed, traffic):
        requests = [each.begin(n, seed=n) for n in (50, 40)]
        each.prompt(requests)
        each.decode(requests)
    batch = c.plan_decode(requests)
    c.forward_begin(batch)
    q, k, v, _ = traffic._inputs(batch, 0)
    c.write_kv(0, batch, k, v)
    c.attention_begin(q, k, v, 0, batch)
    traffic.end(requests[1], "aborted")
    taken = traffic.begin(30, seed=7)
    assert taken == requests[1]  # its row has another request now
    with pytest.raises(StateError, match="forward_begin"):
        c.attention_end(q, 0, batch)
    with pytest.raises(StateError, match="forward_begin"):
        c.forward_end(batch)
    assert c.trackers[taken].seq_len == 0
    for _ in range(3):
        expected = undisturbed.decode(requests)[:, 0]
        torch.testing.assert_close(traffic.decode(requests[:1])[:, 0], expected, rtol=1e-5, atol=1e-5)
    traffic.end(requests[0])
    traffic.end(taken)
    traffic.assert_empty()


def test_a_plan_that_is_out_of_date_is_refused() -> None:
    traffic = Traffic(SHAPE, CASES["full"])
    c = traffic.coordinator
    request = traffic.begin(50, seed=1)
    first = c.plan_prefill([request], [20])
    traffic.prefill([request], [10])
    with pytest.raises(StateError, match="plan it again"):
        c.forward_begin(first)
    planned = c.plan_prefill([request], [10])
    traffic.end(request)
    with pytest.raises(StateError, match="not known"):
        c.forward_begin(planned)


OWN_METADATA = {name: SETTINGS[name] for name in ("quest", "quest per head", "dsa", "snapkv", "full_offload")}


def engine_metadata() -> SimpleNamespace:
    lengths = torch.tensor([9, 30, 0], dtype=torch.int32)
    table, sums = torch.arange(15, dtype=torch.int32).view(3, 5), torch.tensor([0, 9, 39, 39], dtype=torch.int32)
    of_engine = {"page_table": table, "cache_seqlens_int32": lengths, "cu_seqlens_k": sums, "max_seq_len_k": 30}
    return SimpleNamespace(**of_engine, something_else=object())


def test_an_engine_finds_its_metadata_as_it_was_bit_for_bit() -> None:
    meta, before, swaps = engine_metadata(), engine_metadata(), EngineMetadata()
    given = dict(vars(meta))
    for layer in range(3):
        swaps.save_original_metadata(meta)  # each layer may say so
        table = torch.full((3, 2), layer, dtype=torch.int32)
        swaps.apply(meta, PagedMeta(None, table, torch.tensor([3, 0, 8], dtype=torch.int32), 4))  # type: ignore[arg-type]
        assert meta.page_table is table
        assert meta.cu_seqlens_k.tolist() == [0, 3, 3, 11]
        assert meta.cu_seqlens_k.dtype is torch.int32
        assert meta.max_seq_len_k == 8
    swaps.restore(meta)
    swaps.restore(meta)
    assert all(getattr(meta, name) is value for name, value in given.items())
    fields = ("page_table", "cache_seqlens_int32", "cu_seqlens_k")
    assert all(torch.equal(getattr(meta, name), getattr(before, name)) for name in fields)
    assert meta.max_seq_len_k == before.max_seq_len_k
    with pytest.raises(StateError, match="save_original_metadata"):
        swaps.apply(meta, PagedMeta(None, meta.page_table, meta.cache_seqlens_int32, 4))  # type: ignore[arg-type]


def test_names_of_an_engines_fields_may_differ() -> None:
    meta = SimpleNamespace(**{name: torch.tensor([1]) for name in "abc"}, d=1)
    swaps = EngineMetadata("a", "b", "c", "d")
    given = dict(vars(meta))
    swaps.save_original_metadata(meta)
    swaps.apply(meta, PagedMeta(None, torch.zeros(2, 3), torch.tensor([5, 6]), 8))  # type: ignore[arg-type]
    assert (meta.b.tolist(), meta.c.tolist(), meta.d) == ([5, 6], [0, 5, 11], 24)
    swaps.restore(meta)
    assert vars(meta) == given


def tensors_of(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            yield from tensors_of(getattr(value, name))


def inputs(heads: int, unit: int, traffic: Traffic) -> tuple[Selection, ResidencyPlan, Tensor, DenseRows]:
    requests = [traffic.begin(n, seed=n) for n in (30, 11)]
    traffic.prompt(requests)
    batch = traffic.coordinator.plan_decode(requests, 3)
    ids = torch.tensor([[0, 2, 30 // unit], [-1, -1, -1], [-1, -1, -1]], dtype=torch.int32)[:, None].repeat(1, heads, 1)
    lengths = torch.tensor([3, 0, 0], dtype=torch.int32)[:, None].repeat(1, heads)
    selection = Selection(traffic.coordinator.algorithm.unit, unit, ids, lengths)
    plan = ResidencyPlan(torch.where(ids >= 0, ids * unit + 40, -1))
    dense = DenseRows(batch, traffic.coordinator.manager.tables.table, 12)
    return selection, plan, torch.tensor([True, False, False]), dense


@pytest.mark.parametrize(
    ("adaptor", "heads", "unit"),
    [(FlashAdaptor(4), 1, 4), (TokenAdaptor(1), 1, 4), (TokenAdaptor(2), 2, 4), (TokenAdaptor(1), 1, 1)],
)
def test_adaptors_change_nothing_and_leave_padding_empty(adaptor: BackendAdaptor, heads: int, unit: int) -> None:
    traffic = Traffic(Shape(), {"algorithm": "full"})
    selection, plan, mask, dense = inputs(heads, unit, traffic)
    kv = traffic.coordinator.manager.device.layer(0)
    given = [tensor for value in (selection, plan, mask, dense.batch, dense.table) for tensor in tensors_of(value)]
    copies = [tensor.clone() for tensor in given]
    first, second = (
        adaptor.adapt_for_attn_metadata(selection, plan, mask, dense.batch, kv, dense) for _ in range(2)
    )  # fmt: skip
    assert all(torch.equal(a, b) for a, b in zip(given, copies, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(tensors_of(first), tensors_of(second), strict=True))
    last = 31 - 30 // unit * unit  # tokens of the item that is being written
    lens = first.lens if isinstance(first, TokenMeta) else first.cache_seqlens[:, None].expand(-1, heads)
    assert lens.tolist() == [[2 * unit + min(last, unit)] * heads, [12] * heads, [0] * heads]
    shape = first.token_table.shape if isinstance(first, TokenMeta) else first.page_table[:, None].shape
    assert shape[:2] == (3, heads)


@pytest.mark.parametrize("name", OWN_METADATA)
def test_without_a_sparse_row_an_engine_gets_its_own_metadata_in_every_layer(name: str) -> None:
    traffic = Traffic(Shape(), {**OWN_METADATA[name], "min_sparse_prompt_len": 200, "device_buffer_size": 48})
    c = traffic.coordinator
    request = traffic.begin(30, seed=1)
    traffic.prompt([request])
    while c.trackers[request].seq_len < 40:
        batch = c.plan_decode([request])
        c.forward_begin(batch)
        for layer in range(3):
            q, k, v, extra = traffic._inputs(batch, layer)
            c.write_kv(layer, batch, k, v)
            own = PagedMeta(c.manager.device.layer(layer), torch.zeros(1, 1), torch.ones(1), 8)
            meta, partials = c.attention_begin(q, k, v, layer, batch, own, **extra)
            assert meta is own
            assert not partials
            c.attention_end(q, layer, batch)
        c.forward_end(batch)
    # The representations cover tokens decoded so: later selections are right, which every step checks.
    other = Traffic(Shape(), {**OWN_METADATA[name], "min_sparse_prompt_len": 200, "device_buffer_size": 48})
    same = other.begin(30, seed=1)
    other.prompt([same])
    for _ in range(10):
        other.decode([same])
    for _ in range(15):
        assert torch.equal(traffic.decode([request]), other.decode([same]))
