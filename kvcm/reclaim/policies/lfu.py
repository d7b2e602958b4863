"""Least frequently used, with the least recently accessed first among equals.

The order is one queue: blocks of equal worth stand together, and a table knows the newest of each worth, so that a
block is put in its place without a search through blocks. Rejected: a heap (blocks leave from its middle, and ties
need a sequence number per block).

Plain counts never forget: blocks read a thousand times last week outlast everything new. *Dynamic ageing* (LFU-DA,
Arlitt et al. 2000) adds to a block's frequency, at each access, the worth of the last block evicted for space.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcm.reclaim.policies.policy import END, Ordered, Summaries, Summary, restore_each

__all__ = ["Lfu"]

_MOST = (1 << 31) - 1


class Lfu(Ordered):
    """Evicts the block of the smallest worth: its accesses, the write included, and its age allowance.

    Args:
        ageing: whether worth is frequency plus allowance, or frequency alone.
    """

    __slots__ = ("_ageing", "_allowance", "_frequencies", "_newest", "_steps", "_worths")

    def __init__(self, *, ageing: bool) -> None:
        super().__init__()
        self._ageing = ageing
        self._allowance = 0
        self._frequencies = self._links.column("i")
        self._worths = self._links.column("i") if ageing else self._frequencies
        self._newest: dict[int, int] = {}
        self._steps = array("i")  # the keys of `_newest`, ascending

    def insert(self, slot: int, key: int) -> None:
        """Add a block; the write is its first access."""
        self._place(slot, 1)

    def insert_all(self, slots: Sequence[int], keys: Sequence[int]) -> None:
        """Add blocks one after the other."""
        for slot, key in zip(slots, keys, strict=True):
            self.insert(slot, key)

    def touch(self, slot: int, reads: int = 1) -> None:
        """Add to a block's frequency."""
        frequency = min(self._frequencies[slot] + reads, _MOST)
        self._take_out(slot)
        self._place(slot, frequency)

    def touch_all(self, slots: Sequence[int], reads: Sequence[int]) -> None:
        """Count reads of one after the other."""
        for slot, count in zip(slots, reads, strict=True):
            self.touch(slot, count)

    def remove(self, slot: int, *, evicted: bool = True) -> None:
        """Take a block out and forget its frequency. The allowance never falls: a victim that others were passed
        over for may be worth more than the next."""
        if self._ageing and evicted:
            self._allowance = max(self._allowance, self._worths[slot])
        self._take_out(slot)

    def moved(self, slot: int, to: int) -> None:
        """Call the block in `slot` `to`."""
        super().moved(slot, to)
        worth = self._worths[to]
        if self._newest[worth] == slot:
            self._newest[worth] = to

    def rank(self, summary: Summary | Summaries) -> tuple[Any, ...]:
        """Return the reads, by which the frequency grows, then the time of the last read."""
        return (summary.reads, summary.read_at)

    def restore(self, slot: int, key: int, summary: Summary) -> None:
        """Add a block with its reads; what it had been allowed is forgotten, as everybody's is."""
        self._place(slot, _frequency(summary))

    def restore_all(self, slots: NDArray[np.int64], keys: NDArray[np.int64], summaries: Summaries) -> None:
        """Add blocks one after the other."""
        restore_each(self, slots, keys, summaries)

    def _place(self, slot: int, frequency: int) -> None:
        worth = min(frequency + self._allowance, _MOST)
        after = self._newest.get(worth)
        if after is None:
            step = bisect_left(self._steps, worth)
            after = self._newest[self._steps[step - 1]] if step else END
            self._steps.insert(step, worth)
        self._queue.put(slot, after)
        self._newest[worth] = slot
        self._frequencies[slot] = frequency
        self._worths[slot] = worth

    def _take_out(self, slot: int) -> None:
        worth = self._worths[slot]
        if self._newest[worth] == slot:
            before = self._queue.older(slot)
            if before >= 0 and self._worths[before] == worth:
                self._newest[worth] = before
            else:
                del self._newest[worth]
                del self._steps[bisect_left(self._steps, worth)]
        self._queue.remove(slot)


def _frequency(summary: Summary) -> int:
    return min(summary.reads + 1, _MOST)
