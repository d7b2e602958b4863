"""Drains: storages that are emptied, and removed ones whose blocks are still to be forgotten.

The registry remembers both in the storage's document, so they survive a restart and are carried on by the leader.
Nothing else is stored: the rest is asked of the indexes, whose counters change together with the records.

* A drain marks what serves on the storage as deleting, lap by lap through every index, slowly enough for requests. What
  is being written there is left to its session's end, pinned blocks to the pin's: a later lap finds it. The storage
  takes no new blocks meanwhile (`selection`), and goes on being read.
* A removal marks everything that lay on the storage, also pinned blocks and those being written: nobody can read them.
  The deletion executor then drops the metadata alone, as the storage is not configured. It begins some seconds after
  the storage was removed: until then an operator who did not mean it adds it again, and finds every block. By then all
  managers know of it, and writes that were begun before have stored their blocks or given up.

A drain that is cancelled, and a removed storage that is added again, end the lap that is under way: what is not marked
by then stays. What an instance has there whose document cannot be read, nobody knows: while there is one, no drain is
done and no storage is forgotten.

Parts of a block that are worth nothing without those that go, go with them, wherever they lie. The order inside a chain
is not kept (invariant 7): everything goes. What lies behind it on other storages is found by garbage collection.

Rejected: a list of the blocks of each storage. It would have to be changed with every record, in every backend, for
something that is done once in the life of a storage.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import structlog

from kvcm.cache.instance_cache import InstanceCache, OpenCaches
from kvcm.cache.removal import LocationIds, Remover
from kvcm.model.clock import Clock
from kvcm.model.errors import KvcmError
from kvcm.model.instances import Instance
from kvcm.model.locations import BlockRecord, Location, LocationStatus
from kvcm.model.storages import StorageConfig
from kvcm.registry.registry import Registry
from kvcm.registry.storages import StorageDrain

__all__ = ["CANCEL_SECONDS", "DrainProgress", "StorageDrains"]

CANCEL_SECONDS: Final = 10.0
"""For so long a removed storage can be added again with all its blocks."""
_BATCH_BLOCKS: Final = 256
_BLOCKS_PER_SECOND: Final = 20_000
_QUIET_SCANS: Final = 2
_FIRST_PAUSE_SECONDS: Final = 1.0
_LONGEST_PAUSE_SECONDS: Final = 30.0  # between laps that can mark nothing of what is left
# Another manager learns of a drain within a second, and gives up a write that it began before within ten.
_SETTLED_SECONDS: Final = 15.0
_CLOCK_SKEW_SECONDS: Final = 5.0  # of managers that share a store
_log = structlog.get_logger("kvcm.cache")
_IsDrained = Callable[[Location], bool]
"""Whether a location has to go."""
_ForgetMedium = Callable[[StorageConfig, float], Awaitable[None]]
"""Drops what is kept of a removed storage, as far as it is not younger than a unix time."""


class _RemainingBytes(NamedTuple):
    """Bytes that count on a storage, and the part of them that is being deleted."""

    used_bytes: int = 0
    deleting_bytes: int = 0

    @property
    def has_unmarked(self) -> bool:
        return self.used_bytes > self.deleting_bytes


class DrainProgress(NamedTuple):
    """How far a drain is.

    Attributes:
        drain: the request.
        remaining_bytes: bytes that still count, those whose deletion is on its way included.
        is_done: nothing is left.
        has_started: it is not a removal that can still be taken back with all blocks.
        is_marked: all that is left is being deleted, and was seen to be.
        pinned: locations that the last lap left to the ends of their pins.
        writing: locations that the last lap left to the ends of their write sessions.
        unreadable: instances whose documents cannot be read: their blocks there are unknown.
    """

    drain: StorageDrain
    remaining_bytes: int
    is_done: bool
    has_started: bool
    is_marked: bool = False
    pinned: int = 0
    writing: int = 0
    unreadable: Sequence[str] = ()


@dataclass(slots=True)
class _DrainState:
    """What this manager did about a drain so far.

    Attributes:
        next_scan: unix seconds.
        pause_seconds: after the last lap.
        quiet_scans: in a row, that found nothing to mark and nothing to wait for.
        pinned: as of `DrainProgress`.
        writing: as of `DrainProgress`.
    """

    next_scan: float
    pause_seconds: float = _FIRST_PAUSE_SECONDS
    quiet_scans: int = 0
    pinned: int = 0
    writing: int = 0


async def _no_medium_to_forget(_config: StorageConfig, _before: float) -> None:
    """There is nothing to drop."""


class StorageDrains:
    """Empties storages, and forgets what lay on removed ones.

    Args:
        registry: remembers which.
        caches: the indexes.
        remover: marks their blocks.
        clock: time source.
        is_shared: whether other managers work on the store.
        forget_medium: drops what is kept of a removed storage beside its blocks.
        give_way: lets requests have their turn.
        pause: waits some seconds.
    """

    def __init__(
        self,
        registry: Registry,
        caches: OpenCaches,
        remover: Remover,
        clock: Clock,
        *,
        is_shared: bool,
        forget_medium: _ForgetMedium = _no_medium_to_forget,
        give_way: Callable[[], Awaitable[None]] = lambda: asyncio.sleep(0),
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._registry = registry
        self._caches = caches
        self._remover = remover
        self._clock = clock
        self._is_shared = is_shared
        self._settled_seconds = _SETTLED_SECONDS if is_shared else 0.0
        self._forget_medium = forget_medium
        self._give_way = give_way
        self._pause = pause
        self._courses: dict[StorageDrain, _DrainState] = {}

    async def drain(self, name: str) -> None:
        """Begin to empty a storage, which takes no writes from now on; asked again it is no error.

        Raises:
            KvcmError: as `StorageRegistry.drain`.
        """
        await self._registry.storages.drain(name, self._clock.now())

    async def cancel(self, name: str) -> None:
        """Let a storage take writes again. What is being deleted goes, what is left stays; fine without a drain.

        Raises:
            KvcmError: as `StorageRegistry.cancel_drain`.
        """
        await self._registry.storages.cancel_drain(name)

    async def remove(self, name: str) -> None:
        """Remove a storage at once, and what lay on it in the background.

        Raises:
            KvcmError: as `StorageRegistry.retire`.
        """
        now = self._clock.now()
        await self._registry.storages.retire(name, now)
        # Other managers may be writing to it; alone, one on which nothing lies is gone for good.
        if not self._is_shared and not (await self._remaining_by_storage())[name].used_bytes:
            await self._forget(StorageDrain(name, now, is_removal=True))

    async def progress(self, *, is_leader: bool) -> list[DrainProgress]:
        """Return how far every drain is, ordered by name. One that does not lead knows of what is left only how much.

        Args:
            is_leader: whether this manager carries them out.

        Raises:
            StorageIOError: the store cannot be asked.
        """
        drains = self._registry.storages.drains()
        left = await self._remaining_by_storage() if drains else {}
        return [self._progress_of(drain, left[drain.name], is_leader=is_leader) for drain in drains]

    def _progress_of(self, drain: StorageDrain, left: _RemainingBytes, *, is_leader: bool) -> DrainProgress:
        now, course = self._clock.now(), self._courses.get(drain, _DrainState(0.0))
        is_begun, unreadable = now >= _begins_at(drain), self._registry.unreadable_instances()
        is_empty = not left.used_bytes and not unreadable
        if not is_leader:
            is_done = is_empty and now >= drain.started_at + self._settled_seconds
            return DrainProgress(drain, left.used_bytes, is_done, is_begun, unreadable=unreadable)
        is_marked = course.quiet_scans >= _QUIET_SCANS and not left.has_unmarked
        return DrainProgress(
            drain,
            left.used_bytes,
            is_done=is_marked and is_empty,
            has_started=is_begun,
            is_marked=is_marked,
            pinned=course.pinned,
            writing=course.writing,
            unreadable=unreadable,
        )

    async def resume(self, is_leader: Callable[[], bool] = lambda: True) -> None:
        """Look after every drain whose time has come.

        Args:
            is_leader: whether this manager is still the one to do so.

        Raises:
            KvcmError: of the first with which this was not possible; all have been tried.
        """
        now = self._clock.now()
        drains = self._registry.storages.drains()
        self._courses = {drain: self._courses.get(drain) or _DrainState(_begins_at(drain)) for drain in drains}
        due = [drain for drain in drains if self._courses[drain].next_scan <= now]
        left = await self._remaining_by_storage() if due else {}
        errors: list[KvcmError] = []
        for drain in due:
            try:
                await self._continue(drain, left[drain.name], is_leader)
            except KvcmError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    async def _continue(self, drain: StorageDrain, left: _RemainingBytes, is_leader: Callable[[], bool]) -> None:
        course = self._courses[drain]
        if left.has_unmarked or course.quiet_scans < _QUIET_SCANS:
            await self._scan(drain, course, left, is_leader)
        else:
            course.next_scan = self._clock.now() + _FIRST_PAUSE_SECONDS
            if drain.is_removal and not left.used_bytes:
                await self._forget(drain)

    async def _forget(self, drain: StorageDrain) -> None:
        """Forget a removed storage of which nothing is left, unless an instance may have more there, or somebody added
        it again."""
        if self._registry.unreadable_instances():
            return
        before = self._clock.now() - (_CLOCK_SKEW_SECONDS if self._is_shared else 0.0)
        if self._is_shared:
            await self._registry.refresh()  # whatever is added again from here on is younger
        config = self._registry.storages.find_draining(drain)
        if config is None or self._registry.unreadable_instances():
            return
        await self._forget_medium(config, before)
        await self._registry.storages.forget(drain)
        _log.info("storage_forgotten", storage=drain.name)

    async def _scan(
        self, drain: StorageDrain, course: _DrainState, left: _RemainingBytes, is_leader: Callable[[], bool]
    ) -> None:
        """Go through all indexes once, and note when to do so again."""
        began, settled = self._clock.now(), drain.started_at + self._settled_seconds
        found: Counter[str] = Counter()
        for cache in list(self._caches.all()):
            async for page in cache.index.scan(_BATCH_BLOCKS):
                if not is_leader() or not self._is_current(drain):
                    return
                await self._give_way()
                found += await self._remove_batch(drain, cache, page)
                await self._pause(len(page) / _BLOCKS_PER_SECOND)
        course.pinned, course.writing = found["pinned"], found["writing"]
        is_quiet = not found and not left.has_unmarked
        course.quiet_scans = course.quiet_scans + 1 if is_quiet and began >= settled else 0
        brief = is_quiet or found["marked"] > 0
        course.pause_seconds = _FIRST_PAUSE_SECONDS if brief else min(2 * course.pause_seconds, _LONGEST_PAUSE_SECONDS)
        course.next_scan = max(self._clock.now() + course.pause_seconds, settled if is_quiet else 0.0)

    async def _remove_batch(self, drain: StorageDrain, cache: InstanceCache, page: Sequence[int]) -> Counter[str]:
        """Mark what has to go of some blocks, and count that and what has to wait."""
        found: Counter[str] = Counter()
        keys: list[int] = []
        for key, record in zip(page, await cache.index.get(page), strict=True):
            there = [place for place in record.locations if place.storage == drain.name] if record is not None else []
            if any(self._is_drained(drain, place) for place in there):
                keys.append(key)
            if not drain.is_removal:
                found["pinned"] += sum(self._is_pinned(place) for place in there)
                found["writing"] += sum(place.status is LocationStatus.WRITING for place in there)
        if keys:
            reason = "RemoveStorage" if drain.is_removal else "DrainStorage"
            found["marked"] += await self._remover.remove_chosen(
                cache,
                keys,
                lambda _key, record: self._locations_to_remove(drain, cache.instance, record),
                reason=reason,
            )
        return +found

    def _is_current(self, drain: StorageDrain) -> bool:
        """Return whether it is neither cancelled nor taken back."""
        return self._registry.storages.find_draining(drain) is not None

    def _is_drained(self, drain: StorageDrain, location: Location) -> bool:
        if location.storage != drain.name or location.status is LocationStatus.DELETING or not self._is_current(drain):
            return False
        return drain.is_removal or (location.status is LocationStatus.SERVING and not self._is_pinned(location))

    def _is_pinned(self, location: Location) -> bool:
        return location.status is LocationStatus.SERVING and location.pinned_until > self._clock.now()

    def _locations_to_remove(self, drain: StorageDrain, instance: Instance, record: BlockRecord) -> LocationIds:
        """Return what goes of a block: what has to, and what is worth nothing without that."""
        alive = [place for place in record.locations if place.status is not LocationStatus.DELETING]
        going = {place.id for place in alive if self._is_drained(drain, place)}
        # What is being written elsewhere may complete the block.
        left = {name for place in alive if place.id not in going for name in place.spec_names}
        if going and left and not instance.is_readable_with(left):
            going.update(p.id for p in alive if p.status is LocationStatus.SERVING and not self._is_pinned(p))
        return lambda location: location.id in going

    async def _remaining_by_storage(self) -> defaultdict[str, _RemainingBytes]:
        """Return by storage what counts on it in any index."""
        used: Counter[str] = Counter()
        deleting: Counter[str] = Counter()
        for cache in list(self._caches.all()):
            await cache.index.refresh()
            for place, size in cache.index.usage_bytes.items():
                used[place.storage] += size
            for place, size in cache.index.deleting_bytes.items():
                deleting[place.storage] += size
        left: defaultdict[str, _RemainingBytes] = defaultdict(_RemainingBytes)
        left.update({name: _RemainingBytes(used[name], deleting[name]) for name in used})
        return left


def _begins_at(drain: StorageDrain) -> float:
    return drain.started_at + CANCEL_SECONDS if drain.is_removal else 0.0
