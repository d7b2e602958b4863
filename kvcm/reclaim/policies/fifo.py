"""FIFO: evicts the block that was written first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvcm.reclaim.policies.policy import Ordered, Summaries, Summary

__all__ = ["Fifo"]


class Fifo(Ordered):
    """First in, first out: a read changes nothing."""

    __slots__ = ()

    def touch(self, slot: int, reads: int = 1) -> None:
        """Do nothing."""

    def touch_all(self, slots: Sequence[int], reads: Sequence[int]) -> None:
        """Do nothing."""

    def rank(self, summary: Summary | Summaries) -> tuple[Any, ...]:
        """Return the time of the write."""
        return (summary.written_at,)
