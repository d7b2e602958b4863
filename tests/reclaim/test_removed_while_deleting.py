"""Storages that are removed or replaced while they are being asked to delete: nobody waits for them any longer."""

from __future__ import annotations

from reclaim_rig import Faulty, Rig, running


async def hang(rig: Rig, blocks: int) -> Faulty:
    """Let the storage `a` hang while it is asked to delete so many blocks."""
    storage = rig.storages.faults["a"]
    storage.open_gate.clear()
    for key in range(blocks):
        await rig.block(key)
    return storage


async def test_what_hangs_and_what_waits_is_dropped_once_the_storage_is_removed() -> None:
    """Usage returns (invariant 4); the storage is asked for nothing more, and told of nothing."""
    rig = Rig()
    storage = await hang(rig, 2000)
    async with running(rig):
        assert await rig.turns(lambda: storage.attempts == 4)
        rig.clock.time += 100
        await rig.turns(lambda: False, most=50)
        assert rig.executor.backlog("a").late == 4 * 128
        del rig.storages.faults["a"]
        rig.clock.time += 61  # what was put off before is due
        assert await rig.turns(lambda: rig.index.key_count == 0, most=3000)
        assert sum(rig.index.usage_bytes.values()) == 0
        storage.outage = OSError("late")  # nobody hears of it
        storage.open_gate.set()
        assert await rig.turns(lambda: not storage.under_way)
    assert (storage.attempts, storage.forgotten_uris) == (4, [])


async def test_what_was_let_go_of_is_not_asked_for_again_when_the_storage_comes_back_at_once() -> None:
    """The call that hangs may still delete: those bytes are nobody's before it is over, so nobody is told of them."""
    rig = Rig()
    storage = await hang(rig, 1)
    async with running(rig):
        assert await rig.turns(lambda: storage.attempts == 1)
        del rig.storages.faults["a"]
        rig.executor._deletions.fail_late()
        rig.storages.faults["a"] = storage
        assert await rig.turns(lambda: rig.index.key_count == 0)
        await rig.turns(lambda: False, most=50)
    assert (storage.attempts, storage.forgotten_uris) == (1, [])


async def test_a_storage_that_was_removed_leaves_no_pause_behind() -> None:
    rig = Rig()
    storage = rig.storages.faults["a"]
    storage.outage = OSError("down")
    await rig.block(1)
    await rig.executor.run_due()
    del rig.storages.faults["a"]
    await rig.executor.run_due()
    storage.outage, rig.storages.faults["a"] = None, storage
    await rig.block(2)
    await rig.executor.run_due()
    assert await rig.left() == [1], "that one was put off before"


async def test_what_waits_goes_to_the_storage_that_is_open_by_then() -> None:
    rig = Rig()
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


async def test_an_executor_that_ends_leaves_no_call_behind() -> None:
    rig = Rig()
    storage = await hang(rig, 2)
    async with running(rig):
        assert await rig.turns(lambda: storage.attempts == 1)
        del rig.storages.faults["a"]
        assert await rig.turns(lambda: rig.index.key_count == 0)
        assert storage.under_way
    assert await rig.turns(lambda: not storage.under_way)
