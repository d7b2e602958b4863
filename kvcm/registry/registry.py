"""The registry: all configured values of a deployment, over one table of the metadata store.

Every read uses a local view (`DocumentCache`). Every change goes to the table first, by compare-and-set, and `refresh`
brings changes of other managers into the view. `generation` grows with every change of the view, so that derived data
is recomputed only then.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from kvcm import __version__
from kvcm.model.clock import Clock, SystemClock
from kvcm.model.errors import StorageIOError
from kvcm.model.groups import GlobalQuota, InstanceGroup
from kvcm.model.instances import GroupStore, Registration, Removal, StoreMove
from kvcm.model.principals import Account, ApiKey
from kvcm.model.storages import StorageConfig
from kvcm.registry.accounts import AccountRegistry
from kvcm.registry.api_keys import ImportedKeys, KeyDocuments, KeyRegistry, KeyUse
from kvcm.registry.config_snapshots import ConfigDocuments, ConfigSnapshots
from kvcm.registry.document_cache import ChangeListener, DocumentCache, Flush
from kvcm.registry.group_stores import GroupStores, StoreDocuments
from kvcm.registry.groups import GroupRegistry, QuotaRegistry
from kvcm.registry.instances import BatchRegistration, InstanceRegistry, ReservedInstances, Uids
from kvcm.registry.storages import StorageOpener, StorageRegistry
from kvcm.store.memory import MemoryTable
from kvcm.store.store import Table

__all__ = [
    "FIRST_SCHEMA",
    "NEWEST_SCHEMA",
    "SCHEMA_OF_RUNS",
    "Registry",
    "Schema",
    "check_schema",
    "ensure_cluster_id",
    "ensure_schema",
    "finalize_schema",
]

# The schema of a store: what a release has to know to read everything that lies there.
#
# It is one number in a document of the registry's table, beside the release that put it there. A store that has no
# such document is of schema 1: releases before it had one wrote that. A release reads every schema up to its own, and
# goes on writing the schema of the store, so that the release before it can come back: until an operator says that it
# will not (`kvcm index finalize`), or from the beginning in a store that is new.
#
# Schema 2: instances that are registered in a Redis keep many blocks to a value (`Placement.tags`), and may keep them
# in another store than that of the registry (`Placement.store`).
#
# Rows of blocks and documents have versions of their own, which say how their bytes are read. The schema is looked at
# first, so that a release that is too old ends at its start and not at the first record that it cannot read.

NEWEST_SCHEMA: Final = 2
"""The highest that this release reads."""
SCHEMA_OF_RUNS: Final = 2
"""The first in which instances keep many blocks to a value."""
FIRST_SCHEMA: Final = 1
"""That of stores from before it was written down."""
_NAME: Final = "schema"


@dataclass(frozen=True, slots=True)
class Schema:
    """The schema of a store.

    Attributes:
        number: releases whose newest schema is lower cannot read the store.
        written_by: release that gave it to the store.
    """

    number: int
    written_by: str


async def check_schema(table: Table) -> Schema:
    """Return the schema of a store if this release can read it.

    Args:
        table: of the registry.

    Raises:
        StorageIOError: it cannot, or the store cannot be asked.
    """
    return _readable(await _documents(table).read(_NAME)) or Schema(FIRST_SCHEMA, __version__)


async def ensure_schema(table: Table, flush: Flush, first: int = FIRST_SCHEMA) -> Schema:
    """Do `check_schema`, and say in a store that has no schema yet which one it has.

    Args:
        table: of the registry.
        flush: returns when all changes are durable.
        first: schema of a store that has nothing of a registry yet.

    Returns:
        The schema of the store.

    Raises:
        StorageIOError: as `check_schema`.
    """
    is_new = all(name.startswith("meta/") for name in await table.all())
    new = Schema(first if is_new else FIRST_SCHEMA, __version__)
    schema = await _documents(table).change(_NAME, lambda known: _readable(known) or new)
    await flush()
    assert schema is not None
    return schema


async def finalize_schema(table: Table, flush: Flush) -> Schema:
    """Give a store the newest schema: releases that do not know it cannot read the store any more.

    Returns:
        The schema of the store before.

    Raises:
        StorageIOError: as `check_schema`.
    """
    before = await ensure_schema(table, flush)
    await _documents(table).change(_NAME, _newest)
    await flush()
    return before


def _newest(known: Schema | None) -> Schema:
    return known if known is not None and known.number >= NEWEST_SCHEMA else Schema(NEWEST_SCHEMA, __version__)


def _documents(table: Table) -> DocumentCache[Schema]:
    return DocumentCache(table, "meta/", Schema)


def _readable(schema: Schema | None) -> Schema | None:
    if schema is not None and schema.number > NEWEST_SCHEMA:
        raise StorageIOError(
            f"the metadata has schema {schema.number}, given by release {schema.written_by}; this is release "
            f"{__version__}, which reads schemas up to {NEWEST_SCHEMA}: run {schema.written_by} or a later one, or "
            "move what is there with its `kvcm index export` and our `kvcm index import`"
        )
    return schema


_OPEN_AT_START_SECONDS = 30.0
_OPEN_AT_REFRESH_SECONDS = 0.5


async def _flush_nothing() -> None:
    """Do nothing: a table in memory has no durability."""


class Registry:
    """Storages, groups, global quotas, instances, accounts and keys of a deployment: a local view that every read asks,
    and a table that every change goes to first and that `refresh` follows.

    Args:
        opener: opens storages when they are added.
        table: the deployment's documents; without one they end with this object.
        flush: returns when all changes are durable; every change waits for it.
        store_kind: the metadata store, `memory`, `rocksdb` or `redis`: what groups may name.
        clock: time source.
        uses: table of when keys were used; a table of its own, for it changes all the time.
        listener: receives every change that is made here.
        draw: returns a random number from 0 up to below another, for uids.
        tags: of instances that are registered from now on (`Placement.tags`).
        block_stores: the same in each further store of blocks, by its name.
    """

    def __init__(
        self,
        opener: StorageOpener,
        table: Table | None = None,
        flush: Flush = _flush_nothing,
        store_kind: str = "memory",
        clock: Clock | None = None,
        uses: Table | None = None,
        listener: ChangeListener | None = None,
        draw: Callable[[int], int] = secrets.randbelow,
        tags: int = 0,
        block_stores: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self._table: Table = table if table is not None else MemoryTable()
        self._flush = flush
        self.tags = tags
        """Of instances that are registered from now on; 0 while managers of the release before may use the store."""
        self._version: int | None = None
        self._view = -1  # generations of the caches when all of them were read
        self._refreshing = asyncio.Lock()
        self.generation = 0
        """Grows with every change of the local view, but for that of keys."""
        on_put = self._count_change
        storages = DocumentCache(self._table, "storage/", StorageConfig, listener=listener, on_put=on_put)
        groups = DocumentCache(self._table, "group/", InstanceGroup, listener=listener, on_put=on_put)
        instances = DocumentCache(self._table, "instance/", Registration, listener=listener, on_put=on_put)
        removals = DocumentCache(self._table, "removal/", Removal, on_put=on_put)
        accounts = DocumentCache(self._table, "account/", Account, listener=listener, on_put=on_put)
        quotas = DocumentCache(self._table, "quota/", GlobalQuota, listener=listener, on_put=on_put)
        keys = DocumentCache(self._table, "key/", ApiKey, listener=listener)
        wanted = DocumentCache(self._table, "groupstore/", GroupStore, listener=listener, on_put=on_put)
        moves = DocumentCache(self._table, "move/", StoreMove, on_put=on_put)
        entities: list[DocumentCache[Any]] = [storages, groups, instances, removals, accounts, quotas, keys]
        self._caches = [*entities, wanted, moves]
        self._registrations, self._removals = instances, removals
        self.storages = StorageRegistry(opener, storages, flush, groups=groups.all)
        self.groups = GroupRegistry(groups, flush, store_kind, find_storage=self.storages.find)
        self.quotas = QuotaRegistry(quotas, flush)
        reservations = DocumentCache(self._table, "seats/", ReservedInstances)
        numbers: DocumentCache[int] = DocumentCache(self._table, "meta/", int)
        documents = StoreDocuments(groups, wanted=wanted, moves=moves, numbers=numbers, registrations=instances)
        self.group_stores = GroupStores(self._table, documents, tags={"": tags, **block_stores}, flush=flush)
        uids = Uids(instances, removals, store_kind, draw, self.group_stores)
        self.instances = InstanceRegistry(
            instances, removals=removals, uids=uids, reservations=reservations, groups=self.groups, flush=flush
        )
        self.accounts = AccountRegistry(accounts, flush)
        used: DocumentCache[KeyUse] = DocumentCache(uses if uses is not None else MemoryTable(), "", KeyUse)
        self.taken_keys, self.keys = self._open_keys(KeyDocuments(keys, used, numbers), clock or SystemClock())
        self.snapshots = ConfigSnapshots(
            self._table,
            caches=ConfigDocuments(storages, groups=groups, quotas=quotas, registrations=instances, accounts=accounts),
            batch_registration=BatchRegistration(instances, removals, uids, reservations),
            storages=self.storages,
            refresh_view=self._on_tables_read,
            flush=flush,
            store_kind=store_kind,
        )

    def _open_keys(self, documents: KeyDocuments, clock: Clock) -> tuple[ImportedKeys, KeyRegistry]:
        taken, flush = DocumentCache(self._table, "taken_key/", float), self._flush
        imported = ImportedKeys(self._table, keys=documents.keys, taken=taken, flush=flush, clock=clock)
        role_of = self.accounts.role_of
        keys = KeyRegistry(self._table, documents, self._on_tables_read, flush=flush, clock=clock, role_of=role_of)
        return imported, keys

    async def load(self) -> None:
        """Read everything and open the storages, before the manager serves. A storage that does not open here stays
        closed, and is tried again at refreshes.

        Raises:
            StorageIOError: the store cannot be asked.
        """
        await self._on_tables_read()
        await self.storages.open_missing(_OPEN_AT_START_SECONDS)

    async def refresh(self) -> bool:
        """Bring in what other managers changed.

        Returns:
            Whether the local view changed meanwhile.

        Raises:
            StorageIOError: the store cannot be asked.
        """
        before = self.generation
        await self._on_tables_read()
        await self.storages.open_missing(_OPEN_AT_REFRESH_SECONDS)
        return self.generation != before

    async def end_logins(self, account: str) -> None:
        """Revoke the login keys of an account, of all managers.

        Raises:
            StorageIOError: the store cannot be asked.
        """
        await self._on_tables_read()  # others may have made some a moment ago
        await self.keys.revoke_logins(account)

    def unreadable_instances(self) -> list[str]:
        """Return the names of instance documents that cannot be read, removals included."""
        return [*self._registrations.unreadable, *self._removals.unreadable]

    async def cluster_id(self, new: str) -> str:
        """Return the deployment's cluster id, which is `new` if there is none yet.

        Raises:
            StorageIOError: the store cannot be asked.
        """
        return await ensure_cluster_id(self._table, new, self._flush)

    async def _on_tables_read(self) -> None:
        async with self._refreshing:
            # Asked before the documents: what changes in between is read once more, never missed.
            version = await self._table.version()
            # A change that was made here may be gone again, in a store that went back to an earlier read.
            if version != self._version or self._generations() != self._view:
                await self._read_all()
                self._version = version

    async def _read_all(self) -> None:
        before = self._generations()
        with contextlib.ExitStack() as watches:
            changed = [watches.enter_context(cache.watching()) for cache in self._caches]
            documents = await self._table.all()
        is_as_read = self._generations() == before
        for cache, names in zip(self._caches, changed, strict=True):
            cache.refresh_from(documents, names)
        self._view = self._generations() if is_as_read else -1

    def _generations(self) -> int:
        return sum(cache.generation for cache in self._caches)

    def _count_change(self) -> None:
        self.generation += 1


async def ensure_cluster_id(table: Table, new: str, flush: Flush = _flush_nothing) -> str:
    """Do `Registry.cluster_id` before there is a registry: the storages that it opens want the id."""
    kept = await DocumentCache(table, "meta/", str).change("cluster_id", lambda known: known or new)
    assert kept is not None
    await flush()
    return kept
