"""Storage `dummy`: hands out addresses and moves no bytes, for tests and benchmarks."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence

from kvcm.model.storages import DummyStorageSpec, StorageConfig
from kvcm.model.uri import LocationUri, path_component
from kvcm.storage.backend import (
    Allocation,
    ObjectBatch,
    StorageBackend,
    StorageSpace,
    StoredObject,
    object_name,
    packed_uris,
)

__all__ = ["DummyStorage"]

_BATCH_OBJECTS = 1000


class DummyStorage:
    """Names like those of a `file` storage, with nothing behind them.

    Args:
        name: of the storage.
        directory: of the deployment, with a slash at its end.
        keys_per_object: parts per object.
        now: time in unix seconds, as a file system would note it.
    """

    def __init__(self, name: str, directory: str, keys_per_object: int, now: Callable[[], float] = time.time) -> None:
        self._name = name
        self._directory = directory
        self._keys_per_object = keys_per_object
        self._now = now
        self._live: dict[str, float] = {}

    @classmethod
    def open(cls, config: StorageConfig, cluster_id: str) -> DummyStorage:
        """Open the storage; always succeeds."""
        assert isinstance(config.spec, DummyStorageSpec)
        directory = f"/{config.spec.root_path.strip('/')}".rstrip("/") + f"/{path_component(cluster_id)}/"
        return cls(config.global_unique_name, directory, config.spec.key_count_per_file)

    async def allocate(self, allocation: Allocation) -> list[str]:
        uris = packed_uris(
            LocationUri(scheme="dummy", storage=self._name, path=self._directory, size=0),
            allocation,
            self._keys_per_object,
        )
        self._live |= dict.fromkeys(uris, self._now())
        return uris

    @property
    def makes_objects(self) -> bool:
        return False

    async def make_objects(self, uris: Sequence[str]) -> None:
        """Engines make the objects."""

    async def probe(self) -> None:
        """There is nothing that could fail."""

    async def delete(self, uris: Sequence[str]) -> list[str | None]:
        for uri in uris:
            self._live.pop(uri, None)
        return [None] * len(uris)

    async def discard(self, uris: Sequence[str]) -> list[str | None]:
        return await self.delete(uris)

    async def forgotten(self, uris: Sequence[str]) -> None:
        """Nothing is handed out again."""

    async def exists(self, uris: Sequence[str]) -> list[bool]:
        return [uri in self._live for uri in uris]

    async def objects(self, cluster_id: str) -> AsyncIterator[ObjectBatch]:
        found = list(self._objects(cluster_id).values())
        for start in range(0, len(found), _BATCH_OBJECTS):
            yield ObjectBatch(found[start : start + _BATCH_OBJECTS])

    async def remove_objects(self, cluster_id: str, objects: Sequence[StoredObject]) -> list[str | None]:
        there = self._objects(cluster_id)
        changed = {each.name for each in objects if there.get(each.name, each) != each}
        gone = {each.name for each in objects} - changed
        self._live = {uri: at for uri, at in self._live.items() if object_name(uri) not in gone}
        return ["it changed since it was listed" if each.name in changed else None for each in objects]

    def _objects(self, cluster_id: str) -> dict[str, StoredObject]:
        if f"/{path_component(cluster_id)}/" != self._directory[self._directory[:-1].rindex("/") :]:
            return {}  # of others nothing is known: it lives in this process only
        sizes, times = defaultdict[str, int](int), defaultdict[str, float](float)
        for uri, at in self._live.items():
            name = object_name(uri)
            sizes[name] += LocationUri.parse(uri).size
            times[name] = max(times[name], at)
        return {name: StoredObject(name, size, times[name]) for name, size in sizes.items()}

    async def space(self) -> StorageSpace:
        return StorageSpace(1 << 62, 1 << 62)

    def take_over(self, previous: StorageBackend) -> None:
        if isinstance(previous, DummyStorage):
            self._live.update(previous._live)

    def close(self) -> None:
        """Nothing is held open."""
