"""Bytes and blocks in use per instance group, and what a write may still take (wire.md 9.4).

A write reserves what it plans before it allocates, so that writes that overlap never exceed a limit together. What is
counted follows from the changes of the indexes (invariant 4).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple, Protocol

from kvcm.index.meta_index import MetaIndex, UsageListener
from kvcm.model.groups import InstanceGroup
from kvcm.model.storages import StorageType

__all__ = ["Ledger", "Reservation", "Room", "UsageLedger"]


class Reservation(NamedTuple):
    """What one write session is about to take.

    Attributes:
        owner: id of the session.
        group: the group whose quota it counts against.
        uid: number of the instance, whose key limit it counts against.
        wanted_bytes: by storage type.
        new_keys: blocks that the index does not know yet.
        deadline: unix seconds; a reservation of a manager that died is void afterwards.
    """

    owner: str
    group: InstanceGroup
    uid: int
    wanted_bytes: Mapping[StorageType, int]
    new_keys: int
    deadline: float


class Ledger(Protocol):
    """Keeps count of groups."""

    def listener(self, group_name: str, uid: int) -> UsageListener:
        """Return the listener for the index of an instance of a group."""

    def used(self, group_name: str) -> Mapping[StorageType, int]:
        """Return the bytes that a group uses, by storage type; of a shared store as last heard."""

    async def hear(self, group_name: str) -> None:
        """Ask the store what a group uses."""

    async def room(self, group: InstanceGroup, uid: int, index: MetaIndex) -> Room:
        """Return what an instance of the group may still take right now."""

    async def reserve(self, reservation: Reservation, index: MetaIndex) -> bool:
        """Take what was planned. False: it does not fit any more; nothing is taken then."""

    def settle(self, reservation: Reservation, index: MetaIndex) -> None:
        """End a reservation: what was stored under it is counted by the index from now on."""


class UsageLedger:
    """Usage of all groups while no other manager works on the store: exact, and nothing ever suspends."""

    def __init__(self) -> None:
        self._used: dict[str, Counter[StorageType]] = {}
        self._reserved: dict[str, Counter[StorageType]] = {}

    def listener(self, group_name: str, uid: int) -> UsageListener:
        used = self._used.setdefault(group_name, Counter())

        def note(difference: Mapping[StorageType, int], _keys: int) -> None:
            used.update(difference)

        return lambda: note

    def used(self, group_name: str) -> Mapping[StorageType, int]:
        return self._used.get(group_name, Counter())

    async def hear(self, group_name: str) -> None:
        """Everything is known here already."""

    async def room(self, group: InstanceGroup, uid: int, index: MetaIndex) -> Room:
        taken = self._used.get(group.name, Counter()) + self._reserved.get(group.name, Counter())
        return Room(group, taken, index.free_key_count)

    async def reserve(self, reservation: Reservation, index: MetaIndex) -> bool:
        self._reserved.setdefault(reservation.group.name, Counter()).update(reservation.wanted_bytes)
        index.reserve_keys(reservation.new_keys)
        return True

    def settle(self, reservation: Reservation, index: MetaIndex) -> None:
        self._reserved[reservation.group.name].subtract(reservation.wanted_bytes)
        index.reserve_keys(-reservation.new_keys)


class Room:
    """What a group may still take; the planning of one write takes from it block by block.

    Args:
        group: its quota.
        taken: bytes already used or reserved, by storage type.
        free_keys: blocks that the index still accepts.
    """

    def __init__(self, group: InstanceGroup, taken: Mapping[StorageType, int], free_keys: int) -> None:
        self._group = group
        self._taken = Counter(taken)
        self._total = sum(taken.values())
        self.free_keys = free_keys

    def limit(self, storage_type: StorageType, size_bytes: int) -> str | None:
        """Return None when `size_bytes` fit on a storage type, else the limit that they would exceed."""
        quota = self._group.quota
        if self._total + size_bytes > quota.capacity:
            return f"group {self._group.name!r} uses {self._total} of its quota.capacity of {quota.capacity} bytes"
        capacity = quota.capacity_of(storage_type)
        used = self._taken[storage_type]
        if capacity is not None and used + size_bytes > capacity:
            return f"group {self._group.name!r} uses {used} of its {capacity} bytes on {storage_type.kind}"
        return None

    def take(self, storage_type: StorageType, size_bytes: int) -> None:
        """Count bytes as taken."""
        self._taken[storage_type] += size_bytes
        self._total += size_bytes
