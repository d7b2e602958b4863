"""Adaptors: turn a selection and its device slots into the metadata that an attention kernel reads.

An adaptor reads `plan.device_slot` and changes nothing: the metadata that it returns is new, so an engine's own
stays as it was. Rows that are not sparse keep their dense table, which is in the same arena: one kernel call serves a
mixed batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from kvcm.gpu_tier.errors import StateError
from kvcm.gpu_tier.types import AttnMetadata, ForwardBatch, LayerKV, PagedMeta, ResidencyPlan, Selection, TokenMeta

__all__ = [
    "BackendAdaptor",
    "DenseRows",
    "EngineMetadata",
    "ExecAdaptor",
    "FlashAdaptor",
    "TokenAdaptor",
    "pad_to",
    "sparse_lengths",
]


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


# The metadata object of an engine whose attention backend reads it in place (FlashAttention's in SGLang and vLLM).


class EngineMetadata:
    """Swaps the fields of an engine's metadata.

    Such an engine has one object per step, with a page table and lengths that all layers read. Its fields are kept at
    the first sparse layer, replaced for each layer, and put back after the last: the engine finds its object as it was.

    Args:
        page_table: name of its field with ``int32 [B, Pmax]`` pages.
        cache_seqlens: name of its field with ``int32 [B]`` tokens.
        cu_seqlens_k: name of its field with ``int32 [B + 1]`` running sums of them.
        max_seqlen_k: name of its field with the largest of them, on the host.
    """

    def __init__(
        self,
        page_table: str = "page_table",
        cache_seqlens: str = "cache_seqlens_int32",
        cu_seqlens_k: str = "cu_seqlens_k",
        max_seqlen_k: str = "max_seq_len_k",
    ) -> None:
        self._names = (page_table, cache_seqlens, cu_seqlens_k, max_seqlen_k)
        self._saved: tuple[Any, ...] | None = None

    def save_original_metadata(self, meta: object) -> None:
        """Keep the engine's fields; a second call before `restore` keeps the first ones."""
        if self._saved is None:
            self._saved = tuple(getattr(meta, name) for name in self._names)

    def apply(self, meta: object, sparse: PagedMeta) -> None:
        """Let the engine's object say what `sparse` says.

        Raises:
            StateError: the engine's fields were not kept, so they would be lost.
        """
        if self._saved is None:
            raise StateError("save_original_metadata was not called before apply")
        lengths = sparse.cache_seqlens
        values = (sparse.page_table, lengths, _running_sums(lengths), sparse.page_table.shape[1] * sparse.page_tokens)
        for name, value in zip(self._names, values, strict=True):
            setattr(meta, name, value)

    def restore(self, meta: object) -> None:
        """Give the engine its fields back, the same objects; without kept ones nothing happens."""
        if self._saved is not None:
            for name, value in zip(self._names, self._saved, strict=True):
                setattr(meta, name, value)
            self._saved = None


def _running_sums(lengths: Tensor) -> Tensor:
    sums = torch.zeros(len(lengths) + 1, dtype=torch.int32, device=lengths.device)
    sums[1:] = lengths.cumsum(0)
    return sums


# The paged form of FlashAttention: one page table for all heads, pages of the scoring size.


class FlashAdaptor(BackendAdaptor):
    """Makes `PagedMeta`; for algorithms that select pages for all heads together.

    Selected pages are ascending, so the last one is the newest and the only one that may be partly filled, which is
    what `cache_seqlens` can express.

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


# Attention over the execution buffer, into which a step's tokens were gathered (RetroInfer and PQCache).


class ExecAdaptor(BackendAdaptor):
    """Makes `TokenMeta` over an execution buffer.

    Rows that are not sparse have no tokens there. They attend to the arena in a call of their own, whose partial is
    merged with this one; a batch without such rows makes no such call.

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


# Attention over single tokens, as DeepSeek sparse attention and selection per head need it.


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
