"""Bytes used per instance group and storage type, and what a write may still take (wire.md 9.4).

Counted from the changes of the indexes, so usage is the sum of the sizes of the recorded locations whatever happens
(invariant 4). A write reserves its bytes before it allocates: writes that overlap can never exceed a limit together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from kvcm.index.meta_index import UsageListener
from kvcm.model.groups import InstanceGroup
from kvcm.model.storages import StorageType

__all__ = ["Room", "UsageLedger"]


class UsageLedger:
    """Usage of all groups."""

    def __init__(self) -> None:
        self._used: dict[str, Counter[StorageType]] = {}
        self._reserved: dict[str, Counter[StorageType]] = {}

    def listener(self, group_name: str) -> UsageListener:
        """Return the listener for the indexes of a group."""
        used = self._used.setdefault(group_name, Counter())

        def on_usage(storage_type: StorageType, difference_bytes: int) -> None:
            used[storage_type] += difference_bytes

        return on_usage

    def used(self, group_name: str) -> Mapping[StorageType, int]:
        """Return the bytes that a group uses, by storage type."""
        return self._used.get(group_name, Counter())

    def room(self, group: InstanceGroup) -> Room:
        """Return what the group may still take right now."""
        taken = self._used.get(group.name, Counter()) + self._reserved.get(group.name, Counter())
        return Room(group, taken)

    @contextmanager
    def reserve(self, group_name: str, wanted: Mapping[StorageType, int]) -> Iterator[None]:
        """Count `wanted` bytes as taken until the index has counted them itself."""
        reserved = self._reserved.setdefault(group_name, Counter())
        reserved.update(wanted)
        try:
            yield
        finally:
            reserved.subtract(wanted)


class Room:
    """What a group may still take; the planning of one write takes from it block by block.

    Args:
        group: its quota.
        taken: bytes already used or reserved, by storage type.
    """

    def __init__(self, group: InstanceGroup, taken: Mapping[StorageType, int]) -> None:
        self._group = group
        self._taken = Counter(taken)
        self._total = sum(taken.values())

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
