"""SIEVE (Zhang et al. 2024): blocks in the order of their writes, a bit for "read since the hand came by", and a hand.

The hand goes from the oldest to the newest and round again. It clears the bits it meets; the first block without one
is the victim, and the hand rests on its newer neighbour. A block that is passed over lets the hand go on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcm.reclaim.policies.policy import END, Cursor, SlotLinks, SlotQueue, Summaries, Summary, restore_each

__all__ = ["Sieve"]


class Sieve:
    """Evicts the first block under the hand that was not read since the hand came by."""

    __slots__ = ("_hand", "_links", "_queue", "_visited")

    def __init__(self) -> None:
        self._links = SlotLinks()
        self._queue = SlotQueue(self._links)
        self._visited = self._links.column("B")
        self._hand = END  # the next slot to look at; the oldest when it is the end

    def __len__(self) -> int:
        return len(self._queue)

    def __contains__(self, slot: int) -> bool:
        return slot in self._links

    def insert(self, slot: int, key: int) -> None:
        """Add a block as the newest."""
        self._queue.push(slot)
        self._visited[slot] = 0

    def insert_all(self, slots: Sequence[int], keys: Sequence[int]) -> None:
        """Add blocks one after the other."""
        for slot, key in zip(slots, keys, strict=True):
            self.insert(slot, key)

    def touch(self, slot: int, reads: int = 1) -> None:
        """Set a block's bit."""
        self._visited[slot] = 1

    def touch_all(self, slots: Sequence[int], reads: Sequence[int]) -> None:
        """Count reads of one after the other."""
        for slot, count in zip(slots, reads, strict=True):
            self.touch(slot, count)

    def remove(self, slot: int, *, evicted: bool = True) -> None:
        """Take a block out; a hand that rests on it goes on to the next."""
        if self._hand == slot:
            self._hand = self._queue.newer(slot)
        self._queue.remove(slot)

    def moved(self, slot: int, to: int) -> None:
        """Call the block in `slot` `to`."""
        self._links.move(slot, to)
        if self._hand == slot:
            self._hand = to

    def victims(self) -> Iterator[int]:
        """Yield what the hand finds. The last block yielded stays under the hand if nothing more is asked for."""
        cursor = self._links.open_cursor()
        try:
            for _ in range(len(self)):
                slot = self._find(cursor.passed)
                if slot < 0:
                    return
                self._hand = slot
                cursor.stand_on(slot)
                yield slot
                if not cursor.stepped_back:
                    self._pass_over(cursor)
        finally:
            self._links.close_cursor(cursor)

    def rank(self, summary: Summary | Summaries) -> tuple[Any, ...]:
        """Return whether it was read, then the time of the write: the order in which one sweep and a second take
        all."""
        return (summary.reads > 0, summary.written_at)

    def restore(self, slot: int, key: int, summary: Summary) -> None:
        """Add a block, its bit set if it was ever read: the first sweep takes those that were not, by age, and later
        unread writes, before the second takes the others."""
        self.insert(slot, key)
        self._visited[slot] = summary.reads > 0

    def restore_all(self, slots: NDArray[np.int64], keys: NDArray[np.int64], summaries: Summaries) -> None:
        """Add blocks one after the other."""
        restore_each(self, slots, keys, summaries)

    def _find(self, passed: set[int]) -> int:
        """Return the next victim, the end if two laps find none but blocks that were passed over."""
        slot, newer, visited = self._hand, self._queue.newer, self._visited
        for _ in range(2 * len(self)):
            if slot < 0:
                slot = self._queue.oldest
            if visited[slot]:
                visited[slot] = 0
            elif slot not in passed:
                return slot
            slot = newer(slot)
        return END

    def _pass_over(self, cursor: Cursor) -> None:
        cursor.passed.add(cursor.at)
        if self._hand == cursor.at:
            self._hand = self._queue.newer(cursor.at)
