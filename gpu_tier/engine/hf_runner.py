"""Runs the passes of a Hugging Face causal language model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gpu_tier.engine import hf_attention
from gpu_tier.engine.attention_layer import AttentionLayer
from gpu_tier.engine.hf_indexer import IndexerTaps
from gpu_tier.engine.hf_shape import AttentionShape
from gpu_tier.engine.hooks import EngineHooks
from gpu_tier.engine.model import ModelState
from gpu_tier.engine.pass_runner import last_tokens
from gpu_tier.engine.prefill import PrefillAttention
from gpu_tier.errors import ConfigError, StateError
from gpu_tier.types import ForwardBatch

__all__ = ["HfRunner"]


class HfRunner:
    """Implements `gpu_tier.engine.pass_runner.PassRunner`.

    Args:
        model: a causal language model in evaluation mode, which uses this attention until `close`.
        hooks: of the coordinator.
        shape: of the model.
        prefill: attention of prompts.
    """

    def __init__(self, model: Any, hooks: EngineHooks, shape: AttentionShape, prefill: PrefillAttention) -> None:
        if model.training:
            raise ConfigError("model", "in training mode", "must be in evaluation mode; call model.eval()")
        self._model = model
        self._hooks = hooks
        self._shape = shape
        self._attention = AttentionLayer(hooks, prefill)
        self._original = model.config._attn_implementation
        if self._original == hf_attention.ATTENTION_NAME:
            raise StateError("the model decodes through another coordinator; close that first")
        hf_attention.register()
        model.set_attn_implementation(hf_attention.ATTENTION_NAME)
        self._taps = IndexerTaps(model, hf_attention.note_extra)
        # Indexers want a mask; one that is given with four dimensions is passed on as it is.
        self._mask = torch.zeros(1, 1, 1, 1, device=model.device) if shape.has_indexer else None

    def close(self) -> None:
        """Give the model its own attention back."""
        self._taps.close()
        self._model.set_attn_implementation(self._original)

    def run(self, batch: ForwardBatch, token_ids: Tensor, states: Sequence[ModelState]) -> Tensor:
        """See `PassRunner`.

        Raises:
            StateError: somebody gave the model another attention meanwhile.
        """
        if self._model.config._attn_implementation != hf_attention.ATTENTION_NAME:
            # It would attend to the pass's own tokens alone, and nothing would tell.
            raise StateError(f"the model's attention is now {self._model.config._attn_implementation!r}")
        positions = batch.positions[: len(token_ids)]
        self._hooks.forward_begin(batch)
        with hf_attention.running(self._attention, batch, self._shape) as cache:
            output = self._model(
                input_ids=token_ids[None],
                attention_mask=self._mask,
                position_ids=positions[None],
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=last_tokens(batch),
            )
        self._hooks.forward_end(batch)
        logits: Tensor = output.logits[0]
        return logits
