"""Runs the passes of a Hugging Face causal language model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpu_tier.engine import hf_attention
from gpu_tier.engine.attention_layer import AttentionLayer
from gpu_tier.engine.hooks import EngineHooks
from gpu_tier.engine.model import ModelState
from gpu_tier.engine.pass_runner import last_tokens
from gpu_tier.errors import ConfigError
from gpu_tier.geometry import KVGeometry, KVKind
from gpu_tier.rows import KVDtype
from gpu_tier.types import ForwardBatch

__all__ = ["AttentionShape", "HfRunner"]

_DTYPES = {torch.float32: KVDtype.F32, torch.float16: KVDtype.F16, torch.bfloat16: KVDtype.BF16}


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What a coordinator has to know of a model.

    Attributes:
        geometry: of its KV.
        num_q_heads: query heads.
        sm_scale: what scores are multiplied by before the softmax.
    """

    geometry: KVGeometry
    num_q_heads: int
    sm_scale: float

    @classmethod
    def of(cls, model: Any, page_size: int, kv_dtype: KVDtype | None = None) -> AttentionShape:
        """Return the shape of a model like Llama.

        Args:
            model: a causal language model of transformers.
            page_size: tokens of a page.
            kv_dtype: how KV is stored; None means as the model computes.

        Raises:
            ConfigError: the model keeps KV in a way that is not supported.
        """
        config = model.config.get_text_config(decoder=True)
        if kv_dtype is None and model.dtype not in _DTYPES:
            raise ConfigError.choice("model.dtype", model.dtype, _DTYPES)
        other = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
        if other:
            raise ConfigError("layer_types", sorted(other), "every layer must be full attention")
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        geometry = KVGeometry(
            KVKind.MHA,
            config.num_hidden_layers,
            getattr(config, "num_key_value_heads", None) or heads,
            head_dim,
            head_dim,
            kv_dtype or _DTYPES[model.dtype],
            page_size,
        )
        return cls(geometry, heads, _scaling(model, head_dim))


class HfRunner:
    """Implements `gpu_tier.engine.pass_runner.PassRunner`.

    Args:
        model: a causal language model in evaluation mode, which uses this attention until `close`.
        hooks: of the coordinator.
        sm_scale: what scores are multiplied by before the softmax.
        piece_tokens: most keys of a request that prefill has decoded at a time.
    """

    def __init__(self, model: Any, hooks: EngineHooks, sm_scale: float, piece_tokens: int) -> None:
        if model.training:
            raise ConfigError("model", "in training mode", "must be in evaluation mode; call model.eval()")
        self._model = model
        self._hooks = hooks
        self._sm_scale = sm_scale
        self._attention = AttentionLayer(hooks, sm_scale, piece_tokens)
        self._original = model.config._attn_implementation
        hf_attention.register()
        model.set_attn_implementation(hf_attention.ATTENTION_NAME)

    def close(self) -> None:
        """Give the model its own attention back."""
        self._model.set_attn_implementation(self._original)

    def run(self, batch: ForwardBatch, token_ids: Tensor, states: Sequence[ModelState]) -> Tensor:
        """See `PassRunner`."""
        positions = batch.positions[: len(token_ids)]
        self._hooks.forward_begin(batch)
        with hf_attention.running(self._attention, batch, self._sm_scale) as cache:
            output = self._model(
                input_ids=token_ids[None],
                position_ids=positions[None],
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=last_tokens(batch),
            )
        self._hooks.forward_end(batch)
        logits: Tensor = output.logits[0]
        return logits


def _scaling(model: Any, head_dim: int) -> float:
    layers = (module for module in model.modules() if hasattr(module, "layer_idx") and hasattr(module, "scaling"))
    found = {float(module.scaling) for module in layers}
    if len(found) > 1:
        raise ConfigError("scaling", sorted(found), "must be the same in all layers")
    return found.pop() if found else float(head_dim**-0.5)
