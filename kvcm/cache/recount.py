"""Recounts of usage: what managers that died did not report any more is put right by whoever leads.

The counters that change with the records, shard by shard, are the truth; a group whose shared counters differ from them
in two looks in a row, or hold reservations that nobody ends, is recounted. Nothing scans an index.
"""

from __future__ import annotations

from collections import Counter

import structlog

from kvcm.cache.open_caches import OpenCaches
from kvcm.cache.shared_usage import SharedLedger, counted
from kvcm.index.meta_index import MetaIndex
from kvcm.model.clock import Clock
from kvcm.registry.registry import Registry

__all__ = ["UsageRecount"]

_LOOK_SECONDS = 5.0

_log = structlog.get_logger("kvcm.cache")


class UsageRecount:
    """Looks after the shared counters of all groups.

    Args:
        registry: the groups.
        caches: the indexes.
        ledger: the counters.
        clock: time source.
    """

    def __init__(self, registry: Registry, caches: OpenCaches, ledger: SharedLedger, clock: Clock) -> None:
        self._registry = registry
        self._caches = caches
        self._ledger = ledger
        self._clock = clock
        self._suspects: set[str] = set()
        self._look_at: dict[str, float] = {}

    async def look(self) -> None:
        """Compare the counters of groups with the truth, those that differed the last time sooner than the others, and
        recount what differs for the second time.

        Raises:
            StorageIOError: the store cannot be asked.
        """
        now = self._clock.now()
        for group in self._registry.groups.all():
            if group.name in self._suspects or now >= self._look_at.get(group.name, 0.0):
                self._look_at[group.name] = now + _LOOK_SECONDS
                await self._look_into(group.name)

    async def _look_into(self, group_name: str) -> None:
        if not await self._differs(group_name):
            self._suspects.discard(group_name)
        elif group_name in self._suspects:
            self._suspects.discard(group_name)
            await self.recount(group_name)
        else:
            self._suspects.add(group_name)

    async def recount(self, group_name: str) -> bool:
        """Recount one group; False when another manager does just now."""
        done = await self._ledger.recount(group_name, self._indexes(group_name), self._clock.now())
        _log.info("usage_recounted", group=group_name, done=done)
        return done

    async def _differs(self, group_name: str) -> bool:
        heard = await self._ledger.refresh(group_name)
        truth = Counter(await counted(self._indexes(group_name)))
        used = Counter(heard.used)
        return bool(heard.dropped) or any(heard.reserved.values()) or used != truth

    def _indexes(self, group_name: str) -> dict[int, MetaIndex]:
        return {
            cache.placement.uid: cache.index
            for cache in self._caches.all()
            if cache.instance.instance_group_name == group_name
        }
