"""Upper bounds of pages in torch."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["run"]


def run(q: Tensor, bounds: Tensor, page_table: Tensor, n_pages: Tensor, out: Tensor) -> None:
    """See `quest_score`."""
    counts = (page_table >= 0) & (torch.arange(page_table.shape[1], device=q.device) < n_pages[:, None])
    grouped = q.float().unflatten(1, (bounds.shape[1], -1))
    for row, pages in enumerate(page_table.clamp_min(0).long()):
        low, high = bounds[pages].float().unbind(2)
        # max(q·min, q·max) is q·max where q is positive and q·min elsewhere: two products instead of [Hx, P, d].
        score = torch.einsum("hgd,phd->hgp", grouped[row].clamp_min(0), high)
        score += torch.einsum("hgd,phd->hgp", grouped[row].clamp_max(0), low)
        out[row] = score.flatten(0, 1).masked_fill(~counts[row], -torch.inf)
