"""Storages of every type with engines beside them: what the suite of promises needs to know of a type.

Bytes are moved as engines move them, by the transfer engine of the type and with checksums.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Protocol

from fake_clock import FakeClock
from storage_rig import Kind, content

from kvcm.connectors.transfer import TransferEngine, TransferItem
from kvcm.model.storages import StorageConfig, TairMemPoolStorageSpec
from kvcm.model.uri import LocationUri
from kvcm.storage.backend import StorageBackend
from kvcm.storage.mempool import MempoolStorage, PoolOpener, PoolReport
from kvcm.store.memory import MemoryTable

__all__ = ["NODE", "POOL_BYTES", "STORAGE", "PathSetting", "PoolSetting", "Setting", "saved_items"]

STORAGE = "s-1"
NODE = "node-a"
POOL_BYTES = 16 << 20
DEADLINE_SECONDS = 20.0


class Setting(Protocol):
    """A storage of some type in its surroundings.

    Attributes:
        storage: its name.
        scheme: of its uris.
        holds_bytes: whether there are any.
        sees_bytes: whether the manager can distinguish written parts from those that were only handed out.
        lists_objects: whether it can be scrubbed.
        knows_space: whether it reports its space.
        makes_objects: whether the manager makes its objects.
    """

    storage: str
    scheme: str
    holds_bytes: bool
    sees_bytes: bool
    lists_objects: bool
    knows_space: bool
    makes_objects: bool

    async def open(self, *, is_new: bool = True) -> StorageBackend:
        """Open it as a manager does that configures it, or that was restarted."""

    async def save(self, uris: Sequence[str]) -> None:
        """Save the bytes that follow from each uri, with an engine."""

    async def load(self, uris: Sequence[str]) -> list[bytes | None]:
        """Load parts with another engine; None for a miss."""


class _EngineSetting:
    """A storage whose bytes an engine of this process moves."""

    storage = STORAGE

    def __init__(self, config: StorageConfig) -> None:
        self.config = config
        self._checksums: dict[str, int] = {}

    async def save(self, uris: Sequence[str]) -> None:
        engine = TransferEngine.for_storages([self.config], 2, checksums=True)
        try:
            self._checksums |= saved_items(engine, uris)
        finally:
            engine.close()

    async def load(self, uris: Sequence[str]) -> list[bytes | None]:
        engine = TransferEngine.for_storages([self.config], 2)
        try:
            return loaded_items(engine, uris, self._checksums)
        finally:
            engine.close()


class PathSetting(_EngineSetting):
    """A directory, or names without bytes.

    Args:
        kind: of storage.
        root: directory.
    """

    def __init__(self, kind: Kind, root: Path) -> None:
        super().__init__(kind.config(root))
        self._kind = kind
        self._root = root
        self.scheme = kind.scheme
        self.holds_bytes = self.sees_bytes = kind.scheme != "dummy"
        self.lists_objects = self.knows_space = True
        self.makes_objects = kind.makes_objects

    async def open(self, *, is_new: bool = True) -> StorageBackend:
        return self._kind.open(self._root) if is_new else self._kind.reopen(self._root)


class PoolSetting(_EngineSetting):
    """Memory of this node, and the documents that it is handed out by."""

    scheme = "pace"
    holds_bytes = True
    sees_bytes = False
    lists_objects = True
    knows_space = True
    makes_objects = False

    def __init__(self) -> None:
        super().__init__(StorageConfig(STORAGE, TairMemPoolStorageSpec(node_id=NODE, capacity_bytes=POOL_BYTES)))
        self._table = MemoryTable()

    async def open(self, *, is_new: bool = True) -> StorageBackend:
        pool: MempoolStorage = PoolOpener(self._table, FakeClock(), Random(1), is_shared=True)(self.config, "cluster")
        if is_new:
            engine = TransferEngine.for_storages([self.config], 1)
            (attached,) = engine.pools()
            engine.close()
            await pool.report(PoolReport(NODE, attached.generation, attached.capacity_bytes, 0))
        return pool


def saved_items(engine: TransferEngine, uris: Sequence[str]) -> dict[str, int]:
    """Save the bytes that follow from each uri, and return their checksums."""
    items = [TransferItem(LocationUri.parse(uri), [memoryview(content(uri))]) for uri in uris]
    results = engine.save(items, DEADLINE_SECONDS)
    assert all(result.ok for result in results), results
    return {uri: result.checksum for uri, result in zip(uris, results, strict=True)}


def loaded_items(engine: TransferEngine, uris: Sequence[str], checksums: Mapping[str, int]) -> list[bytes | None]:
    """Load parts; None for a miss."""
    places = list(map(LocationUri.parse, uris))
    items = [
        TransferItem(place, [memoryview(bytearray(place.size))], checksum=checksums.get(uri, 0))
        for uri, place in zip(uris, places, strict=True)
    ]
    results = engine.load(items, DEADLINE_SECONDS)
    return [bytes(item.buffers[0]) if result.ok else None for item, result in zip(items, results, strict=True)]
