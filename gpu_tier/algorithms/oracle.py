"""The exact top-k of the attention weights: the ceiling of every method that selects. For tests and evaluation.

The score of a key is the sum over the query heads of its KV head of their softmax over all keys, which is the group
rule that the other algorithms are compared under. All keys are read in every step, request by request.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from kvcm.gpu_tier.algorithms.base import BaseSparseAlgorithm, keep_best, sparse_lengths
from kvcm.gpu_tier.config import OracleConfig
from kvcm.gpu_tier.kernels.topk_select import topk_select
from kvcm.gpu_tier.types import ForwardBatch, Selection, Unit

__all__ = ["Oracle"]


class Oracle(BaseSparseAlgorithm):
    """Selects, per KV head, the tokens with the largest attention weights."""

    unit: ClassVar[Unit] = Unit.TOKEN

    def initialize_representation_pool(self) -> None:
        """Keep the settings: its representation are the keys themselves."""
        self.settings = self.context.settings(OracleConfig)

    @property
    def per_head(self) -> bool:
        """Each KV head selects on its own."""
        return True

    @property
    def represents_keys(self) -> bool:
        """See `BaseSparseAlgorithm`."""
        return False

    @property
    def max_items(self) -> int:
        """`k`, which also is the most that a share of a request may be."""
        return self.settings.k

    def retrieve_topk(
        self, queries: Tensor, layer_id: int, batch: ForwardBatch, sparse_mask: Tensor, **extra: Tensor
    ) -> Selection:
        """See `BaseSparseAlgorithm`."""
        heads, k = self.context.geometry.num_kv_heads, self.max_items
        scores = self._scores(queries, layer_id, batch)
        tokens = sparse_lengths(batch, sparse_mask)
        indices = torch.empty(batch.rows, heads, k, dtype=torch.int32, device=queries.device)
        lengths = torch.empty(batch.rows, heads, dtype=torch.int32, device=queries.device)
        topk_select(scores, tokens, k, indices, lengths, impl=self.context.config.kernels)
        if self.settings.ratio is not None:
            share = (tokens.double() * self.settings.ratio).ceil().int()
            indices, lengths = keep_best(indices, lengths, scores, share)
        return Selection(unit=self.unit, unit_tokens=1, indices=indices, lengths=lengths)

    def _scores(self, queries: Tensor, layer_id: int, batch: ForwardBatch) -> Tensor:
        heads = self.context.geometry.num_kv_heads
        shape = (batch.rows, heads, max((1, *batch.lengths)))
        scores = torch.full(shape, -torch.inf, device=queries.device)
        grouped = queries.float().unflatten(1, (heads, self.context.group))
        for row, (request, length) in enumerate(zip(batch.requests, batch.lengths, strict=True)):
            keys = self.context.keys.keys(layer_id=layer_id, request=request, start=0, stop=length)
            products = torch.einsum("hgd,nhd->hgn", grouped[row], keys) * self.context.sm_scale
            scores[row, :, :length] = products.softmax(-1).sum(1)
        return scores

    def representation_bytes(self, n_tokens: int) -> int:
        """Return 0: the keys are read where they are."""
        return 0
