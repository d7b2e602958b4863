"""Storage `dummy`: hands out addresses and moves no bytes, for tests and benchmarks."""

from __future__ import annotations

from collections.abc import Sequence

from kvcm.model.names import path_component
from kvcm.model.storages import DummyStorageSpec, StorageConfig
from kvcm.model.uri import LocationUri
from kvcm.storage.backend import Allocation, StorageBackend, StorageSpace
from kvcm.storage.packing import pack

__all__ = ["DummyStorage"]


class DummyStorage:
    """Names like those of a `file` storage, with nothing behind them."""

    def __init__(self, name: str, directory: str, keys_per_object: int) -> None:
        self._name = name
        self._directory = directory
        self._keys_per_object = keys_per_object
        self._live: set[str] = set()

    @classmethod
    def open(cls, config: StorageConfig, cluster_id: str) -> DummyStorage:
        """Open the storage; always succeeds."""
        assert isinstance(config.spec, DummyStorageSpec)
        directory = f"/{config.spec.root_path.strip('/')}".rstrip("/") + f"/{path_component(cluster_id)}/"
        return cls(config.global_unique_name, directory, config.spec.key_count_per_file)

    def allocate(self, allocation: Allocation) -> list[str]:
        uris = [""] * len(allocation.parts)
        for slots in pack(allocation, self._keys_per_object):
            for index, name, slot in slots:
                size = allocation.parts[index].size_bytes
                uris[index] = str(LocationUri("dummy", self._name, self._directory + name, size, slot))
        self._live.update(uris)
        return uris

    async def delete(self, uris: Sequence[str]) -> list[str | None]:
        self._live.difference_update(uris)
        return [None] * len(uris)

    async def discard(self, uris: Sequence[str]) -> list[str | None]:
        return await self.delete(uris)

    async def exists(self, uris: Sequence[str]) -> list[bool]:
        return [uri in self._live for uri in uris]

    async def space(self) -> StorageSpace:
        return StorageSpace(1 << 62, 1 << 62)

    def inherit(self, previous: StorageBackend) -> None:
        if isinstance(previous, DummyStorage):
            self._live.update(previous._live)

    def close(self) -> None:
        """Nothing is held open."""
