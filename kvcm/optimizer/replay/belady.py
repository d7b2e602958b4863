"""Belady's algorithm: what is needed last goes first. It knows the future, so no live cache runs it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

from kvcm.optimizer.trace import Trace
from kvcm.reclaim.policies import Summary

__all__ = ["Belady", "Future"]


class Future:
    """Where in a trace each block is accessed.

    Args:
        trace: what its requests neither read nor write is no access.

    Attributes:
        now: position in `trace.blocks` of the access that is being replayed.
    """

    def __init__(self, trace: Trace) -> None:
        self.now = -1
        self._never = trace.accesses
        self._positions: list[list[int]] = [[] for _ in range(trace.unique_blocks)]
        for request in range(len(trace)):
            start = int(trace.offsets[request])
            count = len(trace.request_blocks(request)) if trace.writes[request] else int(trace.read_blocks[request])
            for position in range(start, start + count):
                self._positions[trace.blocks[position]].append(position)

    def next_access(self, slot: int) -> int:
        """Return the position of a block's next access, N if there is none."""
        positions = self._positions[slot]
        place = bisect_right(positions, self.now)
        return positions[place] if place < len(positions) else self._never


class Belady:
    """Evicts the block whose next access is farthest; of those that have none, the one of the smallest slot.

    Args:
        future: of the trace that is replayed.
    """

    __slots__ = ("_future", "_resident")

    def __init__(self, future: Future) -> None:
        self._future = future
        self._resident: set[int] = set()

    def __len__(self) -> int:
        return len(self._resident)

    def __contains__(self, slot: int) -> bool:
        return slot in self._resident

    def insert(self, slot: int, key: int) -> None:
        """Add a block."""
        self._resident.add(slot)

    def insert_all(self, slots: Sequence[int], keys: Sequence[int]) -> None:
        """Add blocks."""
        self._resident.update(slots)

    def touch(self, slot: int, reads: int = 1) -> None:
        """Do nothing: the past is of no account."""

    def touch_all(self, slots: Sequence[int], reads: Sequence[int]) -> None:
        """Do nothing: the past is of no account."""

    def remove(self, slot: int, *, evicted: bool = True) -> None:
        """Take a block out."""
        self._resident.remove(slot)

    def moved(self, slot: int, to: int) -> None:
        """Refuse: only rows of an index move, and this order is for traces alone."""
        raise NotImplementedError("blocks of a trace keep their numbers")

    def victims(self) -> Iterator[int]:
        """Yield from the farthest next access to the nearest."""
        yield from sorted(self._resident, key=lambda slot: (-self._future.next_access(slot), slot))

    def rank(self, summary: Summary) -> tuple[float, ...]:
        """Return nothing to go by: a summary tells of the past."""
        return ()

    def restore(self, slot: int, key: int, summary: Summary) -> None:
        """Add a block that was resident before."""
        self._resident.add(slot)
