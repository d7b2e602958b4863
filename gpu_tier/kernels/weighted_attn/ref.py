"""Estimated attention in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcm.gpu_tier.kernels.operands import gather_clusters

__all__ = ["run"]


def run(
    q: Tensor, centroids: Tensor, value_sums: Tensor, log_size: Tensor, page_table: Tensor, ids: Tensor,
    lengths: Tensor, sm_scale: float, out_o: Tensor, out_lse: Tensor,
) -> None:  # fmt: skip
    """See `weighted_attn`."""
    # Tables are as wide as the longest request may become: only what some row uses is gathered.
    width = min(max(0, int(lengths.max())), ids.shape[-1]) if lengths.numel() else 0
    listed = ids[..., :width].long()
    counts = (torch.arange(width, device=q.device) < lengths[..., None]) & (listed >= 0)
    listed = listed.clamp_min(0)
    grouped = q.float().unflatten(1, (centroids.shape[1], -1))
    for row, table in enumerate(page_table):
        size = gather_clusters(log_size, table, listed[row])
        valid = counts[row] & (size > -torch.inf) & (table.long()[listed[row] // log_size.shape[2]] >= 0)
        keys, sums = (gather_clusters(pages, table, listed[row]) for pages in (centroids, value_sums))
        dots = torch.einsum("hgd,hnd->hgn", grouped[row], keys) * sm_scale
        dots = dots.masked_fill(~valid[:, None], -torch.inf)
        lse = (
            (dots + size[:, None].nan_to_num(neginf=0.0)).logsumexp(-1)
            if width
            else dots.new_full(dots.shape[:2], -torch.inf)
        )
        weights = (dots - lse.nan_to_num(neginf=0.0)[..., None]).exp()
        out_o[row] = torch.einsum("hgn,hnd->hgd", weights, sums).flatten(0, 1)
        out_lse[row] = lse.flatten()
