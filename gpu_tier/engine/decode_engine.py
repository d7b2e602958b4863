"""The engine of the models here: the attention layers' driver under continuous batching."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvcm.gpu_tier.engine.batch_engine import BatchEngine
from kvcm.gpu_tier.engine.interfaces import DecoderModel, EngineHooks, ModelState, last_tokens
from kvcm.gpu_tier.engine.layer_attention import AttentionLayer, BlockSparse, PrefillAttention
from kvcm.gpu_tier.errors import StateError
from kvcm.gpu_tier.types import ForwardBatch

__all__ = ["DecodeEngine", "LayerDriver"]

# Runs the layers of a `DecoderModel` through the hooks.


class LayerDriver:
    """Implements `kvcm.gpu_tier.engine.interfaces.PassRunner`.

    Args:
        model: whose attention the coordinator computes.
        hooks: of the coordinator.
        piece_tokens: most keys of a request that prefill has decoded at a time.
        prefill: kernel of prefill attention: exact, flash or `BlockSparse`.
        layers: ids of the layers that are computed here, of a pipeline stage; None for all. The stage's model takes the
            hidden states of the stage before in `embed` and hands its own on.
    """

    def __init__(
        self,
        model: DecoderModel,
        hooks: EngineHooks,
        piece_tokens: int,
        prefill: str | BlockSparse = "exact",
        layers: range | None = None,
    ) -> None:
        self._model = model
        self._layers = range(model.num_layers) if layers is None else layers
        self._hooks = hooks
        self._attention = AttentionLayer(
            hooks, PrefillAttention(hooks.key_reader, model.sm_scale, piece_tokens, prefill)
        )

    def run(self, batch: ForwardBatch, token_ids: Tensor, states: Sequence[ModelState]) -> Tensor:
        """See `PassRunner`.

        Raises:
            StateError: a request began with KV that was attached, but the model keeps more of its tokens than that.
        """
        fresh = [not state for state in states]
        positions = batch.positions[: len(token_ids)]
        self._hooks.forward_begin(batch)
        hidden = self._model.embed(token_ids, positions)
        for layer_id in self._layers:
            inputs = self._model.attention_inputs(layer_id, hidden, positions, states, batch.extend_lens)
            self._attention.write(layer_id, batch, inputs.k, inputs.v)
            attention = self._attention.run(
                q=inputs.q, k=inputs.k, v=inputs.v, layer_id=layer_id, batch=batch, extra=inputs.extra
            )
            hidden = self._model.attention_output(layer_id, hidden, attention)
        for request, was_fresh, state, start in zip(batch.requests, fresh, states, _starts(batch), strict=True):
            if was_fresh and state and start:
                raise StateError(f"request {request} begins at token {start}, and its model has no state from before")
        self._hooks.forward_end(batch)
        return self._model.logits(hidden[last_tokens(batch)])


def _starts(batch: ForwardBatch) -> list[int]:
    return [length - extend for length, extend in zip(batch.lengths, batch.extend_lens, strict=True)]


class DecodeEngine(BatchEngine):
    """Decodes with a `DecoderModel` through a coordinator.

    Args:
        model: computes everything but attention.
        coordinator: computes attention.
        device: of the model.
        chunk_tokens: most prompt tokens of a step.
        piece_tokens: most keys of a request that prefill has decoded at a time.
        prefill: kernel of prefill attention: exact, flash or `BlockSparse`; see `kvcm.gpu_tier.engine.layer_attention`.
        pad_to: rows of a decode pass at least.
        layers: ids of the layers that are computed here, see `LayerDriver`.
    """

    def __init__(
        self,
        model: DecoderModel,
        coordinator: EngineHooks,
        *,
        device: torch.device | str = "cpu",
        chunk_tokens: int = 8192,
        piece_tokens: int = 8192,
        prefill: str | BlockSparse = "exact",
        pad_to: int = 0,
        layers: range | None = None,
    ) -> None:
        runner = LayerDriver(model=model, hooks=coordinator, piece_tokens=piece_tokens, prefill=prefill, layers=layers)
        super().__init__(runner, coordinator, device=device, chunk_tokens=chunk_tokens, pad_to=pad_to)
        self.is_exact = not isinstance(prefill, BlockSparse)
