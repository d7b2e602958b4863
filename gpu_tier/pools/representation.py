"""Memory of the representations: pages of fixed bytes per layer, and their owners.

A page covers `page_tokens` consecutive tokens of one request in all layers. The kernels that score read a layer's pages
through the table of the requests, so no page is ever copied to be scored. Two properties matter to callers:

1. A page is filled with the pool's fill bytes when a request gets it: nothing of its former holder is left.
2. One page behind the last, the *spare* page, belongs to no request. Padding rows of a CUDA graph write there, so that
   a write needs no branch and no length on the host. Nothing reads it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcm.gpu_tier.errors import AllocationError, ConfigError
from kvcm.gpu_tier.pools.allocator import PagedAllocator
from kvcm.gpu_tier.runtime import upload

__all__ = ["RepresentationPool"]


class RepresentationPool:
    """Pages of representations of one engine.

    Args:
        num_layers: layers that have representations.
        page_tokens: tokens that a page covers.
        page_bytes: bytes of a page in one layer.
        max_requests: rows R of the table.
        max_tokens: most tokens of one request.
        total_tokens: most tokens of all requests together, each request counted in whole pages.
        fill: ``uint8 [page_bytes]``, what a fresh page holds; zeros when left out.
        device: where the pages are.

    Attributes:
        table: ``int32 [R, Pmax]`` pages of each request in the order of its tokens, -1 where it has none.
        allocator: owners of the pages.
    """

    def __init__(
        self, *, num_layers: int, page_tokens: int, page_bytes: int, max_requests: int, max_tokens: int,
        total_tokens: int, device: torch.device, fill: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.num_layers, self.page_tokens, self.page_bytes = num_layers, page_tokens, page_bytes
        self.num_pages = self.pages_of(total_tokens)
        self.fill = torch.zeros(page_bytes, dtype=torch.uint8) if fill is None else fill
        if self.fill.shape != (page_bytes,):
            raise ConfigError("fill", tuple(self.fill.shape), f"must be one page of {page_bytes} bytes")
        self.fill = self.fill.to(device)
        self._data = self.fill.repeat(num_layers, self.num_pages + 1, 1)
        self.table = torch.full((max_requests, self.pages_of(max_tokens)), -1, dtype=torch.int32, device=device)
        self.allocator = PagedAllocator(
            num_pages=self.num_pages, page_size=page_tokens, name="representations", knob="total_tokens"
        )
        self._held: dict[int, list[int]] = {}

    @property
    def spare_page(self) -> int:
        """The page that belongs to no request."""
        return self.num_pages

    @property
    def nbytes(self) -> int:
        """Bytes of all pages, the spare page and the table."""
        return self._data.numel() + self.table.numel() * self.table.element_size()

    def pages_of(self, n_tokens: int) -> int:
        """Return the pages that so many tokens of a request need."""
        return -(-n_tokens // self.page_tokens)

    def bytes_of(self, n_tokens: int) -> int:
        """Return the bytes of the pages that so many tokens of a request need, in all layers."""
        return self.pages_of(n_tokens) * self.num_layers * self.page_bytes

    def held(self, request: int) -> list[int]:
        """Return the pages of a request."""
        return list(self._held.get(request, ()))

    def layer(self, index: int) -> Tensor:
        """Return the pages of the layer at position `index`, ``uint8 [pages + 1, page_bytes]``; the last is spare."""
        return self._data[index]

    def reserve(self, request: int, n_tokens: int) -> None:
        """Give a request the pages that it lacks for `n_tokens` tokens.

        Raises:
            ConfigError: a request cannot have so many tokens.
            PoolExhaustedError: too few pages are free; what the request had stays.
        """
        held = self._held.get(request, [])
        need = self.pages_of(n_tokens)
        if need > self.table.shape[1]:
            most = self.table.shape[1] * self.page_tokens
            raise ConfigError("n_tokens", n_tokens, f"a request has at most {most} tokens (max_tokens)")
        if need <= len(held):
            return
        fresh = self.allocator.alloc(need - len(held))
        self._held[request] = [*held, *fresh]
        ids = upload(torch.tensor(fresh, dtype=torch.int32), self.table.device)
        self.table[request, len(held) : need] = ids
        self._data[:, ids.long()] = self.fill

    def free(self, request: int) -> None:
        """Take a request's pages back; of one that has none nothing happens."""
        pages = self._held.pop(request, [])
        if pages:
            self.allocator.free(pages)
            self.table[request] = -1

    def locate(self, requests: Tensor, positions: Tensor, real: Tensor | None = None) -> Tensor:
        """Return the page of each token.

        Args:
            requests: ``int64 [T]`` rows of the table.
            positions: ``int64 [T]`` tokens of them.
            real: ``bool [T]``; the others are padding.

        Returns:
            ``int64 [T]``, the spare page for padding and for tokens that nothing was reserved for.
        """
        pages = self.table[requests, positions // self.page_tokens].long()
        inside = pages >= 0 if real is None else (pages >= 0) & real
        return torch.where(inside, pages, self.spare_page)

    def export_pages(self, request: int, start: int, stop: int) -> Tensor:
        """Return pages `start` to `stop - 1` of a request, ``uint8 [pages, layers · page_bytes]`` on the host.

        Raises:
            AllocationError: the request does not hold them.
        """
        data = self._data[:, self._range(request, start, stop)]
        return data.transpose(0, 1).reshape(stop - start, self.num_layers * self.page_bytes).cpu()

    def import_pages(self, request: int, start: int, data: Tensor) -> None:
        """Overwrite the request's pages from `start` on with what `export_pages` returned.

        Raises:
            AllocationError: the request does not hold them.
            ConfigError: the data has another shape.
        """
        if data.dtype is not torch.uint8 or data.shape[1:] != (self.num_layers * self.page_bytes,):
            allowed = f"must be uint8 [pages, {self.num_layers * self.page_bytes}]"
            raise ConfigError("data", (data.dtype, *data.shape), allowed)
        pages = self._range(request, start, start + len(data))
        layers = data.to(self._data.device).unflatten(1, (self.num_layers, self.page_bytes))
        self._data[:, pages] = layers.transpose(0, 1)

    def _range(self, request: int, start: int, stop: int) -> Tensor:
        held = self._held.get(request, [])
        if not 0 <= start <= stop <= len(held):
            raise AllocationError(
                f"request {request} holds {len(held)} pages of representations, not {start} to {stop}"
            )
        return upload(torch.tensor(held[start:stop], dtype=torch.int64), self._data.device)
