"""Bytes and blocks in use, and what a write may still take (wire.md 9.4).

A write reserves what it plans before it allocates, so that writes that overlap never exceed a limit together. What is
counted follows from the changes of the indexes (invariant 4).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from typing import NamedTuple, Protocol

from kvcm.cache.limits import Limits, StorageLimit
from kvcm.index.meta_index import MetaIndex, UsageListener
from kvcm.model.locations import Place
from kvcm.model.storages import StorageType

__all__ = ["Ledger", "Reservation", "Room", "Taken", "UsageLedger"]


class Reservation(NamedTuple):
    """What one write session is about to take.

    Attributes:
        owner: id of the session.
        limits: those of the group that it counts against.
        uid: number of the instance, whose key limit it counts against.
        wanted_bytes: by place.
        new_keys: blocks that the index does not know yet.
        deadline: unix seconds; a reservation of a manager that died is void afterwards.
    """

    owner: str
    limits: Limits
    uid: int
    wanted_bytes: Mapping[Place, int]
    new_keys: int
    deadline: float


class Ledger(Protocol):
    """Keeps count of groups and storages. Of a shared store, what is told without waiting is as last heard.

    Attributes:
        refusals: writes that this manager refused for want of room, wholly or partly, by group.
    """

    refusals: Counter[str]

    def listener(self, group_name: str, uid: int) -> UsageListener:
        """Return the listener for the index of an instance of a group."""

    def used(self, group_name: str) -> Mapping[Place, int]:
        """Return the bytes that a group uses, by place."""

    def held(self, group_name: str) -> Mapping[Place, int]:
        """Return the bytes that a group uses, by place, at least: what is reserved for writes may be among them."""

    def held_on(self, storage: str) -> Mapping[str, int]:
        """Return the same of a storage, by group."""

    def held_by_group(self) -> Mapping[str, int]:
        """Return the same in total, by group."""

    async def hear(self, group_name: str, storages: Collection[str] = ()) -> None:
        """Ask the store what a group uses, and what all groups use on some storages."""

    async def hear_groups(self, group_names: Collection[str]) -> None:
        """Ask the store what groups use, all at once."""

    async def room(self, limits: Limits, uid: int, index: MetaIndex) -> Room:
        """Return what an instance of a group may still take right now."""

    async def reserve(self, reservation: Reservation, index: MetaIndex) -> bool:
        """Take what was planned. False: it does not fit any more; nothing is taken then."""

    async def release(self, reservation: Reservation, index: MetaIndex) -> None:
        """Give back what was reserved and nothing was stored of, before more is reserved; `settle` follows."""

    def settle(self, reservation: Reservation, index: MetaIndex) -> None:
        """End a reservation: what was stored under it is counted by the index from now on."""


class Taken(NamedTuple):
    """Bytes that are used or reserved.

    Attributes:
        by_place: of the group.
        by_storage: of every storage with a limit, by group.
        by_group: of the groups that share a global quota.
    """

    by_place: Mapping[Place, int]
    by_storage: Mapping[str, Mapping[str, int]]
    by_group: Mapping[str, int]


class _Tally:
    """Bytes by group and place, and the sums that limits are compared with."""

    def __init__(self) -> None:
        self.places: defaultdict[str, Counter[Place]] = defaultdict(Counter)
        self.storages: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.groups: Counter[str] = Counter()

    def add(self, group_name: str, difference: Mapping[Place, int], sign: int = 1) -> None:
        for place, size in difference.items():
            self.places[group_name][place] += sign * size
            self.storages[place.storage][group_name] += sign * size
            self.groups[group_name] += sign * size


class UsageLedger:
    """Usage of all groups while no other manager works on the store: exact, and nothing ever suspends."""

    def __init__(self) -> None:
        self._used = _Tally()
        self._taken = _Tally()
        self.refusals: Counter[str] = Counter()

    def listener(self, group_name: str, uid: int) -> UsageListener:
        def note(difference: Mapping[Place, int], _keys: int) -> None:
            self._used.add(group_name, difference)
            self._taken.add(group_name, difference)

        return lambda: note

    def used(self, group_name: str) -> Mapping[Place, int]:
        return self._used.places.get(group_name, Counter())

    def held(self, group_name: str) -> Mapping[Place, int]:
        return self.used(group_name)

    def held_on(self, storage: str) -> Mapping[str, int]:
        return self._used.storages.get(storage, Counter())

    def held_by_group(self) -> Mapping[str, int]:
        return self._used.groups

    async def hear(self, group_name: str, storages: Collection[str] = ()) -> None:
        """Everything is known here already."""

    async def hear_groups(self, group_names: Collection[str]) -> None:
        """Everything is known here already."""

    async def room(self, limits: Limits, uid: int, index: MetaIndex) -> Room:
        taken = Taken(self._taken.places[limits.group.name], self._taken.storages, self._taken.groups)
        return Room(limits, taken, index.free_key_count)

    async def reserve(self, reservation: Reservation, index: MetaIndex) -> bool:
        self._taken.add(reservation.limits.group.name, reservation.wanted_bytes)
        index.reserve_keys(reservation.new_keys)
        return True

    async def release(self, reservation: Reservation, index: MetaIndex) -> None:
        """Settling does that at once."""

    def settle(self, reservation: Reservation, index: MetaIndex) -> None:
        self._taken.add(reservation.limits.group.name, reservation.wanted_bytes, -1)
        index.reserve_keys(-reservation.new_keys)


class Room:
    """What a group may still take; the planning of one write takes from it block by block.

    Args:
        limits: of the group.
        taken: bytes already used or reserved.
        free_keys: blocks that the index still accepts.
    """

    def __init__(self, limits: Limits, taken: Taken, free_keys: int) -> None:
        self._limits = limits
        self._by_type: Counter[StorageType] = Counter()
        for place, size in taken.by_place.items():
            self._by_type[place.storage_type] += size
        self._total = sum(taken.by_place.values())
        self._by_storage = taken.by_storage
        self._on_storage: dict[str, tuple[int, int]] = {}
        self._shared = sum(taken.by_group.get(name, 0) for name in limits.shared.group_names) if limits.shared else 0
        self._planned: Counter[str] = Counter()
        self.free_keys = free_keys

    def limit(self, place: Place, size_bytes: int) -> str | None:
        """Return None when `size_bytes` fit in a place, else the limit that they would exceed."""
        return (
            self._group_limit(size_bytes)
            or self._shared_limit(size_bytes)
            or self._type_limit(place.storage_type, size_bytes)
            or self._storage_limit(place.storage, size_bytes)
        )

    def _group_limit(self, size_bytes: int) -> str | None:
        group = self._limits.group
        if self._total + size_bytes <= group.quota.capacity:
            return None
        return (
            f"group {group.name!r} is full: it uses {self._total} of its quota.capacity of {group.quota.capacity} bytes"
        )

    def _shared_limit(self, size_bytes: int) -> str | None:
        if self._limits.shared is None:
            return None
        quota = self._limits.shared.quota
        if self._shared + size_bytes <= quota.capacity_bytes:
            return None
        return (
            f"global quota {quota.name!r} is full: its groups use {self._shared} of its capacity_bytes of "
            f"{quota.capacity_bytes}"
        )

    def _type_limit(self, storage_type: StorageType, size_bytes: int) -> str | None:
        group = self._limits.group
        capacity = group.quota.capacity_of(storage_type)
        used = self._by_type[storage_type]
        if capacity is None or used + size_bytes <= capacity:
            return None
        kind = storage_type.kind
        return f"group {group.name!r} is full on {kind}: it uses {used} of its quota of {capacity} bytes on {kind}"

    def _storage_limit(self, storage: str, size_bytes: int) -> str | None:
        limit = self._limits.storages.get(storage)
        if limit is None:
            return None
        used, kept = self._on_storage.get(storage) or self._look_at(storage, limit)
        used += self._planned[storage]
        if used + kept + size_bytes <= limit.capacity_bytes:
            return None
        others = f" and {kept} more are guaranteed to other groups" if kept else ""
        return f"storage {storage!r} is full: {used} of its capacity_bytes of {limit.capacity_bytes} are used{others}"

    def _look_at(self, storage: str, limit: StorageLimit) -> tuple[int, int]:
        """Return what is taken on a storage, and what is kept beside that for other groups."""
        taken = self._by_storage.get(storage, {})
        kept_from = limit.kept_from(self._limits.group.name).items()
        kept = sum(max(0, size - taken.get(name, 0)) for name, size in kept_from)
        self._on_storage[storage] = sum(taken.values()), kept
        return self._on_storage[storage]

    def fitting(self, place: Place, size_bytes: int, most: int) -> int:
        """Return how many times `size_bytes` fit in a place one after the other, at most so many times."""
        group, shared, limit = self._limits.group, self._limits.shared, self._limits.storages.get(place.storage)
        free = group.quota.capacity - self._total
        if shared is not None:
            free = min(free, shared.quota.capacity_bytes - self._shared)
        capacity = group.quota.capacity_of(place.storage_type)
        if capacity is not None:
            free = min(free, capacity - self._by_type[place.storage_type])
        if limit is not None:
            used, kept = self._on_storage.get(place.storage) or self._look_at(place.storage, limit)
            free = min(free, limit.capacity_bytes - used - self._planned[place.storage] - kept)
        if free < size_bytes:
            return 0
        return min(most, free // size_bytes) if size_bytes else most

    def take(self, place: Place, size_bytes: int) -> None:
        """Count bytes as taken."""
        self._by_type[place.storage_type] += size_bytes
        self._planned[place.storage] += size_bytes
        self._total += size_bytes
        self._shared += size_bytes
