"""Removal: a location turns to deleting, its bytes go after a delay, then its record (design.md decision 15).

A removed key vanishes from every answer at once. Its record stays, holds the time from which its bytes may go, and
counts as usage until they are freed by the leader's deletion executor.

* Locations that served are protected for `delay_before_delete_ms`, since a reader may have got them a moment ago
  (invariant 6). A location that is still being written is deleted when its session expires: before that its writer
  could write the bytes again. It keeps its session's id, so that the session's end releases it earlier.
* A removed instance is remembered by the number of its registration until none of its blocks is left, so its id can be
  registered again at once. Its index is scanned a second time when all managers know of the removal, since a late write
  may have finished on one that did not.
* A report of missing bytes is checked against the storage first, since a reader can be wrong: a report removes nothing
  that the manager can read. A report of corrupt bytes has to name the recorded checksum; whether it is believed at once
  depends on who reports (`CorruptionReports`). Then the whole location goes, since its other parts are useless without
  the lost one; and the block's other locations, when they are useless alone.
* When the host of a memory pool made new memory, all its locations up to a stamp are forgotten. The state of
  the pool has that stamp (`floor`), so the leader finds it after a restart, too; readers recognise such bytes by their
  stamp. Every index is scanned at once, and again when all managers know of it.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import structlog

from kvcm.cache.instance_cache import InstanceCache, OpenCaches, batches
from kvcm.cache.pins import Pins
from kvcm.cache.prefix_match import ReadModes
from kvcm.cache.write_plan import Storages
from kvcm.index.change_events import ChangeEvents
from kvcm.index.meta_index import Change
from kvcm.model.clock import Clock, common_due
from kvcm.model.errors import KvcmError, StorageIOError
from kvcm.model.groups import InstanceGroup
from kvcm.model.instances import Instance
from kvcm.model.locations import BlockRecord, Location, LocationStatus, decode_chunk, uris_of
from kvcm.model.principals import Verb, call_context
from kvcm.model.uri import LocationUri
from kvcm.registry.registry import Registry
from kvcm.telemetry.events import EventLog

__all__ = [
    "ChooseLocations",
    "CorruptionReports",
    "InstanceRemovals",
    "LocationIds",
    "MissingPart",
    "MissingParts",
    "MissingReport",
    "PoolPurges",
    "Remover",
    "Reporter",
]

_FALLBACK_DELAY_MS = 1000
LocationIds = Callable[[Location], bool]
ChooseLocations = Callable[[int, BlockRecord], LocationIds]
"""From a block and its record to the locations that go."""


class Remover:
    """Takes blocks out of indexes.

    Args:
        clock: time source.
        find_group: from a group's name to its settings, None when it is gone.
        events: receives removed blocks.
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
        which: LocationIds = lambda _location: True,
        *,
        reason: str = "RemoveCache",
    ) -> int:
        """Mark locations of blocks as deleting.

        Args:
            cache: the instance.
            keys: blocks; unknown ones are fine.
            which: locations to remove, all by default.
            reason: of the event: the origin of the request.

        Returns:
            Number of locations that this call marked.
        """
        return await self.remove_chosen(cache, keys, lambda _key, _record: which, reason=reason)

    async def remove_chosen(
        self, cache: InstanceCache, keys: Iterable[int], choose: ChooseLocations, *, reason: str
    ) -> int:
        """Do `remove` for locations that are chosen block by block, by what the record is when it is changed."""
        removed = 0

        def mark(key: int, old: BlockRecord | None) -> BlockRecord | None:
            now = self._clock.now()  # a store that takes its time must not eat up the delay
            due = common_due(now, delay)
            return _mark_deleting(old, choose(key, old), common_due(now, 0.0), due) if old is not None else None

        for page in batches(list(keys), cache.batch_keys):
            delay = self.delay_seconds(cache.instance)
            changes = await cache.index.read_modify_write(page, mark)
            removed += _count_marked(changes)
            self._events.removed(cache.instance, changes, reason)
            await asyncio.sleep(0)
        return removed

    async def remove_all(
        self,
        cache: InstanceCache,
        which: LocationIds = lambda _location: True,
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
        """Return how long evicted locations stay readable for readers that have them."""
        group = self._find_group(instance.instance_group_name)
        if group is None:
            return _FALLBACK_DELAY_MS / 1000
        return group.cache_config.reclaim_strategy.delay_before_delete_ms / 1000


def _mark_deleting(old: BlockRecord, which: LocationIds, now: float, due: float) -> BlockRecord:
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


# Removal of instances: incremental, and resumed by the leader after a crash.

_BATCHES_AT_ONCE = 64
_REASON = "RemoveInstance"
_GRACE_SECONDS = 60.0  # other managers learn of a removal within a second; a write takes seconds at most
_RETRY_SECONDS = 600.0
_log = structlog.get_logger("kvcm.cache")


class InstanceRemovals:
    """Instances that are being removed.

    Args:
        registry: remembers them.
        caches: their indexes.
        remover: marks their blocks.
        pins: give back what those of the instances take of budgets.
        read_modes: forget the instances.
        clock: time source.
        is_shared: whether other managers work on the store.
    """

    def __init__(
        self,
        registry: Registry,
        caches: OpenCaches,
        remover: Remover,
        pins: Pins,
        read_modes: ReadModes,
        clock: Clock,
        *,
        is_shared: bool,
    ) -> None:
        self._registry = registry
        self._caches = caches
        self._remover = remover
        self._pins = pins
        self._read_modes = read_modes
        self._clock = clock
        self._grace_seconds = _GRACE_SECONDS if is_shared else 0.0
        self._next_scan: dict[int, float] = {}
        self._empty_since: dict[int, float] = {}

    async def begin(self, cache: InstanceCache) -> None:
        """Mark the first blocks of an instance that was just removed: all of them, unless it is large."""
        await self._remover.remove_all(cache, most_pages=_BATCHES_AT_ONCE, reason=_REASON)

    async def resume(self) -> None:
        """Mark the rest of every removed instance, and forget those that have no blocks any more.

        Raises:
            KvcmError: of the first instance with which this was not possible; all have been tried.
        """
        errors: list[KvcmError] = []
        for removal in self._registry.instances.removals():
            try:
                await self._resume_one(self._caches.find_removed(removal.instance, removal.placement))
            except KvcmError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    async def _resume_one(self, cache: InstanceCache) -> None:
        uid, now = cache.placement.uid, self._clock.now()
        await cache.index.refresh()
        if cache.index.key_count:
            self._empty_since.pop(uid, None)
            if now >= self._next_scan.get(uid, 0.0):
                await self._remover.remove_all(cache, reason=_REASON)
                await self._forget_pins(cache)
                pause = _RETRY_SECONDS if uid in self._next_scan else _GRACE_SECONDS
                self._next_scan[uid] = self._clock.now() + pause
            return
        since = self._empty_since.setdefault(uid, now)
        is_over = now >= since + self._grace_seconds
        if is_over or since == now:
            await self._forget_pins(cache)
        if is_over:
            await self._read_modes.forget(uid)
            await cache.index.drop()
            await self._registry.instances.forget_removal(uid)
            self._empty_since.pop(uid, None)
            self._next_scan.pop(uid, None)

    async def _forget_pins(self, cache: InstanceCache) -> None:
        try:
            await self._pins.remove_instance(cache)
        except KvcmError as error:  # they end at their deadlines all the same
            _log.warning("pins_not_forgotten", registration=cache.placement.uid, reason=str(error))


# Reports of missing and of corrupt bytes.

_CHECK_TIMEOUT_SECONDS = 10.0  # for one page of parts; a storage that hangs must not keep the caller


class MissingPart(NamedTuple):
    """A part of a block that a reader could not use.

    Attributes:
        key: of the block.
        uri: as it was answered.
        mismatched_checksum: 0 when its bytes are not there; otherwise they are not those of this checksum.
    """

    key: int
    uri: str
    mismatched_checksum: int = 0


class MissingReport(NamedTuple):
    """What became of a report.

    Attributes:
        removed_locations: locations that went.
        unconfirmed_parts: parts whose bytes are there after all, that no location names any more, that have another
            checksum now, or none, or that wait for a second reporter.
    """

    removed_locations: int
    unconfirmed_parts: int


class _ReportedLocation(NamedTuple):
    """The serving location that a reported part belongs to."""

    part: MissingPart
    location_id: str
    storage: str
    is_pinned: bool


@dataclass(frozen=True, slots=True)
class Reporter:
    """Who reports.

    Attributes:
        name: of the principal, or its address where it has none.
        may_report: whether its word is enough for blocks that are not pinned.
        may_remove: whether its word is enough for all, since it may remove them anyway.
    """

    name: str
    may_report: bool
    may_remove: bool

    @classmethod
    def of_call(cls) -> Reporter:
        """Return the reporter of the present call."""
        call = call_context.get()
        verbs = call.principal.verbs
        return cls(call.principal.name or call.peer, Verb.REPORT in verbs, Verb.REMOVE in verbs)


_SUSPECTED_SECONDS: Final = 3600.0
_MOST_SUSPECTS: Final = 65_536
_RATE_SECONDS: Final = 60.0


class CorruptionReports:
    """Decides which reports of corrupt bytes are believed.

    The manager cannot read the bytes itself, and every reader knows the checksums of what it looks up: believed at
    once, a report would be a right to delete.

    * Of a reporter that may neither report nor remove, and of pinned blocks, two different reporters have to say the
      same within an hour. What one said is remembered here, by this manager.
    * A reporter is believed so many times a minute: a host whose memory is broken finds every block corrupt.

    Args:
        clock: time source.
        most_per_minute: locations of each reporter; 0 for any number.
    """

    def __init__(self, clock: Clock, most_per_minute: int = 0) -> None:
        self._clock = clock
        self.most_per_minute = most_per_minute
        self._suspects: OrderedDict[tuple[int, int, str], tuple[str, float]] = OrderedDict()
        self._since = 0.0
        self._believed: Counter[str] = Counter()  # in this minute

    def believed(self, uid: int, reported: Sequence[_ReportedLocation], reporter: Reporter) -> list[_ReportedLocation]:
        """Return the reported parts of an instance's blocks that count as corrupt, and remember the others."""
        now = self._clock.now()
        if not 0 <= now - self._since < _RATE_SECONDS:
            self._since = now
            self._believed.clear()
        corrupt: list[_ReportedLocation] = []
        seen: set[tuple[int, str]] = set()  # several parts of a location count once
        for each in reported:
            place = each.part.key, each.location_id
            if place in seen or (self._has_budget(reporter.name) and self._is_believed(uid, each, reporter, now)):
                self._believed[reporter.name] += place not in seen
                seen.add(place)
                corrupt.append(each)
        return corrupt

    def _has_budget(self, name: str) -> bool:
        return not self.most_per_minute or self._believed[name] < self.most_per_minute

    def _is_believed(self, uid: int, reported: _ReportedLocation, reporter: Reporter, now: float) -> bool:
        if reporter.may_remove or (reporter.may_report and not reported.is_pinned):
            return True
        suspect = uid, reported.part.key, reported.location_id
        first, at = self._suspects.pop(suspect, ("", 0.0))
        if first and first != reporter.name and at <= now < at + _SUSPECTED_SECONDS:
            return True
        self._suspects[suspect] = reporter.name, now
        if len(self._suspects) > _MOST_SUSPECTS:
            self._suspects.popitem(last=False)
        return False


class MissingParts:
    """Takes reports.

    Args:
        storages: the open storages.
        remover: takes locations out of indexes.
        clock: time source.

    Attributes:
        corruption: decides which reports of corrupt bytes are believed.
        mismatches: parts that were found corrupt, by instance group and storage.
    """

    def __init__(self, storages: Storages, remover: Remover, clock: Clock) -> None:
        self._storages = storages
        self._remover = remover
        self._clock = clock
        self.corruption = CorruptionReports(clock)
        self.mismatches: Counter[tuple[str, str]] = Counter()

    async def report(self, cache: InstanceCache, parts: Sequence[MissingPart], reporter: Reporter) -> MissingReport:
        """Check parts, and remove the locations whose bytes are missing or corrupt.

        Raises:
            StorageIOError: a storage cannot be asked; nothing is removed.
        """
        holders = await self._find_locations(cache, dict.fromkeys(parts))
        reported = [holder for holder in holders if holder.part.mismatched_checksum]
        corrupt = self.corruption.believed(cache.placement.uid, reported, reporter)
        if len(corrupt) < len(reported):
            text, count = "corrupt_bytes_unconfirmed", len(reported) - len(corrupt)
            _log.warning(text, instance=cache.instance.instance_id, reporter=reporter.name, parts=count)
        lost = await self._without_bytes([holder for holder in holders if not holder.part.mismatched_checksum])
        removed = await self._remove(cache, lost, "missing") + await self._remove(cache, corrupt, "corrupt")
        self.mismatches.update((cache.instance.instance_group_name, holder.storage) for holder in corrupt)
        confirmed = {holder.part for holder in (*lost, *corrupt)}
        return MissingReport(removed, sum(part not in confirmed for part in parts))

    async def _remove(self, cache: InstanceCache, useless: Sequence[_ReportedLocation], reason: str) -> int:
        ids: defaultdict[int, set[str]] = defaultdict(set)
        for holder in useless:
            ids[holder.part.key].add(holder.location_id)
        removed = await self._remover.remove_chosen(
            cache, ids, lambda key, record: _unusable_without(cache, record, ids[key]), reason=reason
        )
        if removed:
            storages = sorted({holder.storage for holder in useless})
            _log.warning(f"bytes_{reason}", instance=cache.instance.instance_id, storages=storages, locations=removed)
        return removed

    async def _find_locations(self, cache: InstanceCache, parts: Collection[MissingPart]) -> list[_ReportedLocation]:
        """Return the reported parts that serving locations have, those that are corrupt with the same checksum."""
        reported: defaultdict[int, set[MissingPart]] = defaultdict(set)
        for part in parts:
            reported[part.key].add(part)
        holders: list[_ReportedLocation] = []
        now = self._clock.now()
        for page in batches(list(reported), cache.batch_keys):
            for key, record in zip(page, await cache.index.get(page), strict=True):
                for location in record.locations if record is not None else ():
                    if location.status is LocationStatus.SERVING:
                        named = reported[key].intersection(_parts_of_location(key, location))
                        is_pinned = location.pinned_until > now
                        holders += [_ReportedLocation(part, location.id, location.storage, is_pinned) for part in named]
            await asyncio.sleep(0)
        return holders

    async def _without_bytes(self, holders: Sequence[_ReportedLocation]) -> list[_ReportedLocation]:
        by_storage: defaultdict[str, list[_ReportedLocation]] = defaultdict(list)
        for holder in holders:
            by_storage[holder.storage].append(holder)
        lost: list[_ReportedLocation] = []
        for storage, there in by_storage.items():
            for page in batches(there):
                exist = await self._check_existence(storage, [holder.part.uri for holder in page])
                lost += [holder for holder, exists in zip(page, exist, strict=True) if not exists]
        return lost

    async def _check_existence(self, storage: str, uris: Sequence[str]) -> list[bool]:
        backend = self._storages.backend(storage)
        if backend is None:
            raise StorageIOError(f"storage {storage!r} is not open: whether the bytes are missing cannot be asked")
        if not self._storages.is_available(storage):
            raise StorageIOError(f"storage {storage!r} is not available: whether the bytes are missing cannot be asked")
        try:
            async with asyncio.timeout(_CHECK_TIMEOUT_SECONDS):
                return await backend.exists(uris)
        except TimeoutError:
            raise StorageIOError(
                f"storage {storage!r} did not answer within {_CHECK_TIMEOUT_SECONDS:g} s: try again"
            ) from None
        except Exception as error:  # whatever it raises, it did not say that the bytes are missing
            raise StorageIOError(f"storage {storage!r} cannot be asked: {error}") from error


def _parts_of_location(key: int, location: Location) -> set[MissingPart]:
    """Return the state of a location: of each part whether its bytes are missing, or do not have its checksum."""
    specs = decode_chunk(location.chunk).specs
    return {MissingPart(key, spec.uri, checksum) for spec in specs for checksum in (0, spec.checksum)}


def _unusable_without(cache: InstanceCache, record: BlockRecord, lost_ids: Collection[str]) -> LocationIds:
    """Return which locations of a block are worth nothing once those of `lost_ids` are gone."""

    def is_lost(location: Location) -> bool:
        return location.status is LocationStatus.SERVING and location.id in lost_ids

    # What is still being written is its writer's, and may complete the block.
    kept = [location for location in record.locations if location.status is not LocationStatus.DELETING]
    left = {name for location in kept if not is_lost(location) for name in location.spec_names}
    all_go = any(map(is_lost, kept)) and not cache.instance.is_readable_with(left)
    return lambda location: is_lost(location) or (all_go and location.status is LocationStatus.SERVING)


# Memory of pools that is gone.

_BATCH_BLOCKS: Final = 256
_PURGE_RETRY_SECONDS: Final = 60.0


class _LostMemory(Protocol):
    """A pool, as far as this is concerned."""

    async def lost_stamp(self) -> int:
        """Return the stamp up to which memory is gone and locations are still to be forgotten, 0 for none.

        Raises:
            StorageIOError: the store cannot be asked.
        """

    async def purged(self, floor: int) -> None:
        """Learn that all locations up to a stamp were forgotten.

        Raises:
            StorageIOError: the store cannot be asked.
        """


class PoolPurges:
    """Forgets what lay in memory that is gone.

    Args:
        pools: returns the open pools by name.
        caches: the indexes.
        remover: marks blocks.
        clock: time source.
        give_way: lets requests have their turn.
    """

    def __init__(
        self,
        pools: Callable[[], Mapping[str, _LostMemory]],
        caches: OpenCaches,
        remover: Remover,
        clock: Clock,
        give_way: Callable[[], Awaitable[None]] = lambda: asyncio.sleep(0),
    ) -> None:
        self._pools = pools
        self._caches = caches
        self._remover = remover
        self._clock = clock
        self._give_way = give_way
        self._again_at: dict[tuple[str, int], float] = {}  # by name and floor, after the first lap

    async def resume(self, is_leader: Callable[[], bool] = lambda: True) -> None:
        """Forget the locations that are due.

        Args:
            is_leader: whether this manager is still the one to do so.

        Raises:
            KvcmError: the store failed; the next call begins again.
        """
        now, pools = self._clock.now(), dict(self._pools())
        floors = {name: floor for name, pool in pools.items() if (floor := await pool.lost_stamp())}
        self._again_at = {key: at for key, at in self._again_at.items() if floors.get(key[0]) == key[1]}
        due = {name: floor for name, floor in floors.items() if now >= self._again_at.get((name, floor), now)}
        if not due:
            return
        removed = await self._scan(due, is_leader)
        if removed is None:
            return
        _log.warning("pool_memory_lost", storages=sorted(due), locations=removed)
        for name, floor in due.items():
            if (name, floor) in self._again_at:
                await pools[name].purged(floor)
            self._again_at.setdefault((name, floor), self._clock.now() + _PURGE_RETRY_SECONDS)

    async def _scan(self, floors: Mapping[str, int], is_leader: Callable[[], bool]) -> int | None:
        """Go through all indexes, and return how many locations were marked; None when another manager leads by now."""
        removed = 0
        for cache in list(self._caches.all()):
            async for page in cache.index.scan(_BATCH_BLOCKS):
                if not is_leader():
                    return None
                await self._give_way()
                removed += await self._remove_batch(cache, page, floors)
        return removed

    async def _remove_batch(self, cache: InstanceCache, page: Sequence[int], floors: Mapping[str, int]) -> int:
        records = zip(page, await cache.index.get(page), strict=True)
        keys = [key for key, record in records if record is not None and _lost(record.locations, floors)]
        if not keys:
            return 0
        return await self._remover.remove_chosen(
            cache, keys, lambda _key, record: _lost_locations(cache, record, floors), reason="missing"
        )


def _lost_locations(cache: InstanceCache, record: BlockRecord, floors: Mapping[str, int]) -> LocationIds:
    """Return the locations of a block that go: lost ones, and those that are worth nothing without them."""
    going = _lost(record.locations, floors)
    alive = [each for each in record.locations if each.status is not LocationStatus.DELETING]
    left = {name for each in alive if each.id not in going for name in each.spec_names}
    if going and left and not cache.instance.is_readable_with(left):
        going |= {each.id for each in alive if each.status is LocationStatus.SERVING}
    return lambda location: location.id in going


def _lost(locations: Iterable[Location], floors: Mapping[str, int]) -> set[str]:
    return {each.id for each in locations if (floor := floors.get(each.storage)) and _is_lost(each, floor)}


def _is_lost(location: Location, floor: int) -> bool:
    stamps = (LocationUri.parse(uri).range_id for uri in uris_of(location.chunk) if uri)
    return location.status is not LocationStatus.DELETING and any(stamp and stamp <= floor for stamp in stamps)
