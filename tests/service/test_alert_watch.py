"""Since when something is wrong, what has to last before it is told, and what other managers tell."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import NamedTuple

import pytest
from fake_clock import FakeClock

from kvcm.cache.drains import StorageDrains
from kvcm.cache.manager import CacheManager
from kvcm.cache.removal import Remover
from kvcm.model.groups import InstanceGroup, InstanceGroupQuota
from kvcm.model.nodes import Endpoint
from kvcm.model.principals import Errand, Principal, Verb, errand
from kvcm.model.storages import DummyStorageSpec, StorageConfig
from kvcm.model.vitals import GroupTotals, Vitals
from kvcm.reclaim.executor import DeletionExecutor
from kvcm.registry.leadership import Leadership
from kvcm.registry.registry import Registry
from kvcm.service.alerts.watch import AlertSources, AlertWatch
from kvcm.service.capacity_view import CapacityView
from kvcm.service.drain_view import DrainView
from kvcm.service.vitals.watch import ManagerView
from kvcm.storage.directory import StorageDirectory
from kvcm.storage.health import HealthState, StorageHealth
from kvcm.store.memory import MemoryLease, MemoryTable


class World(NamedTuple):
    """A manager's rooms, and what watches them."""

    clock: FakeClock
    storages: StorageDirectory
    leadership: Leadership
    cache: CacheManager
    watch: AlertWatch

    async def names(self, group: str = "") -> list[str]:
        return [alert.name for alert in await self.watch.alerts(group)]

    async def pass_time(self, seconds: int) -> None:
        """Let time pass with the looks of the duty."""
        for _ in range(seconds // 10):
            self.clock.time += 10
            await self.leadership.tick()
            await self.watch.look()


@pytest.fixture
async def world() -> AsyncIterator[World]:
    clock, storages = FakeClock(), StorageDirectory("cluster")
    registry = Registry(storages)
    cache = CacheManager(registry, storages, clock)
    drains = StorageDrains(registry, cache.open_caches, Remover(clock, registry.groups.find), clock, is_shared=False)
    leadership = Leadership("me", clock, 60.0, MemoryLease(clock), MemoryTable())
    await leadership.tick()
    await registry.storages.add(StorageConfig("s", DummyStorageSpec()))
    await registry.groups.create(InstanceGroup("g", ("s",), quota=InstanceGroupQuota(1000)))
    deletions = DeletionExecutor(storages, clock)
    view, drain_view = CapacityView(cache, registry, deletions), DrainView(drains, storages, deletions, leadership)
    rooms = cache, registry, view, storages, deletions, drain_view, leadership
    yield World(clock, storages, leadership, cache, AlertWatch(AlertSources(*rooms, lambda: 0.0, False), clock.now))
    storages.close_all()


def neighbour(name: str, refused: int = 0, *, leads: bool = False) -> ManagerView:
    endpoint = Endpoint(name, "10.0.0.2", 1, 2, 3, 4)
    groups = {"g": GroupTotals(refused_writes=refused)}
    vitals = Vitals(endpoint, "1", 0.0, 0.0, "serving", leads, {}, {}, (), (), groups)
    return ManagerView(endpoint, 0.0, is_leader=leads, is_self=False, vitals=vitals, rates=None)


async def test_all_is_well(world: World) -> None:
    assert await world.names() == []


async def test_an_alert_has_the_time_when_it_was_first_seen_also_by_nobody(world: World) -> None:
    world.storages.set_health("s", StorageHealth(HealthState.SH_DOWN, "gone"))
    await world.watch.look()
    begun = world.clock.now()
    await world.pass_time(60)
    found = {alert.name: alert.since_ms for alert in await world.watch.alerts()}
    assert found == dict.fromkeys(("KvcmGroupWithoutStorage", "KvcmStorageDown"), int(begun * 1000))
    world.storages.set_health("s", StorageHealth())
    assert await world.names() == []
    await world.pass_time(10)
    world.storages.set_health("s", StorageHealth(HealthState.SH_DOWN, "gone"))
    assert {alert.since_ms for alert in await world.watch.alerts()} == {int(world.clock.now() * 1000)}


async def test_what_has_to_last_is_told_only_when_it_was_there_at_every_look(world: World) -> None:
    await world.leadership.demote()
    world.leadership.campaign_delay_ms = 10_000_000
    assert await world.names() == []
    world.clock.time += 3
    assert await world.names() == []
    world.clock.time += 3
    assert await world.names() == ["KvcmNoLeader"]


async def test_refused_writes_count_for_five_minutes_wherever_they_were_refused(world: World) -> None:
    world.cache.usage.refusals["g"] += 2
    (alert,) = await world.watch.alerts("g")
    assert "refused 2 writes" in alert.summary
    await world.pass_time(320)
    assert await world.names() == []
    world.watch.managers = lambda: [neighbour("other", 1000)]  # what it counted before it was met is not known
    assert await world.names() == []
    await world.pass_time(10)
    world.watch.managers = lambda: [neighbour("other", 1003)]
    (alert,) = await world.watch.alerts()
    assert "refused 3 writes" in alert.summary
    await world.pass_time(320)
    assert await world.names() == []


async def test_several_that_lead_for_long_are_told(world: World) -> None:
    world.watch.managers = lambda: [neighbour("a", leads=True), neighbour("b", leads=True), neighbour("c")]
    assert await world.names() == []
    await world.pass_time(30)
    (alert,) = await world.watch.alerts()
    assert (alert.name, alert.reason) == ("KvcmSeveralLeaders", "They are a, b.")


async def test_who_is_limited_to_groups_hears_of_those_alone_and_changes_nothing_for_others(world: World) -> None:
    world.storages.set_health("s", StorageHealth(HealthState.SH_DOWN, "gone"))
    begun = {alert.name: alert.since_ms for alert in await world.watch.alerts()}
    world.clock.time += 30
    before = errand.set(Errand(Principal("x", frozenset({Verb.VIEW}), frozenset({"g"}))))
    try:
        found = await world.watch.alerts()
    finally:
        errand.reset(before)
    assert [(alert.name, alert.since_ms) for alert in found] == [
        ("KvcmGroupWithoutStorage", begun["KvcmGroupWithoutStorage"])
    ]
    assert {alert.name: alert.since_ms for alert in await world.watch.alerts()} == begun
