"""A pool's rows as a strided tensor: what the address function means, for indexing instead of arithmetic."""

from __future__ import annotations

from torch import Tensor

from gpu_tier.geometry import Addressing, Layout

__all__ = ["pool_pages", "pool_rows"]


def pool_pages(addressing: Addressing) -> int:
    """Return how many pages a pool has."""
    part = addressing.parts[0]
    whole = part.layer if addressing.layout is Layout.LAYER_FIRST else addressing.total_bytes
    return whole // part.page


def pool_rows(data: Tensor, addressing: Addressing, part: int, layer: int, num_heads: int) -> Tensor:
    """Return the rows of one part and layer.

    Args:
        data: the pool, flat ``uint8``.
        addressing: of the pool.
        part: 0 for keys and latents, 1 for values.
        layer: position of the layer in the pool.
        num_heads: KV heads of the pool.

    Returns:
        ``uint8 [pages, page_size, heads, row_bytes]``, a view.
    """
    strides = addressing.parts[part]
    return data.as_strided(
        (pool_pages(addressing), addressing.page_size, num_heads, strides.row_bytes),
        (strides.page, strides.token, strides.head, 1),
        data.storage_offset() + strides.base + strides.layer * layer,
    )
