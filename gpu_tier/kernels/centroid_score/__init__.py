"""Scores of clusters: the dot products of queries with centroids that lie in pages."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcm.gpu_tier.errors import ConfigError
from kvcm.gpu_tier.kernels import registry
from kvcm.gpu_tier.kernels.operands import check_cluster_pages, check_contiguous, check_last_contiguous

__all__ = ["centroid_score"]


def centroid_score(
    q: Tensor, centroids: Tensor, log_size: Tensor, page_table: Tensor, n_clusters: Tensor, sm_scale: float,
    out: Tensor, *, impl: str = "auto",
) -> None:  # fmt: skip
    """Score the clusters of each row.

    Cluster c of row b is place ``c % E`` of page ``page_table[b, c // E]``, E being the clusters of a page.

    Args:
        q: ``[B, Hq, d]``; query head j reads KV head ``j // (Hq / H)``.
        centroids: ``bf16 [pages, H, E, d]``.
        log_size: ``f32 [pages, H, E]``, -inf for clusters without tokens.
        page_table: ``int32 [B, P]`` pages of each row.
        n_clusters: ``int32 [B]`` clusters of each row; 0 for rows that do not select.
        sm_scale: what the dot products are multiplied by.
        out: ``f32 [B, Hq, M]`` with M ≤ P·E becomes q·C·sm_scale, -inf behind `n_clusters`, for empty clusters and on
            negative pages.
        impl: implementation, see `registry.get`.

    Raises:
        ConfigError: the shapes or the dtypes do not fit.
    """
    check_cluster_pages(q, centroids, log_size, page_table)
    rows, q_heads, _ = q.shape
    most = page_table.shape[1] * log_size.shape[2]
    if n_clusters.shape != (rows,):
        raise ConfigError("n_clusters", tuple(n_clusters.shape), f"must be [{rows}]")
    if out.dtype is not torch.float32 or out.shape[:2] != (rows, q_heads) or out.shape[2] > most:
        raise ConfigError("out", (out.dtype, *out.shape), f"must be f32 {(rows, q_heads)} and at most {most} clusters")
    check_contiguous(n_clusters=n_clusters)
    check_last_contiguous(out=out)
    run = registry.get("centroid_score", q.device, impl)
    run(q, centroids, log_size, page_table, n_clusters, sm_scale, out)
