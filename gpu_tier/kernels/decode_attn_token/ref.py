"""Decode attention over single tokens in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcm.gpu_tier.kernels.dense import attend_to_slots
from kvcm.gpu_tier.types import LayerKV

__all__ = ["run"]


def run(
    q: Tensor, kv: LayerKV, token_table: Tensor, lens: Tensor, sm_scale: float, out_o: Tensor, out_lse: Tensor
) -> None:
    """See `decode_attn_token`."""
    # Tables are as wide as the longest request may become: only what some row uses is gathered.
    width = min(max(0, int(lens.max())), token_table.shape[-1]) if lens.numel() else 0
    inside = torch.arange(width, device=q.device) < lens[..., None]
    slots = token_table[..., :width].masked_fill(~inside, -1)
    part = attend_to_slots(q, kv, slots, sm_scale)
    out_o.copy_(part.o)
    out_lse.copy_(part.lse)
