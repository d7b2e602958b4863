"""Blocks of the engine that are kept from being freed, because their KV is still to be saved.

A pin is a reference in vLLM's block pool, as a request's is: the block cannot be given to anybody else, be its request
finished, preempted or moved on with its window. Used by the scheduler's thread alone.

When vLLM forgets its cache, because its weights change for example, it wants all blocks back at once and tells nobody
before. So the pool's method for that is wrapped: pins that are all that is in the way are given up first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

__all__ = ["Pins"]


class Pins:
    """Pins blocks, up to a share of the pool.

    Args:
        most_fraction: of all blocks.
    """

    def __init__(self, most_fraction: float) -> None:
        self._most_fraction = most_fraction
        self._pool: Any = None
        self._most = 0
        self._pinned: Counter[int] = Counter()
        self.count = 0

    def bind(self, pool: Any, give_up: Callable[[], None]) -> None:
        """Take vLLM's block pool.

        Args:
            pool: it.
            give_up: releases all pins; called when the pool is reset and they alone are in the way.
        """
        self._pool = pool
        self._most = int(pool.num_gpu_blocks * self._most_fraction)
        reset = pool.reset_prefix_cache

        def reset_without_pins() -> bool:
            if self._pinned and self._are_all_that_is_held:
                give_up()
            return bool(reset())

        pool.reset_prefix_cache = reset_without_pins

    def take(self, block_ids: Collection[int]) -> bool:
        """Pin blocks that somebody holds now; False, and nothing pinned, when that would be too many."""
        if self._pool is None or self.count + len(block_ids) > self._most:
            return False
        self._pool.touch([self._pool.blocks[block_id] for block_id in block_ids])
        self._pinned.update(block_ids)
        self.count += len(block_ids)
        return True

    def release(self, block_ids: Collection[int]) -> None:
        """Unpin blocks, once for each time that they were pinned."""
        self._pool.free_blocks([self._pool.blocks[block_id] for block_id in block_ids])
        self.count -= len(block_ids)
        for block_id in block_ids:
            self._pinned[block_id] -= 1
            if not self._pinned[block_id]:
                del self._pinned[block_id]

    @property
    def are_scarce(self) -> bool:
        """Whether more than half of what may be pinned is."""
        return 2 * self.count > self._most

    @property
    def _are_all_that_is_held(self) -> bool:
        held = self._pool.num_gpu_blocks - 1 - self._pool.get_num_free_blocks()  # one block stands for dropped ones
        blocks = self._pool.blocks
        return held == len(self._pinned) and all(blocks[each].ref_cnt == pins for each, pins in self._pinned.items())
