"""Looks at what is used, for the capacity calls and the metrics."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final

from kvcm.cache.manager import CacheManager, IndexInCustody
from kvcm.cache.pages import pages
from kvcm.model.errors import KvcmError
from kvcm.model.principals import errand
from kvcm.reclaim.executor import DeletionExecutor
from kvcm.registry.registry import Registry
from kvcm.service.usage_report import IndexUsage, UsageSources, usage_report
from kvcm.service.usage_values import UsageReport

__all__ = ["CapacityView"]

_SLICE: Final = 50


class CapacityView:
    """The truth about usage, as the indexes have it.

    Args:
        cache: blocks and instances.
        registry: the limits.
        deletions: what waits for its deletion.

    Attributes:
        pinned: bytes that pins hold, by group, as last heard.
    """

    def __init__(self, cache: CacheManager, registry: Registry, deletions: DeletionExecutor) -> None:
        self._cache = cache
        self._registry = registry
        self._deletions = deletions
        self.pinned: dict[str, int] = {}

    async def look(self, group: str = "") -> UsageReport:
        """Return the usage of everything, or of one group and what it draws from. Whoever is limited to groups sees as
        used what those use.

        Raises:
            InvalidArgumentError: there is no such group.
            StorageIOError: the store cannot be asked.
        """
        if group:
            self._registry.groups.get(group)
        await self.hear()
        return await self.as_heard(group)

    async def hear(self) -> None:
        """Hear from the store what the indexes hold and what pins take.

        Raises:
            StorageIOError: the store cannot be asked.
        """
        for number, custody in enumerate(list(self._cache.indexes())):
            await custody.meta_index.refresh()
            if number % _SLICE == 0:  # a store of this process answers without giving way
                await asyncio.sleep(0)
        pinned: dict[str, int] = {}
        for number, group in enumerate(self._registry.groups.all()):
            pinned[group.name] = await self._cache.pins.pinned_bytes(group.name)
            if number % _SLICE == 0:
                await asyncio.sleep(0)
        self.pinned = pinned

    async def last_heard(self) -> UsageReport:
        """Return the usage of everything as the store has it now, or as last heard while it does not answer."""
        with suppress(KvcmError):
            return await self.look()
        return await self.as_heard()

    async def as_heard(self, group: str = "") -> UsageReport:
        """Return the same as last heard, without asking the store. Of many instances that is much to sum up: a thread
        does it, while lookups are answered."""
        sources = UsageSources(
            self._registry.groups.all(),
            self._registry.storages.all(),
            self._registry.quotas.all(),
            await self._held(),
            self.pinned,
            dict(self._cache.usage.refusals),
            self._deletions.backlogs(),
        )
        principal = errand.get().principal
        seen = sources if principal.has_all_groups else sources.of_groups(principal.groups)
        return await asyncio.to_thread(usage_report, seen, group)

    async def _held(self) -> list[IndexUsage]:
        held: list[IndexUsage] = []
        for page in pages(list(self._cache.indexes()), _SLICE):
            held += map(_usage_of, page)
            await asyncio.sleep(0)
        return held


def _usage_of(custody: IndexInCustody) -> IndexUsage:
    index = custody.meta_index
    used, deleting = dict(index.usage_bytes), dict(index.deleting_bytes)  # which change while a thread reads them
    return IndexUsage(custody.instance, index.key_count, index.max_key_count, used, deleting)
