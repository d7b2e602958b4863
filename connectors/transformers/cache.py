"""A cache whose memory is allocated once, so that blocks are loaded into it and saved from it without a copy.

`DynamicLayer` concatenates for every token: each step moves the whole KV of the layer, and no address stays valid.
Here a layer is a view of a larger buffer. Positions that are filled never change, which is what lets a thread save them
while generation goes on; when the buffer must grow, the old one lives on as long as a save still refers to it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers.cache_utils import Cache, DynamicLayer

__all__ = ["PreallocatedLayer", "cache_layers", "filled_cache"]


class PreallocatedLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """KV of one layer, `[batch, kv_head, token, head_dim]`, in a buffer with room for `capacity_tokens` tokens.

    Args:
        capacity_tokens: room at first; it doubles when it does not suffice.
    """

    def __init__(self, capacity_tokens: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._capacity_tokens = max(1, capacity_tokens)
        self._buffers: tuple[torch.Tensor, torch.Tensor] | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate room for states like these."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self._buffers = (self._empty(key_states), self._empty(value_states))
        self.set_length(0)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the states of new tokens and return those of all tokens."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.get_seq_length()
        end = start + key_states.shape[-2]
        if end > self._capacity_tokens:
            self._grow(start, end)
        keys, values = self._room()
        keys[:, :, start:end].copy_(key_states)
        values[:, :, start:end].copy_(value_states)
        self.set_length(end)
        return keys[:, :, :end], values[:, :, :end]

    def reset(self) -> None:
        """Forget everything, memory included."""
        self._buffers = None
        super().reset()

    def set_length(self, tokens: int) -> None:
        """Say that the first `tokens` positions are filled, for example because they were loaded."""
        keys, values = self._room()
        self.keys, self.values = keys[:, :, :tokens], values[:, :, :tokens]

    def buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of the only sequence with all their room, each `[kv_head, token, head_dim]`."""
        keys, values = self._room()
        return keys[0], values[0]

    def _room(self) -> tuple[torch.Tensor, torch.Tensor]:
        assert self._buffers is not None  # lazy_initialization comes first
        return self._buffers

    def _empty(self, states: torch.Tensor) -> torch.Tensor:
        batch, heads, _, head_dim = states.shape
        return torch.empty((batch, heads, self._capacity_tokens, head_dim), dtype=states.dtype, device=states.device)

    def _grow(self, filled: int, needed: int) -> None:
        self._capacity_tokens = max(needed, 2 * self._capacity_tokens)
        old_keys, old_values = self._room()
        self._buffers = (self._empty(old_keys), self._empty(old_values))
        for new, old in zip(self._buffers, (old_keys, old_values), strict=True):
            new[:, :, :filled].copy_(old[:, :, :filled])


def filled_cache(layers: Sequence[PreallocatedLayer], tokens: int) -> Cache:
    """Return a cache over the layers, whose first `tokens` positions are filled."""
    for layer in layers:
        layer.set_length(tokens)
    return Cache(layers=list(layers))


def cache_layers(
    shape: tuple[int, int], dtype: torch.dtype, devices: Sequence[torch.device], capacity_tokens: int
) -> list[PreallocatedLayer]:
    """Return an empty, allocated layer per device of `devices` for one sequence.

    Args:
        shape: KV heads and head dimension.
        dtype: of K and V.
        devices: where each layer's KV lives.
        capacity_tokens: room at first.
    """
    kv_heads, head_dim = shape
    layers = [PreallocatedLayer(capacity_tokens) for _ in devices]
    for layer, device in zip(layers, devices, strict=True):
        like = torch.empty((1, kv_heads, 0, head_dim), dtype=dtype, device=device)
        layer.lazy_initialization(like, like)
    return layers
