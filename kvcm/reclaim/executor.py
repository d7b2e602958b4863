"""Deletion executor: bytes first, then metadata, then the space is free.

What is submitted waits for its due time, and longer while a read lease pins it. A storage that fails is asked again
with growing pauses, so nothing is forgotten. Each storage has a lane of its own, where one batch runs at a time: a slow
or hanging storage holds up only itself, and one thread at most. Metadata goes only if the location is still the one
that was marked (compare-and-delete), so deleting twice harms nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import count
from typing import NamedTuple, Protocol

import structlog

from kvcm.index.meta_index import MetaIndex
from kvcm.model.clock import Clock
from kvcm.model.deletion import DeletionItem
from kvcm.model.locations import BlockRecord, LocationStatus
from kvcm.storage.backend import StorageBackend

__all__ = ["DeletionExecutor", "StorageFinder"]

_FIRST_PAUSE_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 60.0
_MOST_ITEMS = 1024  # larger submissions are cut, so that none holds up the event loop
_HELD_RECHECK_SECONDS = 1.0  # a lease that is released early gives its bytes back this soon

_log = structlog.get_logger("kvcm.reclaim")


class StorageFinder(Protocol):
    """Finds open storages."""

    def backend(self, storage: str) -> StorageBackend | None:
        """Return an open storage, None when there is none of that name."""


class _Batch(NamedTuple):
    due: float
    number: int  # breaks ties, so that the heap never compares what follows
    meta_index: MetaIndex
    items: Sequence[DeletionItem]
    attempt: int


class DeletionExecutor:
    """Deletes locations that are marked as deleting.

    Args:
        storages: the open storages; items on a storage that is gone lose their metadata only.
        clock: time source.
        held_until: unix time until which an item's bytes must stay, 0 when they need not.
    """

    def __init__(
        self, storages: StorageFinder, clock: Clock, held_until: Callable[[DeletionItem], float] = lambda _item: 0.0
    ) -> None:
        self._storages = storages
        self._clock = clock
        self._held_until = held_until
        self._heap: list[_Batch] = []
        self._numbers = count()
        self._wake = asyncio.Event()
        self._lanes: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._running: set[asyncio.Task[None]] = set()

    @property
    def waiting_count(self) -> int:
        """Locations that wait for their time; those being deleted right now are not counted."""
        return sum(len(batch.items) for batch in self._heap)

    def hold_while(self, held_until: Callable[[DeletionItem], float]) -> None:
        """Set what keeps bytes beyond their due time."""
        self._held_until = held_until

    def submit(self, index: MetaIndex, items: Sequence[DeletionItem], due: float) -> None:
        """Delete `items`, which are marked as deleting in `index`, at unix time `due` or soon after."""
        for start in range(0, len(items), _MOST_ITEMS):
            self._push(index, items[start : start + _MOST_ITEMS], due, attempt=0)

    def _push(self, index: MetaIndex, items: Sequence[DeletionItem], due: float, attempt: int) -> None:
        heapq.heappush(self._heap, _Batch(due, next(self._numbers), index, items, attempt))
        self._wake.set()

    async def run(self) -> None:
        """Delete what becomes due, until cancelled."""
        try:
            while True:
                self._wake.clear()
                for batch in self._take_due():
                    task = asyncio.create_task(self._run_batch(batch))
                    self._running.add(task)
                    task.add_done_callback(self._running.discard)
                pause = self._heap[0].due - self._clock.now() if self._heap else None
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self._wake.wait()
        finally:
            for task in self._running:
                task.cancel()

    async def run_due(self) -> None:
        """Delete everything that is due now, once, and return when that is done."""
        await asyncio.gather(*map(self._run_batch, self._take_due()))

    def _take_due(self) -> list[_Batch]:
        now = self._clock.now()
        due: list[_Batch] = []
        while self._heap and self._heap[0].due <= now:
            due.append(heapq.heappop(self._heap))
        return due

    async def _run_batch(self, batch: _Batch) -> None:
        now = self._clock.now()
        by_storage: defaultdict[str, list[DeletionItem]] = defaultdict(list)
        held: list[DeletionItem] = []
        for item in batch.items:
            (held if self._held_until(item) > now else by_storage[item.storage]).append(item)
        if held:
            self._push(batch.meta_index, held, now + _HELD_RECHECK_SECONDS, batch.attempt)
        await asyncio.gather(*(self._delete(batch, storage, items) for storage, items in by_storage.items() if items))

    async def _delete(self, batch: _Batch, storage: str, items: Sequence[DeletionItem]) -> None:
        async with self._lanes[storage]:
            reasons = await self._delete_bytes(storage, items)
        ids: defaultdict[int, set[str]] = defaultdict(set)
        failed: list[DeletionItem] = []
        for item, reason in zip(items, reasons, strict=True):
            if reason is None:
                ids[item.key].add(item.location_id)
            else:
                failed.append(item)
        if failed:
            self._retry(batch, storage, failed, next(reason for reason in reasons if reason is not None))
        try:
            await batch.meta_index.read_modify_write(ids, lambda key, old: _without(old, ids[key]))
        except Exception as error:  # deleting what is gone already is fine: all of it is tried again
            gone = [item for item in items if item.key in ids]
            self._retry(batch, storage, gone, f"metadata: {type(error).__name__}: {error}")

    def _retry(self, batch: _Batch, storage: str, failed: Sequence[DeletionItem], reason: str) -> None:
        pause = min(_FIRST_PAUSE_SECONDS * 2 ** min(batch.attempt, 16), _LONGEST_PAUSE_SECONDS)
        _log.warning("deletion_failed", storage=storage, count=len(failed), reason=reason, retry_seconds=pause)
        self._push(batch.meta_index, failed, self._clock.now() + pause, batch.attempt + 1)

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
