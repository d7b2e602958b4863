"""What records take, in sums (invariant 4): bytes of locations by place, blocks that are on their way out.

The blocks of a page mostly lie in one place, and hashing a place costs more than all the rest of the counting. So a
tally adds up a run of locations of one place in two numbers, and looks the place up when the next one differs; places
are compared by identity, which at worst ends a run early.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from kvcm.model.locations import BlockRecord, Location, LocationStatus, Place
from kvcm.model.storages import StorageType

__all__ = ["PlaceTally", "Sum", "is_leaving", "sums_of", "takes_the_same"]

_DELETING = LocationStatus.DELETING


class Sum(NamedTuple):
    """One of the numbers that are kept with the records.

    Attributes:
        place: whose bytes; None for the number of blocks.
        is_deleting: whether only what is being deleted counts, else all. All blocks are in no sum.
    """

    place: Place | None
    is_deleting: bool

    @property
    def field(self) -> str:
        """Its name in a store."""
        sign = "-" if self.is_deleting else ""
        return sign if self.place is None else f"{sign}{int(self.place.storage_type)}/{self.place.storage}"

    @classmethod
    def parse(cls, field: str) -> Sum | None:
        """Return the sum of that name, None when it is no name of a sum."""
        if field == "-":
            return cls(None, is_deleting=True)
        number, slash, storage = field.removeprefix("-").partition("/")
        if not slash or not number.isdecimal():
            return None
        return cls(Place(storage, StorageType(int(number))), field.startswith("-"))

    def __str__(self) -> str:
        of = "" if self.place is None else f" on storage {self.place.storage!r} (type {int(self.place.storage_type)})"
        return (
            f"{'blocks' if self.place is None else 'bytes'}{of}{' that are being deleted' if self.is_deleting else ''}"
        )


class PlaceTally:
    """Sums up what records take.

    Attributes:
        deleting_blocks: blocks all of whose locations are being deleted.
    """

    __slots__ = ("_deleting", "_run_deleting", "_run_used", "_storage", "_type", "_used", "deleting_blocks")

    def __init__(self) -> None:
        self._used: Counter[Place] = Counter()
        self._deleting: Counter[Place] = Counter()
        self._storage: str | None = None
        self._type = StorageType.ST_UNSPECIFIED
        self._run_used = 0
        self._run_deleting = 0
        self.deleting_blocks = 0

    @property
    def used(self) -> Counter[Place]:
        """Bytes of all locations."""
        self._end_run()
        return self._used

    @property
    def deleting(self) -> Counter[Place]:
        """Bytes of those that are being deleted; part of `used`."""
        self._end_run()
        return self._deleting

    def change(self, old: BlockRecord | None, new: BlockRecord | None) -> None:
        """Count what a record takes instead of another one; None takes nothing."""
        if old is not None and new is not None and self._keeps_its_bytes(old[2], new[2]):
            return
        if new is not None:
            self.deleting_blocks += is_leaving(new)
            for location in new[2]:
                self._add(location, location[6])
        if old is not None:
            self.deleting_blocks -= is_leaving(old)
            for location in old[2]:
                self._add(location, -location[6])

    def _keeps_its_bytes(self, before: tuple[Location, ...], after: tuple[Location, ...]) -> bool:
        """Count the usual change, that of the status of the only location; return whether it is one."""
        if len(before) != 1 or len(after) != 1:
            return False
        old, new = before[0], after[0]
        if old[1] is not new[1] or old[2] is not new[2] or old[6] != new[6]:
            return False
        if (old[3] is _DELETING) is not (new[3] is _DELETING):
            if new[1] is not self._storage or new[2] is not self._type:
                self._begin_run(new)
            sign = 1 if new[3] is _DELETING else -1
            self._run_deleting += sign * new[6]
            self.deleting_blocks += sign
        return True

    def add(self, place: Place, size_bytes: int) -> None:
        """Count bytes that are not being deleted."""
        self._used[place] += size_bytes

    def update(self, other: PlaceTally) -> None:
        """Add what another one has summed up."""
        self.used.update(other.used)
        self.deleting.update(other.deleting)
        self.deleting_blocks += other.deleting_blocks

    def clear(self) -> None:
        """Begin anew."""
        self._end_run()
        self._used.clear()
        self._deleting.clear()
        self.deleting_blocks = 0

    def _add(self, location: Location, size_bytes: int) -> None:
        if location[1] is not self._storage or location[2] is not self._type:
            self._begin_run(location)
        self._run_used += size_bytes
        if location[3] is _DELETING:
            self._run_deleting += size_bytes

    def _begin_run(self, location: Location) -> None:
        self._end_run()
        self._storage, self._type = location[1], location[2]

    def _end_run(self) -> None:
        if self._storage is None:
            return
        place = Place(self._storage, self._type)
        if self._run_used:
            self._used[place] += self._run_used
        if self._run_deleting:
            self._deleting[place] += self._run_deleting
        self._storage, self._run_used, self._run_deleting = None, 0, 0


def takes_the_same(before: tuple[Location, ...], after: tuple[Location, ...]) -> bool:
    """Return whether two states of a block have the same share in every sum."""
    return len(before) == len(after) and all(map(_same_share, before, after))


def _same_share(old: Location, new: Location) -> bool:
    if old[1] is not new[1] or old[2] is not new[2] or old[6] != new[6]:
        return False
    return (old[3] is _DELETING) is (new[3] is _DELETING)


def is_leaving(record: BlockRecord) -> bool:
    """Return whether all that there is of a block is being deleted."""
    for location in record[2]:  # noqa: SIM110 - a generator would take twice the time
        if location[3] is not _DELETING:
            return False
    return True


def sums_of(used: Mapping[Place, int], deleting: Mapping[Place, int], deleting_blocks: int) -> dict[Sum, int]:
    """Return all sums in one mapping, without those that are 0."""
    kinds: Iterable[tuple[bool, Mapping[Place, int]]] = ((False, used), (True, deleting))
    sums = {Sum(place, is_deleting): size for is_deleting, sizes in kinds for place, size in sizes.items() if size}
    if deleting_blocks:
        sums[Sum(None, is_deleting=True)] = deleting_blocks
    return sums
