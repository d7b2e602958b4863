"""Runs a small trace through a policy, block by block, the way a cache of a fixed number of blocks would."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from kvcm.reclaim.policies.policy import IsLeaf, Policy

TRACE = ([1, 2, 3, 4], [1, 2, 5], [6, 7], [1, 2, 3, 4], [1, 2, 5], [1, 2, 3, 8], [6, 7], [1, 2, 3, 4])
"""The hand-sized example: ids name whole prefixes."""


class CacheOf:
    """A cache.

    Args:
        capacity: in blocks.
        make: makes its policy.
    """

    def __init__(self, capacity: int, make: Callable[[IsLeaf], Policy]) -> None:
        self.capacity = capacity
        self.policy = make(self._is_leaf)
        self.slots: dict[int, int] = {}
        self._ids: dict[int, int] = {}
        self._free = list(range(capacity))[::-1]
        self._parents: dict[int, int | None] = {}
        self._children: Counter[int | None] = Counter()
        self.prefix_hits = 0

    def read(self, ids: Sequence[int], *, spares_path: bool = False) -> None:
        """Serve one request; with `spares_path` none of its own blocks is evicted for it."""
        hits = [each in self.slots for each in ids]
        self.prefix_hits += hits.index(False) if False in hits else len(ids)
        path = set(ids) if spares_path else set()
        for parent, each in zip([None, *ids], ids, strict=False):
            if each in self.slots:
                self.policy.touch(self.slots[each])
            elif len(self.slots) < self.capacity or self._evict(path):
                self._insert(each, parent)
            else:
                return

    def _evict(self, path: set[int]) -> bool:
        for slot in self.policy.victims():
            victim = self._ids[slot]
            if victim not in path:
                del self.slots[victim], self._ids[slot]
                self._children[self._parents[victim]] -= 1
                self._free.append(slot)
                self.policy.remove(slot)
                return True
        return False

    def _insert(self, block: int, parent: int | None) -> None:
        slot = self._free.pop()
        self.slots[block], self._ids[slot] = slot, block
        self._parents[block] = parent
        self._children[parent] += 1
        self.policy.insert(slot, block)

    def _is_leaf(self, slot: int) -> bool:
        return not self._children[self._ids[slot]]
