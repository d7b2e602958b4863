"""Dense pages of requests: prompts while they are computed, short requests, and all KV where residency is `device`.

Tokens of a request lie in blocks of `page_size`; each block that is on the device has one page. The table of slots is
what dense attention reads, and what tells where a token is: -1 means not on the device.
"""

from __future__ import annotations

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
        pages.update((block, spare.pop()) for block in missing)
        if missing:
            first, last = missing[0] * size, (missing[-1] + 1) * size
            self.tables.set_slots(request, first, self.slots(request, first, last))

    def reuse(self, request: int, stop_block: int) -> None:
        """Set the pages of the blocks before `stop_block` aside: the request's next blocks get them."""
        pages, size = self._pages.get(request, {}), self.pool.addressing.page_size
        blocks = [block for block in pages if block < stop_block]
        if blocks:
            self._spare[request].extend(pages.pop(block) for block in blocks)
            self.tables.clear(request, min(blocks) * size, (max(blocks) + 1) * size)

    def release(self, request: int) -> None:
        """Release everything of a request."""
        pages = self._pages.pop(request, {})
        self.pool.allocator.free([*pages.values(), *self._spare.pop(request, [])])
        if pages:
            size = self.pool.addressing.page_size
            self.tables.clear(request, min(pages) * size, (max(pages) + 1) * size)

    def slot(self, request: int, token: int) -> int:
        """Return the device slot of a token that has one, on the host."""
        size = self.pool.addressing.page_size
        return self._pages[request][token // size] * size + token % size

    def slots(self, request: int, start: int, stop: int) -> Tensor:
        """Return the device slots of tokens that have one, ``int32 [stop - start]``, on the host."""
        size = self.pool.addressing.page_size
        first = start // size
        pages = [self._pages[request][block] for block in range(first, -(-stop // size))]
        slots = torch.tensor(pages, dtype=torch.int32)[:, None] * size + torch.arange(size, dtype=torch.int32)
        return slots.flatten()[start - first * size : stop - first * size]

    def blocks(self, request: int) -> list[int]:
        """Return the blocks of a request that have a page, ascending."""
        return sorted(self._pages.get(request, {}))

    def has(self, request: int, start: int, stop: int) -> bool:
        """Return whether all tokens start to stop - 1 are on the device."""
        size = self.pool.addressing.page_size
        pages = self._pages.get(request, {})
        return all(block in pages for block in range(start // size, -(-stop // size)))
