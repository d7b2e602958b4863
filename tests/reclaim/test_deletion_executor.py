"""The deletion executor: when it deletes, what it deletes, and what it does when storages fail or hang."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
from fake_clock import FakeClock
from hypothesis import given, settings
from hypothesis import strategies as st
from index_backends import opened
from reclaim_rig import Faulty, Rig, owned_index
from thoroughness import examples

from kvcm.index.backends.backend import Written
from kvcm.index.backends.memory import MemoryBackend
from kvcm.index.meta_index import MetaIndex
from kvcm.model.errors import StorageIOError
from kvcm.model.keys import mixed
from kvcm.model.locations import Location, LocationStatus
from kvcm.reclaim.deletion_executor import Backlog, StorageWorkers


@pytest.fixture(params=["memory", "redis-runs"])
async def rig(request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    async with opened(request.param, request) as backends:
        yield Rig(backend=backends.fresh())


IN_MEMORY = pytest.mark.parametrize("rig", ["memory"], indirect=True)
"""What does not depend on the store, or counts turns of the loop."""


async def test_the_earliest_due_block_is_deleted_first(rig: Rig) -> None:
    uris = {key: await rig.block(key, after_seconds=due) for key, due in ((0, 4), (1, 1), (2, 2), (3, 3), (4, 0))}
    await rig.run_due(after=10)
    assert rig.storages.faults["a"].deleted == [uri for key in (4, 1, 2, 3, 0) for uri in uris[key]]


async def test_every_index_is_looked_at(rig: Rig) -> None:
    """The same key and location of two instances are two things."""
    rig.owned.append(owned_index("other", 2, MetaIndex(MemoryBackend(), rig.directory)))
    uris = [await rig.block(1, owned=owned) for owned in (0, 1)]
    await rig.run_due()
    assert (await rig.left(0), await rig.left(1)) == ([], [])
    assert sorted(rig.storages.faults["a"].deleted) == sorted([*uris[0], *uris[1]])


async def test_bytes_stay_while_they_are_held(rig: Rig) -> None:
    rig.held[1] = rig.clock.time + 50
    await rig.block(1)
    await rig.block(2)
    await rig.run_due()
    assert await rig.left() == [1]
    for _ in range(24):
        await rig.run_due(after=2)
    assert await rig.left() == [1]
    rig.held[1] = rig.clock.time + 30
    await rig.run_due(after=29)
    assert await rig.left() == [1]
    del rig.held[1]
    await rig.run_due(after=1)
    assert await rig.left() == []


async def test_a_failing_storage_is_asked_again_with_growing_pauses(rig: Rig) -> None:
    """1, 2, 4 … seconds, at most a minute; and nothing is forgotten however long it takes."""
    storage = rig.storages.faults["a"]
    storage.outage = OSError("mount is gone")
    for key in range(10):
        await rig.block(key)
    asked_at: list[float] = []
    for _ in range(2000):
        before = storage.attempts
        await rig.run_due()
        asked_at += [rig.clock.time] * (storage.attempts - before)
        rig.clock.time += 0.5
    pauses = [later - earlier for earlier, later in pairwise(asked_at)]
    assert pauses[:8] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert set(pauses[6:]) == {60}
    assert await rig.left() == list(range(10))
    storage.outage = None
    await rig.run_due(after=60)
    assert await rig.left() == []


async def test_a_storage_that_fails_for_days_is_still_asked(rig: Rig) -> None:
    rig.storages.faults["a"].outage = OSError("down")
    await rig.block(1)
    for _ in range(1500):
        await rig.run_due(after=61)
    assert rig.storages.faults["a"].attempts == 1500


async def test_only_what_failed_is_tried_again(rig: Rig) -> None:
    uris = [await rig.block(key) for key in range(4)]
    storage = rig.storages.faults["a"]
    storage.stubborn = {uris[1][0], uris[2][1]}
    await rig.run_due()
    assert await rig.left() == [1, 2]
    storage.stubborn = set()
    storage.deleted.clear()
    await rig.run_due(after=1)
    assert await rig.left() == []
    assert sorted(storage.deleted) == sorted([*uris[1], *uris[2]])


async def test_a_storage_that_is_configured_and_not_open_here_keeps_what_lies_on_it(rig: Rig) -> None:
    """Invariant 4: the bytes are still there, on a mount that is missing now; metadata goes when they do."""
    closed = rig.storages.faults.pop("a")
    rig.executor = rig.new_executor(is_configured=lambda storage: storage in {"a", "b"})
    uris = await rig.block(1, "a")
    await rig.block(2, "b")
    await rig.block(3, "never-was")
    await rig.run_due()
    assert (await rig.left(), sum(rig.index.usage_bytes.values())) == ([1], 16)
    backlog = rig.executor.backlog("a")
    assert (backlog.waiting, backlog.failures) == (1, 1)
    rig.storages.faults["a"] = closed
    await rig.run_due(after=1)
    assert await rig.left() == []
    assert closed.deleted == list(uris)


async def test_overdue_writers_are_ended_and_their_bytes_stay_until_then(rig: Rig) -> None:
    """The owner of the sessions decides: here the session turns out to be renewed."""
    for key, due in ((1, 5.0), (2, 5.0), (3, 50.0)):
        await rig.block(key, status=LocationStatus.WRITING, after_seconds=due)
    assert await rig.run_due(after=5) == 2
    assert rig.overdue == [(1, {"session": [1, 2]})]
    assert await rig.run_due() == 0
    assert (await rig.left(), rig.storages.faults["a"].attempts) == ([1, 2, 3], 0)


async def test_rounds_at_the_same_time_delete_once(rig: Rig) -> None:
    uris = await rig.block(1)
    await asyncio.gather(rig.executor.run_due(), rig.executor.run_due())
    assert rig.storages.faults["a"].deleted == list(uris)


async def test_two_managers_that_delete_the_same_block_harm_no_other_location(rig: Rig) -> None:
    """The former leader still deletes: a location that a client wrote meanwhile stays."""
    other = rig.new_executor()
    await rig.block(1)
    rig.storages.faults["a"].open_gate.clear()
    rounds = [asyncio.create_task(executor.run_due()) for executor in (rig.executor, other)]
    for _ in rounds:
        await rig.storages.faults["a"].calls.acquire()
    await rig.block(1, location_id="again", status=LocationStatus.SERVING)
    rig.storages.faults["a"].open_gate.set()
    await asyncio.gather(*rounds)
    (record,) = await rig.index.get([1])
    assert record is not None
    assert [place.id for place in record.locations] == ["again"]


async def test_a_location_without_bytes_loses_its_metadata(rig: Rig) -> None:
    await rig.block(1, specs=())
    await rig.run_due()
    assert await rig.left() == []


@contextmanager
def index_that_fails_once(rig: Rig) -> Iterator[None]:
    """The store refuses the first write, whatever that is."""
    failures = iter([StorageIOError("the store is gone for a moment")])

    def failing_once(method: Callable[[Sequence[Any]], Awaitable[Written]]) -> Callable[[Sequence[Any]], Any]:
        async def refuse_once(changes: Sequence[Any]) -> Written:
            for error in failures:
                raise error
            return await method(changes)

        return refuse_once

    with pytest.MonkeyPatch.context() as patch:
        for name in {"write_many", "change_runs"} & set(dir(rig.backend)):
            patch.setattr(rig.backend, name, failing_once(getattr(rig.backend, name)))
        yield


async def test_nothing_is_forgotten_when_the_index_fails(rig: Rig) -> None:
    """The bytes are gone and the metadata could not be removed: it must be tried again, like bytes."""
    await rig.block(1)
    await rig.block(2, "b")
    with index_that_fails_once(rig):
        with suppress(StorageIOError):  # unless the failed call has ended before it is waited for
            await rig.run_due()
        await rig.run_due()
    assert await rig.left() == []


# ── The executor's background loop ──


@asynccontextmanager
async def running(rig: Rig, is_leader: Callable[[], bool] = lambda: True) -> AsyncIterator[None]:
    """The loop, started and without pauses between its rounds."""
    task = asyncio.create_task(rig.executor.run(0.0, is_leader))
    await asyncio.sleep(0)
    try:
        yield
    finally:
        assert not task.done(), "the loop never ends by itself"
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def is_gone(rig: Rig, *keys: int) -> bool:
    return not rig.backend.present(keys)


async def test_only_the_leader_deletes() -> None:
    rig, leads = Rig(), False
    await rig.block(1)
    async with running(rig, lambda: leads):
        assert not await rig.turns(lambda: is_gone(rig, 1))
        leads = True
        assert await rig.turns(lambda: is_gone(rig, 1))


@IN_MEMORY
async def test_a_hanging_storage_holds_up_no_other_in_later_rounds(rig: Rig) -> None:
    """Not even when more of what lies on it becomes due in every round."""
    rig.storages.faults["a"].open_gate.clear()
    async with running(rig):
        await rig.block(1, "a")
        await rig.turns(lambda: rig.storages.faults["a"].attempts == 1)
        for key in range(100, 200):
            await rig.block(key + 1000, "a")
            await rig.block(key, "b")
            assert await rig.turns(lambda key=key: is_gone(rig, key)), key
        assert not is_gone(rig, 1)


@IN_MEMORY
async def test_a_hanging_storage_holds_up_no_other_instance(rig: Rig) -> None:
    rig.owned.insert(0, owned_index("first", 2, MetaIndex(MemoryBackend(), rig.directory)))
    rig.storages.faults["a"].open_gate.clear()
    await rig.block(1, "a", owned=0)
    await rig.block(2, "b", owned=1)
    async with running(rig):
        assert await rig.turns(lambda: is_gone(rig, 2))


@IN_MEMORY
async def test_a_hanging_storage_is_asked_once_and_goes_on_where_it_stopped(rig: Rig) -> None:
    """By as many workers as there are: a hanging mount must not take one thread per batch."""
    storage = rig.storages.faults["a"]
    storage.open_gate.clear()
    async with running(rig):
        for key in range(8):
            await rig.block(key, "a")
            await rig.turns(lambda: False, most=10)
        assert not is_gone(rig, 0)
        assert storage.attempts == 4
        storage.open_gate.set()
        assert await rig.turns(lambda: is_gone(rig, *range(8)))


@IN_MEMORY
async def test_the_loop_checks_held_blocks_again(rig: Rig) -> None:
    """A lease that is released early gives its bytes back within a second."""
    rig.held[1] = rig.clock.time + 500
    async with running(rig):
        await rig.block(1)
        await rig.turns(lambda: False, most=20)
        assert not is_gone(rig, 1)
        del rig.held[1]
        rig.clock.time += 1
        assert await rig.turns(lambda: is_gone(rig, 1))


@IN_MEMORY
async def test_the_loop_outlives_a_store_that_fails(rig: Rig) -> None:
    await rig.block(1)
    due, failures = rig.backend.due, iter([StorageIOError("gone"), ValueError("broken")])

    async def fail_twice(now: float, most: int) -> list[int]:
        for error in failures:
            raise error
        return await due(now, most)

    rig.backend.due = fail_twice  # type: ignore[method-assign]
    async with running(rig):
        assert await rig.turns(lambda: is_gone(rig, 1))


@IN_MEMORY
async def test_cancelling_the_loop_ends_what_it_began(rig: Rig) -> None:
    rig.storages.faults["a"].open_gate.clear()
    before = asyncio.all_tasks()
    async with running(rig):
        await rig.block(1, "a")
        await rig.turns(lambda: rig.storages.faults["a"].attempts == 1)
    assert await rig.turns(lambda: asyncio.all_tasks() == before)


# ── Storages that fail or hang: workers, pauses, and what waits in numbers ──


async def rounds(rig: Rig) -> None:
    await rig.turns(lambda: False, most=100)


@IN_MEMORY
async def test_a_failing_storage_shows_what_waits_and_drains_when_it_returns(rig: Rig) -> None:
    for key in range(300):
        await rig.block(key)
    storage = rig.storages.faults["a"]
    storage.outage = OSError("mount is gone")
    await rig.run_due()
    backlog = rig.executor.backlog("a")
    assert (backlog.waiting, backlog.executing, 0 < backlog.failures <= 300) == (300, 0, True)
    for _ in range(100):
        await rig.run_due(after=0.5)
    assert rig.executor.backlog("a").failures > backlog.failures
    storage.outage = None
    rig.clock.time += 60
    assert rig.executor.backlog("a").waiting == 0, "put off until a minute ago at the latest"
    await rig.run_due()
    assert (await rig.left(), rig.executor.backlogs()["a"][:2]) == ([], (0, 0))
    deleted = rig.executor.deleted
    assert (deleted.blocks, deleted.locations, deleted.byte_count) == (300, 300, 300 * 16)


async def test_the_deletion_counters_count_the_deleted_locations(rig: Rig) -> None:
    await rig.block(1, location_id="old")
    await rig.block(1, location_id="older")
    await rig.block(1, location_id="later", after_seconds=10)
    await rig.block(2, specs=("tp0",))
    await rig.run_due()
    deleted = rig.executor.deleted
    assert (deleted.blocks, deleted.locations, deleted.byte_count) == (1, 3, 40)


@IN_MEMORY
async def test_a_storage_has_so_many_workers_and_no_more(rig: Rig) -> None:
    storage = rig.storages.faults["a"]
    storage.open_gate.clear()
    for key in range(2000):
        await rig.block(key)
    async with running(rig):
        await rounds(rig)
        assert storage.attempts == 4
        assert rig.executor.backlog("a").executing == len(storage.under_way) // 2 == 4 * 128
        storage.open_gate.set()
        assert await rig.turns(lambda: rig.index.key_count == 0, most=3000)
    assert storage.twice == set()


@IN_MEMORY
async def test_what_hangs_counts_as_failed_once_and_is_never_begun_a_second_time(rig: Rig) -> None:
    storage = rig.storages.faults["a"]
    storage.open_gate.clear()
    await rig.block(1)
    async with running(rig):
        await rounds(rig)
        rig.clock.time += 29.5
        await rounds(rig)
        assert rig.executor.backlog("a") == Backlog(0, 1, 0, 29.5)
        for _ in range(20):
            rig.clock.time += 31
            await rounds(rig)
        assert (rig.executor.backlog("a").failures, storage.attempts, storage.twice) == (1, 1, set())
        storage.open_gate.set()
        assert await rig.turns(lambda: rig.index.key_count == 0)
    assert (storage.attempts, rig.executor.deleted.locations) == (1, 1)


@IN_MEMORY
async def test_after_a_hang_the_free_workers_go_on(rig: Rig) -> None:
    storage = rig.storages.faults["a"]
    storage.open_gate.clear()
    await rig.block(1)
    async with running(rig):
        await rounds(rig)
        rig.clock.time += 31
        await rounds(rig)
        gate, storage.open_gate = storage.open_gate, asyncio.Event()
        storage.open_gate.set()
        await rig.block(2)
        await rounds(rig)
        assert await rig.left() == [1, 2], "a pause follows the failure"
        rig.clock.time += 2
        assert await rig.turns(lambda: rig.index.key_count == 1)
        gate.set()
        assert await rig.turns(lambda: rig.index.key_count == 0)


@IN_MEMORY
async def test_due_blocks_on_another_storage_are_reached_behind_all_that_hang(rig: Rig) -> None:
    """However much lies on the hanging one, and however early it was due."""
    rig.storages.faults["a"].open_gate.clear()
    for key in range(3000):
        await rig.block(key, "a")
    for key in range(3000, 3010):
        await rig.block(key, "b", after_seconds=0.5)
    async with running(rig):
        await rounds(rig)
        rig.clock.time += 1.5  # now it is plain that it is slow
        assert await rig.turns(lambda: rig.executor.deleted.locations == 10, most=3000)
        await rounds(rig)
        backlog = rig.executor.backlog("a")
        assert backlog.waiting + backlog.executing == 3000
        rig.storages.faults["a"].open_gate.set()
        for _ in range(100):
            rig.clock.time += 60
            await rounds(rig)
        assert rig.index.key_count == 0
    assert rig.storages.faults["a"].twice == set()


@IN_MEMORY
async def test_the_loop_is_held_for_a_slice_at_a_time(rig: Rig) -> None:
    """However many are due: no call of the index has more than 128 blocks, and others run in between."""
    for key in range(3000):
        await rig.block(key)
    sizes: list[int] = []
    turns = 0
    get_many, write_many = rig.backend.get_many, rig.backend.write_many
    rig.backend.get_many = lambda keys: sizes.append(len(keys)) or get_many(keys)  # type: ignore
    rig.backend.write_many = lambda changes: sizes.append(len(changes)) or write_many(changes)  # type: ignore

    async def count_turns() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    counting = asyncio.create_task(count_turns())
    await rig.run_due()
    counting.cancel()
    assert (max(sizes) <= 128, sum(sizes) >= 6000, turns >= 3000 / 128) == (True, True, True)


@IN_MEMORY
async def test_more_is_taken_up_as_deletions_are_done_without_waiting_for_the_next_round(rig: Rig) -> None:
    for key in range(3000):
        await rig.block(key)
    task = asyncio.create_task(rig.executor.run(3600.0))
    assert await rig.turns(lambda: rig.index.key_count == 0, most=3000)
    task.cancel()


async def test_failures_of_one_pause_make_it_no_longer() -> None:
    clock = FakeClock()
    workers = StorageWorkers(2, clock)
    assert (workers.failed(3), workers.failed(3)) == (1, 1)
    clock.time += 0.5
    assert (workers.failed(1), workers.pause_seconds) == (0.5, 0.5)
    clock.time += 0.5
    assert (workers.pause_seconds, workers.failed(1)) == (0, 2)
    workers.succeeded()
    assert (workers.pause_seconds, workers.failed(1), workers.backlog.failures) == (0, 1, 9)


async def test_the_wait_for_a_busy_storage_follows_its_pace() -> None:
    clock = FakeClock()
    workers = StorageWorkers(2, clock)
    assert workers.seconds_for(10**6) == 1
    async with workers.slot(100):
        clock.time += 0.9
        assert not workers.is_slow
        clock.time += 19.1
        assert (workers.is_slow, workers.seconds_for(1)) == (True, 20)
    assert (workers.is_slow, workers.seconds_for(100), workers.seconds_for(10**6)) == (False, 10, 60)


# ── Deletions under faults, against a plain model ──


STORAGES = ("a", "b", "gone")


class Placed(NamedTuple):
    """A location, and when it is to be gone at the earliest; None for never."""

    key: int
    storage: str
    uris: tuple[str, ...]
    gone_from: float | None


class World:
    """A rig, the blocks that the test put into it, and the running executor."""

    def __init__(self) -> None:
        self.rig = Rig(STORAGES[:2])
        self.rig.delay = 3.0
        self.placed: list[Placed] = []
        self.running = asyncio.create_task(self.rig.executor.run(0.0))

    async def put(self, storage: str, key: int, serving: bool, after: int, pinned: int) -> None:
        status = LocationStatus.SERVING if serving else LocationStatus.DELETING
        uris = await self.rig.block(
            key, storage, status, f"{len(self.placed)}", after_seconds=after, pinned_seconds=pinned * serving
        )
        gone_from: float | None = self.rig.clock.time + after
        if serving:
            gone_from = self.rig.clock.time + max(after, pinned) + self.rig.delay if after else None
        self.placed.append(Placed(key, storage, uris, gone_from))

    async def restart(self) -> None:
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)
        await self.turns()
        self.rig.executor = self.rig.new_executor()
        self.running = asyncio.create_task(self.rig.executor.run(0.0))

    async def turns(self) -> None:
        await self.rig.turns(lambda: False, most=150)

    async def check(self) -> None:
        """Nothing goes before its time, or twice at once; bytes before metadata."""
        records = await self.rig.index.get(range(8))
        there = {location.id for record in records if record is not None for location in record.locations}
        for number, placed in enumerate(self.placed):
            may_go = placed.gone_from is not None and placed.gone_from <= self.rig.clock.time
            fault = self.rig.storages.faults.get(placed.storage)
            deleted = fault is None or set(placed.uris) <= set(fault.deleted)
            if str(number) not in there:
                assert may_go
                assert deleted
            if fault is not None and not may_go:
                assert set(fault.deleted).isdisjoint(placed.uris)
        for fault in self.rig.storages.faults.values():
            assert fault.twice == set()

    async def come_to_rest(self) -> None:
        for fault in self.rig.storages.faults.values():
            fault.outage = None
            fault.open_gate.set()
        for _ in range(12):
            self.rig.clock.time += 61
            await self.turns()
        await self.check()
        left = await self.rig.index.get(range(8))
        count = sum(len(record.locations) for record in left if record is not None)
        assert count == sum(placed.gone_from is None for placed in self.placed)
        assert all(backlog[:2] == (0, 0) for backlog in self.rig.executor.backlogs().values())
        assert sum(self.rig.index.usage_bytes.values()) == 16 * count


PUT = st.tuples(
    st.just("put"),
    st.sampled_from(STORAGES),
    st.integers(0, 7),
    st.booleans(),
    st.sampled_from((0, 0, 2, 5)),
    st.sampled_from((0, 4, 50)),
)
FAULT = st.tuples(st.sampled_from(("hang", "fail", "return")), st.sampled_from(STORAGES[:2]))
PASS = st.tuples(st.just("pass"), st.sampled_from((0.5, 1, 4, 31, 70)))
STEPS = st.lists(st.one_of(PUT, FAULT, PASS, st.just(("restart",))), max_size=25)


async def play(steps: list[tuple[str, ...]]) -> None:
    world = World()
    try:
        for what, *rest in steps:
            if what == "put":
                await world.put(*rest)  # type: ignore[arg-type]
            elif what == "pass":
                world.rig.clock.time += float(rest[0])
            elif what == "restart":
                await world.restart()
            else:
                fault = world.rig.storages.faults[rest[0]]
                fault.outage = OSError("down") if what == "fail" else None
                fault.open_gate.clear() if what == "hang" else fault.open_gate.set()
            await world.turns()
            await world.check()
        await world.come_to_rest()
    finally:
        world.running.cancel()
        await asyncio.gather(world.running, return_exceptions=True)


@settings(max_examples=examples(160), deadline=None, derandomize=True)
@given(steps=STEPS)
def test_invariants_4_and_6_nothing_is_left_nothing_goes_early_and_nothing_twice_at_once(
    steps: list[tuple[str, ...]],
) -> None:
    asyncio.run(play(steps))


# ── Storages that are removed or replaced while they are being asked to delete ──


async def hang(rig: Rig, blocks: int) -> Faulty:
    """Let the storage `a` hang while it is asked to delete so many blocks."""
    storage = rig.storages.faults["a"]
    storage.open_gate.clear()
    for key in range(blocks):
        await rig.block(key)
    return storage


@IN_MEMORY
async def test_hanging_and_pending_deletions_are_dropped_once_the_storage_is_removed(rig: Rig) -> None:
    """Usage returns (invariant 4); the executor sends the storage no more deletions and no reports."""
    storage = await hang(rig, 2000)
    async with running(rig):
        assert await rig.turns(lambda: storage.attempts == 4)
        rig.clock.time += 100
        await rig.turns(lambda: False, most=50)
        assert rig.executor.backlog("a").late == 4 * 128
        del rig.storages.faults["a"]
        rig.clock.time += 61  # the postponed deletions are due
        assert await rig.turns(lambda: rig.index.key_count == 0, most=3000)
        assert sum(rig.index.usage_bytes.values()) == 0
        storage.outage = OSError("late")  # no caller gets this error
        storage.open_gate.set()
        assert await rig.turns(lambda: not storage.under_way)
    assert (storage.attempts, storage.forgotten_uris) == (4, [])


@IN_MEMORY
async def test_a_dropped_deletion_is_not_repeated_when_the_storage_comes_back_at_once(rig: Rig) -> None:
    """The call that hangs may still delete: until it is over the bytes have no owner, and the storage no report."""
    storage = await hang(rig, 1)
    async with running(rig):
        assert await rig.turns(lambda: storage.attempts == 1)
        del rig.storages.faults["a"]
        rig.executor._deletions.fail_late()
        rig.storages.faults["a"] = storage
        assert await rig.turns(lambda: rig.index.key_count == 0)
        await rig.turns(lambda: False, most=50)
    assert (storage.attempts, storage.forgotten_uris) == (1, [])


@IN_MEMORY
async def test_a_storage_that_was_removed_leaves_no_pause_behind(rig: Rig) -> None:
    storage = rig.storages.faults["a"]
    storage.outage = OSError("down")
    await rig.block(1)
    await rig.run_due()
    del rig.storages.faults["a"]
    await rig.run_due()
    storage.outage, rig.storages.faults["a"] = None, storage
    await rig.block(2)
    await rig.run_due()
    assert await rig.left() == [1], "that one was put off before"


@IN_MEMORY
async def test_what_waits_goes_to_the_storage_that_is_open_by_then(rig: Rig) -> None:
    old = await hang(rig, 1000)
    new = rig.storages.faults["a"] = Faulty(old.inner)
    rig.storages.faults["a"] = old
    async with running(rig):
        assert await rig.turns(lambda: old.attempts == 4)
        rig.clock.time += 1.5  # slow, so that more is taken up
        assert await rig.turns(lambda: rig.executor.backlog("a").waiting > 0)
        rig.storages.faults["a"] = new
        old.open_gate.set()
        assert await rig.turns(lambda: rig.index.key_count == 0, most=3000)
    assert (old.attempts, len(old.deleted) + len(new.deleted)) == (4, 2000)


@IN_MEMORY
async def test_an_executor_that_ends_leaves_no_call_behind(rig: Rig) -> None:
    storage = await hang(rig, 2)
    async with running(rig):
        assert await rig.turns(lambda: storage.attempts == 1)
        del rig.storages.faults["a"]
        assert await rig.turns(lambda: rig.index.key_count == 0)
        assert storage.under_way
    assert await rig.turns(lambda: not storage.under_way)


# ── What serves past the time that its writer gave ──


async def place(rig: Rig, key: int = 1) -> Location | None:
    (record,) = await rig.index.get([key])
    return record.locations[0] if record is not None else None


async def test_it_stays_readable_for_the_delay_and_is_deleted_then(rig: Rig) -> None:
    """Invariant 6: a client that just got its location can still read it."""
    rig.delay = 5.0
    uris = await rig.block(1, status=LocationStatus.SERVING, after_seconds=100)
    assert await rig.run_due(after=99) == 0
    assert await rig.index.answers([1]) != [None]
    await rig.run_due(after=1)
    marked = await place(rig)
    assert marked is not None
    assert (marked.status, marked.deadline) == (LocationStatus.DELETING, rig.clock.time + 5)
    assert (await rig.index.answers([1]), rig.storages.faults["a"].deleted) == ([None], [])
    assert await rig.run_due(after=4.9) == 0
    await rig.run_due(after=0.1)
    assert (await rig.left(), rig.storages.faults["a"].deleted) == ([], list(uris))


async def test_it_is_reported_once_per_storage(rig: Rig) -> None:
    listener = rig.events.subscribe()
    first, second, third, pinned = mixed([1, -2, 3, 4])
    for key in (first, second):
        await rig.block(key, status=LocationStatus.SERVING, after_seconds=10)
    await rig.block(third, "b", status=LocationStatus.SERVING, after_seconds=10)
    await rig.block(pinned, "b", status=LocationStatus.SERVING, after_seconds=10, pinned_seconds=50)
    await rig.run_due(after=10)
    await rig.events.close()
    events = [json.loads(line) for line in b"".join(listener.pop_pending()).splitlines()]
    reported = {(event["type"], event["reason"], event["storage"]): event for event in events}
    assert set(reported) == {("expired", "ttl", "a"), ("expired", "ttl", "b")}
    event = reported["expired", "ttl", "a"]
    assert (sorted(event["keys"]), event["location_ids"], event["bytes"]) == ([-2, 1], [["l"], ["l"]], 32)
    assert (event["source"], event["component"], event["group"]) == ("i", "cache_manager", "group")
    assert reported["expired", "ttl", "b"]["keys"] == [3]
