"""An algorithm with clusters that have nothing to do with keys: tokens are in any cluster, any clusters are chosen.

Segments, their numbers of clusters and the steady zone follow RetroInfer's rules, which is what residencies rely on.
"""

from __future__ import annotations

import random
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvcm.gpu_tier.algorithms.base import BaseSparseAlgorithm
from kvcm.gpu_tier.config import RetroInferConfig
from kvcm.gpu_tier.index.wave_index import WaveSegment
from kvcm.gpu_tier.types import ForwardBatch, Selection, SteadyRing, SteadyZone, Unit

__all__ = ["DrawnClusters"]

MOST_TOKENS = 24  # tokens that the chosen clusters of a head may have


class DrawnClusters(BaseSparseAlgorithm):
    """Chooses clusters of at most `MOST_TOKENS` tokens, the same ones for the same (layer, length, head)."""

    unit: ClassVar[Unit] = Unit.CLUSTER
    needs_values: ClassVar[bool] = True

    def initialize_representation_pool(self) -> None:
        self.sizes: dict[tuple[int, int], list[list[int]]] = {}  # (layer id, request): of each cluster by head
        self.indexed: dict[tuple[int, int], int] = {}

    @property
    def unit_tokens(self) -> int:
        return 0

    @property
    def per_head(self) -> bool:
        return True

    @property
    def settings(self) -> RetroInferConfig:
        return self.context.settings(RetroInferConfig)

    @property
    def max_items(self) -> int:
        return MOST_TOKENS

    def steady_ring(self, n_prompt: int) -> SteadyRing:
        return SteadyRing(self.settings.sink, self.settings.local + self.settings.update_segment)

    @property
    def max_execution_tokens(self) -> int:
        return self.settings.unindexed + MOST_TOKENS

    def construct_representations(
        self, layer_id: int, batch: ForwardBatch, k: Tensor, v: Tensor | None = None, q: Tensor | None = None,
        **extra: Tensor,
    ) -> None:  # fmt: skip
        for request, n in zip(batch.requests, batch.lengths, strict=True):
            while self._first(layer_id, request) + self.settings.segment + self.settings.local <= n:
                self._build(layer_id, request, self.settings.segment)

    def finish_prompt(self, request: int, n_prompt: int) -> None:
        for layer_id in self.context.geometry.layers:
            left = n_prompt - self.settings.local - self._first(layer_id, request)
            if n_prompt >= self.settings.unindexed and left > 0:
                self._build(layer_id, request, left)

    def update_representations(
        self, layer_id: int, batch: ForwardBatch, k: Tensor, v: Tensor | None = None, **extra: Tensor
    ) -> None:
        for request, n in zip(batch.requests, batch.lengths, strict=True):
            if n - self._first(layer_id, request) >= self.settings.local + self.settings.update_segment:
                self._build(layer_id, request, self.settings.update_segment)

    def _first(self, layer_id: int, request: int) -> int:
        return self.indexed.get((layer_id, request), self.settings.sink)

    def _build(self, layer_id: int, request: int, tokens: int) -> None:
        start, heads = self._first(layer_id, request), self.context.geometry.num_kv_heads
        clusters = max(1, round(tokens / self.settings.tokens_per_centroid))
        draw = torch.Generator().manual_seed(1000 * start + layer_id)
        labels = torch.randint(clusters, (heads, tokens), generator=draw)
        sizes = torch.stack([line.bincount(minlength=clusters) for line in labels])
        known = self.sizes.setdefault((layer_id, request), [])
        segment = WaveSegment(start, len(known), sizes.int(), labels.argsort(dim=1, stable=True).int())
        known.extend(sizes.T.tolist())
        self.indexed[layer_id, request] = start + tokens
        assert self.sink is not None
        self.sink.store(layer_id, request, segment)

    def retrieve_topk(
        self, queries: Tensor, layer_id: int, batch: ForwardBatch, sparse_mask: Tensor, **extra: Any
    ) -> Selection:
        heads = self.context.geometry.num_kv_heads
        indices = torch.full((batch.rows, heads, self.max_items), -1, dtype=torch.int32)
        lengths = torch.zeros(batch.rows, heads, dtype=torch.int32)
        firsts = [0] * batch.num_real
        for row, (request, n) in enumerate(zip(batch.requests, batch.lengths, strict=True)):
            if not sparse_mask[row]:
                continue
            firsts[row] = max(min(self.settings.sink, n), self._first(layer_id, request))
            for head in range(heads):
                chosen = self._chosen(layer_id, request, head, n)
                indices[row, head, : len(chosen)] = torch.tensor(chosen, dtype=torch.int32)
                lengths[row, head] = len(chosen)
        padded = torch.tensor([*firsts, *[0] * (batch.rows - batch.num_real)], dtype=torch.int32)
        zone = SteadyZone(self.settings.sink, padded, tuple(firsts))
        return Selection(self.unit, 0, indices, lengths, steady=zone)

    def _chosen(self, layer_id: int, request: int, head: int, n: int) -> list[int]:
        sizes = [heads[head] for heads in self.sizes.get((layer_id, request), [])]
        chosen: list[int] = []
        for cluster in random.Random(f"{layer_id} {head} {n // 3}").sample(range(len(sizes)), len(sizes)):
            if sum(sizes[i] for i in chosen) + sizes[cluster] <= MOST_TOKENS and len(chosen) < min(6, self.max_items):
                chosen.append(cluster)
        return sorted(chosen)

    def free(self, request: int) -> None:
        for known in (self.sizes, self.indexed):
            for key in [key for key in known if key[1] == request]:
                del known[key]

    def representation_bytes(self, n_tokens: int) -> int:
        return 0
