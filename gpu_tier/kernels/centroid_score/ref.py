"""Scores of clusters in torch."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["run"]


def run(
    q: Tensor, centroids: Tensor, log_size: Tensor, page_table: Tensor, n_clusters: Tensor, sm_scale: float, out: Tensor
) -> None:
    """See `centroid_score`."""
    width, entries = out.shape[2], log_size.shape[2]
    grouped = q.float().unflatten(1, (centroids.shape[1], -1))
    inside = torch.arange(width, device=q.device) < n_clusters[:, None]
    for row, pages in enumerate(page_table[:, : -(-width // entries)].long()):
        found = pages.clamp_min(0)
        exists = (log_size[found] > -torch.inf) & (pages >= 0)[:, None, None]  # [P, H, E]
        score = torch.einsum("hgd,phed->hgpe", grouped[row], centroids[found].float()) * sm_scale
        score = score.masked_fill(~exists.transpose(0, 1)[:, None], -torch.inf).flatten(2)[..., :width]
        out[row] = score.flatten(0, 1).masked_fill(~inside[row], -torch.inf)
