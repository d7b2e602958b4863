"""When things become due, earliest first: deadlines move and vanish at any time.

Invariants:

* A key with a deadline has one entry in the heap at least that bears exactly this deadline.
* The heap is at most twice as long as there are deadlines, plus a constant: whatever moved leaves a stale entry behind,
  and the heap is rebuilt when those prevail.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush
from itertools import repeat
from math import inf
from typing import Generic, TypeVar

__all__ = ["DueQueue"]

Key = TypeVar("Key", int, str)

_SPARE_ENTRIES = 64


class DueQueue(Generic[Key]):
    """Deadlines by key."""

    __slots__ = ("_deadlines", "_heap", "_latest")

    def __init__(self) -> None:
        self._deadlines: dict[Key, float] = {}
        self._heap: list[tuple[float, Key]] = []
        self._latest = -inf  # no deadline in the heap is later

    def __len__(self) -> int:
        return len(self._deadlines)

    @property
    def earliest(self) -> float:
        """Unix seconds before which nothing is due, infinity when nothing ever is. It may be early, never late."""
        return self._heap[0][0] if self._heap else inf

    def put(self, key: Key, deadline: float) -> None:
        """Set or move a deadline, unix seconds."""
        if self._deadlines.get(key) == deadline:
            return
        self._deadlines[key] = deadline
        heappush(self._heap, (deadline, key))
        self._latest = max(self._latest, deadline)
        self._tidy()

    def discard(self, key: Key) -> None:
        """Forget a key's deadline if it has one."""
        if self._deadlines.pop(key, None) is not None:
            self._tidy()

    def put_all(self, keys: Sequence[Key], deadline: float) -> None:
        """Set or move the deadlines of many keys."""
        self._deadlines.update(dict.fromkeys(keys, deadline))
        entries = [(deadline, key) for key in sorted(keys)]
        if deadline > self._latest:  # the usual case: behind everything that is there they keep the order of the heap
            self._heap += entries
            self._latest = deadline
        else:
            for entry in entries:
                heappush(self._heap, entry)
        self._tidy()

    def discard_all(self, keys: Iterable[Key]) -> None:
        """Forget the deadlines of keys that have one."""
        deque(map(self._deadlines.pop, keys, repeat(None)), maxlen=0)  # a loop in C
        self._tidy()

    def until(self, now: float, most: int) -> list[Key]:
        """Return the keys whose deadline is not after `now`, the earliest first, at most so many. They stay."""
        found: dict[Key, float] = {}
        heap = self._heap
        while heap and heap[0][0] <= now and len(found) < most:
            deadline, key = heappop(heap)
            if self._deadlines.get(key) == deadline:
                found[key] = deadline
        for key, deadline in found.items():
            heappush(heap, (deadline, key))
        return list(found)

    def clear(self) -> None:
        """Forget all."""
        self._deadlines.clear()
        self._heap.clear()
        self._latest = -inf

    def _tidy(self) -> None:
        if len(self._heap) > 2 * len(self._deadlines) + _SPARE_ENTRIES:
            self._heap = [(deadline, key) for key, deadline in self._deadlines.items()]
            heapify(self._heap)
            self._latest = max(self._deadlines.values(), default=-inf)
