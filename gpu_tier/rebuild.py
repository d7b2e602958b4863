"""Builds representations from KV that was attached without them: one pass over the keys of each layer."""

from __future__ import annotations

import torch

from gpu_tier.algorithms.base import BaseSparseAlgorithm
from gpu_tier.manager.key_reader import KVReader
from gpu_tier.step import BatchPlan, make_batch
from gpu_tier.types import Mode

__all__ = ["rebuild_representations"]

_PIECE_TOKENS = 8192


def rebuild_representations(
    algorithm: BaseSparseAlgorithm, reader: KVReader, request: int, start: int, stop: int, device: torch.device
) -> None:
    """Add tokens start to stop - 1 of a request to an algorithm's representations, in pieces."""
    for first in range(start, stop, _PIECE_TOKENS):
        last = min(first + _PIECE_TOKENS, stop)
        slots = torch.full((last - first,), -1)
        batch = make_batch(Mode.PREFILL, BatchPlan((request,), (first,), (last - first,), slots), device)
        for layer_id in algorithm.context.geometry.layers[algorithm.skip_layers :]:
            k, v = reader.keys(layer_id, request, first, last), None
            if algorithm.needs_values:
                k, v = reader.rows(layer_id, request, first, last)
            algorithm.construct_representations(layer_id, batch, k, v)
