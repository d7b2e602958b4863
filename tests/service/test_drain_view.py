"""What ListDrain says of a drain that does not go on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import pytest

from kvcm.cache.drains import StorageDrains
from kvcm.cache.manager import CacheManager
from kvcm.cache.removal import Remover
from kvcm.model.clock import SystemClock
from kvcm.model.storages import DummyStorageSpec, NfsStorageSpec, StorageConfig
from kvcm.reclaim.executor import DeletionExecutor
from kvcm.registry.leadership import Leadership
from kvcm.registry.registry import Registry
from kvcm.service.drain_view import DrainView
from kvcm.service.usage_values import DrainState
from kvcm.storage.directory import StorageDirectory
from kvcm.storage.health import HealthState, StorageHealth
from kvcm.store.memory import MemoryLease, MemoryTable


class Look(NamedTuple):
    """Rooms, and what is shown of their drains."""

    storages: StorageDirectory
    registry: Registry
    drains: StorageDrains
    leadership: Leadership
    view: DrainView

    async def reason(self) -> str:
        (only,) = await self.view.look()
        return only.reason


@pytest.fixture
async def look() -> AsyncIterator[Look]:
    """A leader with one storage that is drained, of which it is not certain yet that nothing lies on it."""
    clock, storages = SystemClock(), StorageDirectory("cluster")
    registry = Registry(storages)
    cache = CacheManager(registry, storages, clock)
    remover = Remover(clock, registry.groups.find)
    drains = StorageDrains(registry, cache.open_caches, remover, clock, is_shared=True)
    leadership = Leadership("me", clock, 10.0, MemoryLease(clock), MemoryTable())
    await leadership.tick()
    await registry.storages.add(StorageConfig("s", DummyStorageSpec()))
    await drains.drain("s")
    yield Look(
        storages,
        registry,
        drains,
        leadership,
        DrainView(drains, storages, DeletionExecutor(storages, clock), leadership),
    )
    storages.close_all()


async def test_one_that_goes_on_has_no_reason(look: Look) -> None:
    (status,) = await look.view.look()
    assert (status.storage_unique_name, status.state, status.reason) == ("s", DrainState.DRAIN_RUNNING, "")
    assert status.state.label == "running"


async def test_a_storage_that_is_down_is_the_reason(look: Look) -> None:
    look.storages.set_health("s", StorageHealth(HealthState.SH_DOWN, "no mount"))
    assert await look.reason() == "the storage is down: no mount"


async def test_an_instance_that_cannot_be_read_is_the_reason(look: Look) -> None:
    assert await look.registry._table.replace("instance/old", None, b"garbage")
    await look.registry.refresh()
    assert await look.reason() == (
        "1 stored instances cannot be read, 'old' for one, so that nobody knows what they have there: run `kvcm index "
        "verify`"
    )


async def test_a_storage_that_is_not_open_is_the_reason(look: Look, tmp_path: Path) -> None:
    await look.registry.storages.add(StorageConfig("t", NfsStorageSpec(str(tmp_path))))
    await look.registry.storages.cancel_drain("s")
    await look.drains.drain("t")
    look.storages.close("t")
    assert await look.reason() == "the storage is not open on this manager, which leads: nothing can be deleted"


async def test_who_does_not_lead_names_who_does(look: Look) -> None:
    await look.leadership.demote()
    assert await look.reason() == "no manager leads at the moment"


async def test_a_removal_says_that_it_can_be_taken_back(look: Look) -> None:
    await look.registry.storages.retire("s", SystemClock().now())
    assert await look.reason() == "it begins 10 s after the removal, so that it can be added again as it was"
