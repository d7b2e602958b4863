"""Blocks of the engine that are kept from being freed, because their KV is still to be saved.

A pin is a reference in vLLM's block pool, as a request's is: the block cannot be given to anybody else, be its request
finished, preempted or moved on with its window. Used by the scheduler's thread alone.
"""

from __future__ import annotations

from collections.abc import Collection
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
        self.count = 0

    def bind(self, pool: Any) -> None:
        """Take vLLM's block pool."""
        self._pool = pool
        self._most = int(pool.num_gpu_blocks * self._most_fraction)

    def take(self, block_ids: Collection[int]) -> bool:
        """Pin blocks that somebody holds now; False, and nothing pinned, when that would be too many."""
        if self._pool is None or self.count + len(block_ids) > self._most:
            return False
        self._pool.touch([self._pool.blocks[block_id] for block_id in block_ids])
        self.count += len(block_ids)
        return True

    def release(self, block_ids: Collection[int]) -> None:
        """Unpin blocks, once for each time that they were pinned."""
        self._pool.free_blocks([self._pool.blocks[block_id] for block_id in block_ids])
        self.count -= len(block_ids)
