"""Requests that are cut off while the store is at work: a client hangs up, the store fails, the store takes too long.

Whatever happens to one request, a session ends exactly once and each of its blocks is serving or gone afterwards
(invariant 3), quotas hold, and what was marked for deletion is deleted. Every test cuts at many moments in turn.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from test_manager_over_slow_store import SlowWorld

from kvcm.cache.sessions import FinishedWrite, WriteRequest
from kvcm.index.backends.backend import Change, Written
from kvcm.model.errors import CapacityError, InvalidArgumentError, KvcmError, StorageIOError
from kvcm.model.groups import InstanceGroupQuota
from kvcm.model.masks import NO_MASK, BlockMask

KEYS = (1, 2, 3, 4, 5, 6)
TURNS = range(1, 20)
"""After how many turns of the loop a call is cut off; some are after its end."""


@contextmanager
def slow_world(turns: int = 0) -> Iterator[SlowWorld]:
    world = SlowWorld(seed=turns, capacity=10_000)
    try:
        yield world
    finally:
        world.close()


async def cut_off(awaitable: Awaitable[Any], turns: int) -> Any:
    """Cancel a call after so many turns of the loop, and return what it returned or raised in the end."""
    task = asyncio.ensure_future(awaitable)
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    (outcome,) = await asyncio.gather(task, return_exceptions=True)
    return outcome


async def statuses_at_rest(world: SlowWorld) -> set[str]:
    records = await world.come_to_rest()
    return {place.status.name for record in records for place in record.locations}


async def test_invariant_3_a_start_that_is_cut_off_leaves_nothing_writing() -> None:
    for turns in TURNS:
        with slow_world(turns) as world:
            await cut_off(world.manager.start_write("i", WriteRequest(KEYS)), turns)
            assert await statuses_at_rest(world) == set(), turns


async def test_a_start_that_is_cut_off_is_rolled_back_at_once() -> None:
    """Nobody was told the session's id: its blocks must not wait for the deadline."""
    cut = 0
    for turns in TURNS:
        with slow_world(turns) as world:
            outcome = await cut_off(world.manager.start_write("i", WriteRequest(KEYS)), turns)
            if isinstance(outcome, asyncio.CancelledError):
                cut += 1
                await world.executor.run_due()
                assert await world.records() == [], turns
                assert world.manager.endings.open_count == 0
                assert await world.manager.endings.deadlines_of([f"{n:032x}" for n in range(9)]) == {}
    assert cut > 3


async def test_a_start_that_the_store_refuses_is_rolled_back_at_once() -> None:
    with slow_world() as world:
        break_store_once(world)
        with pytest.raises(StorageIOError):
            await world.manager.start_write("i", WriteRequest(KEYS))
        await world.executor.run_due()
        assert (await world.records(), world.manager.endings.open_count) == ([], 0)
        assert len((await world.manager.start_write("i", WriteRequest(KEYS))).chunks) == len(KEYS)


async def test_a_renewal_that_the_store_refuses_half_way_holds_what_was_removed() -> None:
    """The session is renewed, its blocks are not: its client still writes, whatever the records say."""
    with slow_world() as world:
        started = await world.manager.start_write("i", WriteRequest(KEYS, timeout_seconds=5))
        await world.manager.remove("i", KEYS, NO_MASK)
        break_store_once(world)
        with pytest.raises(StorageIOError):
            await world.manager.renew_write("i", started.session.id, 100)
        world.clock.advance(50)
        await world.executor.run_due()
        assert len(await world.records()) == len(KEYS)
        await world.manager.finish_write("i", started.session.id, BlockMask(offset=0))
        await world.executor.run_due()
        assert await world.records() == []


async def test_invariant_3_a_finish_that_is_cut_off_leaves_nothing_writing() -> None:
    for turns in TURNS:
        with slow_world(turns) as world:
            started = await world.manager.start_write("i", WriteRequest(KEYS))
            await cut_off(world.manager.finish_write("i", started.session.id, BlockMask(offset=3)), turns)
            assert await statuses_at_rest(world) <= {"SERVING"}, turns


async def test_a_finish_that_is_cut_off_can_be_asked_for_again() -> None:
    """The client retries, as often as it likes: it is told that its blocks are served."""
    for turns in TURNS:
        with slow_world(turns) as world:
            started = await world.manager.start_write("i", WriteRequest(KEYS))
            success = BlockMask(offset=len(KEYS))
            await cut_off(world.manager.finish_write("i", started.session.id, success), turns)
            for _ in range(2):
                finished = await world.manager.finish_write("i", started.session.id, success)
                assert finished == FinishedWrite(len(KEYS), 0, 0), turns
            with pytest.raises(InvalidArgumentError, match="finished before, with other success_blocks"):
                await world.manager.finish_write("i", started.session.id, BlockMask(offset=0))
            records = await world.records()
            assert {place.status.name for record in records for place in record.locations} == {"SERVING"}


async def test_invariant_3_a_client_that_hangs_up_does_not_lose_the_sessions_of_others() -> None:
    """Overdue sessions are rolled back inside the next start; that client may be gone before it is done."""
    for turns in TURNS:
        with slow_world(turns) as world:
            for keys in ((1, 2), (3, 4), (5, 6)):
                await world.manager.start_write("i", WriteRequest(keys, timeout_seconds=1))
            world.clock.advance(2)
            await cut_off(world.manager.start_write("i", WriteRequest((9,))), turns)
            assert await statuses_at_rest(world) == set(), turns


async def test_a_removal_that_is_cut_off_is_deleted_all_the_same() -> None:
    """A record that is marked as deleting and known to no executor would count as usage for ever."""
    for turns in TURNS:
        with slow_world(turns) as world:
            started = await world.manager.start_write("i", WriteRequest(KEYS))
            await world.manager.finish_write("i", started.session.id, BlockMask(offset=len(KEYS)))
            await cut_off(world.manager.remove("i", KEYS, NO_MASK), turns)
            assert await statuses_at_rest(world) <= {"SERVING"}, turns


class StoreFailure:
    """Makes the store refuse one write."""

    def __init__(self, write_many: Callable[[Sequence[Change]], Awaitable[Written]]) -> None:
        self._write_many = write_many
        self._failed = False

    async def __call__(self, changes: Sequence[Change]) -> Written:
        if not self._failed:
            self._failed = True
            raise StorageIOError("the store is gone for a moment")
        return await self._write_many(changes)


def break_store_once(world: SlowWorld) -> None:
    world.backend.inner.write_many = StoreFailure(world.backend.inner.write_many)  # type: ignore[method-assign]


async def test_invariant_3_a_finish_that_the_store_refuses_leaves_nothing_writing() -> None:
    with slow_world() as world:
        started = await world.manager.start_write("i", WriteRequest(KEYS))
        break_store_once(world)
        with pytest.raises(StorageIOError):
            await world.manager.finish_write("i", started.session.id, BlockMask(offset=len(KEYS)))
        assert await statuses_at_rest(world) <= {"SERVING"}


async def test_a_finish_that_the_store_refuses_can_be_repeated_with_the_same_mask_only() -> None:
    """The decision is stored: it is neither lost nor changed."""
    with slow_world() as world:
        started = await world.manager.start_write("i", WriteRequest(KEYS))
        break_store_once(world)
        with pytest.raises(StorageIOError):
            await world.manager.finish_write("i", started.session.id, BlockMask(offset=4))
        for mask in (BlockMask(offset=3), BlockMask(flags=(True,) * 6)):
            with pytest.raises(InvalidArgumentError, match="other success_blocks"):
                await world.manager.finish_write("i", started.session.id, mask)
        with pytest.raises(InvalidArgumentError, match="cannot be renewed"):
            await world.manager.renew_write("i", started.session.id, 100)
        again = BlockMask(flags=(True,) * 4 + (False,) * 2)
        assert await world.manager.finish_write("i", started.session.id, again) == FinishedWrite(4, 2, 0)


async def test_a_decision_that_nobody_asks_for_again_is_carried_out_after_five_seconds() -> None:
    with slow_world() as world:
        started = await world.manager.start_write("i", WriteRequest(KEYS))
        break_store_once(world)
        with pytest.raises(StorageIOError):
            await world.manager.finish_write("i", started.session.id, BlockMask(offset=len(KEYS)))
        for seconds, status in ((4.9, "WRITING"), (0.1, "SERVING")):
            world.clock.advance(seconds)
            await world.manager.expire()
            assert {place.status.name for record in await world.records() for place in record.locations} == {status}


async def test_invariant_3_an_expiry_that_the_store_refuses_leaves_nothing_writing() -> None:
    with slow_world() as world:
        await world.manager.start_write("i", WriteRequest(KEYS))
        break_store_once(world)
        world.clock.advance(100)
        await world.manager.expire()
        assert {place.status.name for record in await world.records() for place in record.locations} == {"WRITING"}
        assert await statuses_at_rest(world) == set()


async def test_deletions_go_on_after_the_store_refused_one() -> None:
    """Nothing that was submitted is forgotten, whether bytes or metadata could not be deleted."""
    with slow_world() as world:
        started = await world.manager.start_write("i", WriteRequest(KEYS))
        await world.manager.finish_write("i", started.session.id, BlockMask(offset=len(KEYS)))
        await world.manager.remove("i", KEYS, NO_MASK)
        break_store_once(world)
        world.clock.advance(10)
        await asyncio.gather(world.executor.run_due(), return_exceptions=True)
        assert await statuses_at_rest(world) == set()


async def test_writers_with_parents_never_exceed_the_quota_together() -> None:
    """Usage promises that writes which overlap can never exceed a limit together."""
    with slow_world() as world:
        group = world.registry.groups.get("group")
        capacity = 40  # two blocks
        await world.registry.groups.update(
            replace(group, quota=InstanceGroupQuota(capacity), version=1), current_version=0
        )
        starts = [
            world.manager.start_write("i", WriteRequest((key, key + 1), parent_key=key - 1)) for key in (10, 20, 30)
        ]
        outcomes = await asyncio.gather(*starts, return_exceptions=True)
        assert world.stored_bytes <= capacity
        assert [type(o) for o in outcomes if isinstance(o, BaseException)] == [CapacityError] * 2


@pytest.mark.parametrize("hangs_up", [False, True])
async def test_invariant_3_a_start_that_outlives_its_session_leaves_nothing_writing(hangs_up: bool) -> None:
    """The store hangs until the session is overdue; its blocks must not come to life after its end."""
    for turns in TURNS:
        with slow_world(turns) as world:
            task = asyncio.create_task(world.manager.start_write("i", WriteRequest(KEYS, timeout_seconds=1)))
            for _ in range(turns):
                await asyncio.sleep(0)
            world.clock.advance(2)
            expiry = asyncio.create_task(world.manager.expire())
            await asyncio.sleep(0)
            if hangs_up:
                task.cancel()
            (outcome, _) = await asyncio.gather(task, expiry, return_exceptions=True)
            assert not isinstance(outcome, Exception) or isinstance(outcome, KvcmError)
            assert await statuses_at_rest(world) == set(), turns


@pytest.mark.parametrize("hangs_up", [False, True])
async def test_invariant_4_an_instance_removed_during_a_start_leaves_no_usage(hangs_up: bool) -> None:
    for turns in TURNS:
        with slow_world(turns) as world:
            task = asyncio.create_task(world.manager.start_write("i", WriteRequest(KEYS)))
            for _ in range(turns):
                await asyncio.sleep(0)
            removal = asyncio.create_task(world.manager.remove_instance("i"))
            await asyncio.sleep(0)
            if hangs_up:
                task.cancel()
            await asyncio.gather(task, removal, return_exceptions=True)
            assert await statuses_at_rest(world) == set(), turns
            assert not any(world.manager.group_usage_bytes("group").values()), turns
