"""Takes the state of linear-attention layers out of a cache, as stored bytes, and puts it back in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers.cache_utils import LinearAttentionLayer

from connectors.transformers.parts import StatePart, StateTensor

__all__ = ["empty_state", "join_states", "pack_state", "state_tensors", "unpack_state"]


def state_tensors(layers: Sequence[Any]) -> list[tuple[int, str, int, torch.Tensor]]:
    """Return layer, kind, index and value of every tensor of state in a cache, each `[batch, ...]`."""
    return [
        (position, kind, index, tensor)
        for position, layer in enumerate(layers)
        if isinstance(layer, LinearAttentionLayer)
        for kind in ("conv_states", "recurrent_states")
        for index, tensor in getattr(layer, kind).items()
        if tensor is not None
    ]


def empty_state(part: StatePart) -> torch.Tensor:
    """Return host memory for a stored state, zeroed: that is the state before the first token."""
    return torch.zeros(part.size_bytes, dtype=torch.uint8)


def pack_state(part: StatePart, layers: Sequence[Any], row: int) -> torch.Tensor:
    """Return a copy of a sequence's state as stored bytes in host memory; zeros where there is none yet."""
    memory = empty_state(part)
    for place, tensor in _places(part, memory):
        value = getattr(layers[tensor.layer], tensor.kind)[tensor.index]
        if value is not None:
            place.copy_(value[row])
    return memory


def unpack_state(part: StatePart, memory: torch.Tensor, layers: Sequence[Any]) -> None:
    """Give the layers of a cache of one sequence the state that was stored."""
    join_states(part, [memory], layers)


def join_states(part: StatePart, memories: Sequence[torch.Tensor], layers: Sequence[Any]) -> None:
    """Give the layers of a cache the stored states of its sequences, in their order."""
    rows = [_places(part, memory) for memory in memories]
    for places in zip(*rows, strict=True):
        tensor = places[0][1]
        value = torch.stack([place for place, _ in places]).to(tensor.device)
        _put(layers[tensor.layer], tensor, value)


def _put(layer: Any, tensor: StateTensor, value: torch.Tensor) -> None:
    layer.lazy_initialization(**{tensor.kind: value, "state_idx": tensor.index})
    getattr(layer, tensor.kind)[tensor.index].copy_(value)
    layer.has_previous_state[tensor.index] = True


def _places(part: StatePart, memory: torch.Tensor) -> Iterator[tuple[torch.Tensor, StateTensor]]:
    for offset, tensor in zip(part.offsets, part.tensors, strict=True):
        place = memory[offset : offset + tensor.size_bytes].view(tensor.dtype).view(tensor.shape)
        yield place, tensor
