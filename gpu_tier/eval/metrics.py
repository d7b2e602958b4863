"""How good a selection and its attention output are.

The truth is always the attention weight summed over the query heads of the KV head (the group rule ``Σ_g softmax``), so
figures of methods are comparable. Sinks and the local window, which every method keeps or could keep for nothing, count
neither as found nor as sought.

Shapes: T steps, n tokens, G query heads of one KV head, dv numbers of an output.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_tier.types import TokenRanges

__all__ = ["STEADY", "Errors", "attended", "attention_weights", "errors", "mass_recall", "recall_at", "steady_tokens"]

STEADY = TokenRanges(sink=4, local=64)
"""Tokens that recall leaves out for all methods."""


@dataclass(frozen=True, slots=True)
class Errors:
    """How far outputs are from those of full attention: means over steps and query heads, and the tail.

    Attributes:
        relative: of ``|o - o_full| / |o_full|``. Misleading where attention is diffuse: |o_full| is small there.
        normalised: of ``|o - o_full|`` over the mean length of a value.
        cosine: of the cosine between both.
        p95: of each query head, the value that 95 % of its steps' normalised errors are below; of the worst head.
    """

    relative: float
    normalised: float
    cosine: float
    p95: float


def attention_weights(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Return the softmax weights ``f32 [T, G, n]`` of ``q [T, G, d]`` over ``k [n, d]``."""
    return torch.softmax(q.float() @ k.float().T * scale, -1)


def attended(weights: Tensor, v: Tensor, selected: Tensor) -> Tensor:
    """Return the outputs ``f32 [T, G, dv]`` of attention over ``selected bool [T, n]`` alone; 0 where it is empty."""
    kept = weights * selected[:, None]
    total = kept.sum(-1, keepdim=True)
    return (kept / total.clamp_min(torch.finfo(torch.float32).tiny)) @ v.float()


def steady_tokens(n: int, ranges: TokenRanges = STEADY) -> Tensor:
    """Return ``bool [n]``: the first and the last tokens that need no retrieval."""
    at = torch.arange(n)
    return (at < ranges.sink) | (at >= n - ranges.local)


def recall_at(k: int, weights: Tensor, selected: Tensor, steady: Tensor) -> float:
    """Return which share of the true top `k` of each step is selected, steady tokens left out of both; the mean.

    Args:
        k: tokens that are sought.
        weights: ``[T, G, n]`` of full attention.
        selected: ``bool [T, n]``.
        steady: ``bool [n]``.
    """
    sought = weights.sum(1).masked_fill(steady, -1.0).topk(min(k, int((~steady).sum()))).indices
    return float(selected.gather(1, sought).float().mean())


def mass_recall(weights: Tensor, selected: Tensor, steady: Tensor) -> float:
    """Return the attention of the selection and the steady tokens over that of the best selection of the same size.

    The best has the steady tokens too, and fills up with the heaviest others. Mean over the steps.
    """
    mass = weights.sum(1)
    chosen = selected | steady
    others = mass.masked_fill(steady, -1.0).sort(-1, descending=True).values.clamp_min(0)
    rank = torch.arange(mass.shape[-1])
    best = (others * (rank < (selected & ~steady).sum(-1, keepdim=True))).sum(-1) + (mass * steady).sum(-1)
    return float(((mass * chosen).sum(-1) / best).mean())


def errors(out: Tensor, full: Tensor, v: Tensor) -> Errors:
    """Return how far ``out [T, G, dv]`` is from `full`, for values ``v [n, dv]``."""
    distance = (out - full).norm(dim=-1)
    normalised = distance / v.float().norm(dim=-1).mean()
    return Errors(
        relative=float((distance / full.norm(dim=-1)).mean()),
        normalised=float(normalised.mean()),
        cosine=float(torch.nn.functional.cosine_similarity(out, full, dim=-1).mean()),
        p95=float(normalised.quantile(0.95, dim=0).max()),
    )
