"""Host pages of requests, and which of their items are backed up there (`host_loc`).

`host_loc` is what residency policies read: an item gets its entry when its host copy is complete and not before, so an
item without one is never a victim (ordering rule O1) and never loaded. There are two ways to know that it is: the host
has seen the copy end (`back_up`), or the compute stream waits for it (`locate`). Only what the host has seen may be
read by the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvcm.gpu_tier.pools.host_pool import HostKVPool
from kvcm.gpu_tier.runtime import upload

__all__ = ["HostTokens"]


class HostTokens:
    """Owners of the host pages.

    Args:
        pool: the host pool.
        max_requests: rows of the tables.
        max_tokens: most tokens of a request.
        unit_tokens: tokens of an item.
        device: where `host_loc` lies.
    """

    def __init__(
        self, pool: HostKVPool, max_requests: int, max_tokens: int, unit_tokens: int, device: torch.device
    ) -> None:
        self.pool = pool
        self.unit = unit_tokens
        items = -(-max_tokens // unit_tokens) + 1
        self.host_loc = torch.full((max_requests, items), -1, dtype=torch.int64, device=device)
        self._pages: dict[int, list[int]] = {}
        self._backed_up: dict[int, int] = {}
        self._located: dict[int, int] = {}  # items of each request that have their entry
        self._filled: dict[int, int] = {}

    def adopt(self, request: int, pages: Sequence[int], n_tokens: int) -> None:
        """Take over host pages whose first `n_tokens` tokens are valid; their references are now ours."""
        self._pages[request] = list(pages)
        self._backed_up[request] = 0
        self._filled[request] = n_tokens // self.pool.addressing.page_size
        self.back_up([request], [n_tokens])

    def cover(self, request: int, n_tokens: int) -> None:
        """Hold pages for so many tokens.

        Raises:
            PoolExhaustedError: there are too few; then nothing changed.
        """
        pages = self._pages.setdefault(request, [])
        missing = -(-n_tokens // self.pool.addressing.page_size) - len(pages)
        if missing > 0:
            pages.extend(self.pool.allocator.alloc(missing))

    def holds(self, request: int) -> bool:
        """Return whether a request has host pages."""
        return bool(self._pages.get(request))

    def pages(self, request: int) -> tuple[int, ...]:
        """Return the host pages of a request, in the order of its blocks."""
        return tuple(self._pages.get(request, ()))

    def slots(self, request: int, start: int, stop: int) -> Tensor:
        """Return the host slot of each token, ``int64 [stop - start]``, on the host."""
        size = self.pool.addressing.page_size
        first = start // size
        tokens = torch.arange(start, stop)
        pages = torch.tensor(self._pages.get(request, [])[first : -(-stop // size)], dtype=torch.int64)
        return pages[tokens // size - first] * size + tokens % size

    def span_slots(self, spans: Sequence[tuple[int, int, int]]) -> Tensor:
        """Return the host slots of the tokens of spans (request, start, stop), one after the other, on the host."""
        return self._item_slots(spans, 1)

    def _item_slots(self, spans: Sequence[tuple[int, int, int]], unit: int) -> Tensor:
        if all(stop - start == 1 for _, start, stop in spans):  # a decode step: tensors of one number are slow
            size = self.pool.addressing.page_size
            tokens = [(self._pages[request], start * unit) for request, start, _ in spans]
            return torch.tensor([pages[token // size] * size + token % size for pages, token in tokens])
        return torch.cat([self.slots(request, start * unit, stop * unit)[::unit] for request, start, stop in spans])

    def backed_up(self, request: int) -> int:
        """Return the leading tokens whose host copy is complete."""
        return self._backed_up.get(request, 0)

    def back_up(self, requests: Sequence[int], totals: Sequence[int]) -> None:
        """Take note that the first `totals[i]` tokens of `requests[i]` are complete on the host."""
        for request, total in zip(requests, totals, strict=True):
            self._backed_up[request] = max(total, self._backed_up.get(request, 0))
            self._mark_filled(request)
        self.locate(requests, totals)

    def locate(self, requests: Sequence[int], totals: Sequence[int]) -> None:
        """Name the host slots of the first `totals[i]` tokens of `requests[i]`: compute comes after their copies."""
        spans = []
        for request, total in zip(requests, totals, strict=True):
            first, last = self._located.get(request, 0), total // self.unit
            if last > first:
                spans.append((request, first, last))
                self._located[request] = last
        if spans:
            rows = torch.tensor([request for request, _, _ in spans])
            counts = torch.tensor([last - first for _, first, last in spans])
            items = torch.cat([torch.arange(first, last) for _, first, last in spans])
            slots = self._item_slots(spans, self.unit)
            where = upload(torch.stack([rows.repeat_interleave(counts), items, slots]), self.host_loc.device)
            self.host_loc[where[0], where[1]] = where[2]

    def _mark_filled(self, request: int) -> None:
        whole = self._backed_up[request] // self.pool.addressing.page_size
        filled = self._filled.get(request, 0)
        self.pool.allocator.filled(self._pages[request][filled:whole])
        self._filled[request] = max(filled, whole)

    def release(self, request: int) -> None:
        """Release everything of a request."""
        self.pool.allocator.free(self._pages.pop(request, []))
        self._filled.pop(request, None)
        self._backed_up.pop(request, None)
        if self._located.pop(request, 0):
            self.host_loc[request] = -1
