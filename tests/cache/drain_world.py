"""A manager that drains storages, over a store in memory that outlives it, and file storages with real bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path

from cache_rig import group, instance
from fake_clock import FakeClock

from kvcm.cache.drains import StorageDrains
from kvcm.cache.manager import CacheManager
from kvcm.cache.prefix_match import MatchMode, MatchQuery
from kvcm.cache.removal import Remover
from kvcm.cache.write_sessions import StartedWrite, WriteRequest
from kvcm.index.backends.memory import MemoryBackend
from kvcm.model.instances import Instance
from kvcm.model.keys import BlockMask
from kvcm.model.locations import BlockRecord, Location, LocationStatus, decode_chunk
from kvcm.model.storages import NfsStorageSpec, StorageConfig, StorageType
from kvcm.model.uri import LocationUri
from kvcm.reclaim.deletion_executor import DeletionExecutor
from kvcm.registry.registry import Registry
from kvcm.storage.directory import OPENERS, Opener, StorageDirectory
from kvcm.store.memory import MemoryStore

__all__ = ["BLOCK_BYTES", "CLUSTER", "DrainWorld", "file_of", "files_below"]

BLOCK_BYTES = 32
CLUSTER = "cluster-1"
SPECS = {"kv": BLOCK_BYTES}


async def _no_pause(_seconds: float) -> None:
    await asyncio.sleep(0)


class DrainWorld:
    """A manager's core as `components` wires it, which can be restarted.

    Args:
        root: directory of the storages.
        names: storages of the group, best first.
        registered: the instance, by default with one spec.
        openers: open its storages.
        clock: the time.

    Attributes:
        instance: id of the only instance.
    """

    def __init__(
        self,
        root: Path,
        names: Sequence[str] = ("a", "b"),
        *,
        registered: Instance | None = None,
        openers: Mapping[StorageType, Opener] = OPENERS,
        clock: FakeClock | None = None,
    ) -> None:
        self.clock = clock or FakeClock()
        self.names = names
        self.instance = "i"
        self._root = root
        self._openers = openers
        self._store = MemoryStore()
        self._backends: dict[int, MemoryBackend] = {}
        self._ids = count(1)
        self._group = replace(group(storages=names, delay_ms=1000), pin_budget_bytes=1 << 40)
        self._registered = registered or instance(SPECS)

    def config(self, name: str, medium: str = "1") -> StorageConfig:
        """A storage on one of several media."""
        root = self._root / name / medium
        root.mkdir(parents=True, exist_ok=True)
        return StorageConfig(name, NfsStorageSpec(str(root)))

    async def begin(self) -> None:
        """Open the manager for the first time."""
        await self.restart()
        for name in self.names:
            await self.registry.storages.add(self.config(name))
        await self.registry.groups.create(self._group)
        await self.manager.register_instance(self._registered)

    async def restart(self) -> None:
        """Open the manager again on what the last one left."""
        self.storages = StorageDirectory(CLUSTER, openers=self._openers)
        self.registry = Registry(self.storages, self._store.table("registry"))
        self.executor = DeletionExecutor(
            self.storages, self.clock, is_configured=lambda name: self.registry.storages.is_configured(name)
        )
        await self.registry.load()
        self.manager = CacheManager(
            self.registry,
            self.storages,
            self.clock,
            lambda length: f"{next(self._ids):0{length}x}",
            lambda placement: self._backends.setdefault(placement.uid, MemoryBackend()),
            store=self._store,
        )
        await self.manager.load()
        self.executor.serve(self.manager)
        self.drains = StorageDrains(
            self.registry,
            self.manager.open_caches,
            Remover(self.clock, self.registry.groups.find),
            self.clock,
            is_shared=False,
            forget_medium=self.storages.forget,
            pause=_no_pause,
        )

    async def start(self, keys: Sequence[int]) -> StartedWrite:
        return await self.manager.start_write(self.manager.cache(self.instance), WriteRequest(keys))

    async def finish(self, started: StartedWrite) -> None:
        """Write the bytes as an engine does, and finish."""
        for chunk in started.chunks:
            for spec in decode_chunk(chunk).specs:
                path = file_of(spec.uri)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(bytes(BLOCK_BYTES))
        mask = BlockMask(offset=len(started.chunks))
        await self.manager.finish_write(self.manager.cache(self.instance), started.session.id, mask)

    async def write(self, keys: Sequence[int]) -> list[str]:
        """Write blocks, and return the storages that they went to."""
        started = await self.start(keys)
        await self.finish(started)
        return [storage_of(chunk) for chunk in started.chunks]

    async def hits(self, keys: Sequence[int]) -> list[int]:
        """Return which of the blocks can be read."""
        return list(
            (await self.manager.match(self.manager.cache(self.instance), MatchQuery(MatchMode.BATCH_GET, keys))).keys
        )

    async def records(self) -> dict[int, BlockRecord]:
        index = self.manager.cache(self.instance).index
        keys = [key async for page in index.scan() for key in page]
        return {key: record for key, record in zip(keys, await index.get(keys), strict=True) if record is not None}

    async def places(self, storage: str, *statuses: LocationStatus) -> list[Location]:
        """Return the locations on a storage, of some statuses only where any are given."""
        return [
            place
            for record in (await self.records()).values()
            for place in record.locations
            if place.storage == storage and (not statuses or place.status in statuses)
        ]

    def used_bytes(self, storage: str) -> int:
        """Return the bytes that the manager counts on a storage."""
        used = self.manager.group_usage_bytes("group")
        return sum(size for place, size in used.items() if place.storage == storage)

    async def pass_time(self, seconds: float) -> None:
        """Let time pass, and do all that the leader does."""
        self.clock.time += seconds
        await self.manager.expire()
        await self.drains.resume()
        await self.executor.run_due()

    def close(self) -> None:
        self.storages.close_all()


def storage_of(chunk: bytes) -> str:
    """Return the storage that a chunk's addresses lead to."""
    return LocationUri.parse(decode_chunk(chunk).specs[0].uri).storage


def file_of(uri: str) -> Path:
    """Return the file of an address."""
    return Path(LocationUri.parse(uri).path)


def files_below(root: Path) -> list[Path]:
    """Return all files."""
    return [path for path in root.rglob("*") if path.is_file()]
