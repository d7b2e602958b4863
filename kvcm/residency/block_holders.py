"""The holders of one instance's blocks: which engine has a block in which of its media.

A *unit* is one medium (and one part of the blocks) of one reporter. Every unit is a bit in the sets of holders. What a
reporter replaces or drops as a whole is never removed block by block: the unit is retired, which hides it at once, and
a sweep in the background takes its bit out of all sets before another unit gets it.

The cost per (block, unit) is that of one entry of the table, 17 to 30 bytes, once for all units that hold the block;
the sets are shared (`HolderSets`).

Two kinds of questions are asked. `prefixes` is for all units at once, so what a set means for every engine is kept.
`held_parts` is for some of the units, those of one kind of memory or source, and says it for each part on its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcm.residency.block_table import BlockTable, Keys, Values
from kvcm.residency.holder_sets import HolderSets, bit_numbers
from kvcm.residency.tier_walk import IN_GPU, IN_HOST, ON_DISK, Runs

__all__ = ["ALL_PARTS", "BlockHolders", "HeldParts", "Medium", "Prefixes", "Unit"]

ALL_PARTS: Final = ""
"""The part that stands for whole blocks."""

_MOST_ROWS: Final = 4096
_FIRST_KEYS: Final = 64  # of a prompt; many hold no more, and their other keys are never read
_WHOLE: Final = -1
_NONE: Final = -2
_UNITS: Final = 64  # that arrays begin with


class Medium(IntEnum):
    """Memory of an engine, fastest first."""

    GPU = 1
    HOST = 2
    DISK = 3


# What a block counts for that is in a medium: a prefix in a slower one counts the faster ones, too.
_GPU, _HOST, _DISK, _JOINT = 1, 2, 4, 8
_PREFIXES: Final = (_GPU, _HOST, _DISK, _JOINT)  # in the order of `Prefixes`
_ITSELF: Final = 4  # bits by which the flags of the medium itself are shifted
_FLAGS: Final = {
    Medium.GPU: _GPU | _HOST | _DISK | IN_GPU << _ITSELF,
    Medium.HOST: _HOST | _DISK | IN_HOST << _ITSELF,
    Medium.DISK: _DISK | ON_DISK << _ITSELF,
}


@dataclass(slots=True, eq=False)
class Unit:
    """One medium of a reporter.

    Attributes:
        bit: its place in sets of holders.
        column: of the engine that it belongs to.
        medium: the memory.
        part: of the blocks; ALL_PARTS for whole ones.
        blocks: that it holds.
    """

    bit: int
    column: int
    medium: Medium
    part: str
    blocks: int = 0


class Prefixes(NamedTuple):
    """How many blocks each engine holds of a prompt, from its start without a gap; one number for each column asked.

    Attributes:
        gpu: in GPU memory.
        host: in GPU or host memory.
        disk: in these or on disk.
        joint: in these or in a storage.
    """

    gpu: NDArray[np.int64]
    host: NDArray[np.int64]
    disk: NDArray[np.int64]
    joint: NDArray[np.int64]


class HeldParts(NamedTuple):
    """Which parts of blocks some units hold.

    Attributes:
        row_of: row of each block in `held`.
        held: by row, part and column asked.
    """

    row_of: NDArray[np.int64]
    held: NDArray[np.bool_]


class _Rows:
    """What sets of holders mean for engines: a row of flags for each set, a column for each engine."""

    def __init__(self) -> None:
        self._rows = np.zeros((0, 0), np.uint8)
        self._has_any = np.zeros(0, np.bool_)
        self._used = 0
        self._place_of = np.zeros(0, np.int64)  # by number of the set, -1 for none

    def find(self, sets: Values, end: int) -> NDArray[np.int64]:
        """Return the place of each set's row, -1 for none."""
        if len(self._place_of) < end:
            more = np.full(end - len(self._place_of), -1, np.int64)
            self._place_of = np.concatenate((self._place_of, more))
        return self._place_of.take(sets)

    def reserve(self, count: int, width: int) -> bool:
        """Make room for so many rows; return whether the others had to go for that."""
        if self._used + count <= len(self._rows) and self._rows.shape[1] == width:
            return False
        self.clear()
        self._rows = np.zeros((max(_MOST_ROWS, count), width), np.uint8)  # not touched before it is used
        self._has_any = np.zeros(len(self._rows), np.bool_)
        return True

    def add(self, number: int, row: NDArray[np.uint8]) -> None:
        """Add the row of a set, for which there is room."""
        self._rows[self._used] = row
        self._has_any[self._used] = row.any()
        self._place_of[number] = self._used
        self._used += 1

    def take(self, places: NDArray[np.int64], columns: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return some columns of some rows."""
        return self._rows.take(places, axis=0)[:, columns]

    def have_any(self, places: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which rows say that some engine holds the block."""
        return self._has_any.take(places)

    def remove(self, sets: Sequence[int]) -> None:
        """Forget the rows of sets that are no more."""
        if sets and len(self._place_of):
            numbers = np.array(sets, np.int64)
            self._place_of[numbers[numbers < len(self._place_of)]] = -1

    def clear(self) -> None:
        """Forget all rows."""
        self._place_of.fill(-1)
        self._used = 0


def _first_places(sets: Values, stored: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return where each pair of a set and a place in storages occurs first: what ends a prefix, ends it there.

    Neighbours are mostly equal, so runs of them are made first, and only their beginnings are put in order.
    """
    pairs = sets.astype(np.int64) * 2 + stored
    starts = _run_starts(pairs)
    _, firsts = np.unique(pairs[starts], return_index=True)
    firsts.sort()
    found: NDArray[np.int64] = starts[firsts]
    return found


def _joined(flags: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return what all parts of a block have in common. Where no medium has all of them, the block lies in the slowest
    one that is needed for it: the fastest in which it counts."""
    counted = flags & np.uint8(_GPU | _HOST | _DISK)
    is_spread = (flags >> np.uint8(_ITSELF)) == 0
    fastest = (counted & (~counted + np.uint8(1))).astype(np.uint8)  # the lowest bit; flags have the order of media
    found: NDArray[np.uint8] = flags | np.where(is_spread, fastest << np.uint8(_ITSELF), np.uint8(0))
    return found


def _run_starts(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return where each run of equal values begins."""
    is_new = np.empty(len(values), np.bool_)
    is_new[:1] = True
    np.not_equal(values[1:], values[:-1], out=is_new[1:])
    return np.flatnonzero(is_new)


class BlockHolders:
    """The units of an instance, and the blocks that they hold.

    Args:
        parts: all of which an engine must hold of a block for it to count, when it reports parts. Other parts may be
            held, too, and count for nothing.
        others: parts that `held_parts` says, too: their rows are behind those of `parts`.
    """

    def __init__(self, parts: Sequence[str] = (), others: Sequence[str] = ()) -> None:
        self._part_rows = {part: row for row, part in enumerate(parts)}
        self._all_rows = {part: row for row, part in enumerate((*parts, *others))}
        self._table = BlockTable()
        self._sets = HolderSets()
        self._units: list[Unit | None] = []
        self._column_of = np.zeros(_UNITS, np.int64)
        self._flags_of = np.zeros(_UNITS, np.uint8)  # 0 for units that are hidden or retired
        self._part_of = np.zeros(_UNITS, np.int64)  # row of the part, _WHOLE for whole blocks and parts without one
        self._row_of = np.zeros(_UNITS, np.int64)  # row among all parts, _WHOLE for whole blocks, _NONE for other parts
        self._is_visible = np.zeros(_UNITS, np.bool_)
        self._free_bits: list[int] = []
        self._retired = 0
        self._sweeping = 0
        self._swept_sets = np.zeros(0, np.bool_)
        self._rows = _Rows()
        self._columns = 0

    @property
    def memory_bytes(self) -> int:
        """Memory of everything."""
        return self._table.memory_bytes + self._sets.memory_bytes

    @property
    def blocks(self) -> int:
        """Blocks that any unit holds, those that are hidden or not swept yet included."""
        return self._table.count

    @property
    def sets(self) -> int:
        """Distinct sets of holders."""
        return len(self._sets)

    @property
    def parts(self) -> int:
        """Parts that `held_parts` says, at least 1."""
        return max(1, len(self._all_rows))

    @property
    def full_parts(self) -> int:
        """Parts that an engine must hold of a block for it to count: the first of all."""
        return len(self._part_rows) or self.parts

    def row_of_part(self, part: str) -> int:
        """Return the row of a part in what `held_parts` says, -1 for none."""
        return self._all_rows.get(part, -1)

    # Units.

    def open_unit(self, column: int, medium: Medium, part: str = ALL_PARTS, *, is_visible: bool = True) -> Unit:
        """Return a new unit that holds nothing.

        Args:
            column: of its engine, from 0 without many gaps.
            medium: the memory.
            part: ALL_PARTS or one of the instance's.
            is_visible: whether what it holds counts.
        """
        bit = self._free_bits.pop() if self._free_bits else len(self._units)
        unit = Unit(bit, column, medium, part)
        if bit == len(self._units):
            self._units.append(None)
            if bit == len(self._flags_of):
                for name in ("_column_of", "_flags_of", "_part_of", "_row_of", "_is_visible"):
                    setattr(self, name, np.concatenate((getattr(self, name), np.zeros_like(getattr(self, name)))))
        self._units[bit] = unit
        self._column_of[bit] = column
        self._flags_of[bit] = self._flags(unit) if is_visible else 0
        self._part_of[bit] = self._part_rows.get(part, _WHOLE)
        self._row_of[bit] = _WHOLE if part == ALL_PARTS else self._all_rows.get(part, _NONE)
        self._is_visible[bit] = is_visible
        if column >= self._columns:
            self._columns = column + 1
            self._rows.clear()
        return unit

    def set_visible(self, units: Iterable[Unit], *, is_visible: bool) -> None:
        """Count what units hold, or do not."""
        for unit in units:
            self._flags_of[unit.bit] = self._flags(unit) if is_visible else 0
            self._is_visible[unit.bit] = is_visible
        self._rows.clear()

    def _flags(self, unit: Unit) -> int:
        return _FLAGS[unit.medium] if unit.part == ALL_PARTS or unit.part in self._part_rows else 0

    def retire(self, units: Iterable[Unit]) -> None:
        """Drop units with all that they hold."""
        for unit in units:
            assert self._units[unit.bit] is unit
            self._units[unit.bit] = None
            self._is_visible[unit.bit] = False
            if not unit.blocks:  # in no set
                self._free_bits.append(unit.bit)
            else:
                self._retired |= 1 << unit.bit
                self._flags_of[unit.bit] = 0
                self._rows.clear()

    # Blocks.

    def add(self, units: Sequence[Unit], keys: Keys) -> None:
        """Let each of the units hold the blocks of mixed keys."""
        bits = sum(1 << unit.bit for unit in units)
        self._change(units, keys, bits, self._retired)

    def remove(self, units: Sequence[Unit], keys: Keys) -> None:
        """Let none of the units hold the blocks of mixed keys any more; those that none holds do not count."""
        bits = sum(1 << unit.bit for unit in units)
        self._change(units, keys, 0, bits | self._retired)

    def _change(self, units: Sequence[Unit], keys: Keys, added: int, removed: int) -> None:
        sets = self._sets
        moved: dict[int, int] = {}

        def transition(before: Values) -> Values:
            after, counts = sets.replace(before, added, removed)
            for number, count in counts.items():
                moved[number] = moved.get(number, 0) + count
                self._count(units, sets.bits(number), count, is_added=bool(added))
            return after

        self._table.update(keys, transition, inserts=bool(added))
        self._rows.remove(sets.release(moved))

    @staticmethod
    def _count(units: Sequence[Unit], held: int, count: int, *, is_added: bool) -> None:
        for unit in units:
            has = bool(held >> unit.bit & 1)
            if is_added and not has:
                unit.blocks += count
            elif not is_added and has:
                unit.blocks -= count

    # Prefixes.

    def prefixes(self, keys: Keys, columns: NDArray[np.int64], stored: NDArray[np.bool_] | None = None) -> Prefixes:
        """Return what engines hold of a prompt.

        Args:
            keys: mixed keys of its blocks in order.
            columns: of the engines; -1 for one that holds nothing.
            stored: which of the blocks lie in a storage; None for none.
        """
        size = len(keys)
        columns = np.where(columns < self._columns, columns, -1)  # of an engine that holds nothing yet
        first = _FIRST_KEYS if stored is None else size
        sets = self._table.find(keys[:first])
        if size > first and self._any_holds(sets, columns):
            sets = np.concatenate((sets, self._table.find(keys[first:])))
        if stored is None:
            stored = np.zeros(len(sets), np.bool_)
        starts = _first_places(sets, stored)
        lengths = np.append(starts, len(sets))
        counts = np.zeros((len(_PREFIXES), len(columns)), np.int64)
        going = np.full(len(columns), 255, np.uint8)
        for begin in range(0, len(starts), _MOST_ROWS):
            window = starts[begin : begin + _MOST_ROWS]
            held = self._held(sets[window], columns)
            held |= ((held & _DISK) << 1) | (stored[window] * np.uint8(_JOINT))[:, None]
            held[0] &= going
            np.bitwise_and.accumulate(held, axis=0, out=held)
            for number, flag in enumerate(_PREFIXES):
                counts[number] += np.count_nonzero(held & flag, axis=0)
            going = held[-1]
            if not going.any():
                break
        return Prefixes(*lengths[counts])

    def tier_runs(self, keys: Keys, columns: NDArray[np.int64], stored: NDArray[np.bool_]) -> Runs:
        """Return the media in which engines hold blocks, by runs of blocks that are equal in that.

        Args:
            keys: mixed keys of at most 4,096 blocks in order.
            columns: of the engines; -1 for one that holds nothing.
            stored: which of the blocks lie in a storage.
        """
        columns = np.where(columns < self._columns, columns, -1)
        sets = self._table.find(keys)
        starts = _run_starts(sets.astype(np.int64) * 2 + stored)
        flags = self._held(sets[starts], columns) >> np.uint8(_ITSELF)
        flags |= (stored[starts] * np.uint8(ON_DISK))[:, None]
        return Runs(np.diff(starts, append=len(keys)), flags)

    def held_run(self, keys: Keys) -> int:
        """Return how many blocks from the first on are held by some engine each, not always the same."""
        start, size = 0, 1
        while start < len(keys):
            holds = self._holds(keys[start : start + size])
            if not holds.all():
                return start + int(holds.argmin())
            start, size = start + size, _MOST_ROWS  # few hold none of a prompt and then many
        return len(keys)

    def _holds(self, keys: Keys) -> NDArray[np.bool_]:
        return self._rows.have_any(self._places(self._table.find(keys)))

    def holdings(self, keys: Keys) -> list[list[Unit]]:
        """Return the visible units that hold each block."""
        found: dict[int, list[Unit]] = {}
        numbers = self._table.find(keys).tolist()
        for number in set(numbers):
            bits = bit_numbers(self._sets.bits(number)).tolist()
            units = [self._units[bit] for bit in bits if self._flags_of[bit]]
            found[number] = [unit for unit in units if unit is not None]
        return [found[number] for number in numbers]

    def mask_of(self, units: Iterable[Unit]) -> NDArray[np.bool_]:
        """Return units in the form that `held_parts` takes. It is good until a unit is opened."""
        mask = np.zeros(len(self._is_visible), np.bool_)
        mask[[unit.bit for unit in units]] = True
        return mask

    def every_unit(self) -> NDArray[np.bool_]:
        """Return all units in the same form."""
        return np.ones(len(self._is_visible), np.bool_)

    def held_parts(self, keys: Keys, mask: NDArray[np.bool_], columns: NDArray[np.int64]) -> HeldParts:
        """Return which parts of blocks some units hold; of a whole block all parts.

        Args:
            keys: mixed keys of the blocks.
            mask: the units; those that are not visible hold nothing.
            columns: of the engines, each once; units of others hold nothing.
        """
        numbers, row_of = np.unique(self._table.find(keys), return_inverse=True)
        held = np.zeros((len(numbers), self.parts, len(columns)), np.bool_)
        place_of = np.full(self._columns + 1, -1, np.int64)
        is_known = columns < self._columns
        place_of[columns[is_known]] = np.flatnonzero(is_known)
        counted = mask & self._is_visible[: len(mask)]
        for number, of_set in zip(numbers.tolist(), held, strict=True):
            bits = bit_numbers(self._sets.bits(number))
            bits = bits[counted[bits]]
            places = place_of[self._column_of[bits]]
            bits, places = bits[places >= 0], places[places >= 0]
            rows = self._row_of[bits]
            of_set[:, places[rows == _WHOLE]] = True
            of_set[rows[rows >= 0], places[rows >= 0]] = True
        return HeldParts(row_of, held)

    def held_units(self, keys: Keys, units: Sequence[Unit]) -> list[tuple[int, ...]]:
        """Return for each block which of the units hold it: their places in `units`, in order."""
        numbers = self._table.find(keys).tolist()
        found = {}
        for number in set(numbers):
            bits = self._sets.bits(number)
            found[number] = tuple(place for place, unit in enumerate(units) if bits >> unit.bit & 1)
        return [found[number] for number in numbers]

    def _any_holds(self, sets: Values, columns: NDArray[np.int64]) -> bool:
        """Return whether some engine holds all of these blocks."""
        held = self._held(np.unique(sets), columns)
        return bool(np.bitwise_and.reduce(held, axis=0).any())

    def _held(self, sets: Values, columns: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return what each set means for each engine, a row for each set."""
        return self._rows.take(self._places(sets), columns)

    def _places(self, sets: Values) -> NDArray[np.int64]:
        """Return the places of the rows of sets, which are at most _MOST_ROWS."""
        assert len(sets) <= _MOST_ROWS
        rows = self._rows
        places = rows.find(sets, self._sets.end)
        missing = np.unique(sets[places < 0])
        if len(missing):
            if rows.reserve(len(missing), self._columns + 1):  # of these sets, those that had rows have none any more
                missing = np.unique(sets)
            for number in missing.tolist():
                rows.add(number, self._make_row(self._sets.bits(number)))
            places = rows.find(sets, self._sets.end)
        return places

    def _make_row(self, bits: int) -> NDArray[np.uint8]:
        row = np.zeros(self._columns + 1, np.uint8)  # the last is that of column -1
        held = bit_numbers(bits)
        parts, columns, flags = self._part_of[held], self._column_of[held], self._flags_of[held]
        is_whole = parts == _WHOLE
        np.bitwise_or.at(row, columns[is_whole], flags[is_whole])
        if not is_whole.all():
            of_parts = np.zeros((len(self._part_rows), len(row)), np.uint8)
            np.bitwise_or.at(of_parts, (parts[~is_whole], columns[~is_whole]), flags[~is_whole])
            row |= _joined(np.bitwise_and.reduce(of_parts, axis=0))
        return row

    # Maintenance.

    def maintain(self) -> bool:
        """Do a millisecond of work in the background; return whether there is more."""
        if self._table.maintain():
            return True
        if not self._sweeping:
            if not self._retired:
                return False
            self._sweeping = self._retired
            self._swept_sets = self._sets.having(self._sweeping)
        if not self._table.replace(self._sweep):
            self._retired &= ~self._sweeping
            self._free_bits += bit_numbers(self._sweeping).tolist()
            self._sweeping = 0
        return bool(self._retired)

    def _sweep(self, before: Values) -> Values:
        # Sets that are made during a sweep have none of its bits, so those known at its beginning are all.
        has_bits = np.flatnonzero(np.take(self._swept_sets, before, mode="clip"))
        if not len(has_bits):
            return before
        after = before.copy()
        after[has_bits], moved = self._sets.replace(before[has_bits], 0, self._sweeping)
        self._rows.remove(self._sets.release(moved))
        return after
