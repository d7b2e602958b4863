"""The open storages of this manager: opened, closed, enabled and disabled here, and seen by reads and writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from kvcm.model.errors import InvalidArgumentError, UnsupportedError
from kvcm.model.storages import PathStorageSpec, StorageConfig, StorageType
from kvcm.storage.backend import StorageBackend
from kvcm.storage.dummy import DummyStorage
from kvcm.storage.health import StorageHealth
from kvcm.storage.hf3fs import HF3FS
from kvcm.storage.mooncake import MooncakeStorage
from kvcm.storage.path_types import FILE, PathType
from kvcm.storage.threads import StorageThreads

__all__ = ["OPENERS", "StorageDirectory"]

Opener = Callable[[StorageConfig, str], StorageBackend]
"""From (config, cluster id) to an open storage; raises KvcmError when it cannot be opened."""

OPENERS: dict[StorageType, Opener] = {
    StorageType.ST_NFS: FILE,
    StorageType.ST_3FS: HF3FS,
    StorageType.ST_VCNS_3FS: HF3FS,
    StorageType.ST_MOONCAKE: MooncakeStorage.open,
    StorageType.ST_DUMMY: DummyStorage.open,
}

# Lower is faster: host memory, remote memory, parallel file system, network file system.
_SPEED_RANK = {
    StorageType.ST_TAIRMEMPOOL: 0,
    StorageType.ST_MOONCAKE: 1,
    StorageType.ST_3FS: 2,
    StorageType.ST_VCNS_3FS: 2,
    StorageType.ST_NFS: 3,
    StorageType.ST_DUMMY: 3,
}


class StorageDirectory:
    """Open storages by name.

    Args:
        cluster_id: first directory of every object, so that two deployments can share a storage.
        allowed_roots: directories that path storages must lie in; None allows any.
        openers: what opens each storage type.
    """

    def __init__(
        self,
        cluster_id: str,
        allowed_roots: Sequence[Path] | None = None,
        openers: Mapping[StorageType, Opener] = OPENERS,
    ) -> None:
        self.cluster_id = cluster_id
        self._allowed_roots = allowed_roots
        self._openers = openers
        self._backends: dict[str, StorageBackend] = {}
        self._closed: dict[str, StorageBackend] = {}  # what they remember is needed if they come back
        self._ranks: dict[str, int] = {}
        self._types: dict[str, StorageType] = {}
        self._enabled: set[str] = set()
        self._health: dict[str, StorageHealth] = {}
        self.generation = 0

    def open(self, config: StorageConfig) -> None:
        """Configure and open a storage, in place of an open one of the same name.

        Raises:
            KvcmError: it cannot be opened; an open one of that name stays as it was.
        """
        self.install(config, self.prepare(config, is_new=True))

    def prepare(self, config: StorageConfig, *, is_new: bool) -> StorageBackend:
        """Open a storage's medium, which may block, and change nothing here; safe in any thread.

        Args:
            config: of the storage.
            is_new: it is being configured, so that what it needs on its medium is made. What was configured earlier
                has that: if it is missing, then the medium is not mounted, and nothing must be made in its place.

        Raises:
            KvcmError: it cannot be opened.
        """
        opener = self._openers.get(config.storage_type)
        if opener is None:
            known = ", ".join(sorted(storage_type.kind for storage_type in self._openers))
            raise UnsupportedError(f"storage type {config.storage_type.kind} is not available, available are: {known}")
        self._check_root(config)
        if is_new and isinstance(opener, PathType):
            opener.make(config, self.cluster_id)
        return opener(config, self.cluster_id)

    async def prepare_in_thread(self, config: StorageConfig, *, is_new: bool) -> StorageBackend:
        """Do `prepare` without holding up the event loop.

        Each has a thread of its own: a corrected config must not wait for one of that name that hangs.
        """
        thread = StorageThreads(f"open-{config.global_unique_name}", 1)
        return await thread.run(lambda: self.prepare(config, is_new=is_new))

    def install(self, config: StorageConfig, backend: StorageBackend) -> None:
        """Put what was prepared in place; it takes over what an earlier storage of that name remembers."""
        name = config.global_unique_name
        previous = self._backends.get(name) or self._closed.pop(name, None)
        if previous is not None:
            backend.inherit(previous)
        if name in self._backends:
            self._backends[name].close()
        self._backends[name] = backend
        self._types[name] = config.storage_type
        self._health[name] = StorageHealth()  # what was known is not of this medium
        self.set_enabled(name, enabled=config.is_available)

    def _check_root(self, config: StorageConfig) -> None:
        if self._allowed_roots is None or not isinstance(config.spec, PathStorageSpec):
            return
        root = Path(config.spec.root).resolve()
        if not any(root.is_relative_to(allowed.resolve()) for allowed in self._allowed_roots):
            allowed_text = ", ".join(map(str, self._allowed_roots)) or "none (set kvcm.storage.allowed_roots)"
            raise InvalidArgumentError(f"root {str(root)!r} is outside the allowed roots: {allowed_text}")

    def set_enabled(self, name: str, *, enabled: bool) -> None:
        """Make an open storage available for reads and writes, or not."""
        if enabled:
            self._enabled.add(name)
        else:
            self._enabled.discard(name)
        self._rank_anew(name)

    def set_health(self, name: str, health: StorageHealth) -> None:
        """Note how an open storage is: what is down is not available, enabled or not.

        Deletions go on trying a storage that is down; they have pauses of their own.
        """
        was_usable = self._health[name].is_usable
        self._health[name] = health
        if health.is_usable is not was_usable:
            self._rank_anew(name)

    def _rank_anew(self, name: str) -> None:
        if name in self._enabled and self._health[name].is_usable:
            self._ranks[name] = _SPEED_RANK[self._types[name]]
        else:
            self._ranks.pop(name, None)
        self.generation += 1

    def close(self, name: str) -> None:
        """Close a storage; its locations count as missing from now on."""
        self._ranks.pop(name, None)
        self._types.pop(name, None)
        self._health.pop(name, None)
        self._enabled.discard(name)
        self._closed[name] = self._backends.pop(name)
        self._closed[name].close()
        self.generation += 1

    def rank(self, storage: str) -> int | None:
        """Return the speed rank of a storage (lower is faster), None while it is disabled, down or not open."""
        return self._ranks.get(storage)

    def health(self, storage: str) -> StorageHealth | None:
        """Return how an open storage is, enabled or not; None when there is none of that name."""
        return self._health.get(storage)

    def takes_writes(self, storage: str) -> bool:
        """Return whether a new block can be expected to find room on a storage."""
        return storage in self._ranks and self._health[storage].takes_writes

    def type_of(self, storage: str) -> StorageType | None:
        """Return the type of an open storage, None when there is none of that name."""
        return self._types.get(storage)

    def backend(self, storage: str) -> StorageBackend | None:
        """Return an open storage, enabled or not; None when there is none of that name."""
        return self._backends.get(storage)

    def open_backends(self) -> Mapping[str, StorageBackend]:
        """Return the open storages by name, enabled or not."""
        return self._backends

    def close_all(self) -> None:
        """Close every storage."""
        for name in list(self._backends):
            self.close(name)
