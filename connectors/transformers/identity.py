"""What a model's KV looks like and which models may share it.

KV may be shared exactly when the same tokens give the same KV: same architecture and configuration, same weights, same
dtype, same stored layout. All of that is registered with the manager, which refuses an engine that differs, and is also
part of every block key.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer

from connectors.layout import BlockLayout
from connectors.layout.tensors import dtype_name
from connectors.transformers.checksum import tensor_checksum
from kvcm.model.errors import InvalidArgumentError
from kvcm.model.instances import ModelDeployment

__all__ = ["ModelKV", "inspect_model", "model_deployment"]

_KEYS_VERSION = "kvcm-chain/2"
# Settings that leave the KV of given tokens as it is. Everything else counts, known or not.
_IRRELEVANT_SETTINGS = frozenset(
    {
        "architectures",
        "bos_token_id",
        "chunk_size_feed_forward",
        "dtype",
        "eos_token_id",
        "id2label",
        "label2id",
        "name_or_path",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "problem_type",
        "return_dict",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)


@dataclass(frozen=True, slots=True)
class ModelKV:
    """The KV that a model computes.

    Attributes:
        layout: of a stored block.
        dtype: of K and V.
        devices: where each layer's KV is.
    """

    layout: BlockLayout
    dtype: torch.dtype
    devices: tuple[torch.device, ...]


def inspect_model(model: PreTrainedModel, block_tokens: int) -> ModelKV:
    """Return what the model's KV looks like, found by computing one token.

    Args:
        model: a causal language model.
        block_tokens: tokens per block.

    Raises:
        InvalidArgumentError: KV of this kind of model cannot be reused yet; the message says why.
    """
    layers = _probe(model)
    shapes = {tuple(tensor.shape) for pair in layers for tensor in pair}
    dtypes = {tensor.dtype for pair in layers for tensor in pair}
    if len(shapes) != 1 or len(dtypes) != 1:
        raise InvalidArgumentError(f"model: K and V have shapes {sorted(shapes)} and types {dtypes}, must all be equal")
    (shape,), (dtype,) = shapes, dtypes
    layout = BlockLayout(len(layers), shape[1], shape[3], block_tokens, dtype_name(dtype))
    return ModelKV(layout, dtype, tuple(keys.device for keys, _ in layers))


def model_deployment(model: PreTrainedModel, layout: BlockLayout, model_name: str | None) -> ModelDeployment:
    """Return the identity to register.

    Args:
        model: whose configuration and weights count.
        layout: of its stored blocks.
        model_name: for people; default is the model's class.
    """
    extra = {
        "config": _config_digest(model),
        "engine": "transformers",
        "keys": _KEYS_VERSION,
        "layout": layout.fingerprint,
        "weights": _weights_digest(model),
    }
    return ModelDeployment(
        model_name=model_name or type(model).__name__,
        dtype=layout.dtype,
        tp_size=1,
        dp_size=1,
        pp_size=1,
        extra=json.dumps(extra, sort_keys=True),
    )


def _probe(model: PreTrainedModel) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return K and V of each layer for one token."""
    if model.config.is_encoder_decoder:
        raise InvalidArgumentError("model is an encoder-decoder, must be a decoder only")
    cache = DynamicCache(config=model.config)
    kinds = {type(layer).__name__ for layer in cache.layers if type(layer) is not DynamicLayer}
    if kinds:
        raise InvalidArgumentError(f"model has cache layers of kind {sorted(kinds)}, must be full attention only")
    with torch.no_grad():
        token = torch.zeros((1, 1), dtype=torch.long, device=model.device)
        cache = model(input_ids=token, past_key_values=cache, use_cache=True).past_key_values
    return [(layer.keys, layer.values) for layer in cache.layers]


def _config_digest(model: PreTrainedModel) -> str:
    settings = {
        name: value
        for name, value in model.config.to_dict().items()
        if name not in _IRRELEVANT_SETTINGS and not name.startswith("_")
    }
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _weights_digest(model: PreTrainedModel) -> str:
    """Hash everything that is saved of the model, every element of it: one may be all that fine-tuning changed."""
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        if isinstance(value, torch.Tensor):
            digest.update(f"{name} {tuple(value.shape)} {value.dtype}\n".encode())
            digest.update(tensor_checksum(value))
        else:  # what a module returns from `get_extra_state`
            digest.update(f"{name} {json.dumps(value, sort_keys=True, default=str)}\n".encode())
    return digest.hexdigest()[:32]
