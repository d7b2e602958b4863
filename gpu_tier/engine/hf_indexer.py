"""Hears what the lightning indexers of a Hugging Face model compute, for the algorithm `dsa`.

DeepSeek-V3.2 selects tokens itself: each layer's indexer scores all keys in its cache. Here the coordinator selects, so
the indexer gets a cache with one key, and hooks on its projections take the index queries and weights that it would
have scored with. Its own choice, which is then meaningless, goes unused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["IndexerTaps"]

Report = Callable[[int, str, Tensor], None]


class IndexerTaps:
    """Hooks on the indexers of a model, until `close`.

    Args:
        model: of the type deepseek_v32; for any other nothing is hooked.
        report: is told ``(layer, name, tensor)`` of `index_query` and `index_weight`, each ``[T, ...]``.
    """

    def __init__(self, model: Any, report: Report) -> None:
        self._report = report
        self._angles: dict[int, tuple[Tensor, Tensor]] = {}
        indexers = [module.indexer for module in model.modules() if getattr(module, "indexer", None) is not None]
        self._handles = [handle for indexer in indexers for handle in self._tap(indexer)]

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _tap(self, indexer: Any) -> list[Any]:
        layer: int = indexer.layer_idx

        def before(_module: Any, arguments: tuple[Any, ...]) -> None:
            self._angles[layer] = arguments[2]

        def query(_module: Any, _arguments: Any, out: Tensor) -> None:
            heads = out[0].unflatten(-1, (indexer.n_heads, indexer.head_dim))
            self._report(layer, "index_query", _rotated(heads, *self._angles.pop(layer)))

        def weight(_module: Any, _arguments: Any, out: Tensor) -> None:
            self._report(layer, "index_weight", out[0].float() * (indexer.n_heads**-0.5 * indexer.softmax_scale))

        return [
            indexer.register_forward_pre_hook(before),
            indexer.wq_b.register_forward_hook(query),
            indexer.weights_proj.register_forward_hook(weight),
        ]


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the leading numbers of ``x [T, heads, d]`` by the angles ``[1, T, rope]``, in half-split order."""
    half = cos.shape[-1] // 2
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    c, s = cos[0, :, None, :half], sin[0, :, None, :half]
    return torch.cat([first * c - second * s, second * c + first * s, rest], dim=-1)
