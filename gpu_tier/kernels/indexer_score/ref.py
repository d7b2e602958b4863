"""Scores of the lightning indexer in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcm.gpu_tier.geometry import KVDtype, RowFormat

__all__ = ["run"]


def run(
    q8: Tensor, weight: Tensor, keys: Tensor, page_table: Tensor, page_tokens: int, lengths: Tensor, out: Tensor
) -> None:
    """See `indexer_score`."""
    key_format = RowFormat(q8.shape[-1], KVDtype.FP8)
    position = torch.arange(out.shape[1], device=q8.device)
    pages = page_table.long()[:, position // page_tokens]
    counts = (pages >= 0) & (position < lengths[:, None])
    slots = (pages * page_tokens + position % page_tokens).masked_fill(~counts, 0)
    for row, slot in enumerate(slots):
        # The keys' positive scales may be applied before the ReLU.
        dots = q8[row].float() @ key_format.decode(keys[slot]).T
        scores = (weight[row].float()[:, None] * dots.relu()).sum(0)
        out[row] = scores.masked_fill(~counts[row], -torch.inf)
