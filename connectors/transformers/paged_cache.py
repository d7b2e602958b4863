"""KV blocks of one process, in memory of a fixed size: used by sequences, and cached afterwards until reused.

Each block holds the KV of `block_tokens` tokens of one sequence, in all layers. Invariants:

1. A block is free, held by one or more sequences, or idle: without a holder, and with its content cached under its key.
2. A block with a key is full and never changes; a block without one is held by one sequence.
3. `acquire` returns free blocks first, then the least recently used idle ones.
4. A block that a storage may still write to is never released.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from kvcm.connectors.transformers.cache import BatchCache, KVMemory, Row, UnusableBlocks
from kvcm.connectors.transformers.model_kv import ModelKV, ModelParts
from kvcm.model.errors import InvalidArgumentError
from kvcm.model.keys import BlockKey

__all__ = ["BlockPool", "BlockTable", "PagedBatch", "PagedLayer", "PagedMemory"]


class BlockPool:
    """Memory for blocks of a model with full attention in all layers; safe to use from several threads.

    Args:
        parts: of a block.
        blocks: how many there are, > 0.

    Attributes:
        memory: K and V of each layer, by its index, each `[block, kv_head, token, head_dim]`.

    Raises:
        InvalidArgumentError: the model has other layers.
    """

    def __init__(self, parts: ModelParts, blocks: int) -> None:
        if blocks <= 0:
            raise InvalidArgumentError(f"pool_blocks is {blocks}, must be > 0")
        if parts.state is not None or any(part.window is not None for part in parts.kv):
            raise InvalidArgumentError("pool_blocks is given, must be 0 for a model with windows or states")
        self.blocks = blocks
        self.memory: dict[int, KVMemory] = {}
        for part in parts.kv:
            shape = (blocks, *part.layout.piece_shape)
            for layer, device in zip(part.layers, part.devices, strict=True):
                keys, values = (torch.empty(shape, dtype=part.dtype, device=device) for _ in range(2))
                self.memory[layer] = keys, values
        self._lock = threading.Lock()
        self._holders = [0] * blocks
        self._free = list(reversed(range(blocks)))
        self._block_of: dict[BlockKey, int] = {}
        self._key_of: dict[int, BlockKey] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Blocks that can be taken."""
        with self._lock:
            return len(self._free) + len(self._idle)

    def acquire(self, count: int) -> list[int] | None:
        """Return unused blocks; None when there are not as many."""
        with self._lock:
            if count > len(self._free) + len(self._idle):
                return None
            taken = [self._free.pop() if self._free else self._evict_idle() for _ in range(count)]
            for block in taken:
                self._holders[block] = 1
            return taken

    def find(self, keys: Sequence[BlockKey]) -> list[int]:
        """Lend the blocks that hold the longest prefix of these keys."""
        with self._lock:
            found: list[int] = []
            for key in keys:
                block = self._block_of.get(key)
                if block is None:
                    break
                self._holders[block] += 1
                self._idle.pop(block, None)
                found.append(block)
            return found

    def keep(self, keys: Sequence[BlockKey], blocks: Sequence[int]) -> None:
        """Assign keys to held blocks by their content; a known key keeps its block."""
        with self._lock:
            for key, block in zip(keys, blocks, strict=True):
                assert self._holders[block]
                if key not in self._block_of and block not in self._key_of:
                    self._block_of[key], self._key_of[block] = block, key

    def release(self, blocks: Sequence[int]) -> None:
        """Take the blocks of a sequence back; the end of a prefix is forgotten before its beginning."""
        with self._lock:
            for block in reversed(blocks):
                self._holders[block] -= 1
                assert self._holders[block] >= 0
                if self._holders[block]:
                    continue
                if block in self._key_of:
                    self._idle[block] = None
                else:
                    self._free.append(block)

    def _evict_idle(self) -> int:
        block, _ = self._idle.popitem(last=False)
        del self._block_of[self._key_of.pop(block)]
        return block


# ---- the cache of one call of generate in blocks of a pool: a table of blocks per row ----
#
# Attention of transformers wants the KV of a sequence in one piece, so every step gathers the rows' blocks, which
# copies twice what `DynamicLayer` copies when it appends. Only the pool's memory stays allocated.


@dataclass(frozen=True, slots=True)
class BlockTable:
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
    """KV of one layer in blocks of a pool. Padding has none: its KV reads as zeros, which attention masks.

    Args:
        memory: K and V of the pool's layer, each `[block, kv_head, token, head_dim]`.
        tables: of the rows; with blocks for all new tokens.
        columns: that are filled.
    """

    is_sliding = False

    def __init__(self, memory: KVMemory, tables: Sequence[BlockTable], columns: int = 0) -> None:
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
        columns = max(table.padding + count * size for table, count in zip(self._tables, counts, strict=True))
        gathered = pool.new_empty((len(self._tables), heads, columns, head_dim))
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
        kv: format of the model's KV.
        pool: of blocks.
        rows: at least one; all end in the same column.
        tables: of the rows, with blocks for all new tokens; held by this batch from now on.

    Attributes:
        layers: as transformers uses them.
    """

    def __init__(self, kv: ModelKV, pool: BlockPool, rows: Sequence[Row], tables: Sequence[Sequence[int]]) -> None:
        self.rows = rows
        self.columns = rows[0].padding + len(rows[0].tokens)
        self._kv = kv
        self._pool = pool
        self._held = [list(table) for table in tables]
        self._tables = [BlockTable(tuple(table), row.padding) for row, table in zip(rows, tables, strict=True)]
        self.layers: list[Any] = self._layers(self._tables)

    @classmethod
    def open(
        cls, kv: ModelKV, pool: BlockPool, rows: Sequence[Row], local: Sequence[Sequence[int]], new_tokens: int
    ) -> PagedBatch | None:
        """Return a batch whose first blocks are in the pool already; None when the pool has too few for the others.

        Args:
            kv: format of the model's KV.
            pool: of blocks.
            rows: at least one.
            local: the first blocks of each row, found in the pool: released when it has too few.
            new_tokens: most tokens that are generated.
        """
        size = kv.parts.block_tokens
        missing = [
            -(-(len(row.tokens) + new_tokens) // size) - len(blocks) for row, blocks in zip(rows, local, strict=True)
        ]
        taken = pool.acquire(sum(missing))
        if taken is None:
            for blocks in local:
                pool.release(blocks)
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
        return Cache(layers=self._layers([BlockTable(self._tables[row.index].blocks)], tokens))

    def joint_cache(self, columns: int) -> Cache:
        """See `CallCache`."""
        for layer in self.layers:
            layer.set_length(columns)
        return Cache(layers=self.layers)

    def copy(self, tainted: Sequence[UnusableBlocks]) -> BatchCache:
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
        """Assign keys to the first blocks of a row, for the next calls."""
        self._pool.keep(keys, self._tables[row.index].blocks[: len(keys)])

    def close(self) -> None:
        """Release the blocks; this batch must not be used any more."""
        for blocks in self._held:
            self._pool.release(blocks)
        self._held = []

    def _layers(self, tables: Sequence[BlockTable], columns: int = 0) -> list[Any]:
        return [PagedLayer(memory, tables, columns) for _, memory in sorted(self._pool.memory.items())]
