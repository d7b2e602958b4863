"""Identity of a model: models with equal identities and equal weights share KV.

Models may share KV exactly when the same tokens give the same KV: same architecture and configuration, same weights,
same dtype, same stored layout. All of that is part of every block key. All but the weights is registered with the
manager, which rejects an engine that differs; weights may change while an engine runs (`reuse.model_weights`).
"""

from __future__ import annotations

import hashlib
import json

from transformers import PreTrainedModel

from kvcm.connectors.reuse.registration import KvIdentity
from kvcm.connectors.transformers.model_kv import ModelParts

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
    """Return the settings that the KV of given tokens depends on, besides the weights.

    Args:
        model: whose configuration counts.
        parts: of its stored blocks.
        model_name: for people; default is the model's class.
    """
    return KvIdentity(
        model=model_name or type(model).__name__,
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
