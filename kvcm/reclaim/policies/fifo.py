"""First in, first out: a read changes nothing."""

from __future__ import annotations

from collections.abc import Sequence

from kvcm.reclaim.policies.policy import Ordered, Summary

__all__ = ["Fifo"]


class Fifo(Ordered):
    """Evicts the block that was written first."""

    __slots__ = ()

    def insert(self, slot: int, key: int) -> None:
        """Add a block as the newest."""
        self._queue.push(slot)

    def insert_all(self, slots: Sequence[int], keys: Sequence[int]) -> None:
        """Add blocks, the last as the newest."""
        self._queue.push_all(slots)

    def touch(self, slot: int, reads: int = 1) -> None:
        """Do nothing."""

    def touch_all(self, slots: Sequence[int], reads: Sequence[int]) -> None:
        """Do nothing."""

    def rank(self, summary: Summary) -> tuple[float, ...]:
        """Return the time of the write."""
        return (summary.written_at,)

    def restore(self, slot: int, key: int, summary: Summary) -> None:
        """Add a block that was resident before."""
        self._queue.push(slot)
