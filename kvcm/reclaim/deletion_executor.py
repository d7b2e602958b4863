"""The deletion executor: deletes locations that are marked as deleting, bytes first, then metadata.

Invariants:

1. A deletion exists as a record only: status DELETING and the time from when the bytes may go. A new leader finds all
   of it again, so nothing is lost when a manager dies.
2. Metadata is removed by compare-and-delete of the location that was found, after its bytes are gone. Deleting twice is
   harmless, and a deletion that is in flight here is not started a second time.
3. A location that a reader or an unfinished writer still uses is postponed. So is a location whose storage fails, with
   growing pauses. Both are written to the record.
4. Each storage has its own few workers, and nothing waits for them: a hanging storage delays only itself. Of a storage
   that is not configured any more the metadata is removed alone.
5. The event loop is held for one slice of blocks at a time.

The same scan finds two more kinds of due blocks: writers whose session is overdue are aborted, and a location that
serves past its time to live is marked as deleting.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import structlog

from kvcm.index.backends.backend import StoredRun
from kvcm.index.change_events import ChangeEvents
from kvcm.index.meta_index import Change, IndexHandle
from kvcm.model.clock import Clock, common_due
from kvcm.model.errors import KvcmError
from kvcm.model.locations import BlockRecord, DeletionItem, Location, LocationStatus, uris_of
from kvcm.reclaim.background import IndexProvider, Pacer, StorageProvider
from kvcm.storage.backend import StorageBackend
from kvcm.telemetry.events import EventLog

__all__ = [
    "LATE_SECONDS",
    "Backlog",
    "Deleted",
    "DeletionExecutor",
    "Deletions",
    "StorageWorkers",
    "expired",
    "is_expired",
    "slices",
    "without",
]


def without(old: BlockRecord | None, location_ids: Collection[str]) -> BlockRecord | None:
    """Return the record without these locations, if they are still deleting; None when none is left."""
    if old is None:
        return None
    kept = tuple(
        location
        for location in old.locations
        if location.status is not LocationStatus.DELETING or location.id not in location_ids
    )
    if len(kept) == len(old.locations):
        return old
    return old._replace(locations=kept) if kept else None


def _due_later(old: BlockRecord | None, location_ids: Collection[str], due: float) -> BlockRecord | None:
    """Return the record with a later time from when the bytes may go."""

    def later(location: Location) -> Location:
        if location.status is LocationStatus.DELETING and location.id in location_ids:
            return location._replace(deadline=due)
        return location

    return _changed(old, later)


def is_expired(location: Location, now: float) -> bool:
    """Return whether a location serves past the time to live that its writer gave."""
    return location.status is LocationStatus.SERVING and 0 < location.deadline <= now


def expired(old: BlockRecord | None, now: float, delay_seconds: float) -> BlockRecord | None:
    """Return the record with expired locations marked as deleting; a pinned one expires when its pin ends."""

    def expire(location: Location) -> Location:
        if not is_expired(location, now):
            return location
        if location.pinned_until > now:
            return location._replace(deadline=location.pinned_until)
        return location._replace(status=LocationStatus.DELETING, deadline=common_due(now, delay_seconds))

    return _changed(old, expire)


def _changed(old: BlockRecord | None, change: Callable[[Location], Location]) -> BlockRecord | None:
    if old is None:
        return None
    locations = tuple(map(change, old.locations))
    return old if locations == old.locations else old._replace(locations=locations)


# Workers of one storage: a few deletions at a time, pauses after failures, and the backlog in numbers.
#
# A deletion that takes too long counts as a failure, once. It keeps its worker until the storage answers, so that
# nothing is deleted a second time beside it. When all workers hang, the backlog stays in the records. Only the removal
# of the storage frees them: a late effect of such a call hits bytes that are neither deleted nor reused by then.

LATE_SECONDS = 30.0
"""A deletion that takes so long counts as failed."""
_FIRST_PAUSE_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 60.0
_MOST_DOUBLINGS = 6  # of the first pause: longer than the longest then
_SLOW_SECONDS = 1.0
T = TypeVar("T")


class Backlog(NamedTuple):
    """The deletions that wait for one storage.

    Attributes:
        waiting: locations that are due, or postponed because the storage failed or is busy.
        executing: locations that it is deleting.
        failures: deletions of locations that failed since the manager started.
        oldest_seconds: age of the oldest deletion in flight that is not postponed.
        late: locations whose deletion takes too long.
    """

    waiting: int = 0
    executing: int = 0
    failures: int = 0
    oldest_seconds: float = 0.0
    late: int = 0


@dataclass(slots=True, eq=False)
class _Batch:
    """Deletions of one call of the storage."""

    count: int
    since: float
    started_at: float | None = None
    is_late: bool = False


class StorageWorkers:
    """Paces the deletions of one storage.

    Args:
        count: batches at a time.
        clock: time source.
    """

    def __init__(self, count: int, clock: Clock) -> None:
        self._count = count
        self._clock = clock
        self._free = asyncio.Semaphore(count)
        self._batches: dict[_Batch, None] = {}
        self._failures = 0
        self._failures_in_a_row = 0
        self._paused_until = 0.0
        self._seconds_each = 0.0
        self._last_done = -math.inf
        self._put_off: dict[float, int] = {}
        self._calls: set[asyncio.Task[Any]] = set()
        self._removed: asyncio.Future[None] | None = None

    async def call(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Return the result of a call of the storage; None when the call was abandoned: then it goes on in the
        background."""
        if self._removed is None:
            self._removed = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(work)
        self._calls.add(task)
        task.add_done_callback(self._on_task_done)
        ends: set[asyncio.Future[Any]] = {task, self._removed}
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            task.cancel()
            raise
        return task.result() if task.done() else None

    def _on_task_done(self, task: asyncio.Task[Any]) -> None:
        self._calls.discard(task)
        if not task.cancelled():
            task.exception()  # an abandoned call: retrieve its error, so that asyncio does not log it

    def abandon(self) -> None:
        """Abandon all calls and failures: the storage was removed."""
        removed, self._removed = self._removed, None
        if removed is not None:
            removed.set_result(None)
        self.succeeded()

    def cancel(self) -> None:
        """Cancel all calls, abandoned ones included."""
        for task in self._calls:
            task.cancel()

    @asynccontextmanager
    async def slot(self, count: int) -> AsyncIterator[None]:
        """Occupy a worker for so many locations while the context lasts."""
        batch = _Batch(count, self._clock.now())
        self._batches[batch] = None
        try:
            async with self._free:
                batch.started_at = self._clock.now()
                yield
                self._last_done = self._clock.now()
                self._seconds_each = (self._last_done - batch.started_at) / count / self._count
        finally:
            del self._batches[batch]

    @property
    def pause_seconds(self) -> float:
        """Seconds until the storage is tried again."""
        return max(0.0, self._paused_until - self._clock.now())

    @property
    def is_slow(self) -> bool:
        """Whether nothing began or ended for a while, though there is something to do."""
        return self._stalled_seconds >= _SLOW_SECONDS

    @property
    def _stalled_seconds(self) -> float:
        begun = [batch.started_at for batch in self._batches if batch.started_at is not None]
        return self._clock.now() - max(self._last_done, *begun) if begun else 0.0

    def seconds_for(self, count: int) -> float:
        """Return how long so many locations will take, at least a first pause and at most the longest."""
        expected = max(self._seconds_each * count, self._stalled_seconds)
        return min(max(_FIRST_PAUSE_SECONDS, expected), _LONGEST_PAUSE_SECONDS)

    def succeeded(self) -> None:
        """The storage deleted everything: end its pause."""
        self._failures_in_a_row = 0
        self._paused_until = 0.0

    def failed(self, count: int) -> float:
        """Count failed deletions, and return for how many seconds the storage pauses. A failure during a pause does not
        make it longer."""
        self._failures += count
        now = self._clock.now()
        if now >= self._paused_until:
            self._paused_until = now + min(_FIRST_PAUSE_SECONDS * 2**self._failures_in_a_row, _LONGEST_PAUSE_SECONDS)
            self._failures_in_a_row = min(self._failures_in_a_row + 1, _MOST_DOUBLINGS)
        return self._paused_until - now

    def fail_late(self) -> int:
        """Count deletions that take too long as failures, each once. Returns how many locations those are."""
        began = self._clock.now() - LATE_SECONDS
        late = [
            each
            for each in self._batches
            if not each.is_late and each.started_at is not None and each.started_at <= began
        ]
        for batch in late:
            batch.is_late = True
        count = sum(batch.count for batch in late)
        if count:
            self.failed(count)
        return count

    def postpone(self, count: int, until: float) -> None:
        """So many locations are due again at a later time."""
        self._put_off[until] = self._put_off.get(until, 0) + count

    @property
    def postponed_count(self) -> int:
        """Locations that are not due again yet."""
        now = self._clock.now()
        self._put_off = {until: count for until, count in self._put_off.items() if until > now}
        return sum(self._put_off.values())

    @property
    def backlog(self) -> Backlog:
        """The backlog."""
        return Backlog(
            self.postponed_count + sum(batch.count for batch in self._batches if batch.started_at is None),
            executing=sum(batch.count for batch in self._batches if batch.started_at is not None),
            failures=self._failures,
            oldest_seconds=max((self._clock.now() - batch.since for batch in self._batches), default=0.0),
            late=sum(batch.count for batch in self._batches if batch.is_late),
        )


# Deletions of batches: bytes first, then metadata.

_SLICE_BLOCKS = 64
"""Blocks that the event loop may be held for: half a millisecond of a quiet machine."""
_RUNS_OF_A_CHANGE = 8  # as many blocks as a slice has take as long one by one
_MOST_IN_A_BATCH = 128
_MOST_IN_FLIGHT = 1024  # per index and storage: the rest is postponed where the storage is slow
_log = structlog.get_logger("kvcm.reclaim")


@dataclass(slots=True)
class Deleted:
    """Totals since the executor was created.

    Attributes:
        blocks: blocks without a location any more.
        locations: locations whose bytes and metadata are gone.
        byte_count: bytes of these locations.
    """

    blocks: int = 0
    locations: int = 0
    byte_count: int = 0

    def add_blocks(self, items: Sequence[DeletionItem]) -> None:
        """Count blocks whose only locations are gone."""
        self.blocks += len(items)
        self.locations += len(items)
        self.byte_count += sum([item.size_bytes for item in items])

    def add(self, changes: Iterable[Change]) -> None:
        """Count the locations that changes took out of records."""
        for change in changes:
            if change.old is None or change.new is change.old:
                continue
            gone = [location.size_bytes for location in _removed_locations(change)]
            self.blocks += change.new is None
            self.locations += len(gone)
            self.byte_count += sum(gone)


class Deletions:
    """The deletions in flight.

    Args:
        storages: the open storages.
        clock: time source.
        workers_per_storage: batches that a storage deletes at a time.
        is_configured: whether there is a storage of a name, open here or not. Items on one that is not configured any
            more lose their metadata only; one that is not open here fails.
        turns: lets one slice of background work run at a time.
        doubts: returns how often the store was found rolled back.
    """

    def __init__(
        self,
        storages: StorageProvider,
        clock: Clock,
        workers_per_storage: int,
        is_configured: Callable[[str], bool],
        turns: Pacer,
        doubts: Callable[[], int],
    ) -> None:
        self.doubts = doubts
        self._storages = storages
        self._is_configured = is_configured
        self._clock = clock
        self._workers_per_storage = workers_per_storage
        self._batch_size = min(_MOST_IN_A_BATCH, _MOST_IN_FLIGHT // workers_per_storage)
        self._workers: dict[str, StorageWorkers] = {}
        self._in_flight: dict[tuple[int, int, str], StoredRun | None] = {}  # with the run that has no other location
        self._in_flight_of: defaultdict[int, Counter[str]] = defaultdict(Counter)  # by uid and storage
        self._tasks: set[asyncio.Task[None]] = set()
        self.give_way = turns.pause
        self.progress = asyncio.Event()
        self.deleted = Deleted()

    def backlogs(self) -> dict[str, Backlog]:
        """Return the backlogs by storage, of all storages that ever had a deletion."""
        return {storage: workers.backlog for storage, workers in self._workers.items()}

    def in_flight(self, uid: int) -> int:
        """Return how many deletions of an index are in flight."""
        return sum(self._in_flight_of[uid].values())

    def is_saturated(self, uid: int) -> bool:
        """Return whether the workers have enough to do of an index: every scan returns the deletions in flight, too.
        Deletions on slow storages do not count."""
        counts = self._in_flight_of[uid].items()
        swift = sum(count for storage, count in counts if count and not self._workers_of(storage).is_slow)
        return swift >= self._workers_per_storage * self._batch_size

    def start_run(self, handle: IndexHandle, run: StoredRun) -> list[DeletionItem]:
        """Start the deletions of blocks with one location each; those that are in flight already are left out."""
        (location,), (chunks,) = run.locations, run.chunks
        uid, (location_id, storage, *_) = handle.uid, location
        items = [
            DeletionItem(
                handle.instance_id,
                uid,
                key,
                location_id=location_id,
                storage=storage,
                uris=tuple(uris_of(chunk)),
                session_id=location.session_id,
                size_bytes=location.size_bytes,
            )
            for key, chunk in zip(run.keys, chunks, strict=True)
            if (uid, key, location_id) not in self._in_flight
        ]
        self._in_flight.update(((uid, item.key, location_id), run) for item in items)
        self._in_flight_of[uid][storage] += len(items)
        return items

    def start(self, handle: IndexHandle, key: int, location: Location) -> DeletionItem | None:
        """Start a deletion; None when it is in flight already."""
        claim = (handle.uid, key, location.id)
        if claim in self._in_flight:
            return None
        self._in_flight[claim] = None
        self._in_flight_of[handle.uid][location.storage] += 1
        return DeletionItem.of(handle.instance_id, handle.uid, key, location)

    def release(self, items: Iterable[DeletionItem]) -> None:
        """End deletions that `start` began."""
        for item in items:
            del self._in_flight[item.uid, item.key, item.location_id]
            self._in_flight_of[item.uid][item.storage] -= 1
            assert self._in_flight_of[item.uid][item.storage] >= 0

    def fail_late(self) -> None:
        """Count late deletions as failures, and abandon the calls of removed storages."""
        for storage, workers in self._workers.items():
            if self._is_removed(storage):
                workers.abandon()
                continue
            if count := workers.fail_late():
                _log.warning("deletion_hangs", storage=storage, count=count, retry_seconds=workers.pause_seconds)

    def submit(self, handle: IndexHandle, items: Sequence[DeletionItem], doubts: int) -> None:
        """Delete started items in the background; they are released when they are done or postponed.

        Args:
            handle, items: what to delete.
            doubts: how often the store was rolled back when the records were read. If it was once more, they are read
                again: what they had marked may be serving.
        """
        for storage, of_storage in _by_storage(items).items():
            seconds = self._seconds_to_wait(storage, self._in_flight_of[handle.uid][storage])
            for batch in slices(of_storage, self._batch_size):
                work = (
                    self.postpone(handle, batch, seconds) if seconds else self._delete(handle, storage, batch, doubts)
                )
                task = asyncio.create_task(work)
                self._tasks.add(task)
                task.add_done_callback(partial(self._on_task_done, batch))

    def _on_task_done(self, items: Sequence[DeletionItem], task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self.release(items)
        self.progress.set()
        error = None if task.cancelled() else task.exception()
        if error is not None:  # found again in the records
            _log.warning("deletion_interrupted", reason=f"{type(error).__name__}: {error}")

    async def all_done(self) -> None:
        """Wait for the deletions in flight.

        Raises:
            KvcmError: the store failed.
        """
        await asyncio.gather(*self._tasks)

    def cancel(self) -> None:
        """Cancel all deletions; the records still hold the rest."""
        for task in self._tasks:
            task.cancel()
        for workers in self._workers.values():
            workers.cancel()

    def _is_removed(self, storage: str) -> bool:
        return self._storages.backend(storage) is None and not self._is_configured(storage)

    def _workers_of(self, storage: str) -> StorageWorkers:
        workers = self._workers.get(storage)
        if workers is None:
            workers = self._workers[storage] = StorageWorkers(self._workers_per_storage, self._clock)
        return workers

    def _seconds_to_wait(self, storage: str, in_flight: int) -> float:
        """Return for how many seconds a storage is not called: it fails, or is far behind the others."""
        if self._is_removed(storage):  # it is not called at all
            return 0.0
        workers = self._workers_of(storage)
        if workers.pause_seconds or in_flight <= _MOST_IN_FLIGHT or not workers.is_slow:
            return workers.pause_seconds
        return workers.seconds_for(in_flight + workers.postponed_count)

    async def _delete(self, handle: IndexHandle, storage: str, items: Sequence[DeletionItem], doubts: int) -> None:
        workers = self._workers_of(storage)
        async with workers.slot(len(items)):
            if doubts != self.doubts():
                return
            backend = self._storages.backend(storage)
            # A batch that waited here while another one failed waits for the end of the pause.
            is_called = not self._is_removed(storage) and not workers.pause_seconds
            reasons = await self._delete_bytes(workers, backend, items) if is_called else None
        if self._is_removed(storage) or (is_called and reasons is None):
            # No `forgotten` for the storage: an abandoned call may still work on these bytes.
            await self._drop(handle, items)
            return
        if reasons is None:
            await self.postpone(handle, items, workers.pause_seconds)
            return
        failed = [item for item, reason in zip(items, reasons, strict=True) if reason is not None]
        if failed:
            pause = workers.failed(len(failed))
            reason = next(filter(None, reasons))
            _log.warning("deletion_failed", storage=storage, count=len(failed), reason=reason, retry_seconds=pause)
            await self.postpone(handle, failed, pause)
        else:
            workers.succeeded()
        dropped = await self._drop(handle, [item for item, why in zip(items, reasons, strict=True) if why is None])
        if backend is not None and dropped:
            await _report_forgotten(backend, storage, dropped)

    async def _delete_bytes(
        self, workers: StorageWorkers, backend: StorageBackend | None, items: Sequence[DeletionItem]
    ) -> list[str | None] | None:
        """Return per item why its bytes are still there, None when they are gone; None for all when the storage was
        removed before it answered."""
        if backend is None:
            return ["the storage is not open on this manager"] * len(items)
        await self.give_way()
        try:
            results = await workers.call(backend.delete([uri for item in items for uri in item.uris]))
        except Exception as error:  # of any kind: the items are tried again
            return [f"{type(error).__name__}: {error}"] * len(items)
        if results is None:
            return None
        each = iter(results)
        return [next(filter(None, [next(each) for _ in item.uris]), None) for item in items]

    async def _drop(self, handle: IndexHandle, items: Sequence[DeletionItem]) -> list[DeletionItem]:
        """Remove the metadata of deleted locations. Return the items that had served and that this call removed."""
        runs: dict[int, tuple[StoredRun, dict[int, DeletionItem]]] = {}
        others: list[DeletionItem] = []
        for item in items:
            run = self._in_flight[item.uid, item.key, item.location_id]
            if run is None:
                others.append(item)
            else:
                runs.setdefault(id(run), (run, {}))[1][item.key] = item
        dropped: list[DeletionItem] = []
        for some in slices(list(runs.values()), _RUNS_OF_A_CHANGE):
            await self.give_way()
            lost = await handle.meta_index.change_runs([(run.only(of_run.keys()), ()) for run, of_run in some])
            others += [of_run[key] for _, of_run in some for key in lost if key in of_run]
            gone = [item for _, of_run in some for item in of_run.values() if item.key not in lost]
            self.deleted.add_blocks(gone)
            dropped += [item for item in gone if not item.session_id]
        return dropped + await self._drop_one_by_one(handle, others)

    async def _drop_one_by_one(self, handle: IndexHandle, items: Sequence[DeletionItem]) -> list[DeletionItem]:
        ids = _ids_by_key(items)
        dropped: set[tuple[int, str]] = set()
        for batch in slices(list(ids), _SLICE_BLOCKS):
            await self.give_way()
            changes = await handle.meta_index.read_modify_write(batch, lambda key, old: without(old, ids[key]))
            self.deleted.add(changes)
            gone = ((change.key, location) for change in changes for location in _removed_locations(change))
            dropped.update((key, location.id) for key, location in gone if location.has_served)
        return [item for item in items if (item.key, item.location_id) in dropped]

    async def postpone(self, handle: IndexHandle, items: Sequence[DeletionItem], seconds: float) -> None:
        """Write to the records that these deletions are due again in so many seconds."""
        due = self._clock.now() + seconds
        ids = _ids_by_key(items)
        for batch in slices(list(ids), _SLICE_BLOCKS):
            await self.give_way()
            await handle.meta_index.read_modify_write(batch, lambda key, old: _due_later(old, ids[key], due))
        for storage, count in Counter(item.storage for item in items).items():
            self._workers_of(storage).postpone(count, due)


async def _report_forgotten(backend: StorageBackend, storage: str, dropped: Sequence[DeletionItem]) -> None:
    """Report to a storage that its addresses are free for reuse. Where that fails, they stay unused until their objects
    are deleted.

    Locations that never served are not reported: their writer may come back, so their addresses are never reused
    (design.md decision 16).
    """
    uris = [uri for item in dropped for uri in item.uris]
    try:
        await backend.forgotten(uris)
    except Exception as error:  # of any kind: the bytes and their metadata are gone
        _log.warning(
            "places_not_forgotten", storage=storage, count=len(uris), reason=f"{type(error).__name__}: {error}"
        )


def _removed_locations(change: Change) -> list[Location]:
    """Return the locations that a change took out of a record."""
    if change.old is None or change.new is change.old:
        return []
    kept = {location.id for location in change.new.locations} if change.new is not None else ()
    return [location for location in change.old.locations if location.id not in kept]


def slices(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Return a sequence in pieces."""
    return (items[start : start + size] for start in range(0, len(items), size))


def _by_storage(items: Iterable[DeletionItem]) -> dict[str, list[DeletionItem]]:
    batches: defaultdict[str, list[DeletionItem]] = defaultdict(list)
    for item in items:
        batches[item.storage].append(item)
    return batches


def _ids_by_key(items: Iterable[DeletionItem]) -> dict[int, Collection[str]]:
    ids: dict[int, Collection[str]] = {}
    for item in items:
        ids[item.key] = (*ids.get(item.key, ()), item.location_id)
    return ids


# The executor scans an index again when most of what it found there is done, not before: as long as a deletion is in
# flight, every scan returns it again.

_WORKERS = 4
_MOST_BLOCKS = 512  # of one scan of an index
_MOST_SCANS = 64  # per round and index, so that other indexes get their turn
_PINNED_RECHECK_SECONDS = 1.0  # a lease that is released early gives its bytes back this soon


class DeletionExecutor:
    """Deletes locations that are marked as deleting.

    Args:
        storages: the open storages.
        clock: time source.
        workers_per_storage: batches that a storage deletes at a time.
        events: receives expired locations.
        is_configured: whether there is a storage of a name, open here or not. Items on one that is not configured any
            more lose their metadata only; one that is not open here is tried again. By default every storage is open.
        turns: shared with other background work; by default a slice runs every turn.
        doubts: returns how often the store was found rolled back; deletions that were read before are not carried out.
    """

    def __init__(
        self,
        storages: StorageProvider,
        clock: Clock,
        workers_per_storage: int = _WORKERS,
        events: EventLog | None = None,
        is_configured: Callable[[str], bool] = lambda _storage: False,
        turns: Pacer | None = None,
        doubts: Callable[[], int] = lambda: 0,
    ) -> None:
        self._clock = clock
        self._provider: IndexProvider | None = None
        self._deletions = Deletions(
            storages,
            clock=clock,
            workers_per_storage=workers_per_storage,
            is_configured=is_configured,
            turns=turns or Pacer(1),
            doubts=doubts,
        )
        self._events = ChangeEvents(events if events is not None else EventLog())
        self._woken = asyncio.Event()
        self._behind: dict[int, IndexHandle] = {}  # more is due in these indexes than is in flight

    def serve(self, provider: IndexProvider) -> None:
        """Set the provider of the indexes."""
        self._provider = provider

    @property
    def deleted(self) -> Deleted:
        """Totals since the executor was created."""
        return self._deletions.deleted

    def backlog(self, storage: str) -> Backlog:
        """Return what waits for a storage."""
        return self.backlogs().get(storage, Backlog())

    def backlogs(self) -> dict[str, Backlog]:
        """Return the backlogs by storage, of all storages that ever had a deletion."""
        return self._deletions.backlogs()

    async def run(self, interval_seconds: float, is_leader: Callable[[], bool] = lambda: True) -> None:
        """Delete due locations while this manager leads, until cancelled. The scan waits for no storage."""
        try:
            while True:
                if is_leader():
                    await self._round(self._start_due)
                await self._wait(interval_seconds, is_leader)
        finally:
            self._deletions.cancel()

    async def _wait(self, seconds: float, is_leader: Callable[[], bool]) -> None:
        """Sleep; where more is due than is in flight, continue with that as deletions complete."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while self._behind and is_leader() and loop.time() < end:
            self._deletions.progress.clear()
            try:
                async with asyncio.timeout_at(end):
                    await self._deletions.progress.wait()
            except TimeoutError:
                return
            await self._round(self._resume_partial)
        with suppress(TimeoutError):
            async with asyncio.timeout_at(end):
                await self._woken.wait()
        self._woken.clear()

    def wake(self) -> None:
        """Scan at once: a location is to be deleted without delay, and a write may wait for its space."""
        self._woken.set()

    async def _round(self, scan: Callable[[], Awaitable[int]]) -> None:
        try:
            await scan()
        except KvcmError as error:  # the store failed: the next round tries again
            _log.warning("deletions_interrupted", reason=str(error))
        except Exception:
            _log.exception("deletions_failed")

    async def run_due(self) -> int:
        """Delete everything that is due now, and return the number of locations that were found due.

        Raises:
            KvcmError: the store failed; the next call finds the rest again.
        """
        seen = 0
        while (found := await self._start_due()) or self._behind:
            seen += found
            await self._deletions.all_done()
        return seen

    async def _start_due(self) -> int:
        """Start to delete due locations, and return how many there are."""
        assert self._provider is not None
        self._deletions.fail_late()
        return await self._scan_indexes(list(self._provider.indexes()))

    async def _resume_partial(self) -> int:
        return await self._scan_indexes(list(self._behind.values()))

    async def _scan_indexes(self, handles: Iterable[IndexHandle]) -> int:
        seen, now = 0, self._clock.now()
        self._behind.clear()
        for handle in handles:
            if handle.meta_index.due_from > now:  # nearly always
                continue
            try:
                seen += await self._scan_index(handle)
            except KvcmError as error:  # a damaged record, or a store that is away: the other indexes get their turn
                _log.warning("deletions_interrupted", instance=handle.instance_id, reason=str(error))
        return seen

    async def _scan_index(self, handle: IndexHandle) -> int:
        seen = 0
        for _ in range(_MOST_SCANS):
            if self._deletions.is_saturated(handle.uid):
                self._behind[handle.uid] = handle
                break
            found = await self._scan_due(handle)
            seen += found
            if not found:
                break
        return seen

    async def _scan_due(self, handle: IndexHandle) -> int:
        """Handle the earliest due blocks of an index; return 0 when nothing new is due."""
        now, doubts = self._clock.now(), self._deletions.doubts()
        most, index = _MOST_BLOCKS + self._deletions.in_flight(handle.uid), handle.meta_index
        found = _Found()
        try:
            keys = await (self._gather_runs(handle, now, most, found) if index.has_runs else index.due(now, most))
            for batch in slices(keys, _SLICE_BLOCKS):
                await self._gather(handle, batch, now, found)
            await self._abort_overdue(handle, found)
            held = await self._pinned(found.items, now)
            await self._deletions.postpone(handle, held, _PINNED_RECHECK_SECONDS)
        except BaseException:
            self._deletions.release(found.items)
            raise
        self._deletions.release(held)
        self._deletions.submit(handle, _without(found.items, held), doubts)
        return found.count

    async def _gather_runs(self, handle: IndexHandle, now: float, most: int, found: _Found) -> Sequence[int]:
        """Start the deletions of due blocks that lie together and have no other location; return the other blocks."""
        others: list[int] = []
        for run in await handle.meta_index.due_runs(now, most):
            location = run.locations[0]
            if len(run.locations) > 1 or location.status is not LocationStatus.DELETING:
                others += run.keys
                continue
            if location.deadline > now:  # changed since
                continue
            if len(found.items) >= _MOST_BLOCKS:
                break  # the next scan finds the rest
            await self._deletions.give_way()
            found.items += self._deletions.start_run(handle, run)
        return others

    async def _gather(self, handle: IndexHandle, keys: Sequence[int], now: float, found: _Found) -> None:
        """Sort due blocks by kind, and start their deletions."""
        await self._deletions.give_way()
        for key, record in zip(keys, await handle.meta_index.get(keys), strict=True):
            for location in record.locations if record is not None else ():
                if location.status is LocationStatus.SERVING:
                    if is_expired(location, now):
                        found.expired[key] = None
                elif location.deadline > now:
                    continue
                elif location.status is LocationStatus.WRITING:
                    found.overdue.setdefault(location.session_id, []).append(key)
                elif item := self._deletions.start(handle, key, location):
                    found.items.append(item)

    async def _abort_overdue(self, handle: IndexHandle, found: _Found) -> None:
        """Abort overdue writers, and mark locations that serve past their time to live."""
        assert self._provider is not None
        if found.overdue:
            await self._provider.abort_overdue_writers(handle.uid, found.overdue)
        if not found.expired:
            return
        delay = self._provider.delay_seconds(handle.instance)
        for batch in slices(list(found.expired), _SLICE_BLOCKS):
            await self._deletions.give_way()
            # Each record by the time at which it is changed: a store that takes long must not eat up the delay.
            changes = await handle.meta_index.read_modify_write(
                batch, lambda _key, old: expired(old, self._clock.now(), delay)
            )
            self._events.expired(handle.instance, changes, "ttl")

    async def _pinned(self, items: Sequence[DeletionItem], now: float) -> list[DeletionItem]:
        """Return the deletions whose bytes readers or writers still use."""
        assert self._provider is not None
        if not items:
            return []
        held_until = await self._provider.pinned_until(items)
        return [item for item, until in zip(items, held_until, strict=True) if until > now]


class _Found:
    """Result of a scan: deletions, blocks of overdue writers by session, expired blocks."""

    def __init__(self) -> None:
        self.items: list[DeletionItem] = []
        self.overdue: dict[str, list[int]] = {}
        self.expired: dict[int, None] = {}

    @property
    def count(self) -> int:
        return len(self.items) + sum(map(len, self.overdue.values())) + len(self.expired)


def _without(items: Sequence[DeletionItem], held: Sequence[DeletionItem]) -> Sequence[DeletionItem]:
    if not held:
        return items
    names = {(item.key, item.location_id) for item in held}
    return [item for item in items if (item.key, item.location_id) not in names]
