"""What the tier has to know of a Hugging Face model, and which models it cannot serve."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from gpu_tier.engine.hf_forms import HeadsForm, KVForm, LatentForm
from gpu_tier.errors import ConfigError
from gpu_tier.geometry import KVGeometry, KVKind
from gpu_tier.rows import KVDtype

__all__ = ["AttentionShape"]

_DTYPES = {torch.float32: KVDtype.F32, torch.float16: KVDtype.F16, torch.bfloat16: KVDtype.BF16}
_INDEXED_MODEL = "deepseek_v32"


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What a coordinator has to know of a model.

    Attributes:
        geometry: of its KV.
        num_q_heads: query heads.
        sm_scale: what scores are multiplied by before the softmax.
        has_indexer: whether its layers score tokens themselves, as DeepSeek-V3.2's do.
    """

    geometry: KVGeometry
    num_q_heads: int
    sm_scale: float
    has_indexer: bool = False

    @classmethod
    def of(cls, model: Any, page_size: int, kv_dtype: KVDtype | None = None) -> AttentionShape:
        """Return the shape of a model like Llama or DeepSeek-V3.

        Args:
            model: a causal language model of transformers.
            page_size: tokens of a page.
            kv_dtype: how KV is stored; None means as the model computes.

        Raises:
            ConfigError: the model keeps KV in a way that is not supported.
        """
        config = model.config.get_text_config(decoder=True)
        _check_layers(model, config)
        if kv_dtype is None and model.dtype not in _DTYPES:
            raise ConfigError.choice("model.dtype", model.dtype, _DTYPES)
        kind, heads, head_dim, v_head_dim = _rows(config)
        dtype = kv_dtype or _DTYPES[model.dtype]
        geometry = KVGeometry(kind, config.num_hidden_layers, heads, head_dim, v_head_dim, dtype, page_size)
        has_indexer = config.model_type == _INDEXED_MODEL
        return cls(geometry, config.num_attention_heads, _scaling(model, head_dim), has_indexer)

    @property
    def form(self) -> KVForm:
        """How the model's layers hand their KV over."""
        return LatentForm() if self.geometry.kind is KVKind.MLA else HeadsForm()


def _attention_modules(model: Any) -> Iterator[Any]:
    return (module for module in model.modules() if hasattr(module, "layer_idx") and hasattr(module, "scaling"))


def _check_layers(model: Any, config: Any) -> None:
    known = {"full_attention", "indexed_attention"} if config.model_type == _INDEXED_MODEL else {"full_attention"}
    other = set(getattr(config, "layer_types", None) or ()) - known
    if other:
        raise ConfigError("layer_types", sorted(other), f"every layer must be {' or '.join(sorted(known))}")
    for module in _attention_modules(model):
        if hasattr(module, "kv_lora_rank") and not hasattr(module, "expand_kv"):
            raise ConfigError("kv_lora_rank", module.kv_lora_rank, "such a model must hand its latents to its cache")


def _rows(config: Any) -> tuple[KVKind, int, int, int]:
    """Return the kind of KV, its heads, and the numbers of a key row and of a value row."""
    rank = getattr(config, "kv_lora_rank", None)
    if rank:
        return KVKind.MLA, 1, rank + config.qk_rope_head_dim, rank
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return KVKind.MHA, getattr(config, "num_key_value_heads", None) or heads, head_dim, head_dim


def _scaling(model: Any, head_dim: int) -> float:
    found = {float(module.scaling) for module in _attention_modules(model)}
    if len(found) > 1:
        raise ConfigError("scaling", sorted(found), "must be the same in all layers")
    return found.pop() if found else float(head_dim**-0.5)
