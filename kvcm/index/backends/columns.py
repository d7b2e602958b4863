"""Blocks in columns: one row per block, a dict from key to row.

Arrays and lists by row cost a third of what objects per block cost, and leave the garbage collector next to nothing to
walk through. Rejected: a tuple per block (50 bytes more, and a dict of children beside it), free rows behind removed
blocks (sampling would have to draw again, and tidying up would stop the loop).

Invariants:

* Rows are dense: a removed block's row is taken by the last one at once.
* Whoever follows is told of a change at its end, when all columns are as they stay; only of a removal before it.
* The children of a block are a doubly linked list of rows, so that a prefix with many continuations loses one in
  constant time. Its head is kept in the row of the parent, or in `_orphans` while the parent has no row.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableSequence, Sequence
from heapq import nsmallest
from random import Random
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from kvcm.index.backends.access import Access, is_resident, stored_at, whole_seconds
from kvcm.index.backends.packed import Chunks, Header, HeaderPool, Headers, unpack
from kvcm.index.backends.rows import RowObserver
from kvcm.model.locations import BlockRecord, Location, LocationStatus

__all__ = ["NO_ROW", "BlockColumns"]

NO_ROW = -1
"""Where a column of rows has none."""
_MOST_READS = (1 << 16) - 1
_SERVING = LocationStatus.SERVING

# See packed.py: from a ready tuple a named tuple is made in a third of the time.
_new_location = cast("Callable[[type[Location], tuple[object, ...]], Location]", tuple.__new__)
_new_record = cast("Callable[[type[BlockRecord], tuple[object, ...]], BlockRecord]", tuple.__new__)


class BlockColumns:
    """Records of blocks by key, with the children and the last access of each; the same by row (`Rows`). Keys and
    parents are int64."""

    __slots__ = (
        "_chunks",
        "_columns",
        "_depths",
        "_first_child",
        "_headers",
        "_keys",
        "_next",
        "_observer",
        "_orphans",
        "_parents",
        "_pool",
        "_previous",
        "_read_at",
        "_reads",
        "_rows",
    )

    def __init__(self) -> None:
        self._rows: dict[int, int] = {}
        self._orphans: dict[int, int] = {}
        self._pool = HeaderPool()
        self._observer: RowObserver | None = None
        self._keys = array("q")
        self._parents = array("q")
        self._depths = array("i")  # the complement where there is no parent
        self._headers: list[Headers] = []
        self._chunks: list[Chunks] = []
        self._first_child = array("i")
        self._next = array("i")
        self._previous = array("i")
        self._read_at = array("I")
        self._reads = array("H")
        self._columns: tuple[MutableSequence[Any], ...] = (
            *(self._keys, self._parents, self._depths, self._headers, self._chunks),
            *(self._first_child, self._next, self._previous, self._read_at, self._reads),
        )

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, key: int) -> bool:
        return key in self._rows

    def keys(self) -> array[int]:
        """Return all keys; a copy of numbers, since one of objects would stop the loop for longer and hold on to them
        as long as a scan takes."""
        return self._keys[:]

    def sample(self, count: int, random: Random) -> list[int]:
        """Return `count` distinct keys (all, if there are fewer), each equally likely."""
        if count >= len(self._rows):
            return list(self._rows)
        return [self._keys[row] for row in random.sample(range(len(self._rows)), count)]

    def get(self, keys: Sequence[int]) -> list[BlockRecord | None]:
        """Return the records of `keys`, in order; None where there is none."""
        all_headers, all_chunks, depths, parents = self._headers, self._chunks, self._depths, self._parents
        if self._rows.keys().isdisjoint(keys):
            return [None] * len(keys)
        records: list[BlockRecord | None] = []
        for row in map(self._rows.get, keys):
            if row is None:
                records.append(None)
                continue
            of, chunk = all_headers[row], all_chunks[row]
            if type(chunk) is bytes:  # what `unpack` does, without the call
                locations: tuple[Location, ...] = (_new_location(Location, (*of[:5], chunk, *of[5:])),)
            else:
                locations = unpack(of, chunk)
            depth = depths[row]
            chain = (None, ~depth) if depth < 0 else (parents[row], depth)
            records.append(_new_record(BlockRecord, (*chain, locations)))
        return records

    def swap(self, key: int, old: BlockRecord | None, new: BlockRecord | None) -> bool:
        """Put `new` in the place of `old`, None being no record, and return True; or return False if `old` is not
        what is there."""
        row = self._rows.get(key)
        if row is None:
            if old is not None:
                return False
            if new is not None:
                self._insert(key, new)
            return True
        if old is None or not self._holds(row, old):
            return False
        if new is None:
            self._remove(key, row, old)
        else:
            self._replace(row, old, new)
        return True

    def insert(self, key: int, record: BlockRecord, access: Access | None = None) -> None:
        """Add the record of a key that has none, with its last access if it was read before."""
        self._insert(key, record, access)

    def clear(self) -> None:
        """Remove all."""
        if self._observer is not None:
            for row in filter(self.is_resident, reversed(range(len(self._keys)))):
                self._observer.removed(row)
        self._rows.clear()
        self._orphans.clear()
        self._pool.clear()
        for column in self._columns:
            del column[:]

    def family(self, key: int) -> list[int]:
        """Return the keys of the blocks whose parent is `key`, in order of their keys."""
        row = self._rows.get(key)
        first = self._orphans.get(key, NO_ROW) if row is None else self._first_child[row]
        return sorted([self._keys[child] for child in self._siblings(first)])

    def touch(self, counts: Mapping[int, int], at: int, *, moves: bool) -> None:
        """Add reads by key, and set the time to unix time `at` if it moves; keys without a record are left."""
        found = list(map(self._rows.get, counts))
        rows, times = [row for row in found if row is not None], list(counts.values())
        if len(rows) < len(found):
            times = [count for count, row in zip(times, found, strict=True) if row is not None]
        if not rows:
            return
        self._set_accesses(np.array(rows), np.array(times), whole_seconds(at) if moves else None)
        if self._observer is not None:
            self._observer.touched_together(rows, times)

    def _set_accesses(self, rows: NDArray[np.int64], times: NDArray[np.int64], at: int | None) -> None:
        # An array cannot grow while a view of it lives: these end with this call.
        reads, read_at = np.frombuffer(self._reads, np.uint16), np.frombuffer(self._read_at, np.uint32)
        reads[rows] = np.minimum(reads[rows] + times, _MOST_READS)
        if at is not None:
            read_at[rows] = np.maximum(read_at[rows], at)

    def requeue(self, counts: Mapping[int, int], at: int) -> None:
        """Set time and reads of resident blocks."""
        for key, reads in counts.items():
            row = self._rows.get(key)
            if row is not None and self.is_resident(row):
                self._set_access(row, at, reads)

    def accesses(self, keys: Iterable[int]) -> list[Access | None]:
        """Return the last access of each block, None where there is no record."""
        read_at, reads = self._read_at, self._reads
        return [None if row is None else Access(read_at[row], reads[row]) for row in map(self._rows.get, keys)]

    def coldest(self, count: int) -> list[tuple[int, Access]]:
        """Return the resident blocks that were not read for longest, with a look at every row."""
        resident = filter(self.is_resident, range(len(self._keys)))
        return [(self._keys[row], self.access(row)) for row in nsmallest(count, resident, self._read_at.__getitem__)]

    # ── by row ──

    def follow(self, observer: RowObserver | None) -> None:
        """Tell an observer of changes from now on, in the place of the one before; None for nobody."""
        self._observer = observer

    def row(self, key: int) -> int | None:
        """Return the row of a block, None when there is no record of it."""
        return self._rows.get(key)

    def key(self, row: int) -> int:
        """Return the key of the block in a row."""
        return self._keys[row]

    def depth(self, row: int) -> int:
        """Return the depth of the block in its chain."""
        depth = self._depths[row]
        return ~depth if depth < 0 else depth

    def locations(self, row: int) -> tuple[Location, ...]:
        """Return the locations of the block."""
        return unpack(self._headers[row], self._chunks[row])

    def access(self, row: int) -> Access:
        """Return when the block was last read and how often."""
        return Access(self._read_at[row], self._reads[row])

    def priority(self, row: int) -> int:
        """Return the highest priority of the block's serving locations, 0 where none serves."""
        headers = self._headers[row]
        if type(self._chunks[row]) is bytes:
            return headers[9] if headers[3] is _SERVING else 0
        of_serving = [header[9] for header in cast("tuple[Header, ...]", headers) if header[3] is _SERVING]
        return max(of_serving, default=0)

    def is_resident(self, row: int) -> bool:
        """Return whether the block has a serving location."""
        headers = self._headers[row]
        if type(self._chunks[row]) is bytes:
            return headers[3] is _SERVING
        return any(header[3] is _SERVING for header in cast("tuple[Header, ...]", headers))

    def children(self, row: int) -> Iterator[int]:
        """Yield the rows of the blocks that directly follow."""
        return self._siblings(self._first_child[row])

    def _siblings(self, row: int) -> Iterator[int]:
        while row != NO_ROW:
            yield row
            row = self._next[row]

    def _holds(self, row: int, record: BlockRecord) -> bool:
        parent, depth, locations = record
        if self._depths[row] != (~depth if parent is None else depth) or self._parents[row] != (parent or 0):
            return False
        chunks = self._chunks[row]
        if type(chunks) is bytes and len(locations) == 1:
            location = locations[0]
            return chunks == location[5] and self._headers[row] == location[:5] + location[6:]
        return unpack(self._headers[row], chunks) == locations

    def _insert(self, key: int, record: BlockRecord, access: Access | None = None) -> None:
        parent, depth, locations = record
        headers, chunks = self._pool.pack(locations)
        row = self._rows[key] = len(self._keys)
        self._keys.append(key)
        self._parents.append(parent or 0)
        self._depths.append(~depth if parent is None else depth)
        self._headers.append(headers)
        self._chunks.append(chunks)
        self._first_child.append(self._orphans.pop(key, NO_ROW))
        self._next.append(NO_ROW)
        self._previous.append(NO_ROW)
        self._read_at.append(whole_seconds(stored_at(record) if access is None else access.at))
        self._reads.append(0 if access is None else access.reads)
        if parent is not None:
            self._link(row, parent)
        if self._observer is not None and is_resident(record):
            self._observer.added(row)

    def _replace(self, row: int, old: BlockRecord, new: BlockRecord) -> None:
        parent, depth, locations = new
        if old.parent != parent:
            self._unlink(row, old.parent)
            self._link(row, parent)
        self._parents[row] = parent or 0
        self._depths[row] = ~depth if parent is None else depth
        self._headers[row], self._chunks[row] = self._pool.pack(locations)
        was_resident, is_resident_now = is_resident(old), is_resident(new)
        if is_resident_now and not was_resident:
            self._read_at[row], self._reads[row] = whole_seconds(stored_at(new)), 0
        if self._observer is not None and (was_resident or is_resident_now):
            self._tell(self._observer, row, was_resident, is_resident_now)

    @staticmethod
    def _tell(observer: RowObserver, row: int, was_resident: bool, is_resident_now: bool) -> None:
        if not is_resident_now:
            observer.removed(row)
        elif was_resident:
            observer.changed(row)
        else:
            observer.added(row)

    def _remove(self, key: int, row: int, old: BlockRecord) -> None:
        if self._observer is not None and is_resident(old):
            self._observer.removed(row)
        self._unlink(row, self._parent(row))
        del self._rows[key]
        if self._first_child[row] != NO_ROW:
            self._orphans[key] = self._first_child[row]
        last = len(self._keys) - 1
        if row != last:
            self._move(last, row)
        for column in self._columns:
            column.pop()
        if row != last and self._observer is not None and self.is_resident(row):
            self._observer.moved(last, row)

    def _move(self, row: int, to: int) -> None:
        for column in self._columns:
            column[to] = column[row]
        self._rows[self._keys[to]] = to
        after, before = self._next[to], self._previous[to]
        if after != NO_ROW:
            self._previous[after] = to
        if before != NO_ROW:
            self._next[before] = to
        else:
            self._set_first_child(self._parent(to), to)

    def _parent(self, row: int) -> int | None:
        return None if self._depths[row] < 0 else self._parents[row]

    def _link(self, row: int, parent: int | None) -> None:
        if parent is None:
            return
        parent_row = self._rows.get(parent)
        if parent_row is None:
            after, self._orphans[parent] = self._orphans.get(parent, NO_ROW), row
        else:
            after, self._first_child[parent_row] = self._first_child[parent_row], row
        if after != NO_ROW:
            self._next[row] = after
            self._previous[after] = row

    def _unlink(self, row: int, parent: int | None) -> None:
        after, before = self._next[row], self._previous[row]
        if after != NO_ROW:
            self._previous[after] = before
        if before != NO_ROW:
            self._next[before] = after
        else:
            self._set_first_child(parent, after)
        self._next[row] = self._previous[row] = NO_ROW

    def _set_first_child(self, parent: int | None, row: int) -> None:
        if parent is None:
            return
        parent_row = self._rows.get(parent)
        if parent_row is not None:
            self._first_child[parent_row] = row
        elif row != NO_ROW:
            self._orphans[parent] = row
        else:
            self._orphans.pop(parent, None)

    def _set_access(self, row: int, at: float, reads: int) -> None:
        self._read_at[row] = whole_seconds(at)
        self._reads[row] = min(reads, _MOST_READS)
