"""Records in the memory of the process: the reference backend, lost with the process.

`BlockColumns` keeps one row per block in columns; `MemoryBackend` adds due times and usage sums (invariant 4). No
method suspends, so every call is atomic on one event loop.
"""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, MutableSequence, Sequence
from heapq import nsmallest
from itertools import groupby
from random import Random
from sys import getrefcount
from typing import Any, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from kvcm.index.backends.backend import (
    NOTHING_WRITTEN,
    Access,
    Change,
    FinishRun,
    PlaceTally,
    RowObserver,
    Rows,
    UniformRun,
    Written,
    is_resident,
    stored_at,
    whole_seconds,
)
from kvcm.model.locations import BlockRecord, BlockRun, Location, LocationStatus, StorageKey
from kvcm.model.storages import StorageType
from kvcm.store.memory import DueQueue
from kvcm.store.store import Revision
from kvcm.telemetry.tracing import staged

__all__ = ["BlockColumns", "Chunks", "Header", "HeaderPool", "Headers", "MemoryBackend", "WrittenColumns", "unpack"]

# Locations packed for memory.
#
# A million blocks hold a million locations that differ in their chunk only, page by page: everything else of a
# location is the same for all blocks of one write session. So a location is kept as two values: its chunk, the very
# object that the answers share, and its *header*, all other fields in one tuple that equal locations share. A block
# with one location (nearly every block) needs no tuple around them.

Header: TypeAlias = tuple[str, str, StorageType, LocationStatus, tuple[str, ...], int, float, str, float, int, float]
"""The fields of a `Location` in their order, without the chunk."""
Headers: TypeAlias = Header | tuple[Header, ...]
"""Header of the only location, or those of several; the type of the chunks distinguishes them."""
Chunks: TypeAlias = bytes | tuple[bytes, ...]
"""Chunk of the only location, or those of several."""
_LEAST_POOL_SIZE = 1024
_OWN_REFERENCES = 4  # key and value of the pool, the loop variable, the argument of getrefcount

# A named tuple's own constructor binds its arguments in Python; from a ready tuple it takes a third of the time.
_new_location = cast("Callable[[type[Location], tuple[object, ...]], Location]", tuple.__new__)


def _header_of(location: Location) -> Header:
    """Return all fields of a location but the chunk."""
    return location[:5] + location[6:]


def unpack(headers: Headers, chunks: Chunks) -> tuple[Location, ...]:
    """Return the locations of a block."""
    if type(chunks) is bytes:
        of = cast("Header", headers)
        # Spelled out: slices and a function call would double the time.
        fields = (of[0], of[1], of[2], of[3], of[4], chunks, of[5], of[6], of[7], of[8], of[9], of[10])
        return (_new_location(Location, fields),)
    pairs = zip(cast("tuple[Header, ...]", headers), cast("tuple[bytes, ...]", chunks), strict=True)
    return tuple([_new_location(Location, (*head[:5], chunk, *head[5:])) for head, chunk in pairs])


class HeaderPool:
    """Equal headers as one object. Holds at most twice as many as blocks use, plus a constant."""

    __slots__ = ("_headers", "_last", "_most")

    def __init__(self) -> None:
        self._headers: dict[Header, Header] = {}
        self._last: Header | None = None
        self._most = _LEAST_POOL_SIZE

    def __len__(self) -> int:
        return len(self._headers)

    def pack(self, locations: tuple[Location, ...]) -> tuple[Headers, Chunks]:
        """Return the two values that stand for the locations of a block."""
        if len(locations) == 1:
            location = locations[0]
            return self.share(location[:5] + location[6:]), location[5]
        return (
            tuple([self.share(_header_of(location)) for location in locations]),
            tuple([location.chunk for location in locations]),
        )

    def clear(self) -> None:
        """Forget all headers; those in use stay as they are."""
        self._headers.clear()
        self._last = None
        self._most = _LEAST_POOL_SIZE

    def share(self, header: Header) -> Header:
        """Return the one object that stands for all headers equal to this one."""
        # The blocks of a page mostly share one header, and comparing is cheaper than hashing.
        if header == self._last:
            return self._last
        shared = self._last = self._headers.setdefault(header, header)
        if len(self._headers) > self._most:
            self._forget_unused()
        return shared

    def _forget_unused(self) -> None:
        # Tuples take no weak references; their reference count shows as well which of them no block uses.
        self._headers = {header: header for header in self._headers if getrefcount(header) > _OWN_REFERENCES}
        self._most = 2 * len(self._headers) + _LEAST_POOL_SIZE


# Blocks in columns: one row per block, a dict from key to row.
#
# Arrays and lists by row cost a third of what objects per block cost, and leave the garbage collector next to nothing
# to walk through. Rejected: a tuple per block (50 bytes more, and a dict of children beside it), free rows behind
# removed blocks (sampling would have to draw again, and tidying up would stop the loop).
#
# Invariants:
#
# * Rows are dense: a removed block's row is taken by the last one at once.
# * The observer receives a change at its end, when all columns are final; a removal before it.
# * The children of a block are a doubly linked list of rows, so that a prefix with many continuations loses one in
#   constant time. Its head is kept in the row of the parent, or in `_orphans` while the parent has no row.

_NO_ROW = -1
"""Where a column of rows has none."""
_MOST_READS = (1 << 16) - 1
_SERVING = LocationStatus.SERVING
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
            self._keys,
            self._parents,
            self._depths,
            self._headers,
            self._chunks,
            self._first_child,
            self._next,
            self._previous,
            self._read_at,
            self._reads,
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
        the current record."""
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
        first = self._orphans.get(key, _NO_ROW) if row is None else self._first_child[row]
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

    def observe(self, observer: RowObserver | None) -> None:
        """Report changes to an observer from now on, in place of the one before; None for none."""
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
        while row != _NO_ROW:
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
        assert len(self._rows) == row + 1  # rows are dense
        self._keys.append(key)
        self._parents.append(parent or 0)
        self._depths.append(~depth if parent is None else depth)
        self._headers.append(headers)
        self._chunks.append(chunks)
        self._first_child.append(self._orphans.pop(key, _NO_ROW))
        self._next.append(_NO_ROW)
        self._previous.append(_NO_ROW)
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
            self._notify(self._observer, row, was_resident, is_resident_now)

    @staticmethod
    def _notify(observer: RowObserver, row: int, was_resident: bool, is_resident_now: bool) -> None:
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
        if self._first_child[row] != _NO_ROW:
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
        if after != _NO_ROW:
            self._previous[after] = to
        if before != _NO_ROW:
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
            after, self._orphans[parent] = self._orphans.get(parent, _NO_ROW), row
        else:
            after, self._first_child[parent_row] = self._first_child[parent_row], row
        if after != _NO_ROW:
            self._next[row] = after
            self._previous[after] = row

    def _unlink(self, row: int, parent: int | None) -> None:
        after, before = self._next[row], self._previous[row]
        if after != _NO_ROW:
            self._previous[after] = before
        if before != _NO_ROW:
            self._next[before] = after
        else:
            self._set_first_child(parent, after)
        self._next[row] = self._previous[row] = _NO_ROW

    def _set_first_child(self, parent: int | None, row: int) -> None:
        if parent is None:
            return
        parent_row = self._rows.get(parent)
        if parent_row is not None:
            self._first_child[parent_row] = row
        elif row != _NO_ROW:
            self._orphans[parent] = row
        else:
            self._orphans.pop(parent, None)

    def _set_access(self, row: int, at: float, reads: int) -> None:
        self._read_at[row] = whole_seconds(at)
        self._reads[row] = min(reads, _MOST_READS)


# The two changes that nearly all writes consist of, for many blocks at once: that their writing begins, and that they
# serve. Both work on whole columns: row by row they cost ten times as much.
#
# Invariant: the effect is that of `insert` and `swap` on the same blocks one after the other, also for the observer; or
# nothing is done and the result says so.

_WRITING = LocationStatus.WRITING


class WrittenColumns(BlockColumns):
    """Blocks in columns that are written many at a time."""

    __slots__ = ()

    def begin(self, run: BlockRun) -> bool:
        """Add blocks that are beginning to be written.

        Returns:
            Whether none of them had a record; otherwise nothing is done.
        """
        assert run.location.status is _WRITING
        keys, count, first = run.keys, len(run.keys), len(self._keys)
        if not self._rows.keys().isdisjoint(keys):
            return False
        depths = array("i", range(run.depth, run.depth + count))  # a number that is too large changes nothing
        self._keys.extend(array("q", keys))
        self._rows.update(zip(keys, range(first, first + count), strict=True))
        self._parents.append(run.parent or 0)
        self._parents.extend(self._keys[first:-1])
        self._depths.extend(depths)
        if run.parent is None:
            self._depths[first] = ~run.depth
        self._headers += [self._pool.share(_header_of(run.location))] * count
        self._chunks += run.chunks
        self._read_at.extend(array("I", (whole_seconds(run.location.written_at),)) * count)
        self._reads.extend(array("H", bytes(2 * count)))
        self._link_run(keys, first)
        if run.parent is not None:
            self._link(first, run.parent)
        return True

    def _link_run(self, keys: Sequence[int], first: int) -> None:
        """Link the rows of a chain from `first` on, each to the one before; the first to nothing."""
        count = len(keys)
        none = array("i", (_NO_ROW,)) * count
        self._next.extend(none)
        self._previous.extend(none)
        if self._orphans.keys().isdisjoint(keys):
            self._first_child.extend(array("i", range(first + 1, first + count)))
            self._first_child.append(_NO_ROW)
            return
        self._first_child.extend([self._orphans.pop(key, _NO_ROW) for key in keys])  # some are waited for by children
        for row in range(first + 1, first + count):
            self._link(row, self._parents[row])

    def serve(self, keys: Sequence[int], ending: FinishRun) -> list[UniformRun] | None:
        """Let blocks serve whose writing is done.

        Args:
            keys: of the blocks, distinct.
            ending: what becomes of them.

        Returns:
            The blocks as they serve, in their order. None, and nothing is done, where one has no record or several
            locations, is not being written, or does not end like this.
        """
        rows = self._rows_of(keys)
        if rows is None:
            return None
        chunks = list(map(self._chunks.__getitem__, rows))
        if set(map(type, chunks)) - {bytes}:
            return None
        served: list[UniformRun] = []
        at = 0
        for header, count in _counted(list(map(self._headers.__getitem__, rows))):
            end = at + count
            before = unpack(header, b"")[0]
            of_these = UniformRun(keys[at:end], before, cast("list[bytes]", chunks[at:end]))
            after = ending(of_these) if before.status is _WRITING else None
            if after is None:
                return None
            assert _is_same_place(before, after.location)
            served.append(after)
            at = end
        self._put_served(rows, served)
        return served

    def _put_served(self, rows: Sequence[int], served: Sequence[UniformRun]) -> None:
        changed: list[tuple[Sequence[int], Sequence[int], int]] = []
        at = 0
        for keys, location, chunks in served:
            of_these, at = rows[at : at + len(keys)], at + len(keys)
            self._put_run(of_these, self._pool.share(_header_of(location)), chunks, whole_seconds(location.written_at))
            changed.append((of_these, keys, location.priority))
        if self._observer is not None:
            for of_these, keys, priority in changed:
                self._observer.added_together(of_these, keys, priority)

    def _put_run(self, rows: Sequence[int], header: Header, chunks: Sequence[bytes], seconds: int) -> None:
        count, low, high = len(rows), rows[-1], rows[0] + 1
        if rows == list(range(rows[0], low - 1, -1)):  # nearly always: the blocks of one write, the tail first
            self._headers[low:high] = [header] * count
            self._chunks[low:high] = chunks[::-1]
            self._read_at[low:high] = array("I", (seconds,)) * count
            self._reads[low:high] = array("H", bytes(2 * count))
            return
        headers, all_chunks, read_at, reads = self._headers, self._chunks, self._read_at, self._reads
        for row, chunk in zip(rows, chunks, strict=True):
            headers[row], all_chunks[row], read_at[row], reads[row] = header, chunk, seconds, 0

    def links(self, keys: Sequence[int]) -> list[tuple[int | None, int]]:
        """Return parent and depth of each of these blocks, which all have a record."""
        rows = list(map(self._rows.__getitem__, keys))
        pairs = zip(map(self._parents.__getitem__, rows), map(self._depths.__getitem__, rows), strict=True)
        return [(None, ~depth) if depth < 0 else (parent, depth) for parent, depth in pairs]

    def access_columns(self, keys: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
        """Return what `accesses` does as two columns, times and reads; both empty where a block has no record."""
        rows = self._rows_of(keys) or ()
        return list(map(self._read_at.__getitem__, rows)), list(map(self._reads.__getitem__, rows))

    def _rows_of(self, keys: Sequence[int]) -> list[int] | None:
        """Return the rows of blocks; None where one has no record."""
        rows = list(map(self._rows.get, keys))
        return None if None in rows else cast("list[int]", rows)


def _counted(headers: Sequence[Headers]) -> Iterator[tuple[Headers, int]]:
    """Yield each header with how often it follows itself."""
    if headers and headers.count(headers[0]) == len(headers):  # nearly always
        yield headers[0], len(headers)
        return
    for header, same_header in groupby(headers):
        yield header, len(list(same_header))


def _is_same_place(writing: Location, serving: Location) -> bool:
    """Return whether a location serves as it was written: nothing changed but what an end decides."""
    decided = serving._replace(
        status=_WRITING,
        session_id=writing.session_id,
        deadline=writing.deadline,
        priority=writing.priority,
        pinned_until=writing.pinned_until,
    )
    return serving.status is _SERVING and decided == writing


class MemoryBackend:
    """Blocks in columns, the deadlines of those that are due some time, and the bytes of all of them.

    No method suspends, so every call is atomic on one event loop.
    """

    awaits = False
    is_shared = False

    def __init__(self) -> None:
        self._blocks = WrittenColumns()
        self._due: DueQueue[int] = DueQueue()
        self._tally = PlaceTally()

    @property
    def key_count(self) -> int:
        return len(self._blocks)

    @property
    def usage_bytes(self) -> Mapping[StorageKey, int]:
        return self._tally.used

    @property
    def deleting_bytes(self) -> Mapping[StorageKey, int]:
        return self._tally.deleting

    @property
    def deleting_keys(self) -> int:
        return self._tally.deleting_blocks

    @property
    def due_from(self) -> float:
        return self._due.earliest

    @property
    def revision(self) -> Revision | None:
        return None  # no other manager changes the records

    async def refresh(self, *, is_exact: bool = True) -> None:
        """Do nothing: only this process changes the records."""

    async def get_many(self, keys: Sequence[int]) -> list[BlockRecord | None]:
        return self._blocks.get(keys)

    @staged("store", "memory.py:write_many")
    async def write_many(self, changes: Sequence[Change]) -> Written:
        if not changes:
            return NOTHING_WRITTEN
        lost: list[int] = []
        difference = PlaceTally()
        for key, old, new, _ in changes:
            if self._blocks.swap(key, old, new):
                self._schedule(key, new)
                difference.change(old, new)
            else:
                lost.append(key)
        self._tally.update(difference)
        return Written(lost, difference.used)

    def begin(self, run: BlockRun) -> Mapping[StorageKey, int] | None:
        if not self._blocks.begin(run):
            return None
        self._due.put_all(run.keys, run.location.deadline)
        place, size_bytes = run.location.place, len(run.keys) * run.location.size_bytes
        if size_bytes:
            self._tally.add(place, size_bytes)
        return {place: size_bytes}

    def serve(self, keys: Sequence[int], ending: FinishRun) -> Sequence[UniformRun] | None:
        served = self._blocks.serve(keys, ending)
        for run in served or ():
            due = _due_of_only(run.location)
            if due is None:
                self._due.discard_all(run.keys)
            else:
                self._due.put_all(run.keys, due)
        return served

    def load(self, key: int, record: BlockRecord, access: Access | None = None) -> None:
        """Add a record that was stored before this process began, with its last access if it was read."""
        self._blocks.insert(key, record, access)
        self._schedule(key, record)
        self._tally.change(None, record)

    async def children(self, key: int) -> list[int]:
        return self._blocks.family(key)

    async def families(self, keys: Sequence[int]) -> list[list[int]]:
        return [self._blocks.family(key) for key in keys]

    async def due(self, now: float, most: int) -> list[int]:
        return self._due.until(now, most)

    async def touch(self, counts: Mapping[int, int], at: float, *, moves: bool = True) -> None:
        self._blocks.touch(counts, int(at), moves=moves)

    async def requeue(self, counts: Mapping[int, int], at: float) -> None:
        self._blocks.requeue(counts, int(at))

    async def accesses(self, keys: Sequence[int]) -> list[Access | None]:
        return self._blocks.accesses(keys)

    async def coldest(self, count: int, offset: int = 0) -> list[tuple[int, Access]]:
        return self._blocks.coldest(offset + count)[offset:]

    def observe(self, observer: RowObserver | None) -> Rows:
        self._blocks.observe(observer)
        return self._blocks

    async def drop(self) -> None:
        self._blocks.clear()
        self._due.clear()
        self._tally.clear()

    async def scan(self, batch_size: int) -> AsyncIterator[list[int]]:
        keys = self._blocks.keys()
        for start in range(0, len(keys), batch_size):
            batch = [key for key in keys[start : start + batch_size] if key in self._blocks]
            if batch:
                yield batch

    async def random_sample(self, count: int, random: Random) -> list[int]:
        return self._blocks.sample(count, random)

    def _schedule(self, key: int, record: BlockRecord | None) -> None:
        due = _due(record) if record is not None else None
        if due is not None:
            self._due.put(key, due)
        else:
            self._due.discard(key)


def _due(record: BlockRecord) -> float | None:
    if len(record.locations) == 1:  # nearly every block: a third of the time of the property
        return _due_of_only(record.locations[0])
    return record.due


def _due_of_only(location: Location) -> float | None:
    return location.deadline if location.deadline or location.status is not LocationStatus.SERVING else None
