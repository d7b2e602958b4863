"""Exact top-k in torch, by a stable sort."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["run"]


def run(scores: Tensor, lengths: Tensor, k: int, out_indices: Tensor, out_lengths: Tensor) -> None:
    """See `topk_select`."""
    width = scores.shape[-1]
    ids = torch.arange(width, device=scores.device)
    lengths = lengths.clamp(0, width)
    candidate = ids < lengths[:, None, None]
    # Candidates come before the rest, so a stable sort keeps their -inf in front of the -inf of the rest.
    ranked = scores.masked_fill(~candidate | scores.isnan(), -torch.inf)
    best = ranked.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    count = lengths.clamp_max(k)[:, None].expand(out_lengths.shape)
    chosen = torch.arange(best.shape[-1], device=scores.device) < count[..., None]
    ordered = best.masked_fill(~chosen, width).sort(-1).values
    out_indices.fill_(-1)
    out_indices[..., : best.shape[-1]] = ordered.masked_fill(ordered == width, -1).int()
    out_lengths.copy_(count)
