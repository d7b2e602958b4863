"""Dense pages of requests: prompts while they are computed, short requests, and all KV where residency is `device`.

Tokens of a request lie in blocks of `page_size`; each block that is on the device has one page. The table of slots is
what dense attention reads, and what tells where a token is: -1 means not on the device.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from gpu_tier.pools.device_pool import DeviceKVPool
from gpu_tier.pools.req_to_token import ReqToTokenPool

__all__ = ["DenseTokens"]


class DenseTokens:
    """Who holds which pages of the arena densely.

    Args:
        pool: the arena.
        tables: the table of slots.
    """

    def __init__(self, pool: DeviceKVPool, tables: ReqToTokenPool) -> None:
        self.pool = pool
        self.tables = tables
        self._pages: dict[int, dict[int, int]] = {}
        self._spare: dict[int, list[int]] = {}

    def hold(self, request: int, pages: int) -> None:
        """Set pages aside for a request.

        Raises:
            PoolExhaustedError: there are too few; then none is held.
        """
        self._spare.setdefault(request, []).extend(self.pool.allocator.alloc(pages))
        self._pages.setdefault(request, {})

    def cover(self, request: int, start: int, stop: int) -> None:
        """Give every block of tokens start to stop - 1 a page, those set aside first.

        Raises:
            PoolExhaustedError: there are too few; then nothing changed.
        """
        size = self.pool.addressing.page_size
        pages, spare = self._pages.setdefault(request, {}), self._spare.setdefault(request, [])
        missing = [block for block in range(start // size, -(-stop // size)) if block not in pages]
        if len(missing) > len(spare):
            spare.extend(self.pool.allocator.alloc(len(missing) - len(spare)))
        for block in missing:
            pages[block] = spare.pop()
            self.tables.set_slots(request, block * size, self._slots_of(pages[block]))

    def _slots_of(self, page: int) -> Tensor:
        size = self.pool.addressing.page_size
        return torch.arange(page * size, (page + 1) * size, dtype=torch.int32)

    def drop(self, request: int, blocks: Iterable[int]) -> None:
        """Release the pages of some blocks; blocks without one are passed over."""
        size = self.pool.addressing.page_size
        pages = self._pages.get(request, {})
        for block in [block for block in blocks if block in pages]:
            self.pool.allocator.free([pages.pop(block)])
            self.tables.set_slots(request, block * size, torch.full((size,), -1, dtype=torch.int32))

    def release(self, request: int) -> None:
        """Release everything of a request."""
        self.drop(request, list(self._pages.get(request, {})))
        self.pool.allocator.free(self._spare.pop(request, []))
        self._pages.pop(request, None)

    def slot(self, request: int, token: int) -> int:
        """Return the device slot of a token that has one, on the host."""
        size = self.pool.addressing.page_size
        return self._pages[request][token // size] * size + token % size

    def blocks(self, request: int) -> list[int]:
        """Return the blocks of a request that have a page, ascending."""
        return sorted(self._pages.get(request, {}))

    def has(self, request: int, start: int, stop: int) -> bool:
        """Return whether all tokens start to stop - 1 are on the device."""
        size = self.pool.addressing.page_size
        pages = self._pages.get(request, {})
        return all(block in pages for block in range(start // size, -(-stop // size)))
