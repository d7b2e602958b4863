"""Sets of holders, each stored once and named by a small number.

A holder is a bit: one medium (and one part) of one reporter. Blocks of one prefix are mostly held by the same holders,
so millions of blocks share a few thousand sets. A set is a Python number whose bits are its holders: union and
difference of sets of a thousand holders take a tenth of a microsecond.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvcm.residency.block_table import ABSENT, FIRST_VALUE, Values

__all__ = ["HolderSets", "bit_numbers"]

_BYTES_OF_SET: Final = 160  # entries of the list and the dict, and the count, beside the number itself


class HolderSets:
    """The sets that blocks have, and how many blocks have each. The set of a block that has none is ABSENT."""

    def __init__(self) -> None:
        self._bits: list[int] = [0] * FIRST_VALUE
        self._numbers = {0: ABSENT}
        self._blocks = np.zeros(64, np.int64)
        self._free: list[int] = []
        self._bytes = 0

    @property
    def memory_bytes(self) -> int:
        """Memory of the sets."""
        return self._bytes + self._blocks.nbytes

    def __len__(self) -> int:
        return len(self._numbers) - 1

    @property
    def end(self) -> int:
        """A number that is higher than those of all sets."""
        return len(self._blocks)

    def bits(self, number: int) -> int:
        """Return the holders of a set."""
        return self._bits[number]

    def having(self, holders: int) -> NDArray[np.bool_]:
        """Return for each number whether its set has one of some holders; the last entry is False."""
        return np.array([bool(bits & holders) for bits in self._bits] + [False], np.bool_)

    def replace(self, before: Values, added: int, removed: int) -> tuple[Values, dict[int, int]]:
        """Move blocks from their sets to those with some holders less and some more.

        Args:
            before: set of each block.
            added: holders that every block has afterwards.
            removed: holders that none has, unless they are added, too.

        Returns:
            The sets afterwards, and how many blocks moved from each set that is not the same afterwards.
        """
        if not len(before):
            return before, {}
        first = before[0]
        if (before == first).all():  # usual: blocks of one chain, or new ones
            after = self._number(self._bits[first] & ~removed | added)
            moved = {int(first): len(before)} if after != first else {}
            self._move(int(first), after, len(before))
            return np.full(len(before), after, np.uint32), moved
        numbers, places, counts = np.unique(before, return_inverse=True, return_counts=True)
        targets = [self._number(self._bits[number] & ~removed | added) for number in numbers.tolist()]
        moved = {}
        for number, target, count in zip(numbers.tolist(), targets, counts.tolist(), strict=True):
            if target != number:
                moved[number] = count
            self._move(number, target, count)
        return np.array(targets, np.uint32)[places], moved

    def release(self, numbers: Iterable[int]) -> list[int]:
        """Forget those of the sets that no block has, and return them; to be called when the blocks have their new
        sets."""
        released = []
        for number in numbers:
            if number >= FIRST_VALUE and not self._blocks[number]:
                bits = self._bits[number]
                assert bits, "a set that blocks moved from has holders"
                del self._numbers[bits]
                self._bytes -= sys.getsizeof(bits) + _BYTES_OF_SET
                self._bits[number] = 0
                self._free.append(number)
                released.append(number)
        return released

    def _number(self, bits: int) -> int:
        number = self._numbers.get(bits)
        if number is None:
            if self._free:
                number = self._free.pop()
                self._bits[number] = bits
            else:
                number = len(self._bits)
                self._bits.append(bits)
                if number >= len(self._blocks):
                    self._blocks = np.concatenate((self._blocks, np.zeros_like(self._blocks)))
            self._numbers[bits] = number
            self._bytes += sys.getsizeof(bits) + _BYTES_OF_SET
        return number

    def _move(self, number: int, target: int, count: int) -> None:
        if number != target:
            self._blocks[number] -= count
            self._blocks[target] += count
            assert number < FIRST_VALUE or self._blocks[number] >= 0


def bit_numbers(bits: int) -> NDArray[np.int64]:
    """Return the numbers of the bits that are set, in ascending order."""
    data = np.frombuffer(bits.to_bytes((bits.bit_length() + 7) // 8, "little"), np.uint8)
    return np.flatnonzero(np.unpackbits(data, bitorder="little"))
