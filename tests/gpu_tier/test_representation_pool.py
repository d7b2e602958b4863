"""The memory of the representations: who holds which page, and that nothing of a former holder is left in it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples

from gpu_tier.errors import AllocationError, ConfigError, PoolExhaustedError
from gpu_tier.pools.representation import RepresentationPool

PAGE_TOKENS, PAGE_BYTES, LAYERS, PAGES = 4, 6, 2, 8


def make(fill: torch.Tensor | None = None) -> RepresentationPool:
    return RepresentationPool(
        num_layers=LAYERS, page_tokens=PAGE_TOKENS, page_bytes=PAGE_BYTES, max_requests=3, max_tokens=20,
        total_tokens=PAGES * PAGE_TOKENS, device=torch.device("cpu"), fill=fill,
    )  # fmt: skip


def test_a_request_gets_the_pages_of_its_tokens_and_keeps_them_as_it_grows() -> None:
    pool = make()
    pool.reserve(1, 5)
    first = pool.held(1)
    pool.reserve(1, 8)
    assert pool.held(1) == first
    assert len(first) == 2
    pool.reserve(1, 9)
    assert pool.held(1)[:2] == first
    assert pool.table[1].tolist() == [*pool.held(1), -1, -1]


def test_when_too_little_is_free_the_request_keeps_what_it_had() -> None:
    pool = make()
    pool.reserve(0, 20)
    pool.reserve(1, 8)
    with pytest.raises(PoolExhaustedError, match="total_tokens"):
        pool.reserve(1, 17)
    assert len(pool.held(1)) == 2
    assert pool.allocator.available == 1


def test_a_request_cannot_outgrow_its_row() -> None:
    with pytest.raises(ConfigError, match="max_tokens"):
        make().reserve(0, 21)


def test_a_page_is_clean_whoever_had_it() -> None:
    fill = torch.arange(PAGE_BYTES, dtype=torch.uint8)
    pool = make(fill)
    pool.reserve(0, 20)
    for layer in range(LAYERS):
        pool.layer(layer)[:] = 77
    pool.free(0)
    pool.reserve(2, 20)
    assert torch.equal(pool._data[:, pool.held(2)], fill.expand(LAYERS, 5, PAGE_BYTES))


def test_freeing_twice_or_a_stranger_changes_nothing() -> None:
    pool = make()
    pool.reserve(0, 6)
    pool.free(0)
    pool.free(0)
    pool.free(2)
    assert pool.allocator.available == PAGES
    assert (pool.table == -1).all()


def test_padding_and_tokens_without_a_page_go_to_the_spare_page() -> None:
    pool = make()
    pool.reserve(1, 6)
    requests, positions = torch.tensor([1, 1, 1, 0, 1]), torch.tensor([0, 5, 8, 0, 0])
    real = torch.tensor([True, True, True, True, False])
    pages = pool.locate(requests, positions, real).tolist()
    assert pages == [*pool.held(1), pool.spare_page, pool.spare_page, pool.spare_page]
    assert pool.spare_page not in range(PAGES)
    assert pool.layer(0).shape == (PAGES + 1, PAGE_BYTES)


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
        elif sum(model.values()) - model[request] + need > PAGES:
            with pytest.raises(PoolExhaustedError):
                pool.reserve(request, tokens)
        else:
            pool.reserve(request, tokens)
            model[request] = need
        held = [page for r in model for page in pool.held(r)]
        assert {r: len(pool.held(r)) for r in model} == model
        assert len(set(held)) == len(held)
        assert pool.allocator.in_use == len(held)
        assert [[p for p in row if p >= 0] for row in pool.table.tolist()] == [pool.held(r) for r in range(3)]
