"""New centroids in torch: what runs on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcm.gpu_tier.kernels.segment_sum import segment_sum

__all__ = ["run"]


def run(x: Tensor, labels: Tensor, centroids: Tensor, out_sizes: Tensor, *, spherical: bool) -> None:
    """See `kmeans_update`."""
    mean = torch.empty_like(centroids)
    segment_sum(x, labels, mean, impl="reference")
    # Rows without a label are counted in front of the others.
    counts = torch.zeros(len(labels), centroids.shape[1] + 1, dtype=torch.int32, device=x.device)
    counts.scatter_add_(1, labels.long() + 1, torch.ones_like(labels))
    out_sizes.copy_(counts[:, 1:])
    mean /= out_sizes.clamp_min(1)[..., None]
    stays = out_sizes == 0
    if spherical:
        norm = mean.norm(dim=-1, keepdim=True)
        stays |= norm[..., 0] == 0
        mean /= norm
    centroids.copy_(torch.where(stays[..., None], centroids, mean))
