"""Invariant 5: an extent of a storage belongs to exactly one location.

Extents are gathered part by part of all objects, an object belonging to the part that a hash of its name says, and
each part is sorted by object and offset, where those that overlap stand side by side. A part holds `PART_EXTENTS` of
40 bytes on average, and sorting it takes as much again: about 200 MB at most. So the memory does not grow with the
index; the number of passes over it does.

Objects are told apart by 64 bits of a hash. Whoever asks reads the locations of a pair again and compares the names
themselves (`overlapping`), so two names with one hash are no finding.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
from xxhash import xxh3_64_intdigest

from kvcm.model.errors import InvalidArgumentError
from kvcm.model.locations import BlockRecord, Location, decode_chunk
from kvcm.model.uri import LocationUri

__all__ = ["PART_EXTENTS", "Extent", "ExtentPart", "Owner", "extents_of", "overlapping", "part_count"]

PART_EXTENTS: Final = 2_000_000
_WHOLE: Final = 1 << 62
_OBJECT_BITS: Final = 63


class Owner(NamedTuple):
    """A block of an instance."""

    uid: int
    key: int


class Extent(NamedTuple):
    """Bytes of an object; of one that is not packed all there are."""

    object_name: str
    start: int
    end: int


def part_count(extents: int) -> int:
    """Return into how many parts to cut so many extents."""
    return max(1, -(-extents // PART_EXTENTS))


def extents_of(location: Location) -> list[Extent]:
    """Return what a location has of its storage; specs that are not there have nothing.

    Raises:
        InvalidArgumentError: a uri cannot be read.
    """
    return [_extent(spec.uri) for spec in decode_chunk(location.chunk).specs if spec.uri]


def overlapping(one: Location, other: Location) -> Extent | None:
    """Return an extent of `one` that `other` has too, None when there is none."""
    others = extents_of(other)
    for mine in extents_of(one):
        for theirs in others:
            if mine.object_name == theirs.object_name and mine.start < theirs.end and theirs.start < mine.end:
                return mine
    return None


def _extent(uri: str) -> Extent:
    parsed = LocationUri.parse(uri)
    # Of a pool's memory the stamp says whose it is: what was freed may have the place of what is there now.
    whose = parsed.key if parsed.range_id is None else parsed.range_id
    name = f"{parsed.scheme}://{parsed.storage}{parsed.path}?{whose or ''}"
    if parsed.blkid is None:
        return Extent(name, 0, _WHOLE)
    start = min(parsed.offset, _WHOLE - 1)  # what a storage cannot hold still has to fit into a column
    return Extent(name, start, min(start + max(1, parsed.size), _WHOLE))


class ExtentPart:
    """The extents of the objects of one part.

    Args:
        number: of the part, counted from 0.
        count: number of parts.
    """

    def __init__(self, number: int, count: int) -> None:
        self._number = number
        self._count = count
        self._columns = tuple(array("q") for _ in range(5))  # object, start, end, uid, key

    def __len__(self) -> int:
        return len(self._columns[0])

    def add(self, owner: Owner, record: BlockRecord) -> str:
        """Add what the locations of a block have in this part; return why a uri cannot be read, "" when all can."""
        damage = ""
        for location in record.locations:
            try:
                for name, start, end in extents_of(location):
                    digest = xxh3_64_intdigest(name.encode())
                    if digest % self._count == self._number:
                        self._append(digest >> (64 - _OBJECT_BITS), start, end, *owner)
            except InvalidArgumentError as error:
                damage = str(error)
        return damage

    def suspects(self, most: int) -> Iterator[tuple[Owner, Owner]]:
        """Yield pairs of blocks whose extents overlap, by the hashes of their objects; a block with itself, too."""
        if len(self) < 2:
            return
        objects, starts, ends, uids, keys = (np.frombuffer(column, np.int64) for column in self._columns)
        order = np.lexsort((starts, objects))
        objects, starts, ends, uids, keys = (column[order] for column in (objects, starts, ends, uids, keys))
        same = objects[1:] == objects[:-1]
        touched = np.unique(objects[1:][same & (starts[1:] < ends[:-1])])  # if any two overlap, some neighbours do
        found = 0
        for name in touched:
            first, last = np.searchsorted(objects, (name, name + 1))
            reach, holder = -1, first
            for at in range(first, last):
                if starts[at] < reach:
                    yield Owner(int(uids[holder]), int(keys[holder])), Owner(int(uids[at]), int(keys[at]))
                    found += 1
                    if found >= most:
                        return
                if ends[at] > reach:
                    reach, holder = int(ends[at]), at

    def _append(self, *values: int) -> None:
        for column, value in zip(self._columns, values, strict=True):
            column.append(value)
