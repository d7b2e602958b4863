"""The search cache: it never returns an old record and stays within its budget; and what an answer is composed of."""

from collections.abc import Sequence
from typing import NamedTuple

import pytest
from fake_clock import FakeClock
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from index_rig import TableView, location, record
from record_by_record import RecordByRecord
from thoroughness import examples

from kvcm.index.backends.memory import MemoryBackend
from kvcm.index.meta_index import MetaIndex
from kvcm.index.search_cache import CacheBudget, ChunkCache, ReadInFlight, SearchCache, compose_answer, filter_specs
from kvcm.model.locations import (
    BlockRecord,
    Location,
    LocationStatus,
    SpecUri,
    decode_chunk,
    encode_chunk,
    event_hash_of,
    with_checksums,
    with_event_hashes,
)
from kvcm.model.storages import StorageType
from kvcm.protocol.meta_service_pb2 import GetCacheLocationResponse

KEYS = range(6)
ENTRY_BYTES = 150 + len(location("v0").chunk)


def version(number: int) -> BlockRecord:
    return record(location(f"v{number}"))


def hidden(number: int) -> BlockRecord:
    return record(location(f"v{number}", status=LocationStatus.DELETING))


class SharedBackend(RecordByRecord, MemoryBackend):
    """Like one in front of which the cache needs a budget."""

    awaits = True
    is_shared = True


class Rig:
    def __init__(self, capacity_bytes: int | None = None) -> None:
        self.view = TableView({"nfs": 3, "fs": 2})
        self.is_coherent = True
        self.budget = CacheBudget(capacity_bytes, lambda _store: self.is_coherent)
        self.cache = SearchCache(self.view, self.budget, compose_answer)

    def read(self, key: int, found: BlockRecord | None) -> None:
        self.cache.end_read(self.cache.begin_read([key]), [found])

    def known(self, keys: Sequence[int]) -> list[int]:
        """Which keys the cache knows; asking keeps them."""
        return [key for key, answer in zip(keys, self.cache.lookup(keys), strict=True) if answer is not None]


def test_only_records_read_or_stored_are_cached() -> None:
    rig = Rig()
    answer = rig.cache.store(1, version(0))
    assert answer == version(0).locations[0].chunk
    rig.read(2, version(1))
    assert rig.cache.lookup([3, 1, 2]) == [None, answer, version(1).locations[0].chunk]


def test_a_read_shows_what_it_found_even_where_it_may_not_be_kept() -> None:
    rig = Rig()
    read = rig.cache.begin_read([1, 2])
    rig.cache.forget([1])
    chunk = version(0).locations[0].chunk
    assert rig.cache.end_read(read, [version(0), version(0)]) == [chunk, chunk]
    assert rig.known([1, 2]) == [2]


def test_nothing_is_kept_while_changes_of_others_are_not_received_of() -> None:
    rig = Rig(1 << 20)
    rig.read(1, version(0))
    rig.is_coherent = False
    rig.cache.clear()
    rig.read(1, version(0))
    rig.cache.store(2, version(0))
    assert rig.known([1, 2]) == []
    under_way = rig.cache.begin_read([3])
    rig.cache.clear()
    rig.is_coherent = True
    rig.cache.end_read(under_way, [version(0)])
    assert rig.known([3]) == [], "it began before the cache subscribed"
    rig.read(1, version(0))
    assert rig.known([1]) == [1]


def test_a_failed_read_leaves_nothing_behind() -> None:
    rig = Rig()
    other = rig.cache.begin_read([1])
    rig.cache.abandon(rig.cache.begin_read([1, 2]))
    rig.cache.end_read(other, [version(0)])
    assert rig.known([1, 2]) == [1]
    assert not rig.cache._reads


def test_reads_of_the_same_keys_are_kept_without_what_changed_during_each() -> None:
    rig = Rig()
    first = rig.cache.begin_read([1, 2, 3])
    rig.cache.forget([1])
    second = rig.cache.begin_read([1, 2, 3])
    rig.cache.forget([2])
    rig.cache.end_read(second, [version(2)] * 3)
    assert rig.known([1, 2, 3]) == [1, 3]
    rig.cache.forget([3])
    rig.cache.end_read(first, [version(0)] * 3)
    assert rig.known([2, 3]) == []
    assert rig.cache.lookup([1]) == [compose_answer(version(2), rig.view)]


@settings(max_examples=examples(200), deadline=None, derandomize=True)
@given(capacity=st.integers(1, 40), accesses=st.lists(st.tuples(st.booleans(), st.integers(0, 60)), max_size=300))
def test_all_caches_together_stay_within_the_budget(capacity: int, accesses: list[tuple[bool, int]]) -> None:
    """Invariant: bounded, in whatever cache and generation the entries lie."""
    rig = Rig(capacity * ENTRY_BYTES)
    caches = [rig.cache, SearchCache(rig.view, rig.budget, compose_answer)]
    for second, key in accesses:
        cache = caches[second]
        if cache.lookup([key]) == [None]:
            cache.end_read(cache.begin_read([key]), [version(0)])
        held = sum(len(each._young) + len(each._old) for each in caches)
        # One entry of each generation may be the one that fills it.
        assert held <= capacity + 2


@settings(max_examples=examples(200), deadline=None, derandomize=True)
@given(
    capacity=st.integers(1, 40),
    reads=st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=12), max_size=20),
    absent=st.sets(st.integers(0, 30)),
)
def test_many_keys_are_kept_as_one_by_one(capacity: int, reads: list[list[int]], absent: set[int]) -> None:
    """Also where a generation ends between them, and where one is there twice."""
    together, alone = Rig(capacity * ENTRY_BYTES), Rig(capacity * ENTRY_BYTES)
    for keys in reads:
        found = [None if key in absent else version(0) for key in keys]
        together.cache.end_read(together.cache.begin_read(keys), found)
        for key, each in dict(zip(keys, found, strict=True)).items():
            alone.read(key, each)
        assert (together.cache._young, together.cache._old) == (alone.cache._young, alone.cache._old)
        assert together.budget.used_bytes == alone.budget.used_bytes
        assert not together.cache._reads


def test_requested_entries_stay_and_others_are_evicted() -> None:
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

    The store gets a change at one step and the cache at a later one, before the writer gets its answer: until then the
    cache may return either record, afterwards only the new one (its second invariant).
    """

    @initialize(capacity=st.sampled_from([None, 3 * ENTRY_BYTES, 1 << 20]))
    def open(self, capacity: int | None) -> None:
        self.rig = Rig(capacity)
        self.cache = self.rig.cache
        self.stored: dict[int, BlockRecord] = {}
        self.unreceived: set[int] = set()
        self.reading: list[Reading] = []
        self.count = 0

    @rule(keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=4))
    def begin(self, keys: list[int]) -> None:
        """The store answers at the same step: whatever happens until the end makes it old."""
        self.reading.append(Reading(self.cache.begin_read(keys), [self.stored.get(key) for key in keys]))

    @precondition(lambda self: self.reading)
    @rule(pick=st.integers(0, 30))
    def end(self, pick: int) -> None:
        reading = self.reading.pop(pick % len(self.reading))
        answers = self.cache.end_read(reading.read, reading.found)
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
        self.unreceived.add(key)

    @precondition(lambda self: self.unreceived)
    @rule(pick=st.integers(0, 30), noted=st.booleans())
    def receive(self, pick: int, noted: bool) -> None:
        key = sorted(self.unreceived)[pick % len(self.unreceived)]
        self.unreceived.remove(key)
        if noted:
            self.cache.store(key, self.stored.get(key))
        else:
            self.cache.forget([key])

    @rule(name=st.sampled_from(["nfs", "fs"]), rank=st.sampled_from([None, 1, 2]))
    def change_storage(self, name: str, rank: int | None) -> None:
        self.rig.view.change(name, rank)

    @rule()
    def reset(self) -> None:
        self.cache.clear()
        self.unreceived.clear()

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
    def lookup(self, keys: list[int]) -> None:
        self.check(keys)

    @invariant()
    def no_note_outlives_its_read(self) -> None:
        assert self.cache._reads <= {each.read for each in self.reading}

    def check(self, keys: Sequence[int]) -> None:
        """The cache answers for the record in the store, once it has received the last change of the record."""
        for key, answer in zip(keys, self.cache.lookup(keys), strict=True):
            if answer is not None and key not in self.unreceived:
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


# ── What a match returns for one block (invariant 1, decision 14) ──


SERVING, WRITING, DELETING = LocationStatus.SERVING, LocationStatus.WRITING, LocationStatus.DELETING
VIEW = TableView({"pool": 0, "mc": 1, "fs": 2, "nfs": 3, "nfs2": 3, "off": None})
TYPES = {
    "pool": StorageType.ST_TAIRMEMPOOL,
    "mc": StorageType.ST_MOONCAKE,
    "fs": StorageType.ST_3FS,
    "nfs": StorageType.ST_NFS,
    "nfs2": StorageType.ST_NFS,
    "off": StorageType.ST_NFS,
    "unknown": StorageType.ST_NFS,
}


def at(storage: str, *specs: str, status: LocationStatus = SERVING) -> Location:
    return location(storage, storage, TYPES[storage], status, specs or ("kv",))


def answered(*locations: Location) -> tuple[StorageType, int, dict[str, str]] | None:
    chunk = compose_answer(record(*locations), VIEW)
    if chunk is None:
        return None
    decoded = decode_chunk(chunk)
    assert len({spec.name for spec in decoded.specs}) == len(decoded.specs)
    return decoded.storage_type, decoded.spec_size, {spec.name: spec.uri.split("/")[2] for spec in decoded.specs}


def test_a_single_location_is_answered_with_its_own_bytes() -> None:
    """Nearly every block has one location; no second copy of its chunk may exist."""
    only = at("nfs", "tp0", "tp1")
    assert compose_answer(record(only, at("pool", status=WRITING)), VIEW) is only.chunk


LOCATIONS = st.lists(
    st.builds(
        lambda storage, status, specs: at(storage, *specs, status=status),
        st.sampled_from(sorted(TYPES)),
        st.sampled_from([SERVING, SERVING, WRITING, DELETING]),
        st.lists(st.sampled_from("abc"), min_size=1, max_size=3, unique=True),
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=examples(300), deadline=None, derandomize=True)
@given(locations=LOCATIONS)
def test_any_record_is_answered_by_decision_14(locations: list[Location]) -> None:
    ranks = [VIEW.rank(each.storage) if each.status is SERVING else None for each in locations]
    expected = {}
    for spec in "abc":
        having = [(rank, i) for i, rank in enumerate(ranks) if rank is not None and spec in locations[i].spec_names]
        if having:
            expected[spec] = locations[min(having)[1]].storage
    first = min(((rank, i) for i, rank in enumerate(ranks) if rank is not None), default=None)
    if first is None:
        assert answered(*locations) is None
    else:
        assert answered(*locations) == (locations[first[1]].storage_type, len(expected), expected)


def test_checksums_stay_with_their_specs() -> None:
    """Where specs of several locations are joined, and where some are asked for."""
    slow, fast = at("nfs", "tp0", "tp1"), at("pool", "tp1")
    checked = [
        each._replace(chunk=with_checksums(each.chunk, dict.fromkeys(each.spec_names, checksum)))
        for each, checksum in ((slow, 1), (fast, 2**64 - 1))
    ]
    chunk = compose_answer(record(*checked), VIEW)
    assert chunk is not None
    assert {spec.name: spec.checksum for spec in decode_chunk(chunk).specs} == {"tp1": 2**64 - 1, "tp0": 1}
    (kept,) = decode_chunk(filter_specs(chunk, frozenset(["tp0"]))).specs
    assert kept.checksum == 1


@pytest.mark.parametrize(("slow_hash", "fast_hash", "answered"), [(0, 0, 0), (7, 0, 7), (0, -8, -8), (7, -8, -8)])
def test_an_event_hash_stays_where_locations_are_joined_and_specs_filtered(
    slow_hash: int, fast_hash: int, answered: int
) -> None:
    """It is the block's: of the fastest location that has one."""
    slow, fast = at("nfs", "tp0", "tp1"), at("pool", "tp1")
    hashed = [
        each._replace(chunk=with_event_hashes([each.chunk], [event_hash])[0])
        for each, event_hash in ((slow, slow_hash), (fast, fast_hash))
    ]
    chunk = compose_answer(record(*hashed), VIEW)
    assert chunk is not None
    assert event_hash_of(chunk) == answered
    assert event_hash_of(filter_specs(chunk, frozenset(["tp0"]))) == answered
    (location,) = GetCacheLocationResponse.FromString(filter_specs(chunk, frozenset(["tp0"]))).locations
    assert (location.event_hash, location.spec_size) == (answered, 2)
    assert [spec.name for spec in location.location_specs] == ["tp0"]


@pytest.mark.parametrize(
    ("wanted", "kept"), [({"a"}, ["a"]), ({"b", "a"}, ["a", "b"]), ({"nothing"}, []), (set(), []), ({"c", "x"}, ["c"])]
)
def test_filtered_specs_keep_their_order_and_spec_size_counts_all(wanted: set[str], kept: list[str]) -> None:
    chunk = encode_chunk(StorageType.ST_3FS, 3, [SpecUri(name, f"u-{name}") for name in "abc"])
    filtered = decode_chunk(filter_specs(chunk, frozenset(wanted)))
    assert filtered == (StorageType.ST_3FS, 3, tuple(SpecUri(name, f"u-{name}") for name in kept), 0)


# ── What a pure function makes of encoded locations is remembered ──


CHUNKS = st.lists(st.lists(st.sampled_from([b"a", b"bb", b"ccc", b"dddd", b""]), max_size=8), max_size=8)


@given(batches=CHUNKS, most_bytes=st.integers(0, 2000), pause=st.sampled_from([0.0, 25.0, 90.0]))
def test_results_are_those_of_the_function_in_order(batches: list[list[bytes]], most_bytes: int, pause: float) -> None:
    clock = FakeClock()
    memo = ChunkCache(bytes.upper, most_bytes, clock.now)
    for batch in batches:
        assert memo.map(batch) == [chunk.upper() for chunk in batch]
        clock.time += pause


def test_a_known_chunk_is_not_computed_again() -> None:
    calls: list[bytes] = []
    memo = ChunkCache(lambda chunk: calls.append(chunk) or chunk.upper())  # type: ignore[func-returns-value]
    assert memo.map([b"a", b"b", b"a"]) == [b"A", b"B", b"A"]
    assert memo.map([b"b", b"a"]) == [b"B", b"A"]
    assert calls == [b"a", b"b"]


def test_memory_is_bounded() -> None:
    memo = ChunkCache(bytes.upper, most_bytes=100_000)
    most = 0
    for number in range(10_000):
        memo.map([b"%d" % number * 100])
        most = max(most, sum(len(key) + len(value) for part in (memo._young, memo._old) for key, value in part.items()))
    assert 50_000 < most <= 100_000


def test_unused_entries_are_evicted_before_the_memory_is_full() -> None:
    """Blocks come and go all the time, so a memo of all that ever was grows as long as a manager runs."""
    clock, calls = FakeClock(), list[bytes]()
    memo = ChunkCache(lambda chunk: calls.append(chunk) or chunk.upper(), clock=clock.now)  # type: ignore[func-returns-value]
    for second in range(1000):
        clock.time += 1.0
        memo.map([b"hot", b"cold%d" % second])
        assert len(memo) <= 125, second
    assert calls.count(b"hot") == 1
