"""The words that rows are copied in: as large as all addresses of the pools allow."""

from __future__ import annotations

import math

from gpu_tier.kernels.row_pool import RowPool

__all__ = ["word_bytes"]


def word_bytes(pools: tuple[RowPool, ...], part: int, most: int) -> int:
    """Return the largest power of two up to `most` that divides every address and size of a part of the pools.

    Args:
        pools: that rows are copied between.
        part: 0 for keys and latents, 1 for values.
        most: a power of two.
    """
    sizes = [most]
    for pool in pools:
        strides = pool.addressing.parts[part]
        sizes += [pool.data.data_ptr(), int(pool.data.storage_offset()), pool.data.numel(), strides.row_bytes]
        sizes += [strides.base + strides.layer * pool.layer, strides.page, strides.token, strides.head]
    return math.gcd(*sizes)
