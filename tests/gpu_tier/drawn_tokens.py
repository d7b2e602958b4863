"""An algorithm of residency `blocks` whose choices have nothing to do with keys: any tokens behind a steady zone.

It tests the framework with selections that change wildly, whatever a real index would choose.
"""

from __future__ import annotations

import random
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvcm.gpu_tier.algorithms.base import BaseSparseAlgorithm
from kvcm.gpu_tier.config import PQCacheConfig
from kvcm.gpu_tier.types import ForwardBatch, Selection, SteadyRing, SteadyZone, Unit


class DrawnTokens(BaseSparseAlgorithm):
    """Selects up to `token_budget` tokens that are not steady, the same ones for the same (layer, length, head)."""

    unit: ClassVar[Unit] = Unit.TOKEN

    @property
    def per_head(self) -> bool:
        return True

    @property
    def settings(self) -> PQCacheConfig:
        return self.context.settings(PQCacheConfig)

    @property
    def max_items(self) -> int:
        return self.settings.budget(self.context.max_tokens)[1]

    def steady_ring(self, n_prompt: int) -> SteadyRing:
        return SteadyRing(self.settings.init, self.settings.budget(n_prompt)[0])

    @property
    def max_execution_tokens(self) -> int:
        return self.settings.init + sum(self.settings.budget(self.context.max_tokens))

    def retrieve_topk(
        self, queries: Tensor, layer_id: int, batch: ForwardBatch, sparse_mask: Tensor, **extra: Any
    ) -> Selection:
        sink, heads = self.settings.init, self.context.geometry.num_kv_heads
        indices = torch.full((batch.rows, heads, self.max_items), -1, dtype=torch.int32)
        lengths = torch.zeros(batch.rows, heads, dtype=torch.int32)
        firsts = [0] * batch.num_real
        for row, n in enumerate(batch.lengths):
            if not sparse_mask[row]:
                continue
            local, most = self.settings.budget(n)
            first = firsts[row] = max(min(sink, n), n - local)
            for head in range(heads):
                middle = range(min(sink, first), first)
                # The longer the request, the slower the choice drifts: some selected tokens return.
                chosen = random.Random(f"{layer_id} {head} {n // 2}").sample(middle, min(most, len(middle)))
                indices[row, head, : len(chosen)] = torch.tensor(sorted(chosen), dtype=torch.int32)
                lengths[row, head] = len(chosen)
        padded = torch.tensor([*firsts, *[0] * (batch.rows - batch.num_real)], dtype=torch.int32)
        return Selection(self.unit, 1, indices, lengths, steady=SteadyZone(sink, padded, tuple(firsts)))

    def representation_bytes(self, n_tokens: int) -> int:
        return 0
