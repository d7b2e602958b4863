"""The cache of one call of generate in blocks of a pool: a table of blocks per row, freed and used again.

Attention of transformers wants the KV of a sequence in one piece, so every step gathers the rows' blocks, which copies
twice what `DynamicLayer` copies when it appends. What stays is the pool's memory and no more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from connectors.transformers.batch import BatchCache, Row, Tainted
from connectors.transformers.block_pool import BlockPool
from connectors.transformers.cache import KVMemory
from connectors.transformers.parts import ModelParts
from connectors.transformers.probing import ModelKV
from kvcm.model.keys import BlockKey

__all__ = ["PagedBatch", "PagedLayer", "PagedMemory", "Table"]


@dataclass(frozen=True, slots=True)
class Table:
    """The blocks of one row.

    Attributes:
        blocks: of the pool, in the order of its tokens.
        padding: columns before its first token.
    """

    blocks: Sequence[int]
    padding: int = 0


@dataclass(frozen=True, slots=True)
class PagedMemory:
    """Where a row's KV is: blocks of the pool.

    Attributes:
        parts: of a block.
        pool: of blocks.
        blocks: of the row.
    """

    parts: ModelParts
    pool: BlockPool
    blocks: Sequence[int]

    def pieces(self, part: str, block: int) -> list[torch.Tensor]:
        """See `BlockMemory`."""
        layers = next(kv.layers for kv in self.parts.kv if kv.name == part)
        return [tensor[self.blocks[block]] for layer in layers for tensor in self.pool.memory[layer]]


class PagedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """KV of one layer in blocks of a pool. Padding has none: its KV reads as zeros, and nobody looks at it.

    Args:
        memory: K and V of the pool's layer, each `[block, kv_head, token, head_dim]`.
        tables: of the rows; with room for all tokens to come.
        columns: that are filled.
    """

    is_sliding = False

    def __init__(self, memory: KVMemory, tables: Sequence[Table], columns: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memory = memory
        self._tables = tables
        self._columns = columns
        self.dtype, self.device = memory[0].dtype, memory[0].device
        self._blocks = [torch.tensor(table.blocks, dtype=torch.long, device=self.device) for table in tables]
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the pool is there."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object) -> KVMemory:
        """Append the states of new tokens and return those of all tokens."""
        start, end = self._columns, self._columns + key_states.shape[-2]
        for row, table in enumerate(self._tables):
            first = max(start, table.padding)
            if first < end:
                tokens = torch.arange(first - table.padding, end - table.padding, device=self.device)
                for pool, states in zip(self._memory, (key_states, value_states), strict=True):
                    self._write(pool, self._blocks[row], tokens, states[row, :, first - start :])
        self._columns = end
        return self._gathered(self._memory[0]), self._gathered(self._memory[1])

    def set_length(self, columns: int) -> None:
        """Say that the columns before `columns` are filled, for example because they were loaded."""
        self._columns = columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many columns the next tokens see, themselves included, and the first of these columns."""
        return self._columns + query_length, 0

    def get_seq_length(self) -> int:
        """Return how many columns are filled."""
        return self._columns

    def get_max_length(self) -> int:
        """Return that there is no limit."""
        return -1

    def reset(self) -> None:
        """Forget everything."""
        self._columns = 0

    @staticmethod
    def _write(pool: torch.Tensor, blocks: torch.Tensor, tokens: torch.Tensor, states: torch.Tensor) -> None:
        size = pool.shape[2]
        pool[blocks[tokens // size], :, tokens % size] = states.transpose(0, 1)

    def _gathered(self, pool: torch.Tensor) -> torch.Tensor:
        _, heads, size, head_dim = pool.shape
        counts = [max(0, -(-(self._columns - table.padding) // size)) for table in self._tables]
        room = max(table.padding + count * size for table, count in zip(self._tables, counts, strict=True))
        gathered = pool.new_empty((len(self._tables), heads, room, head_dim))
        for row, (table, count) in enumerate(zip(self._tables, counts, strict=True)):
            gathered[row, :, : table.padding].zero_()
            tokens = gathered[row, :, table.padding : table.padding + count * size]
            tokens.view(heads, count, size, head_dim).copy_(
                pool.index_select(0, self._blocks[row][:count]).transpose(0, 1)
            )
        return gathered[:, :, : self._columns]


class PagedBatch:
    """Blocks for all rows of a call. `close` gives them back.

    Args:
        kv: what the model's KV looks like.
        pool: of blocks.
        rows: at least one; all end in the same column.
        tables: of the rows, with room for all tokens to come; held by this batch from now on.

    Attributes:
        layers: as transformers uses them.
    """

    def __init__(self, kv: ModelKV, pool: BlockPool, rows: Sequence[Row], tables: Sequence[Sequence[int]]) -> None:
        self.rows = rows
        self.columns = rows[0].padding + len(rows[0].tokens)
        self._kv = kv
        self._pool = pool
        self._held = [list(table) for table in tables]
        self._tables = [Table(tuple(table), row.padding) for row, table in zip(rows, tables, strict=True)]
        self.layers: list[Any] = self._layers(self._tables)

    @classmethod
    def open(
        cls, kv: ModelKV, pool: BlockPool, rows: Sequence[Row], local: Sequence[Sequence[int]], new_tokens: int
    ) -> PagedBatch | None:
        """Return a batch whose first blocks are in the pool already; None when the pool has no room for the others.

        Args:
            kv: what the model's KV looks like.
            pool: of blocks.
            rows: at least one.
            local: the first blocks of each row, found in the pool: given back when there is no room.
            new_tokens: most tokens that are generated.
        """
        size = kv.parts.block_tokens
        missing = [
            -(-(len(row.tokens) + new_tokens) // size) - len(blocks) for row, blocks in zip(rows, local, strict=True)
        ]
        taken = pool.take(sum(missing))
        if taken is None:
            for blocks in local:
                pool.give_back(blocks)
            return None
        tables = []
        for blocks, count in zip(local, missing, strict=True):
            tables.append([*blocks, *taken[:count]])
            del taken[:count]
        return cls(kv, pool, rows, tables)

    @property
    def parts(self) -> ModelParts:
        """Of a block."""
        return self._kv.parts

    def memory(self, row: Row) -> PagedMemory:
        """See `CallCache`."""
        return PagedMemory(self.parts, self._pool, self._tables[row.index].blocks)

    def row_cache(self, row: Row, tokens: int) -> Cache:
        """See `CallCache`."""
        return Cache(layers=self._layers([Table(self._tables[row.index].blocks)], tokens))

    def joint_cache(self, columns: int) -> Cache:
        """See `CallCache`."""
        for layer in self.layers:
            layer.set_length(columns)
        return Cache(layers=self.layers)

    def copy(self, tainted: Sequence[Tainted]) -> BatchCache:
        """See `CallCache`; the tainted blocks never come back to the pool."""
        copy = BatchCache(self._kv, self.rows, 0)
        for row in self.rows:
            blocks = len(row.tokens) // self.parts.block_tokens
            mine, theirs = self.memory(row), copy.memory(row)
            for part in self.parts.kv:
                for block in range(blocks):
                    pieces = zip(mine.pieces(part.name, block), theirs.pieces(part.name, block), strict=True)
                    for source, target in pieces:
                        target.copy_(source)
        for row_index, first, end in tainted:
            lost = set(self._tables[row_index].blocks[first:end])
            self._held[row_index] = [block for block in self._held[row_index] if block not in lost]
        return copy

    def keep(self, row: Row, keys: Sequence[BlockKey]) -> None:
        """Say what the first blocks of a row contain, for the next calls."""
        self._pool.keep(keys, self._tables[row.index].blocks[: len(keys)])

    def close(self) -> None:
        """Give the blocks back; nobody may read or write them through this batch any more."""
        for blocks in self._held:
            self._pool.give_back(blocks)
        self._held = []

    def _layers(self, tables: Sequence[Table], columns: int = 0) -> list[Any]:
        return [PagedLayer(memory, tables, columns) for _, memory in sorted(self._pool.memory.items())]
