"""S3-FIFO (Yang et al. 2023): new blocks queue in *small*, and only those that are read twice get into *main*.

A tenth of the blocks is meant for small, and names of those that left it are remembered for as long as nine tenths of
the blocks take to leave; a block that is written again meanwhile goes to main at once. The size of the cache is the
number of blocks resident when one is evicted, since a live cache has a size in bytes only.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcm.reclaim.policies.policy import END, SlotLinks, SlotQueue, Summaries, Summary, restore_each

__all__ = ["Ghost", "S3Fifo"]

# The names of blocks that left lately, in the order in which they left.
#
# A hash table of chains in arrays, about 28 bytes per name: a cache of a million blocks remembers nearly as many
# names. Rejected: a dict (three times as much, and its first entry lies behind all the gaps that earlier ones left).

_NONE = -1


class Ghost:
    """A set of names that forgets the oldest first."""

    __slots__ = ("_chains", "_free", "_heads", "_links", "_names", "_queue")

    def __init__(self) -> None:
        self._links = SlotLinks()
        self._queue = SlotQueue(self._links)
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


_SMALL_RATIO, _GHOST_RATIO = 0.1, 0.9
_MOST_READS = 3
_READS_FOR_MAIN = 2
_IN_MAIN = 4


class S3Fifo:
    """Evicts the oldest block of small, or of main if that has more than its share, among those not read.

    Args:
        warmup: size of small beyond which new blocks go to main until the first eviction ever; None for no such rule.
        blocks: size of the cache where it has one in blocks, which a simulated one has.
    """

    __slots__ = ("_blocks", "_ghost", "_ghost_size", "_keys", "_links", "_main", "_small", "_states", "_warmup")

    def __init__(self, *, warmup: int | None = None, blocks: int | None = None) -> None:
        self._links = SlotLinks(queues=2)
        self._small, self._main = SlotQueue(self._links, -1), SlotQueue(self._links, -2)
        self._states = self._links.column("B")  # reads that still count, and `_IN_MAIN`
        self._keys = self._links.column("q")
        self._ghost = Ghost()
        self._ghost_size = 0
        self._warmup = warmup
        self._blocks = blocks

    def __len__(self) -> int:
        return len(self._small) + len(self._main)

    def __contains__(self, slot: int) -> bool:
        return slot in self._links

    def insert(self, slot: int, key: int) -> None:
        """Add a block to small, or to main if it left small lately.

        The ghost is cut to its size only here: the name asked for must not be the one that the eviction made before
        this insert pushes out.
        """
        came_back = self._ghost.discard(key)
        self._ghost.shrink(self._ghost_size)
        is_warming_up = self._warmup is not None and len(self._small) >= self._warmup
        self._add(slot, key, _IN_MAIN if came_back or is_warming_up else 0)

    def insert_all(self, slots: Sequence[int], keys: Sequence[int]) -> None:
        """Add blocks one after the other."""
        for slot, key in zip(slots, keys, strict=True):
            self.insert(slot, key)

    def touch(self, slot: int, reads: int = 1) -> None:
        """Count reads, three at most."""
        state = self._states[slot]
        self._states[slot] = state & _IN_MAIN | min((state & _MOST_READS) + reads, _MOST_READS)

    def touch_all(self, slots: Sequence[int], reads: Sequence[int]) -> None:
        """Count reads of one after the other."""
        for slot, count in zip(slots, reads, strict=True):
            self.touch(slot, count)

    def remove(self, slot: int, *, evicted: bool = True) -> None:
        """Take a block out, and remember its name if it was evicted out of small."""
        if evicted:
            self._warmup = None
        if self._states[slot] & _IN_MAIN:
            self._main.remove(slot)
            return
        if evicted:
            self._ghost_size = int(_GHOST_RATIO * self._size())
            self._ghost.add(self._keys[slot])
        self._small.remove(slot)

    def moved(self, slot: int, to: int) -> None:
        """Call the block in `slot` `to`."""
        self._links.move(slot, to)

    def victims(self) -> Iterator[int]:
        """Yield what the two queues give up. A block that is passed over becomes the newest of its queue."""
        cursor = self._links.open_cursor()
        try:
            for _ in range(len(self)):
                slot = self._find(cursor.passed)
                if slot < 0:
                    return
                cursor.stand_on(slot)
                yield slot
                if not cursor.stepped_back:
                    self._send_back(cursor.at, cursor.passed)
        finally:
            self._links.close_cursor(cursor)

    def rank(self, summary: Summary | Summaries) -> tuple[Any, ...]:
        """Return whether it belongs to main, then the time of the write."""
        return (summary.reads >= _READS_FOR_MAIN, summary.written_at)

    def restore(self, slot: int, key: int, summary: Summary) -> None:
        """Add a block to small with its reads, or to main as if it just came over: small leaves by age, then main, as
        long as main does not have more than its share."""
        self._add(slot, key, _IN_MAIN if summary.reads >= _READS_FOR_MAIN else summary.reads)

    def restore_all(self, slots: NDArray[np.int64], keys: NDArray[np.int64], summaries: Summaries) -> None:
        """Add blocks one after the other."""
        restore_each(self, slots, keys, summaries)

    def _add(self, slot: int, key: int, state: int) -> None:
        (self._main if state & _IN_MAIN else self._small).push(slot)
        self._states[slot] = state
        self._keys[slot] = key

    def _find(self, passed: set[int]) -> int:
        total = self._size()
        main_share = total - int(_SMALL_RATIO * total)
        if len(self._main) > main_share or not self._small:
            slot = self._find_in_main(passed)
            return slot if slot >= 0 else self._find_in_small(passed)
        slot = self._find_in_small(passed)
        return slot if slot >= 0 else self._find_in_main(passed)

    def _size(self) -> int:
        return len(self) if self._blocks is None else self._blocks

    def _find_in_small(self, passed: set[int]) -> int:
        small, states = self._small, self._states
        for _ in range(len(small)):
            slot = small.oldest
            if states[slot] >= _READS_FOR_MAIN:
                small.remove(slot)
                self._main.push(slot)
                states[slot] = _IN_MAIN
            elif slot in passed:
                self._send_back(slot, passed)
            else:
                return slot
        return END

    def _find_in_main(self, passed: set[int]) -> int:
        """Return the oldest block whose reads are used up; each time round uses up one of every block's."""
        main, states = self._main, self._states
        for _ in range((_MOST_READS + 1) * len(main)):
            slot = main.oldest
            if states[slot] & _MOST_READS:
                states[slot] -= 1
                main.renew(slot)
            elif slot in passed:
                self._send_back(slot, passed)
            else:
                return slot
        return END

    def _send_back(self, slot: int, passed: set[int]) -> None:
        (self._main if self._states[slot] & _IN_MAIN else self._small).renew(slot)
        passed.add(slot)
