"""The open storages of this manager: opened, closed, enabled and disabled here, and read by every lookup and write.

Invariant 1 depends on `rank`: it is None while a storage is disabled, DOWN, unverified or not open, and every change of
that raises `generation`, so that caches of answers are invalidated. An unverified storage is written to nevertheless.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from kvcm.model.errors import InvalidArgumentError, UnsupportedError
from kvcm.model.mooncake import AllowedHosts, mooncake_hosts
from kvcm.model.storages import MooncakeStorageSpec, PathStorageSpec, StorageConfig, StorageType, TairMemPoolStorageSpec
from kvcm.storage.backend import StorageBackend
from kvcm.storage.dummy import DummyStorage
from kvcm.storage.file import FILE, HF3FS, FileStorage, PathType
from kvcm.storage.file_slots import SlotReuse
from kvcm.storage.health import StorageHealth
from kvcm.storage.mempool import MempoolStorage, PoolOpener
from kvcm.storage.mooncake import MooncakeStorage
from kvcm.storage.threads import StorageThreads

__all__ = ["OPENERS", "NodeView", "Opener", "StorageDirectory"]

# The view from one node: the shared storages, and the memory pools of that node.


class NodeView:
    """The storages as seen from somewhere. It follows every change of them.

    Args:
        directory: the open storages, as seen from a node without memory of its own.
        pools: ranks of the available memory pools that are seen, too.
    """

    def __init__(self, directory: StorageDirectory, pools: Mapping[str, int]) -> None:
        self._directory = directory
        self._pools = pools

    @property
    def generation(self) -> int:
        """Grows with every change of any storage."""
        return self._directory.generation

    def rank(self, storage: str) -> int | None:
        """Return the speed rank of a storage (lower is faster), None while it is not available here."""
        rank = self._directory.rank(storage)
        return self._pools.get(storage) if rank is None else rank

    def is_available(self, storage: str) -> bool:
        """Return whether a storage can be written to and asked here, though its blocks may be unverified."""
        return storage in self._pools or self._directory.is_available(storage)

    def is_writable(self, storage: str) -> bool:
        """Return whether a storage is expected to accept a new block."""
        return self._directory.is_writable(storage)

    def is_draining(self, storage: str) -> bool:
        """Return whether a storage is being emptied, so that nothing new may go there."""
        return self._directory.is_draining(storage)

    def type_of(self, storage: str) -> StorageType | None:
        """Return the type of an open storage, None when there is none of that name."""
        return self._directory.type_of(storage)

    def backend(self, storage: str) -> StorageBackend | None:
        """Return an open storage, enabled or not; None when there is none of that name."""
        return self._directory.backend(storage)


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


_ANY_HOST = AllowedHosts()


class StorageDirectory:
    """Open storages by name, as callers see them that name no node, or one without memory pools.

    Args:
        cluster_id: first directory of every object, so that two deployments can share a storage.
        allowed_roots: directories that path storages must lie in; None allows any.
        openers: what opens each storage type.
        allowed_hosts: that storages may name.
    """

    def __init__(
        self,
        cluster_id: str,
        allowed_roots: Sequence[Path] | None = None,
        openers: Mapping[StorageType, Opener] = OPENERS,
        *,
        allowed_hosts: AllowedHosts = _ANY_HOST,
    ) -> None:
        self.cluster_id = cluster_id
        self.slot_reuse = SlotReuse()  # of all path storages; by default never
        self._allowed_roots = allowed_roots
        self._allowed_hosts = allowed_hosts
        self._openers = openers
        self._backends: dict[str, StorageBackend] = {}
        self._closed: dict[str, StorageBackend] = {}  # their state is needed if they come back
        self._ranks: dict[str, int] = {}
        # The bound method, so that a match costs no Python frame per block.
        self.rank: Callable[[str], int | None] = self._ranks.get
        """Returns the speed rank of a storage (lower is faster), None while it is disabled, down, unverified or not
        open; and of a memory pool, which is on some node only."""
        self._pool_ranks: dict[str, int] = {}  # memory of single nodes
        self._pool_ranks_on: defaultdict[str, dict[str, int]] = defaultdict(dict)  # the same, by node
        self._nodes: dict[str, str] = {}  # of pools
        self._types: dict[str, StorageType] = {}
        self._enabled: set[str] = set()
        self._draining: set[str] = set()
        self._health: dict[str, StorageHealth] = {}
        self._writable: set[str] = set()  # enabled, usable, and expected to have space
        self._unverified: set[str] = set()  # written to, and not read: what lies there may be other blocks' bytes
        self.generation = 0
        self.doubts = 0
        """How often the store was found older than a storage. Deletions that were read before are not carried out."""

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
            is_new: it is being configured, so that its directory is created on the medium. A storage that was
                configured earlier has one: if it is missing, the medium is not mounted, and none must be created.

        Raises:
            KvcmError: it cannot be opened.
        """
        opener = self._openers.get(config.storage_type)
        if opener is None:
            known = ", ".join(sorted(storage_type.kind for storage_type in self._openers))
            raise UnsupportedError(f"storage type {config.storage_type.kind} is not available, available are: {known}")
        self._check_root(config)
        self._check_hosts(config)
        if not isinstance(opener, PathType):
            return opener(config, self.cluster_id)
        if is_new:
            opener.make(config, self.cluster_id)
        storage = opener(config, self.cluster_id, self.slot_reuse)
        if self.slot_reuse.numbers is not None:
            storage.doubt(is_new=is_new)
        return storage

    async def prepare_in_thread(self, config: StorageConfig, *, is_new: bool) -> StorageBackend:
        """Do `prepare` without holding up the event loop.

        Each has a thread of its own: a corrected config must not wait for one of that name that hangs.
        """
        thread = StorageThreads(f"open-{config.global_unique_name}", 1)
        return await thread.run(lambda: self.prepare(config, is_new=is_new))

    def discard(self, prepared: StorageBackend) -> None:
        """Close a prepared storage that will not be installed."""
        prepared.close()

    def install(self, config: StorageConfig, backend: StorageBackend) -> None:
        """Install a prepared storage; it takes over the state of an earlier one of that name."""
        name = config.global_unique_name
        previous = self._backends.get(name) or self._closed.pop(name, None)
        if previous is not None:
            backend.take_over(previous)
        if name in self._backends:
            self._backends[name].close()
        self._backends[name] = backend
        self._forget_rank(name)
        self._install_unverified(name, backend, previous)
        self._types[name] = config.storage_type
        if isinstance(config.spec, TairMemPoolStorageSpec) and config.spec.node_id:
            self._nodes[name] = config.spec.node_id
        self._health[name] = StorageHealth()  # another medium
        self.set_draining(name, is_draining=config.is_draining)
        self.set_enabled(name, enabled=config.is_available)

    def _install_unverified(self, name: str, backend: StorageBackend, previous: StorageBackend | None) -> None:
        """Hide the blocks of a path storage until it is compared, unless the same directory was compared before."""
        path = backend if isinstance(backend, FileStorage) else None
        is_same = path and isinstance(previous, FileStorage) and previous.directory == path.directory
        if not is_same or name not in self._types:
            (self._unverified.add if path and not path.is_verified else self._unverified.discard)(name)

    def _check_root(self, config: StorageConfig) -> None:
        if self._allowed_roots is None or not isinstance(config.spec, PathStorageSpec):
            return
        root = Path(config.spec.root).resolve()
        if not any(root.is_relative_to(allowed.resolve()) for allowed in self._allowed_roots):
            allowed_text = ", ".join(map(str, self._allowed_roots)) or "none (set kvcm.storage.allowed_roots)"
            raise InvalidArgumentError(f"root {str(root)!r} is outside the allowed roots: {allowed_text}")

    def _check_hosts(self, config: StorageConfig) -> None:
        if isinstance(config.spec, MooncakeStorageSpec):
            for field, host in mooncake_hosts(config.spec):
                self._allowed_hosts.check(field, host)

    def set_enabled(self, name: str, *, enabled: bool) -> None:
        """Make an open storage available for reads and writes, or not."""
        if enabled:
            self._enabled.add(name)
        else:
            self._enabled.discard(name)
        self._rebuild_ranks(name)

    def set_verified(self, name: str, *, is_verified: bool) -> None:
        """Let lookups answer the blocks of an open storage, or not; writes go there either way."""
        if name in self._types and is_verified is (name in self._unverified):
            (self._unverified.discard if is_verified else self._unverified.add)(name)
            self._rebuild_ranks(name)

    @property
    def unverified(self) -> frozenset[str]:
        """The open storages whose blocks no lookup answers, since they may have other bytes."""
        return frozenset(self._unverified)

    def path_storages(self) -> Mapping[str, FileStorage]:
        """Return the open path storages by name, enabled or not."""
        return {name: backend for name, backend in self._backends.items() if isinstance(backend, FileStorage)}

    def set_draining(self, name: str, *, is_draining: bool) -> None:
        """Keep new blocks off an open storage, or take them again; reads go on either way."""
        if is_draining:
            self._draining.add(name)
        else:
            self._draining.discard(name)

    def set_health(self, name: str, health: StorageHealth) -> None:
        """Set the health of an open storage. A storage that is DOWN is not available, enabled or not.

        Deletions go on trying a storage that is down; they have pauses of their own.
        """
        was_usable = self._health[name].is_usable
        self._health[name] = health
        if health.is_usable is not was_usable:
            self._rebuild_ranks(name)
        self._update_writable(name)

    def report_unwritable(self, name: str, *, is_full: bool = False) -> None:
        """Expect no space on an open storage until the next good probe: a write failed a moment ago.

        Args:
            name: of the storage.
            is_full: whether it failed for lack of space.
        """
        if name in self._health:
            health = self._health[name]
            self._health[name] = replace(
                health,
                is_unwritable=True,
                is_full=health.is_full or is_full,
                observations=health.observations + is_full,
            )
            self._update_writable(name)

    def _update_writable(self, name: str) -> None:
        if name in self._enabled and self._health[name].is_writable:
            self._writable.add(name)
        else:
            self._writable.discard(name)

    def _rebuild_ranks(self, name: str) -> None:
        if self._is_usable(name) and name not in self._unverified:
            for ranks in self._rank_tables(name):
                ranks[name] = _SPEED_RANK[self._types[name]]
        else:
            for ranks in self._rank_tables(name):
                ranks.pop(name, None)
        self._update_writable(name)
        self.generation += 1

    def _is_usable(self, name: str) -> bool:
        return name in self._enabled and self._health[name].is_usable

    def _rank_tables(self, name: str) -> tuple[dict[str, int], ...]:
        node_id = self._nodes.get(name)
        return (self._ranks,) if node_id is None else (self._pool_ranks, self._pool_ranks_on[node_id])

    def _forget_rank(self, name: str) -> None:
        for ranks in self._rank_tables(name):
            ranks.pop(name, None)
        self._nodes.pop(name, None)

    async def forget(self, config: StorageConfig, before: float) -> None:
        """Drop the state of a removed storage without blocks.

        Args:
            config: of the storage.
            before: unix seconds; younger state belongs to a storage that was added again.

        Raises:
            StorageIOError: the store cannot be asked.
        """
        self._closed.pop(config.global_unique_name, None)
        opener = self._openers.get(config.storage_type)
        if isinstance(opener, PoolOpener) and isinstance(config.spec, TairMemPoolStorageSpec) and config.spec.node_id:
            await opener(config, self.cluster_id).forget(before)

    def close(self, name: str) -> None:
        """Close a storage; its locations count as missing from now on."""
        self._forget_rank(name)
        self._types.pop(name, None)
        self._health.pop(name, None)
        self._enabled.discard(name)
        self._writable.discard(name)
        self._draining.discard(name)
        self._unverified.discard(name)
        backend = self._backends.pop(name)
        backend.close()
        if not isinstance(backend, MempoolStorage):  # of a pool everything is in the store, until it is forgotten
            self._closed[name] = backend
        self.generation += 1

    def for_node(self, node_id: str) -> StorageDirectory | NodeView:
        """Return the storages as callers on a node see them: with the memory pools of that node, and no other.

        Args:
            node_id: "" for a caller that names none.
        """
        pools = self._pool_ranks_on.get(node_id)
        return NodeView(self, pools) if pools else self

    @property
    def everywhere(self) -> NodeView:
        """The storages as operators see them: with the memory pools of all nodes."""
        return NodeView(self, self._pool_ranks)

    def health(self, storage: str) -> StorageHealth | None:
        """Return how an open storage is, enabled or not; None when there is none of that name."""
        return self._health.get(storage)

    def is_available(self, storage: str) -> bool:
        """Return whether a storage can be written to and asked, though its blocks may be unverified."""
        return storage in self._ranks or (storage in self._unverified and self._is_usable(storage))

    def is_writable(self, storage: str) -> bool:
        """Return whether a storage is expected to accept a new block."""
        return storage in self._writable

    def is_draining(self, storage: str) -> bool:
        """Return whether a storage is being emptied, so that nothing new may go there."""
        return storage in self._draining

    def type_of(self, storage: str) -> StorageType | None:
        """Return the type of an open storage, None when there is none of that name."""
        return self._types.get(storage)

    def backend(self, storage: str) -> StorageBackend | None:
        """Return an open storage, enabled or not; None when there is none of that name."""
        return self._backends.get(storage)

    def open_backends(self) -> Mapping[str, StorageBackend]:
        """Return the open storages by name, enabled or not."""
        return self._backends

    def pools(self) -> Mapping[str, MempoolStorage]:
        """Return the open memory pools by name, enabled or not."""
        return {name: backend for name, backend in self._backends.items() if isinstance(backend, MempoolStorage)}

    def close_all(self) -> None:
        """Close every storage."""
        for name in list(self._backends):
            self.close(name)
