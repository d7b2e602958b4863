"""A table of things that end at a deadline: write sessions and read leases.

Expiry is exact and cheap with many open entries: a heap of (deadline, id). Entries that ended early or were renewed
stay in the heap until their old deadline passes, and are recognised then by the deadline stored in the table; when they
outweigh the open ones the heap is built anew.
"""

from __future__ import annotations

import heapq
from typing import Generic, Protocol, TypeVar

__all__ = ["DeadlineTable"]


class _Expiring(Protocol):
    """Something with an id and a deadline in unix seconds."""

    @property
    def id(self) -> str: ...

    @property
    def deadline(self) -> float: ...


Entry = TypeVar("Entry", bound=_Expiring)


class DeadlineTable(Generic[Entry]):
    """Open entries by id. An entry leaves exactly once: taken, or popped when due."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._heap: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, entry: Entry) -> None:
        """Add an entry, or replace the one of the same id by a renewed one."""
        self._entries[entry.id] = entry
        heapq.heappush(self._heap, (entry.deadline, entry.id))
        if len(self._heap) > 2 * len(self._entries) + 1024:
            self._heap = [(entry.deadline, entry.id) for entry in self._entries.values()]
            heapq.heapify(self._heap)

    def get(self, entry_id: str) -> Entry | None:
        """Return an open entry, None when there is none of that id."""
        return self._entries.get(entry_id)

    def pop(self, entry_id: str) -> Entry | None:
        """Remove and return an open entry, None when there is none of that id."""
        return self._entries.pop(entry_id, None)

    def values(self) -> list[Entry]:
        """Return all open entries."""
        return list(self._entries.values())

    def pop_due(self, now: float, most: int | None = None) -> list[Entry]:
        """Remove and return the entries whose deadline is not after `now`, earliest first, at most so many."""
        due: list[Entry] = []
        while self._heap and self._heap[0][0] <= now and (most is None or len(due) < most):
            _, entry_id = heapq.heappop(self._heap)
            entry = self._entries.get(entry_id)
            if entry is not None and entry.deadline <= now:
                due.append(self._entries.pop(entry_id))
        return due
