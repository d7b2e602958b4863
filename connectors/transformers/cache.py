"""Cache layers whose memory is allocated once, so that blocks are loaded into it and saved from it without a copy.

`DynamicLayer` concatenates for every token: each step moves the whole KV of the layer, and no address stays valid.
Here a layer is a view of a larger buffer. Positions that are filled never change, which is what lets a thread save them
while generation goes on; when the buffer must grow, the old one lives on as long as a save still refers to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers.cache_utils import Cache, DynamicLayer, LinearAttentionAndFullAttentionLayer, LinearAttentionLayer

from kvcm.connectors.transformers.model_kv import KVPart, ModelKV, ModelParts

__all__ = [
    "BatchCache",
    "BlockMemory",
    "CallCache",
    "KVMemory",
    "PreallocatedLayer",
    "Row",
    "RowMemory",
    "UnusableBlocks",
    "WindowLayer",
]

KVMemory = tuple[torch.Tensor, torch.Tensor]
"""K and V, each `[batch, kv_head, token, head_dim]`."""


class PreallocatedLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """KV of one layer, `[batch, kv_head, token, head_dim]`, in a buffer for `capacity_tokens` tokens.

    Args:
        capacity_tokens: of the first buffer; it doubles when it does not suffice.
    """

    def __init__(self, capacity_tokens: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._capacity_tokens = max(1, capacity_tokens)
        self._buffers: KVMemory | None = None

    @property
    def first_token(self) -> int:
        """Position that the buffer begins with."""
        return 0

    def over(self, memory: KVMemory) -> PreallocatedLayer:
        """Return a layer of the same kind, still empty, that fills this memory."""
        layer = self._empty_twin(memory[0].shape[2])
        layer._use(memory)
        return layer

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate a buffer for states like these."""
        self._use((self._empty(key_states), self._empty(value_states)))

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object) -> KVMemory:
        """Append the states of new tokens and return those of all tokens."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.get_seq_length()
        end = start + key_states.shape[-2]
        self._grow_to_fit(start, end)
        first = self.first_token
        for buffer, states in zip(self.buffers(), (key_states, value_states), strict=True):
            buffer[:, :, start - first : end - first].copy_(states)
        self.set_length(end)
        return self._between(self._visible_from(start), end)

    def reset(self) -> None:
        """Forget everything, memory included."""
        self._buffers = None
        super().reset()

    def set_length(self, tokens: int) -> None:
        """Say that the positions before `tokens` are filled, for example because they were loaded."""
        self.keys, self.values = self._between(0, tokens)

    def buffers(self) -> KVMemory:
        """Return the whole buffers of K and V."""
        assert self._buffers is not None  # lazy_initialization comes first
        return self._buffers

    def _use(self, memory: KVMemory) -> None:
        self.dtype, self.device = memory[0].dtype, memory[0].device
        self._buffers = memory
        self.set_length(0)
        self.is_initialized = True

    def _empty_twin(self, capacity_tokens: int) -> PreallocatedLayer:
        return PreallocatedLayer(capacity_tokens)

    def _visible_from(self, start: int) -> int:
        """Return the first position that a token at `start` may see."""
        return 0

    def _between(self, start: int, end: int) -> KVMemory:
        keys, values = self.buffers()
        first = self.first_token
        return keys[:, :, start - first : end - first], values[:, :, start - first : end - first]

    def _grow_to_fit(self, filled: int, needed: int) -> None:
        if needed > self._capacity_tokens:
            self._move(0, filled, max(needed, 2 * self._capacity_tokens))

    def _move(self, start: int, end: int, capacity_tokens: int) -> None:
        """Bring some positions into a new, empty buffer."""
        old = self._between(start, end)
        self._capacity_tokens = capacity_tokens
        self._buffers = (self._empty(old[0]), self._empty(old[1]))
        for target, source in zip(self._buffers, old, strict=True):
            target[:, :, : end - start].copy_(source)

    def _empty(self, states: torch.Tensor) -> torch.Tensor:
        batch, heads, _, head_dim = states.shape
        return torch.empty((batch, heads, self._capacity_tokens, head_dim), dtype=states.dtype, device=states.device)


class WindowLayer(PreallocatedLayer):  # type: ignore[no-untyped-call]
    """KV of a layer whose tokens see `window` tokens, themselves included.

    What the window has left behind stays until the buffer is full. Then the end of it moves to a buffer of its own: as
    much as the next token may see, and as a block that is not complete yet may need to be saved.

    Args:
        capacity_tokens: of the first buffer, for the prompt.
        window: tokens.
        kept_tokens: how many of the last tokens stay readable for saving, whatever the window is.
    """

    is_sliding = True
    is_croppable = False

    def __init__(self, capacity_tokens: int, window: int, kept_tokens: int = 0) -> None:
        super().__init__(capacity_tokens)
        self.sliding_window = window
        self.cumulative_length = 0
        self._kept_tokens = max(window - 1, kept_tokens)
        self._first_token = 0

    @property
    def first_token(self) -> int:
        """Position that the buffer begins with."""
        return self._first_token

    def set_length(self, tokens: int) -> None:
        """Say that the positions before `tokens` are filled, as far as the window reaches back."""
        self.cumulative_length = tokens
        self.keys, self.values = self._between(self._visible_from(tokens), tokens)

    def reset(self) -> None:
        """Forget everything, memory included."""
        self._first_token = 0
        super().reset()

    def get_seq_length(self) -> int:
        """Return how many tokens there were."""
        return self.cumulative_length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many positions the next tokens see, themselves included, and the first of these positions."""
        first = self._visible_from(self.cumulative_length)
        return self.cumulative_length - first + query_length, first

    def get_max_length(self) -> int:
        """Return the window."""
        return self.sliding_window

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse: what the window has left behind may be gone."""
        raise NotImplementedError("a sliding window cannot be cropped")

    def _empty_twin(self, capacity_tokens: int) -> WindowLayer:
        return WindowLayer(capacity_tokens, self.sliding_window, self._kept_tokens)

    def _visible_from(self, start: int) -> int:
        return max(0, start - self.sliding_window + 1)

    def _grow_to_fit(self, filled: int, needed: int) -> None:
        if needed - self._first_token <= self._capacity_tokens:
            return
        start = max(self._first_token, filled - self._kept_tokens)
        new_tokens = max(needed - filled, self.sliding_window)
        self._move(start, filled, filled - start + new_tokens)
        self._first_token = start


class _HybridLayer(PreallocatedLayer, LinearAttentionAndFullAttentionLayer):  # type: ignore[misc, no-untyped-call]
    """A layer with attention and linear attention side by side: preallocated KV, and a state.

    Args:
        capacity_tokens: of the first buffer.
        states: how many states the layer has.
    """

    is_compileable = False
    is_croppable = False

    def __init__(self, capacity_tokens: int, states: int = 1) -> None:
        PreallocatedLayer.__init__(self, capacity_tokens)
        LinearAttentionLayer.__init__(self, number_of_states=states)

    def lazy_initialization(self, *states: torch.Tensor, **linear: Any) -> None:  # type: ignore[override]
        """Allocate buffers for KV like `states`, or for the named state of linear attention."""
        if states:
            PreallocatedLayer.lazy_initialization(self, *states)
        else:
            LinearAttentionLayer.lazy_initialization(self, **linear)

    def reset(self) -> None:
        """Forget everything."""
        LinearAttentionLayer.reset(self)
        PreallocatedLayer.reset(self)

    def _empty_twin(self, capacity_tokens: int) -> _HybridLayer:
        return _HybridLayer(capacity_tokens, self.number_of_states)


# The cache of one call of generate: a few sequences of one length, the shorter ones padded at their left.
#
# A *column* is a position in the batch, a *token* a position in a sequence; a row's first token is in the column
# behind its padding. KV does not depend on padding, so a row's blocks are its tokens' blocks wherever they lie.

UnusableBlocks = tuple[int, int, int]
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
        """Return where a row's KV is now; its filled part does not change."""

    def row_cache(self, row: Row, tokens: int) -> Cache:
        """Return a cache of one row, without its padding, whose first tokens are filled.

        It fills this cache's memory. A state is its own: it has none at first.
        """

    def joint_cache(self, columns: int) -> Cache:
        """Return the cache of all rows, whose first columns are filled."""

    def copy(self, tainted: Sequence[UnusableBlocks]) -> CallCache:
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
        spare_tokens: capacity for new tokens; more make the cache grow.

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

    def copy(self, tainted: Sequence[UnusableBlocks] = ()) -> BatchCache:
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
        return _HybridLayer(capacity, states) if states else PreallocatedLayer(capacity)
