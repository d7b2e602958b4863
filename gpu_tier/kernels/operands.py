"""What the kernels ask of the memory of their tensors."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from kvcm.gpu_tier.errors import ConfigError
from kvcm.gpu_tier.geometry import Addressing, Layout

__all__ = [
    "RowPool",
    "check_cluster_pages",
    "check_contiguous",
    "check_last_contiguous",
    "gather_clusters",
    "pool_pages",
    "pool_rows",
    "scratch",
]


def check_contiguous(**tensors: Tensor) -> None:
    """Check outputs, which are written as one piece.

    Raises:
        ConfigError: one of them is not contiguous.
    """
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ConfigError(name, (*tensor.shape, "strides", *tensor.stride()), "must be contiguous")


def check_last_contiguous(**tensors: Tensor) -> None:
    """Check inputs whose last dimension is read with wide loads.

    Raises:
        ConfigError: the last dimension of one of them is not contiguous.
    """
    for name, tensor in tensors.items():
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            strides = (*tensor.shape, "strides", *tensor.stride())
            raise ConfigError(name, strides, "the last dimension must be contiguous")


# A pool of rows as a copy kernel sees one layer of it.


@dataclass(frozen=True, slots=True)
class RowPool:
    """One layer of a pool; the row of slot s and head h is at ``addressing.address(part, s, layer, h)``.

    Attributes:
        data: the pool, flat ``uint8``, on the device or readable by it.
        addressing: where each row lies in it.
        layer: position of the layer in the pool.
    """

    data: Tensor
    addressing: Addressing
    layer: int


# A pool's rows as a strided tensor: what the address function means, for indexing instead of arithmetic.


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


# What the kernels that read the meta index ask of its pages, and how the references read them.


def check_cluster_pages(q: Tensor, centroids: Tensor, log_size: Tensor, page_table: Tensor) -> None:
    """Check queries ``[B, Hq, d]``, centroids ``[pages, H, E, d]``, sizes ``[pages, H, E]`` and pages ``[B, P]``.

    Raises:
        ConfigError: the shapes, the dtypes or the memory do not fit.
    """
    rows, q_heads, dims = q.shape
    if centroids.ndim != 4 or centroids.shape[3] != dims or centroids.dtype is not torch.bfloat16:
        raise ConfigError("centroids", (centroids.dtype, *centroids.shape), f"must be bf16 [pages, H, E, {dims}]")
    if q_heads % centroids.shape[1]:
        raise ConfigError("q", tuple(q.shape), f"query heads must be a multiple of the {centroids.shape[1]} KV heads")
    if log_size.shape != centroids.shape[:3] or log_size.dtype is not torch.float32:
        raise ConfigError("log_size", (log_size.dtype, *log_size.shape), f"must be f32 {tuple(centroids.shape[:3])}")
    if page_table.ndim != 2 or page_table.shape[0] != rows:
        raise ConfigError("page_table", tuple(page_table.shape), f"must be [{rows}, P]")
    check_last_contiguous(q=q, centroids=centroids, log_size=log_size, page_table=page_table)


def gather_clusters(pages: Tensor, table: Tensor, ids: Tensor) -> Tensor:
    """Return what a row's pages have of clusters.

    Args:
        pages: ``[pages, H, E, ...]``.
        table: ``int32 [P]`` pages of the row.
        ids: ``int64 [H, N]`` clusters of each head, none of them negative.

    Returns:
        ``f32 [H, N, ...]``; of a negative page what page 0 has.
    """
    entries = pages.shape[2]
    page = table.long()[ids // entries].clamp_min(0)
    head = torch.arange(len(ids), device=ids.device)[:, None]
    return pages[page, head, ids % entries].float()


# Scratch memory of kernels that need some between two launches.


def scratch(device: torch.device, dtype: torch.dtype, numbers: int) -> Tensor:
    """Return at least so many uninitialised numbers for work on the current stream.

    Two users on one stream share the memory: what one wrote is valid until the next launch of another.
    """
    stream = 0 if device.type == "cpu" else torch.accelerator.current_stream(device).stream_id
    return _allocate(device, dtype, stream, 1 << max(0, numbers - 1).bit_length())


@cache
def _allocate(device: torch.device, dtype: torch.dtype, _stream: int, numbers: int) -> Tensor:
    """Allocate. It is never freed, since a captured CUDA graph may point into it; sizes are powers of two."""
    return torch.empty(numbers, dtype=dtype, device=device)
