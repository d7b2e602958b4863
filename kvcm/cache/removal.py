"""Removal: a location turns to deleting, its bytes go after a delay, then its record (design.md decision 15).

A removed key vanishes from every answer at once. Its record stays, and counts as usage, until the bytes are freed.
Whatever was ever serving is protected for `delay_before_delete_ms`, since a reader may have been given it a moment ago
(invariant 6). A location that is still being written is deleted when its session's time is up: before that its writer
could put the bytes back.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from kvcm.cache.instance_cache import InstanceCache
from kvcm.cache.pages import pages
from kvcm.index.meta_index import Change, MetaIndex
from kvcm.model.clock import Clock
from kvcm.model.deletion import DeletionItem
from kvcm.model.groups import InstanceGroup
from kvcm.model.locations import BlockRecord, Location, LocationStatus, decode_chunk

__all__ = ["Deleter", "Remover", "rolled_back"]

_FALLBACK_DELAY_MS = 1000

Which = Callable[[Location], bool]


class Deleter(Protocol):
    """Deletes bytes, then metadata."""

    def submit(self, index: MetaIndex, items: Sequence[DeletionItem], due: float) -> None:
        """Delete these locations, which are marked as deleting in `index`, at unix time `due` or soon after."""


class Remover:
    """Takes blocks out of indexes.

    Args:
        deleter: deletes what is marked.
        clock: time source.
        find_group: from a group's name to its settings, None when it is gone.
    """

    def __init__(self, deleter: Deleter, clock: Clock, find_group: Callable[[str], InstanceGroup | None]) -> None:
        self._deleter = deleter
        self._clock = clock
        self._find_group = find_group

    @staticmethod
    def item(cache: InstanceCache, key: int, location: Location) -> DeletionItem:
        """Return what it takes to delete a location."""
        uris = tuple(spec.uri for spec in decode_chunk(location.chunk).specs)
        return DeletionItem(cache.instance.instance_id, key, location.id, location.storage, uris)

    async def remove(self, cache: InstanceCache, keys: Iterable[int], which: Which = lambda _location: True) -> int:
        """Mark locations of blocks as deleting and have them deleted.

        Args:
            cache: the instance.
            keys: blocks; unknown ones are fine.
            which: locations to remove, all by default.

        Returns:
            Number of locations that this call marked.
        """

        removed = 0

        def mark(_key: int, old: BlockRecord | None) -> BlockRecord | None:
            return _marked(old, which)

        def submit(changes: Sequence[Change]) -> None:
            nonlocal removed
            removed += self._submit_removed(cache, changes)

        for page in pages(list(keys)):
            await cache.index.read_modify_write(page, mark, submit)
            await asyncio.sleep(0)
        return removed

    def _submit_removed(self, cache: InstanceCache, changes: Sequence[Change]) -> int:
        now = self._clock.now()
        delay = self._delay_seconds(cache)
        by_due: defaultdict[float, list[DeletionItem]] = defaultdict(list)
        for key, location in _newly_deleting(changes):
            writing = location.status is LocationStatus.WRITING
            due = max(now, location.deadline) if writing else now + delay
            by_due[due].append(self.item(cache, key, location))
        for due, items in by_due.items():
            self._deleter.submit(cache.index, items, due)
        return sum(map(len, by_due.values()))

    async def remove_all(self, cache: InstanceCache, which: Which = lambda _location: True) -> int:
        """Do `remove` for every block of an instance, page by page."""
        removed = 0
        async for page in cache.index.scan():
            removed += await self.remove(cache, page, which)
        return removed

    async def forget_all(self, cache: InstanceCache) -> int:
        """Drop every record of an instance and leave the bytes to the scrub."""
        forgotten = 0
        async for page in cache.index.scan():
            forgotten += len(await cache.index.delete(page))
            await asyncio.sleep(0)
        return forgotten

    def delete_now(self, cache: InstanceCache, items: Sequence[DeletionItem]) -> None:
        """Delete locations that nobody was ever given to read."""
        if items:
            self._deleter.submit(cache.index, items, self._clock.now())

    def _delay_seconds(self, cache: InstanceCache) -> float:
        group = self._find_group(cache.instance.instance_group_name)
        if group is None:
            return _FALLBACK_DELAY_MS / 1000
        return group.cache_config.reclaim_strategy.delay_before_delete_ms / 1000


def rolled_back(cache: InstanceCache, changes: Iterable[Change]) -> list[DeletionItem]:
    """Return the locations that these changes turned to deleting."""
    return [Remover.item(cache, key, location) for key, location in _newly_deleting(changes)]


def _marked(old: BlockRecord | None, which: Which) -> BlockRecord | None:
    if old is None:
        return None
    locations = tuple(
        location._replace(status=LocationStatus.DELETING, session_id="", deadline=0.0)
        if location.status is not LocationStatus.DELETING and which(location)
        else location
        for location in old.locations
    )
    return old if locations == old.locations else old._replace(locations=locations)


def _newly_deleting(changes: Iterable[Change]) -> Iterable[tuple[int, Location]]:
    """Yield (key, location as it was before) of everything that turned to deleting."""
    for key, old, new, _ in changes:
        if new is old or new is None or old is None:
            continue
        for before, after in zip(old.locations, new.locations, strict=True):
            if after.status is LocationStatus.DELETING and before.status is not LocationStatus.DELETING:
                yield key, before
