"""Deletions of batches: bytes first, then metadata, then the space is free; what has to wait is put off.

The event loop is held for a slice of blocks at a time, however many batches are under way. Metadata goes only if the
location is still the one that was found (compare-and-delete), so deleting twice harms nobody; nothing that is in flight
here is begun a second time. Of a storage that is not configured any more the metadata goes alone, also where a call of
the storage hangs.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import structlog

from kvcm.index.meta_index import Change
from kvcm.model.clock import Clock
from kvcm.model.deletion import DeletionItem
from kvcm.model.locations import Location
from kvcm.reclaim.custody import IndexInCustody, StorageFinder
from kvcm.reclaim.deletion_marks import due_later, without
from kvcm.reclaim.turns import Turns
from kvcm.reclaim.workers import Backlog, StorageWorkers
from kvcm.storage.backend import StorageBackend

__all__ = ["SLICE_BLOCKS", "Deleted", "Deletions", "slices"]

SLICE_BLOCKS = 64
"""Blocks that the event loop may be held for: half a millisecond of a quiet machine."""

_MOST_IN_A_BATCH = 128
_MOST_IN_FLIGHT = 1024  # per index and storage: what is more for a slow one is put off

_log = structlog.get_logger("kvcm.reclaim")

T = TypeVar("T")


@dataclass(slots=True)
class Deleted:
    """What an executor deleted since it was made.

    Attributes:
        blocks: that have no location any more.
        locations: whose bytes and metadata are gone.
        byte_count: of those.
    """

    blocks: int = 0
    locations: int = 0
    byte_count: int = 0

    def add(self, changes: Iterable[Change]) -> None:
        """Count the locations that changes took out of records."""
        for change in changes:
            if change.old is None or change.new is change.old:
                continue
            gone = [location.size_bytes for location in _gone(change)]
            self.blocks += change.new is None
            self.locations += len(gone)
            self.byte_count += sum(gone)


class Deletions:
    """What is being deleted.

    Args:
        storages: the open storages.
        clock: time source.
        workers_per_storage: batches that a storage deletes at a time.
        is_configured: whether there is a storage of a name, open here or not. Items on one that is not configured any
            more lose their metadata only; one that is not open here fails.
        turns: lets one slice of background work run at a time.
    """

    def __init__(
        self,
        storages: StorageFinder,
        clock: Clock,
        workers_per_storage: int,
        is_configured: Callable[[str], bool],
        turns: Turns,
    ) -> None:
        self._storages = storages
        self._is_configured = is_configured
        self._clock = clock
        self._workers_per_storage = workers_per_storage
        self._batch_size = min(_MOST_IN_A_BATCH, _MOST_IN_FLIGHT // workers_per_storage)
        self._workers: dict[str, StorageWorkers] = {}
        self._in_flight: set[tuple[int, int, str]] = set()
        self._in_flight_of: defaultdict[int, Counter[str]] = defaultdict(Counter)  # by uid and storage
        self._tasks: set[asyncio.Task[None]] = set()
        self.give_way = turns.give_way
        self.progress = asyncio.Event()
        self.deleted = Deleted()

    def backlogs(self) -> dict[str, Backlog]:
        """Return what waits, by storage, for those that ever had something to delete."""
        return {storage: workers.backlog for storage, workers in self._workers.items()}

    def in_flight(self, uid: int) -> int:
        """Return how many locations of an index were taken up and are not done."""
        return sum(self._in_flight_of[uid].values())

    def is_saturated(self, uid: int) -> bool:
        """Return whether the workers have enough to do of an index: as long as something is in flight, every look finds
        it anew. What a slow storage will take long for does not count."""
        counts = self._in_flight_of[uid].items()
        swift = sum(count for storage, count in counts if count and not self._workers_of(storage).is_slow)
        return swift >= self._workers_per_storage * self._batch_size

    def take(self, custody: IndexInCustody, key: int, location: Location) -> DeletionItem | None:
        """Take up a deletion, from now on in flight; None when it is already."""
        claim = (custody.uid, key, location.id)
        if claim in self._in_flight:
            return None
        self._in_flight.add(claim)
        self._in_flight_of[custody.uid][location.storage] += 1
        return DeletionItem.of(custody.instance_id, custody.uid, key, location)

    def give_back(self, items: Iterable[DeletionItem]) -> None:
        """End what `take` began."""
        for item in items:
            self._in_flight.remove((item.uid, item.key, item.location_id))
            self._in_flight_of[item.uid][item.storage] -= 1

    def fail_late(self) -> None:
        """Note which storages hang, and let go of those that were removed."""
        for storage, workers in self._workers.items():
            if self._is_removed(storage):
                workers.let_go()
                continue
            if count := workers.fail_late():
                _log.warning("deletion_hangs", storage=storage, count=count, retry_seconds=workers.pause_seconds)

    def begin(self, custody: IndexInCustody, items: Sequence[DeletionItem]) -> None:
        """Delete what was taken up, in the background; given back when it is done or put off."""
        for storage, of_storage in _by_storage(items).items():
            seconds = self._seconds_to_wait(storage, self._in_flight_of[custody.uid][storage])
            for batch in slices(of_storage, self._batch_size):
                work = self.put_off(custody, batch, seconds) if seconds else self._delete(custody, storage, batch)
                task = asyncio.create_task(work)
                self._tasks.add(task)
                task.add_done_callback(partial(self._ended, batch))

    def _ended(self, items: Sequence[DeletionItem], task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self.give_back(items)
        self.progress.set()
        error = None if task.cancelled() else task.exception()
        if error is not None:  # found again in the records
            _log.warning("deletion_interrupted", reason=f"{type(error).__name__}: {error}")

    async def all_done(self) -> None:
        """Wait for what is being deleted.

        Raises:
            KvcmError: the store failed.
        """
        await asyncio.gather(*self._tasks)

    def cancel(self) -> None:
        """Stop; what was not done is found again in the records."""
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
        """Return how long a storage is not to be asked: it fails, or is far behind and in the way of the others."""
        if self._is_removed(storage):  # it is not asked at all
            return 0.0
        workers = self._workers_of(storage)
        if workers.pause_seconds or in_flight <= _MOST_IN_FLIGHT or not workers.is_slow:
            return workers.pause_seconds
        return workers.seconds_for(in_flight + workers.put_off_count)

    async def _delete(self, custody: IndexInCustody, storage: str, items: Sequence[DeletionItem]) -> None:
        workers = self._workers_of(storage)
        async with workers.turn(len(items)):
            backend = self._storages.backend(storage)
            # Whatever waited here while another batch failed has to wait for the end of the pause.
            is_asked = not self._is_removed(storage) and not workers.pause_seconds
            reasons = await self._delete_bytes(workers, backend, items) if is_asked else None
        if self._is_removed(storage) or (is_asked and reasons is None):
            # Nobody is told: a call that was let go of may still be at it, whatever is configured by now.
            await self._drop(custody, items)
            return
        if reasons is None:
            await self.put_off(custody, items, workers.pause_seconds)
            return
        failed = [item for item, reason in zip(items, reasons, strict=True) if reason is not None]
        if failed:
            pause = workers.failed(len(failed))
            reason = next(filter(None, reasons))
            _log.warning("deletion_failed", storage=storage, count=len(failed), reason=reason, retry_seconds=pause)
            await self.put_off(custody, failed, pause)
        else:
            workers.succeeded()
        dropped = await self._drop(custody, [item for item, why in zip(items, reasons, strict=True) if why is None])
        if backend is not None and dropped:
            await _tell_forgotten(backend, storage, dropped)

    async def _delete_bytes(
        self, workers: StorageWorkers, backend: StorageBackend | None, items: Sequence[DeletionItem]
    ) -> list[str | None] | None:
        """Return per item why its bytes are still there, None when they are gone; nothing when the storage was removed
        before it answered."""
        if backend is None:
            return ["the storage is not open on this manager"] * len(items)
        await self.give_way()
        try:
            results = await workers.call(backend.delete([uri for item in items for uri in item.uris]))
        except Exception as error:  # whatever a storage raises, its items are tried again
            return [f"{type(error).__name__}: {error}"] * len(items)
        if results is None:
            return None
        each = iter(results)
        return [next(filter(None, [next(each) for _ in item.uris]), None) for item in items]

    async def _drop(self, custody: IndexInCustody, items: Sequence[DeletionItem]) -> list[DeletionItem]:
        """Drop the metadata of what is gone. Returns what had served of what this very call dropped, and nobody before
        it."""
        ids = _ids_by_key(items)
        dropped: set[tuple[int, str]] = set()
        for page in slices(list(ids), SLICE_BLOCKS):
            await self.give_way()
            changes = await custody.meta_index.read_modify_write(page, lambda key, old: without(old, ids[key]))
            self.deleted.add(changes)
            gone = ((change.key, location) for change in changes for location in _gone(change))
            dropped.update((key, location.id) for key, location in gone if location.has_served)
        return [item for item in items if (item.key, item.location_id) in dropped]

    async def put_off(self, custody: IndexInCustody, items: Sequence[DeletionItem], seconds: float) -> None:
        """Let deletions become due again so many seconds from now, in their records."""
        due = self._clock.now() + seconds
        ids = _ids_by_key(items)
        for page in slices(list(ids), SLICE_BLOCKS):
            await self.give_way()
            await custody.meta_index.read_modify_write(page, lambda key, old: due_later(old, ids[key], due))
        for storage, count in Counter(item.storage for item in items).items():
            self._workers_of(storage).put_off(count, due)


async def _tell_forgotten(backend: StorageBackend, storage: str, dropped: Sequence[DeletionItem]) -> None:
    """Tell a storage what nobody will delete again. Where that fails, its places are lost until their objects go.

    Of what never served the writer may come back: its places are never anybody else's (design.md decision 16), and no
    storage is told.
    """
    uris = [uri for item in dropped for uri in item.uris]
    try:
        await backend.forgotten(uris)
    except Exception as error:  # whatever a storage raises, its bytes and their metadata are gone
        _log.warning(
            "places_not_forgotten", storage=storage, count=len(uris), reason=f"{type(error).__name__}: {error}"
        )


def _gone(change: Change) -> list[Location]:
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
