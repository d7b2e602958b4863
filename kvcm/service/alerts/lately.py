"""How much counters grew of late: what happened long ago is no present trouble."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Mapping
from typing import Generic, TypeVar

__all__ = ["Lately"]

Key = TypeVar("Key", bound=Hashable)


class Lately(Generic[Key]):
    """Remembers counters as they were over some time.

    Args:
        seconds: that count as of late; the true time is up to one interval between notes longer.
        are_known: whether a counter that was not there yet stood at 0 then; else it is counted from when it was first
            noted.
    """

    def __init__(self, seconds: float, *, are_known: bool = True) -> None:
        self._seconds = seconds
        self._are_known = are_known
        self._noted: deque[tuple[float, dict[Key, int]]] = deque()

    def note(self, counts: Mapping[Key, int], now: float) -> None:
        """Remember how the counters stand, and forget what is older than need be."""
        self._noted.append((now, dict(counts)))
        while len(self._noted) > 1 and self._noted[1][0] <= now - self._seconds:
            self._noted.popleft()

    def growth(self, counts: Mapping[Key, int]) -> Counter[Key]:
        """Return by how much each counter is above what it was; without those that did not grow."""
        return +Counter({key: count - self._before(key, count) for key, count in counts.items()})

    def _before(self, key: Key, count: int) -> int:
        if self._are_known:
            return self._noted[0][1].get(key, 0) if self._noted else 0
        return next((counts[key] for _, counts in self._noted if key in counts), count)
