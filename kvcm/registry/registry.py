"""All that is configured, in one object over one table of the metadata store."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from kvcm.model.accounts import Account
from kvcm.model.api_keys import ApiKey
from kvcm.model.clock import Clock, SystemClock
from kvcm.model.groups import GlobalQuota, InstanceGroup
from kvcm.model.instances import Registration, Removal
from kvcm.model.storages import StorageConfig
from kvcm.registry.accounts import AccountRegistry
from kvcm.registry.config_draft import ConfigShelves
from kvcm.registry.enrolment import Enrolment
from kvcm.registry.groups import GroupRegistry
from kvcm.registry.instances import InstanceRegistry
from kvcm.registry.keys import KeyRegistry, KeyShelves, KeyUse
from kvcm.registry.quotas import QuotaRegistry
from kvcm.registry.seats import SeatsTaken
from kvcm.registry.shelf import ChangeListener, Flush, Shelf
from kvcm.registry.snapshots import ConfigSnapshots
from kvcm.registry.storages import StorageOpener, StorageRegistry
from kvcm.registry.taken_keys import TakenKeys
from kvcm.store.memory import MemoryTable
from kvcm.store.store import Table

__all__ = ["Registry", "kept_cluster_id"]

_OPEN_AT_START_SECONDS = 30.0
_OPEN_AT_REFRESH_SECONDS = 0.5


async def _nothing() -> None:
    """What is in memory alone is as durable as it gets."""


class Registry:
    """Storages, groups, global quotas, instances, accounts and keys of a deployment: a local view that every read asks,
    and a table that every change goes to first and that `refresh` follows.

    Args:
        opener: opens storages when they are added.
        table: the deployment's documents; without one they end with this object.
        flush: returns when what was changed is durable; every change waits for it.
        store_kind: the metadata store, `memory`, `rocksdb` or `redis`: what groups may name.
        clock: time source.
        uses: table of when keys were used; a table of its own, for it changes all the time.
        listener: told of every change that is made here.
    """

    def __init__(
        self,
        opener: StorageOpener,
        table: Table | None = None,
        flush: Flush = _nothing,
        store_kind: str = "memory",
        clock: Clock | None = None,
        uses: Table | None = None,
        listener: ChangeListener | None = None,
    ) -> None:
        self._table: Table = table if table is not None else MemoryTable()
        self._flush = flush
        self._version: int | None = None
        self._refreshing = asyncio.Lock()
        storages = Shelf(self._table, "storage/", StorageConfig, listener)
        groups = Shelf(self._table, "group/", InstanceGroup, listener)
        instances = Shelf(self._table, "instance/", Registration, listener)
        removals = Shelf(self._table, "removal/", Removal)
        accounts = Shelf(self._table, "account/", Account, listener)
        quotas = Shelf(self._table, "quota/", GlobalQuota, listener)
        keys = Shelf(self._table, "key/", ApiKey, listener)
        self._configured: list[Shelf[Any]] = [storages, groups, instances, removals, accounts, quotas]
        self._shelves: list[Shelf[Any]] = [*self._configured, keys]
        self._registrations, self._removals = instances, removals
        self.storages = StorageRegistry(opener, storages, flush)
        self.groups = GroupRegistry(groups, flush, store_kind)
        self.quotas = QuotaRegistry(quotas, flush)
        numbers, seats = Shelf(self._table, "meta/", int), Shelf(self._table, "seats/", SeatsTaken)
        self.instances = InstanceRegistry(instances, removals, numbers, seats, self.groups, flush)
        self.accounts = AccountRegistry(accounts, flush)
        used: Shelf[KeyUse] = Shelf(uses if uses is not None else MemoryTable(), "", KeyUse)
        clock = clock if clock is not None else SystemClock()
        taken = Shelf(self._table, "taken_key/", float)
        self.taken_keys = TakenKeys(self._table, keys, taken, flush, clock)
        shelves = KeyShelves(keys, used, numbers)
        self.keys = KeyRegistry(self._table, shelves, self._follow, flush, clock, self.accounts.role_of)
        self.snapshots = ConfigSnapshots(
            self._table,
            ConfigShelves(storages, groups, quotas, instances, accounts),
            Enrolment(instances, removals, numbers, seats),
            self.storages,
            self._follow,
            flush,
            store_kind,
        )

    async def load(self) -> None:
        """Read everything and open the storages, before the manager serves. A storage that does not open here stays
        closed, and is tried again at refreshes.

        Raises:
            StorageIOError: the store cannot be asked.
        """
        await self._follow()
        await self.storages.open_missing(_OPEN_AT_START_SECONDS)

    async def refresh(self) -> bool:
        """Bring in what other managers changed.

        Returns:
            Whether the local view changed meanwhile.

        Raises:
            StorageIOError: the store cannot be asked.
        """
        before = self.generation
        await self._follow()
        await self.storages.open_missing(_OPEN_AT_REFRESH_SECONDS)
        return self.generation != before

    async def end_logins(self, account: str) -> None:
        """End the keys of whoever logged in to an account, at whatever manager.

        Raises:
            StorageIOError: the store cannot be asked.
        """
        await self._follow()  # others may have made some a moment ago
        await self.keys.revoke_logins(account)

    def unreadable_instances(self) -> list[str]:
        """Return what is stored of instances, removed ones included, but cannot be read."""
        return [*self._registrations.unreadable, *self._removals.unreadable]

    async def cluster_id(self, new: str) -> str:
        """Return the deployment's cluster id, which is `new` if there is none yet.

        Raises:
            StorageIOError: the store cannot be asked.
        """
        return await kept_cluster_id(self._table, new, self._flush)

    async def _follow(self) -> None:
        async with self._refreshing:
            # Asked before the documents: what changes in between is read once more, never missed.
            version = await self._table.version()
            if version != self._version:
                await self._read_all()
                self._version = version

    async def _read_all(self) -> None:
        with contextlib.ExitStack() as watches:
            changed = [watches.enter_context(shelf.watching()) for shelf in self._shelves]
            documents = await self._table.all()
        for shelf, names in zip(self._shelves, changed, strict=True):
            shelf.take(documents, names)

    @property
    def generation(self) -> int:
        """Grows with every change of the local view, but for that of keys."""
        return sum([shelf.generation for shelf in self._configured])  # asked for several times per write


async def kept_cluster_id(table: Table, new: str, flush: Flush = _nothing) -> str:
    """Do `Registry.cluster_id` before there is a registry: the storages that it opens want the id."""
    kept = await Shelf(table, "meta/", str).change("cluster_id", lambda known: known or new)
    assert kept is not None
    await flush()
    return kept
