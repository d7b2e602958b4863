"""Memory of the tier: the owner of each page, host memory, and its contents."""

from __future__ import annotations

import gc
import logging
import mmap
from collections.abc import Iterable
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from pool_values import GEOMETRIES, all_rows, fill_coded
from thoroughness import examples
from torch import Tensor

from kvcm.gpu_tier.errors import AllocationError, ConfigError, PoolExhaustedError, StateError
from kvcm.gpu_tier.geometry import Layout
from kvcm.gpu_tier.pools import pinned
from kvcm.gpu_tier.pools.allocator import PagedAllocator
from kvcm.gpu_tier.pools.code_pages import Appending, CodePages
from kvcm.gpu_tier.pools.device_pool import DeviceKVPool, ReqToTokenPool
from kvcm.gpu_tier.pools.host_pool import HostKVPool, HostPages, PageState
from kvcm.gpu_tier.pools.pinned import PinnedMemory, chunks
from kvcm.gpu_tier.pools.representation import RepresentationPool
from kvcm.gpu_tier.runtime import CudaRuntime, NullRuntime, runtime_for, upload

PAGES = 8


def test_a_double_free_is_found_and_changes_nothing() -> None:
    allocator = PagedAllocator(4, 16)
    first, second = allocator.alloc(2)
    allocator.free([first])
    with pytest.raises(AllocationError, match=f"page {first}"):
        allocator.free([second, first])
    assert allocator.refcount(second) == 1
    with pytest.raises(AllocationError):
        allocator.free([second, second])
    assert (allocator.available, allocator.in_use) == (3, 1)


def test_the_message_names_the_knob() -> None:
    allocator = PagedAllocator(2, 16, "device pool", "device_pages")
    with pytest.raises(
        PoolExhaustedError, match="the device pool has 2 of 2 pages left, 3 were asked for; raise device_pages"
    ):
        allocator.alloc(3)
    with pytest.raises(ConfigError):
        PagedAllocator(0, 16)
    with pytest.raises(ConfigError):
        allocator.alloc(-1)


HOST_PAGES = 5


page_ids = st.integers(0, HOST_PAGES - 1)


def test_a_write_takes_all_pages_or_none() -> None:
    pages = HostPages(3, 4)
    taken = pages.alloc(3)
    pages.filled(taken[:2])
    with pytest.raises(StateError):
        pages.begin_write(taken)
    with pytest.raises(StateError):
        pages.begin_write([taken[0], taken[0]])
    assert [pages.refcount(page) for page in taken] == [1, 1, 1]
    assert [pages.counts()[state] for state in PageState] == [0, 1, 2, 0]
    assert pages.state(taken[0]) is PageState.VALID


def test_the_least_recently_held_page_goes_first() -> None:
    pages = HostPages(3, 4)
    taken = pages.alloc(3)
    pages.filled(taken)
    for page in taken:
        pages.cache(page, page)
    for page in taken:
        pages.free([page])
    assert pages.lookup(taken[0]) == taken[0]
    pages.free([taken[0]])
    assert pages.alloc(1) == [taken[1]]
    assert pages.alloc(1) == [taken[2]]
    assert pages.lookup(taken[0]) == taken[0]


class Histories(RuleBasedStateMachine):
    """Any sequence of calls against a plain model."""

    def __init__(self) -> None:
        super().__init__()
        self.pages = HostPages(HOST_PAGES, 4)
        self.held: dict[int, int] = {}
        self.writing: set[int] = set()
        self.filling: set[int] = set()
        self.keys: dict[int, int] = {}  # key → page

    @rule(n=st.integers(0, HOST_PAGES + 1))
    def alloc(self, n: int) -> None:
        if n > HOST_PAGES - len(self.held):
            with pytest.raises(PoolExhaustedError):
                self.pages.alloc(n)
            return
        for page in self.pages.alloc(n):
            assert page not in self.held
            self.held[page] = 1
            self.filling.add(page)
            # An evicted page has no key any more.
            self.keys = {key: place for key, place in self.keys.items() if place != page}

    @rule(page=page_ids)
    def free(self, page: int) -> None:
        if self.held.get(page, 0) <= (page in self.writing):
            with pytest.raises(AllocationError):
                self.pages.free([page])
            return
        self.pages.free([page])
        self._drop(page)

    @rule(page=page_ids)
    def share(self, page: int) -> None:
        if page not in self.held:
            with pytest.raises(AllocationError):
                self.pages.share([page])
            return
        self.pages.share([page])
        self.held[page] += 1

    @rule(page=page_ids)
    def filled(self, page: int) -> None:
        if page not in self.filling:
            with pytest.raises(StateError, match="cannot become valid"):
                self.pages.filled([page])
            return
        self.pages.filled([page])
        self.filling.remove(page)

    @rule(page=page_ids)
    def write(self, page: int) -> None:
        if page in self.writing:
            with pytest.raises(StateError):
                self.pages.begin_write([page])
            self.pages.end_write([page])
            self.writing.remove(page)
            self._drop(page)
            return
        with pytest.raises(StateError):
            self.pages.end_write([page])
        if page not in self.held or page in self.filling:
            with pytest.raises((StateError, AllocationError)):
                self.pages.begin_write([page])
            return
        self.pages.begin_write([page])
        self.writing.add(page)
        self.held[page] += 1

    @rule(page=page_ids, key=st.integers(0, 3))
    def cache(self, page: int, key: int) -> None:
        is_valid = self._state(page) in (PageState.VALID, PageState.WRITING_L3)
        if not is_valid or (page in self.keys.values() and self.keys.get(key) != page):
            with pytest.raises(StateError, match="another key" if is_valid else "cannot get a key"):
                self.pages.cache(page, key)
            return
        assert self.pages.cache(page, key) == self.keys.setdefault(key, page)

    @rule(key=st.integers(0, 3))
    def lookup(self, key: int) -> None:
        page = self.pages.lookup(key)
        assert page == self.keys.get(key)
        if page is not None:
            self.held[page] = self.held.get(page, 0) + 1

    @rule(page=page_ids)
    def forget(self, page: int) -> None:
        self.pages.forget(page)
        self.keys = {key: place for key, place in self.keys.items() if place != page}

    @invariant()
    def agrees(self) -> None:
        assert [self.pages.refcount(page) for page in range(HOST_PAGES)] == [
            self.held.get(p, 0) for p in range(HOST_PAGES)
        ]
        assert self.pages.available == HOST_PAGES - len(self.held)
        assert self.pages.cached == len(self.keys)
        for page in range(HOST_PAGES):
            assert self.pages.state(page) is self._state(page)

    def _state(self, page: int) -> PageState:
        if page in self.writing:
            return PageState.WRITING_L3
        if page in self.filling:
            return PageState.FILLING
        return PageState.VALID if page in self.held or page in self.keys.values() else PageState.FREE

    def _drop(self, page: int) -> None:
        self.held[page] -= 1
        if not self.held[page]:
            del self.held[page]
            self.filling.discard(page)


TestHistories = Histories.TestCase


TestHistories.settings = settings(max_examples=examples(200), stateful_step_count=40, deadline=None)


CPU = NullRuntime()


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("name", GEOMETRIES)
def test_the_pieces_of_a_page_are_all_of_its_rows_and_no_others(name: str, layout: Layout) -> None:
    geometry = GEOMETRIES[name]
    pool = HostKVPool(geometry, 3, layout, CPU)
    pieces = pool.page_pieces(1)
    parts = len(geometry.parts)
    assert len(pieces) == (parts * geometry.num_layers if layout is Layout.LAYER_FIRST else 1)
    assert sum(piece.numel() for piece in pieces) == geometry.page_bytes
    for piece in pieces:
        piece += 1
    for part in range(parts):
        for layer in range(geometry.num_layers):
            marked = all_rows(pool, part, layer).flatten(1).float().mean(1)
            page = torch.arange(3).repeat_interleave(geometry.page_size)
            assert torch.equal(marked, (page == 1).float())


def test_sidecars_lie_beside_pages() -> None:
    pool = HostKVPool(GEOMETRIES["mla"], 3, Layout.PAGE_FIRST, CPU)
    before = pool.nbytes
    pool.add_sidecar("index.dsa", 40)
    assert pool.sidecar("index.dsa").shape == (3, 40)
    pool.sidecar("index.dsa")[2] = 9
    assert int(pool.sidecar("index.dsa").sum()) == 9 * 40
    assert pool.nbytes == before + 120
    for name, size in (("index.dsa", 40), ("other", 0)):
        with pytest.raises(ConfigError):
            pool.add_sidecar(name, size)
    with pytest.raises(ConfigError, match="must be one of index"):
        pool.sidecar("index.quest")
    pool.close()
    pool.close()
    assert pool.data.numel() == 0


@pytest.mark.parametrize("slots", [[-1, 4, 0, -3], [-1, -1], [0, -1], []], ids=str)
@pytest.mark.parametrize("name", GEOMETRIES)
def test_a_layer_is_a_view_and_writes_reach_it(name: str, slots: list[int]) -> None:
    """Tokens without a slot change nothing."""
    geometry = GEOMETRIES[name]
    pool = DeviceKVPool(geometry, 3, CPU)
    assert pool.nbytes == 3 * geometry.page_bytes
    fill_coded(pool, 1)
    layer = geometry.layers[1]
    before = [all_rows(pool, part, index) for part in range(len(geometry.parts)) for index in range(3)]
    k = torch.randn(len(slots), geometry.num_kv_heads, geometry.head_dim)
    v = torch.randn(len(slots), geometry.num_kv_heads, geometry.v_head_dim) if len(geometry.parts) == 2 else None
    pool.write(layer, torch.tensor(slots, dtype=torch.int64), k, v)
    written = [token for token, slot in enumerate(slots) if slot >= 0]
    wanted = iter(before)
    for part, numbers in enumerate((k, v)[: len(geometry.parts)]):
        for index in range(3):
            rows = next(wanted)
            if index == 1 and numbers is not None:
                rows[[slots[token] for token in written]] = geometry.parts[part].encode(numbers[written])
            assert torch.equal(all_rows(pool, part, index), rows)
    view = pool.layer(layer)
    assert view.k.data.data_ptr() == pool.data.data_ptr() + pool.addressing.address(0, 0, 1, 0)
    assert (view.v is None) == (v is None)
    assert view.v_dims == geometry.v_head_dim


def test_parts_have_to_be_those_of_the_model() -> None:
    k = torch.zeros(1, 2, 8)
    with pytest.raises(ConfigError, match="mha stores 2 rows"):
        DeviceKVPool(GEOMETRIES["mha"], 1, CPU).write(5, torch.tensor([0]), k)
    with pytest.raises(ConfigError, match="mla stores 1 rows"):
        DeviceKVPool(GEOMETRIES["mla"], 1, CPU).write(1, torch.tensor([0]), k, k)


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


PAGE = mmap.PAGESIZE


@given(st.integers(1, 10**7), st.integers(1, 10**5), st.integers(1, 10**6))
def test_chunks_cover_everything_and_split_no_page(nbytes: int, granule: int, largest: int) -> None:
    parts = chunks(nbytes, granule, largest)
    assert sum(size for _, size in parts) == nbytes
    end = 0
    for start, size in parts:
        assert start == end
        assert size > 0
        assert start % granule == 0
        assert start % PAGE == 0
        end = start + size
    assert all(size <= max(largest, granule * PAGE) for _, size in parts)


class _Cudart:
    """Stands in for CUDA's runtime: records registrations and fails from the n-th call on."""

    def __init__(self, fails_at: int) -> None:
        self.calls: list[tuple[str, int]] = []
        self.left = fails_at

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802 - CUDA's name
        assert flags == 3
        self.calls.append(("register", address))
        self.left -= 1
        return 2 if self.left < 0 else 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802 - CUDA's name
        self.calls.append(("unregister", address))
        return 0


def _memory(monkeypatch: pytest.MonkeyPatch, fails_at: int) -> tuple[PinnedMemory, _Cudart]:
    cudart = _Cudart(fails_at)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    runtime = SimpleNamespace(is_cuda=True, device=torch.device("cpu"))
    memory = PinnedMemory(5 * PAGE, PAGE, runtime, numa_node="none", largest_chunk=2 * PAGE)  # type: ignore[arg-type]
    return memory, cudart


def test_registrations_are_taken_back_in_reverse(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, cudart = _memory(monkeypatch, 3)
    start = memory.data.data_ptr()
    addresses = [start, start + 2 * PAGE, start + 4 * PAGE]
    assert memory.is_pinned
    assert (memory.chunk_bytes, memory.data.numel()) == (2 * PAGE, 5 * PAGE)
    assert int(memory.data.sum()) == 0
    memory.close()
    memory.close()
    assert cudart.calls == [("register", a) for a in addresses] + [("unregister", a) for a in reversed(addresses)]
    assert not memory.is_pinned


def test_forgotten_memory_takes_its_registrations_back(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, cudart = _memory(monkeypatch, 3)
    view = memory.data[10:20]
    del memory
    gc.collect()
    assert [verb for verb, _ in cudart.calls] == ["register"] * 3  # the view still uses it
    del view
    gc.collect()
    assert [verb for verb, _ in cudart.calls] == ["register"] * 3 + ["unregister"] * 3


def test_a_failed_registration_leaves_pageable_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pinned._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        memory, cudart = _memory(monkeypatch, 2)
        _memory(monkeypatch, 2)
    assert not memory.is_pinned
    assert [verb for verb, _ in cudart.calls] == ["register"] * 3 + ["unregister"] * 2
    assert cudart.calls[3][1] == cudart.calls[1][1]
    assert caplog.text.count("host memory stays pageable") == 1
    memory.data.fill_(3)


def test_more_than_the_host_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned, "available_bytes", lambda: 1000)
    wanted = "801 bytes of host memory .* limit is 800 bytes .80 % of the 1000 that are available.; lower host_bytes"
    with pytest.raises(PoolExhaustedError, match=wanted):
        PinnedMemory(801, 1, NullRuntime())
    assert PinnedMemory(800, 1, NullRuntime()).nbytes == 800
    monkeypatch.setattr(pinned, "available_bytes", lambda: None)
    assert PinnedMemory(801, 1, NullRuntime()).data.numel() == 801


def test_a_host_without_gpu_has_plain_memory() -> None:
    memory = PinnedMemory(10, 3, NullRuntime())
    assert not memory.is_pinned
    assert memory.data.tolist() == [0] * 10
    for size, granule in ((0, 1), (1, 0)):
        with pytest.raises(ConfigError):
            PinnedMemory(size, granule, NullRuntime())


@needs_gpu
def test_a_gpu_reads_the_memory_at_its_own_address() -> None:
    memory = PinnedMemory(9 * PAGE + 5, PAGE, runtime_for("cuda"), largest_chunk=2 * PAGE)
    assert memory.is_pinned
    memory.data.copy_(torch.arange(memory.nbytes) % 251)
    for part in memory.data.split(memory.chunk_bytes):  # one copy must not span two registrations
        assert torch.equal(part.to("cuda").cpu(), part)
    memory.close()


PAGE_TOKENS, PAGE_BYTES, LAYERS, POOL_PAGES = 4, 6, 2, 8


def make(fill: torch.Tensor | None = None) -> RepresentationPool:
    return RepresentationPool(
        num_layers=LAYERS, page_tokens=PAGE_TOKENS, page_bytes=PAGE_BYTES, max_requests=3, max_tokens=20,
        total_tokens=POOL_PAGES * PAGE_TOKENS, device=torch.device("cpu"), fill=fill,
    )  # fmt: skip


def test_a_request_cannot_outgrow_its_row() -> None:
    with pytest.raises(ConfigError, match="max_tokens"):
        make().reserve(0, 21)


def test_a_page_is_clean_when_it_is_reused() -> None:
    fill = torch.arange(PAGE_BYTES, dtype=torch.uint8)
    pool = make(fill)
    pool.reserve(0, 20)
    for layer in range(LAYERS):
        pool.layer(layer)[:] = 77
    pool.free(0)
    pool.reserve(2, 20)
    assert torch.equal(pool._data[:, pool.held(2)], fill.expand(LAYERS, 5, PAGE_BYTES))


def test_padding_and_tokens_without_a_page_go_to_the_spare_page() -> None:
    pool = make()
    pool.reserve(1, 6)
    requests, positions = torch.tensor([1, 1, 1, 0, 1]), torch.tensor([0, 5, 8, 0, 0])
    real = torch.tensor([True, True, True, True, False])
    pages = pool.locate(requests, positions, real).tolist()
    assert pages == [*pool.held(1), pool.spare_page, pool.spare_page, pool.spare_page]
    assert pool.spare_page not in range(POOL_PAGES)
    assert pool.layer(0).shape == (POOL_PAGES + 1, PAGE_BYTES)


def test_pages_move_between_requests_as_bytes() -> None:
    pool = make()
    pool.reserve(0, 12)
    pool.reserve(1, 20)
    for layer in range(LAYERS):
        for place, page in enumerate(pool.held(0)):
            pool.layer(layer)[page] = 10 * layer + place
    data = pool.export_pages(0, 1, 3)
    assert data.tolist() == [[1] * PAGE_BYTES + [11] * PAGE_BYTES, [2] * PAGE_BYTES + [12] * PAGE_BYTES]
    pool.import_pages(1, 2, data)
    assert torch.equal(pool.export_pages(1, 2, 4), data)
    assert not pool.export_pages(1, 0, 2).any()
    assert not pool.export_pages(1, 4, 5).any()


def test_pages_that_a_request_does_not_hold_cannot_be_moved() -> None:
    pool = make()
    pool.reserve(0, 8)
    for start, stop in ((0, 3), (-1, 1), (2, 1)):
        with pytest.raises(AllocationError, match="holds 2 pages"):
            pool.export_pages(0, start, stop)
    with pytest.raises(AllocationError, match="holds 0 pages"):
        pool.import_pages(1, 0, torch.zeros(1, LAYERS * PAGE_BYTES, dtype=torch.uint8))
    with pytest.raises(ConfigError, match="uint8"):
        pool.import_pages(0, 0, torch.zeros(1, PAGE_BYTES, dtype=torch.uint8))


def test_a_fill_must_be_one_page() -> None:
    with pytest.raises(ConfigError, match="fill"):
        make(torch.zeros(1, dtype=torch.uint8))


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 20)), max_size=30))
def test_the_accounting_is_exact_over_any_history(history: list[tuple[int, int]]) -> None:
    """A request of n tokens holds ceil(n / page) pages of its own; 0 tokens means that it ends."""
    pool, model = make(), {0: 0, 1: 0, 2: 0}
    for request, tokens in history:
        need = max(-(-tokens // PAGE_TOKENS), model[request])
        if not tokens:
            pool.free(request)
            model[request] = 0
        elif sum(model.values()) - model[request] + need > POOL_PAGES:
            with pytest.raises(PoolExhaustedError, match="total_tokens"):
                pool.reserve(request, tokens)
        else:
            pool.reserve(request, tokens)
            model[request] = need
        held = [page for r in model for page in pool.held(r)]
        assert {r: len(pool.held(r)) for r in model} == model
        assert len(set(held)) == len(held)
        assert pool.allocator.in_use == len(held)
        assert [[p for p in row if p >= 0] for row in pool.table.tolist()] == [pool.held(r) for r in range(3)]


CPU_DEVICE = torch.device("cpu")


def test_rows_are_given_out_once() -> None:
    pool = ReqToTokenPool(2, 8, CPU_DEVICE)
    taken = [pool.alloc(), pool.alloc()]
    assert sorted(taken) == [0, 1]
    with pytest.raises(PoolExhaustedError, match="all 2 request rows are taken; raise max_requests"):
        pool.alloc()
    pool.free(0)
    with pytest.raises(AllocationError):
        pool.free(0)
    with pytest.raises(AllocationError):
        pool.set_slots(0, 0, torch.tensor([1]))
    assert pool.available == 1


@pytest.mark.parametrize(("start", "n"), [(6, 3), (-1, 1), (9, 1)])
def test_tokens_beyond_a_row_are_refused(start: int, n: int) -> None:
    pool = ReqToTokenPool(1, 8, CPU_DEVICE)
    pool.alloc()
    with pytest.raises(ConfigError, match="max_tokens"):
        pool.set_slots(0, start, torch.arange(n))
    assert (pool.table == -1).all()


CODE_LAYERS, CODE_PAGE, SHAPE, ROWS, TOKENS = 3, 4, (2, 3), 3, 40


def make_codes(total: int = ROWS * TOKENS) -> CodePages:
    return CodePages(
        num_layers=CODE_LAYERS, page_tokens=CODE_PAGE, token_shape=SHAPE, max_requests=ROWS, max_tokens=TOKENS,
        total_tokens=total, runtime=NullRuntime(),
    )  # fmt: skip


class Model:
    """The codes of requests as plain tensors, beside the pages."""

    def __init__(self, pages: CodePages, seed: int = 0) -> None:
        self.pages = pages
        self.random = torch.Generator().manual_seed(seed)
        self.of: dict[int, Tensor] = {}

    def fresh(self, tokens: int) -> Tensor:
        return torch.randint(0, 256, (CODE_LAYERS, tokens, *SHAPE), dtype=torch.uint8, generator=self.random)

    def write(self, request: int, tokens: int) -> None:
        """Write so many tokens behind those that are there."""
        before = self.of.get(request, self.fresh(0))
        start, codes = before.shape[1], self.fresh(tokens)
        self.of[request] = torch.cat([before, codes], 1)
        self.pages.reserve(request, start + tokens)
        for layer in range(CODE_LAYERS):
            self.pages.write(layer, request, start, codes[layer])

    def append(self, requests: list[int], padding: int = 0) -> None:
        """Add a token to each request, as a decode step does."""
        codes = self.fresh(len(requests) + padding)
        starts = [self.of[request].shape[1] for request in requests]
        for row, request in enumerate(requests):
            self.of[request] = torch.cat([self.of[request], codes[:, row : row + 1]], 1)
            self.pages.reserve(request, starts[row] + 1)
        rows = torch.tensor([*requests, *[ROWS] * padding], dtype=torch.int64)
        offsets = torch.tensor([*(start % CODE_PAGE for start in starts), *[0] * padding], dtype=torch.int64)
        done = [
            (r, self.pages.page(r, s)) for r, s in zip(requests, starts, strict=True) if s % CODE_PAGE == CODE_PAGE - 1
        ]
        for layer in range(CODE_LAYERS):
            self.pages.append(layer, Appending(rows, offsets, tuple(done)), codes[layer])

    def check(self, looked_at: dict[int, int], order: Iterable[int] = range(CODE_LAYERS)) -> None:
        """Compare what a pass sees of requests' first tokens, in all layers or those of `order`."""
        coded = {request: self.of[request].shape[1] for request in looked_at}
        window = self.pages.window([(request, n, coded[request]) for request, n in looked_at.items()])
        for layer in order:
            codes = self.pages.codes(layer, window).flatten(0, 1)
            for request, n in looked_at.items():
                at = torch.arange(n)
                pages = self.pages.pool.table[request, at // CODE_PAGE].long()
                assert torch.equal(codes[pages * CODE_PAGE + at % CODE_PAGE], self.of[request][layer, :n])


writes = st.tuples(st.just("write"), st.integers(0, 2), st.integers(1, 9))
appends = st.tuples(st.just("append"), st.integers(0, 2), st.integers(0, 2))
frees = st.tuples(st.just("free"), st.integers(0, 2), st.just(0))
lookups = st.tuples(st.just("look"), st.integers(0, 40), st.integers(0, 40))


@settings(max_examples=examples(200), deadline=None)
@given(steps=st.lists(writes | appends | frees | lookups, max_size=25))
def test_any_history_keeps_the_written_codes(steps: list[tuple[str, int, int]]) -> None:
    model = Model(make_codes())
    for what, a, b in steps:
        if what == "write" and (a not in model.of or model.of[a].shape[1] + b <= TOKENS):
            model.write(a, b)
        elif what == "append":
            model.append([r for r in {a, b} if r in model.of and model.of[r].shape[1] < TOKENS], padding=a)
        elif what == "free":
            model.pages.free(a)
            model.of.pop(a, None)
        elif what == "look":
            looked_at = {r: min(n, model.of[r].shape[1]) for r, n in ((0, a), (1, b), (2, a)) if r in model.of}
            model.check(looked_at, [(a + i * b) % CODE_LAYERS for i in range(4)])
    model.check({request: codes.shape[1] for request, codes in model.of.items()})
    for request in (*range(ROWS), 0):
        model.pages.free(request)
    assert model.pages.pool.allocator.in_use == 0


def test_the_next_layer_is_on_its_way_while_one_computes() -> None:
    pages = make_codes()
    model = Model(pages)
    model.write(0, 20)
    window = pages.window([(0, 17, 20)])
    brought = []
    for layer in range(CODE_LAYERS):
        pages.codes(layer, window)
        brought.append(pages.brought_bytes)
    page_bytes = CODE_PAGE * SHAPE[0] * SHAPE[1]
    assert brought == [2 * 5 * page_bytes, 3 * 5 * page_bytes, 3 * 5 * page_bytes]


def test_only_pages_that_are_looked_at_are_brought() -> None:
    pages = make_codes()
    model = Model(pages)
    model.write(0, 22)
    pages.codes(CODE_LAYERS - 1, pages.window([(0, 9, 22)]))
    assert pages.brought_bytes == 3 * CODE_PAGE * SHAPE[0] * SHAPE[1]


def test_pages_that_lie_one_behind_the_other_are_one_copy() -> None:
    pages = make_codes()
    pages.reserve(0, 12)
    pages.reserve(1, 4)
    pages.reserve(0, 20)
    runs = pages.window([(0, 20, 20)])
    assert sorted(runs.pages.tolist()) == [2, 3]
    assert int(runs.pages.sum()) == 5


def test_pages_that_were_not_reserved_are_refused() -> None:
    pages = make_codes()
    pages.reserve(0, 5)
    with pytest.raises(AllocationError, match="holds 2 pages"):
        pages.write(0, 0, 0, torch.zeros(9, *SHAPE, dtype=torch.uint8))
    with pytest.raises(AllocationError, match="token 8"):
        pages.page(0, 8)


def test_a_full_pool_takes_nothing_from_other_requests() -> None:
    pages = make_codes(total=16)
    model = Model(pages)
    model.write(0, 12)
    with pytest.raises(PoolExhaustedError, match="total_tokens"):
        pages.reserve(1, 8)
    pages.reserve(1, 4)
    model.check({0: 12})


def test_a_gpu_that_is_not_the_current_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with pytest.raises(ConfigError, match=r"device='cuda:1': must be the current one, cuda:0; call .*set_device.1"):
        CudaRuntime(torch.device("cuda:1"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_expanded_and_strided_tensors_are_uploaded() -> None:
    device = torch.device("cuda")
    for tensor in (torch.arange(4).expand(3, 4), torch.arange(12).view(3, 4).T):
        assert torch.equal(upload(tensor, device).cpu(), tensor)
