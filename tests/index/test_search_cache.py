"""The search cache by itself: it never shows an old record, and never holds more than it may."""

from collections.abc import Sequence
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from index_rig import TableView, location, record
from thoroughness import examples

from kvcm.index.answers import compose_answer
from kvcm.index.backends.memory import MemoryBackend
from kvcm.index.meta_index import MetaIndex
from kvcm.index.search_cache import CacheBudget, ReadInFlight, SearchCache
from kvcm.model.locations import BlockRecord, LocationStatus

KEYS = range(6)
ENTRY_BYTES = 150 + len(location("v0").chunk)


def version(number: int) -> BlockRecord:
    return record(location(f"v{number}"))


def hidden(number: int) -> BlockRecord:
    return record(location(f"v{number}", status=LocationStatus.DELETING))


class SharedBackend(MemoryBackend):
    """Like one in front of which the cache needs a budget."""

    awaits = True
    is_shared = True


class Rig:
    def __init__(self, capacity_bytes: int | None = None) -> None:
        self.view = TableView({"nfs": 3, "fs": 2})
        self.is_coherent = True
        self.budget = CacheBudget(capacity_bytes, lambda: self.is_coherent)
        self.cache = SearchCache(self.view, self.budget, compose_answer)

    def read(self, key: int, found: BlockRecord | None) -> None:
        self.cache.end(self.cache.begin([key]), [found])

    def known(self, keys: Sequence[int]) -> list[int]:
        """Which keys the cache knows; asking keeps them."""
        return [key for key, answer in zip(keys, self.cache.lookup(keys), strict=True) if answer is not None]


def test_what_was_read_or_noted_is_known_and_nothing_else() -> None:
    rig = Rig()
    answer = rig.cache.note(1, version(0))
    assert answer == version(0).locations[0].chunk
    rig.read(2, version(1))
    assert rig.cache.lookup([3, 1, 2]) == [None, answer, version(1).locations[0].chunk]


@pytest.mark.parametrize("after", [None, hidden(0), record(location(storage="off"))])
def test_what_cannot_be_read_any_more_is_forgotten(after: BlockRecord | None) -> None:
    rig = Rig()
    rig.cache.note(1, version(0))
    rig.cache.age()
    assert rig.cache.note(1, after) is None
    assert rig.known([1]) == []
    assert rig.cache.note(1, after) is None


def test_a_read_shows_what_it_found_even_where_it_may_not_be_kept() -> None:
    rig = Rig()
    read = rig.cache.begin([1, 2])
    rig.cache.forget([1])
    chunk = version(0).locations[0].chunk
    assert rig.cache.end(read, [version(0), version(0)]) == [chunk, chunk]
    assert rig.known([1, 2]) == [2]


def test_a_storage_that_changes_empties_everything() -> None:
    """Reads under way included: their answers were composed, or will be, for other storages."""
    rig = Rig()
    rig.cache.note(1, version(0))
    rig.cache.age()
    rig.cache.note(2, version(0))
    before, chunk = rig.cache.begin([3]), version(0).locations[0].chunk
    rig.view.change("fs", None)
    assert rig.cache.end(before, [version(0)]) == [chunk]
    assert rig.known([1, 2, 3]) == []
    rig.view.change("nfs", None)
    assert rig.cache.note(1, version(0)) is None


def test_an_answer_noted_while_a_storage_changes_is_not_kept() -> None:
    """The change comes between the last lookup and the note; the next lookup must not trust the note."""
    rig = Rig()
    rig.cache.lookup([])
    rig.cache.note(1, version(0))
    rig.view.change("nfs", None)
    assert rig.known([1]) == []


def test_nothing_is_kept_while_changes_of_others_are_not_heard_of() -> None:
    rig = Rig(1 << 20)
    rig.read(1, version(0))
    rig.is_coherent = False
    rig.cache.clear()
    rig.read(1, version(0))
    rig.cache.note(2, version(0))
    assert rig.known([1, 2]) == []
    under_way = rig.cache.begin([3])
    rig.cache.clear()
    rig.is_coherent = True
    rig.cache.end(under_way, [version(0)])
    assert rig.known([3]) == [], "it began before anybody listened"
    rig.read(1, version(0))
    assert rig.known([1]) == [1]


def test_a_failed_read_leaves_nothing_behind() -> None:
    rig = Rig()
    other = rig.cache.begin([1])
    rig.cache.abandon(rig.cache.begin([1, 2]))
    rig.cache.end(other, [version(0)])
    assert rig.known([1, 2]) == [], "whose placeholder was taken over keeps nothing"
    assert rig.cache._reading == {}


@settings(max_examples=examples(200), deadline=None, derandomize=True)
@given(
    capacity=st.integers(1, 40),
    accesses=st.lists(st.tuples(st.booleans(), st.integers(0, 60)), max_size=300),
)
def test_all_caches_together_stay_within_the_budget(capacity: int, accesses: list[tuple[bool, int]]) -> None:
    """Invariant: bounded, whichever cache the entries lie in, whatever moves between generations."""
    rig = Rig(capacity * ENTRY_BYTES)
    caches = [rig.cache, SearchCache(rig.view, rig.budget, compose_answer)]
    for second, key in accesses:
        cache = caches[second]
        if cache.lookup([key]) == [None]:
            cache.end(cache.begin([key]), [version(0)])
        held = sum(len(each._young) + len(each._old) for each in caches)
        # One entry of each generation may be the one that fills it.
        assert held <= capacity + 2


def test_what_is_asked_for_stays_and_the_rest_goes() -> None:
    rig = Rig(20 * ENTRY_BYTES)
    for key in range(200):
        rig.read(key, version(0))
        assert rig.known([0]) == [0]
    left = rig.known(range(200))
    assert 0 in left
    assert 199 in left
    assert len(left) <= 21


class Reading(NamedTuple):
    read: ReadInFlight
    found: list[BlockRecord | None]


class SearchCacheMachine(RuleBasedStateMachine):
    """Reads take their time and changes fall in between; the store in plain dicts is the truth.

    A change is stored at one step and the cache hears of it at a later one, before its writer is answered: until then
    either record may be shown, afterwards only the new one (the cache's second invariant).
    """

    @initialize(capacity=st.sampled_from([None, 3 * ENTRY_BYTES, 1 << 20]))
    def open(self, capacity: int | None) -> None:
        self.rig = Rig(capacity)
        self.cache = self.rig.cache
        self.stored: dict[int, BlockRecord] = {}
        self.unheard: set[int] = set()
        self.reading: list[Reading] = []
        self.count = 0

    @rule(keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=4))
    def begin(self, keys: list[int]) -> None:
        """The store answers at the same step: whatever happens until the end makes it old."""
        self.reading.append(Reading(self.cache.begin(keys), [self.stored.get(key) for key in keys]))

    @precondition(lambda self: self.reading)
    @rule(pick=st.integers(0, 30))
    def end(self, pick: int) -> None:
        reading = self.reading.pop(pick % len(self.reading))
        answers = self.cache.end(reading.read, reading.found)
        assert answers == [compose_answer(found, self.rig.view) if found else None for found in reading.found]

    @precondition(lambda self: self.reading)
    @rule(pick=st.integers(0, 30))
    def abandon(self, pick: int) -> None:
        self.cache.abandon(self.reading.pop(pick % len(self.reading)).read)

    @rule(key=st.sampled_from(KEYS), what=st.sampled_from(["new", "new", "hidden", "gone"]))
    def change(self, key: int, what: str) -> None:
        self.count += 1
        if what == "gone":
            self.stored.pop(key, None)
        else:
            self.stored[key] = version(self.count) if what == "new" else hidden(self.count)
        self.unheard.add(key)

    @precondition(lambda self: self.unheard)
    @rule(pick=st.integers(0, 30), noted=st.booleans())
    def hear(self, pick: int, noted: bool) -> None:
        key = sorted(self.unheard)[pick % len(self.unheard)]
        self.unheard.remove(key)
        if noted:
            self.cache.note(key, self.stored.get(key))
        else:
            self.cache.forget([key])

    @rule(name=st.sampled_from(["nfs", "fs"]), rank=st.sampled_from([None, 1, 2]))
    def change_storage(self, name: str, rank: int | None) -> None:
        self.rig.view.change(name, rank)

    @rule()
    def reset(self) -> None:
        self.cache.clear()
        self.unheard.clear()

    @rule()
    def lose_contact(self) -> None:
        self.rig.is_coherent = False
        self.reset()

    @rule()
    def gain_contact(self) -> None:
        if not self.rig.is_coherent:
            self.reset()
        self.rig.is_coherent = True

    @rule()
    def age(self) -> None:
        self.cache.age()

    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=4))
    def look_up(self, keys: list[int]) -> None:
        self.check(keys)

    @invariant()
    def no_placeholder_outlives_its_read(self) -> None:
        open_reads = [each.read for each in self.reading]
        assert all(any(read is each for each in open_reads) for read in self.cache._reading.values())

    def check(self, keys: Sequence[int]) -> None:
        """An answer that is shown is the answer for the record in the store, once the change of it was heard."""
        for key, answer in zip(keys, self.cache.lookup(keys), strict=True):
            if answer is not None and key not in self.unheard:
                found = self.stored.get(key)
                assert found is not None, key
                assert answer == compose_answer(found, self.rig.view), key
        assert self.rig.is_coherent or self.rig.budget.capacity_bytes is None or not self.cache._young

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            self.check(KEYS)


class TestAReadNeverPutsAnOldRecordBack(SearchCacheMachine.TestCase):
    settings = settings(max_examples=examples(400), stateful_step_count=40, deadline=None, derandomize=True)


async def test_hits_and_misses_are_counted() -> None:
    """Of a prefix too, whose miss is looked for in more records than it returns."""
    rig = Rig(1 << 20)
    backend = SharedBackend()
    index = MetaIndex(backend, rig.view, budget=rig.budget)
    await index.put({key: version(key) for key in range(4)})
    for stop_at_miss, hits, misses in ((False, 0, 5), (False, 4, 1), (True, 4, 1)):
        rig.budget.hits = rig.budget.misses = 0
        await index.answers(range(5), stop_at_miss=stop_at_miss)
        assert (rig.budget.hits, rig.budget.misses) == (hits, misses)
