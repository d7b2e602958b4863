"""The engine of the models here: the attention layers' driver under continuous batching."""

from __future__ import annotations

import torch

from gpu_tier.engine.batch_engine import BatchEngine
from gpu_tier.engine.hooks import EngineHooks
from gpu_tier.engine.layer_driver import LayerDriver
from gpu_tier.engine.model import DecoderModel
from gpu_tier.engine.sparse_prefill import BlockSparse

__all__ = ["DecodeEngine"]


class DecodeEngine(BatchEngine):
    """Decodes with a `DecoderModel` through a coordinator.

    Args:
        model: computes everything but attention.
        coordinator: computes attention.
        device: of the model.
        chunk_tokens: most prompt tokens of a step.
        piece_tokens: most keys of a request that prefill has decoded at a time.
        prefill: kernel of prefill attention: exact, flash or `BlockSparse`; see `gpu_tier.engine.prefill`.
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
        runner = LayerDriver(model, coordinator, piece_tokens, prefill, layers)
        super().__init__(runner, coordinator, device=device, chunk_tokens=chunk_tokens, pad_to=pad_to)
        self.is_exact = not isinstance(prefill, BlockSparse)
