"""Least recently used among blocks that no resident block follows: a prefix leaves from its tail (invariant 7).

Blocks that are followed keep their place in the order and are looked past. A caller that touches a chain from its tail
to its head spares these looks: every block is then newer than those that follow it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from kvcm.reclaim.policies.policy import END, Cursor, IsLeaf, Ordered, Summaries, Summary

__all__ = ["LeafLru"]

_MOST_CANDIDATES = 64


class LeafLru(Ordered):
    """Evicts the leaf that was neither written nor read for longest.

    Args:
        is_leaf: asked about a slot when it is about to be yielded.
    """

    __slots__ = ("_is_leaf",)

    def __init__(self, is_leaf: IsLeaf) -> None:
        super().__init__()
        self._is_leaf = is_leaf

    def touch(self, slot: int, reads: int = 1) -> None:
        """Make a block the newest."""
        self._queue.renew(slot)

    def touch_all(self, slots: Sequence[int], reads: Sequence[int]) -> None:
        """Make blocks the newest, the last of them the newest of all."""
        self._queue.renew_all(slots)

    def neighbours(self, slot: int) -> tuple[int, int]:
        """Return the next older and the next newer slot, below zero at the ends."""
        return self._queue.older(slot), self._queue.newer(slot)

    def rank(self, summary: Summary | Summaries) -> tuple[Any, ...]:
        """Return the time of the last read."""
        return (summary.read_at,)

    def victims(self) -> Iterator[int]:
        """Yield leaves from the oldest to the newest, the first always being the oldest leaf there is.

        A block that was looked past and becomes a leaf, because the one just yielded left, comes in its turn: the look
        begins at the oldest again. Only where more than `_MOST_LOOKS` blocks that are followed are older than any leaf
        it goes on where it was, and such a block waits for the next iteration unless it is the older neighbour.
        """
        cursor = self._links.open_cursor()
        try:
            for _ in range(len(self)):
                slot = self._next_leaf(cursor)
                if slot < 0:
                    return
                cursor.stand_on(slot)
                yield slot
                if not cursor.stepped_back:
                    cursor.passed.add(cursor.at)
        finally:
            self._links.close_cursor(cursor)

    def _next_leaf(self, cursor: Cursor) -> int:
        at, passed, is_leaf, newer = cursor.at, cursor.passed, self._is_leaf, self._queue.newer
        if cursor.stepped_back and (slot := self._oldest_leaf(passed)) >= 0:
            return slot
        if at >= 0 and at not in passed and is_leaf(at):
            return at
        slot = newer(at)
        # Behind an older leaf that came in its turn lie blocks that were passed over before.
        while slot >= 0 and (slot in passed or not is_leaf(slot)):
            slot = newer(slot)
        return slot

    def _oldest_leaf(self, passed: set[int]) -> int:
        """Return the oldest leaf if it is near the old end of the queue, the end if it is not."""
        slot = self._queue.newer(END)
        for _ in range(_MOST_CANDIDATES):
            if slot < 0 or (slot not in passed and self._is_leaf(slot)):
                return slot
            slot = self._queue.newer(slot)
        return END
