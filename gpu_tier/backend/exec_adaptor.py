"""Attention over the execution buffer, into which a step's tokens were gathered (RetroInfer and PQCache).

Rows that are not sparse have no tokens there. They attend to the arena in a call of their own, whose partial is merged
with this one; a batch without such rows makes no such call.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from gpu_tier.backend.adaptor import BackendAdaptor, DenseRows
from gpu_tier.backend.flash_adaptor import FlashAdaptor
from gpu_tier.errors import StateError
from gpu_tier.types import ForwardBatch, LayerKV, PagedMeta, ResidencyPlan, Selection, TokenMeta

__all__ = ["ExecAdaptor"]


class ExecAdaptor(BackendAdaptor):
    """Makes `TokenMeta` over an execution buffer.

    Args:
        kv: rows of the execution buffer.
        table_of: returns the buffer's slots of a batch of so many rows, ``int32 [B, H, S]``.
        page_tokens: tokens of a page of the arena, for batches without sparse rows.
    """

    def __init__(self, kv: LayerKV, table_of: Callable[[int], Tensor], page_tokens: int) -> None:
        self._kv = kv
        self._table_of = table_of
        self._dense = FlashAdaptor(page_tokens)

    def adapt_for_attn_metadata(
        self, selection: Selection, plan: ResidencyPlan, sparse_mask: Tensor, batch: ForwardBatch, kv: LayerKV,
        dense: DenseRows,
    ) -> TokenMeta:  # fmt: skip
        """See `BackendAdaptor`; of the rows that are not sparse nothing is read.

        Raises:
            StateError: the plan has no execution buffer.
        """
        if plan.execution is None:
            raise StateError("the plan does not say how the execution buffer is put together")
        return TokenMeta(self._kv, self._table_of(batch.rows), plan.execution.lens)

    def dense_metadata(self, kv: LayerKV, dense: DenseRows) -> PagedMeta:
        """See `BackendAdaptor`."""
        return self._dense.dense_metadata(kv, dense)
