"""Documents and a lease in the process's memory: the reference store, gone with the process.

No method suspends, so every call is atomic on one event loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvcm.model.clock import Clock
from kvcm.store.due_queue import DueQueue
from kvcm.store.outcomes import Outcomes
from kvcm.store.store import LeaseState, Replacement

__all__ = ["MemoryLease", "MemoryStore", "MemoryTable"]


class MemoryTable:
    """A dict of documents and the queue of their due times."""

    def __init__(self) -> None:
        self._documents: dict[str, bytes] = {}
        self._due: DueQueue[str] = DueQueue()
        self._outcomes = Outcomes()
        self._version = 0

    async def get(self, name: str) -> bytes | None:
        return self._documents.get(name)

    async def all(self) -> Mapping[str, bytes]:
        return dict(self._documents)

    async def replace(self, name: str, old: bytes | None, new: bytes | None, due: float = 0.0) -> bool:
        if self._documents.get(name) != old:
            return False
        self._put(name, new, due)
        self._version += 1
        return True

    async def replace_together(self, replacements: Sequence[Replacement]) -> bool:
        if any(self._documents.get(each.name) != each.old for each in replacements):
            return False
        for each in replacements:
            self._put(each.name, each.new, 0.0)
        self._version += bool(replacements)
        return True

    async def conclude(self, name: str, old: bytes, outcome: bytes, now: float, seconds: float) -> bool:
        if not await self.replace(name, old, None):
            return False
        self._outcomes.keep(name, outcome, now + seconds, now)
        return True

    async def outcome(self, name: str, now: float) -> bytes | None:
        return self._outcomes.get(name, now)

    def _put(self, name: str, new: bytes | None, due: float) -> None:
        if new is None:
            self._documents.pop(name, None)
        else:
            self._documents[name] = new
        if new is None or not due:
            self._due.discard(name)
        else:
            self._due.put(name, due)

    async def due(self, now: float, most: int) -> list[str]:
        return self._due.until(now, most)

    async def version(self) -> int:
        return self._version


class MemoryStore:
    """Tables by name, of one manager alone."""

    is_shared = False

    def __init__(self) -> None:
        self._tables: dict[str, MemoryTable] = {}

    def table(self, name: str, shard_count: int = 1) -> MemoryTable:
        """Return the table of that name, the same one every time; parts make no difference in one memory."""
        return self._tables.setdefault(name, MemoryTable())

    async def flush(self) -> None:
        """Nothing outlives the process, so nothing is waited for."""

    async def sync(self) -> None:
        """As `flush`."""

    async def close(self) -> None:
        """Nothing to let go of."""


class MemoryLease:
    """A lease among the managers of one process, which is one manager outside of tests."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._state = LeaseState("", 0)
        self._expires = 0.0

    async def hold(self, node_id: str, seconds: float) -> LeaseState:
        now = self._clock.now()
        if now >= self._expires or not self._state.holder:
            self._state = LeaseState(node_id, self._state.token + 1)
        if self._state.holder == node_id:
            self._expires = now + seconds
        return self._state

    async def look(self) -> LeaseState:
        is_free = self._clock.now() >= self._expires
        return LeaseState("", self._state.token) if is_free else self._state

    async def release(self, node_id: str) -> None:
        if self._state.holder == node_id:
            self._state = LeaseState("", self._state.token)
