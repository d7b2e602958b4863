"""How the attention kernel is told what to read.

An adaptor turns items and their device slots into the metadata of a kernel. It reads `plan.device_slot` and changes
nothing: the metadata that it returns is new, so an engine's own stays as it was. Rows that are not sparse keep their
dense table, which is in the same arena; one kernel call serves a mixed batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from gpu_tier.types import AttnMetadata, ForwardBatch, LayerKV, ResidencyPlan, Selection

__all__ = ["BackendAdaptor", "DenseRows", "pad_to", "sparse_lengths"]


@dataclass(frozen=True)
class DenseRows:
    """The dense side of a batch. It is the same in all layers of a pass, so each tensor is made once.

    Attributes:
        batch: the pass.
        table: ``int32 [R, max_tokens]`` device slot of every token of every request.
        longest: tokens of the longest row that is not sparse, 0 when all are sparse.
    """

    batch: ForwardBatch
    table: Tensor
    longest: int
    _pages: dict[int, Tensor] = field(default_factory=dict)

    @cached_property
    def slots(self) -> Tensor:
        """Slot of every token, ``int32 [B, longest]``."""
        return self.table[self.batch.req_pool_indices, : self.longest]

    @cached_property
    def lengths(self) -> Tensor:
        """Tokens of each real row, sparse or not, 0 for padding, ``int32 [B]``."""
        rows = torch.arange(self.batch.rows, device=self.table.device)
        return torch.where(rows < self.batch.num_real_reqs, self.batch.seq_lens, 0)

    def pages(self, page_tokens: int) -> Tensor:
        """Return the page of every `page_tokens`-th token, -1 where it has no slot: ``int32 [B, P]``."""
        if page_tokens not in self._pages:
            self._pages[page_tokens] = self.slots[:, ::page_tokens] // page_tokens
        return self._pages[page_tokens]


class BackendAdaptor(ABC):
    """Builds the metadata of one kind of attention kernel."""

    @abstractmethod
    def adapt_for_attn_metadata(
        self, selection: Selection, plan: ResidencyPlan, sparse_mask: Tensor, batch: ForwardBatch, kv: LayerKV,
        dense: DenseRows,
    ) -> AttnMetadata:  # fmt: skip
        """Return what attention reads.

        Args:
            selection: items of each sparse row, ascending when an item is a page.
            plan: where they are.
            sparse_mask: ``bool [B]``.
            batch: the decode step.
            kv: the layer's rows.
            dense: slots of the rows that are not sparse.
        """

    @abstractmethod
    def dense_metadata(self, kv: LayerKV, dense: DenseRows) -> AttnMetadata:
        """Return the metadata of a batch without sparse rows."""


def sparse_lengths(selection: Selection, batch: ForwardBatch) -> Tensor:
    """Return the tokens of each row's items, ``int32 [B, Hs]``: only the last item may be partly filled."""
    unit = selection.unit_tokens
    if unit == 1:
        return selection.lengths
    last = selection.indices.gather(-1, (selection.lengths[..., None].long() - 1).clamp_min(0))[..., 0]
    tail = (batch.seq_lens[:, None] - last * unit).clamp(max=unit)
    return torch.where(selection.lengths > 0, (selection.lengths - 1) * unit + tail, 0).int()


def pad_to(table: Tensor, width: int) -> Tensor:
    """Return the table with -1 in new last columns."""
    missing = width - table.shape[-1]
    return torch.nn.functional.pad(table, (0, missing), value=-1) if missing > 0 else table
