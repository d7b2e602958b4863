"""The cache of one call of generate: a few sequences of one length, the shorter ones padded at their left.

A *column* is a position in the batch, a *token* a position in a sequence; a row's first token is in the column behind
its padding. KV does not depend on padding, so a row's blocks are its tokens' blocks wherever they lie.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers.cache_utils import Cache, LinearAttentionLayer

from connectors.transformers.cache import HybridLayer, KVMemory, PreallocatedLayer, WindowLayer
from connectors.transformers.parts import KVPart, ModelParts
from connectors.transformers.probing import ModelKV

__all__ = ["BatchCache", "BlockMemory", "CallCache", "Row", "RowMemory", "Tainted"]

Tainted = tuple[int, int, int]
"""Index of a row, and first block and end of those that a storage may still write to."""


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence of a batch.

    Attributes:
        index: of the row.
        padding: columns before its first token.
        tokens: of its prompt, without padding.
    """

    index: int
    padding: int
    tokens: Sequence[int]


class BlockMemory(Protocol):
    """Where a row's KV is."""

    def pieces(self, part: str, block: int) -> list[torch.Tensor]:
        """Return K and V of each layer of a part for a block's tokens, without a copy."""


class CallCache(Protocol):
    """The cache of one call of generate.

    Attributes:
        rows: its sequences.
        columns: of their prompts, with padding.
        layers: as transformers uses them.
    """

    rows: Sequence[Row]
    columns: int
    layers: list[Any]

    @property
    def parts(self) -> ModelParts:
        """Of a block."""

    def memory(self, row: Row) -> BlockMemory:
        """Return where a row's KV is now; what is filled of it does not change."""

    def row_cache(self, row: Row, tokens: int) -> Cache:
        """Return a cache of one row, without its padding, whose first tokens are filled.

        It fills this cache's memory. A state is its own: it has none at first.
        """

    def joint_cache(self, columns: int) -> Cache:
        """Return the cache of all rows, whose first columns are filled."""

    def copy(self, tainted: Sequence[Tainted]) -> CallCache:
        """Return the same KV of the prompts in memory that no late write of a storage can reach."""


@dataclass(frozen=True, slots=True)
class RowMemory:
    """Where a row's KV is: views of memory in which positions that are filled never change.

    Attributes:
        block_tokens: tokens per block.
        layers: per name of a part, the first token in the memory, and K and V of each layer of the part, each
            `[kv_head, token, head_dim]`.
    """

    block_tokens: int
    layers: Mapping[str, tuple[int, Sequence[KVMemory]]]

    def pieces(self, part: str, block: int) -> list[torch.Tensor]:
        """See `BlockMemory`."""
        first_token, layers = self.layers[part]
        start = block * self.block_tokens - first_token
        return [tensor.narrow(1, start, self.block_tokens) for pair in layers for tensor in pair]


class BatchCache:
    """Layers for all rows of a call, and views of single rows.

    Args:
        kv: what the model's KV looks like.
        rows: at least one; all end in the same column.
        spare_tokens: room for new tokens; more make the cache grow.

    Attributes:
        layers: as transformers uses them.
    """

    def __init__(self, kv: ModelKV, rows: Sequence[Row], spare_tokens: int) -> None:
        self.rows = rows
        self.columns = rows[0].padding + len(rows[0].tokens)
        self._kv = kv
        self._spare_tokens = spare_tokens
        self.layers: list[Any] = [LinearAttentionLayer(states) for states in kv.states_per_layer]
        for part in kv.parts.kv:
            for layer, device in zip(part.layers, part.devices, strict=True):
                self.layers[layer] = self._attention_layer(part, layer, device)

    @property
    def parts(self) -> ModelParts:
        """Of a block."""
        return self._kv.parts

    def memory(self, row: Row) -> RowMemory:
        """See `CallCache`."""
        return RowMemory(self.parts.block_tokens, {part.name: self._part_memory(part, row) for part in self.parts.kv})

    def row_cache(self, row: Row, tokens: int) -> Cache:
        """See `CallCache`."""
        layers: list[Any] = []
        for layer in self.layers:
            if isinstance(layer, PreallocatedLayer):
                keys, values = (buffer[row.index : row.index + 1, :, row.padding :] for buffer in layer.buffers())
                layers.append(layer.over((keys, values)))
                layers[-1].set_length(tokens)
            else:
                layers.append(LinearAttentionLayer(layer.number_of_states))
        return Cache(layers=layers)

    def joint_cache(self, columns: int) -> Cache:
        """Return the cache of all rows, whose first columns are filled; padding among them is zeroed."""
        for layer in self.layers:
            if isinstance(layer, PreallocatedLayer):
                for row in self.rows:
                    for buffer in layer.buffers():
                        buffer[row.index, :, : min(row.padding, columns)].zero_()
                layer.set_length(columns)
        return Cache(layers=self.layers)

    def copy(self, tainted: Sequence[Tainted] = ()) -> BatchCache:
        """See `CallCache`; nothing of this cache is used again."""
        fresh = BatchCache(self._kv, self.rows, self._spare_tokens)
        for new, old in zip(fresh.layers, self.layers, strict=True):
            if isinstance(new, PreallocatedLayer):
                for target, source in zip(new.buffers(), old.buffers(), strict=True):
                    target.copy_(source)
        return fresh

    def _part_memory(self, part: KVPart, row: Row) -> tuple[int, list[KVMemory]]:
        first_column = int(self.layers[part.layers[0]].first_token)
        start = max(0, row.padding - first_column)
        layers: list[KVMemory] = []
        for index in part.layers:
            keys, values = self.layers[index].buffers()
            layers.append((keys[row.index, :, start:], values[row.index, :, start:]))
        return first_column + start - row.padding, layers

    def _attention_layer(self, part: KVPart, index: int, device: torch.device) -> PreallocatedLayer:
        layer = self._empty_layer(part, index)
        like = torch.empty((len(self.rows), part.layout.kv_heads, 0, part.layout.head_dim), dtype=part.dtype)
        layer.lazy_initialization(like.to(device), like.to(device))
        return layer

    def _empty_layer(self, part: KVPart, index: int) -> PreallocatedLayer:
        if part.window is not None:  # the prompt's KV must be readable until it is saved, what follows need not
            return WindowLayer(self.columns, part.window, part.layout.block_tokens - 1)
        states = self._kv.states_per_layer[index]
        capacity = self.columns + self._spare_tokens
        return HybridLayer(capacity, states) if states else PreallocatedLayer(capacity)
