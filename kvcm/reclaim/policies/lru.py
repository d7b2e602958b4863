"""LRU: evicts the block that was neither written nor read for the longest time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvcm.reclaim.policies.policy import Ordered, Summaries, Summary

__all__ = ["Lru"]


class Lru(Ordered):
    """Least recently used: a read makes a block the newest."""

    __slots__ = ()

    def touch(self, slot: int, reads: int = 1) -> None:
        """Make a block the newest."""
        self._queue.renew(slot)

    def touch_all(self, slots: Sequence[int], reads: Sequence[int]) -> None:
        """Make blocks the newest, the last of them the newest of all."""
        self._queue.renew_all(slots)

    def rank(self, summary: Summary | Summaries) -> tuple[Any, ...]:
        """Return the time of the last read."""
        return (summary.read_at,)
