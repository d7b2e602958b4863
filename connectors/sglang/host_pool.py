"""The pages of SGLang's host pool as memory, and the order in which their bytes are stored.

A page is stored as one part per rank. Of a pool with K and V of every head ("mha") it is all of K, then all of V; of
one with MLA's latent rows ("mla") there is one tensor only. Inside, by the layout of the pool:

    layer_first, page_first_direct    [layer][token][head][dim]
    page_first                        [token][layer][head][dim]
    page_head                         [head][token][layer][dim]

`layer_first` keeps the layers of a page apart; they are stored one behind the other, so that such an engine and one
with `page_first_direct` read each other's pages. Engines whose orders differ have different `PageFormat.text`s, which
are part of the registration of an instance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcm.model.errors import InvalidArgumentError

__all__ = ["PageFormat", "PageMemory"]

Bytes = npt.NDArray[np.uint8]
_KINDS = {"MHATokenToKVPoolHost": "mha", "MLATokenToKVPoolHost": "mla"}
_ORDERS = {
    "layer_first": "layer.token.head.dim",
    "page_first_direct": "layer.token.head.dim",
    "page_first": "token.layer.head.dim",
    "page_head": "head.token.layer.dim",
}


@dataclass(frozen=True, slots=True)
class PageFormat:
    """How the bytes of a page of one rank are stored.

    Attributes:
        kind: "mha" or "mla".
        order: of the bytes inside each tensor.
        layers: of this rank, absolute: first and the one behind the last.
        tokens: of a page.
        heads: of this rank.
        dim: of a head, or of a latent row.
        dtype: of the elements.
    """

    kind: str
    order: str
    layers: tuple[int, int]
    tokens: int
    heads: int
    dim: int
    dtype: str

    @property
    def text(self) -> str:
        """The same in one line, to compare."""
        first, end = self.layers
        tensors = "k+v" if self.kind == "mha" else "latent"
        sizes = f"layers {first}-{end - 1}, {self.tokens} tokens, {self.heads} heads, dim {self.dim}"
        return f"{tensors} {self.order}, {sizes}, {self.dtype}"


class PageMemory:
    """Finds the memory of pages; safe to use from several threads.

    Args:
        pool: SGLang's host pool of KV.

    Attributes:
        format: how its pages are stored.
        page_bytes: of a page of this rank.

    Raises:
        InvalidArgumentError: pages of this pool cannot be stored; says why.
    """

    def __init__(self, pool: Any) -> None:
        self.format = _format_of(pool)
        self._pool = pool
        # Keeps the memory alive for a storage that is late, whatever becomes of the pool.
        self._bytes = _flat(pool)
        self._base: int = pool.kv_buffer.data_ptr()
        self.page_bytes = sum(piece.nbytes for piece in self.pages(_first_page(pool))[0])

    def pages(self, host_indices: Any) -> list[list[Bytes]]:
        """Return the pieces of memory of every page, in the order in which they are stored.

        Args:
            host_indices: slots of the pages' tokens, page by page, as SGLang gives them.

        Raises:
            InvalidArgumentError: they are no pages of the pool.
        """
        addresses, sizes = self._pool.get_page_buffer_meta(host_indices)
        count = len(host_indices) // self.format.tokens
        if count == 0 or len(addresses) % count or len(addresses) != len(sizes):
            raise InvalidArgumentError(f"{len(host_indices)} slots have {len(addresses)} pieces, must be whole pages")
        per_page = len(addresses) // count
        pieces = [self._piece(address, size) for address, size in zip(addresses, sizes, strict=True)]
        return [self._in_order(pieces[first : first + per_page]) for first in range(0, len(pieces), per_page)]

    def fill(self, page: Sequence[Bytes], stored: Bytes) -> None:
        """Bring the stored bytes of a page into its memory."""
        begin = 0
        for piece in page:
            np.copyto(piece, stored[begin : begin + piece.nbytes])
            begin += piece.nbytes

    def _piece(self, address: int, size: int) -> Bytes:
        begin = address - self._base
        if begin < 0 or begin + size > self._bytes.nbytes:
            raise InvalidArgumentError(f"a piece of {size} bytes at offset {begin} is not in the host pool")
        return self._bytes[begin : begin + size]

    def _in_order(self, pieces: list[Bytes]) -> list[Bytes]:
        if self.format.kind == "mha":  # K and V alternate
            return pieces[0::2] + pieces[1::2]
        return pieces


def _format_of(pool: Any) -> PageFormat:
    name = type(pool).__name__
    if name not in _KINDS:
        raise InvalidArgumentError(f"host pool is {name}, must be one of {', '.join(sorted(_KINDS))}")
    if pool.layout not in _ORDERS:
        raise InvalidArgumentError(
            f"hicache_mem_layout is {pool.layout!r}, must be one of {', '.join(sorted(_ORDERS))}"
        )
    if pool.layer_num != pool.target_layer_num:
        raise InvalidArgumentError("the host pool has layers of a draft model, must have those of the model only")
    kind = _KINDS[name]
    return PageFormat(
        kind=kind,
        order=_ORDERS[pool.layout],
        layers=(pool.start_layer, pool.start_layer + pool.layer_num),
        tokens=pool.page_size,
        heads=pool.head_num if kind == "mha" else 1,
        dim=pool.head_dim if kind == "mha" else pool.kv_cache_dim,
        dtype=str(pool.dtype).removeprefix("torch."),
    )


def _flat(pool: Any) -> Bytes:
    """Return all of the pool's memory as bytes."""
    import torch

    memory = pool.kv_buffer
    if not isinstance(memory, torch.Tensor) or memory.device.type != "cpu" or not memory.is_contiguous():
        raise InvalidArgumentError("the host pool is not one piece of host memory")
    flat: Bytes = memory.reshape(-1).view(torch.uint8).numpy()
    return flat


def _first_page(pool: Any) -> Any:
    import torch

    return torch.arange(pool.page_size)
