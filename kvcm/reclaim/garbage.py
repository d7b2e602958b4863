"""Garbage collection: removes useless metadata.

* Orphan chains: blocks whose prefix is gone, when it has been for `GRACE_SECONDS` since this collector first saw it,
and
  only in instances that are read by prefix match alone: in others every block is useful by itself (invariant 7).
* Locations whose bytes are missing, on request only: storages are slow.
* Write sessions that are overdue.

The leader scans all indexes slowly and for ever, a few blocks at a time. It judges a suspect when its grace is over,
not when the next lap comes by. A request scans everything at once. The times of first sight are known to this process
only: a new leader counts from its own.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, takewhile
from typing import Final, NamedTuple, Protocol

import structlog

from kvcm.index.meta_index import Change, IndexHandle, MetaIndex
from kvcm.model.clock import Clock
from kvcm.model.errors import KvcmError, NotReadyError, StorageIOError, UnknownInstanceError
from kvcm.model.instances import Instance
from kvcm.model.locations import BlockRecord, Location, LocationStatus, decode_chunk
from kvcm.reclaim.background import StorageProvider
from kvcm.reclaim.victims import newly_deleting
from kvcm.storage.file import FileStorage
from kvcm.store.store import Revision

__all__ = [
    "GRACE_SECONDS",
    "FreedSpace",
    "GarbageCollector",
    "GarbageReport",
    "LostLocations",
    "OrphanChain",
    "SlotReport",
    "orphans",
    "without_lost",
]

# Blocks whose prefix is gone: found from their parents, and marked from the tail to the head (invariant 7).
#
# The parent of such a block has no location that serves or is being written, or no record at all; all blocks behind it
# are as useless as itself. A block stays as long as a writer is at it, a pin holds it, or a block behind it stays. The
# prefix may come back at any time: it is looked at again right before every step, and on an index of this process's
# memory nothing happens in between. On a shared store a writer may slip in, and finds blocks gone that it could have
# kept.

_STEP: Final = 32  # blocks that are marked without a pause
_MOST_FETCHED: Final = 256  # families that are fetched at once


class FreedSpace(NamedTuple):
    """Blocks and bytes that were marked, or would be."""

    blocks: int
    size_bytes: int


async def orphans(index: MetaIndex, keys: Sequence[int]) -> dict[int, bool]:
    """Return for every serving block whether its prefix is gone; blocks that do not serve are left out."""
    records = dict(zip(keys, await index.get(keys), strict=True))
    serving = {key: record.parent for key, record in records.items() if record is not None and _serving(record)}
    above = {parent for parent in serving.values() if parent is not None} - records.keys()
    records |= dict(zip(above, await index.get(list(above)), strict=True)) if above else {}
    return {key: parent is not None and not _is_living(records[parent]) for key, parent in serving.items()}


class OrphanChain:
    """A block whose prefix is gone, and all blocks behind it.

    Args:
        index: the index.
        top: the block.
        clock: time source.
        delay_seconds: how long marked locations stay readable for clients that matched them.
    """

    def __init__(self, index: MetaIndex, top: int, clock: Clock, delay_seconds: float) -> None:
        self._index = index
        self._top = top
        self._clock = clock
        self._delay_seconds = delay_seconds
        self._gone: set[int] = set()

    async def mark(self) -> AsyncIterator[list[Change]]:
        """Mark the blocks as deleting, from the tail to the head; yield the changes of each step."""
        async for step in self._steps():
            if not await self._is_orphan():
                return
            chosen = list(await self._choose(step))
            changes = await self._index.read_modify_write(chosen, lambda _key, old: self._marked(old))
            self._gone -= {change.key for change in changes if not newly_deleting(change.old, change.new)}
            if changes:
                yield changes
            await asyncio.sleep(0)

    async def count(self) -> FreedSpace:
        """Return what `mark` would mark now, and change nothing."""
        blocks = size_bytes = 0
        async for step in self._steps():
            if not await self._is_orphan():
                break
            chosen = await self._choose(step)
            blocks += len(chosen)
            size_bytes += sum(each.size_bytes for record in chosen.values() for each in _serving(record))
            await asyncio.sleep(0)
        return FreedSpace(blocks, size_bytes)

    async def _is_orphan(self) -> bool:
        (record,) = await self._index.get((self._top,))
        if record is None or record.parent is None:
            return False  # its descendants are found by themselves, and have a grace of their own
        (parent,) = await self._index.get((record.parent,))
        return not _is_living(parent)

    async def _choose(self, keys: Sequence[int]) -> dict[int, BlockRecord]:
        """Return which of these blocks go now; whatever is behind a block comes before it."""
        families = dict(zip(keys, await self._index.families(keys), strict=True))
        wanted = [*keys, *(key for family in families.values() for key in family)]
        records = dict(zip(wanted, await self._index.get(wanted), strict=True))
        chosen: dict[int, BlockRecord] = {}
        for key in keys:
            behind = [child for child in families[key] if child != self._top]
            has_living = any(child not in self._gone and _is_living(records[child]) for child in behind)
            self._gone.difference_update(behind)
            record = records[key]
            if record is not None and not has_living and _is_evictable(record, self._clock.now()):
                chosen[key] = record
                self._gone.add(key)
        return chosen

    def _marked(self, old: BlockRecord | None) -> BlockRecord | None:
        now = self._clock.now()
        if old is None or not _is_evictable(old, now):
            return old
        return old._replace(locations=tuple(_deleting(each, now + self._delay_seconds) for each in old.locations))

    async def _steps(self) -> AsyncIterator[list[int]]:
        step: list[int] = []
        async for key in self._tail_first():
            step.append(key)
            if len(step) == _STEP:
                yield step
                step = []
        if step:
            yield step

    async def _tail_first(self) -> AsyncIterator[int]:
        """Yield the blocks, each after all that are behind it. Memory: one family per block of one chain."""
        fetched: dict[int, Sequence[int]] = {}
        path: list[tuple[int, Iterator[int]]] = [(self._top, iter(await self._family(self._top, fetched)))]
        steps = 0
        while path:
            key, remainder = path[-1]
            child = next(remainder, None)
            if child is None:
                path.pop()
                yield key
            elif child != self._top:  # keys that are no hashes can make a ring
                path.append((child, iter(await self._family(child, fetched))))
                steps += 1
                if steps % _STEP == 0:
                    await asyncio.sleep(0)

    async def _family(self, key: int, fetched: dict[int, Sequence[int]]) -> Sequence[int]:
        family = fetched.pop(key, None)
        if family is None:
            (family,) = await self._index.families((key,))
        if len(family) > 1:  # their own families in one go, for an index that is asked over the network
            some = list(islice(family, _MOST_FETCHED))
            fetched.update(zip(some, await self._index.families(some), strict=True))
        return family


def _serving(record: BlockRecord) -> list[Location]:
    return [each for each in record.locations if each.status is LocationStatus.SERVING]


def _is_living(record: BlockRecord | None) -> bool:
    return record is not None and any(each.status is not LocationStatus.DELETING for each in record.locations)


def _is_evictable(record: BlockRecord, now: float) -> bool:
    """Whether a block serves, and neither a writer nor a pin holds it."""
    serving = _serving(record)
    is_written = any(each.status is LocationStatus.WRITING for each in record.locations)
    return bool(serving) and not is_written and all(each.pinned_until <= now for each in serving)


def _deleting(location: Location, due: float) -> Location:
    if location.status is not LocationStatus.SERVING:
        return location
    return location._replace(status=LocationStatus.DELETING, deadline=due)


# Metadata without bytes: storages are asked for the bytes of what serves, and what lost some is given up.

_QUERY_SECONDS: Final = 30.0  # a storage that hangs must not keep the caller


class LostLocations(NamedTuple):
    """Locations of a block that miss bytes, by id."""

    key: int
    location_ids: frozenset[str]


class _Part(NamedTuple):
    key: int
    location_id: str
    uri: str


_Query = Callable[[Sequence[str]], Awaitable[list[bool]]]
"""Returns per uri whether its bytes are there."""


async def _lost_locations(
    index: MetaIndex, keys: Sequence[int], query_of: Callable[[Location], _Query | None]
) -> list[LostLocations]:
    """Ask the storages of some blocks for their bytes.

    Args:
        index, keys: the blocks.
        query_of: returns how a location is asked for, always the same for a storage and a status; None for not at all.

    Raises:
        StorageIOError: a storage cannot be asked.
    """
    parts: defaultdict[tuple[str, LocationStatus], list[_Part]] = defaultdict(list)
    queries: dict[tuple[str, LocationStatus], _Query] = {}
    for key, record in zip(keys, await index.get(keys), strict=True):
        for location in record.locations if record is not None else ():
            query = query_of(location)
            if query is not None:
                queries[location.storage, location.status] = query
                uris = (spec.uri for spec in decode_chunk(location.chunk).specs if spec.uri)
                parts[location.storage, location.status] += [_Part(key, location.id, uri) for uri in uris]
    lost: defaultdict[int, set[str]] = defaultdict(set)
    for asked, checked in parts.items():
        there = await _find_missing(asked[0], queries[asked], [part.uri for part in checked])
        for part, exists in zip(checked, there, strict=True):
            if not exists:
                lost[part.key].add(part.location_id)
    return [LostLocations(key, frozenset(ids)) for key, ids in lost.items()]


def without_lost(
    old: BlockRecord | None, lost_ids: Collection[str], instance: Instance, due: float
) -> BlockRecord | None:
    """Return the record with lost locations marked as deleting, and the others that are unreadable without them.

    Locations being written stay, and may complete the block. A pin does not protect lost bytes.
    """
    if old is None:
        return None
    serving = {each.id for each in old.locations if each.status is LocationStatus.SERVING}
    going = serving & set(lost_ids)
    left = [e for e in old.locations if e.status is not LocationStatus.DELETING and e.id not in going]
    if not going:
        return old
    if not instance.is_readable_with({name for each in left for name in each.spec_names}):
        going = serving

    def mark(location: Location) -> Location:
        if location.id not in going or location.status is not LocationStatus.SERVING:
            return location
        return location._replace(status=LocationStatus.DELETING, deadline=due)

    return old._replace(locations=tuple(map(mark, old.locations)))


def _without_lost_writes(old: BlockRecord | None, lost_ids: Collection[str], due: float) -> BlockRecord | None:
    """Return the record with lost locations that are being written marked as deleting, as an abort does."""

    def mark(location: Location) -> Location:
        if location.status is not LocationStatus.WRITING or location.id not in lost_ids:
            return location
        return location._replace(status=LocationStatus.DELETING, deadline=due)

    locations = tuple(map(mark, old.locations)) if old is not None else ()
    return old if old is None or locations == old.locations else old._replace(locations=locations)


async def _find_missing(storage: str, exist: _Query, uris: Sequence[str]) -> list[bool]:
    try:
        async with asyncio.timeout(_QUERY_SECONDS):
            return await exist(uris)
    except TimeoutError:
        raise StorageIOError(f"storage {storage!r} did not answer within {_QUERY_SECONDS:g} s: try again") from None
    except KvcmError:
        raise
    except Exception as error:  # whatever it raises, it did not say that the bytes are missing
        raise StorageIOError(f"storage {storage!r} cannot be asked: {error}") from error


GRACE_SECONDS: Final = 600.0
_WITHOUT_PREFIX: Final = "without_prefix"
_WITHOUT_BYTES: Final = "without_bytes"
_SLICE: Final = 128  # blocks looked at without a pause
_CHECKED_PER_SECOND: Final = 20_000  # blocks whose bytes are asked for
_LAP_SECONDS: Final = 30.0  # from one background lap to the next, at least
_IDLE_SECONDS: Final = 1.0
_MOST_SUSPECTS: Final = 1_000_000  # of all indexes; the rest is found in a later lap
_log = structlog.get_logger("kvcm.reclaim")
_OnMarked = Callable[[Instance, Sequence[Change], str], None]
"""Receives marked blocks and their kind of garbage."""


class _GarbageProvider(Protocol):
    """Knows the indexes, how they are read, and the writers."""

    def indexes(self) -> Iterable[IndexHandle]:
        """Return the index of every instance, also of those that are being removed."""

    def delay_seconds(self, instance: Instance) -> float:
        """Return how long a deleted location stays readable for clients that matched it."""

    async def is_prefix_match_only(self, uid: int) -> bool:
        """Return whether an instance was read by prefix match alone, through whatever manager."""

    async def overdue_sessions(self) -> int:
        """Return how many write sessions have to be ended."""

    async def expire_sessions(self) -> int:
        """End the write sessions that are overdue, and return how many there were."""

    async def flush(self) -> None:
        """Return when all changes are as durable as configured."""


@dataclass(frozen=True, slots=True)
class GarbageReport:
    """The garbage that was found, and marked unless it was a dry run.

    Attributes:
        blocks: blocks that were looked at.
        without_bytes: locations that went because their bytes, or those of what they belong with, are missing.
        without_prefix: blocks whose prefix is gone for longer than the grace.
        expired_sessions: write sessions that were overdue, of all instances.
        freed_bytes: of these locations; they are free when the deletions are done.
    """

    blocks: int = 0
    without_bytes: int = 0
    without_prefix: int = 0
    expired_sessions: int = 0
    freed_bytes: int = 0


class SlotReport(NamedTuple):
    """What a verification of slots found: blocks that were looked at, and locations that were given up."""

    blocks: int
    lost: int


class GarbageCollector:
    """Collects garbage.

    Args:
        provider: knows the indexes.
        storages: the open storages.
        clock: time source.
        blocks_per_second: looked at in the background; 0 for none.
        on_marked: receives all marked blocks.
        pause: waits some seconds, for what goes through everything at once.
    """

    def __init__(
        self,
        provider: _GarbageProvider,
        storages: StorageProvider,
        clock: Clock,
        *,
        blocks_per_second: int = 2000,
        on_marked: _OnMarked = lambda _instance, _changes, _kind: None,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._provider = provider
        self._storages = storages
        self._clock = clock
        self._blocks_per_second = blocks_per_second
        self._on_marked = on_marked
        self._pause = pause
        self._suspects: defaultdict[int, dict[int, float]] = defaultdict(dict)  # by uid: blocks, and when to judge them
        self._scanned: dict[int, Revision] = {}  # by uid: what the last whole scan saw, and noted all suspects of
        self._lap: AsyncIterator[int] | None = None
        self._next_lap = 0.0
        self.found: Counter[str] = Counter({_WITHOUT_PREFIX: 0, _WITHOUT_BYTES: 0})
        """Totals since the manager started: blocks without prefix, locations without bytes."""

    # ── in the background ──

    async def run(self, is_leader: Callable[[], bool] = lambda: True) -> None:
        """Collect blocks whose prefix is gone while this manager leads, until cancelled."""
        led = False
        while True:
            leads = is_leader() and self._blocks_per_second > 0
            if led and not leads:  # what it saw so far is out of date when it leads again
                self._suspects.clear()
                self._scanned.clear()
                self._lap = None
            led = leads
            await self._pause(await self._round() if leads else _IDLE_SECONDS)

    async def _round(self) -> float:
        """Look at some blocks, and return how long to pause."""
        try:
            scanned = await self.step()
        except KvcmError as error:  # the store failed: the next lap starts over
            _log.warning("garbage_interrupted", reason=str(error))
            scanned, self._lap = 0, None
        except Exception:
            _log.exception("garbage_failed")
            scanned, self._lap = 0, None
        return scanned / self._blocks_per_second if scanned else _IDLE_SECONDS

    async def step(self) -> int:
        """Judge due suspects and scan the next few blocks; return how many, 0 between two laps.

        Raises:
            KvcmError: the store failed.
        """
        for handle in self._current():
            if self._suspects.get(handle.uid):  # of most there are none
                await self._collect_suspects(handle, _SLICE, dry_run=False)
        now = self._clock.now()
        if self._lap is None:
            if now < self._next_lap:
                return 0
            self._lap, self._next_lap = self._whole_lap(), now + _LAP_SECONDS
        scanned = await anext(self._lap, 0)
        if not scanned:
            self._lap = None
        return scanned

    async def _whole_lap(self) -> AsyncIterator[int]:
        for handle in self._current():
            revision = handle.meta_index.revision
            if revision is not None and revision == self._scanned.get(handle.uid):
                continue  # it has the blocks without prefix that it had
            are_noted = True
            async for batch in handle.meta_index.scan(min(_SLICE, max(1, self._blocks_per_second // 4))):
                are_noted &= await self._scan(handle, batch)
                yield len(batch)
            if revision is not None and are_noted:
                self._scanned[handle.uid] = revision

    def _current(self) -> list[IndexHandle]:
        current = list(self._provider.indexes())
        uids = {handle.uid for handle in current}
        for uid in self._suspects.keys() - uids:
            del self._suspects[uid]
        for uid in self._scanned.keys() - uids:
            del self._scanned[uid]
        return current

    # ── on demand ──

    async def collect(self, instance_id: str = "", *, dry_run: bool, check_bytes: bool) -> GarbageReport:
        """Look at everything once.

        Args:
            instance_id: only the blocks of this instance, "" for all.
            dry_run: whether to count only.
            check_bytes: whether to ask the storages for the bytes, too.

        Raises:
            UnknownInstanceError: there is no such instance.
            StorageIOError: the store or a storage failed; blocks marked by then stay marked.
        """
        counts: Counter[str] = Counter()
        current = [handle for handle in self._current() if instance_id in {"", handle.instance_id}]
        if instance_id and not current:
            raise UnknownInstanceError(f"instance {instance_id!r} is not registered")
        for handle in current:
            async for batch in handle.meta_index.scan(_SLICE):
                counts["blocks"] += len(batch)
                await self._scan(handle, batch)
                if check_bytes:
                    counts += await self._check_bytes(handle, batch, dry_run=dry_run)
                    await self._pause(len(batch) / _CHECKED_PER_SECOND)
                await asyncio.sleep(0)
            counts += await self._collect_suspects(handle, None, dry_run=dry_run)
        ended = self._provider.overdue_sessions() if dry_run else self._provider.expire_sessions()
        counts["expired_sessions"] += await ended
        if not dry_run:
            await self._provider.flush()
        return GarbageReport(**counts)

    # ── after a restore ──

    async def verify_slots(self, name: str, storage: FileStorage, is_current: Callable[[], bool]) -> SlotReport:
        """Give up the locations on a storage whose slots of packed files are not theirs any more.

        Args:
            name: of the storage.
            storage: as it is open.
            is_current: whether to go on, asked again and again.

        Raises:
            NotReadyError: it was not to go on.
            StorageIOError: the store or a storage failed; blocks marked by then stay marked.
        """

        def is_its(location: Location) -> _Query | None:
            if location.storage != name or location.status is LocationStatus.DELETING:
                return None
            return partial(storage.verify, is_written=location.status is LocationStatus.SERVING)

        counts: Counter[str] = Counter(blocks=0, without_bytes=0)
        for handle in self._current():
            async for batch in handle.meta_index.scan(_SLICE):
                if not is_current():
                    raise NotReadyError("the store or the leader changed meanwhile: the storage is verified again")
                counts["blocks"] += len(batch)
                counts += await self._give_up(handle, batch, is_its, dry_run=False)
                await self._pause(len(batch) / _CHECKED_PER_SECOND)
        await self._provider.flush()
        return SlotReport(counts["blocks"], counts[_WITHOUT_BYTES])

    # ── blocks whose prefix is gone ──

    async def _scan(self, handle: IndexHandle, keys: Sequence[int]) -> bool:
        """Note which blocks have no prefix, and from when on that is garbage; return whether all could be noted."""
        found = await orphans(handle.meta_index, keys)
        suspects, due = self._suspects[handle.uid], self._clock.now() + GRACE_SECONDS
        is_full = sum(map(len, self._suspects.values())) >= _MOST_SUSPECTS
        for key in keys:
            if not found.get(key, False):
                suspects.pop(key, None)
            elif not is_full:
                suspects.setdefault(key, due)
        return not is_full

    async def _collect_suspects(self, handle: IndexHandle, most: int | None, *, dry_run: bool) -> Counter[str]:
        """Judge due suspects of an index, the first `most` at most."""
        suspects, now = self._suspects[handle.uid], self._clock.now()
        due = list(islice(takewhile(lambda key: suspects[key] <= now, suspects), most))  # first seen, first judged
        counts: Counter[str] = Counter()
        if not due:
            return counts
        if not await self._provider.is_prefix_match_only(handle.uid):
            suspects.clear()
            self._scanned.pop(handle.uid, None)
            return counts
        for start in range(0, len(due), _SLICE):
            some = due[start : start + _SLICE]
            still = await orphans(handle.meta_index, some)
            for key in some:
                if still.get(key, False):
                    counts += await self._collect_chain(handle, key, dry_run=dry_run)
                else:
                    suspects.pop(key, None)
            await asyncio.sleep(0)
        return counts

    async def _collect_chain(self, handle: IndexHandle, top: int, *, dry_run: bool) -> Counter[str]:
        chain = OrphanChain(handle.meta_index, top, self._clock, self._provider.delay_seconds(handle.instance))
        if dry_run:
            blocks, size_bytes = await chain.count()
            return Counter(without_prefix=blocks, freed_bytes=size_bytes)
        counts: Counter[str] = Counter()
        async for changes in chain.mark():
            counts[_WITHOUT_PREFIX] += sum(bool(newly_deleting(change.old, change.new)) for change in changes)
            counts["freed_bytes"] += self._report(handle.instance, changes, _WITHOUT_PREFIX)
        # If it stays, a writer or a pin holds it or something behind it: looked at again after another grace.
        suspects = self._suspects[handle.uid]
        suspects.pop(top, None)
        suspects[top] = self._clock.now() + GRACE_SECONDS
        self.found[_WITHOUT_PREFIX] += counts[_WITHOUT_PREFIX]
        return counts

    # ── locations whose bytes are missing ──

    async def _check_bytes(self, handle: IndexHandle, keys: Sequence[int], *, dry_run: bool) -> Counter[str]:
        return await self._give_up(handle, keys, self._exist, dry_run=dry_run)

    def _exist(self, location: Location) -> _Query | None:
        """Ask only for what serves; of a storage that is not open nothing is known."""
        backend = self._storages.backend(location.storage) if location.status is LocationStatus.SERVING else None
        return None if backend is None else backend.exists

    async def _give_up(
        self,
        handle: IndexHandle,
        keys: Sequence[int],
        query_of: Callable[[Location], _Query | None],
        *,
        dry_run: bool,
    ) -> Counter[str]:
        lost = await _lost_locations(handle.meta_index, keys, query_of)
        if not lost:
            return Counter()
        changes = await self._without(handle, lost, dry_run=dry_run)
        marked = [location for change in changes for location in newly_deleting(change.old, change.new)]
        if not dry_run:
            self.found[_WITHOUT_BYTES] += len(marked)
            self._report(handle.instance, changes, _WITHOUT_BYTES)
        return Counter(without_bytes=len(marked), freed_bytes=sum(each.size_bytes for each in marked))

    async def _without(self, handle: IndexHandle, lost: Sequence[LostLocations], *, dry_run: bool) -> list[Change]:
        instance, ids = handle.instance, {each.key: each.location_ids for each in lost}
        due = self._clock.now() + self._provider.delay_seconds(instance)

        def change(key: int, old: BlockRecord | None) -> BlockRecord | None:
            return without_lost(_without_lost_writes(old, ids[key], due), ids[key], instance, due)

        if dry_run:
            records = zip(ids, await handle.meta_index.get(list(ids)), strict=True)
            return [Change(key, old, change(key, old)) for key, old in records]
        return await handle.meta_index.read_modify_write(ids, change)

    def _report(self, instance: Instance, changes: Sequence[Change], kind: str) -> int:
        """Report marked blocks, and return their bytes."""
        self._on_marked(instance, changes, kind)
        return sum(location.size_bytes for change in changes for location in newly_deleting(change.old, change.new))
