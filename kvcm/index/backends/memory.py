"""Records in the memory of the process: the reference backend, lost with the process.

`BlockColumns` keeps one row per block in columns, which `RowTable` finds by key; `MemoryBackend` adds due times and
usage sums (invariant 4). No method suspends, so every call is atomic on one event loop.
"""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, MutableSequence, Sequence
from heapq import nsmallest
from itertools import groupby
from math import nan
from random import Random
from sys import getrefcount
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from kvcm.index.backends.backend import (
    NOTHING_WRITTEN,
    Access,
    Change,
    FinishRun,
    PlaceTally,
    ResidentBlocks,
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
from kvcm.telemetry.metrics import current_measures, measure
from kvcm.telemetry.tracing import staged

__all__ = [
    "BlockColumns",
    "Chunks",
    "Header",
    "HeaderPool",
    "Headers",
    "LoadedKinds",
    "MemoryBackend",
    "RowTable",
    "StoredBlocks",
    "WrittenColumns",
    "unpack",
]

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
Item = TypeVar("Item")
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
        # Spelled out: slices would double the time.
        id_, storage, kind, status, specs, size, written_at, session, deadline, priority, pinned = cast(
            "Header", headers
        )
        fields = (id_, storage, kind, status, specs, chunks, size, written_at, session, deadline, priority, pinned)
        return (_new_location(Location, fields),)
    pairs = zip(cast("tuple[Header, ...]", headers), cast("tuple[bytes, ...]", chunks), strict=True)
    return tuple([_new_location(Location, (*head[:5], chunk, *head[5:])) for head, chunk in pairs])


def _all_headers(headers: Headers) -> tuple[Header, ...]:
    """Return the headers of all locations of a block, also where there is one only."""
    return headers if type(headers[0]) is tuple else (cast("Header", headers),)


def _kinds_of(headers: Sequence[Headers]) -> tuple[list[Headers], NDArray[np.int64]]:
    """Return the distinct ones of many headers, and for each of all its number among those; equal headers that are not
    one object may count as two. Of a million blocks some thousands are distinct, and all the rest are loops in C."""
    _, first, kind_of = np.unique(
        np.fromiter(map(id, headers), np.int64, len(headers)), return_index=True, return_inverse=True
    )
    return [headers[place] for place in first.tolist()], kind_of


class StoredBlocks(NamedTuple):
    """Blocks as they are read from a store, in columns.

    Attributes:
        keys: of the blocks, distinct.
        parents: of the blocks, 0 where there is none.
        depths: in their chains; the complement where there is no parent.
        kinds: of the blocks: those of one kind have the same headers.
        chunks: of their locations.
        headers: of the locations, by kind; of all blocks of one load the same list, which grows at its end.
    """

    keys: NDArray[np.int64]
    parents: NDArray[np.int64]
    depths: NDArray[np.int32]
    kinds: NDArray[np.int32]
    chunks: Sequence[Chunks]
    headers: Sequence[Headers]


class LoadedKinds:
    """What blocks have in common by kind, while a store is loaded.

    A kind is looked at once in the whole load: keys come in no order, so a few thousand blocks of a large store are of
    nearly as many kinds, and to look at those of each batch would be to look at each block.

    Attributes:
        headers: of the locations, by kind.
    """

    def __init__(self) -> None:
        self.headers: list[Headers] = []
        self._seconds = array("I")
        self._dues = array("d")  # not a number where none is
        self._counts = array("q")

    def add(self, headers: Headers) -> None:
        """Add the next kind."""
        record = _unchained(headers, _no_chunks(headers))
        due = _due(record)
        self.headers.append(headers)
        self._seconds.append(whole_seconds(stored_at(record)))
        self._dues.append(nan if due is None else due)
        self._counts.append(0)

    def count(self, kinds: NDArray[np.int32]) -> None:
        """Count blocks of these kinds."""
        np.add.at(np.frombuffer(self._counts, np.int64), kinds, 1)

    def seconds(self, kinds: NDArray[np.int32]) -> NDArray[np.uint32]:
        """Return the last access of unread blocks of these kinds."""
        return np.frombuffer(self._seconds, np.uint32)[kinds]

    def due(self, blocks: StoredBlocks) -> Iterator[tuple[list[int], float]]:
        """Yield the keys of blocks that are due some time, and when."""
        dues = np.frombuffer(self._dues, np.float64)[blocks.kinds]
        for due in np.unique(dues[~np.isnan(dues)]).tolist():
            yield blocks.keys[dues == due].tolist(), due

    def counted(self) -> Iterator[tuple[BlockRecord, int]]:
        """Yield a record without chunk, parent and depth of each kind, and how many blocks were counted."""
        for headers, count in zip(self.headers, self._counts, strict=True):
            yield _unchained(headers, _no_chunks(headers)), count


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
        headers = tuple([_header_of(location) for location in locations])
        return self.share_all(headers), tuple([location.chunk for location in locations])

    def share_all(self, headers: Headers) -> Headers:
        """Do `share` for all locations of a block."""
        if type(headers[0]) is tuple:
            return tuple([self.share(header) for header in headers])
        return self.share(cast("Header", headers))

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


# Rows by key: a hash table of row numbers, whose keys are in a column anyway.
#
# A dict takes some 120 bytes per block, most of them for the two numbers as objects, and doubles at once, which stops
# the event loop for a second where there are millions. This takes 12 bytes and grows by 4,096 slots at a time. One
# lookup costs Python twice as much as in a dict; so many keys are looked up together, in a few steps of numpy, which
# cost about as much as a dict does, and less where there are millions.
#
# The home of a key is the slot that its low bits number. These are random, and no client can choose keys with one home,
# since keys are mixed with a secret (`kvcm.model.keys`). Where that slot does not exist yet, the home has one bit less
# (linear hashing: W. Litwin, "Linear hashing: a new tool for file and table addressing", VLDB 1980). So new slots take
# rows from as many others, and all other rows stay where they are.
#
# Invariants:
#
# * Linear probing: from the home of a key to the slot with its row no slot is empty.
# * There are three homes per row at least. The homes that were not divided since their number doubled last have twice
#   the rows of the others, so two of three are taken at most.
# * The slots behind the last home take rows that find no slot before them. The last slot is empty.
#
# Rejected: two tables while one grows (each lookup asks both, and both take memory); segments that grow one by one (a
# lookup has to find the segment first).

_EMPTY = -1
_SLOTS_PER_ROW = 3
_LEAST_SLOTS = 64
_MOST_ADDED = 4096
_TAIL = array("i", (_EMPTY,)) * 64
_FEW_KEYS = 80  # up to so many are looked up one by one
_FEW_LEFT = 48  # so are these, when the others are found or have their slots
_PLACED_ROWS = 1 << 16  # at a time, of many: what numpy needs for them stays in the caches


Slots: TypeAlias = list[int] | NDArray[np.int64]


class RowTable:
    """Finds the rows of keys.

    Args:
        keys: by row, int64 as array("q"). It belongs to the caller, who reports each change to the table.
    """

    __slots__ = ("_count", "_half", "_homes", "_keys", "_missed", "_slots")

    def __init__(self, keys: array[int]) -> None:
        self._keys = keys
        # Keys that were looked up and have no row, and where their lookups ended; until a slot changes.
        self._missed: tuple[Collection[int], Slots] | None = None
        self.clear()

    def __len__(self) -> int:
        return self._count

    def clear(self) -> None:
        """Forget all rows."""
        self._count = 0
        self._allocate(_LEAST_SLOTS)

    def get(self, key: int) -> int | None:
        """Return the row of a key, None without one."""
        slots, keys, half = self._slots, self._keys, self._half
        slot = key & 2 * half - 1
        if slot >= self._homes:
            slot -= half
        while (row := slots[slot]) != _EMPTY:
            if keys[row] == key:
                return row
            slot += 1
        return None

    def get_all(self, keys: Collection[int]) -> Sequence[int | None]:
        """Return the row of every key, in order."""
        if len(keys) <= _FEW_KEYS:
            return self._get_few(keys)
        slots, found = self._probe(np.fromiter(keys, np.int64, len(keys)))
        if found.max(initial=_EMPTY) == _EMPTY:
            self._missed = keys, slots
            return [None] * len(found)
        rows: list[int | None] = found.tolist()
        return rows if found.min() != _EMPTY else [None if row == _EMPTY else row for row in rows]

    def _get_few(self, keys: Collection[int]) -> list[int | None]:
        """Do `get_all` with what `get` does, without the call for each key."""
        slots, all_keys, half, homes = self._slots, self._keys, self._half, self._homes
        low = 2 * half - 1
        found: list[int | None] = []
        ends: list[int] = []
        for key in keys:
            slot = key & low
            if slot >= homes:
                slot -= half
            while (row := slots[slot]) != _EMPTY and all_keys[row] != key:
                slot += 1
            ends.append(slot)
            found.append(None if row == _EMPTY else row)
        if found.count(None) == len(found):
            self._missed = keys, ends
        return found

    def find(self, keys: Collection[int] | NDArray[np.int64]) -> NDArray[np.int32]:
        """Return the row of every key, in order; `_EMPTY` without one."""
        if isinstance(keys, np.ndarray):
            return self._probe(keys)[1]
        if len(keys) <= _FEW_KEYS:
            return np.array([_EMPTY if row is None else row for row in self._get_few(keys)], np.int32)
        return self._probe(np.fromiter(keys, np.int64, len(keys)))[1]

    def free_slots(self, keys: Sequence[int]) -> Slots | None:
        """Make space for keys. Return the slots at which a lookup of each ends; None where one has a row."""
        self._grow(self._count + len(keys))
        if self._missed is None or self._missed[0] != keys:  # a write looked them up already when it was planned
            self.get_all(keys)
        return self._missed[1] if self._missed is not None and self._missed[0] == keys else None

    def add_rows(self, slots: Slots) -> None:
        """Add the last rows, which came behind those that are known; their keys are new and distinct.

        Args:
            slots: what `free_slots` returned for these keys just now.
        """
        first, self._count, self._missed = self._count, len(self._keys), None
        if isinstance(slots, list):
            self._place_few(range(first, self._count), slots)
        else:
            self._place(np.arange(first, self._count, dtype=np.int32), slots)

    def add_row(self) -> None:
        """Add the last row, which came behind those that are known; its key is new."""
        row, self._count, self._missed = self._count, self._count + 1, None
        self._grow(self._count)
        self._place_few((row,), (self._home_of(self._keys[row]),))

    def build(self) -> None:
        """Add all rows to an empty table, in one step: a tenth of the time of `add_rows`."""
        assert not self._count
        self._count, self._missed = len(self._keys), None
        wanted = _SLOTS_PER_ROW * self._count
        self._allocate(1 << max(wanted, _LEAST_SLOTS).bit_length() - 1)
        if wanted > self._homes:
            missing = -(-(wanted - self._homes) // _MOST_ADDED) * _MOST_ADDED
            self._add_homes(min(missing, self._half))
        keys = np.frombuffer(self._keys, np.int64)
        for first in range(0, self._count, _PLACED_ROWS):
            end = min(first + _PLACED_ROWS, self._count)
            self._place(np.arange(first, end, dtype=np.int32), self._homes_of(keys[first:end]))

    def discard(self, row: int) -> None:
        """Forget a row, whose key is still in the column."""
        slots, keys, half, homes = self._slots, self._keys, self._half, self._homes
        gap = slot = self._slot_of(row)
        while (other := slots[slot := slot + 1]) != _EMPTY:
            home = keys[other] & 2 * half - 1
            if home >= homes:
                home -= half
            if home <= gap:
                slots[gap] = other
                gap = slot
        slots[gap] = _EMPTY
        self._count -= 1
        self._missed = None

    def move(self, row: int, to: int) -> None:
        """Call a row `to`, while its key is where it was."""
        self._slots[self._slot_of(row)] = to

    def _home_of(self, key: int) -> int:
        home = key & 2 * self._half - 1
        return home if home < self._homes else home - self._half

    def _homes_of(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        homes = keys & 2 * self._half - 1
        homes -= (homes >= self._homes) * self._half
        return homes

    def _slot_of(self, row: int) -> int:
        slots = self._slots
        slot = self._home_of(self._keys[row])
        while slots[slot] != row:
            slot += 1
        return slot

    def _allocate(self, homes: int) -> None:
        """Begin with so many slots, a power of 2."""
        self._homes = self._half = homes
        self._missed = None
        self._slots = array("i", (_EMPTY,)) * homes + _TAIL

    def _add_homes(self, count: int) -> None:
        self._slots.extend(array("i", (_EMPTY,)) * count)
        self._missed = None
        self._homes += count
        if self._homes == 2 * self._half:
            self._half = self._homes

    def _grow(self, count: int) -> None:
        """Make space for so many rows in all: one more row moves two others on average."""
        while _SLOTS_PER_ROW * count > self._homes:
            added = min(self._half, _MOST_ADDED)
            first = self._homes - self._half
            end = self._slots.index(_EMPTY, first + added)
            slots = np.array(self._slots[first:end])
            self._slots[first:end] = array("i", (_EMPTY,)) * (end - first)
            self._add_homes(added)
            rows = slots[slots != _EMPTY]  # also those from before, which found no place there
            self._place(rows, self._homes_of(np.frombuffer(self._keys, np.int64)[rows]))

    def _place(self, rows: NDArray[np.int32], slots: NDArray[np.int64]) -> None:
        """Put rows into the first empty slots from these on."""
        while rows.size > _FEW_LEFT:
            if slots.max() + 1 >= len(self._slots):
                self._slots.extend(_TAIL)
            view = np.frombuffer(self._slots, np.int32)
            is_free = view.take(slots) == _EMPTY
            view[slots[is_free]] = rows[is_free]  # of several rows the last one gets the slot
            left = np.flatnonzero(view.take(slots) != rows)
            rows, slots = rows.take(left), slots.take(left) + 1
            del view  # an array cannot grow while a view of it lives
        self._place_few(rows.tolist(), slots.tolist())

    def _place_few(self, rows: Iterable[int], slots: Iterable[int]) -> None:
        all_slots = self._slots
        for row, slot in zip(rows, slots, strict=True):
            while all_slots[slot] != _EMPTY:
                slot += 1
            all_slots[slot] = row
            if slot + 1 == len(all_slots):
                all_slots.extend(_TAIL)

    def _probe(self, keys: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Return the slot with the row of each key, or the empty slot at which its lookup ends without one; and what
        is in these slots."""
        slots = self._homes_of(keys)
        column, view = np.frombuffer(self._keys, np.int64), np.frombuffer(self._slots, np.int32)
        if not self._count:
            return slots, view.take(slots)
        rows = view.take(slots)
        # The last row stands for an empty slot here: a key that has that row meets no empty slot before.
        left = np.flatnonzero((column.take(rows) != keys) & (rows != _EMPTY))
        wanted, behind = keys.take(left), slots.take(left)
        while left.size > _FEW_LEFT:
            behind += 1
            others = view.take(behind)
            slots[left], rows[left] = behind, others
            still = np.flatnonzero((column.take(others) != wanted) & (others != _EMPTY))
            left, wanted, behind = left.take(still), wanted.take(still), behind.take(still)
        self._probe_behind(left, keys, slots, rows)
        return slots, rows

    def _probe_behind(
        self, left: NDArray[np.int64], keys: NDArray[np.int64], slots: NDArray[np.int64], rows: NDArray[np.int32]
    ) -> None:
        """Complete the lookups of a few keys, which met others in their slots so far."""
        all_slots, all_keys = self._slots, self._keys
        for place, key, slot in zip(left.tolist(), keys.take(left).tolist(), slots.take(left).tolist(), strict=True):
            behind = slot + 1
            while (row := all_slots[behind]) != _EMPTY and all_keys[row] != key:
                behind += 1
            slots[place], rows[place] = behind, row


# Blocks in columns: one row per block.
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
_FEW_TOUCHED = 8  # up to so many blocks are touched one by one
_SERVING = LocationStatus.SERVING
_DELETING = LocationStatus.DELETING
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
        self._orphans: dict[int, int] = {}
        self._pool = HeaderPool()
        self._observer: RowObserver | None = None
        self._keys = array("q")
        self._rows = RowTable(self._keys)
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

    def present(self, keys: Sequence[int]) -> list[int]:
        """Return those of the keys that have a record."""
        return [key for key, row in zip(keys, self._rows.get_all(keys), strict=True) if row is not None]

    def keys(self) -> array[int]:
        """Return all keys; a copy of numbers, since one of objects would stop the loop for longer and hold on to them
        as long as a scan takes."""
        return self._keys[:]

    def sample(self, count: int, random: Random) -> list[int]:
        """Return `count` distinct keys (all, if there are fewer), each equally likely."""
        if count >= len(self._keys):
            return self._keys.tolist()
        return [self._keys[row] for row in random.sample(range(len(self._keys)), count)]

    def get(self, keys: Sequence[int]) -> list[BlockRecord | None]:
        """Return the records of `keys`, in order; None where there is none."""
        all_headers, all_chunks, depths, parents = self._headers, self._chunks, self._depths, self._parents
        rows = self._rows.get_all(keys)
        records: list[BlockRecord | None] = []
        if rows.count(None) == len(rows):
            return [None] * len(rows)
        for row in rows:
            if row is None:
                records.append(None)
                continue
            locations = unpack(all_headers[row], all_chunks[row])
            depth = depths[row]
            chain = (None, ~depth) if depth < 0 else (parents[row], depth)
            records.append(_new_record(BlockRecord, (*chain, locations)))
        return records

    def answers(
        self, keys: Sequence[int], compose: Callable[[BlockRecord], bytes | None], *, stop_at_miss: bool
    ) -> tuple[list[bytes | None], int]:
        """Return what `IndexBackend.answers` does, and how many of these keys have no record."""
        all_headers, all_chunks = self._headers, self._chunks
        found: list[bytes | None] = []
        missing = 0
        is_answer: dict[int, bool] = {}  # by header: the blocks of a write share theirs
        rows = map(self._rows.get, keys) if len(keys) <= _FEW_KEYS else self._rows.get_all(keys)
        for row in rows:
            answer: bytes | None = None
            if row is None:
                missing += 1
            elif type(chunk := all_chunks[row]) is bytes:
                headers = all_headers[row]
                is_known = is_answer.get(id(headers))
                if is_known is None:
                    is_known = is_answer[id(headers)] = compose(_unchained(headers, chunk)) is not None
                if is_known:
                    answer = chunk
            else:
                answer = compose(_unchained(all_headers[row], chunk))
            if answer is None and stop_at_miss:
                break
            found.append(answer)
        return found, missing

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

    def clear(self) -> None:
        """Remove all."""
        if self._observer is not None:
            for row in filter(self.is_resident, reversed(range(len(self._keys)))):
                self._observer.removed(row)
        self._orphans.clear()
        self._pool.clear()
        for column in self._columns:
            del column[:]
        self._rows.clear()

    def family(self, key: int) -> list[int]:
        """Return the keys of the blocks whose parent is `key`, in order of their keys."""
        row = self._rows.get(key)
        first = self._orphans.get(key, _NO_ROW) if row is None else self._first_child[row]
        return sorted([self._keys[child] for child in self._siblings(first)])

    def touch(self, counts: Mapping[int, int], at: int, *, moves: bool) -> None:
        """Add reads by key, and set the time to unix time `at` if it moves; keys without a record are left."""
        if len(counts) <= _FEW_TOUCHED:
            self._touch_few(counts, whole_seconds(at) if moves else 0)
            return
        rows, times = self._rows.find(counts), np.fromiter(counts.values(), np.int64, len(counts))
        if rows.size and rows.min() == _EMPTY:
            rows, times = rows[rows != _EMPTY], times[rows != _EMPTY]
        if not rows.size:
            return
        self._set_accesses(rows, times, whole_seconds(at) if moves else None)
        if self._observer is not None:
            self._observer.touched_together(rows.tolist(), times.tolist())

    def _touch_few(self, counts: Mapping[int, int], at: int) -> None:
        rows: list[int] = []
        times: list[int] = []
        for key, count in counts.items():
            row = self._rows.get(key)
            if row is not None:
                self._reads[row] = min(self._reads[row] + count, _MOST_READS)
                self._read_at[row] = max(self._read_at[row], at)
                rows.append(row)
                times.append(count)
        if rows and self._observer is not None:
            self._observer.touched_together(rows, times)

    def _set_accesses(self, rows: NDArray[np.int32], times: NDArray[np.int64], at: int | None) -> None:
        # An array cannot grow while a view of it lives: these end with this call.
        reads, read_at = np.frombuffer(self._reads, np.uint16), np.frombuffer(self._read_at, np.uint32)
        reads[rows] = np.minimum(reads[rows] + times, _MOST_READS)
        if at is not None:
            read_at[rows] = np.maximum(read_at[rows], at)

    def requeue(self, counts: Mapping[int, int], at: int) -> None:
        """Set time and reads of resident blocks."""
        for row, reads in zip(self._rows.get_all(counts), counts.values(), strict=True):
            if row is not None and self.is_resident(row):
                self._set_access(row, at, reads)

    def accesses(self, keys: Sequence[int]) -> list[Access | None]:
        """Return the last access of each block, None where there is no record."""
        read_at, reads = self._read_at, self._reads
        return [None if row is None else Access(read_at[row], reads[row]) for row in self._rows.get_all(keys)]

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

    def is_like(self, row: int, other: int) -> bool:
        """Return whether two blocks have one location each with the same header."""
        return (
            self._headers[row] is self._headers[other] and type(self._chunks[row]) is type(self._chunks[other]) is bytes
        )

    def children(self, row: int) -> Iterator[int]:
        """Yield the rows of the blocks that directly follow."""
        return self._siblings(self._first_child[row])

    def residents(self) -> ResidentBlocks:
        """Return all resident blocks."""
        kinds, kind_of_row = _kinds_of(self._headers)
        serving = [[header for header in kind if header[3] is _SERVING] for kind in map(_all_headers, kinds)]
        is_resident_kind = np.array(list(map(bool, serving)), np.bool_)
        rows = np.flatnonzero(is_resident_kind[kind_of_row])
        kind = kind_of_row[rows]
        depths = np.frombuffer(self._depths, np.int32)[rows].astype(np.int64)
        return ResidentBlocks(
            rows,
            np.frombuffer(self._keys, np.int64)[rows],
            np.where(depths < 0, ~depths, depths),
            np.array([each[0][6] if each else 0.0 for each in serving], np.float64)[kind],
            np.frombuffer(self._read_at, np.uint32)[rows].astype(np.int64),
            np.frombuffer(self._reads, np.uint16)[rows].astype(np.int64),
            np.array([max((header[9] for header in each), default=0) for each in serving], np.int64)[kind],
            np.array([sum(header[5] for header in each) for each in serving], np.int64)[kind],
        )

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

    def _insert(self, key: int, record: BlockRecord) -> None:
        parent, depth, locations = record
        headers, chunks = self._pool.pack(locations)
        row = len(self._keys)
        self._keys.append(key)
        self._rows.add_row()
        self._parents.append(parent or 0)
        self._depths.append(~depth if parent is None else depth)
        self._headers.append(headers)
        self._chunks.append(chunks)
        self._first_child.append(self._orphans.pop(key, _NO_ROW))
        self._next.append(_NO_ROW)
        self._previous.append(_NO_ROW)
        self._read_at.append(whole_seconds(stored_at(record)))
        self._reads.append(0)
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
        self._rows.discard(row)
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
        self._rows.move(row, to)
        for column in self._columns:
            column[to] = column[row]
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


# The changes that nearly all blocks go through, for many at once: that their writing begins, that they serve, and that
# they are marked as deleting. They work on whole columns: row by row they cost ten times as much.
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
        slots, count, first = self._rows.free_slots(run.keys), len(run.keys), len(self._keys)
        if slots is None:
            return False
        depths = array("i", range(run.depth, run.depth + count))  # a number that is too large changes nothing
        self._keys.extend(array("q", run.keys))
        self._rows.add_rows(slots)
        self._parents.append(run.parent or 0)
        self._parents.extend(self._keys[first:-1])
        self._depths.extend(depths)
        if run.parent is None:
            self._depths[first] = ~run.depth
        self._headers += [self._pool.share(_header_of(run.location))] * count
        self._chunks += run.chunks
        self._read_at.extend(array("I", (whole_seconds(run.location.written_at),)) * count)
        self._reads.extend(array("H", bytes(2 * count)))
        self._link_run(run.keys, first)
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
            self._first_child.extend(array("i", np.arange(first + 1, first + count, dtype=np.int32).tobytes()))
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
        rows = self.rows_of(keys)
        return None if rows is None else self.serve_rows(rows, keys, ending)

    def serve_rows(self, rows: Sequence[int], keys: Sequence[int], ending: FinishRun) -> list[UniformRun] | None:
        """Do `serve` for the blocks in these rows."""
        served = self._ended(rows, keys, ending, _WRITING, _SERVING)
        if served is not None:
            self._put_served(rows, served)
        return served

    def retire_rows(self, rows: Sequence[int], keys: Sequence[int], ending: FinishRun) -> list[UniformRun] | None:
        """Do `serve_rows` for blocks that serve, and are deleting then."""
        retired = self._ended(rows, keys, ending, _SERVING, _DELETING)
        if retired is None:
            return None
        if self._observer is not None:
            for row in rows:
                self._observer.removed(row)
        at, headers = 0, self._headers
        for run in retired:
            header = self._pool.share(_header_of(run.location))
            for row in rows[at : at + len(run.keys)]:
                headers[row] = header
            at += len(run.keys)
        return retired

    def _ended(
        self, rows: Sequence[int], keys: Sequence[int], ending: FinishRun, before: LocationStatus, after: LocationStatus
    ) -> list[UniformRun] | None:
        """Return what becomes of blocks of a status that have one location each; None where some are no such blocks."""
        chunks = _taken(self._chunks, rows)
        if set(map(type, chunks)) - {bytes}:
            return None
        ended: list[UniformRun] = []
        at = 0
        for header, count in _counted(_taken(self._headers, rows)):
            end = at + count
            location = unpack(header, b"")[0]
            of_these = UniformRun(keys[at:end], location, cast("list[bytes]", chunks[at:end]))
            run = ending(of_these) if location.status is before else None
            if run is None:
                return None
            assert run.location.status is after
            assert _is_same_place(location, run.location)
            ended.append(run)
            at = end
        return ended

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
        if type(rows) is range:  # nearly always: the blocks of one write, the tail first
            count, low, high = len(rows), rows[-1], rows[0] + 1
            self._headers[low:high] = [header] * count
            self._chunks[low:high] = chunks[::-1]
            self._read_at[low:high] = array("I", (seconds,)) * count
            self._reads[low:high] = array("H", bytes(2 * count))
            return
        headers, all_chunks, read_at, reads = self._headers, self._chunks, self._read_at, self._reads
        for row, chunk in zip(rows, chunks, strict=True):
            headers[row], all_chunks[row], read_at[row], reads[row] = header, chunk, seconds, 0

    def load(self, blocks: StoredBlocks, kinds: LoadedKinds) -> None:
        """Add blocks of a store to others of it, while there is no observer; `link_loaded` ends that."""
        assert self._observer is None
        for headers in blocks.headers[len(kinds.headers) :]:
            kinds.add(self._pool.share_all(headers))
        kinds.count(blocks.kinds)
        none = array("i", (_NO_ROW,)) * len(blocks.keys)
        self._keys.frombytes(blocks.keys.tobytes())
        self._parents.frombytes(blocks.parents.tobytes())
        self._depths.frombytes(blocks.depths.tobytes())
        self._headers += map(kinds.headers.__getitem__, blocks.kinds.tolist())
        self._chunks += blocks.chunks
        for column in (self._first_child, self._next, self._previous):
            column.extend(none)
        self._read_at.frombytes(kinds.seconds(blocks.kinds).tobytes())
        self._reads.frombytes(bytes(2 * len(none)))

    def link_loaded(self) -> None:
        """Make all blocks found by their keys, and link them to their parents, after the last `load`: children lie
        before their parents as well as behind them, so most would wait for these if each was linked as it came."""
        self._rows.build()
        children = np.flatnonzero(np.frombuffer(self._depths, np.int32) >= 0)
        parents = self._rows.find(np.frombuffer(self._parents, np.int64)[children])
        is_orphan = parents == _EMPTY
        for row in children[is_orphan].tolist():
            self._link(row, self._parents[row])
        children, parents = children[~is_orphan], parents[~is_orphan]
        first_child = np.frombuffer(self._first_child, np.int32)
        first_child[parents] = children
        has_several = np.zeros(len(self), np.bool_)
        has_several[parents[first_child[parents] != children]] = True
        siblings = np.flatnonzero(has_several[parents])  # few: only these have to be sorted
        self._link_siblings(children[siblings], parents[siblings])

    def _link_siblings(self, children: NDArray[np.int64], parents: NDArray[np.int32]) -> None:
        """Link children whose parents have several, the first row first."""
        order = np.argsort(parents, kind="stable")
        children, parents = children[order], parents[order]
        is_next = parents[1:] == parents[:-1]
        first_child = np.frombuffer(self._first_child, np.int32)
        after, before = np.frombuffer(self._next, np.int32), np.frombuffer(self._previous, np.int32)
        first_child[parents[:1]] = children[:1]
        first_child[parents[1:][~is_next]] = children[1:][~is_next]
        after[children[:-1][is_next]] = children[1:][is_next]
        before[children[1:][is_next]] = children[:-1][is_next]

    def load_accesses(self, keys: NDArray[np.int64], read_at: NDArray[np.uint32], reads: NDArray[np.uint16]) -> None:
        """Set the last access of loaded blocks; keys without a record are left."""
        rows = self._rows.find(keys)
        known = rows != _EMPTY
        np.frombuffer(self._read_at, np.uint32)[rows[known]] = read_at[known]
        np.frombuffer(self._reads, np.uint16)[rows[known]] = reads[known]

    def chain_columns(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Return parent, 0 without one, and depth, the complement without a parent, of the blocks in rows."""
        return np.frombuffer(self._parents, np.int64)[rows], np.frombuffer(self._depths, np.int32)[rows]

    def access_columns(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.uint32], NDArray[np.uint16]]:
        """Return time and number of reads of the blocks in rows, as `Access` has them."""
        return np.frombuffer(self._read_at, np.uint32)[rows], np.frombuffer(self._reads, np.uint16)[rows]

    def rows_of(self, keys: Sequence[int]) -> Sequence[int] | None:
        """Return the rows of blocks; None where one has no record. Of blocks that began together, the tail first, these
        are a descending range, which takes one lookup."""
        if not keys:
            return []
        first = self._rows.get(keys[0])
        if first is None:
            return None
        low = first + 1 - len(keys)
        if low >= 0 and self._keys[low : first + 1] == array("q", keys[::-1]):
            return range(first, low - 1, -1)
        rows = self._rows.get_all(keys)
        return None if None in rows else cast("list[int]", rows)


def _taken(column: list[Item], rows: Sequence[int]) -> list[Item]:
    """Return what is in some rows of a column."""
    if type(rows) is range:
        return column[rows[-1] : rows[0] + 1][::-1]
    return list(map(column.__getitem__, rows))


def _unchained(headers: Headers, chunks: Chunks) -> BlockRecord:
    """Return a record of these locations, without its place in a chain."""
    return _new_record(BlockRecord, (None, 0, unpack(headers, chunks)))


def _no_chunks(headers: Headers) -> Chunks:
    return (b"",) * len(headers) if type(headers[0]) is tuple else b""


def _counted(headers: Sequence[Headers]) -> Iterator[tuple[Headers, int]]:
    """Yield each header with how often it follows itself."""
    if headers and headers.count(headers[0]) == len(headers):  # nearly always
        yield headers[0], len(headers)
        return
    for header, same_header in groupby(headers):
        yield header, len(list(same_header))


def _is_same_place(before: Location, after: Location) -> bool:
    """Return whether nothing of a location changed but what an end decides."""
    # Without the status, and what comes behind the time of writing; a copy with these changed would take longer.
    return before[:3] == after[:3] and before[4:8] == after[4:8]


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

    def answers(
        self, keys: Sequence[int], compose: Callable[[BlockRecord], bytes | None], *, stop_at_miss: bool
    ) -> list[bytes | None]:
        answers, missing = self._blocks.answers(keys, compose, stop_at_miss=stop_at_miss)
        if missing and current_measures() is not None:
            measure("meta_indexer.get_not_exist_key_count", missing)
        return answers

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
        rows = self._blocks.rows_of(keys)
        return None if rows is None else self._serve(rows, keys, ending)

    def _serve(self, rows: Sequence[int], keys: Sequence[int], ending: FinishRun) -> Sequence[UniformRun] | None:
        """Do `serve` for the blocks in these rows."""
        served = self._blocks.serve_rows(rows, keys, ending)
        for run in served or ():
            due = _due_of_only(run.location)
            if due is None:
                self._due.discard_all(run.keys)
            else:
                self._due.put_all(run.keys, due)
        return served

    def retire(self, keys: Sequence[int], ending: FinishRun) -> Sequence[UniformRun] | None:
        rows = self._blocks.rows_of(keys)
        retired = self._blocks.retire_rows(rows, keys, ending) if rows is not None else None
        for run in retired or ():
            self._due.put_all(run.keys, run.location.deadline)
            self._tally.retire(run.location, len(run.keys))
        return retired

    def load(self, batches: Iterable[StoredBlocks]) -> None:
        """Add all blocks that were stored before this process began, none of which was ever read; a backend without
        blocks."""
        kinds = LoadedKinds()
        for blocks in batches:
            self._blocks.load(blocks, kinds)
            for keys, due in kinds.due(blocks):
                self._due.put_all(keys, due)
        for record, count in kinds.counted():
            self._tally.add_equal(record, count)
        self._blocks.link_loaded()

    def load_accesses(self, keys: NDArray[np.int64], read_at: NDArray[np.uint32], reads: NDArray[np.uint16]) -> None:
        """Set the last access of loaded blocks that were read; keys without a record are left."""
        self._blocks.load_accesses(keys, read_at, reads)

    def present(self, keys: Sequence[int]) -> list[int]:
        """Return those of the keys that have a record."""
        return self._blocks.present(keys)

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
            batch = self._blocks.present(keys[start : start + batch_size])
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
