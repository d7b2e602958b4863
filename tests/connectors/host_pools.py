"""Host pools shaped like those of SGLang 0.5.23, for tests in an environment without it.

The classes have the names of the originals, since the connector distinguishes page kinds by class name. Memory is laid
out by plain indexing, and every element differs from all others.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["PAGE", "MHATokenToKVPoolHost", "MLATokenToKVPoolHost", "StrangePoolHost", "slots"]

PAGE = 4
_LAYERS, _PAGES, _HEADS, _DIM = 3, 5, 2, 8
_DIMS = {
    "layer_first": (2, _LAYERS, _PAGES * PAGE, _HEADS, _DIM),
    "page_first": (2, _PAGES * PAGE, _LAYERS, _HEADS, _DIM),
    "page_first_direct": (2, _PAGES, _LAYERS, PAGE, _HEADS, _DIM),
    "page_head": (2, _PAGES, _HEADS, PAGE, _LAYERS, _DIM),
}


class _PoolHost:
    page_size, layer_num, target_layer_num = PAGE, _LAYERS, _LAYERS
    start_layer, head_num, head_dim, dtype = 0, _HEADS, _DIM, torch.float32
    tensors = 2

    def __init__(self, layout: str, fill: int = 0) -> None:
        self.layout = layout
        dims = self._dims()
        count = torch.Size(dims).numel()
        self.kv_buffer = torch.arange(fill, fill + count, dtype=torch.float32).reshape(dims)

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        """Return address and size of every piece, as the originals do."""
        views = [self._views(int(first) // PAGE) for first in indices[::PAGE]]
        pieces = [piece for page in views for piece in page]
        assert all(piece.is_contiguous() for piece in pieces)
        return [piece.data_ptr() for piece in pieces], [piece.nbytes for piece in pieces]

    def _dims(self) -> tuple[int, ...]:
        return _DIMS[self.layout]

    def _views(self, page: int) -> list[torch.Tensor]:
        tokens = slice(page * PAGE, (page + 1) * PAGE)
        if self.layout == "layer_first":
            return [self.kv_buffer[at, layer, tokens] for layer in range(_LAYERS) for at in range(self.tensors)]
        if self.layout == "page_first":
            return [self.kv_buffer[at, tokens] for at in range(self.tensors)]
        return [self.kv_buffer[at, page] for at in range(self.tensors)]


class MHATokenToKVPoolHost(_PoolHost):
    """K and V of every head."""


class MLATokenToKVPoolHost(_PoolHost):
    """One latent row per token and layer."""

    tensors, head_num, kv_cache_dim = 1, 1, _HEADS * _DIM

    def _dims(self) -> tuple[int, ...]:
        return (1, *_DIMS[self.layout][1:])


class StrangePoolHost(_PoolHost):
    """Something else."""


def slots(*pages: int) -> Any:
    """Return the slots of the tokens of some pages."""
    return torch.tensor([page * PAGE + token for page in pages for token in range(PAGE)])
