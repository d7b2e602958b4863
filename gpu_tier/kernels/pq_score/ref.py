"""Scores of tokens from codes in torch."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["run"]


def run(table: Tensor, codes: Tensor, page_table: Tensor, first: Tensor, lengths: Tensor, out: Tensor) -> None:
    """See `pq_score`."""
    _, page_tokens, heads, _ = codes.shape
    grouped = table.unflatten(1, (heads, -1))
    out.fill_(-torch.inf)
    for row, (begin, end) in enumerate(zip(first.tolist(), lengths.tolist(), strict=True)):
        position = torch.arange(begin, max(begin, min(end, out.shape[2])), device=out.device)
        page = page_table[row].long()[position // page_tokens]
        position, page = position[page >= 0], page[page >= 0]
        code = codes[page, position % page_tokens].long().permute(1, 2, 0)  # [H, m, tokens]
        index = code[:, None].expand(-1, grouped.shape[2], -1, -1)
        out[row, :, position] = grouped[row].gather(3, index).sum(2).flatten(0, 1)
