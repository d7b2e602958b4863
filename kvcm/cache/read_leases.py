"""Read leases: a reader pins the locations it was given, so that their bytes stay for a bounded time.

A lease delays the deletion of bytes, nothing else: a removed block vanishes from every answer at once, and the
holder of a lease can still read its locations. Leases are bounded in time and in number, so a lost reader costs space
for minutes. A lease is a document of the store: a deletion sees the leases of other managers.
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

import msgspec
import structlog

from kvcm.cache.instance_cache import InstanceCache
from kvcm.cache.prefix_match import Match
from kvcm.model.clock import Clock
from kvcm.model.errors import CapacityError, InvalidArgumentError, NotReadyError, StorageIOError
from kvcm.model.keys import encode_keys, mixed
from kvcm.model.locations import DeletionItem, LocationStatus
from kvcm.store.store import Table

__all__ = ["MAX_LEASE_MS", "DeadlineTable", "ReadLease", "ReadLeases"]

MAX_LEASE_MS = 600_000
_MAX_LEASES = 100_000
_MAX_LEASED_LOCATIONS = 2_000_000  # some 300 bytes each
_MOST_DUE = 1024
_FORMAT = 1
_log = structlog.get_logger("kvcm.cache")
LeasedLocation = tuple[int, int, str]
"""Number of the instance, block key, location id."""


class _Document(msgspec.Struct, array_like=True, frozen=True):
    version: int
    uid: int
    deadline: float
    keys: bytes
    location_ids: list[str]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Document)


@dataclass(frozen=True, slots=True)
class ReadLease:
    """An open lease.

    Attributes:
        id: capability to renew and release it.
        uid: number of the only instance that may do so.
        deadline: unix seconds.
        locations: locations whose bytes stay.
    """

    id: str
    uid: int
    deadline: float
    locations: tuple[LeasedLocation, ...]

    def encoded(self) -> bytes:
        """Return the lease's document; its id is the document's name."""
        keys = encode_keys([key for _, key, _ in self.locations])
        return _encoder.encode(_Document(_FORMAT, self.uid, self.deadline, keys, [pin[2] for pin in self.locations]))

    @classmethod
    def decoded(cls, lease_id: str, document: bytes) -> ReadLease:
        """Read what `encoded` wrote.

        Raises:
            StorageIOError: it is damaged or of another release.
        """
        try:
            stored = _decoder.decode(document)
            keys = mixed(array("q", stored.keys))
            pins = tuple((stored.uid, key, place) for key, place in zip(keys, stored.location_ids, strict=True))
        except ValueError as error:  # msgspec's errors are such, too
            raise StorageIOError(f"a stored read lease cannot be read: {error}") from error
        if stored.version != _FORMAT:
            raise StorageIOError(f"a stored read lease has format {stored.version}, this release knows {_FORMAT}")
        return cls(lease_id, stored.uid, stored.deadline, pins)


# Expiry is exact and cheap with many open leases: a heap of (deadline, id). Leases that ended early or were renewed
# stay in the heap until their old deadline; the deadline in the table marks them as stale. The heap is rebuilt when
# stale entries outweigh the open leases.


class _Expiring(Protocol):
    """Something with an id and a deadline in unix seconds."""

    @property
    def id(self) -> str: ...

    @property
    def deadline(self) -> float: ...


Entry = TypeVar("Entry", bound=_Expiring)


class DeadlineTable(Generic[Entry]):
    """Open entries by id. An entry leaves exactly once: taken, or popped when due."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._heap: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, entry: Entry) -> None:
        """Add an entry, or replace the one of the same id by a renewed one."""
        self._entries[entry.id] = entry
        heapq.heappush(self._heap, (entry.deadline, entry.id))
        if len(self._heap) > 2 * len(self._entries) + 1024:
            self._heap = [(entry.deadline, entry.id) for entry in self._entries.values()]
            heapq.heapify(self._heap)

    def get(self, entry_id: str) -> Entry | None:
        """Return an open entry, None when there is none of that id."""
        return self._entries.get(entry_id)

    def pop(self, entry_id: str) -> Entry | None:
        """Remove and return an open entry, None when there is none of that id."""
        return self._entries.pop(entry_id, None)

    def values(self) -> list[Entry]:
        """Return all open entries."""
        return list(self._entries.values())

    def pop_due(self, now: float, most: int | None = None) -> list[Entry]:
        """Remove and return the entries whose deadline is not after `now`, earliest first, at most so many."""
        due: list[Entry] = []
        while self._heap and self._heap[0][0] <= now and (most is None or len(due) < most):
            _, entry_id = heapq.heappop(self._heap)
            entry = self._entries.get(entry_id)
            if entry is not None and entry.deadline <= now:
                due.append(self._entries.pop(entry_id))
        return due


class ReadLeases:
    """The open read leases.

    Args:
        table: where they are stored.
        clock: time source.
        new_id: makes unguessable ids.
        is_shared: whether other managers give leases too.
    """

    def __init__(self, table: Table, clock: Clock, new_id: Callable[[], str], *, is_shared: bool = False) -> None:
        self._table = table
        self._clock = clock
        self._new_id = new_id
        self._is_shared = is_shared
        self._leases: DeadlineTable[ReadLease] = DeadlineTable()
        self._holders: dict[LeasedLocation, set[str]] = {}
        self._pin_count = 0

    async def load(self) -> None:
        """Read the leases in the store: those given before a restart, or by other managers."""
        for lease_id in await self._table.due(math.inf, _MAX_LEASES):
            if self._leases.get(lease_id) is None:
                await self._load_lease(lease_id)

    async def acquire(self, cache: InstanceCache, match: Match, lease_ms: int) -> ReadLease:
        """Pin every serving location of the keys that a match hit.

        Raises:
            InvalidArgumentError: the duration is out of range.
            CapacityError: too many leases are open.
        """
        self._remove_overdue(self._clock.now())
        deadline = self._deadline(lease_ms)
        if len(self._leases) >= _MAX_LEASES:
            raise CapacityError(f"{_MAX_LEASES} read leases are open: release some or let them expire")
        uid = cache.placement.uid
        records = await cache.index.get(match.keys)
        pins = tuple(
            (uid, key, location.id)
            for key, record in zip(match.keys, records, strict=True)
            for location in (record.locations if record is not None else ())
            if location.status is LocationStatus.SERVING
        )
        if self._pin_count + len(pins) > _MAX_LEASED_LOCATIONS:
            raise CapacityError(f"{_MAX_LEASED_LOCATIONS} locations are pinned: release some leases or let them expire")
        lease = ReadLease(self._new_id(), uid, deadline, pins)
        await self._table.replace(name=lease.id, old=None, new=lease.encoded(), due=deadline)
        self._add(lease)
        return lease

    async def renew(self, cache: InstanceCache, lease_id: str, lease_ms: int) -> ReadLease:
        """Move a lease's deadline.

        Raises:
            InvalidArgumentError: the lease is not open for this instance, or the duration is out of range.
        """
        old = await self._open(cache, lease_id)
        lease = replace(old, deadline=self._deadline(lease_ms))
        if not await self._table.replace(lease_id, old.encoded(), lease.encoded(), lease.deadline):
            raise NotReadyError("the read lease changed meanwhile: renew it again")
        self._add(lease)
        return lease

    async def release(self, cache: InstanceCache, lease_id: str) -> None:
        """End a lease. One that has ended already is fine: the answer to the first release may have been lost.

        Raises:
            InvalidArgumentError: the lease is open for another instance.
        """
        document = await self._table.get(lease_id)
        if document is None:
            return
        lease = ReadLease.decoded(lease_id, document)
        if lease.uid != cache.placement.uid and lease.deadline > self._clock.now():
            raise InvalidArgumentError("read_lease_id is unknown, released or expired")
        await self._table.replace(lease_id, document, None)
        self._forget(self._leases.pop(lease_id))

    async def leased_until(self, items: Sequence[DeletionItem]) -> list[float]:
        """Return per location the unix time until which its bytes are pinned, 0 when they are not."""
        self._remove_overdue(self._clock.now())
        if self._is_shared:
            await self.load()
            await self._refresh(
                {lease_id for item in items for lease_id in self._holders.get(_leased_location(item), ())}
            )
        if not self._holders:
            return [0.0] * len(items)
        return [self._leased_until(_leased_location(item)) for item in items]

    def _leased_until(self, pin: LeasedLocation) -> float:
        leases = [self._leases.get(lease_id) for lease_id in self._holders.get(pin, ())]
        return max((lease.deadline for lease in leases if lease is not None), default=0.0)

    async def _refresh(self, lease_ids: set[str]) -> None:
        """Read leases that another manager renewed or released."""
        for lease_id in lease_ids:
            await self._load_lease(lease_id)

    async def _load_lease(self, lease_id: str) -> None:
        document = await self._table.get(lease_id)
        if document is None:
            self._forget(self._leases.pop(lease_id))
            return
        try:
            self._add(ReadLease.decoded(lease_id, document))
        except StorageIOError as error:  # its pins are unknown; it must not block deletions for ever
            _log.warning("read_lease_unreadable", lease=lease_id[:8], reason=str(error))

    async def expire(self) -> None:
        """End the leases whose deadline has passed, those of managers that died included."""
        now = self._clock.now()
        self._remove_overdue(now)
        for lease_id in await self._table.due(now, _MOST_DUE) if self._table.due_from <= now else ():
            await self._drop(lease_id, now)

    def _remove_overdue(self, now: float) -> None:
        for lease in self._leases.pop_due(now):
            self._forget(lease)

    async def _drop(self, lease_id: str, now: float) -> None:
        document = await self._table.get(lease_id)
        if document is None:
            return
        with suppress(StorageIOError):  # one that cannot be read goes when it is due
            if ReadLease.decoded(lease_id, document).deadline > now:
                return
        await self._table.replace(lease_id, document, None)

    def _deadline(self, lease_ms: int) -> float:
        if not 1 <= lease_ms <= MAX_LEASE_MS:
            raise InvalidArgumentError(f"read_lease_ms is {lease_ms}, must be from 1 to {MAX_LEASE_MS}")
        return self._clock.now() + lease_ms / 1000

    async def _open(self, cache: InstanceCache, lease_id: str) -> ReadLease:
        document = await self._table.get(lease_id)
        lease = ReadLease.decoded(lease_id, document) if document is not None else None
        if lease is None or lease.uid != cache.placement.uid or lease.deadline <= self._clock.now():
            raise InvalidArgumentError("read_lease_id is unknown, released or expired")
        return lease

    def _add(self, lease: ReadLease) -> None:
        if self._leases.get(lease.id) is None:
            self._pin_count += len(lease.locations)
            for pin in lease.locations:
                self._holders.setdefault(pin, set()).add(lease.id)
        self._leases.put(lease)

    def _forget(self, lease: ReadLease | None) -> None:
        if lease is None:
            return
        self._pin_count -= len(lease.locations)
        for pin in lease.locations:
            holders = self._holders.get(pin, set())
            holders.discard(lease.id)
            if not holders:
                self._holders.pop(pin, None)


def _leased_location(item: DeletionItem) -> LeasedLocation:
    return item.uid, item.key, item.location_id
