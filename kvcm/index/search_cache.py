"""Search cache: what a match returns for a block, encoded once and kept until the block or a storage changes.

Invariants:

* An entry is the answer for the record that the store has, or had a moment ago: every change of a record, here or by
  another manager, drops its entry (design.md decision 4).
* A read that overlaps a change never puts the old record back. A read in flight leaves a placeholder per key; the
  change takes it away, and the result enters the cache only where the placeholder is still there.
* Bounded: entries live in two generations. A hit in the old one moves the entry to the young one; when the young ones
  of all caches hold half of the budget, they become the old ones, and what was old and not asked for is gone.

Rejected: strict LRU, where a lookup costs half as much again as a bare dict lookup (decision 19); one epoch for all
keys instead of placeholders, which on a busy cluster would keep nothing.

An answer of a block with one location is that location's own chunk, so in front of a backend that keeps its records in
this process the cache holds references, no copies, and needs no bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Sized
from typing import Any, Generic, NamedTuple, TypeVar, cast
from weakref import WeakSet

from kvcm.index.answers import StorageView
from kvcm.model.locations import BlockRecord

__all__ = ["CacheBudget", "ReadInFlight", "SearchCache"]

_ENTRY_BYTES = 150  # dict slot, key, and the headers of chunk and key

Kept = TypeVar("Kept", bound=Sized)


class CacheBudget:
    """Bytes that all search caches of a process may hold together, and their hits and misses.

    Args:
        capacity_bytes: None is no bound.
        is_coherent: whether changes by other managers are heard of right now; while they are not, nothing is kept.
    """

    def __init__(self, capacity_bytes: int | None = None, is_coherent: Callable[[], bool] = lambda: True) -> None:
        self.capacity_bytes = capacity_bytes
        self.is_coherent = is_coherent
        self.hits = 0
        self.misses = 0
        self._young_bytes = 0
        self._caches: WeakSet[SearchCache[Any]] = WeakSet()

    def join(self, cache: SearchCache[Any]) -> None:
        """Let a cache share the budget."""
        self._caches.add(cache)

    def spend(self, size_bytes: int) -> None:
        """Count an entry that was added. What leaves early is not given back: the next turn makes up for it."""
        self._young_bytes += size_bytes + _ENTRY_BYTES
        if self.capacity_bytes is not None and self.capacity_bytes < 2 * self._young_bytes:
            self._young_bytes = 0
            for cache in self._caches:
                cache.age()


class ReadInFlight(NamedTuple):
    """A read of records that is under way; its identity is the placeholder."""

    keys: Sequence[int]
    generation: int


class SearchCache(Generic[Kept]):
    """Answers by key. A key that is absent is unknown, not a miss: ask the records.

    Args:
        view: which storages can be read; a change of it empties the cache.
        budget: bytes to share with other caches.
        compose: makes of a record what is kept of it, None for nothing: `compose_answer`, for answers.
        weigh: returns the bytes that a kept value takes.
        is_bounded: false in front of records of this process, to which the cache only refers.
    """

    def __init__(
        self,
        view: StorageView,
        budget: CacheBudget,
        compose: Callable[[BlockRecord, StorageView], Kept | None],
        weigh: Callable[[Kept], int] = len,
        *,
        is_bounded: bool = True,
    ) -> None:
        self._view = view
        self._compose = compose
        self._weigh = weigh
        self._generation = view.generation
        self._budget = budget
        self._is_bounded = is_bounded and budget.capacity_bytes is not None
        self._young: dict[int, Kept] = {}
        self._old: dict[int, Kept] = {}
        self._reading: dict[int, ReadInFlight] = {}
        budget.join(self)

    def lookup(self, keys: Sequence[int]) -> list[Kept | None]:
        """Return the answers that are known, None for the others."""
        self._follow_view()
        found: list[Kept | None] = list(map(self._young.get, keys))
        if self._old and None in found:
            for position, answer in enumerate(found):
                if answer is None and (old := self._old.pop(keys[position], None)) is not None:
                    found[position] = old
                    self._keep(keys[position], old)
        return found

    def note(self, key: int, record: BlockRecord | None) -> Kept | None:
        """Keep the answer for a record that is current right now, and return it."""
        self._reading.pop(key, None)
        answer = self._compose(record, self._view) if record is not None else None
        if answer is None:
            self._young.pop(key, None)
            self._old.pop(key, None)
        else:
            self._keep(key, answer)
        return answer

    def note_all(self, keys: Sequence[int], records: Sequence[BlockRecord | None]) -> None:
        """Do `note` for many keys."""
        answers = [None if record is None else self._compose(record, self._view) for record in records]
        if None in answers:
            self.forget([key for key, answer in zip(keys, answers, strict=True) if answer is None])
            known = [(key, answer) for key, answer in zip(keys, answers, strict=True) if answer is not None]
            keys, answers = [key for key, _ in known], [answer for _, answer in known]
        self.note_answers(keys, cast("list[Kept]", answers))

    def note_answers(self, keys: Sequence[int], answers: Sequence[Kept]) -> None:
        """Keep the answers for records that are current right now."""
        if self._reading:
            for key in keys:
                self._reading.pop(key, None)
        if self._is_bounded:
            for key, answer in zip(keys, answers, strict=True):
                self._keep(key, answer)
        else:
            self._young.update(zip(keys, answers, strict=True))

    def forget(self, keys: Iterable[int]) -> None:
        """Drop the answers of keys that changed, and keep nothing of reads that are under way."""
        keys = list(keys)
        tables: tuple[dict[int, Any], ...] = (self._young, self._old, self._reading)
        for table in tables:
            if table and not table.keys().isdisjoint(keys):
                for key in keys:
                    table.pop(key, None)

    def clear(self) -> None:
        """Drop everything, reads under way included: changes may have been missed."""
        self._young.clear()
        self._old.clear()
        self._reading.clear()

    def age(self) -> None:
        """Begin a new generation."""
        self._old, self._young = self._young, {}

    def begin(self, keys: Sequence[int]) -> ReadInFlight:
        """Leave a placeholder for every key whose record is about to be read."""
        self._follow_view()
        read = ReadInFlight(keys, self._generation)
        self._reading.update(dict.fromkeys(keys, read))
        return read

    def end(self, read: ReadInFlight, records: Sequence[BlockRecord | None]) -> list[Kept | None]:
        """Return the answers for the records of a read, and keep those whose placeholder survived."""
        self._follow_view()
        answers = [self._compose(record, self._view) if record is not None else None for record in records]
        for key, answer in zip(read.keys, answers, strict=True):
            if self._reading.get(key) is read:
                del self._reading[key]
                if answer is not None:
                    self._keep(key, answer)
        return answers

    def abandon(self, read: ReadInFlight) -> None:
        """Take the placeholders of a failed read away."""
        for key in read.keys:
            if self._reading.get(key) is read:
                del self._reading[key]

    def _keep(self, key: int, answer: Kept) -> None:
        if not self._is_bounded:
            self._young[key] = answer
        elif self._budget.is_coherent():
            self._young[key] = answer
            self._budget.spend(self._weigh(answer))

    def _follow_view(self) -> None:
        if self._generation != self._view.generation:
            self._generation = self._view.generation
            self.clear()
