"""Which models may share KV.

KV may be shared exactly when the same tokens give the same KV: same architecture and configuration, same weights, same
dtype, same stored layout. All of that is registered with the manager, which refuses an engine that differs, and is also
part of every block key.
"""

from __future__ import annotations

import hashlib
import json

import torch
from transformers import PreTrainedModel

from connectors.reuse.identity import KvIdentity
from connectors.transformers.checksum import tensor_checksum
from connectors.transformers.parts import ModelParts

__all__ = ["model_identity"]

_HASHING = "kvcm-chain/2"
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


def model_identity(model: PreTrainedModel, parts: ModelParts, model_name: str | None) -> KvIdentity:
    """Return what the KV of given tokens depends on.

    Args:
        model: whose configuration and weights count.
        parts: of its stored blocks.
        model_name: for people; default is the model's class.
    """
    return KvIdentity(
        model=model_name or type(model).__name__,
        weights=_weights_digest(model),
        engine="transformers",
        dtype=parts.kv[0].layout.dtype,
        hashing=_HASHING,
        formats=parts.formats,
        extra={"config": _config_digest(model)},
    )


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
