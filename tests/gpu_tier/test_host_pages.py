"""States of host pages, and the cache of those that outlive their requests."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from thoroughness import examples

from gpu_tier.errors import AllocationError, PoolExhaustedError, StateError
from gpu_tier.pools.host_pages import HostPages, PageState

PAGES = 5
page_ids = st.integers(0, PAGES - 1)


def test_a_page_goes_through_its_states() -> None:
    pages = HostPages(2, 4)
    (page,) = pages.alloc(1)
    assert pages.state(page) is PageState.FILLING
    with pytest.raises(StateError, match="filling"):
        pages.begin_write([page])
    with pytest.raises(StateError, match="filling"):
        pages.cache(page, 1)
    pages.filled([page])
    with pytest.raises(StateError, match="is valid, cannot become valid"):
        pages.filled([page])
    pages.begin_write([page])
    with pytest.raises(StateError):
        pages.begin_write([page])
    pages.free([page])
    with pytest.raises(AllocationError, match="being written"):
        pages.free([page])
    assert pages.state(page) is PageState.WRITING_L3
    pages.end_write([page])
    assert (pages.state(page), pages.available) == (PageState.FREE, 2)
    with pytest.raises(StateError):
        pages.end_write([page])


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


def test_pages_with_a_key_outlive_their_request_until_they_are_needed() -> None:
    pages = HostPages(3, 4)
    first, second, third = pages.alloc(3)
    pages.filled([first, second, third])
    assert [pages.cache(page, f"k{page}") for page in (first, second)] == [first, second]
    assert pages.cache(third, f"k{first}") == first
    pages.free([second, first, third])
    assert (pages.available, pages.cached) == (3, 2)
    assert pages.lookup(f"k{second}") == second
    assert pages.lookup("unknown") is None
    assert set(pages.alloc(2)) == {first, third}
    assert pages.lookup(f"k{first}") is None
    with pytest.raises(PoolExhaustedError, match="host_bytes"):
        pages.alloc(1)
    pages.forget(second)
    pages.free([second])
    assert (pages.state(second), pages.available) == (PageState.FREE, 1)


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


def test_a_page_keeps_its_key() -> None:
    pages = HostPages(1, 4)
    (page,) = pages.alloc(1)
    pages.filled([page])
    pages.cache(page, "a")
    assert pages.cache(page, "a") == page
    with pytest.raises(StateError, match="another key"):
        pages.cache(page, "b")


class Histories(RuleBasedStateMachine):
    """Any sequence of calls against a plain model."""

    def __init__(self) -> None:
        super().__init__()
        self.pages = HostPages(PAGES, 4)
        self.held: dict[int, int] = {}
        self.writing: set[int] = set()
        self.filling: set[int] = set()
        self.keys: dict[int, int] = {}  # key → page

    @rule(n=st.integers(0, PAGES + 1))
    def alloc(self, n: int) -> None:
        if n > PAGES - len(self.held):
            with pytest.raises(PoolExhaustedError):
                self.pages.alloc(n)
            return
        for page in self.pages.alloc(n):
            assert page not in self.held
            self.held[page] = 1
            self.filling.add(page)
            # An evicted page must be nobody's any more.
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
    def filled(self, page: int) -> None:
        if page in self.filling:
            self.pages.filled([page])
            self.filling.remove(page)

    @rule(page=page_ids)
    def write(self, page: int) -> None:
        if page in self.writing:
            self.pages.end_write([page])
            self.writing.remove(page)
            self._drop(page)
        elif page in self.held and page not in self.filling:
            self.pages.begin_write([page])
            self.writing.add(page)
            self.held[page] += 1

    @rule(page=page_ids, key=st.integers(0, 3))
    def cache(self, page: int, key: int) -> None:
        allowed = page in self.held and page not in self.filling
        if not allowed or (page in self.keys.values() and self.keys.get(key) != page):
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
        assert [self.pages.refcount(page) for page in range(PAGES)] == [self.held.get(p, 0) for p in range(PAGES)]
        assert self.pages.available == PAGES - len(self.held)
        assert self.pages.cached == len(self.keys)
        for page in range(PAGES):
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
