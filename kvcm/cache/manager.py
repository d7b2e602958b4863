"""CacheManager: the one object that the service asks about blocks."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence

from kvcm.cache.instance_cache import InstanceCache
from kvcm.cache.leases import ReadLease, ReadLeases
from kvcm.cache.match import Match, MatchQuery, match
from kvcm.cache.meta import BlockMeta, block_metas
from kvcm.cache.removal import Deleter, Remover
from kvcm.cache.selection import Storages
from kvcm.cache.sessions import FinishedWrite, StartedWrite, WriteRequest, WriteSession, WriteSessions
from kvcm.cache.usage import UsageLedger
from kvcm.index.backends.backend import IndexBackend
from kvcm.index.backends.memory import MemoryBackend
from kvcm.index.meta_index import MetaIndex
from kvcm.index.uninterrupted import uninterrupted
from kvcm.model.clock import Clock
from kvcm.model.deletion import DeletionItem
from kvcm.model.errors import InvalidArgumentError, NotReadyError, UnknownInstanceError
from kvcm.model.groups import MetaIndexerConfig
from kvcm.model.instances import Instance
from kvcm.model.masks import BlockMask
from kvcm.model.storages import StorageType
from kvcm.registry.registry import Registry

__all__ = ["CacheManager"]


def random_id(length: int) -> str:
    """Return an unguessable id of so many hex digits."""
    return secrets.token_hex(length // 2)


class CacheManager:
    """Blocks of all instances.

    Args:
        registry: instances and groups.
        storages: the open storages.
        deleter: deletes bytes and metadata of removed locations.
        clock: time source.
        new_id: makes a random id of so many hex digits.
        new_backend: makes the backend of an instance's index.
    """

    def __init__(
        self,
        registry: Registry,
        storages: Storages,
        deleter: Deleter,
        clock: Clock,
        new_id: Callable[[int], str] = random_id,
        new_backend: Callable[[], IndexBackend] = MemoryBackend,
    ) -> None:
        self._registry = registry
        self._storages = storages
        self._new_backend = new_backend
        self._caches: dict[str, InstanceCache] = {}
        self.usage = UsageLedger()
        self.leases = ReadLeases(clock, lambda: new_id(32))
        self._remover = Remover(deleter, clock, registry.groups.find)
        self.sessions = WriteSessions(storages, self.usage, self._remover, clock, new_id)

    def register_instance(self, instance: Instance) -> Instance:
        """Register an instance and open its index with the settings that its group has now.

        Raises:
            KvcmError: as `InstanceRegistry.register`.
        """
        instance = self._registry.instances.register(instance)
        self._open(instance)
        return instance

    def cache(self, instance_id: str) -> InstanceCache:
        """Return what is kept for an instance.

        Raises:
            UnknownInstanceError: it is not registered.
        """
        cache = self._caches.get(instance_id)
        return cache if cache is not None else self._open(self._registry.instances.get(instance_id))

    def _open(self, instance: Instance) -> InstanceCache:
        cache = self._caches.get(instance.instance_id)
        if cache is None:
            group = self._registry.groups.find(instance.instance_group_name)
            config = group.cache_config.meta_indexer_config if group is not None else MetaIndexerConfig()
            cache = InstanceCache(instance, self._new_index(instance, config))
            self._caches[instance.instance_id] = cache
        return cache

    def _new_index(self, instance: Instance, config: MetaIndexerConfig) -> MetaIndex:
        return MetaIndex(
            self._new_backend(),
            self._storages,
            shard_count=config.mutex_shard_num or 16,
            batch_key_size=config.batch_key_size or 256,
            max_key_count=config.max_key_count or 1 << 62,
            on_usage=self.usage.listener(instance.instance_group_name),
        )

    async def remove_instance(self, instance_id: str) -> None:
        """Forget an instance and delete its blocks; a later registration of the id starts empty.

        Raises:
            UnknownInstanceError: it is not registered.
        """
        cache = self.cache(instance_id)
        self._registry.instances.remove(instance_id)
        self._caches.pop(instance_id, None)
        self.sessions.forget_instance(cache)
        # Nobody can ask for this a second time, so it is not left half done when the caller hangs up.
        await uninterrupted(self._remover.remove_all(cache))

    async def match(self, instance_id: str, query: MatchQuery) -> Match:
        """Return which blocks can be read, and where.

        Raises:
            UnknownInstanceError: the instance is not registered.
            NotReadyError: no storage of its group is available.
            InvalidArgumentError: the query does not make sense.
        """
        cache = self.cache(instance_id)
        group = self._registry.groups.find(cache.instance.instance_group_name)
        if group is not None and not any(self._storages.rank(name) is not None for name in group.storage_candidates):
            raise NotReadyError(f"no storage of group {group.name!r} is available: {list(group.storage_candidates)}")
        return await match(cache, query)

    async def lease(self, instance_id: str, found: Match, lease_ms: int) -> ReadLease:
        """Pin what a match found, for a bounded time.

        Raises:
            InvalidArgumentError: the duration is out of range.
        """
        return await self.leases.acquire(self.cache(instance_id), found, lease_ms)

    async def metas(self, instance_id: str, keys: Sequence[int], mask: BlockMask) -> list[BlockMeta]:
        """Return everything known of the unmasked keys.

        Raises:
            UnknownInstanceError: the instance is not registered.
        """
        return await block_metas(self.cache(instance_id), keys, mask, self._storages)

    async def start_write(self, instance_id: str, request: WriteRequest) -> StartedWrite:
        """Open a write session.

        Raises:
            UnknownInstanceError: the instance is not registered, or its group was removed.
            KvcmError: as `WriteSessions.start`.
        """
        cache = self.cache(instance_id)
        group = self._registry.groups.find(cache.instance.instance_group_name)
        if group is None:
            raise UnknownInstanceError(
                f"instance group {cache.instance.instance_group_name!r} of instance {instance_id!r} was removed"
            )
        return await self.sessions.start(cache, group, request)

    async def finish_write(self, instance_id: str, session_id: str, success: BlockMask) -> FinishedWrite:
        """End a write session.

        Raises:
            KvcmError: as `WriteSessions.finish`.
        """
        return await self.sessions.finish(self.cache(instance_id), session_id, success)

    async def renew_write(self, instance_id: str, session_id: str, timeout_seconds: int) -> WriteSession:
        """Move a write session's deadline.

        Raises:
            KvcmError: as `WriteSessions.renew`.
        """
        return await self.sessions.renew(self.cache(instance_id), session_id, timeout_seconds)

    async def remove(self, instance_id: str, keys: Sequence[int], mask: BlockMask) -> int:
        """Remove the unmasked keys; unknown ones are fine. Returns the number of locations removed.

        Raises:
            UnknownInstanceError: the instance is not registered.
        """
        cache = self.cache(instance_id)
        return await self._remover.remove(cache, [keys[i] for i in mask.unmasked(len(keys))])

    async def trim(self, instance_id: str) -> int:
        """Remove every block of an instance."""
        return await self._remover.remove_all(self.cache(instance_id))

    async def trim_meta(self, instance_id: str) -> int:
        """Drop the metadata of every block and leave the bytes to the scrub."""
        return await self._remover.forget_all(self.cache(instance_id))

    async def trim_written_between(self, instance_id: str, begin: float, end: float) -> int:
        """Remove what was written at unix times begin ≤ t < end.

        Raises:
            InvalidArgumentError: the range is empty.
        """
        if begin >= end:
            raise InvalidArgumentError(f"begin_timestamp is {begin}, must be below end_timestamp, {end}")
        cache = self.cache(instance_id)
        return await self._remover.remove_all(cache, lambda location: begin <= location.written_at < end)

    def group_usage_bytes(self, group_name: str) -> Mapping[StorageType, int]:
        """Return the bytes that a group uses, by storage type."""
        return self.usage.used(group_name)

    def held_until(self, item: DeletionItem) -> float:
        """Return the unix time until which a location's bytes must stay: a reader or its writer may still use them."""
        return max(self.leases.held_until(item), self.sessions.held_until(item))

    async def expire(self) -> None:
        """Roll back overdue write sessions and end overdue read leases, giving way to other requests in between."""
        self.leases.expire()
        while await self.sessions.expire(most=16):  # noqa: ASYNC110 - nothing is polled, others get their turn
            await asyncio.sleep(0)
