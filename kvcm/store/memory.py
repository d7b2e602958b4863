"""Documents and a lease in the process's memory: the reference store, gone with the process.

No method suspends, so every call is atomic on one event loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import groupby, islice, repeat, takewhile
from math import inf
from operator import itemgetter
from typing import Generic, TypeVar

from kvcm.model.clock import Clock
from kvcm.store.store import PART, LeaseState, Replacement, Revision

__all__ = ["DueQueue", "MemoryLease", "MemoryStore", "MemoryTable", "Outcomes"]

# When things become due, earliest first: deadlines move and vanish at any time.
#
# Invariants:
#
# * A key with a deadline is in one entry of the heap at least that bears exactly this deadline. Keys that got theirs
#   together share an entry.
# * The entries have at most twice as many keys as there are deadlines, plus a constant: whatever moved leaves a stale
#   one behind, and the heap is rebuilt when those prevail.

Key = TypeVar("Key", int, str)
_SPARE_ENTRIES = 64
_KEYS_OF_AN_ENTRY = 512


class DueQueue(Generic[Key]):
    """Deadlines by key."""

    __slots__ = ("_deadlines", "_heap", "_size")

    def __init__(self) -> None:
        self._deadlines: dict[Key, float] = {}
        self._heap: list[tuple[float, Key, tuple[Key, ...]]] = []  # with the least key of each entry
        self._size = 0  # keys in the heap

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
        self._push(deadline, (key,))

    def discard(self, key: Key) -> None:
        """Forget a key's deadline if it has one."""
        if self._deadlines.pop(key, None) is not None:
            self._tidy()

    def put_all(self, keys: Sequence[Key], deadline: float) -> None:
        """Set or move the deadlines of many keys."""
        if keys:
            self._deadlines.update(dict.fromkeys(keys, deadline))
            self._push(deadline, tuple(keys))

    def discard_all(self, keys: Iterable[Key]) -> None:
        """Forget the deadlines of keys that have one."""
        deque(map(self._deadlines.pop, keys, repeat(None)), maxlen=0)  # a loop in C
        self._tidy()

    def until(self, now: float, most: int) -> list[Key]:
        """Return the keys whose deadline is not after `now`, the earliest first, at most so many. They stay."""
        seen: set[tuple[float, Key]] = set()
        last: tuple[float, Key] | None = None
        heap = self._heap
        # Later entries may have keys before the last one, of the same deadline.
        while heap and heap[0][0] <= now and most > 0 and (len(seen) < most or last is None or heap[0][:2] < last):
            deadline, _, keys = heappop(heap)
            self._size -= len(keys)
            seen.update([(deadline, key) for key in keys if self._deadlines.get(key) == deadline])
            last = max((deadline, max(keys)), last or (deadline, keys[0]))
        found = sorted(seen)
        for deadline, same in groupby(found, itemgetter(0)):
            ordered = tuple([key for _, key in same])
            # In parts, or each call would sort all that is due at one time once more.
            for start in range(0, len(ordered), _KEYS_OF_AN_ENTRY):
                self._push(deadline, ordered[start : start + _KEYS_OF_AN_ENTRY])
        return [key for _, key in found[:most]]

    def clear(self) -> None:
        """Forget all."""
        self._deadlines.clear()
        self._heap.clear()
        self._size = 0

    def _push(self, deadline: float, keys: tuple[Key, ...]) -> None:
        heappush(self._heap, (deadline, min(keys), keys))
        self._size += len(keys)
        self._tidy()

    def _tidy(self) -> None:
        if self._size > 2 * len(self._deadlines) + _SPARE_ENTRIES:
            self._heap = [(deadline, key, (key,)) for key, deadline in self._deadlines.items()]
            heapify(self._heap)
            self._size = len(self._heap)


# Outcomes of documents in memory (`Table.finish`), for stores of one manager.
#
# Invariants:
#
# * An expired outcome is never returned, whether it was dropped by then or not.
# * An outcome stays until it expires. New outcomes drop expired ones, a few at a time, the oldest first; nothing
# sweeps.

_MOST_FORGOTTEN = 4
"""More than come at a time, so that those which are over become fewer; few, so that no call pays for a long rest."""


class Outcomes:
    """Outcomes by name."""

    __slots__ = ("_kept",)

    def __init__(self) -> None:
        self._kept: dict[str, tuple[float, bytes]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def store(self, name: str, outcome: bytes, until: float, now: float) -> list[str]:
        """Keep an outcome until a unix time; return the names of some that are over, which are forgotten."""
        self._kept.pop(name, None)  # it goes behind all others
        over = takewhile(lambda each: self._kept[each][0] <= now, self._kept)
        forgotten = list(islice(over, _MOST_FORGOTTEN))
        for each in forgotten:
            del self._kept[each]
        self._kept[name] = until, outcome
        return forgotten

    def get(self, name: str, now: float) -> bytes | None:
        """Return an outcome that is not over, None without one."""
        until, outcome = self._kept.get(name, (now, b""))
        return outcome if now < until else None


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

    async def finish(self, name: str, old: bytes, outcome: bytes, now: float, seconds: float) -> bool:
        if not await self.replace(name, old, None):
            return False
        self._outcomes.store(name, outcome, now + seconds, now)
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

    @property
    def due_from(self) -> float:
        return self._due.earliest

    @property
    def revision(self) -> Revision:
        return (self._version,)

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

    async def parts(self) -> Sequence[str]:
        """Return one name: memory is one part."""
        return (PART,)

    async def flush(self) -> None:
        """Nothing outlives the process, so nothing is waited for."""

    async def sync(self) -> None:
        """As `flush`."""

    async def close(self) -> None:
        """Nothing to let go of."""


class MemoryLease:
    """A lease among the managers of one process, which is one manager outside of tests."""

    revision = None

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._state = LeaseState("", 0)
        self._expires = 0.0

    async def acquire(self, node_id: str, seconds: float) -> LeaseState:
        now = self._clock.now()
        if now >= self._expires or not self._state.holder:
            self._state = LeaseState(node_id, self._state.token + 1)
        if self._state.holder == node_id:
            self._expires = now + seconds
        return self._state

    async def get(self) -> LeaseState:
        is_free = self._clock.now() >= self._expires
        return LeaseState("", self._state.token) if is_free else self._state

    async def release(self, node_id: str) -> None:
        if self._state.holder == node_id:
            self._state = LeaseState("", self._state.token)
