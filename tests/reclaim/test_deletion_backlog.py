"""Storages that fail or hang: workers, pauses, and what waits in numbers."""

import asyncio

from fake_clock import FakeClock
from reclaim_rig import Rig, running

from kvcm.reclaim.workers import Backlog, StorageWorkers


async def rounds(rig: Rig) -> None:
    await rig.turns(lambda: False, most=100)


async def test_a_failing_storage_shows_what_waits_and_drains_when_it_returns() -> None:
    rig = Rig()
    for key in range(300):
        await rig.block(key)
    storage = rig.storages.faults["a"]
    storage.outage = OSError("mount is gone")
    await rig.executor.run_due()
    backlog = rig.executor.backlog("a")
    assert (backlog.waiting, backlog.executing, 0 < backlog.failures <= 300) == (300, 0, True)
    for _ in range(100):
        rig.clock.time += 0.5
        await rig.executor.run_due()
    assert rig.executor.backlog("a").failures > backlog.failures
    storage.outage = None
    rig.clock.time += 60
    assert rig.executor.backlog("a").waiting == 0, "put off until a minute ago at the latest"
    await rig.executor.run_due()
    assert (await rig.left(), rig.executor.backlogs()["a"][:2]) == ([], (0, 0))
    deleted = rig.executor.deleted
    assert (deleted.blocks, deleted.locations, deleted.byte_count) == (300, 300, 300 * 16)


async def test_what_is_counted_as_deleted_is_what_went() -> None:
    rig = Rig()
    await rig.block(1, location_id="old")
    await rig.block(1, location_id="older")
    await rig.block(1, location_id="later", after_seconds=10)
    await rig.block(2, specs=("tp0",))
    await rig.executor.run_due()
    deleted = rig.executor.deleted
    assert (deleted.blocks, deleted.locations, deleted.byte_count) == (1, 3, 40)


async def test_a_storage_has_so_many_workers_and_no_more() -> None:
    rig = Rig()
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


async def test_what_hangs_counts_as_failed_once_and_is_never_begun_a_second_time() -> None:
    rig = Rig()
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


async def test_after_a_hang_the_free_workers_go_on() -> None:
    rig = Rig()
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


async def test_what_is_due_on_another_storage_is_reached_behind_all_that_hangs() -> None:
    """However much lies on the hanging one, and however early it was due."""
    rig = Rig()
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


async def test_the_loop_is_held_for_a_slice_at_a_time() -> None:
    """However many are due: no call of the index has more than 128 blocks, and others run in between."""
    rig = Rig()
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
    await rig.executor.run_due()
    counting.cancel()
    assert (max(sizes) <= 128, sum(sizes) >= 6000, turns >= 3000 / 128) == (True, True, True)


async def test_more_is_taken_up_as_deletions_are_done_without_waiting_for_the_next_round() -> None:
    rig = Rig()
    for key in range(3000):
        await rig.block(key)
    task = asyncio.create_task(rig.executor.run(3600.0))
    assert await rig.turns(lambda: rig.index.key_count == 0, most=3000)
    task.cancel()


async def test_a_new_executor_goes_on_where_the_last_one_died() -> None:
    rig = Rig()
    for key in range(600):
        await rig.block(key, "ab"[key % 2])
    rig.storages.faults["a"].open_gate.clear()
    async with running(rig):
        assert await rig.turns(lambda: rig.index.key_count == 300, most=3000)
    rig.storages.faults["a"].open_gate.set()
    rig.executor = rig.new_executor()
    await rig.executor.run_due()
    assert (await rig.left(), rig.index.usage_bytes.total()) == ([], 0)  # type: ignore[attr-defined]
    for storage in rig.storages.faults.values():
        assert len(storage.deleted) == len(set(storage.deleted)) == 600
        assert storage.twice == set()


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
    async with workers.turn(100):
        clock.time += 0.9
        assert not workers.is_slow
        clock.time += 19.1
        assert (workers.is_slow, workers.seconds_for(1)) == (True, 20)
    assert (workers.is_slow, workers.seconds_for(100), workers.seconds_for(10**6)) == (False, 10, 60)
