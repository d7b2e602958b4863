"""Read leases: a reader pins the locations it was given, so that their bytes stay for a bounded time.

A lease delays the deletion of bytes, nothing else: a removed block vanishes from every answer at once, and whoever
holds a lease can still read what it was given. Leases are bounded in time and in number, so a lost reader costs space
for minutes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from kvcm.cache.deadlines import DeadlineTable
from kvcm.cache.instance_cache import InstanceCache
from kvcm.cache.match import Match
from kvcm.model.clock import Clock
from kvcm.model.deletion import DeletionItem
from kvcm.model.errors import CapacityError, InvalidArgumentError
from kvcm.model.locations import LocationStatus

__all__ = ["MAX_LEASE_MS", "ReadLease", "ReadLeases"]

MAX_LEASE_MS = 600_000
_MAX_LEASES = 100_000
_MAX_PINS = 2_000_000  # some 300 bytes each

Pin = tuple[str, int, str]
"""Instance id, block key, location id."""


@dataclass(frozen=True, slots=True)
class ReadLease:
    """An open lease.

    Attributes:
        id: capability to renew and release it.
        instance_id: the only instance that may do so.
        deadline: unix seconds.
        pins: locations whose bytes stay.
    """

    id: str
    instance_id: str
    deadline: float
    pins: tuple[Pin, ...]


class ReadLeases:
    """The open read leases.

    Args:
        clock: time source.
        new_id: makes unguessable ids.
    """

    def __init__(self, clock: Clock, new_id: Callable[[], str]) -> None:
        self._clock = clock
        self._new_id = new_id
        self._leases: DeadlineTable[ReadLease] = DeadlineTable()
        self._holders: dict[Pin, set[str]] = {}
        self._pin_count = 0

    async def acquire(self, cache: InstanceCache, match: Match, lease_ms: int) -> ReadLease:
        """Pin every serving location of the keys that a match hit.

        Raises:
            InvalidArgumentError: the duration is out of range.
            CapacityError: too many leases are open.
        """
        self.expire()
        deadline = self._deadline(lease_ms)
        if len(self._leases) >= _MAX_LEASES:
            raise CapacityError(f"{_MAX_LEASES} read leases are open: release some or let them expire")
        instance_id = cache.instance.instance_id
        records = await cache.index.get(match.keys)
        pins = tuple(
            (instance_id, key, location.id)
            for key, record in zip(match.keys, records, strict=True)
            for location in (record.locations if record is not None else ())
            if location.status is LocationStatus.SERVING
        )
        if self._pin_count + len(pins) > _MAX_PINS:
            raise CapacityError(f"{_MAX_PINS} locations are pinned: release some leases or let them expire")
        lease = ReadLease(self._new_id(), instance_id, deadline, pins)
        self._leases.put(lease)
        self._pin_count += len(pins)
        for pin in pins:
            self._holders.setdefault(pin, set()).add(lease.id)
        return lease

    def renew(self, instance_id: str, lease_id: str, lease_ms: int) -> ReadLease:
        """Move a lease's deadline.

        Raises:
            InvalidArgumentError: the lease is not open for this instance, or the duration is out of range.
        """
        lease = replace(self._open(instance_id, lease_id), deadline=self._deadline(lease_ms))
        self._leases.put(lease)
        return lease

    def release(self, instance_id: str, lease_id: str) -> None:
        """End a lease. One that has ended already is fine: the answer to the first release may have been lost.

        Raises:
            InvalidArgumentError: the lease is open for another instance.
        """
        self.expire()
        if self._leases.get(lease_id) is not None:
            self._open(instance_id, lease_id)
            self._forget(self._leases.take(lease_id))

    def held_until(self, item: DeletionItem) -> float:
        """Return the unix time until which a location's bytes are pinned, 0 when they are not."""
        self.expire()
        holders = self._holders.get((item.instance_id, item.key, item.location_id), ())
        leases = [self._leases.get(lease_id) for lease_id in holders]
        return max((lease.deadline for lease in leases if lease is not None), default=0.0)

    def expire(self) -> None:
        """End the leases whose deadline has passed."""
        for lease in self._leases.pop_due(self._clock.now()):
            self._forget(lease)

    def _deadline(self, lease_ms: int) -> float:
        if not 1 <= lease_ms <= MAX_LEASE_MS:
            raise InvalidArgumentError(f"read_lease_ms is {lease_ms}, must be from 1 to {MAX_LEASE_MS}")
        return self._clock.now() + lease_ms / 1000

    def _open(self, instance_id: str, lease_id: str) -> ReadLease:
        self.expire()
        lease = self._leases.get(lease_id)
        if lease is None or lease.instance_id != instance_id:
            raise InvalidArgumentError("read_lease_id is unknown, released or expired")
        return lease

    def _forget(self, lease: ReadLease | None) -> None:
        if lease is None:
            return
        self._pin_count -= len(lease.pins)
        for pin in lease.pins:
            holders = self._holders.get(pin, set())
            holders.discard(lease.id)
            if not holders:
                self._holders.pop(pin, None)
