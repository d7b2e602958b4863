"""Estimated attention: each cluster counts as its tokens would if all their keys were its centroid.

Of a cluster of s tokens with centroid C and sum of values VS the weight is ``s · exp(q·C·sm_scale)`` and the value
``VS / s``, so ``o = Σ exp(q·C·sm_scale - ℓ) · VS`` with ``ℓ = log Σ s · exp(q·C·sm_scale)``: a partial like any other.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcm.gpu_tier.errors import ConfigError
from kvcm.gpu_tier.kernels import registry
from kvcm.gpu_tier.kernels.operands import check_cluster_pages, check_contiguous, check_last_contiguous

__all__ = ["weighted_attn"]


def weighted_attn(
    q: Tensor, centroids: Tensor, value_sums: Tensor, log_size: Tensor, page_table: Tensor, ids: Tensor,
    lengths: Tensor, sm_scale: float, out_o: Tensor, out_lse: Tensor, *, impl: str = "auto",
) -> None:  # fmt: skip
    """Estimate the attention to clusters.

    Cluster c of row b is place ``c % E`` of page ``page_table[b, c // E]``, E being the clusters of a page.

    Args:
        q: ``[B, Hq, d]``; query head j reads KV head ``j // (Hq / H)`` and its list of clusters.
        centroids: ``bf16 [pages, H, E, d]``.
        value_sums: ``bf16 [pages, H, E, dv]``, finite, those of clusters without tokens too.
        log_size: ``f32 [pages, H, E]``, at least 0, or -inf for clusters without tokens, which are skipped.
        page_table: ``int32 [B, P]`` pages of each row; clusters on negative ones are skipped.
        ids: ``int32 [B, H, N]`` clusters; negative ones are skipped.
        lengths: ``int32 [B, H]`` leading ids that count; 0 for rows that do not select.
        sm_scale: what the dot products are multiplied by.
        out_o: ``f32 [B, Hq, dv]`` becomes the output, 0 where nothing counts.
        out_lse: ``f32 [B, Hq]`` becomes ℓ, -inf where nothing counts.
        impl: implementation, see `registry.get`.

    Raises:
        ConfigError: the shapes or the dtypes do not fit.
    """
    check_cluster_pages(q, centroids, log_size, page_table)
    rows, q_heads, _ = q.shape
    heads, v_dims = centroids.shape[1], value_sums.shape[-1]
    if value_sums.shape[:-1] != log_size.shape or value_sums.dtype is not torch.bfloat16:
        raise ConfigError("value_sums", (value_sums.dtype, *value_sums.shape), f"must be bf16 {tuple(log_size.shape)}")
    if ids.shape[:2] != (rows, heads) or lengths.shape != (rows, heads):
        shapes = (tuple(ids.shape), tuple(lengths.shape))
        raise ConfigError("ids, lengths", shapes, f"must be {(rows, heads)} with N ids, and {(rows, heads)}")
    if out_o.shape != (rows, q_heads, v_dims) or out_lse.shape != (rows, q_heads):
        shapes = (tuple(out_o.shape), tuple(out_lse.shape))
        raise ConfigError("out_o, out_lse", shapes, f"must be {(rows, q_heads, v_dims)} and {(rows, q_heads)}")
    check_contiguous(out_o=out_o, out_lse=out_lse)
    check_last_contiguous(value_sums=value_sums, ids=ids)
    run = registry.get("weighted_attn", q.device, impl)
    run(q, centroids, value_sums, log_size, page_table, ids, lengths, sm_scale, out_o, out_lse)
