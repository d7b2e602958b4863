"""The names of blocks that left lately, in the order in which they left.

A hash table of chains in arrays, about 28 bytes per name: a cache of a million blocks remembers nearly as many names.
Rejected: a dict (three times as much, and its first entry lies behind all the gaps that earlier ones left).
"""

from __future__ import annotations

from array import array

from kvcm.reclaim.policies.queue import Links, Queue

__all__ = ["Ghost"]

_NONE = -1


class Ghost:
    """A set of names that forgets the oldest first."""

    __slots__ = ("_chains", "_free", "_heads", "_links", "_names", "_queue")

    def __init__(self) -> None:
        self._links = Links()
        self._queue = Queue(self._links)
        self._names = self._links.column("q")
        self._chains = self._links.column("i")  # the next entry of the same bucket
        self._heads = array("i", [_NONE])  # the first entry of each bucket; a power of two of them
        self._free = array("i")

    def __len__(self) -> int:
        return len(self._queue)

    def __contains__(self, name: int) -> bool:
        return self._find(name) != _NONE

    def add(self, name: int) -> None:
        """Remember a name as the newest."""
        self.discard(name)
        entry = self._free.pop() if self._free else len(self._queue)
        self._queue.push(entry)
        self._names[entry] = name
        self._enter(entry)
        if len(self._queue) > len(self._heads):
            self._spread()

    def discard(self, name: int) -> bool:
        """Forget a name; return whether it was remembered."""
        entry = self._find(name)
        if entry == _NONE:
            return False
        self._drop(entry)
        return True

    def shrink(self, most: int) -> None:
        """Forget the oldest names until at most `most` are left."""
        while len(self._queue) > most:
            self._drop(self._queue.oldest)

    def _find(self, name: int) -> int:
        entry = self._heads[self._bucket(name)]
        while entry != _NONE and self._names[entry] != name:
            entry = self._chains[entry]
        return entry

    def _bucket(self, name: int) -> int:
        return (name ^ name >> 32) & (len(self._heads) - 1)

    def _enter(self, entry: int) -> None:
        bucket = self._bucket(self._names[entry])
        self._chains[entry] = self._heads[bucket]
        self._heads[bucket] = entry

    def _drop(self, entry: int) -> None:
        bucket = self._bucket(self._names[entry])
        behind = self._chains[entry]
        at = self._heads[bucket]
        if at == entry:
            self._heads[bucket] = behind
        else:
            while self._chains[at] != entry:
                at = self._chains[at]
            self._chains[at] = behind
        self._queue.remove(entry)
        self._free.append(entry)

    def _spread(self) -> None:
        self._heads = array("i", [_NONE]) * (2 * len(self._heads))
        entry = self._queue.oldest
        while entry >= 0:
            self._enter(entry)
            entry = self._queue.newer(entry)
