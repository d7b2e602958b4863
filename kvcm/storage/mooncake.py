"""Storage `mooncake`: objects in the memory of other hosts, kept by a Mooncake store.

Objects are immutable and named `<cluster id>/<instance>/<spec>/<key>.<location id>`, one per part. Engines store and
read them; the manager asks whether they are there and removes them.

The store may drop what is read least whenever its segments are full, and whatever lies in a segment whose process dies:
a location is a hint here. An object that is read holds a lease, for 10 s by the master's default, in which it cannot be
removed; such deletions are told as failed and tried again. What a late writer stores after its location was deleted is
read by nobody, so the store drops it first.

Objects cannot be listed: the client has no call for it, and the master's own list on its HTTP port has neither sizes
nor times, so that what is just being written could not be told from what nobody knows.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import NoReturn

from kvcm.model.errors import KvcmError, StorageIOError, UnsupportedError
from kvcm.model.mooncake import MooncakeCode, check_mooncake, explain
from kvcm.model.names import path_component
from kvcm.model.storages import MooncakeStorageSpec, StorageConfig
from kvcm.model.uri import LocationUri
from kvcm.storage.backend import Allocation, ObjectPage, StorageBackend, StorageSpace, StoredObject
from kvcm.storage.mooncake_process import MooncakeProcess
from kvcm.storage.packing import pack
from kvcm.storage.threads import StorageThreads

__all__ = ["MooncakeStorage"]

_CALL_SECONDS = 10.0  # more than the client needs to give a silent master up
_LOAD_SECONDS = 60.0  # to load the client's libraries from a cold disk
_KEYS_PER_CALL = 1000
_MOST_THREADS = 4  # one question at a time: what more of them do is wait
_MASTER_IS_AWAY = {MooncakeCode.MASTER_UNREACHABLE, MooncakeCode.MASTER_SILENT}
_DELETED = {MooncakeCode.OK, MooncakeCode.MISSING}
_NOT_KNOWN = StorageSpace(-1, -1)


class MooncakeStorage:
    """A Mooncake store.

    Args:
        name: of the storage.
        spec: checked.
        cluster_id: of the deployment.
    """

    def __init__(self, name: str, spec: MooncakeStorageSpec, cluster_id: str) -> None:
        self._name = name
        self._directory = f"{path_component(cluster_id)}/"
        self._process = MooncakeProcess(spec)
        self._threads = StorageThreads(f"storage-{name}", _MOST_THREADS)

    @classmethod
    def open(cls, config: StorageConfig, cluster_id: str) -> MooncakeStorage:
        """Load the client. The master may be away: probes tell.

        Raises:
            UnsupportedError: the client is not installed, or a library that it needs.
            InvalidArgumentError: a field of the spec is malformed.
        """
        assert isinstance(config.spec, MooncakeStorageSpec)
        check_mooncake(config.spec)
        storage = cls(config.global_unique_name, config.spec, cluster_id)
        try:
            storage._process.ask("load", [], _LOAD_SECONDS)
        except KvcmError:
            storage.close()
            raise
        return storage

    async def allocate(self, allocation: Allocation) -> list[str]:
        uris: list[str] = []
        for packed in pack(allocation, keys_per_object=1):
            uri = LocationUri("mooncake", self._name, "/", packed.size_bytes, key=self._directory + packed.name)
            uris.append(str(uri))
        return uris

    @property
    def makes_objects(self) -> bool:
        return False

    async def make_objects(self, uris: Sequence[str]) -> None:
        """Engines make the objects."""

    async def probe(self) -> None:
        await self._ask("probe", [self._directory])

    async def delete(self, uris: Sequence[str]) -> list[str | None]:
        try:
            codes = await self._ask("remove", list(map(_key, uris)))
        except StorageIOError as error:
            return [str(error)] * len(uris)
        return [
            None if code in _DELETED else f"{_key(uri)}: {explain(code)}" for uri, code in zip(uris, codes, strict=True)
        ]

    async def discard(self, uris: Sequence[str]) -> list[str | None]:
        return await self.delete(uris)

    async def forgotten(self, uris: Sequence[str]) -> None:
        """Nothing is handed out again."""

    async def exists(self, uris: Sequence[str]) -> list[bool]:
        codes = await self._ask("exists", list(map(_key, uris)))
        for code in codes:
            if code < 0:
                raise StorageIOError(f"storage {self._name}: {explain(code)}")
        return [code == 1 for code in codes]

    async def _ask(self, call: str, keys: Sequence[str]) -> list[int]:
        return await self._threads.run(lambda: self._ask_in_calls(call, keys))

    def _ask_in_calls(self, call: str, keys: Sequence[str]) -> list[int]:
        codes: list[int] = []
        try:
            for start in range(0, len(keys), _KEYS_PER_CALL):
                codes += self._process.ask(call, keys[start : start + _KEYS_PER_CALL], _CALL_SECONDS)
                if not _MASTER_IS_AWAY.isdisjoint(codes):
                    break
        except KvcmError as error:
            raise StorageIOError(f"storage {self._name}: {error}") from error
        away = _MASTER_IS_AWAY.intersection(codes)
        if away:
            # A new client looks for the master first, which fails at once where this one takes seconds, and finds it
            # where the name leads by then.
            self._process.restart()
            raise StorageIOError(f"storage {self._name}: {explain(min(away))}")
        return codes

    def objects(self, cluster_id: str) -> AsyncIterator[ObjectPage]:
        self._refuse_scrub()

    async def remove_objects(self, cluster_id: str, objects: Sequence[StoredObject]) -> list[str | None]:
        self._refuse_scrub()

    def _refuse_scrub(self) -> NoReturn:
        raise UnsupportedError(
            f"storage {self._name}: a mooncake store cannot tell which objects it holds since when, so it cannot be "
            "scrubbed; it drops by itself what nobody reads"
        )

    async def space(self) -> StorageSpace:
        """Return -1 for both, not known: the client cannot ask. The master's metrics tell its operator."""
        return _NOT_KNOWN

    def inherit(self, previous: StorageBackend) -> None:
        """There is nothing to remember."""

    def close(self) -> None:
        """End the process that holds the client."""
        self._process.close()


def _key(uri: str) -> str:
    return LocationUri.parse(uri).key or ""
