"""Attention over single tokens, as DeepSeek sparse attention and selection per head need it."""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_tier.backend.adaptor import BackendAdaptor, DenseRows, pad_to, sparse_lengths
from gpu_tier.types import ForwardBatch, LayerKV, ResidencyPlan, Selection, TokenMeta

__all__ = ["TokenAdaptor"]


class TokenAdaptor(BackendAdaptor):
    """Makes `TokenMeta`; for every algorithm: an item of several tokens becomes that many entries.

    Args:
        heads: Hs, heads that select on their own.
    """

    def __init__(self, heads: int) -> None:
        self.heads = heads

    def adapt_for_attn_metadata(
        self, selection: Selection, plan: ResidencyPlan, sparse_mask: Tensor, batch: ForwardBatch, kv: LayerKV,
        dense: DenseRows,
    ) -> TokenMeta:  # fmt: skip
        """See `BackendAdaptor`."""
        if plan.lens is None:
            lengths = sparse_lengths(selection, batch)
            sparse = _tokens_of(plan.device_slot, selection.unit_tokens, lengths)
        else:  # the plan's slots are tokens already
            lengths, sparse = plan.lens, plan.device_slot
        if not dense.longest:
            return TokenMeta(kv, sparse, lengths)
        other = self.dense_metadata(kv, dense)
        width = max(sparse.shape[-1], other.token_table.shape[-1])
        mask = sparse_mask[:, None]
        table = torch.where(mask[..., None], pad_to(sparse, width), pad_to(other.token_table, width))
        return TokenMeta(kv, table, torch.where(mask, lengths, other.lens))

    def dense_metadata(self, kv: LayerKV, dense: DenseRows) -> TokenMeta:
        """See `BackendAdaptor`."""
        table = dense.slots[:, None].expand(-1, self.heads, -1).contiguous()
        lengths = dense.lengths[:, None].expand(-1, self.heads).contiguous()
        return TokenMeta(kv, table, lengths)


def _tokens_of(slots: Tensor, unit: int, lengths: Tensor) -> Tensor:
    if unit == 1:
        return slots
    offsets = torch.arange(unit, device=slots.device, dtype=torch.int32)
    tokens = torch.where(slots[..., None] >= 0, slots[..., None] + offsets, -1).flatten(-2)
    inside = torch.arange(tokens.shape[-1], device=slots.device) < lengths[..., None]
    return torch.where(inside, tokens, -1)
