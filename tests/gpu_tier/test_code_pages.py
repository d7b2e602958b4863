"""Codes in host memory: what a layer finds on the device is what was written, whoever else writes and reads."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples
from torch import Tensor

from gpu_tier.errors import AllocationError, PoolExhaustedError
from gpu_tier.pools.code_pages import Appending, CodePages
from gpu_tier.runtime import NullRuntime

LAYERS, PAGE, SHAPE, ROWS, TOKENS = 3, 4, (2, 3), 3, 40


def make(total: int = ROWS * TOKENS) -> CodePages:
    return CodePages(
        num_layers=LAYERS, page_tokens=PAGE, token_shape=SHAPE, max_requests=ROWS, max_tokens=TOKENS,
        total_tokens=total, runtime=NullRuntime(),
    )  # fmt: skip


class Model:
    """The codes of requests as plain tensors, beside the pages."""

    def __init__(self, pages: CodePages, seed: int = 0) -> None:
        self.pages = pages
        self.random = torch.Generator().manual_seed(seed)
        self.of: dict[int, Tensor] = {}

    def fresh(self, tokens: int) -> Tensor:
        return torch.randint(0, 256, (LAYERS, tokens, *SHAPE), dtype=torch.uint8, generator=self.random)

    def write(self, request: int, tokens: int) -> None:
        """Write so many tokens behind those that are there."""
        before = self.of.get(request, self.fresh(0))
        start, codes = before.shape[1], self.fresh(tokens)
        self.of[request] = torch.cat([before, codes], 1)
        self.pages.reserve(request, start + tokens)
        for layer in range(LAYERS):
            self.pages.write(layer, request, start, codes[layer])

    def append(self, requests: list[int], padding: int = 0) -> None:
        """Add a token to each request, as a decode step does."""
        codes = self.fresh(len(requests) + padding)
        starts = [self.of[request].shape[1] for request in requests]
        for row, request in enumerate(requests):
            self.of[request] = torch.cat([self.of[request], codes[:, row : row + 1]], 1)
            self.pages.reserve(request, starts[row] + 1)
        rows = torch.tensor([*requests, *[ROWS] * padding], dtype=torch.int64)
        offsets = torch.tensor([*(start % PAGE for start in starts), *[0] * padding], dtype=torch.int64)
        done = [(r, self.pages.page(r, s)) for r, s in zip(requests, starts, strict=True) if s % PAGE == PAGE - 1]
        for layer in range(LAYERS):
            self.pages.append(layer, Appending(rows, offsets, tuple(done)), codes[layer])

    def check(self, looked_at: dict[int, int], order: list[int] | None = None) -> None:
        """Compare what a pass sees of requests' first tokens, in all layers."""
        coded = {request: self.of[request].shape[1] for request in looked_at}
        window = self.pages.window([(request, n, coded[request]) for request, n in looked_at.items()])
        for layer in order or range(LAYERS):
            codes = self.pages.codes(layer, window).flatten(0, 1)
            for request, n in looked_at.items():
                at = torch.arange(n)
                pages = self.pages.pool.table[request, at // PAGE].long()
                assert torch.equal(codes[pages * PAGE + at % PAGE], self.of[request][layer, :n])


steps = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(0, 2), st.integers(1, 9)),
        st.tuples(st.just("append"), st.integers(0, 2), st.integers(0, 2)),
        st.tuples(st.just("free"), st.integers(0, 2), st.just(0)),
        st.tuples(st.just("look"), st.integers(0, 40), st.integers(0, 40)),
    ),
    max_size=25,
)


@settings(max_examples=examples(200), deadline=None)
@given(steps=steps)
def test_any_history_leaves_what_was_written(steps: list[tuple[str, int, int]]) -> None:
    model = Model(make())
    for what, a, b in steps:
        if what == "write" and (a not in model.of or model.of[a].shape[1] + b <= TOKENS):
            model.write(a, b)
        elif what == "append":
            model.append([r for r in {a, b} if r in model.of and model.of[r].shape[1] < TOKENS], padding=a)
        elif what == "free":
            model.pages.free(a)
            model.of.pop(a, None)
        elif what == "look":
            model.check({r: min(n, model.of[r].shape[1]) for r, n in ((0, a), (1, b), (2, a)) if r in model.of})
    model.check({request: codes.shape[1] for request, codes in model.of.items()})


def test_layers_may_be_asked_for_in_any_order() -> None:
    model = Model(make())
    model.write(0, 21)
    model.write(2, 8)
    for order in ([2, 0, 1], [1, 1, 0], [0, 2, 0]):
        model.check({0: 21, 2: 8}, order)


def test_the_next_layer_is_on_its_way_while_one_computes() -> None:
    pages = make()
    model = Model(pages)
    model.write(0, 20)
    window = pages.window([(0, 17, 20)])
    brought = []
    for layer in range(LAYERS):
        pages.codes(layer, window)
        brought.append(pages.brought_bytes)
    page_bytes = PAGE * SHAPE[0] * SHAPE[1]
    assert brought == [2 * 5 * page_bytes, 3 * 5 * page_bytes, 3 * 5 * page_bytes]


def test_only_pages_that_are_looked_at_are_brought() -> None:
    pages = make()
    model = Model(pages)
    model.write(0, 22)
    pages.codes(LAYERS - 1, pages.window([(0, 9, 22)]))
    assert pages.brought_bytes == 3 * PAGE * SHAPE[0] * SHAPE[1]


def test_pages_that_lie_one_behind_the_other_are_one_copy() -> None:
    pages = make()
    pages.reserve(0, 12)
    pages.reserve(1, 4)
    pages.reserve(0, 20)
    runs = pages.window([(0, 20, 20)])
    assert sorted(runs.pages.tolist()) == [2, 3]
    assert int(runs.pages.sum()) == 5


def test_exported_pages_can_be_taken_over() -> None:
    pages = make()
    model = Model(pages)
    model.write(0, 18)
    model.append([0])
    model.append([0])
    model.pages.reserve(1, 20)
    pages.adopt(1, 0, pages.export(0, 0, 2))
    pages.adopt(1, 2, pages.export(0, 2, 5))
    model.of[1] = model.of[0]
    model.check({0: 20, 1: 20})


def test_pages_that_were_not_reserved_are_refused() -> None:
    pages = make()
    pages.reserve(0, 5)
    with pytest.raises(AllocationError, match="holds 2 pages"):
        pages.write(0, 0, 0, torch.zeros(9, *SHAPE, dtype=torch.uint8))
    with pytest.raises(AllocationError, match="token 8"):
        pages.page(0, 8)


def test_a_full_pool_takes_nothing_from_anybody() -> None:
    pages = make(total=16)
    model = Model(pages)
    model.write(0, 12)
    with pytest.raises(PoolExhaustedError, match="total_tokens"):
        pages.reserve(1, 8)
    pages.reserve(1, 4)
    model.check({0: 12})
    pages.free(0)
    pages.free(1)
    pages.free(1)
    assert pages.pool.allocator.in_use == 0


def test_bytes_are_those_that_are_allocated() -> None:
    pages = make()
    pages.reserve(0, 9)
    page_bytes = PAGE * SHAPE[0] * SHAPE[1]
    assert pages.device_bytes_of(9) == 2 * 3 * page_bytes + pages.tail[:, 0].numel()
    assert pages.host_bytes == LAYERS * (pages.pool.num_pages + 1) * page_bytes
