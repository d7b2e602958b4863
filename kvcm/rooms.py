"""The rooms of a running manager, and what they do in the background.

Duties of the leader: ending what is overdue, deletions, removals of instances, recounts of usage. Every manager follows
the registry and the invalidations of its search caches, and writes down what was read.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from kvcm.cache.manager import CacheManager
from kvcm.cache.recount import UsageRecount
from kvcm.cache.shared_usage import SharedLedger
from kvcm.config import Settings
from kvcm.index.backends.redis_keys import BlockKeys
from kvcm.index.search_cache import CacheBudget
from kvcm.metadata import Metadata
from kvcm.model.clock import Clock
from kvcm.model.errors import KvcmError, UnknownInstanceError
from kvcm.reclaim.executor import DeletionExecutor
from kvcm.registry.leadership import Leadership
from kvcm.registry.registry import Registry
from kvcm.service.calls import Plane
from kvcm.service.node import refuse_unless_leading
from kvcm.storage.directory import StorageDirectory
from kvcm.store.redis.tracking import Invalidations

__all__ = ["Duty", "Rooms"]

Duty = tuple[str, Callable[[], Awaitable[None]]]
"""Name and endless coroutine."""

_ACCESSES_SECONDS = 1.0  # what a crash may lose
_REGISTRY_SECONDS = 0.25  # other managers' changes are in force within a second
_SHARED_DUTY_SECONDS = 0.5  # a round asks every shard of every instance
_RECOUNT_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Rooms:
    """What `app` wires.

    Attributes:
        settings: intervals.
        metadata: the store.
        registry: what is configured.
        storages: the open storages.
        leadership: who leads.
        deletions: deletes bytes and metadata.
        cache: blocks.
        invalidations: hears of other managers' changes; None while there are none.
    """

    settings: Settings
    metadata: Metadata
    registry: Registry
    storages: StorageDirectory
    leadership: Leadership
    deletions: DeletionExecutor
    cache: CacheManager
    invalidations: Invalidations | None = None
    recount: UsageRecount | None = field(default=None)

    @classmethod
    def build(
        cls,
        metadata: Metadata,
        registry: Registry,
        storages: StorageDirectory,
        leadership: Leadership,
        clock: Clock,
        settings: Settings,
    ) -> Rooms:
        """Build the rooms over an opened store and a loaded registry."""
        deletions = DeletionExecutor(storages, clock)
        budget = CacheBudget(settings.search_cache_bytes)
        cache = CacheManager(
            registry,
            storages,
            clock,
            new_backend=metadata.new_backend,
            store=metadata.store,
            usage=metadata.usage,
            budget=budget,
        )
        deletions.serve(cache)
        if metadata.client is None or not isinstance(metadata.usage, SharedLedger):
            return cls(settings, metadata, registry, storages, leadership, deletions, cache)
        keys, caches = BlockKeys(metadata.client.prefix), cache.open_caches
        invalidations = Invalidations(
            metadata.client,
            keys.prefix,
            lambda names: caches.invalidate(filter(None, map(keys.parse, names))),
            caches.invalidate_all,
        )
        budget.is_coherent = lambda: invalidations.is_live and settings.search_cache_bytes > 0
        recount = UsageRecount(registry, caches, metadata.usage, clock)
        return cls(settings, metadata, registry, storages, leadership, deletions, cache, invalidations, recount)

    def duties(self) -> list[Duty]:
        """Return what has to run while the manager serves."""
        tick_seconds = self.settings.loop_interval_ms / 1000
        duty_seconds = _SHARED_DUTY_SECONDS if self.metadata.store.is_shared else tick_seconds
        duties: list[Duty] = [
            ("election", partial(_every, tick_seconds, self.leadership.tick)),
            (
                "registry",
                partial(_every, _REGISTRY_SECONDS, self._refresh),
            ),  # and storages that did not open yet
            ("accesses", partial(_every, _ACCESSES_SECONDS, self.cache.accesses.drain)),
            ("expiry", partial(_every, duty_seconds, self._leading(self.cache.expire))),
            ("removals", partial(_every, duty_seconds, self._leading(self.cache.purge_removed))),
            ("deletions", partial(self.deletions.run, duty_seconds, lambda: self.leadership.is_leader)),
        ]
        if self.invalidations is not None and self.recount is not None:
            assert isinstance(self.metadata.usage, SharedLedger)
            duties += [
                ("invalidations", self.invalidations.run),
                ("usage", self.metadata.usage.run),
                ("recount", partial(_every, _RECOUNT_SECONDS, self._leading(self.recount.look))),
            ]
        return duties

    def _leading(self, duty: Callable[[], Awaitable[None]]) -> Callable[[], Awaitable[None]]:
        async def run() -> None:
            if self.leadership.is_leader:
                await duty()

        return run

    async def _refresh(self) -> None:
        await self.registry.refresh()

    async def settle(self) -> None:
        """Write down what is still to be written down, before the manager ends."""
        with contextlib.suppress(KvcmError):  # what the store does not take now, a recount puts right
            await self.cache.accesses.drain()
            if isinstance(self.metadata.usage, SharedLedger):
                await self.metadata.usage.flush()

    def labels(self, instance_id: str) -> Mapping[str, str]:
        """Return the labels of an instance's metrics; none when it is not registered."""
        try:
            instance = self.registry.instances.get(instance_id)
        except UnknownInstanceError:
            return {}
        return {"instance_group": instance.instance_group_name, "instance_id": instance_id}

    def refuse_unless_leading(self, plane: Plane) -> None:
        """Refuse a call while another manager has to answer it.

        Only `kvcm.service.require_leader` asks for that, or a store of this manager's own together with a lock among
        managers: then only the lock's holder serves (design.md decision 7).

        Raises:
            NotLeaderError: naming the leader's address where it is known.
        """
        own_store = not self.metadata.store.is_shared and bool(self.settings.distributed_lock_uri)
        if self.settings.require_leader or own_store:
            refuse_unless_leading(self.leadership, plane)


async def _every(seconds: float, duty: Callable[[], Awaitable[None]]) -> None:
    while True:
        await duty()
        await asyncio.sleep(seconds)
