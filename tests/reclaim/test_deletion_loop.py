"""The executor's background loop: it looks for everything it has to do, and nothing holds up anything else."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from reclaim_rig import OwnedIndex, Rig

from kvcm.index.backends.memory import MemoryBackend
from kvcm.index.meta_index import MetaIndex
from kvcm.model.errors import StorageIOError


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
    return not any(key in rig.backend._blocks for key in keys)


async def test_what_is_due_is_deleted_at_once() -> None:
    rig = Rig()
    async with running(rig):
        await rig.block(1)
        assert await rig.turns(lambda: is_gone(rig, 1))


async def test_what_was_due_before_the_start_is_deleted() -> None:
    """Nobody has to tell the executor: a manager that takes over finds it in the records."""
    rig = Rig()
    await rig.block(1)
    async with running(rig):
        assert await rig.turns(lambda: is_gone(rig, 1))


async def test_what_is_due_later_waits() -> None:
    rig = Rig()
    async with running(rig):
        await rig.block(1, after_seconds=100)
        assert not await rig.turns(lambda: is_gone(rig, 1))
        rig.clock.time += 100
        assert await rig.turns(lambda: is_gone(rig, 1))


async def test_only_the_leader_deletes() -> None:
    rig, leads = Rig(), False
    await rig.block(1)
    async with running(rig, lambda: leads):
        assert not await rig.turns(lambda: is_gone(rig, 1))
        leads = True
        assert await rig.turns(lambda: is_gone(rig, 1))


async def test_a_hanging_storage_holds_up_no_other_in_the_same_round() -> None:
    rig = Rig()
    rig.storages.faults["a"].open_gate.clear()
    await rig.block(1, "a")
    await rig.block(2, "b")
    async with running(rig):
        assert await rig.turns(lambda: is_gone(rig, 2))
        assert not is_gone(rig, 1)


async def test_a_hanging_storage_holds_up_no_other_in_later_rounds() -> None:
    """Not even when more of what lies on it becomes due in every round."""
    rig = Rig()
    rig.storages.faults["a"].open_gate.clear()
    async with running(rig):
        await rig.block(1, "a")
        await rig.turns(lambda: rig.storages.faults["a"].attempts == 1)
        for key in range(100, 200):
            await rig.block(key + 1000, "a")
            await rig.block(key, "b")
            assert await rig.turns(lambda key=key: is_gone(rig, key)), key
        assert not is_gone(rig, 1)


async def test_a_hanging_storage_holds_up_no_other_instance() -> None:
    rig = Rig()
    rig.owned.insert(0, OwnedIndex("first", 2, MetaIndex(MemoryBackend(), rig.directory)))
    rig.storages.faults["a"].open_gate.clear()
    await rig.block(1, "a", owned=0)
    await rig.block(2, "b", owned=1)
    async with running(rig):
        assert await rig.turns(lambda: is_gone(rig, 2))


async def test_a_hanging_storage_is_asked_once_and_goes_on_where_it_stopped() -> None:
    """By as many workers as there are: a hanging mount must not take one thread per batch."""
    rig = Rig()
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


async def test_a_failed_deletion_is_tried_again_by_the_loop() -> None:
    rig = Rig()
    rig.storages.faults["a"].outage = OSError("down")
    async with running(rig):
        await rig.block(1)
        for attempt in range(1, 4):
            assert await rig.turns(lambda attempt=attempt: rig.storages.faults["a"].attempts == attempt)
            assert await rig.turns(lambda attempt=attempt: rig.executor.backlog("a").failures == attempt)
            rig.clock.time += 60
        rig.storages.faults["a"].outage = None
        rig.clock.time += 60
        assert await rig.turns(lambda: is_gone(rig, 1))


async def test_what_was_held_is_looked_at_again_by_the_loop() -> None:
    """A lease that is released early gives its bytes back within a second."""
    rig = Rig()
    rig.held[1] = rig.clock.time + 500
    async with running(rig):
        await rig.block(1)
        await rig.turns(lambda: False, most=20)
        assert not is_gone(rig, 1)
        del rig.held[1]
        rig.clock.time += 1
        assert await rig.turns(lambda: is_gone(rig, 1))


async def test_the_loop_outlives_a_store_that_fails() -> None:
    rig = Rig()
    await rig.block(1)
    due, failures = rig.backend.due, iter([StorageIOError("gone"), ValueError("broken")])

    async def fail_twice(now: float, most: int) -> list[int]:
        for error in failures:
            raise error
        return await due(now, most)

    rig.backend.due = fail_twice  # type: ignore[method-assign]
    async with running(rig):
        assert await rig.turns(lambda: is_gone(rig, 1))


async def test_cancelling_the_loop_ends_what_it_began() -> None:
    rig = Rig()
    rig.storages.faults["a"].open_gate.clear()
    before = asyncio.all_tasks()
    async with running(rig):
        await rig.block(1, "a")
        await rig.turns(lambda: rig.storages.faults["a"].attempts == 1)
    assert await rig.turns(lambda: asyncio.all_tasks() == before)


async def test_one_that_does_not_lead_deletes_nothing() -> None:
    rig, leads = Rig(), False
    await rig.block(1)
    async with running(rig, lambda: leads):
        assert not await rig.turns(lambda: is_gone(rig, 1))
        leads = True
        assert await rig.turns(lambda: is_gone(rig, 1))
