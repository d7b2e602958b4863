"""Codes of all keys in host memory; on the device are those of the layer that computes and of the next one.

A page holds the codes of `page_tokens` consecutive tokens of a request in one layer, ``uint8 [page_tokens, H, m]``. It
has the same id in host memory, in all layers, and in the two buffers on the device, so that one table serves all:

    host    [layers, pages + 1] pages     complete pages
    tail    [layers, requests + 1]        each request's last page, which is not complete, on the device
    buffers [2, pages + 1]                layer l in buffer l % 2

`codes` of a layer waits for its pages and begins to bring those of the next layer on the `h2d` stream: they arrive
while this layer computes. Rules:

1. What `h2d` overwrites was read by the layer before this one, and what it reads was written by an earlier pass: it
   waits for what the compute stream was given until then, and for nothing else.
2. A decoded token's codes go to the tail. When that is complete the compute stream copies it to the host, before the
   tail is written again and before any later pass brings the page back.
3. `write` changes host memory with the CPU. The caller has read keys of the layer from the device, so that
   nothing of the layer that was issued before is still on its way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcm.gpu_tier.errors import AllocationError
from kvcm.gpu_tier.kernels.dma_copy import dma_copy
from kvcm.gpu_tier.pools.pinned import PinnedMemory
from kvcm.gpu_tier.pools.representation import RepresentationPool
from kvcm.gpu_tier.runtime import DeviceRuntime, Event, upload

__all__ = ["Appending", "CodePages", "CodeWindow"]

_BUFFERS = 2


@dataclass(frozen=True, slots=True, eq=False)
class CodeWindow:
    """The codes that one pass looks at, the same in all layers.

    Attributes:
        first_page: ``int64 [runs]`` on the host, first page of each run of pages that lie one behind the other.
        pages: ``int64 [runs]`` on the host, pages of each run.
        tails: ``int64 [t]`` requests whose last page is looked at, too.
        tail_pages: ``int64 [t]`` ids of these pages.
        num_pages: pages of all runs.
    """

    first_page: Tensor
    pages: Tensor
    tails: Tensor
    tail_pages: Tensor
    num_pages: int


@dataclass(frozen=True, slots=True)
class Appending:
    """Where the codes of a pass's tokens go.

    Attributes:
        rows: ``int64 [B]`` rows of the tail: the request, or the spare row behind the last.
        offsets: ``int64 [B]`` places in the page.
        completed: (request, page) of the pages that are complete then.
    """

    rows: Tensor
    offsets: Tensor
    completed: tuple[tuple[int, int], ...]


@dataclass(slots=True)
class _Held:
    """What a buffer on the device holds."""

    layer: int
    window: CodeWindow
    arrived: Event


class CodePages:
    """Codes of one engine.

    Args:
        num_layers: layers that have codes.
        page_tokens: tokens of a page.
        token_shape: (H, m), codes of a token.
        max_requests: rows R of the per-request tables.
        max_tokens: most tokens of a request.
        total_tokens: most tokens of all requests together.
        runtime: of the device.

    Attributes:
        pool: pages of the two buffers, and their owners.
        tail: ``uint8 [layers, R + 1, page bytes]`` on the device.
        brought_bytes: bytes that were copied to the device for passes so far.

    Raises:
        PoolExhaustedError: the host has too little memory.
    """

    def __init__(
        self, *, num_layers: int, page_tokens: int, token_shape: tuple[int, int], max_requests: int, max_tokens: int,
        total_tokens: int, runtime: DeviceRuntime,
    ) -> None:  # fmt: skip
        self.page_tokens, self.token_shape, self.num_layers = page_tokens, token_shape, num_layers
        self._page_shape = (page_tokens, *token_shape)
        self.page_bytes = page_tokens * token_shape[0] * token_shape[1]
        self._runtime = runtime
        self.pool = RepresentationPool(
            num_layers=_BUFFERS, page_tokens=page_tokens, page_bytes=self.page_bytes, max_requests=max_requests,
            max_tokens=max_tokens, total_tokens=total_tokens, device=runtime.device,
        )  # fmt: skip
        self._stride = (self.pool.num_pages + 1) * self.page_bytes
        self._memory = PinnedMemory(num_layers * self._stride, self.page_bytes, runtime)
        self.tail = torch.zeros(num_layers, max_requests + 1, self.page_bytes, dtype=torch.uint8, device=runtime.device)
        self.brought_bytes = 0
        self._runs: dict[int, list[tuple[int, int]]] = {}
        self._held: list[_Held | None] = [None] * _BUFFERS

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory."""
        return self._memory.nbytes

    def close(self) -> None:
        """Give the host memory back; the device must be done with it. A second call does nothing."""
        self._memory.close()

    def device_bytes_of(self, n_tokens: int) -> int:
        """Return the bytes on the device of a request of so many tokens: its pages, twice, and its tail."""
        return self.pool.bytes_of(n_tokens) + self.num_layers * self.page_bytes

    def host_layer(self, layer: int) -> Tensor:
        """Return the host's pages of a layer, ``uint8 [pages + 1, page_tokens, H, m]``."""
        flat = self._memory.data[layer * self._stride : (layer + 1) * self._stride]
        return flat.view(-1, *self._page_shape)

    def reserve(self, request: int, n_tokens: int) -> None:
        """See `RepresentationPool.reserve`."""
        before = sum(pages for _, pages in self._runs.get(request, ()))
        if self.pool.pages_of(n_tokens) <= before:
            return
        self.pool.reserve(request, n_tokens)
        runs = self._runs.setdefault(request, [])
        for page in self.pool.held(request)[before:]:
            if runs and sum(runs[-1]) == page:
                runs[-1] = (runs[-1][0], runs[-1][1] + 1)
            else:
                runs.append((page, 1))

    def free(self, request: int) -> None:
        """Take a request's pages back; of one that has none nothing happens."""
        self._runs.pop(request, None)
        self.pool.free(request)

    def page(self, request: int, token: int) -> int:
        """Return the id of the page of a token."""
        number = token // self.page_tokens
        for first, pages in self._runs[request]:
            if number < pages:
                return first + number
            number -= pages
        raise AllocationError(f"request {request} has no page of codes for token {token}")

    def _pages(self, request: int, start: int, stop: int) -> Tensor:
        """Return the ids of pages start to stop - 1, ``int64`` on the host."""
        held = self.pool.held(request)
        if not 0 <= start <= stop <= len(held):
            raise AllocationError(f"request {request} holds {len(held)} pages of codes, not {start} to {stop}")
        return torch.tensor(held[start:stop], dtype=torch.int64)

    # Writing.

    def write(self, layer: int, request: int, start: int, codes: Tensor) -> None:
        """Write the codes of tokens from `start` on, ``uint8 [n, H, m]``; waits for the device.

        `start` is the first token of a page, or the first one that has no codes yet.
        """
        stop, size = start + len(codes), self.page_tokens
        first, end = start // size, -(-stop // size)
        ids = self._pages(request, first, end)
        host = self.host_layer(layer)
        tail = self.tail[layer, request].view(self._page_shape)
        if start % size:
            host[ids[0], : start % size] = tail[: start % size].cpu()
        tokens = torch.arange(start, stop)
        host[ids[tokens // size - first], tokens % size] = codes.cpu()
        # Of a complete page, too: a step that is broken off and planned again writes the tail to the host again.
        tail.copy_(upload(host[ids[-1]], tail.device))

    def append(self, layer: int, where: Appending, codes: Tensor) -> None:
        """Write the codes of a decode step, ``uint8 [B, H, m]``; does not wait."""
        tails = self.tail[layer]
        tails.view(-1, *self._page_shape)[where.rows, where.offsets] = codes
        host = self.host_layer(layer)
        for request, page in where.completed:
            host[page].copy_(tails[request].view(self._page_shape), non_blocking=True)

    def adopt(self, request: int, first_page: int, data: Tensor) -> None:
        """Take over the codes of whole pages in all layers, ``uint8 [pages, layers · page bytes]`` in host memory."""
        self._runtime.record("compute").wait()  # a former holder's last pages may be on their way to the host
        ids = self._pages(request, first_page, first_page + len(data))
        by_layer = data.view(len(data), self.num_layers, *self._page_shape).transpose(0, 1)
        for layer, codes in enumerate(by_layer):
            self.host_layer(layer)[ids] = codes

    # Reading.

    def export(self, request: int, start: int, stop: int) -> Tensor:
        """Return the codes of complete pages start to stop - 1, ``uint8 [pages, layers · page bytes]``; waits."""
        self._runtime.record("compute").wait()
        ids = self._pages(request, start, stop)
        layers = [self.host_layer(layer)[ids].flatten(1) for layer in range(self.num_layers)]
        return torch.cat(layers, 1)

    def window(self, rows: Sequence[tuple[int, int, int]]) -> CodeWindow:
        """Return what a pass looks at.

        Args:
            rows: (request, tokens looked at, tokens that have codes) of each row that looks at some.
        """
        runs, tails = [], []
        for request, looked_at, coded in rows:
            needed, complete = self.pool.pages_of(looked_at), coded // self.page_tokens
            left = min(needed, complete)
            for first, pages in self._runs[request]:
                if left > 0:
                    runs.append((first, min(pages, left)))
                left -= pages
            if needed > complete:
                tails.append((request, self.page(request, complete * self.page_tokens)))
        first_page, counts = torch.tensor(runs, dtype=torch.int64).view(-1, 2).unbind(1)
        requests, ids = upload(torch.tensor(tails, dtype=torch.int64).view(-1, 2), self._runtime.device).unbind(1)
        return CodeWindow(
            first_page=first_page,
            pages=counts,
            tails=requests,
            tail_pages=ids,
            num_pages=sum(pages for _, pages in runs),
        )

    def codes(self, layer: int, window: CodeWindow) -> Tensor:
        """Return ``uint8 [pages + 1, page_tokens, H, m]`` with the window's pages of a layer.

        The compute stream waits for them; those of the next layer are on their way then.
        """
        held = self._prefetch(layer, window)
        self._runtime.fence(held.arrived, "compute")
        if layer + 1 < self.num_layers:
            self._prefetch(layer + 1, window)
        return self.pool.layer(layer % _BUFFERS).view(-1, *self._page_shape)

    def _prefetch(self, layer: int, window: CodeWindow) -> _Held:
        held = self._held[layer % _BUFFERS]
        if held is None or held.layer != layer or held.window is not window:
            self._runtime.fence(self._runtime.record("compute"), "h2d")
            with self._runtime.stream("h2d"):
                self._copy(layer, window)
                held = self._held[layer % _BUFFERS] = _Held(layer, window, self._runtime.record("h2d"))
        return held

    def _copy(self, layer: int, window: CodeWindow) -> None:
        target = self.pool.layer(layer % _BUFFERS)
        first = window.first_page * self.page_bytes
        nbytes = window.pages * self.page_bytes
        dma_copy(self._memory.data, target.view(-1), first + layer * self._stride, first, nbytes)
        self.brought_bytes += window.num_pages * self.page_bytes
        self._runtime.used(window.tails, window.tail_pages)
        if len(window.tails):
            target[window.tail_pages] = self.tail[layer, window.tails]
