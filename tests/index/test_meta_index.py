"""MetaIndex on the memory backend, its locks, its usage, its events."""

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from index_rig import CountingBackend, TableView, location, record
from record_by_record import RecordByRecord
from thoroughness import examples

from kvcm.index.backends.backend import Change, Written
from kvcm.index.backends.memory import MemoryBackend
from kvcm.index.change_events import ChangeEvents
from kvcm.index.locking import ShardLocks, plan_sub_batches, shard_of, shards_of, uninterrupted
from kvcm.index.meta_index import MetaIndex
from kvcm.model.errors import StorageIOError
from kvcm.model.instances import Instance, LocationSpecInfo, ModelDeployment
from kvcm.model.keys import mixed, mixed_key
from kvcm.model.locations import BlockRecord, Location, LocationStatus, StorageKey, encode_chunk
from kvcm.model.storages import StorageType
from kvcm.telemetry.events import EventLog
from kvcm.telemetry.metrics import Histogram

NFS, FS = StorageKey("nfs", StorageType.ST_NFS), StorageKey("fs", StorageType.ST_3FS)


class Rig:
    def __init__(self, max_key_count: int = 1 << 62) -> None:
        self.view = TableView({"nfs": 3, "fs": 2})
        self.backend = CountingBackend()
        self.reported: list[tuple[dict[StorageKey, int], int]] = []
        self.index = MetaIndex(
            self.backend,
            self.view,
            max_key_count=max_key_count,
            on_usage=lambda: lambda usage, keys: self.reported.append((dict(usage), keys)),
        )


@pytest.fixture
def rig() -> Rig:
    return Rig()


@pytest.mark.parametrize("shard_count", [0, -1, 3, 12, 1000])
def test_shards_are_a_power_of_two(shard_count: int) -> None:
    with pytest.raises(ValueError, match=str(shard_count)):
        MetaIndex(CountingBackend(), TableView(), shard_count=shard_count)


async def test_delete_removes_and_forgives(rig: Rig) -> None:
    await rig.index.put({1: record(), 2: record()})
    changes = await rig.index.delete([1, 5, 1])
    assert [(change.key, change.new) for change in changes] == [(1, None), (5, None)]
    assert await rig.index.exists([1, 2, 5]) == [False, True, False]


async def test_exists_sees_every_status(rig: Rig) -> None:
    await rig.index.put({status: record(location(status=status)) for status in LocationStatus})
    assert await rig.index.exists([*LocationStatus, 99]) == [True, True, True, False]
    readable = [answer is not None for answer in await rig.index.answers(list(LocationStatus))]
    assert readable == [status is LocationStatus.SERVING for status in LocationStatus]


async def test_modify_sees_each_key_once_and_same_means_no_change(rig: Rig) -> None:
    await rig.index.put({1: record()})
    calls: list[int] = []

    def unchanged(key: int, old: BlockRecord | None) -> BlockRecord | None:
        calls.append(key)
        return old

    changes = await rig.index.read_modify_write([2, 1, 2, 1], unchanged)
    assert calls == [2, 1]
    assert [change.key for change in changes] == [2, 1]
    assert changes[1].new is changes[1].old
    assert rig.reported == [({NFS: 10}, 1)]


async def test_an_error_in_modify_changes_nothing(rig: Rig) -> None:
    await rig.index.put({1: record()})

    def fail(key: int, old: BlockRecord | None) -> BlockRecord | None:
        if key == 2:
            raise ZeroDivisionError
        return None

    with pytest.raises(ZeroDivisionError):
        await rig.index.read_modify_write([1, 2], fail)
    assert await rig.index.exists([1]) == [True]
    assert rig.index.free_key_count == (1 << 62) - 1


# Answers.


async def test_known_answers_ask_no_backend(rig: Rig) -> None:
    """The hot path: the search cache answers for blocks that were written or read once."""
    await rig.index.put({key: record() for key in range(5)})
    rig.backend.asked.clear()
    assert None not in await rig.index.answers(range(5), stop_at_miss=True)
    assert None not in await rig.index.answers(range(5))
    assert rig.backend.asked == []


async def test_after_a_storage_changed_records_are_asked_once(rig: Rig) -> None:
    await rig.index.put({key: record() for key in range(5)})
    rig.view.change("fs", None)
    rig.backend.asked.clear()
    await rig.index.answers([3, 4])
    await rig.index.answers([3, 4])
    assert rig.backend.asked == [[3, 4]]


async def test_a_prefix_match_asks_for_a_few_records_beyond_its_hits(rig: Rig) -> None:
    await rig.index.put({key: record() for key in range(3)})
    rig.backend.asked.clear()
    assert len(await rig.index.answers(range(100), stop_at_miss=True)) == 3
    assert rig.backend.asked == [list(range(3, 19))]


async def test_a_long_prefix_of_unknown_records_is_asked_for_in_few_calls(rig: Rig) -> None:
    """Sixteen to see whether there is anything at all, then many at once; nothing behind the first miss is returned."""
    await rig.index.put({key: record() for key in range(3000) if key != 2000})
    rig.view.change("fs", None)
    rig.backend.asked.clear()
    assert len(await rig.index.answers(range(3000), stop_at_miss=True)) == 2000
    assert [(asked[0], len(asked)) for asked in rig.backend.asked] == [(0, 16), (16, 1024), (1040, 1024)]


# Limits.


async def test_new_keys_beyond_the_limit_are_refused() -> None:
    rig = Rig(max_key_count=3)
    changes = await rig.index.put({key: record() for key in range(5)})
    assert [change.refused for change in changes] == [False, False, False, True, True]
    assert [change.new is None for change in changes] == [False, False, False, True, True]
    assert (rig.index.key_count, rig.index.free_key_count, rig.index.max_key_count) == (3, 0, 3)
    assert rig.index.usage_bytes[NFS] == 30


async def test_known_keys_are_never_refused() -> None:
    rig = Rig(max_key_count=2)
    await rig.index.put({1: record(), 2: record()})
    changes = await rig.index.put({1: record(location("b")), 2: record(location("b")), 3: record()})
    assert [change.refused for change in changes] == [False, False, True]
    await rig.index.delete([1])
    assert rig.index.free_key_count == 1
    assert not (await rig.index.put({3: record()}))[0].refused


# Usage.


async def test_a_change_of_status_moves_no_usage(rig: Rig) -> None:
    await rig.index.put({1: record(location(status=LocationStatus.WRITING))})
    rig.reported.clear()
    for status in (LocationStatus.SERVING, LocationStatus.DELETING):
        await rig.index.put({1: record(location(status=status))})
    assert rig.reported == []
    assert rig.index.usage_bytes[NFS] == 10


# A location keeps its size and its type for life.
PLACES = st.integers(0, 5).map(
    lambda n: location(f"l{n}", "nfs", StorageType.ST_NFS if n % 2 else StorageType.ST_3FS, size_bytes=n * 3)
)
RECORDS = st.one_of(
    st.none(), st.lists(PLACES, min_size=1, max_size=4, unique_by=lambda place: place.id).map(lambda p: record(*p))
)


@settings(max_examples=examples(200), deadline=None, derandomize=True)
@given(batches=st.lists(st.dictionaries(st.integers(0, 6), RECORDS, max_size=6), max_size=8), limit=st.integers(1, 8))
async def test_invariant_4_usage_is_the_recount(batches: list[dict[int, BlockRecord | None]], limit: int) -> None:
    rig = Rig(max_key_count=limit)
    for batch in batches:
        await rig.index.read_modify_write(batch, lambda key, _old, batch=batch: batch[key])
        recount: Counter[StorageKey] = Counter()
        for stored in await rig.index.get(range(7)):
            for place in stored.locations if stored is not None else ():
                recount[place.place] += place.size_bytes
        reported: Counter[StorageKey] = Counter()
        for usage, _ in rig.reported:
            reported.update(usage)
        assert +recount == +Counter(rig.index.usage_bytes) == +reported
        assert sum(keys for _, keys in rig.reported) == rig.index.key_count
        assert all(keys or any(usage.values()) for usage, keys in rig.reported), "a report always has a change"
        assert rig.index.key_count <= limit


# ── Usage when a shared store writes and its answer is lost ──


class LostAnswersBackend(RecordByRecord, MemoryBackend):
    """A shared store whose answers to writes get lost, after it wrote or before."""

    awaits = True
    is_shared = True
    is_received = True
    writes = True

    async def write_many(self, changes: Sequence[Change]) -> Written:
        written = await super().write_many(changes) if self.writes else None
        if not self.is_received or written is None:
            raise StorageIOError("no answer")
        return written


class Reported:
    """An index and the sum of its usage reports."""

    def __init__(self) -> None:
        self.usage: Counter[StorageKey] = Counter()
        self.keys = 0
        self.backend = LostAnswersBackend()
        self.index = MetaIndex(self.backend, TableView({"nfs": 1}), on_usage=lambda: self._add)

    def _add(self, usage: dict[StorageKey, int], keys: int) -> None:
        self.usage.update(usage)
        self.keys += keys


@pytest.mark.parametrize("writes", [True, False])
async def test_growth_is_reported_when_the_answer_to_the_write_is_lost(writes: bool) -> None:
    reported = Reported()
    reported.backend.is_received, reported.backend.writes = False, writes
    with pytest.raises(StorageIOError):
        await reported.index.put({1: record(location(size_bytes=10)), 2: record(location(size_bytes=5))})
    assert reported.usage == {NFS: 15}
    assert reported.keys == 2


async def test_shrinking_is_not_reported_before_it_is_certain() -> None:
    reported = Reported()
    await reported.index.put({1: record(location(size_bytes=10))})
    reported.backend.is_received = reported.backend.writes = False
    with pytest.raises(StorageIOError):
        await reported.index.delete([1])
    assert reported.usage == reported.backend.usage_bytes == {NFS: 10}
    assert reported.keys == 1


async def test_one_that_shrinks_hides_none_that_grows() -> None:
    reported = Reported()
    await reported.index.put({1: record(location(size_bytes=10))})
    reported.backend.is_received = False
    records = {1: None, 2: record(location(size_bytes=10))}
    with pytest.raises(StorageIOError):
        await reported.index.read_modify_write(records, lambda key, _old: records[key])
    assert reported.usage == {NFS: 20}
    assert reported.keys == 2


# ── Which keys share a lock, and in which batches a call takes them (invariant 8) ──


FIXED = settings(max_examples=examples(200), deadline=None, derandomize=True)
KEYS = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=60, unique=True)
SHARD_COUNTS = st.sampled_from([1, 2, 4, 16, 1024, 65536])


@pytest.mark.parametrize("step", [1, 2, 16, 1024, 1 << 20, 1 << 40, -1])
def test_regular_keys_spread_over_all_shards(step: int) -> None:
    """Keys need not be well mixed: counters, multiples and negative ones spread as well."""
    counts = Counter(shard_of(number * step, 16) for number in range(1, 1601))
    assert len(counts) == 16
    assert max(counts.values()) < 200


@FIXED
@given(keys=KEYS, shard_count=SHARD_COUNTS, batch_key_size=st.integers(1, 30))
def test_sub_batches_hold_every_key_once_by_whole_shards_ascending(
    keys: list[int], shard_count: int, batch_key_size: int
) -> None:
    batches = plan_sub_batches(keys, shard_count, batch_key_size)
    assert sorted(key for batch in batches for key in batch.keys) == sorted(keys)
    shards = [shard for batch in batches for shard in batch.shards]
    assert shards == sorted(set(shards)), "ascending within a batch and between batches, hence disjoint"
    for batch in batches:
        assert set(shards_of(batch.keys, shard_count)) == set(batch.shards)
    assert all(len(batch.keys) >= batch_key_size for batch in batches[:-1])
    assert all(batch.keys for batch in batches)


@FIXED
@given(keys=KEYS, shard_count=SHARD_COUNTS)
def test_the_shard_of_a_mixed_key_is_that_of_the_key_in_the_store(keys: list[int], shard_count: int) -> None:
    """Else another manager, or this one after a start, would look for it elsewhere."""
    assert shards_of(mixed(keys), shard_count) == [shard_of(key, shard_count) for key in keys]


@FIXED
@given(keys=KEYS, batch_key_size=st.integers(1, 30))
def test_a_batch_is_no_larger_than_it_must_be(keys: list[int], batch_key_size: int) -> None:
    """Without its last shard a batch would be below the size that was asked for."""
    for batch in plan_sub_batches(keys, 16, batch_key_size):
        without_last = [shard for shard in shards_of(batch.keys, 16) if shard != batch.shards[-1]]
        assert len(without_last) < batch_key_size


async def test_disjoint_shards_do_not_wait_for_each_other() -> None:
    locks = ShardLocks(4)
    async with locks.hold((0, 2)), locks.hold((1, 3)):
        assert True


async def test_shards_are_given_back_after_an_error() -> None:
    locks = ShardLocks(2)
    for _ in range(2):
        with pytest.raises(KeyError):
            async with locks.hold((0, 1)):
                raise KeyError


@pytest.mark.parametrize("shards", [(1, 0), (1, 1), (0, 2, 1)])
async def test_shards_out_of_order_are_a_defect(shards: tuple[int, ...]) -> None:
    with pytest.raises(AssertionError):
        async with ShardLocks(4).hold(shards):
            pass


async def test_waits_are_reported() -> None:
    waits = Histogram()
    locks = ShardLocks(4, waits)
    entered, leave = asyncio.Event(), asyncio.Event()

    async def first() -> None:
        async with locks.hold((0, 1)):
            entered.set()
            await leave.wait()

    async def second() -> None:
        async with locks.hold((1, 2)):
            pass

    holder = asyncio.create_task(first())
    await entered.wait()
    waiter = asyncio.create_task(second())
    await asyncio.sleep(0)
    assert waits.read().counts[-1] == 1  # the second still waits
    before = waits.read().total
    leave.set()
    await asyncio.gather(holder, waiter)
    assert waits.read().counts[-1] == 2
    assert waits.read().total > before


# ── Work that a cancelled caller must not cut in two ──


class Work:
    """Takes so many turns of the loop, then returns or raises."""

    def __init__(self, turns: int = 3, error: Exception | None = None) -> None:
        self.turns_left = turns
        self._error = error

    async def run(self) -> str:
        while self.turns_left:
            self.turns_left -= 1
            await asyncio.sleep(0)
        if self._error is not None:
            raise self._error
        return "done"


async def test_a_caller_that_stays_gets_the_result() -> None:
    assert await uninterrupted(Work().run()) == "done"
    assert await uninterrupted(Work(turns=0).run()) == "done"


async def test_a_caller_that_stays_gets_the_error() -> None:
    with pytest.raises(ZeroDivisionError):
        await uninterrupted(Work(error=ZeroDivisionError()).run())


@pytest.mark.parametrize("error", [None, ZeroDivisionError()])
@pytest.mark.parametrize("cancelled_after", [1, 2, 3])
@pytest.mark.parametrize("times", [1, 2])
async def test_a_cancelled_caller_waits_for_the_end(error: Exception | None, cancelled_after: int, times: int) -> None:
    work = Work(turns=8, error=error)
    caller = asyncio.create_task(uninterrupted(work.run()))
    for _ in range(cancelled_after):
        await asyncio.sleep(0)
    for _ in range(times):
        caller.cancel()
        await asyncio.sleep(0)
    assert not caller.done()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert work.turns_left == 0


async def test_a_timeout_is_still_a_timeout() -> None:
    work = Work(turns=5)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await uninterrupted(work.run())
    assert work.turns_left == 0


# ── Changes of an index as events ──


INSTANCE = Instance("", "group", "inst", 16, (LocationSpecInfo("kv", 8),), ModelDeployment())
SERVING, DELETING, WRITING = LocationStatus.SERVING, LocationStatus.DELETING, LocationStatus.WRITING


def placed(*places: tuple[str, str, LocationStatus]) -> BlockRecord:
    chunk = encode_chunk(StorageType.ST_DUMMY, 0, [])
    return BlockRecord(
        None,
        0,
        tuple(
            Location(location_id, storage, StorageType.ST_DUMMY, status, (), chunk, 8, 0.0)
            for location_id, storage, status in places
        ),
    )


CHANGES = [
    Change(key, old, new)
    for key, (old, new) in zip(
        mixed([1, 2, 3, 4]),
        [
            (placed(("x", "a", SERVING), ("y", "b", SERVING)), placed(("x", "a", DELETING), ("y", "b", DELETING))),
            (placed(("x", "a", SERVING), ("z", "a", DELETING)), placed(("x", "a", DELETING), ("z", "a", DELETING))),
            (placed(("x", "a", WRITING)), placed(("x", "a", SERVING))),
            (None, None),
        ],
        strict=True,
    )
]


async def published(record: Any) -> list[dict[str, Any]]:
    log = EventLog()
    listener = log.subscribe()
    record(ChangeEvents(log))
    await log.close()
    return [json.loads(line) for line in b"".join(listener.pop_pending()).splitlines()]


async def test_there_is_one_event_per_storage_with_the_marked_locations() -> None:
    first, second = await published(lambda events: events.removed(INSTANCE, CHANGES, "RemoveCache"))
    assert (first["storage"], first["keys"], first["location_ids"], first["bytes"]) == ("a", [1, 2], [["x"], ["x"]], 16)
    assert (second["storage"], second["keys"], second["location_ids"], second["bytes"]) == ("b", [1], [["y"]], 8)
    assert {(each["source"], each["group"], each["reason"]) for each in (first, second)} == {
        ("inst", "group", "RemoveCache")
    }


async def test_forgotten_locations_are_reported_unless_they_were_before() -> None:
    changes = [Change(mixed_key(1), placed(("x", "a", SERVING), ("z", "a", DELETING)), None)]
    (event,) = await published(lambda events: events.removed(INSTANCE, changes, "TrimCache"))
    assert (event["keys"], event["location_ids"]) == ([1], [["x"]])


async def test_an_eviction_is_also_reported_as_the_original_does() -> None:
    *evicted, submitted = await published(
        lambda events: events.evicted(INSTANCE, iter(CHANGES), "group", "leaf_lru", 1.5)
    )
    assert [(each["type"], each["storage"], each["policy"]) for each in evicted] == [
        ("evicted", "a", "leaf_lru"),
        ("evicted", "b", "leaf_lru"),
    ]
    assert (submitted["component"], submitted["type"]) == ("cache_reclaimer", "CacheReclaimSubmit")
    assert (submitted["block_keys"], submitted["location_ids"], submitted["delay_us"]) == (
        [1, 2],
        [["x", "y"], ["x"]],
        1_500_000,
    )


async def test_nothing_is_reported_when_nothing_was_marked() -> None:
    unchanged = CHANGES[2:]
    assert await published(lambda events: events.evicted(INSTANCE, unchanged, "group", "lru", 0.0)) == []
