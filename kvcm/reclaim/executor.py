"""Deletion executor: bytes first, then metadata, then the space is free.

What has to go stands in the records: a location in status deleting says from when its bytes may go, and every index
tells which of its blocks are due. So nothing is forgotten when a manager dies, and whoever leads goes on. Writers whose
session is overdue are found the same way and ended.

A read lease or an unfinished writer postpones a deletion, and so does a storage that fails, with growing pauses; both
are noted in the record. Each storage has a lane of its own, where one batch runs at a time, and nobody who looks for
more waits for it: a slow or hanging storage holds up only itself, and one thread at most. Metadata goes only if the
location is still the one that was found (compare-and-delete), so deleting twice harms nobody.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Protocol

import structlog

from kvcm.index.meta_index import MetaIndex
from kvcm.model.clock import Clock
from kvcm.model.deletion import DeletionItem
from kvcm.model.errors import KvcmError
from kvcm.model.locations import BlockRecord, Location, LocationStatus
from kvcm.storage.backend import StorageBackend

__all__ = ["Custodian", "DeletionExecutor", "IndexInCustody", "StorageFinder"]

_FIRST_PAUSE_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 60.0
_MOST_BLOCKS = 1024  # per round and index, so that none holds up the event loop
_MOST_BATCHES = 64  # per round and index: then the others get their turn
_MOST_DOUBLINGS = 6  # of the first pause: longer than the longest then
_MOST_IN_FLIGHT = 4096  # per index and storage: what is more for a hanging one is put off
_BUSY_SECONDS = 10.0
_HELD_RECHECK_SECONDS = 1.0  # a lease that is released early gives its bytes back this soon

_log = structlog.get_logger("kvcm.reclaim")


class StorageFinder(Protocol):
    """Finds open storages."""

    def backend(self, storage: str) -> StorageBackend | None:
        """Return an open storage, None when there is none of that name."""


class IndexInCustody(Protocol):
    """An index and whose it is."""

    @property
    def instance_id(self) -> str: ...

    @property
    def uid(self) -> int: ...

    @property
    def meta_index(self) -> MetaIndex: ...


class Custodian(Protocol):
    """Knows the indexes, the writers and the readers."""

    def indexes(self) -> Iterable[IndexInCustody]:
        """Return the index of every instance, also of those that are being removed."""

    async def end_writers(self, uid: int, overdue: Mapping[str, Sequence[int]]) -> None:
        """End write sessions that left these blocks writing past their deadline."""

    async def held_until(self, items: Sequence[DeletionItem]) -> list[float]:
        """Return per item the unix time until which its bytes must stay, 0 when they need not."""


class DeletionExecutor:
    """Deletes locations that are marked as deleting.

    Args:
        storages: the open storages; items on a storage that is gone lose their metadata only.
        clock: time source.
    """

    def __init__(self, storages: StorageFinder, clock: Clock) -> None:
        self._storages = storages
        self._clock = clock
        self._custodian: Custodian | None = None
        self._lanes: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._failures: dict[str, tuple[int, float]] = {}  # in a row, and when the pause after the last one ends
        self._in_flight: set[tuple[int, int, str]] = set()
        self._in_flight_of: defaultdict[int, Counter[str]] = defaultdict(Counter)  # by uid and storage
        self._deleting: set[asyncio.Task[None]] = set()

    def serve(self, custodian: Custodian) -> None:
        """Set whose locations are deleted."""
        self._custodian = custodian

    async def run(self, interval_seconds: float, is_leader: Callable[[], bool] = lambda: True) -> None:
        """Delete what becomes due while this manager leads, until cancelled. Looking for it waits for no storage."""
        try:
            while True:
                if is_leader():
                    await self._round()
                await asyncio.sleep(interval_seconds)
        finally:
            for task in self._deleting:
                task.cancel()

    async def _round(self) -> None:
        try:
            await self._look()
        except KvcmError as error:  # the store cannot be asked: the next round tries again
            _log.warning("deletions_interrupted", reason=str(error))
        except Exception:
            _log.exception("deletions_failed")

    async def run_due(self) -> int:
        """Delete everything that is due now, and return the number of locations that were looked at.

        Raises:
            KvcmError: the store failed; what is left is found again.
        """
        seen = 0
        while found := await self._look():
            seen += found
            await asyncio.gather(*self._deleting)
        return seen

    async def _look(self) -> int:
        """Begin to delete what is due, and return the number of locations that were looked at."""
        assert self._custodian is not None
        seen = 0
        for custody in list(self._custodian.indexes()):
            try:
                seen += await self._look_through(custody)
            except KvcmError as error:  # a damaged record, or a store that is away: the other indexes get their turn
                _log.warning("deletions_interrupted", instance=custody.instance_id, reason=str(error))
        return seen

    async def _look_through(self, custody: IndexInCustody) -> int:
        seen = 0
        for _ in range(_MOST_BATCHES):
            found = await self._look_into(custody)
            seen += found
            if not found:
                break
        return seen

    def _begin(self, deletion: Coroutine[Any, Any, None], taken: Sequence[DeletionItem] = ()) -> None:
        task = asyncio.create_task(deletion)
        self._deleting.add(task)
        task.add_done_callback(lambda task: self._ended(task, taken))

    def _ended(self, task: asyncio.Task[None], taken: Sequence[DeletionItem]) -> None:
        self._deleting.discard(task)
        self._give_back(taken)
        error = None if task.cancelled() else task.exception()
        if error is not None:  # found again in the records
            _log.warning("deletion_interrupted", reason=f"{type(error).__name__}: {error}")

    async def _look_into(self, custody: IndexInCustody) -> int:
        """Work on the earliest blocks of an index; 0 when nothing new is due."""
        assert self._custodian is not None
        in_flight = sum(self._in_flight_of[custody.uid].values())
        now = self._clock.now()
        keys = await custody.meta_index.due(now, _MOST_BLOCKS + in_flight)
        if not keys:
            return 0
        due = list(self._due_locations(custody, keys, await custody.meta_index.get(keys), now))
        overdue: defaultdict[str, list[int]] = defaultdict(list)
        items: list[DeletionItem] = []
        for key, location in due:
            if location.status is LocationStatus.WRITING:
                overdue[location.session_id].append(key)
            else:
                items.append(DeletionItem.of(custody.instance_id, custody.uid, key, location))
        self._take(items)  # before anything else runs: another look must not find them
        try:
            if overdue:
                await self._custodian.end_writers(custody.uid, overdue)
            free = await self._not_busy(custody, await self._not_held(custody, items, now))
        except BaseException:
            self._give_back(items)
            raise
        for storage, batch in _by_storage(free).items():
            self._begin(self._delete(custody, storage, batch), batch)
        return len(due)

    def _take(self, items: Iterable[DeletionItem]) -> None:
        for item in items:
            self._in_flight.add((item.uid, item.key, item.location_id))
            self._in_flight_of[item.uid][item.storage] += 1

    def _give_back(self, items: Iterable[DeletionItem]) -> None:
        for item in items:
            self._in_flight.discard((item.uid, item.key, item.location_id))
            self._in_flight_of[item.uid][item.storage] -= 1

    def _due_locations(
        self, custody: IndexInCustody, keys: Sequence[int], records: Sequence[BlockRecord | None], now: float
    ) -> Iterable[tuple[int, Location]]:
        for key, record in zip(keys, records, strict=True):
            for location in record.locations if record is not None else ():
                if location.status is LocationStatus.SERVING or location.deadline > now:
                    continue
                if (custody.uid, key, location.id) not in self._in_flight:
                    yield key, location

    async def _not_held(
        self, custody: IndexInCustody, items: Sequence[DeletionItem], now: float
    ) -> Sequence[DeletionItem]:
        """Postpone what readers or writers still use, and return the rest."""
        assert self._custodian is not None
        if not items:
            return ()
        held_until = await self._custodian.held_until(items)
        held = [item for item, until in zip(items, held_until, strict=True) if until > now]
        if held:
            await self._postpone(custody, held, _HELD_RECHECK_SECONDS)
            self._give_back(held)
        return [item for item, until in zip(items, held_until, strict=True) if until <= now]

    async def _not_busy(self, custody: IndexInCustody, items: Sequence[DeletionItem]) -> Sequence[DeletionItem]:
        """Postpone what a storage that is far behind has to wait with, so that it is not in the way of the others."""
        free: list[DeletionItem] = []
        for storage, batch in _by_storage(items).items():
            if self._in_flight_of[custody.uid][storage] <= _MOST_IN_FLIGHT:
                free += batch
            else:
                await self._postpone(custody, batch, _BUSY_SECONDS)
                self._give_back(batch)
        return free

    async def _delete(self, custody: IndexInCustody, storage: str, items: Sequence[DeletionItem]) -> None:
        async with self._lanes[storage]:
            reasons = await self._delete_bytes(storage, items)
        await self._record(custody, storage, items, reasons)

    async def _record(
        self,
        custody: IndexInCustody,
        storage: str,
        items: Sequence[DeletionItem],
        reasons: Sequence[str | None],
    ) -> None:
        """Drop the metadata of what is gone, and postpone the rest."""
        gone = [item for item, reason in zip(items, reasons, strict=True) if reason is None]
        failed = [item for item, reason in zip(items, reasons, strict=True) if reason is not None]
        if failed:
            pause = self._pause_seconds(storage)
            reason = next(filter(None, reasons))
            _log.warning("deletion_failed", storage=storage, count=len(failed), reason=reason, retry_seconds=pause)
            await self._postpone(custody, failed, pause)
        else:
            self._failures.pop(storage, None)
        ids = _ids_by_key(gone)
        await custody.meta_index.read_modify_write(ids, lambda key, old: _without(old, ids[key]))

    def _pause_seconds(self, storage: str) -> float:
        """Return how long a storage that failed is left alone; batches that fail meanwhile do not make it longer."""
        now = self._clock.now()
        failures, until = self._failures.get(storage, (0, 0.0))
        if now >= until:
            pause = min(_FIRST_PAUSE_SECONDS * 2**failures, _LONGEST_PAUSE_SECONDS)
            until = now + pause
            self._failures[storage] = min(failures + 1, _MOST_DOUBLINGS), until
        return until - now

    async def _postpone(self, custody: IndexInCustody, items: Sequence[DeletionItem], seconds: float) -> None:
        due = self._clock.now() + seconds
        ids = _ids_by_key(items)
        await custody.meta_index.read_modify_write(ids, lambda key, old: _due_later(old, ids[key], due))

    async def _delete_bytes(self, storage: str, items: Sequence[DeletionItem]) -> list[str | None]:
        """Return per item why its bytes are still there, None when they are gone."""
        backend = self._storages.backend(storage)
        if backend is None:
            return [None] * len(items)
        try:
            results = iter(await backend.delete([uri for item in items for uri in item.uris]))
        except Exception as error:  # whatever a storage raises, its items are tried again
            return [f"{type(error).__name__}: {error}"] * len(items)
        return [next(filter(None, [next(results) for _ in item.uris]), None) for item in items]


def _by_storage(items: Iterable[DeletionItem]) -> dict[str, list[DeletionItem]]:
    batches: defaultdict[str, list[DeletionItem]] = defaultdict(list)
    for item in items:
        batches[item.storage].append(item)
    return batches


def _ids_by_key(items: Iterable[DeletionItem]) -> dict[int, set[str]]:
    ids: defaultdict[int, set[str]] = defaultdict(set)
    for item in items:
        ids[item.key].add(item.location_id)
    return ids


def _without(old: BlockRecord | None, location_ids: set[str]) -> BlockRecord | None:
    if old is None:
        return None
    kept = tuple(
        location
        for location in old.locations
        if location.id not in location_ids or location.status is not LocationStatus.DELETING
    )
    if len(kept) == len(old.locations):
        return old
    return old._replace(locations=kept) if kept else None


def _due_later(old: BlockRecord | None, location_ids: set[str], due: float) -> BlockRecord | None:
    if old is None:
        return None
    locations = tuple(
        location._replace(deadline=due)
        if location.id in location_ids and location.status is LocationStatus.DELETING
        else location
        for location in old.locations
    )
    return old._replace(locations=locations)
