"""Takes the whole configuration out, and loads one as a whole.

A load is checked completely, then decided against what is configured, then all documents change together (`Batch`); if
anybody was faster it is decided anew. So nothing of it is ever half done, and two loads at a time end as one after the
other. What was decided:

* What is configured and not in the snapshot stays (`keep`), unless `prune` is asked for. Then groups, global quotas and
  accounts are removed, as their own calls would. Instances and storages never are: that deletes blocks. A prune that
  would have to is refused; RemoveInstance and RemoveStorage say so by name.
* A group's version is no part of what is compared. A group that changes gets the snapshot's version, or the one above
  the stored one if that is higher; a new one gets the snapshot's.
* An instance's config never changes: one that is registered with another layout refuses the load. What takes no part in
  that comparison (user data, the quota group at its registration) stays as it is registered, as RegisterInstance does.
* A storage that is added, or gets another medium, is opened first, as by AddStorage and UpdateStorage: one that does
  not open refuses the load. Opening may make the storage's directories, and those stay; a dry run opens nothing.
  Whether a storage is enabled is loaded; a drain is no configuration, it goes on.
* An account that is not there is added without a password, so nobody can log in; one that is there keeps its own.
* Secrets are not in snapshots (`kvcm.registry.secrets`); a text that lacks one gets it from what is configured, or
  refuses the load.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from typing import Any

from kvcm.model.errors import NotReadyError
from kvcm.model.storages import StorageConfig
from kvcm.registry.config_draft import ConfigDraft, ConfigDrafting, ConfigShelves
from kvcm.registry.configuration import ConfigChange, Configuration, check_configuration
from kvcm.registry.enrolment import Enrolment
from kvcm.registry.instances import with_sorted_groups
from kvcm.registry.shelf import Flush
from kvcm.registry.storage_rules import medium_of
from kvcm.registry.storages import StorageRegistry
from kvcm.store.store import Table

__all__ = ["ConfigSnapshots"]

_MOST_TRIES = 32


class ConfigSnapshots:
    """The configuration as a whole.

    Args:
        table: holds all of it.
        shelves: the parts of it.
        enrolment: registers instances.
        storages: opens what is added.
        follow: brings the shelves up to date with the table.
        flush: returns when what was changed is durable.
        store_kind: the deployment's metadata store, which groups may name.
    """

    def __init__(
        self,
        table: Table,
        shelves: ConfigShelves,
        enrolment: Enrolment,
        storages: StorageRegistry,
        follow: Callable[[], Awaitable[None]],
        flush: Flush,
        store_kind: str,
    ) -> None:
        self._table = table
        self._shelves = shelves
        self._enrolment = enrolment
        self._storages = storages
        self._follow = follow
        self._flush = flush
        self._store_kind = store_kind

    async def take(self) -> Configuration:
        """Return all that is configured, with its secrets.

        Raises:
            StorageIOError: the store cannot be asked, or a document in it cannot be read.
        """
        await self._follow()
        return self._shelves.configuration()

    async def load(self, wanted: Configuration, *, prune: bool = False, dry_run: bool = False) -> list[ConfigChange]:
        """Make what is configured agree with `wanted`, as a whole or not at all.

        Args:
            wanted: the configuration; secrets may be left out of what is configured already.
            prune: also remove groups, quotas and accounts that it does not have.
            dry_run: change nothing and open nothing.

        Returns:
            What was changed, or would be, and what stays although `wanted` does not have it.

        Raises:
            InvalidArgumentError: a value is wrong, or cannot take the place of what is configured.
            DuplicateEntityError: an instance is registered with another config.
            CapacityError: a group would have more instances than it may.
            NotReadyError: the configuration changes all the time, or a storage's name is still taken.
            KvcmError: a storage does not open, or the store cannot be asked.
        """
        wanted = await asyncio.to_thread(_checked, wanted, self._store_kind)  # thousands of instances take a while
        opened: dict[StorageConfig, Any] = {}
        try:
            for _ in range(_MOST_TRIES):
                draft = await self._drafted(wanted, prune=prune)
                if dry_run or not draft.batch:
                    return draft.changes
                await self._open(draft.to_open, opened)
                if await draft.batch.commit(self._table):
                    await self._put_in_force(draft, opened)
                    return draft.changes
        finally:
            for prepared in opened.values():
                self._storages.discard(prepared)
        raise NotReadyError("others change the configuration all the time; nothing was loaded, try again")

    async def _drafted(self, wanted: Configuration, *, prune: bool) -> ConfigDraft:
        await self._follow()
        await self._enrolment.refresh(wanted.instances)
        drafting = ConfigDrafting(self._shelves.copy(), self._enrolment.copy())
        return await asyncio.to_thread(drafting.draft, wanted, prune=prune)

    async def _open(self, configs: Iterable[StorageConfig], opened: dict[StorageConfig, Any]) -> None:
        for config in configs:
            medium = medium_of(config)
            if medium not in opened:
                opened[medium] = await self._storages.prepare(config)

    async def _put_in_force(self, draft: ConfigDraft, opened: dict[StorageConfig, Any]) -> None:
        to_open = set(draft.to_open)
        for config in draft.storages:
            self._storages.put_in_force(config, opened.pop(medium_of(config)) if config in to_open else None)
        await self._flush()


def _checked(wanted: Configuration, store_kind: str) -> Configuration:
    wanted = replace(wanted, instances=tuple(map(with_sorted_groups, wanted.instances)))
    check_configuration(wanted, store_kind)
    return wanted
