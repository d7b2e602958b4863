"""A deployment without servers: manager, file storage, scrubber and collector; time and ids are injected."""

import asyncio
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import count
from pathlib import Path

from at_once import now
from fake_clock import FakeClock

from kvcm.cache.manager import CacheManager, GarbageSource
from kvcm.cache.write_sessions import StartedWrite, WriteRequest
from kvcm.index.backends.backend import Change
from kvcm.index.backends.memory import MemoryBackend
from kvcm.index.meta_index import MetaIndex
from kvcm.model.groups import CacheConfig, CacheReclaimStrategy, InstanceGroup, InstanceGroupQuota
from kvcm.model.instances import Instance, LocationSpecGroup, LocationSpecInfo, ModelDeployment, Placement
from kvcm.model.keys import BlockMask
from kvcm.model.locations import BlockRecord, Location, LocationStatus, decode_chunk
from kvcm.model.storages import NfsStorageSpec, StorageConfig
from kvcm.model.uri import LocationUri
from kvcm.reclaim.deletion_executor import DeletionExecutor
from kvcm.reclaim.garbage import GarbageCollector
from kvcm.reclaim.scrub import StorageScrubber
from kvcm.registry.registry import Registry
from kvcm.storage.directory import StorageDirectory
from kvcm.store.memory import MemoryStore

NFS = "nfs"
SIZE = 100
DAY_SECONDS = 86400.0
_ids = count(1)


@dataclass
class Disk:
    """What survives a restart of the manager."""

    root: Path
    cluster_id: str = "cluster-1"
    keys_per_file: int = 1
    store: MemoryStore = field(default_factory=MemoryStore)
    backends: dict[int, MemoryBackend] = field(default_factory=dict)

    def backend(self, placement: Placement) -> MemoryBackend:
        return self.backends.setdefault(placement.uid, MemoryBackend())


class Deployment:
    """One manager.

    Attributes:
        marked: the blocks that the collector reported, in order: (key, kind).
    """

    def __init__(self, disk: Disk, clock: FakeClock) -> None:
        self.disk = disk
        self.clock = clock
        self.storages = StorageDirectory(disk.cluster_id)
        self.registry = Registry(self.storages, disk.store.table("registry"))
        self.manager = CacheManager(self.registry, self.storages, clock, _new_id, disk.backend, store=disk.store)
        self.handle = GarbageSource(self.manager, self.registry, disk.store)
        self.executor = DeletionExecutor(self.storages, clock)
        self.executor.serve(self.manager)
        self.scrubber = StorageScrubber(self.handle, self.storages, clock, disk.cluster_id)
        self.marked: list[tuple[int, str]] = []
        self.pauses: list[float] = []
        self.collector = self.new_collector()

    def new_collector(self, blocks_per_second: int = 2000) -> GarbageCollector:
        return GarbageCollector(
            self.handle,
            self.storages,
            self.clock,
            blocks_per_second=blocks_per_second,
            on_marked=self._note,
            pause=self._pause,
        )

    def _note(self, _instance: Instance, changes: Sequence[Change], kind: str) -> None:
        self.marked += [(change.key, kind) for change in changes]

    async def _pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        await asyncio.sleep(0)

    async def paused(self, times: int) -> None:
        """Return when the collector has paused so many times more."""
        wanted = len(self.pauses) + times
        for _ in range(1000 * times):
            if len(self.pauses) >= wanted:
                return
            await asyncio.sleep(0)
        raise AssertionError(f"{wanted - len(self.pauses)} pauses are missing")

    @classmethod
    def begin(
        cls,
        disk: Disk,
        clock: FakeClock,
        instance_ids: Sequence[str] = ("i",),
        specs: Sequence[str] = ("kv",),
        groups: dict[str, tuple[str, ...]] | None = None,
    ) -> "Deployment":
        """A new deployment, configured."""
        made = cls(disk, clock)
        now(made.registry.storages.add(StorageConfig(NFS, NfsStorageSpec(str(disk.root), disk.keys_per_file))))
        now(made.registry.groups.create(_group()))
        for instance_id in instance_ids:
            now(made.manager.register_instance(_instance(instance_id, specs, groups or {})))
        return made

    @classmethod
    async def restarted(cls, before: "Deployment") -> "Deployment":
        """The same deployment after its manager was killed."""
        made = cls(before.disk, before.clock)
        await made.registry.load()
        await made.manager.load()
        return made

    def index(self, instance_id: str = "i") -> MetaIndex:
        return self.manager.cache(instance_id).index

    async def start(self, keys: Sequence[int], instance_id: str = "i", **fields: object) -> StartedWrite:
        request = WriteRequest(keys, **fields)  # type: ignore[arg-type]
        return await self.manager.start_write(self.manager.cache(instance_id), request)

    async def store(
        self, keys: Sequence[int], instance_id: str = "i", age_seconds: float = DAY_SECONDS, **fields: object
    ) -> StartedWrite:
        """Write a chain of blocks with their bytes."""
        started = await self.start(keys, instance_id, **fields)
        self.write(started, age_seconds)
        await self.manager.finish_write(
            self.manager.cache(instance_id), started.session.id, BlockMask(offset=len(started.chunks))
        )
        return started

    def write(self, started: StartedWrite, age_seconds: float = DAY_SECONDS) -> None:
        for chunk in started.chunks:
            for spec in decode_chunk(chunk).specs:
                place = LocationUri.parse(spec.uri)
                put(Path(place.path), place.offset, content(spec.uri), self.clock.time - age_seconds)

    async def forget(self, keys: Sequence[int], instance_id: str = "i") -> None:
        """Drop metadata and leave the bytes, as a manager's death in the wrong moment does."""
        await self.index(instance_id).delete(keys)

    async def remove(self, keys: Sequence[int], instance_id: str = "i") -> None:
        """Remove blocks with their bytes, and wait until both are gone."""
        await self.manager.remove(self.manager.cache(instance_id), keys, BlockMask(offset=0))
        self.clock.time += 5
        await self.executor.run_due()

    async def change(self, key: int, instance_id: str = "i", **fields: object) -> None:
        """Set fields of all locations of a block."""

        def changed(_key: int, old: BlockRecord | None) -> BlockRecord | None:
            assert old is not None
            return old._replace(locations=tuple(each._replace(**fields) for each in old.locations))  # type: ignore[arg-type]

        await self.index(instance_id).read_modify_write([key], changed)

    async def locations(self, key: int, instance_id: str = "i") -> Sequence[Location]:
        (record,) = await self.index(instance_id).get([key])
        return record.locations if record is not None else ()

    async def serving(self, instance_id: str = "i") -> set[int]:
        keys = [key async for page in self.index(instance_id).scan() for key in page]
        records = await self.index(instance_id).get(keys)
        return {
            key
            for key, record in zip(keys, records, strict=True)
            if record is not None and any(each.status is LocationStatus.SERVING for each in record.locations)
        }

    async def paths(self, key: int, instance_id: str = "i") -> list[Path]:
        chunks = [each.chunk for each in await self.locations(key, instance_id)]
        return [Path(LocationUri.parse(spec.uri).path) for chunk in chunks for spec in decode_chunk(chunk).specs]

    async def assert_readable(self, keys: Sequence[int], instance_id: str = "i") -> None:
        for key in keys:
            for each in await self.locations(key, instance_id):
                for spec in decode_chunk(each.chunk).specs:
                    assert _stored(spec.uri) == content(spec.uri), spec.uri

    def close(self) -> None:
        self.storages.close_all()


def _group() -> InstanceGroup:
    strategy = CacheReclaimStrategy(delay_before_delete_ms=2000)
    return InstanceGroup("group", (NFS,), quota=InstanceGroupQuota(1 << 40), cache_config=CacheConfig(strategy))


def _instance(instance_id: str, specs: Sequence[str], groups: dict[str, tuple[str, ...]]) -> Instance:
    return Instance(
        "",
        "group",
        instance_id,
        16,
        tuple(LocationSpecInfo(name, SIZE) for name in specs),
        ModelDeployment("m", "bf16"),
        tuple(LocationSpecGroup(name, names) for name, names in groups.items()),
    )


def _new_id(length: int) -> str:
    return f"{next(_ids):0{length}x}"


@contextmanager
def deployed(disk: Disk, clock: FakeClock | None = None, **fields: object) -> Iterator[Deployment]:
    made = Deployment.begin(disk, clock or FakeClock(), **fields)  # type: ignore[arg-type]
    try:
        yield made
    finally:
        made.close()


def content(uri: str) -> bytes:
    size = LocationUri.parse(uri).size
    return (blake2b(uri.encode()).digest() * (size // 64 + 1))[:size]


def _stored(uri: str) -> bytes:
    place = LocationUri.parse(uri)
    return Path(place.path).read_bytes()[place.offset : place.offset + place.size]


def put(path: Path, offset: int, data: bytes, modified_at: float) -> Path:
    """Write bytes as an engine does, some time ago."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("r+b" if path.exists() else "w+b") as file:
        file.seek(offset)
        file.write(data)
    os.utime(path, (modified_at, modified_at))
    return path


def files_below(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()}
