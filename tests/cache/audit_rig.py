"""Real stores of every kind with a registry and blocks in them, for exports, imports and verification."""

from __future__ import annotations

import dataclasses
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from io import BytesIO
from typing import Any

import pytest
from fake_clock import FakeClock

from kvcm.cache.archive import ArchiveReader, ArchiveWriter, Exported, Exporter, Imported, Importer, head_of
from kvcm.cache.audit import IndexAuditor, Pause
from kvcm.cache.audit_report import AuditReport, Repair
from kvcm.cache.instance_cache import OpenCaches
from kvcm.cache.quotas import SharedLedger
from kvcm.commands.index_tools import audited_store
from kvcm.components import Metadata, open_metadata
from kvcm.config import Settings
from kvcm.index.backends.backend import Access, Change, IndexBackend
from kvcm.index.backends.memory import MemoryBackend
from kvcm.index.search_cache import CacheBudget
from kvcm.model.groups import CacheConfig, InstanceGroup, InstanceGroupQuota, MetaIndexerConfig
from kvcm.model.instances import Instance, LocationSpecInfo, ModelDeployment
from kvcm.model.locations import BlockRecord, Location, LocationStatus, SpecUri, StorageKey, encode_chunk
from kvcm.model.storages import DummyStorageSpec, StorageConfig, StorageType
from kvcm.registry.registry import Registry
from kvcm.registry.storages import ClosedStorages

KINDS = ("memory", "rocksdb", "redis_standalone", "redis_cluster", "redis_runs", "redis_runs_cluster")
_SERVERS = {"redis_runs": "redis_standalone", "redis_runs_cluster": "redis_cluster"}
_TAGS = {"redis_runs": 1, "redis_runs_cluster": 4}
SHARDS = 4
BIG = 1 << 40


def location(
    name: str, status: LocationStatus = LocationStatus.SERVING, *, storage: str = "one", size: int = 10, **more: Any
) -> Location:
    """A location in a file of its own, of two specs."""
    specs = [SpecUri(spec, f"dummy://{storage}/p/{name}-{spec}?blkid=1&size={size // 2}") for spec in ("a", "b")]
    chunk = encode_chunk(StorageType.ST_DUMMY, 2, specs)
    fields = {"written_at": 1000.0, **more}
    return Location(name, storage, StorageType.ST_DUMMY, status, ("a", "b"), chunk, size, **fields)


def record(key: int, parent: int | None = None, depth: int = 0, **more: Any) -> BlockRecord:
    """A record that serves one location."""
    return BlockRecord(parent, depth, (location(f"l{key:x}", **more),))


def chain(count: int, start: int = 1, salt: str = "") -> dict[int, BlockRecord]:
    """A prefix chain of blocks."""
    return {
        key: BlockRecord(key - 1 if key > start else None, key - start, (location(f"{salt}l{key}"),))
        for key in range(start, start + count)
    }


class IndexRig:
    """One deployment's store.

    Attributes:
        metadata: the store.
        registry: of it.
        clock: the time, which stands still.
        pauses: how often a verification waited.
        import_pauses: for how many seconds each time an import waited, which takes none of them.

    Args:
        tags: of the instances that are registered (`Placement.tags`).
    """

    def __init__(self, metadata: Metadata, clock: FakeClock, tags: int = 0) -> None:
        self.metadata = metadata
        self.clock = clock
        self.registry = Registry(
            ClosedStorages(), metadata.store.table("registry"), metadata.store.flush, metadata.kind, tags=tags
        )
        self.pauses = 0
        self.import_pauses: list[float] = []

    async def configure(
        self, group: str = "g", instances: tuple[str, ...] = ("i", "j"), capacity: int = BIG, limit: int = 0
    ) -> None:
        """Register instances of one group with two storages."""
        for name in ("one", "two"):
            if not self.registry.storages.existing([name]):
                await self.registry.storages.add(StorageConfig(name, DummyStorageSpec(root_path="/p/")))
        cache = CacheConfig(meta_indexer_config=MetaIndexerConfig(mutex_shard_num=SHARDS))
        await self.registry.groups.create(
            InstanceGroup(group, ("one",), "q", limit, InstanceGroupQuota(capacity), cache, "data", 3)
        )
        specs = (LocationSpecInfo("a", 5), LocationSpecInfo("b", 5))
        for name in instances:
            await self.registry.instances.register(Instance("", group, name, 16, specs, ModelDeployment("m", "bf16")))

    def backend(self, instance_id: str) -> IndexBackend:
        return self.metadata.new_backend(self.registry.instances.placement(instance_id))

    async def put(self, instance_id: str, records: Mapping[int, BlockRecord | None]) -> None:
        """Store records as a manager does, and report what they use."""
        backend = self.backend(instance_id)
        olds = await backend.get_many(list(records))
        changes = [Change(key, old, records[key]) for key, old in zip(records, olds, strict=True)]
        written = await backend.write_many(changes)
        assert not list(written.lost)
        instance = self.registry.instances.get(instance_id)
        uid = self.registry.instances.placement(instance_id).uid
        keys = sum((change.new is not None) - (change.old is not None) for change in changes)
        self.metadata.usage.listener(instance.instance_group_name, uid)()(written.usage, keys)
        await self.settle()

    async def settle(self) -> None:
        """Bring everything to rest."""
        if isinstance(self.metadata.usage, SharedLedger):
            await self.metadata.usage.flush()
        await self.metadata.store.flush()

    async def blocks(self, instance_id: str) -> dict[int, tuple[BlockRecord, Access]]:
        """Everything that is stored of an instance's blocks."""
        backend = self.backend(instance_id)
        keys = [key async for page in backend.scan(1000) for key in page]
        rows = zip(keys, await backend.get_many(keys), await backend.accesses(keys), strict=True)
        return {key: (found, access) for key, found, access in rows if found is not None and access is not None}

    async def usage(self, instance_id: str) -> dict[StorageKey, int]:
        backend = self.backend(instance_id)
        await backend.refresh()
        return {place: size for place, size in backend.usage_bytes.items() if size}

    def configured(self) -> list[object]:
        """The registry, as exports hold it."""
        registry = self.registry
        return [
            *registry.storages.all(),
            *registry.quotas.all(),
            *registry.groups.all(),
            *registry.instances.all(),
            *registry.accounts.all(),
        ]

    async def exported(self, group: str = "", *, with_accounts: bool = False) -> tuple[bytes, Exported]:
        file = BytesIO()
        writer = ArchiveWriter(file, head_of("cluster", group, self.clock.now()))
        exported = await Exporter(self.registry, self.metadata.new_backend, writer).run(
            group, with_accounts=with_accounts
        )
        return file.getvalue(), exported

    async def imported(self, archive: bytes, group: str = "", *, dry_run: bool = False) -> Imported:
        metadata = self.metadata
        importer = Importer(
            self.registry, metadata.new_backend, metadata.usage, metadata.store, group, metadata.kind, dry_run=dry_run,
            pause=self._pause_of_import,
        )  # fmt: skip
        for frame in ArchiveReader(BytesIO(archive), "file").frames():
            await importer.load(frame)
        await self.settle()
        return importer.imported

    async def verified(
        self,
        *,
        repair: bool = False,
        drop_unreadable: bool = False,
        rows: Counter[int] | None = None,
        pause: Pause | None = None,
    ) -> AuditReport:
        metadata = self.metadata
        await self.registry.refresh()
        caches = OpenCaches(self.registry, ClosedStorages(), metadata.new_backend, metadata.usage, CacheBudget())
        store = audited_store(metadata, self.registry, caches, rows or Counter())
        return await IndexAuditor(store, self.clock, pause or self._pause, Repair(repair, drop_unreadable)).run()

    async def _pause_of_import(self, seconds: float) -> None:
        self.import_pauses.append(seconds)

    async def _pause(self) -> None:
        self.pauses += 1


@asynccontextmanager
async def opened(kind: str, request: pytest.FixtureRequest) -> AsyncIterator[IndexRig]:
    """An empty deployment on a store of that kind."""
    clock = FakeClock()
    settings = Settings()
    if kind == "rocksdb":
        directory = request.getfixturevalue("tmp_path_factory").mktemp("rocks")
        settings = Settings(data_dir=str(directory), fsync="never")
    elif kind != "memory":
        name = f"test-{secrets.token_hex(8)}"
        servers = request.getfixturevalue(_SERVERS.get(kind, kind))
        settings = Settings(registry_storage_uri=servers.uri(name, timeout_ms=10_000))
    metadata = await open_metadata(settings, clock, f"node-{secrets.token_hex(4)}")
    if kind == "memory":  # the memory of a process cannot be opened again; this dict keeps it by number
        made: dict[int, MemoryBackend] = {}
        metadata = dataclasses.replace(
            metadata, new_backend=lambda placement: made.setdefault(placement.uid, MemoryBackend())
        )
    try:
        yield IndexRig(metadata, clock, _TAGS.get(kind, 0))
    finally:
        await metadata.close()
