"""Removal: a location turns to deleting, its bytes go after a delay, then its record (design.md decision 15).

A removed key vanishes from every answer at once. Its record stays, says from when its bytes may go, and counts as usage
until they are freed; the deletion executor of whoever leads finds it by that time.
Whatever was ever serving is protected for `delay_before_delete_ms`, since a reader may have been given it a moment ago
(invariant 6). A location that is still being written is deleted when its session's time is up: before that its writer
could put the bytes back; it keeps its session's id, so that the session's end lets it go earlier.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from kvcm.cache.instance_cache import InstanceCache
from kvcm.cache.pages import pages
from kvcm.index.change_events import ChangeEvents
from kvcm.index.meta_index import Change
from kvcm.model.clock import Clock
from kvcm.model.groups import InstanceGroup
from kvcm.model.instances import Instance
from kvcm.model.locations import BlockRecord, Location, LocationStatus
from kvcm.telemetry.events import EventLog

__all__ = ["Choose", "Remover", "Which"]

_FALLBACK_DELAY_MS = 1000

Which = Callable[[Location], bool]
Choose = Callable[[int, BlockRecord], Which]
"""From a block and its record to the locations that go."""


class Remover:
    """Takes blocks out of indexes.

    Args:
        clock: time source.
        find_group: from a group's name to its settings, None when it is gone.
        events: told of what was removed.
    """

    def __init__(
        self, clock: Clock, find_group: Callable[[str], InstanceGroup | None], events: EventLog | None = None
    ) -> None:
        self._clock = clock
        self._find_group = find_group
        self._events = ChangeEvents(events if events is not None else EventLog())

    async def remove(
        self,
        cache: InstanceCache,
        keys: Iterable[int],
        which: Which = lambda _location: True,
        *,
        reason: str = "RemoveCache",
    ) -> int:
        """Mark locations of blocks as deleting.

        Args:
            cache: the instance.
            keys: blocks; unknown ones are fine.
            which: locations to remove, all by default.
            reason: what the event log is told: who asked for it.

        Returns:
            Number of locations that this call marked.
        """
        return await self.remove_chosen(cache, keys, lambda _key, _record: which, reason=reason)

    async def remove_chosen(self, cache: InstanceCache, keys: Iterable[int], choose: Choose, *, reason: str) -> int:
        """Do `remove` for locations that are chosen block by block, by what the record is when it is changed."""
        removed = 0

        def mark(key: int, old: BlockRecord | None) -> BlockRecord | None:
            now = self._clock.now()  # a store that takes its time must not eat up the delay
            return _marked(old, choose(key, old), now, now + delay) if old is not None else None

        for page in pages(list(keys), cache.page_keys):
            delay = self.delay_seconds(cache.instance)
            changes = await cache.index.read_modify_write(page, mark)
            removed += _count_marked(changes)
            self._events.removed(cache.instance, changes, reason)
            await asyncio.sleep(0)
        return removed

    async def remove_all(
        self,
        cache: InstanceCache,
        which: Which = lambda _location: True,
        most_pages: int | None = None,
        *,
        reason: str = "TrimCache",
    ) -> int:
        """Do `remove` for every block of an instance, page by page; for the first pages only if a number is given."""
        removed = count = 0
        async for page in cache.index.scan():
            removed += await self.remove(cache, page, which, reason=reason)
            count += 1
            if count == most_pages:
                break
        return removed

    async def forget_all(self, cache: InstanceCache) -> int:
        """Drop every record of an instance and leave the bytes to the scrub."""
        forgotten = 0
        async for page in cache.index.scan():
            changes = await cache.index.delete(page)
            forgotten += len(changes)
            self._events.removed(cache.instance, changes, "TrimCache")
            await asyncio.sleep(0)
        return forgotten

    def delay_seconds(self, instance: Instance) -> float:
        """Return how long what served stays readable for those who were given it."""
        group = self._find_group(instance.instance_group_name)
        if group is None:
            return _FALLBACK_DELAY_MS / 1000
        return group.cache_config.reclaim_strategy.delay_before_delete_ms / 1000


def _marked(old: BlockRecord, which: Which, now: float, due: float) -> BlockRecord:
    def mark(location: Location) -> Location:
        if location.status is LocationStatus.DELETING or not which(location):
            return location
        if location.status is LocationStatus.WRITING:
            return location._replace(status=LocationStatus.DELETING, deadline=max(now, location.deadline))
        return location._replace(status=LocationStatus.DELETING, deadline=due)

    locations = tuple(map(mark, old.locations))
    return old if locations == old.locations else old._replace(locations=locations)


def _count_marked(changes: Iterable[Change]) -> int:
    return sum(
        before.status is not LocationStatus.DELETING and after.status is LocationStatus.DELETING
        for _, old, new, _ in changes
        if new is not old and new is not None and old is not None
        for before, after in zip(old.locations, new.locations, strict=True)
    )
