"""Cache layers whose memory is allocated once, so that blocks are loaded into it and saved from it without a copy.

`DynamicLayer` concatenates for every token: each step moves the whole KV of the layer, and no address stays valid.
Here a layer is a view of a larger buffer. Positions that are filled never change, which is what lets a thread save them
while generation goes on; when the buffer must grow, the old one lives on as long as a save still refers to it.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicLayer, LinearAttentionAndFullAttentionLayer, LinearAttentionLayer

__all__ = ["HybridLayer", "KVMemory", "PreallocatedLayer", "WindowLayer"]

KVMemory = tuple[torch.Tensor, torch.Tensor]
"""K and V, each `[batch, kv_head, token, head_dim]`."""


class PreallocatedLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """KV of one layer, `[batch, kv_head, token, head_dim]`, in a buffer with room for `capacity_tokens` tokens.

    Args:
        capacity_tokens: room at first; it doubles when it does not suffice.
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
        """Allocate room for states like these."""
        self._use((self._empty(key_states), self._empty(value_states)))

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object) -> KVMemory:
        """Append the states of new tokens and return those of all tokens."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.get_seq_length()
        end = start + key_states.shape[-2]
        self._make_room(start, end)
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
        """Return K and V with all their room."""
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

    def _make_room(self, filled: int, needed: int) -> None:
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
        capacity_tokens: room at first, for the prompt.
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

    def _make_room(self, filled: int, needed: int) -> None:
        if needed - self._first_token <= self._capacity_tokens:
            return
        start = max(self._first_token, filled - self._kept_tokens)
        new_tokens = max(needed - filled, self.sliding_window)
        self._move(start, filled, filled - start + new_tokens)
        self._first_token = start


class HybridLayer(PreallocatedLayer, LinearAttentionAndFullAttentionLayer):  # type: ignore[misc, no-untyped-call]
    """A layer with attention and linear attention side by side: preallocated KV, and a state.

    Args:
        capacity_tokens: room for KV at first.
        states: how many states the layer has.
    """

    is_compileable = False
    is_croppable = False

    def __init__(self, capacity_tokens: int, states: int = 1) -> None:
        PreallocatedLayer.__init__(self, capacity_tokens)
        LinearAttentionLayer.__init__(self, number_of_states=states)

    def lazy_initialization(self, *states: torch.Tensor, **linear: Any) -> None:  # type: ignore[override]
        """Make room for KV like `states`, or for the linear attention's state that is named."""
        if states:
            PreallocatedLayer.lazy_initialization(self, *states)
        else:
            LinearAttentionLayer.lazy_initialization(self, **linear)

    def reset(self) -> None:
        """Forget everything."""
        LinearAttentionLayer.reset(self)
        PreallocatedLayer.reset(self)

    def _empty_twin(self, capacity_tokens: int) -> HybridLayer:
        return HybridLayer(capacity_tokens, self.number_of_states)
