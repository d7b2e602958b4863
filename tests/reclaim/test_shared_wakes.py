"""How managers of one store wake the reclaimer of the one that leads, and what a reclaimer does that is woken."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from levels_rig import group, instance, levels

from kvcm.model.errors import StorageIOError
from kvcm.reclaim.wakes import SharedWakes
from kvcm.store.memory import MemoryStore
from kvcm.store.store import Table


@dataclass
class Node:
    """A manager: whether it leads, and how often its reclaimer was woken."""

    table: Table
    leads: bool = False
    woken: int = 0
    wakes: SharedWakes = field(init=False)

    def __post_init__(self) -> None:
        self.wakes = SharedWakes(self.table, self._wake, lambda: self.leads)

    def _wake(self) -> None:
        self.woken += 1


async def nodes(count: int = 3) -> list[Node]:
    """Managers of one store; the first one leads, and has heard of everything up to now."""
    table = MemoryStore().table("wakes")
    found = [Node(table) for _ in range(count)]
    found[0].leads = True
    await found[0].wakes.exchange()
    found[0].woken = 0
    return found


async def test_the_leader_hears_its_own_writes_at_once() -> None:
    leader, *_ = await nodes()
    leader.wakes.press()
    assert leader.woken == 1


async def test_the_leader_hears_of_a_write_at_another_manager_once() -> None:
    leader, other, third = await nodes()
    other.wakes.press("g")
    assert leader.woken == 0
    for _ in range(3):
        for each in (other, third, leader):
            await each.wakes.exchange()
    assert (leader.woken, other.woken, third.woken) == (1, 0, 0)


async def test_every_later_write_is_heard_again() -> None:
    leader, other, third = await nodes()
    for expected, each in enumerate((other, third, other, other), start=1):
        each.wakes.press()
        await each.wakes.exchange()
        await leader.wakes.exchange()
        assert leader.woken == expected


async def test_managers_that_press_at_the_same_time_are_heard() -> None:
    leader, *others = await nodes(5)
    for each in others:
        each.wakes.press()
    await asyncio.gather(*(each.wakes.exchange() for each in others))
    await leader.wakes.exchange()
    assert leader.woken == 1


async def test_whoever_leads_next_looks_at_once() -> None:
    """What was pressed while nobody led must not be lost."""
    leader, other, third = await nodes()
    leader.leads = False
    other.wakes.press()
    await other.wakes.exchange()
    third.leads = True
    await third.wakes.exchange()
    assert third.woken == 1


async def test_whoever_leads_again_hears_what_was_pressed_meanwhile() -> None:
    leader, other, _ = await nodes()
    leader.leads = False
    other.wakes.press()
    await other.wakes.exchange()
    await leader.wakes.exchange()
    leader.leads = True
    await leader.wakes.exchange()
    assert leader.woken == 1


class Outage:
    """A table that cannot be asked so many times."""

    def __init__(self, inner: Table, failures: int) -> None:
        self._inner = inner
        self._failures = failures

    def _ask(self) -> None:
        if self._failures:
            self._failures -= 1
            raise StorageIOError("the store is away")

    async def version(self) -> int:
        self._ask()
        return await self._inner.version()

    async def get(self, key: str) -> bytes | None:
        self._ask()
        return await self._inner.get(key)

    async def replace(self, key: str, expected: bytes | None, new: bytes | None) -> bool:
        self._ask()
        return await self._inner.replace(key, expected, new)


async def test_a_store_that_fails_loses_no_wake() -> None:
    leader, *_ = await nodes()
    other = Node(Outage(leader.table, failures=2))  # type: ignore[arg-type]
    other.wakes.press()
    for _ in range(2):
        with pytest.raises(StorageIOError):
            await other.wakes.exchange()
    await other.wakes.exchange()
    await leader.wakes.exchange()
    assert leader.woken == 1


async def turns(enough: Callable[[], bool], seconds: float = 30.0) -> bool:
    """Let the loop run until something holds; return whether it did."""
    async with asyncio.timeout(seconds):
        while not enough():  # noqa: ASYNC110 - what is waited for says nothing
            await asyncio.sleep(0.001)
    return True


async def test_a_reclaimer_that_was_woken_looks_once_and_waits_again() -> None:
    with levels(group(), instance()) as rig:
        running = asyncio.create_task(rig.reclaimer.run())
        try:
            await turns(lambda: rig.reclaimer.stats.looks == 1)
            await rig.write_each(range(9))
            assert await rig.left(range(9)) == list(range(9))
            for _ in range(5):
                rig.reclaimer.wake()
            await turns(lambda: bool(rig.order()))
            assert rig.reclaimer.stats.looks == 2
        finally:
            running.cancel()


async def test_a_wake_during_a_look_is_not_lost() -> None:
    """What is written while a look is under way may be just what that look did not see."""
    with levels(group(), instance()) as rig:
        rig.reclaimer = rig.new_reclaimer(lambda evicted: (rig.evicted.append(evicted), rig.reclaimer.wake())[0])
        await rig.write_each(range(9))
        running = asyncio.create_task(rig.reclaimer.run())
        try:
            await turns(lambda: rig.reclaimer.stats.looks == 2)
        finally:
            running.cancel()


async def test_only_the_leader_looks() -> None:
    with levels(group(), instance()) as rig:
        leads: list[bool] = []
        running = asyncio.create_task(rig.reclaimer.run(lambda: bool(leads)))
        try:
            rig.reclaimer.wake()
            await asyncio.sleep(0)
            assert rig.reclaimer.stats.looks == 0
            leads.append(True)
            rig.reclaimer.wake()
            await turns(lambda: rig.reclaimer.stats.looks == 1)
        finally:
            running.cancel()


async def test_a_step_limit_is_followed_by_the_next_look_without_a_wake() -> None:
    with levels(group(blocks=100, mark=0.5, hysteresis=0.0, reclaim={"reclaim_step_size": 200}), instance()) as rig:
        await rig.write_each(range(90))
        running = asyncio.create_task(rig.reclaimer.run())
        try:
            await turns(lambda: len(rig.order()) == 40)
            assert rig.reclaimer.stats.looks >= 2
        finally:
            running.cancel()
