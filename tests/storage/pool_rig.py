"""Memory pools on a store that several managers share, with time injected; and what their addresses mean."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from fake_clock import FakeClock

from kvcm.model.errors import StorageIOError
from kvcm.model.storages import PAGE_BYTES, StorageConfig, TairMemPoolStorageSpec, chunk_bytes, extent_bytes, pool_bytes
from kvcm.model.uri import LocationUri
from kvcm.storage.backend import Allocation, Part
from kvcm.storage.mempool import MempoolStorage, PoolOpener, PoolReport
from kvcm.store.memory import MemoryTable
from kvcm.store.store import Revision, Table

MIB = 1 << 20
NODE = "node-1"


@dataclass
class SlowTable:
    """A table whose calls suspend before and after they take effect, and can be made to fail after they did."""

    table: MemoryTable = field(default_factory=MemoryTable)
    failures: int = 0

    async def get(self, name: str) -> bytes | None:
        await asyncio.sleep(0)
        document = await self.table.get(name)
        await asyncio.sleep(0)
        return document

    async def all(self) -> Mapping[str, bytes]:
        return await self.table.all()

    async def replace(self, name: str, old: bytes | None, new: bytes | None, due: float = 0.0) -> bool:
        await asyncio.sleep(0)
        is_done = await self.table.replace(name, old, new, due)
        await asyncio.sleep(0)
        if self.failures:
            self.failures -= 1
            raise StorageIOError("the store went away")
        return is_done

    async def due(self, now: float, most: int) -> list[str]:
        return await self.table.due(now, most)

    @property
    def due_from(self) -> float:
        return self.table.due_from

    @property
    def revision(self) -> Revision | None:
        return self.table.revision

    async def version(self) -> int:
        return await self.table.version()


def pool_config(name: str = "p", node_id: str = NODE, capacity_bytes: int = MIB) -> StorageConfig:
    return StorageConfig(name, TairMemPoolStorageSpec(node_id=node_id, capacity_bytes=capacity_bytes))


def open_pool(
    table: Table, clock: FakeClock, config: StorageConfig | None = None, *, is_shared: bool = True, seed: int = 0
) -> MempoolStorage:
    return PoolOpener(table, clock, Random(seed), is_shared=is_shared)(config or pool_config(), "cluster")


def report(generation: int = 1, valid_ms: int = 0, capacity_bytes: int = MIB, node_id: str = NODE) -> PoolReport:
    return PoolReport(node_id, generation, capacity_bytes, valid_ms)


def allocation(sizes: Sequence[int]) -> Allocation:
    return Allocation("i", "aa", [Part("kv", key, size) for key, size in enumerate(sizes)])


def pages_of(uri: str) -> range:
    """Numbers of the pages that a part takes."""
    place = LocationUri.parse(uri)
    first = place.offset // PAGE_BYTES
    return range(first, first + extent_bytes(place.size) // PAGE_BYTES)


def stamp_of(uri: str) -> int:
    stamp = LocationUri.parse(uri).range_id
    assert stamp is not None
    return stamp


def check_address(uri: str, capacity_bytes: int = MIB) -> None:
    """An extent is a run of whole pages inside one chunk of the pool."""
    place = LocationUri.parse(uri)
    assert (place.scheme, place.storage, place.node_id) == ("pace", "p", NODE)
    assert place.offset % PAGE_BYTES == 0
    end = place.offset + extent_bytes(place.size)
    assert end <= pool_bytes(capacity_bytes)
    assert place.offset // chunk_bytes(capacity_bytes) == (end - 1) // chunk_bytes(capacity_bytes)
    assert stamp_of(uri) > 0


async def taken_bytes(pool: MempoolStorage) -> int:
    return sum([each.size_bytes async for page in pool.objects("cluster") for each in page.objects])
