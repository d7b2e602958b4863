"""A table from block keys to small numbers that takes 17 to 30 bytes for each block, and works on batches of them.

A dict takes 130 bytes for the same. This table is open addressing over two flat arrays, 12 bytes a slot, in buckets of
eight slots, at a load from 0.4 to 0.7.

Homes are ordered: the home of a key is its upper 32 bits, scaled to the number of buckets. So a table can be rebuilt
into one of another size from its beginning to its end, some buckets with each batch: keys below the frontier are in the
new table, the others in the old one, and each key is in exactly one of them. Growth, shrinking and the removal of dead
slots are all such rebuilds, and none of them stops the event loop. Pages of the old table are returned to the
operating system as the frontier passes them, and those of the new one are not touched before it reaches them.

Keys are mixed ones (`kvcm.model.keys`): their upper bits are as good as random, and no client can choose them.

Rejected: Robin Hood order (insertion moves neighbours, which no array operation does for a batch); sorted runs that are
merged (a merge of ten million entries stops the loop for a tenth of a second); a hash map of a library (those that
take batches rebuild at once, a second for ten million entries); single slots instead of buckets (half again the time:
probes of a batch become long where a few clusters are).
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["ABSENT", "FIRST_VALUE", "BlockTable", "Keys", "Values"]

Keys = NDArray[np.int64]
Values = NDArray[np.uint32]
Positions = NDArray[np.int64]

ABSENT: Final = 1
"""The value of every key that has none."""
FIRST_VALUE: Final = 2
"""Values of keys begin here."""

_EMPTY: Final = 0  # fresh memory is zero, so a slot that never had a key has this value
_TAKEN: Final = np.uint32(0xFFFFFFFF)  # a slot of a key whose value is written in the same batch
_KEY_BYTES: Final = 8
_VALUE_BYTES: Final = 4
_WIDTH: Final = 8  # slots of a bucket: their keys fill a cache line
_MOST_LOAD: Final = 0.7  # beyond it, many buckets are full, and keys lie in those behind
_LEAST_LOAD: Final = 0.4  # after a rebuild: it grows by three quarters
_SHRINK_LOAD: Final = 0.15
_FEWEST_BUCKETS: Final = 128
_SLACK: Final = 256  # buckets behind the last home, for keys that found theirs full
_BUCKETS_OF_WINDOW: Final = 4
_WINDOW: Final = np.arange(_WIDTH * _BUCKETS_OF_WINDOW)
_BATCH: Final = 4096  # keys of one step: more would fill a small table before it grows
_AT_ONCE: Final = 4096  # buckets of a table that is rebuilt in one step
_SLOTS_PER_KEY: Final = 16  # that a rebuild advances with each key of a batch: it ends long before the table is full
_STEP: Final = 512  # buckets of a step of a rebuild
_CHUNK: Final = 65_536  # slots of a step of `replace`


class _Area:
    """Buckets of eight slots.

    Within a bucket, slots that never had a key come last, and a slot that had one never becomes such a slot again. So a
    key that is not in its home bucket, nor in those behind it up to the first with such a slot, is nowhere.

    Args:
        buckets: that keys have their homes in; < 2^32.
    """

    def __init__(self, buckets: int) -> None:
        self.buckets = buckets
        self.end = buckets + _SLACK
        slots = self.end * _WIDTH
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._key_pages = mmap.mmap(-1, slots * _KEY_BYTES, flags=private)
        self._value_pages = mmap.mmap(-1, slots * _VALUE_BYTES, flags=private)
        self.keys: Keys = np.frombuffer(self._key_pages, np.int64)
        self.values: Values = np.frombuffer(self._value_pages, np.uint32)
        self._key_rows = self.keys.reshape(-1, _WIDTH)
        self._value_rows = self.values.reshape(-1, _WIDTH)
        self.used = 0  # slots that have a key, be its value ABSENT

    @property
    def memory_bytes(self) -> int:
        return len(self.keys) * (_KEY_BYTES + _VALUE_BYTES)

    def find(self, keys: Keys) -> tuple[Positions, Values]:
        """Return the slot of each key, -1 where it has none, and its value, ABSENT where it has none."""
        bucket = self._home(keys)
        slots, values = self._find_in(bucket, keys)
        pending = np.flatnonzero(slots < 0)
        pending = pending[self._is_full(bucket[pending])]
        bucket = bucket[pending] + 1
        while len(pending):  # an operation costs as much as some hundred keys: so several buckets at a time
            window = bucket[:, None] * _WIDTH + _WINDOW
            is_same = self.keys.take(window) == keys[pending][:, None]
            rows, columns = is_same.nonzero()
            found = window[rows, columns]
            found_values = self.values.take(found)
            if not found_values.all():  # fresh memory has the key 0
                is_used = found_values != _EMPTY
                rows, found, found_values = rows[is_used], found[is_used], found_values[is_used]
            slots[pending[rows]], values[pending[rows]] = found, found_values
            goes_on = self._is_full(bucket + (_BUCKETS_OF_WINDOW - 1))
            goes_on[rows] = False
            pending, bucket = pending[goes_on], bucket[goes_on] + _BUCKETS_OF_WINDOW
        return slots, values

    def _home(self, keys: Keys) -> Positions:
        return ((_upper(keys) * np.uint64(self.buckets)) >> np.uint64(32)).view(np.int64)

    def _find_in(self, bucket: Positions, keys: Keys) -> tuple[Positions, Values]:
        hits = _bits(self._key_rows.take(bucket, axis=0) == keys[:, None])
        slots = bucket * _WIDTH
        slots += _FIRST_BIT.take(hits)
        values = self.values.take(slots)
        is_miss = (hits == 0) | (values == _EMPTY)  # fresh memory has the key 0
        slots[is_miss] = -1
        values[is_miss] = ABSENT
        return slots, values

    def _is_full(self, bucket: Positions) -> NDArray[np.bool_]:
        """Whether keys of a bucket may lie in the next. The slack is never full: it would take 2,048 such keys."""
        is_full: NDArray[np.bool_] = self.values.take(bucket * _WIDTH + (_WIDTH - 1)) != _EMPTY
        return is_full

    def claim(self, keys: Keys) -> tuple[Positions, Values]:
        """Return the slot of each key, a new one where it has none, and their values. Every slot is taken until a value
        is written to it.

        Args:
            keys: distinct and in ascending order of their bits as numbers without sign.
        """
        slots, values = self.find(keys)
        self.values[slots[(slots >= 0) & (values == ABSENT)]] = _TAKEN  # or another key of the batch takes it
        missing = np.flatnonzero(slots < 0)
        slots[missing] = self.place(keys[missing])
        return slots, values

    def place(self, keys: Keys) -> Positions:
        """Return a new slot for each key, in the order that `claim` wants; none of them has one."""
        slots = np.empty(len(keys), np.int64)
        missing = np.arange(len(keys))
        bucket = self._home(keys)
        while len(missing):
            free = _bits(self._value_rows.take(bucket, axis=0) <= ABSENT)
            # The first key of a bucket gets its first free slot, the second its second.
            column = _NTH_BIT[np.minimum(_ranks(bucket), _WIDTH), free]
            has_won = column < _WIDTH
            won = (bucket * _WIDTH + column)[has_won]
            self.used += int(np.count_nonzero(self.values[won] == _EMPTY))
            self.values[won] = _TAKEN
            self.keys[won] = keys[missing[has_won]]
            slots[missing[has_won]] = won
            missing, bucket = missing[~has_won], bucket[~has_won] + 1
        return slots

    def boundary(self, bucket: int) -> int:
        """Return the first boundary of buckets behind `bucket` that no key lies beyond whose home is before it."""
        while bucket < self.end:
            last = self._value_rows[bucket : bucket + _STEP, _WIDTH - 1]
            if len(ends := np.flatnonzero(last == _EMPTY)):
                return bucket + int(ends[0]) + 1
            bucket += len(last)
        return self.end

    def release(self, bucket: int) -> None:
        """Return the memory of the buckets before this one, which are not read any more."""
        for pages, width in ((self._key_pages, _KEY_BYTES), (self._value_pages, _VALUE_BYTES)):
            if whole := bucket * _WIDTH * width // mmap.PAGESIZE * mmap.PAGESIZE:
                pages.madvise(mmap.MADV_DONTNEED, 0, whole)


def _bits(rows: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """Return each row of eight as the bits of a number, the first as its lowest; `np.packbits` takes six times as long.

    A row is a number whose bytes are 0 or 1. The product moves byte i to bit 56 + i, and nothing else as high.
    """
    bits: NDArray[np.uint8] = (rows.view(np.uint64)[:, 0] * _GATHER_BITS >> np.uint64(56)).astype(np.uint8)
    return bits


def _nth_bits() -> NDArray[np.int64]:
    """Return a table: by n and number, which of its bits is the n-th that is set, 8 for none."""
    table = np.full((_WIDTH + 1, 256), _WIDTH, np.int64)
    for number in range(256):
        bits = [bit for bit in range(_WIDTH) if number >> bit & 1]
        table[: len(bits), number] = bits
    return table


_GATHER_BITS: Final = np.uint64(0x0102040810204080)
_NTH_BIT: Final = _nth_bits()
_FIRST_BIT: Final = _NTH_BIT[0] % _WIDTH


def _upper(keys: Keys) -> NDArray[np.uint64]:
    return keys.view(np.uint64) >> np.uint64(32)


def _ranks(groups: Positions) -> Positions:
    """Return 0 for the first of each group of neighbours, 1 for its second and so on."""
    positions = np.arange(len(groups))
    is_first = np.empty(len(groups), np.bool_)
    is_first[0] = True
    np.not_equal(groups[1:], groups[:-1], out=is_first[1:])
    ranks: Positions = positions - np.maximum.accumulate(np.where(is_first, positions, 0))
    return ranks


def _distinct(keys: Keys) -> Keys:
    """Return the keys in ascending order of their bits, each once; `np.unique` takes six times as long."""
    ordered = np.sort(keys.view(np.uint64))
    is_new = np.empty(len(ordered), np.bool_)
    is_new[:1] = True
    np.not_equal(ordered[1:], ordered[:-1], out=is_new[1:])
    return ordered[is_new].view(np.int64)


class BlockTable:
    """Values of block keys. A key without a value has ABSENT.

    Attributes:
        count: keys with a value.
    """

    def __init__(self) -> None:
        self._area = _Area(_FEWEST_BUCKETS)
        self._old: _Area | None = None  # while it is rebuilt: the keys from the frontier on
        self._moved = 0  # buckets of the old area before this one are in the new one
        self._frontier = np.uint64(0)  # the same as upper bits of keys
        self._replaced = 0  # slots that `replace` has been through
        self.count = 0

    @property
    def memory_bytes(self) -> int:
        """Memory of the slots, that of a rebuild included."""
        if self._old is None:
            return self._area.memory_bytes
        moved = self._moved / self._old.end
        return int(self._area.memory_bytes * moved + self._old.memory_bytes * (1 - moved))

    def find(self, keys: Keys) -> Values:
        """Return the value of each key, ABSENT where it has none."""
        if self._old is None:
            return self._area.find(keys)[1]
        values = np.empty(len(keys), np.uint32)
        for area, where in self._areas_of(keys):
            values[where] = area.find(keys[where])[1]
        return values

    def update(self, keys: Keys, transition: Callable[[Values], Values], *, inserts: bool) -> None:
        """Change the values of keys.

        Args:
            keys: in any order.
            transition: from the values of a batch of distinct keys to their new ones, ABSENT for none. A key that is
                repeated may go through it once or more.
            inserts: whether keys without a value get one; otherwise they stay as they are.
        """
        for start in range(0, len(keys), _BATCH):
            # Not all of them are put in order first: the batches would fill the table from its beginning.
            batch = _distinct(keys[start : start + _BATCH])
            self._advance(len(batch))
            for area, where in self._areas_of(batch):
                self._update_area(area, batch[where], transition, inserts=inserts)

    def _update_area(self, area: _Area, keys: Keys, transition: Callable[[Values], Values], *, inserts: bool) -> None:
        if inserts:
            slots, before = area.claim(keys)
        else:
            slots, before = area.find(keys)
            has_value = before > ABSENT
            slots, before = slots[has_value], before[has_value]
        after = transition(before)
        area.values[slots] = after
        self.count += int(np.count_nonzero(after > ABSENT)) - int(np.count_nonzero(before > ABSENT))

    def _areas_of(self, keys: Keys) -> Iterator[tuple[_Area, NDArray[np.bool_] | slice]]:
        if self._old is None:
            yield self._area, slice(None)
            return
        is_moved = _upper(keys) < self._frontier
        for area, where in ((self._area, is_moved), (self._old, ~is_moved)):
            if where.any():
                yield area, where

    def replace(self, transition: Callable[[Values], Values]) -> bool:
        """Replace the values of some of the slots by what `transition` makes of them, and go on behind these with the
        next call. The calls from one False to the next reach every key, also when the table is rebuilt meanwhile.

        Returns:
            Whether there are more slots.
        """
        if self._old is not None:
            # Slots change their places. It ends in time: a rebuild is as long as this and has begun earlier.
            self._move(_STEP * 4)
            self._replaced = 0
            return True
        chunk = self._area.values[self._replaced : self._replaced + _CHUNK]
        live = np.flatnonzero(chunk > ABSENT)
        after = transition(chunk[live])
        chunk[live] = after
        self.count -= int(np.count_nonzero(after <= ABSENT))
        self._replaced += len(chunk)
        if self._replaced < len(self._area.values):
            return True
        self._replaced = 0
        return False

    def entries(self) -> tuple[Keys, Values]:
        """Return the keys that have a value, and these."""
        parts = [(self._area, 0)] if self._old is None else [(self._area, 0), (self._old, self._moved * _WIDTH)]
        live = [np.flatnonzero(area.values[start:] > ABSENT) + start for area, start in parts]
        keys = [area.keys[slots] for (area, _), slots in zip(parts, live, strict=True)]
        values = [area.values[slots] for (area, _), slots in zip(parts, live, strict=True)]
        return np.concatenate(keys), np.concatenate(values)

    # Rebuilds.

    def _advance(self, new_keys: int) -> None:
        """Make room for so many keys."""
        if self._old is not None:
            self._move(new_keys * _SLOTS_PER_KEY // _WIDTH)
        if self._old is None and self._area.used + new_keys > self._area.buckets * _WIDTH * _MOST_LOAD:
            self._rebuild(self.count + new_keys)

    def maintain(self) -> bool:
        """Do some work of a rebuild, or begin one if the table is nearly empty; return whether there is more."""
        homes = self._area.buckets * _WIDTH
        if self._old is None and homes > _FEWEST_BUCKETS * _WIDTH and self.count < homes * _SHRINK_LOAD:
            self._rebuild(self.count)
        if self._old is not None:
            self._move(_STEP)
        return self._old is not None

    def _rebuild(self, keys: int) -> None:
        self._old, self._moved, self._frontier = self._area, 0, np.uint64(0)
        self._area = _Area(max(_FEWEST_BUCKETS, int(keys / _LEAST_LOAD) // _WIDTH))
        self._replaced = 0
        if self._old.buckets <= _AT_ONCE:
            self._move(self._old.end)

    def _move(self, buckets: int) -> None:
        """Move so many buckets, and on to a boundary."""
        old = self._old
        assert old is not None
        end = min(self._moved + buckets, old.end)
        while self._moved < end:
            stop = old.boundary(min(self._moved + _STEP, end) - 1)
            part = slice(self._moved * _WIDTH, stop * _WIDTH)
            keys, values = old.keys[part], old.values[part]
            live = np.flatnonzero(values > ABSENT)
            live = live[np.argsort(keys[live].view(np.uint64))]
            self._area.values[self._area.place(keys[live])] = values[live]
            self._moved = stop
        self._frontier = np.uint64(-(-(self._moved << 32) // old.buckets))
        old.release(self._moved)
        if self._moved == old.end:
            self._old = None
