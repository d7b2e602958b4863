"""The paged form of FlashAttention: one page table for all heads, pages of the scoring size.

Selected pages are ascending, so the last one is the newest and the only one that may be partly filled, which is what
`cache_seqlens` can express.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_tier.backend.adaptor import BackendAdaptor, DenseRows, pad_to, sparse_lengths
from gpu_tier.types import ForwardBatch, LayerKV, PagedMeta, ResidencyPlan, Selection

__all__ = ["FlashAdaptor"]


class FlashAdaptor(BackendAdaptor):
    """Makes `PagedMeta`; for algorithms that select pages for all heads together.

    Args:
        page_tokens: tokens of a page of the tables.
    """

    def __init__(self, page_tokens: int) -> None:
        self.page_tokens = page_tokens

    def adapt_for_attn_metadata(
        self, selection: Selection, plan: ResidencyPlan, sparse_mask: Tensor, batch: ForwardBatch, kv: LayerKV,
        dense: DenseRows,
    ) -> PagedMeta:  # fmt: skip
        """See `BackendAdaptor`."""
        sparse = plan.device_slot[:, 0] // self.page_tokens  # rounds down, so that -1 stays -1
        lengths = sparse_lengths(selection, batch)[:, 0]
        if not dense.longest:
            return PagedMeta(kv, sparse, lengths, self.page_tokens)
        other = self.dense_metadata(kv, dense)
        width = max(sparse.shape[1], other.page_table.shape[1])
        table = torch.where(sparse_mask[:, None], pad_to(sparse, width), pad_to(other.page_table, width))
        return PagedMeta(kv, table, torch.where(sparse_mask, lengths, other.cache_seqlens), self.page_tokens)

    def dense_metadata(self, kv: LayerKV, dense: DenseRows) -> PagedMeta:
        """See `BackendAdaptor`."""
        return PagedMeta(kv, dense.pages(self.page_tokens), dense.lengths, self.page_tokens)
