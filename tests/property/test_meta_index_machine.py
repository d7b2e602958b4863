"""MetaIndex over a store that really suspends: many tasks at once on the same keys, then everything must add up.

A record counts in its `depth`: every increment replaces the record by one that counts one more, under a location of
its own. So a lost update is a number that is missing, and a version that two tasks both built upon is seen at once.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any, NamedTuple

import pytest
from cache_world import decoded, dummy
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from suspending_backend import SpiedShardLocks, Steps, SuspendingBackend, check_lock_order, spy_on_locks
from thoroughness import examples

from kvcm.index.meta_index import Change, MetaIndex
from kvcm.model.locations import BlockRecord, Location, LocationStatus, Place, SpecUri, encode_chunk
from kvcm.model.storages import StorageType
from kvcm.storage.directory import StorageDirectory

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
        self.usage: Counter[Place] = Counter()
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
        recount, deleting = Counter[Place](), Counter[Place]()
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
        max_examples=examples(200),
        stateful_step_count=12,
        deadline=None,
        derandomize=True,
        phases=[Phase.generate, Phase.shrink],
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
