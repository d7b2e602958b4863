"""What garbage collection and scrubs ask of the rooms that know blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvcm.cache.manager import CacheManager, IndexInCustody
from kvcm.model.instances import Instance
from kvcm.registry.registry import Registry
from kvcm.store.store import Store

__all__ = ["GarbageCustody"]

_AT_ONCE = 16


class GarbageCustody:
    """Answers from a manager's rooms.

    Args:
        cache: blocks.
        registry: instances.
        store: where all of it is kept.
    """

    def __init__(self, cache: CacheManager, registry: Registry, store: Store) -> None:
        self._cache = cache
        self._registry = registry
        self._store = store

    def indexes(self) -> Iterator[IndexInCustody]:
        """Return the index of every instance, also of those that are being removed."""
        return self._cache.indexes()

    def delay_seconds(self, instance: Instance) -> float:
        """Return how long what served stays readable for those who were given it."""
        return self._cache.delay_seconds(instance)

    async def is_read_in_order(self, uid: int) -> bool:
        """Return whether an instance was read by prefix match alone, through whatever manager."""
        return await self._cache.read_modes.is_in_order(uid)

    async def unreadable_instances(self) -> Sequence[str]:
        """Look for changes of other managers, and return what is stored of instances that cannot be read."""
        await self._registry.refresh()
        return self._registry.unreadable_instances()

    async def overdue_sessions(self) -> int:
        """Return how many write sessions have to be ended."""
        return await self._cache.endings.due_count()

    async def expire_sessions(self) -> int:
        """End the write sessions that are overdue, and return how many there were."""
        ended = 0
        while some := await self._cache.endings.expire(most=_AT_ONCE):
            ended += some
        return ended

    async def flush(self) -> None:
        """Return when what was changed is as durable as configured."""
        await self._store.flush()
