"""The executor's background loop: it wakes for everything it has to do, and nothing holds up anything else."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from reclaim_rig import Rig


@asynccontextmanager
async def running(rig: Rig) -> AsyncIterator[None]:
    """The loop, started and idle."""
    task = asyncio.create_task(rig.executor.run())
    await asyncio.sleep(0)
    try:
        yield
    finally:
        assert not task.done(), "the loop never ends by itself"
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def is_gone(rig: Rig, *keys: int) -> bool:
    return not any(key in rig.backend._records for key in keys)


async def test_what_is_submitted_is_deleted_at_once_when_due() -> None:
    rig = Rig()
    async with running(rig):
        rig.executor.submit(rig.index, [await rig.block(1)], rig.clock.time)
        assert await rig.turns(lambda: is_gone(rig, 1))


async def test_what_was_submitted_before_the_start_is_deleted() -> None:
    rig = Rig()
    rig.executor.submit(rig.index, [await rig.block(1)], rig.clock.time)
    async with running(rig):
        assert await rig.turns(lambda: is_gone(rig, 1))


async def test_what_is_due_later_waits() -> None:
    rig = Rig()
    async with running(rig):
        rig.executor.submit(rig.index, [await rig.block(1)], rig.clock.time + 100)
        assert not await rig.turns(lambda: is_gone(rig, 1))
        rig.clock.time += 100
        rig.executor.submit(rig.index, [await rig.block(2)], rig.clock.time)
        assert await rig.turns(lambda: is_gone(rig, 1, 2))


async def test_a_hanging_storage_holds_up_no_other_in_the_same_round() -> None:
    rig = Rig()
    rig.storages.faults["a"].open_gate.clear()
    async with running(rig):
        rig.executor.submit(rig.index, [await rig.block(1, "a"), await rig.block(2, "b")], rig.clock.time)
        assert await rig.turns(lambda: is_gone(rig, 2))
        assert not is_gone(rig, 1)


async def test_a_hanging_storage_holds_up_no_other_in_later_rounds() -> None:
    rig = Rig()
    rig.storages.faults["a"].open_gate.clear()
    async with running(rig):
        rig.executor.submit(rig.index, [await rig.block(1, "a")], rig.clock.time)
        await rig.turns(lambda: rig.storages.faults["a"].attempts == 1)
        for key in range(2, 6):
            rig.executor.submit(rig.index, [await rig.block(key, "b")], rig.clock.time)
            assert await rig.turns(lambda key=key: is_gone(rig, key))
        assert not is_gone(rig, 1)


async def test_a_hanging_storage_is_asked_once_and_goes_on_where_it_stopped() -> None:
    """One batch at a time: a hanging mount must not take one thread per batch."""
    rig = Rig()
    storage = rig.storages.faults["a"]
    storage.open_gate.clear()
    async with running(rig):
        for key in range(4):
            rig.executor.submit(rig.index, [await rig.block(key, "a")], rig.clock.time)
        assert not await rig.turns(lambda: is_gone(rig, 0))
        assert storage.attempts == 1
        storage.open_gate.set()
        assert await rig.turns(lambda: is_gone(rig, 0, 1, 2, 3))


async def test_a_failed_deletion_is_tried_again_by_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcm.reclaim.executor._FIRST_PAUSE_SECONDS", 0.0)
    rig = Rig()
    rig.storages.faults["a"].outage = OSError("down")
    async with running(rig):
        rig.executor.submit(rig.index, [await rig.block(1)], rig.clock.time)
        await rig.turns(lambda: rig.storages.faults["a"].attempts > 2)
        rig.storages.faults["a"].outage = None
        assert await rig.turns(lambda: is_gone(rig, 1))


async def test_what_was_held_is_looked_at_again_by_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else is submitted: the loop itself has to wake up for what a lease pins (no pause in this test)."""
    monkeypatch.setattr("kvcm.reclaim.executor._HELD_RECHECK_SECONDS", 0.0)
    rig = Rig()
    rig.held[1] = rig.clock.time + 5
    async with running(rig):
        rig.executor.submit(rig.index, [await rig.block(1)], rig.clock.time)
        await rig.turns(lambda: False, most=20)
        assert not is_gone(rig, 1)
        rig.clock.time += 5
        assert await rig.turns(lambda: is_gone(rig, 1))


async def test_cancelling_the_loop_ends_what_it_began() -> None:
    rig = Rig()
    rig.storages.faults["a"].open_gate.clear()
    before = asyncio.all_tasks()
    async with running(rig):
        rig.executor.submit(rig.index, [await rig.block(1, "a")], rig.clock.time)
        await rig.turns(lambda: rig.storages.faults["a"].attempts == 1)
    assert await rig.turns(lambda: asyncio.all_tasks() == before)
