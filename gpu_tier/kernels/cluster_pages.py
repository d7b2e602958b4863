"""What the kernels that read the meta index ask of its pages, and how the references read them."""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_tier.errors import ConfigError
from gpu_tier.kernels.memory import check_last_contiguous

__all__ = ["check_cluster_pages", "gather_clusters"]


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
