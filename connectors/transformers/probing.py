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
from connectors.transformers.forward import compute
from connectors.transformers.parts import KVPart, ModelParts, StatePart, StateTensor
from connectors.transformers.states import state_tensors
from kvcm.model.errors import InvalidArgumentError

__all__ = ["FULL_PART", "ModelKV", "inspect_model"]

FULL_PART = "tp0"  # one process holds all heads; named as engines name their first rank

_KINDS = frozenset(
    {DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer, LinearAttentionAndFullAttentionLayer}
)
# More than a convolution reaches back; the second step is short, so that a lost state shows.
_PROBE_TOKENS, _PROBE_SPLIT = 24, 16
# Logits of a state that is carried on differ by rounding: by no more than what steps of other lengths make, several
# times over, or than the type can tell. Random models that lost theirs differ by 0.002 and more.
_MOST_TIMES_NOISE = 4.0
_LEAST_DIFFERENCE = 1e-3

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
    try:
        logits = compute(model, _tokens(model), 0, cache, last_only=False)
    except Exception as error:  # models with caches of their own raise all kinds of them
        raise InvalidArgumentError(f"model cannot compute with the cache of transformers: {error!r}") from error
    return list(cache.layers), logits


def _tokens(model: PreTrainedModel) -> list[int]:
    vocabulary = int(model.config.get_text_config(decoder=True).vocab_size)
    return [number * 7919 % vocabulary for number in range(1, _PROBE_TOKENS + 1)]


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
    tokens, steps = _tokens(model), _PROBE_TOKENS - _PROBE_SPLIT
    alone = compute(model, tokens[:steps], 0, DynamicCache(config=model.config), last_only=False)
    noise = _difference(alone, at_once[:steps])
    cache = DynamicCache(config=model.config)
    compute(model, tokens[:_PROBE_SPLIT], 0, cache)
    behind = compute(model, tokens[_PROBE_SPLIT:], _PROBE_SPLIT, cache, last_only=False)
    difference = _difference(behind, at_once[_PROBE_SPLIT:])
    most = max(_MOST_TIMES_NOISE * noise, torch.finfo(model.dtype).eps, _LEAST_DIFFERENCE)
    if not difference <= most:  # also when it is not a number
        raise InvalidArgumentError(
            f"model: {type(model).__name__} does not go on from the state of its linear attention when several tokens"
            f" follow, so its state cannot be reused (its logits differ by {difference:.2g}, rounding by {noise:.2g})"
        )


def _difference(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest relative difference at any token."""
    logits, expected = logits.float(), expected.float()
    return float(((logits - expected).norm(dim=1) / expected.norm(dim=1)).max())
