"""One instance of the original: a radix tree of blocks, and which of them is evicted next.

A block's number names its prefix, so the tree is the set of blocks with the parent of each; one that was evicted stays
in the tree without its KV. `lru` and `leaf_aware_lru` are the policies of the live reclaimer (`leaf_lru` by its own
name). Within a chain `leaf_aware_lru` takes the last block first.
"""

from __future__ import annotations

from array import array
from heapq import nsmallest

import numpy as np

from kvcm.optimizer.groups.original.config import OriginalInstance
from kvcm.optimizer.trace import Int32Column
from kvcm.reclaim.policies import LeafLru, Lru

__all__ = ["OriginalCache"]


class OriginalCache:
    """The blocks of one instance, by their numbers in it.

    Args:
        instance: what it is.
        parents: the block before each block.
        seed: of samples; those of the original differ from run to run.

    Attributes:
        instance: what it is.
        here: whether each block is cached.
    """

    def __init__(self, instance: OriginalInstance, parents: Int32Column, seed: int = 1) -> None:
        count = len(parents)
        self.instance = instance
        self.here = bytearray(count)
        self._parents: list[int] = parents.tolist()
        self._children = array("i", [0]) * (count + 1)
        self._is_leafy = instance.policy == "leaf_aware_lru"
        self._order: Lru | LeafLru | _Sample
        if instance.policy == "random_lru":
            self._order = _Sample(instance.sample_rate, seed)
        else:
            self._order = LeafLru(lambda slot: not self._children[slot]) if self._is_leafy else Lru()

    def __len__(self) -> int:
        return len(self._order)

    def prefix(self, blocks: Int32Column) -> int:
        """Return how many leading blocks are cached."""
        numbers = blocks.tolist()
        for place, block in enumerate(numbers):
            if not self.here[block]:
                return place
        return len(numbers)

    def access(self, blocks: Int32Column) -> None:
        """Touch blocks that are cached and insert the others; they are in the order of their chain."""
        numbers: list[int] = list(dict.fromkeys(blocks.tolist()))
        if self._is_leafy:  # a chain leaves from its tail, which is found sooner where it is older than its head
            numbers.reverse()
        first = 0
        while first < len(numbers):
            first = self._access_alike(numbers, first)

    def evict(self, count: int) -> None:
        """Evict so many blocks, or all there are."""
        if isinstance(self._order, _Sample):
            for block in self._order.oldest(count):
                self._drop(block)
            return
        for _ in range(min(count, len(self))):
            self._drop(next(self._order.victims()))

    def _access_alike(self, numbers: list[int], first: int) -> int:
        """Touch blocks that are cached, or insert ones that are not, up to the first other one; return its place."""
        is_here = self.here[numbers[first]]
        end = first + 1
        while end < len(numbers) and self.here[numbers[end]] == is_here:
            end += 1
        run = numbers[first:end]
        if is_here:
            self._order.touch_all(run, [1] * len(run))
            return end
        self._order.insert_all(run, run)
        for block in run:
            self.here[block] = 1
            self._children[self._parents[block]] += 1
        return end

    def _drop(self, block: int) -> None:
        self._order.remove(block)
        self.here[block] = 0
        self._children[self._parents[block]] -= 1


class _Sample:
    """The oldest of a sample: `random_lru`.

    Args:
        rate: victims over blocks of the sample.
        seed: of the samples.
    """

    def __init__(self, rate: float, seed: int) -> None:
        self._rate = rate
        self._random = np.random.default_rng(seed)
        self._clock = 0
        self._last: dict[int, int] = {}
        self._places: dict[int, int] = {}
        self._slots: list[int] = []

    def __len__(self) -> int:
        return len(self._slots)

    def insert_all(self, slots: list[int], keys: list[int]) -> None:
        """Add blocks, the last as the newest."""
        for slot in slots:
            self._places[slot] = len(self._slots)
            self._slots.append(slot)
        self.touch_all(slots, keys)

    def touch_all(self, slots: list[int], reads: list[int]) -> None:
        """Make blocks the newest, the last of them the newest of all."""
        for slot in slots:
            self._clock += 1
            self._last[slot] = self._clock

    def remove(self, slot: int) -> None:
        """Take a block out; the last one fills its gap."""
        place, last = self._places.pop(slot), self._slots.pop()
        if last != slot:
            self._slots[place] = last
            self._places[last] = place

    def oldest(self, count: int) -> list[int]:
        """Return so many blocks of a sample, the oldest first; fewer where there are fewer."""
        size = min(len(self), max(count, int(count / self._rate)))
        sample = self._random.choice(len(self), size, replace=False, shuffle=False).tolist()
        return nsmallest(count, (self._slots[place] for place in sample), key=self._last.__getitem__)
