"""Sparse buffers: pages of the arena in which a request keeps items for attention, the same slots in every layer.

A buffer is C items and two newest slots. The newest item i, the one being written, lives in newest slot ``i % 2``: the
next item can be written before this one was moved into the buffer. The two are as large as an item.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_tier.pools.device_pool import DeviceKVPool

__all__ = ["Buffer", "SparseBuffers"]

_NEWEST = 2


@dataclass(frozen=True, slots=True)
class Buffer:
    """The buffer of one request.

    Attributes:
        items: ``int32 [C]`` device slot of each item's first token.
        newest: ``int32 [2]`` those of the newest slots.
    """

    items: Tensor
    newest: Tensor


class SparseBuffers:
    """Who holds which pages of the arena as a buffer.

    Args:
        pool: the arena.
        unit_tokens: tokens of an item; divides the page size.
    """

    def __init__(self, pool: DeviceKVPool, unit_tokens: int) -> None:
        self.pool = pool
        self.unit = unit_tokens
        self._pages: dict[int, list[int]] = {}

    def pages_for(self, capacity: int) -> int:
        """Return the pages of a buffer of `capacity` items."""
        return -(-(capacity + _NEWEST) * self.unit // self.pool.addressing.page_size)

    def cover(self, request: int, capacity: int) -> bool:
        """Let a request have a buffer of at least so many items; items keep their slots. Returns whether it grew.

        Raises:
            PoolExhaustedError: there are too few pages; then nothing changed.
        """
        pages = self._pages.get(request, [])
        missing = self.pages_for(capacity) - len(pages)
        if missing > 0:
            self._pages[request] = pages + self.pool.allocator.alloc(missing)
        return missing > 0

    def __contains__(self, request: int) -> bool:
        return request in self._pages

    def item_slot(self, request: int, position: int) -> int:
        """Return the device slot of the item at a position of the buffer, on the host."""
        return self._slot(request, _NEWEST + position)

    def newest_slot(self, request: int, token: int) -> int:
        """Return the device slot of a token while its item is the newest, on the host."""
        return self._slot(request, token // self.unit % _NEWEST) + token % self.unit

    def _slot(self, request: int, index: int) -> int:
        # The newest slots come first, so that a buffer can grow behind them.
        size = self.pool.addressing.page_size
        page, offset = divmod(index * self.unit, size)
        return self._pages[request][page] * size + offset

    def buffer(self, request: int) -> Buffer:
        """Return the buffer of a request."""
        size = self.pool.addressing.page_size
        pages = torch.tensor(self._pages[request], dtype=torch.int32)
        slots = (pages[:, None] * size + torch.arange(0, size, self.unit, dtype=torch.int32)).flatten()
        return Buffer(slots[_NEWEST:], slots[:_NEWEST])

    def release(self, request: int) -> None:
        """Release the buffer of a request, if it has one."""
        self.pool.allocator.free(self._pages.pop(request, []))
