"""Drains on a shared store whose calls suspend: managers that have not heard yet, leaders that follow each other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import NamedTuple

import pytest
from cache_world import CountingIds, FakeClock, dummy, group_of, instance
from shared_store import Node, SharedStore

from kvcm.cache.drains import DrainProgress, StorageDrains
from kvcm.cache.removal import Remover
from kvcm.cache.sessions import StartedWrite, WriteRequest
from kvcm.model.errors import KvcmError, NotReadyError
from kvcm.model.masks import BlockMask

KEYS = list(range(600))


class Two(NamedTuple):
    """Two managers, their drains, and the time."""

    nodes: list[Node]
    drains: list[StorageDrains]
    clock: FakeClock
    store: SharedStore

    async def start(self, number: int, keys: list[int]) -> StartedWrite:
        return await self.nodes[number].manager.start_write("i", WriteRequest(keys))

    async def finish(self, number: int, started: StartedWrite) -> None:
        mask = BlockMask(offset=len(started.chunks))
        await self.nodes[number].manager.finish_write("i", started.session.id, mask)

    async def write(self, number: int, keys: list[int]) -> StartedWrite:
        started = await self.start(number, keys)
        await self.finish(number, started)
        return started

    async def lead(self, number: int, seconds: float) -> None:
        """One of the two does what a leader does, some time later."""
        self.clock.advance(seconds)
        for node in self.nodes:
            await node.registry.refresh()
        await self.nodes[number].manager.expire()
        await self.drains[number].go_on()
        await self.nodes[number].executor.run_due()

    async def progress(self, number: int, *, is_leader: bool = True) -> DrainProgress:
        (only,) = await self.drains[number].look(is_leader=is_leader)
        return only

    @property
    def used_bytes(self) -> int:
        return sum(sum(backend.usage_bytes.values()) for backend in self.store.backends().values())


async def _no_pause(_seconds: float) -> None:
    await asyncio.sleep(0)


@pytest.fixture
async def two() -> AsyncIterator[Two]:
    """Two managers that have heard of one storage."""
    store, clock, ids = SharedStore(), FakeClock(), CountingIds()
    nodes = [Node(store, clock, ids, seed) for seed in (1, 2)]
    for node in nodes:
        await node.begin()
    await nodes[0].registry.storages.add(dummy("a"))
    await nodes[0].registry.groups.create(group_of(["a"], delay_ms=1000))
    await nodes[0].manager.register_instance(instance("i", {"kv": 32}))
    await nodes[1].registry.refresh()
    drains = [
        StorageDrains(
            node.registry,
            node.manager.open_caches,
            Remover(clock, node.registry.groups.find),
            clock,
            is_shared=True,
            pause=_no_pause,
        )
        for node in nodes
    ]
    yield Two(nodes, drains, clock, store)
    for node in nodes:
        await node.close()


async def test_what_a_manager_writes_that_has_not_heard_yet_is_found(two: Two) -> None:
    await two.write(0, KEYS)
    await two.drains[0].drain("a")
    late = await two.start(1, [1000])  # this one has not heard
    assert len(late.chunks) == 1
    for node in two.nodes:
        await node.registry.refresh()
    with pytest.raises(NotReadyError, match="being drained"):
        await two.start(1, [1001])
    for _ in range(5):
        await two.lead(0, 2.0)
    assert two.used_bytes == 32
    assert not (await two.progress(0)).is_done
    await two.finish(1, late)
    for _ in range(4):
        await two.lead(0, 31.0)
    assert two.used_bytes == 0
    assert [(await two.progress(n, is_leader=n == 0)).is_done for n in (0, 1)] == [True, True]


async def test_what_comes_after_the_drain_was_done_is_found_too(two: Two) -> None:
    await two.drains[0].drain("a")
    for _ in range(5):
        two.clock.advance(10.0)
        await two.drains[0].go_on()
    assert (await two.progress(0)).is_done
    await two.write(1, [1000])  # its view is a minute old: it was cut off from the store, say
    assert not (await two.progress(0)).is_done
    for _ in range(4):
        await two.lead(0, 2.0)
    assert two.used_bytes == 0


async def test_nothing_is_done_before_every_manager_must_have_heard(two: Two) -> None:
    await two.drains[0].drain("a")
    for _ in range(5):
        await two.lead(0, 1.0)
    assert [(await two.progress(n, is_leader=n == 0)).is_done for n in (0, 1)] == [False, False]
    for _ in range(4):
        await two.lead(0, 5.0)
    assert [(await two.progress(n, is_leader=n == 0)).is_done for n in (0, 1)] == [True, True]


async def test_the_next_leader_goes_on_where_the_last_one_stopped(two: Two) -> None:
    await two.write(0, KEYS)
    await two.drains[0].drain("a")
    turns = iter([True, False])
    await two.drains[0].go_on(lambda: next(turns))
    await two.nodes[0].executor.run_due()
    await two.nodes[1].registry.refresh()
    assert (await two.progress(1, is_leader=False)).left_bytes > 0
    two.nodes[0].crash()
    two.clock.advance(2.0)
    for _ in range(4):
        two.clock.advance(10.0)
        await two.nodes[1].registry.refresh()
        await two.drains[1].go_on()
        await two.nodes[1].executor.run_due()
    assert two.used_bytes == 0
    assert (await two.progress(1)).is_done


async def test_two_that_believe_to_lead_do_each_other_no_harm(two: Two) -> None:
    await two.write(0, KEYS)
    await two.drains[0].drain("a")
    await two.nodes[1].registry.refresh()
    for _ in range(4):
        await asyncio.gather(two.drains[0].go_on(), two.drains[1].go_on())
        await asyncio.gather(*(node.executor.run_due() for node in two.nodes))
        two.clock.advance(10.0)
    assert two.used_bytes == 0


@pytest.mark.parametrize("turns", range(40))
async def test_a_write_and_the_removal_of_its_storage_at_the_same_time_leave_nothing(two: Two, turns: int) -> None:
    async def remove() -> None:
        for _ in range(turns):
            await asyncio.sleep(0)
        await two.drains[0].remove("a")

    async def write() -> None:
        try:
            await two.write(0, [1, 2])
        except KvcmError:
            return

    await asyncio.gather(write(), remove())
    for _ in range(8):
        await two.lead(1, 20.0)
    assert two.used_bytes == 0
    assert two.nodes[1].registry.storages.drains() == []
