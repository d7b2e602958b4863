"""Decode attention over pages in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcm.gpu_tier.kernels.dense import attend_to_slots
from kvcm.gpu_tier.types import LayerKV

__all__ = ["run"]


def run(
    q: Tensor, kv: LayerKV, page_table: Tensor, cache_seqlens: Tensor, page_tokens: int, sm_scale: float,
    out_o: Tensor, out_lse: Tensor,
) -> None:  # fmt: skip
    """See `decode_attn_paged`."""
    longest = max(0, int(cache_seqlens.max())) if cache_seqlens.numel() else 0
    width = min(-(-longest // page_tokens), page_table.shape[1])
    pages = page_table[:, :width, None]
    offset = torch.arange(page_tokens, device=q.device)
    slots = (pages.long() * page_tokens + offset).masked_fill(pages < 0, -1).flatten(1)
    inside = torch.arange(slots.shape[1], device=q.device) < cache_seqlens[:, None]
    part = attend_to_slots(q, kv, slots.masked_fill(~inside, -1)[:, None], sm_scale)
    out_o.copy_(part.o)
    out_lse.copy_(part.lse)
