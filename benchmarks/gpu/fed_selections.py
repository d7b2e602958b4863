"""Selections whose hit rate is an input, in the form that RetroInfer and PQCache give theirs.

What an algorithm selected is computed and then replaced. Clusters follow a `SlidingTrace`, one order for every layer,
request and head. Tokens lie in a block cache that keeps what many heads select: a fixed share of them are those of some
blocks, the same in every step, and the others come from everywhere else and do not return before all had their turn.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from sliding_trace import SlidingTrace
from sparse_system import SparseSystem
from torch import Tensor

from kvcm.gpu_tier.algorithms.pqcache import PQCache
from kvcm.gpu_tier.algorithms.retroinfer import RetroInfer
from kvcm.gpu_tier.config import PQCacheConfig
from kvcm.gpu_tier.types import Selection

__all__ = ["Fed", "fed_selections"]


class Fed(Protocol):
    """Selections of all layers, step after step."""

    def prepare(self, step: int) -> None:
        """Make the selections of a step, outside its time."""

    def select(self, layer: int, selection: Selection) -> Selection:
        """Return the selection of the layer at a position in place of what the algorithm selected."""


@dataclass(frozen=True, slots=True)
class _Shape:
    """Layers, requests, heads, and items that each head selects."""

    layers: int
    batch: int
    heads: int
    k: int

    @property
    def lines(self) -> int:
        """Heads of all layers and requests."""
        return self.layers * self.batch * self.heads


class _Kept:
    """Selections in tensors that stay where they are."""

    def __init__(self, shape: _Shape, device: torch.device) -> None:
        full = (shape.layers, shape.batch, shape.heads)
        self.indices = torch.zeros(*full, shape.k, dtype=torch.int32, device=device)
        self.lengths = torch.full(full[1:], shape.k, dtype=torch.int32, device=device)

    def select(self, layer: int, selection: Selection) -> Selection:
        """See `Fed`."""
        return replace(selection, indices=self.indices[layer], lengths=self.lengths)


class _Clusters(_Kept):
    def __init__(self, shape: _Shape, clusters: int, hit_rate: float, device: torch.device) -> None:
        super().__init__(shape, device)
        # The trace selects one item more, its newest, which is no cluster.
        self._trace = SlidingTrace(shape.lines, clusters, shape.k + 1, hit_rate, device)

    def prepare(self, step: int) -> None:
        """See `Fed`."""
        self.indices.copy_(self._trace.select(step, 0)[:, :-1].reshape(self.indices.shape))


class _Tokens(_Kept):
    """Args: shape; first and number of the middle's tokens; share and block of those that return; device."""

    def __init__(self, shape: _Shape, middle: range, hot: int, block: int, device: torch.device) -> None:
        super().__init__(shape, device)
        self._shape, self._cold = shape, shape.k - hot
        of_request = [self._orders(middle, hot, block, device) for _ in range(shape.layers * shape.batch)]
        self._hot = torch.stack([hot_tokens for hot_tokens, _ in of_request])
        self._others = torch.stack([others for _, others in of_request])
        stride = self._others.shape[1] // shape.heads
        places = torch.arange(shape.heads, device=device)[:, None] * stride
        self._window = places + torch.arange(self._cold, device=device)

    @staticmethod
    def _orders(middle: range, hot: int, block: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the tokens that return, ``[hot]``, and a random order of those in other blocks."""
        blocks = torch.randperm(len(middle) // block, device=device)
        count = -(-hot // block)
        first, rest = blocks[:count], blocks[count:]
        inside = torch.arange(block, device=device)
        tokens = middle.start + (first[:, None] * block + inside).flatten()[:hot]
        others = middle.start + (rest[:, None] * block + inside).flatten()
        return tokens.int(), others[torch.randperm(len(others), device=device)].int()

    def prepare(self, step: int) -> None:
        """See `Fed`."""
        places = (self._window + step * self._cold) % self._others.shape[1]
        cold = self._others[:, places]
        hot = self._hot[:, None].expand(-1, self._shape.heads, -1)
        self.indices.copy_(torch.cat([hot, cold], -1).sort(-1).values.view(self.indices.shape))


def fed_selections(system: SparseSystem, batch: int, hit_rate: float) -> Fed:
    """Return selections for the first `batch` requests of a system.

    A rate that a block cache of PQCache cannot have is cut to what its blocks hold.
    """
    work, algorithm, device = system.work, system.algorithm, system.runtime.device
    layers, heads = work.geometry.num_layers, work.geometry.num_kv_heads
    if isinstance(algorithm, RetroInfer):
        clusters = algorithm.segments.of(system.last_layer, system.requests[0]).clusters
        shape = _Shape(layers, batch, heads, algorithm.retrieved(clusters))
        return _Clusters(shape, clusters, hit_rate, device)
    assert isinstance(algorithm, PQCache)
    settings = work.config.algo
    assert isinstance(settings, PQCacheConfig)
    local, k = algorithm.budgets.tokens(work.n_prompt)
    cached = min(settings.cache_tokens, settings.k_cache * settings.block)
    hot = min(round(hit_rate * k), 0 if system.is_resident else cached)
    middle = range(settings.init, work.n_prompt - local)
    return _Tokens(_Shape(layers, batch, heads, k), middle, hot, settings.block, device)
