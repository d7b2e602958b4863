"""MetaIndex over a store that really suspends: many tasks at once on the same keys, then everything must add up."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any, NamedTuple

import pytest
from cache_world import decoded, dummy
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from record_by_record import RecordByRecord
from suspending_backend import SpiedShardLocks, Steps, SuspendingBackend, check_lock_order, spy_on_locks
from thoroughness import examples, is_thorough

from kvcm.index.backends.backend import Change, Written
from kvcm.index.backends.memory import MemoryBackend
from kvcm.index.meta_index import MetaIndex
from kvcm.index.search_cache import CacheBudget
from kvcm.model.errors import NotReadyError
from kvcm.model.locations import BlockRecord, Location, LocationStatus, SpecUri, StorageKey, encode_chunk
from kvcm.model.storages import StorageType
from kvcm.storage.directory import StorageDirectory

# ── Meta index machine ──


pytestmark = pytest.mark.timeout(400)  # seconds to make a failure small; a pass takes ten
SHARDS, LIMIT = 4, 9
STORAGES = ("a", "b", "c")
KEYS = st.lists(st.integers(0, 11), min_size=1, max_size=8)
STATUSES = (LocationStatus.SERVING, LocationStatus.SERVING, LocationStatus.DELETING)


def counting_record(count: int, key: int) -> BlockRecord:
    """A record that counts to `count`: storage, status and size differ from one number to the next."""
    storage = STORAGES[count % len(STORAGES)]
    chunk = encode_chunk(StorageType.ST_DUMMY, 1, [SpecUri("kv", f"dummy://{storage}/{key}/{count}?size=1")])
    status = STATUSES[count % 4 % len(STATUSES)]
    location = Location(f"{key}-{count}", storage, StorageType.ST_DUMMY, status, ("kv",), chunk, count + 1, 0.0)
    return BlockRecord(None, count, (location,))


def increment(key: int, old: BlockRecord | None) -> BlockRecord:
    return counting_record(old.depth + 1 if old is not None else 1, key)


class Op(NamedTuple):
    """What one task does."""

    verb: str
    keys: list[int]


OPS = st.builds(
    Op, st.sampled_from(["increment", "increment", "delete", "update", "answers", "prefix", "get", "toggle"]), KEYS
)


class MetaIndexMachine(RuleBasedStateMachine):
    @initialize(seed=st.integers(0, 1 << 32), batch=st.sampled_from([1, 2, 100]))
    def open(self, seed: int, batch: int) -> None:
        self.runner = asyncio.Runner()
        self.steps = Steps()
        self.view = StorageDirectory("cluster")
        for name in STORAGES:
            self.view.open(dummy(name))
        self.views: list[tuple[int, dict[str, int | None]]] = []
        self.note_view()
        self.backend = SuspendingBackend(Random(seed), steps=self.steps, on_write=self.on_write)
        self.usage: Counter[StorageKey] = Counter()
        self.index = MetaIndex(
            self.backend,
            self.view,
            shard_count=SHARDS,
            batch_key_size=batch,
            max_key_count=LIMIT,
            on_usage=lambda: lambda difference, _keys: self.usage.update(difference),
        )
        self.locks: SpiedShardLocks = spy_on_locks(self.index, SHARDS)
        self.counted: Counter[int] = Counter()

    def teardown(self) -> None:
        if hasattr(self, "runner"):
            self.view.close_all()
            self.runner.close()

    def note_view(self) -> None:
        self.views.append((self.steps.next(), {name: self.view.rank(name) for name in STORAGES}))

    def on_write(self, change: Change) -> None:
        """No update is lost: every version is built upon the one before it."""
        assert self.backend.inner.key_count <= LIMIT
        before, after = self.backend.history[change.key][-2:]
        assert (before.record, after.record) == (change.old, change.new)

    @rule(ops=st.lists(OPS, min_size=1, max_size=10))
    def run_at_once(self, ops: list[Op]) -> None:
        self.runner.run(self.gather(ops))

    async def gather(self, ops: Sequence[Op]) -> None:
        tasks = [asyncio.create_task(self.perform(op)) for op in ops]
        await asyncio.gather(*tasks)
        for op, task in zip(ops, tasks, strict=True):
            events = self.locks.log.of(task)
            check_lock_order(events)
            assert bool(events) == (op.verb in {"increment", "delete", "update"}), op
        self.locks.log.entries.clear()

    async def perform(self, op: Op) -> None:
        await getattr(self, op.verb)(op.keys)

    async def increment(self, keys: list[int]) -> None:
        changes = await self.index.read_modify_write(keys, increment)
        for change in self.checked(keys, changes):
            assert change.refused or change.new == increment(change.key, change.old)

    async def delete(self, keys: list[int]) -> None:
        for change in self.checked(keys, await self.index.delete(keys)):
            assert change.new is None

    async def update(self, keys: list[int]) -> None:
        records = {key: counting_record(100, key) for key in keys}
        for change in self.checked(keys, await self.index.update(records)):
            assert change.new is (None if change.old is None else records[change.key])

    def checked(self, keys: list[int], changes: list[Change]) -> list[Change]:
        assert [change.key for change in changes] == list(dict.fromkeys(keys))
        for key, old, new, refused in changes:
            self.counted[key] += (new.depth if new is not None else 0) - (old.depth if old is not None else 0)
            assert not refused or (old is None and new is None)
        return changes

    async def toggle(self, keys: list[int]) -> None:
        name = STORAGES[keys[0] % len(STORAGES)]
        self.view.set_enabled(name, enabled=self.view.rank(name) is None)
        self.note_view()

    async def get(self, keys: list[int]) -> None:
        begin = self.steps.next()
        records = await self.index.get(keys)
        end = self.steps.next()
        for key, record in zip(keys, records, strict=True):
            assert record in self.backend.versions_between(key, begin, end)

    async def answers(self, keys: list[int]) -> None:
        begin = self.steps.next()
        answers = await self.index.answers(keys)
        self.check_answers(keys, answers, begin)

    async def prefix(self, keys: list[int]) -> None:
        begin = self.steps.next()
        answers = await self.index.answers(keys, stop_at_miss=True)
        assert None not in answers
        missed = keys[len(answers) : len(answers) + 1]
        self.check_answers([*keys[: len(answers)], *missed], [*answers, *[None] * len(missed)], begin)

    def check_answers(self, keys: list[int], answers: list[bytes | None], begin: int) -> None:
        """Invariant 1: each answer was right at some moment of the call."""
        end = self.steps.next()
        assert len(answers) == len(keys)
        views = [
            view
            for (since, view), after in zip(self.views, [*self.views[1:], None], strict=True)
            if since <= end and (after is None or after[0] >= begin)
        ]
        for key, answer in zip(keys, answers, strict=True):
            versions = self.backend.versions_between(key, begin, end)
            assert answer in {readable(record, view) for record in versions for view in views}

    # At rest.

    @invariant()
    def invariant_4_usage_is_the_recount(self) -> None:
        recount, deleting = Counter[StorageKey](), Counter[StorageKey]()
        for location in (location for record in self.records().values() for location in record.locations):
            recount[location.place] += location.size_bytes
            if location.status is LocationStatus.DELETING:
                deleting[location.place] += location.size_bytes
        assert +self.usage == +Counter(self.index.usage_bytes) == recount
        assert +Counter(self.index.deleting_bytes) == deleting
        assert self.index.free_key_count == LIMIT - self.index.key_count

    @invariant()
    def no_update_is_lost(self) -> None:
        assert {key: record.depth for key, record in self.records().items()} == +self.counted

    @invariant()
    def invariant_1_no_answer_is_stale(self) -> None:
        keys = list(range(12))
        view = {name: self.view.rank(name) for name in STORAGES}
        answers = self.runner.run(self.index.answers(keys))
        records = self.records()
        assert answers == [readable(records.get(key), view) for key in keys]

    @invariant()
    def invariant_8_no_lock_is_held(self) -> None:
        assert self.locks.held == []

    def records(self) -> dict[int, BlockRecord]:
        async def collect() -> dict[int, Any]:
            keys = [key async for page in self.backend.inner.scan(100) for key in page]
            return dict(zip(keys, await self.backend.inner.get_many(keys), strict=True))

        return self.runner.run(collect())


def readable(record: BlockRecord | None, view: dict[str, int | None]) -> bytes | None:
    """Naive: these records have one location each."""
    for location in record.locations if record is not None else ():
        if location.status is LocationStatus.SERVING and view[location.storage] is not None:
            assert decoded([location.chunk])
            return location.chunk
    return None


class TestInvariants1And4And8OfTheIndex(MetaIndexMachine.TestCase):
    settings = settings(
        max_examples=200 if is_thorough() else 20, stateful_step_count=12, phases=[Phase.generate, Phase.shrink]
    )


@pytest.mark.parametrize("seed", range(40))
async def test_overlapping_calls_never_exceed_the_key_limit(seed: int) -> None:
    """Every call takes its share of the limit before the store has answered any of them."""
    view = StorageDirectory("cluster")
    view.open(dummy("a"))
    counts: list[int] = []
    backend = SuspendingBackend(Random(seed), on_write=lambda _change: counts.append(backend.key_count))
    index = MetaIndex(backend, view, shard_count=SHARDS, batch_key_size=1, max_key_count=LIMIT)
    batches = [range(start, start + 4) for start in range(0, 24, 4)]
    results = await asyncio.gather(*(index.put({key: counting_record(1, key) for key in keys}) for keys in batches))
    assert max(counts) <= LIMIT
    stored = sum(change.new is not None for changes in results for change in changes)
    refused = sum(change.refused for changes in results for change in changes)
    assert (stored, stored + refused) == (index.key_count, 24)


# ── Cancelled index calls ──


TWELVE = list(range(12))
FIXED = settings(max_examples=examples(200))
CALLS = st.lists(
    st.tuples(st.booleans(), st.lists(st.sampled_from(TWELVE), min_size=1, max_size=8), st.integers(0, 12)),
    min_size=1,
    max_size=8,
)
"""(add or remove, keys, after how many turns of the loop the call is cancelled)"""


def counted_record(key: int, count: int) -> BlockRecord:
    """A record that counts to `count` and serves."""
    chunk = encode_chunk(StorageType.ST_DUMMY, 1, [SpecUri("kv", f"dummy://a/{key}/{count}?size=1")])
    place = Location(f"{key}-{count}", "a", StorageType.ST_DUMMY, LocationStatus.SERVING, ("kv",), chunk, count, 0.0)
    return BlockRecord(None, count, (place,))


def serving(key: int) -> BlockRecord:
    return counted_record(key, 10)


class CancelledRig:
    def __init__(self, seed: int) -> None:
        view = StorageDirectory("cluster")
        view.open(dummy("a"))
        self.backend = SuspendingBackend(Random(seed))
        self.index = MetaIndex(self.backend, view, shard_count=SHARDS, batch_key_size=2)
        self.locks = spy_on_locks(self.index, SHARDS)

    async def run(self, calls: list[tuple[bool, list[int], int]]) -> None:
        tasks = [asyncio.create_task(self.change(add, keys)) for add, keys, _ in calls]
        for turn in range(13):
            for task, (_, _, cancelled_at) in zip(tasks, calls, strict=True):
                if turn == cancelled_at:
                    task.cancel()
            await asyncio.sleep(0)
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(outcome, asyncio.CancelledError | None) for outcome in outcomes), outcomes
        for task in tasks:
            check_lock_order(self.locks.log.of(task))

    async def change(self, add: bool, keys: list[int]) -> None:
        await self.index.read_modify_write(keys, lambda key, old: (old or serving(key)) if add else None)

    async def records(self) -> list[BlockRecord | None]:
        return await self.backend.inner.get_many(TWELVE)


@FIXED
@given(seed=st.integers(0, 1 << 32), calls=CALLS, is_filled=st.booleans())
async def test_invariants_1_4_and_8_hold_after_cancelled_calls(
    seed: int, calls: list[tuple[bool, list[int], int]], is_filled: bool
) -> None:
    rig = CancelledRig(seed)
    await rig.index.put({key: serving(key) for key in TWELVE if is_filled})
    await rig.run(calls)
    assert rig.locks.held == []
    records = await rig.records()
    recount = Counter(found.place for record in records if record for found in record.locations)
    assert +Counter(rig.index.usage_bytes) == Counter({where: 10 * count for where, count in recount.items()})
    assert await rig.index.answers(TWELVE) == [record and record.locations[0].chunk for record in records]
    changes = await rig.index.put({key: serving(key) for key in TWELVE})
    assert [change.new for change in changes] == [serving(key) for key in TWELVE]


# ── Lost races ──


CONTESTED_KEYS = st.lists(st.integers(0, 20), min_size=1, max_size=15, unique=True)
ATTEMPTS = 32
PLACE = StorageKey("a", StorageType.ST_DUMMY)


def increase(key: int, old: BlockRecord | None) -> BlockRecord:
    return counted_record(key, 1 if old is None else old.depth + 1)


class ContestedBackend(RecordByRecord, MemoryBackend):
    """A shared store: a rival increments some of the keys right before they are compared and set.

    Attributes:
        rivals: keys that the rival takes before the first write, before the second and so on.
        written: the keys of every write that was tried.
        rival_usage: bytes that the rival added.
    """

    awaits = True
    is_shared = True

    def __init__(self, rivals: Sequence[Sequence[int]] = ()) -> None:
        super().__init__()
        self._rivals = iter(rivals)
        self.written: list[list[int]] = []
        self.rival_counts: Counter[int] = Counter()
        self.rival_usage = 0

    async def write_many(self, changes: Sequence[Change]) -> Written:
        await self._lose(next(self._rivals, ()))
        self.written.append([change.key for change in changes])
        return await super().write_many(changes)

    async def _lose(self, keys: Sequence[int]) -> None:
        records = await self.get_many(keys)
        changes = [Change(key, old, increase(key, old)) for key, old in zip(keys, records, strict=True)]
        written = await super().write_many(changes)
        assert not written.lost
        self.rival_counts.update(keys)
        self.rival_usage += written.usage.get(PLACE, 0)


class ContestedRig:
    def __init__(self, backend: ContestedBackend, batch_key_size: int = 256) -> None:
        view = StorageDirectory("cluster")
        view.open(dummy("a"))
        self.backend = backend
        self.reported_bytes: Counter[StorageKey] = Counter()
        self.reported_keys = 0
        self.applied: list[Change] = []
        self.index = MetaIndex(
            backend,
            view,
            shard_count=4,
            batch_key_size=batch_key_size,
            on_usage=lambda: self.on_usage,
            budget=CacheBudget(1 << 20),
        )

    def on_usage(self, difference: Counter[StorageKey], keys: int) -> None:
        self.reported_bytes.update(difference)
        self.reported_keys += keys

    async def increment(self, keys: Sequence[int]) -> list[Change]:
        return await self.index.read_modify_write(keys, increase, self.applied.extend)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """They spread managers in time; here there is one."""
    monkeypatch.setattr("kvcm.index.meta_index._LONGEST_PAUSE_SECONDS", 0.0)


async def test_only_the_keys_that_lost_are_tried_again() -> None:
    rig = ContestedRig(ContestedBackend([[2, 4], [4]]))
    changes = await rig.increment([1, 2, 3, 4])
    assert [sorted(keys) for keys in rig.backend.written] == [[1, 2, 3, 4], [2, 4], [4]]
    assert [(change.key, change.new and change.new.depth) for change in changes] == [(1, 1), (2, 2), (3, 1), (4, 3)]


async def test_attempts_are_bounded_and_the_error_says_what_to_do() -> None:
    rig = ContestedRig(ContestedBackend([[7]] * 100))
    with pytest.raises(NotReadyError, match=rf"1 blocks .* {ATTEMPTS} attempts: retry"):
        await rig.increment([7, 8])
    assert rig.backend.written == [rig.backend.written[0], *[[7]] * (ATTEMPTS - 1)]
    assert [change.key for change in rig.applied] == [8], "stored changes were reported"
    assert rig.reported_keys == 1


async def test_the_last_attempt_counts() -> None:
    rig = ContestedRig(ContestedBackend([[7]] * (ATTEMPTS - 1)))
    (change,) = await rig.increment([7])
    assert change.new == counted_record(7, ATTEMPTS)


async def test_a_modify_that_changes_its_mind_after_a_lost_race_writes_nothing() -> None:
    """It wanted the key for itself and a rival has it now: the answer shows the rival's record."""
    rig = ContestedRig(ContestedBackend([[1]]))
    (change,) = await rig.index.read_modify_write([1], lambda key, old: old or counted_record(key, 50))
    assert change.new is change.old
    assert change.new == counted_record(1, 1)
    assert rig.backend.written == [[1]]


@FIXED
@given(
    calls=st.lists(CONTESTED_KEYS, min_size=1, max_size=5),
    seed=st.integers(0, 1 << 32),
    batch=st.sampled_from([1, 4, 100]),
)
async def test_no_update_is_lost_and_usage_is_the_recount(calls: list[list[int]], seed: int, batch: int) -> None:
    """Invariant 4 across managers: the counts reported to each add up to those of the records."""
    random = Random(seed)
    rivals = [[key for key in range(21) if random.random() < 0.3] for _ in range(40)]
    rig = ContestedRig(ContestedBackend(rivals), batch)
    counted: Counter[int] = Counter()
    for keys in calls:
        rig.applied.clear()
        changes = await rig.increment(keys)
        assert sorted(rig.applied) == sorted(changes), "each stored change is reported once"
        counted.update(keys)
        # Nothing of what lost a race is shown.
        records = await rig.backend.get_many(keys)
        assert await rig.index.answers(keys) == [record and record.locations[0].chunk for record in records]
        rig.index.invalidate(range(21))  # as the store does for changes of rivals
    counted += rig.backend.rival_counts
    records = await rig.backend.get_many(range(21))
    assert {key: record.depth for key, record in enumerate(records) if record is not None} == dict(counted)
    recount = sum(place.size_bytes for record in records if record is not None for place in record.locations)
    assert rig.reported_bytes[PLACE] + rig.backend.rival_usage == recount
    assert rig.reported_keys <= rig.backend.key_count == sum(record is not None for record in records)
