"""The last queries of each request, for algorithms in which they vote.

A window is a ring: the query of position p is at place ``p % width``. Positions are taken once, in order: a chunk that
comes again changes nothing, and behind a gap (tokens whose queries nobody saw, as those of an attached prefix) the
window begins anew.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from gpu_tier.types import ForwardBatch

__all__ = ["ObservationWindows"]


@dataclass(slots=True)
class _Window:
    data: Tensor
    seen: dict[int, range] = field(default_factory=dict)  # by layer: positions whose queries were recorded


class ObservationWindows:
    """The last `width` queries of requests in each layer.

    Args:
        num_layers: layers.
        width: queries of a window.
        heads: query heads Hq.
        dims: numbers of a query.
        dtype: how they are kept.
        device: where.
    """

    def __init__(
        self, num_layers: int, width: int, heads: int, dims: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.width = width
        self._shape = (num_layers, width, heads, dims)
        self._dtype, self._device = dtype, device
        self._windows: dict[int, _Window] = {}

    @property
    def window_bytes(self) -> int:
        """Bytes of a request's windows."""
        return torch.Size(self._shape).numel() * self._dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all windows."""
        return sum(window.data.nbytes for window in self._windows.values())

    def open(self, request: int) -> None:
        """Begin to record a request; of one that is recorded nothing happens."""
        if request not in self._windows:
            self._windows[request] = _Window(torch.empty(self._shape, dtype=self._dtype, device=self._device))

    def close(self, request: int) -> None:
        """Forget a request; one that is not known too."""
        self._windows.pop(request, None)

    def record(self, layer: int, batch: ForwardBatch, queries: Tensor) -> None:
        """Take the queries ``[T, Hq, d]`` of a pass over, of the requests that are recorded."""
        token = 0
        for request, length, extend in zip(batch.requests, batch.lengths, batch.extend_lens, strict=True):
            window = self._windows.get(request)
            if window is not None:
                self._record(window, layer, range(length - extend, length), queries[token : token + extend])
            token += extend

    def _record(self, window: _Window, layer: int, positions: range, queries: Tensor) -> None:
        seen = window.seen.get(layer, range(0))
        first = positions.start
        if seen and first <= seen.stop:
            positions = range(max(first, seen.stop), positions.stop)
        if not positions:
            return
        begins = seen.start if seen and positions.start == seen.stop else positions.start
        window.seen[layer] = range(begins, positions.stop)
        taken = positions[-self.width :]
        places = torch.arange(taken.start, taken.stop, device=self._device) % self.width
        window.data[layer, places] = queries[taken.start - first : taken.stop - first].to(self._dtype)

    def last(self, layer: int, request: int) -> tuple[range, Tensor]:
        """Return the positions of the last queries, at most `width`, and the queries ``[m, Hq, d]``."""
        window = self._windows.get(request)
        if window is None or layer not in window.seen:
            return range(0), torch.empty(0, *self._shape[2:], dtype=self._dtype, device=self._device)
        positions = window.seen[layer][-self.width :]
        places = torch.arange(positions.start, positions.stop, device=self._device) % self.width
        return positions, window.data[layer, places]
