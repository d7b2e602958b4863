"""Finds out what a model's KV looks like, and whether it can be taken apart, by letting it compute a few tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import (
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
    get_layer_types_and_kwargs,
)

from connectors.layout import BlockLayout
from connectors.layout.tensors import dtype_name
from connectors.transformers.parts import KVPart, ModelParts, StatePart, StateTensor
from connectors.transformers.states import state_tensors
from kvcm.model.errors import InvalidArgumentError

__all__ = ["FULL_PART", "ModelKV", "inspect_model"]

FULL_PART = "tp0"  # one process holds all heads; named as engines name their first rank

_KINDS = frozenset(
    {DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer, LinearAttentionAndFullAttentionLayer}
)
# Long enough that a state that was lost shows, and more than a convolution reaches back.
_PROBE_TOKENS, _PROBE_SPLIT = 24, 16
# A state that is carried on makes rounding errors of some thousandths, one that is not far more than this.
_MOST_DIFFERENCE = 0.25

_Shape = tuple[int | None, int, int, torch.dtype]


@dataclass(frozen=True, slots=True)
class ModelKV:
    """The KV that a model computes.

    Attributes:
        parts: of a stored block.
        states_per_layer: of the model's cache, 0 for layers with attention alone.
    """

    parts: ModelParts
    states_per_layer: tuple[int, ...]


def inspect_model(model: PreTrainedModel, block_tokens: int) -> ModelKV:
    """Return what the model's KV looks like, found by computing a few tokens.

    Args:
        model: a causal language model.
        block_tokens: tokens per block.

    Raises:
        InvalidArgumentError: KV of this kind of model cannot be reused; the message says why.
    """
    _check_kind(model)
    with torch.no_grad():
        layers, logits = _compute(model)
        state = _state_part(layers)
        parts = ModelParts(block_tokens, _kv_parts(layers, block_tokens), state)
        if state is not None:
            _check_state(model, logits)
    return ModelKV(parts, tuple(getattr(layer, "number_of_states", 0) for layer in layers))


def _check_kind(model: PreTrainedModel) -> None:
    if model.config.is_encoder_decoder:
        raise InvalidArgumentError("model is an encoder-decoder, must be a decoder only")
    kinds, _ = get_layer_types_and_kwargs(model.config.get_text_config(decoder=True))
    if "chunked_attention" in kinds:
        raise InvalidArgumentError("model has layers of kind chunked_attention, whose KV is not reused")
    layers = DynamicCache(config=model.config).layers
    unknown = sorted({type(layer).__name__ for layer in layers if type(layer) not in _KINDS})
    if unknown:
        raise InvalidArgumentError(f"model has cache layers of kind {unknown}, whose KV is not reused")
    if all(type(layer) is LinearAttentionLayer for layer in layers):
        raise InvalidArgumentError("model has no layer with attention, must have one: blocks are of its KV")


def _compute(model: PreTrainedModel) -> tuple[list[Any], torch.Tensor]:
    cache = DynamicCache(config=model.config)
    logits = _logits(model, _tokens(model), cache)
    return list(cache.layers), logits


def _tokens(model: PreTrainedModel) -> torch.Tensor:
    vocabulary = int(model.config.get_text_config(decoder=True).vocab_size)
    return (torch.arange(1, _PROBE_TOKENS + 1, device=model.device) * 7919 % vocabulary)[None]


def _logits(model: PreTrainedModel, tokens: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=tokens, past_key_values=cache, use_cache=True).logits
    return logits[0].float()


def _kv_parts(layers: Sequence[Any], block_tokens: int) -> tuple[KVPart, ...]:
    shapes: dict[_Shape, list[int]] = {}
    for index, layer in enumerate(layers):
        if isinstance(layer, DynamicLayer):
            shapes.setdefault(_shape_of(index, layer), []).append(index)
    parts: list[KVPart] = []
    for (window, heads, head_dim, dtype), indices in shapes.items():
        layout = BlockLayout(len(indices), heads, head_dim, block_tokens, dtype_name(dtype))
        devices = tuple(layers[index].keys.device for index in indices)
        name = FULL_PART if window is None else f"window{window}"
        taken = sum(part.window == window for part in parts)
        parts.append(KVPart(f"{name}-{taken}" if taken else name, tuple(indices), layout, dtype, devices, window))
    return tuple(parts)


def _shape_of(index: int, layer: Any) -> _Shape:
    if layer.keys is None:
        raise InvalidArgumentError(f"model: layer {index} of its cache keeps no KV, must keep it")
    keys, values = layer.keys, layer.values
    if keys.shape != values.shape or keys.dtype != values.dtype:
        found = f"K {tuple(keys.shape)} {keys.dtype}, V {tuple(values.shape)} {values.dtype}"
        raise InvalidArgumentError(f"model: layer {index} has {found}, must be of the same shape and type")
    return getattr(layer, "sliding_window", None), keys.shape[1], keys.shape[3], keys.dtype


def _state_part(layers: Sequence[Any]) -> StatePart | None:
    tensors = tuple(
        StateTensor(layer, kind, index, tuple(value.shape[1:]), value.dtype, value.device)
        for layer, kind, index, value in state_tensors(layers)
    )
    return StatePart(tensors) if tensors else None


def _check_state(model: PreTrainedModel, at_once: torch.Tensor) -> None:
    """Check that the model goes on from a state: some compute several tokens as if there were none before them."""
    tokens = _tokens(model)

    def in_two_steps(*, forgetting: bool) -> torch.Tensor:
        cache = DynamicCache(config=model.config)
        _logits(model, tokens[:, :_PROBE_SPLIT], cache)
        for layer in cache.layers:
            if forgetting and isinstance(layer, LinearAttentionLayer):
                LinearAttentionLayer.reset(layer)
        return _logits(model, tokens[:, _PROBE_SPLIT:], cache)

    expected = at_once[_PROBE_SPLIT:]
    difference = (in_two_steps(forgetting=False) - expected).norm()
    worst = (in_two_steps(forgetting=True) - expected).norm()
    if not bool(difference <= _MOST_DIFFERENCE * worst):
        raise InvalidArgumentError(
            f"model: {type(model).__name__} does not go on from the state of its linear attention when several tokens"
            " follow, so its state cannot be reused"
        )
