"""Pages: references, all or nothing, and a double free that changes nothing."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples

from gpu_tier.errors import AllocationError, ConfigError, PoolExhaustedError
from gpu_tier.pools.allocator import PagedAllocator

PAGES = 8
pages = st.lists(st.integers(-2, PAGES + 1), max_size=5)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("alloc"), st.integers(0, PAGES + 1)),
        st.tuples(st.just("free"), pages),
        st.tuples(st.just("share"), pages),
    ),
    max_size=30,
)


def _apply(allocator: PagedAllocator, held: Counter[int], verb: str, argument: list[int] | int) -> None:
    """Do a step with the allocator and the model, and check that both agree on whether it is allowed."""
    if isinstance(argument, int):
        if argument > PAGES - len(held):
            with pytest.raises(PoolExhaustedError, match=f"{PAGES - len(held)} of {PAGES} pages left, {argument} were"):
                allocator.alloc(argument)
            return
        taken = allocator.alloc(argument)
        assert not set(taken) & set(held)
        assert len(set(taken)) == argument
        held.update(taken)
        return
    times = Counter(argument)
    allowed = all(held[page] >= (n if verb == "free" else 1) for page, n in times.items())
    if not allowed:
        with pytest.raises(AllocationError):
            getattr(allocator, verb)(argument)
        return
    getattr(allocator, verb)(argument)
    (held.subtract if verb == "free" else held.update)(times)
    for page in times:
        if not held[page]:
            del held[page]


@settings(max_examples=examples(400), deadline=None)
@given(steps)
def test_references_are_those_of_a_dict(history: list[tuple[str, list[int] | int]]) -> None:
    allocator = PagedAllocator(PAGES, 4)
    held: Counter[int] = Counter()
    for verb, argument in history:
        _apply(allocator, held, verb, argument)
        assert [allocator.refcount(page) for page in range(PAGES)] == [held[page] for page in range(PAGES)]
        assert (allocator.in_use, allocator.available) == (len(+held), PAGES - len(+held))


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
