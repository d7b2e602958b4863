"""What attention on a sample is like, whatever method is tried on it: how concentrated and how steady."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_tier.eval.metrics import attended, attention_weights, errors, steady_tokens
from gpu_tier.eval.synth import KVSample, Regime

__all__ = ["ERROR_TOLERANCE", "EXPECTED", "TOLERANCE", "TOP", "Concentration", "concentration"]

TOP = 0.018
"""Share of the tokens that is called the top."""

_FEW = 100


@dataclass(frozen=True, slots=True)
class Concentration:
    """Means over steps.

    Attributes:
        mass: attention of a query head in its own top 1.8 % of the tokens.
        overlap: of the top 100 of the KV head, those that are in the next step's too.
        wide_overlap: the same of the top 1.8 %.
        exact_error: of attention over the KV head's exact top 1.8 %, relative to full attention.
        lasting: of the top 100, those that are in the next two steps' too.
    """

    mass: float
    overlap: float
    wide_overlap: float
    exact_error: float
    lasting: float = 0.0


EXPECTED = {
    Regime.SHARP: Concentration(0.99, 0.71, 0.73, 0.0),
    Regime.MID: Concentration(0.86, 0.65, 0.69, 0.43),
    Regime.DIFFUSE: Concentration(0.50, 0.57, 0.64, 1.26),
}
"""Figures of S1 at n = 32K that its regimes stand for; there is none of the sharp regime's exact error."""

TOLERANCE = 0.05
"""How far the means of shares over seeds 0 to 3 may be off."""

ERROR_TOLERANCE = 0.25
"""How far the mean exact error may be off, relative to it: seeds differ by as much."""


def concentration(sample: KVSample) -> Concentration:
    """Return what attention on a sample is like."""
    n = len(sample.k)
    weights = attention_weights(sample.q, sample.k, sample.scale)
    top = round(TOP * n)
    mass = weights.sum(1)
    retrieved = mass.masked_fill(steady_tokens(n), -1.0)
    few, many = _top(retrieved, _FEW), _top(retrieved, top)
    exact = attended(weights, sample.v, _top(mass, top))
    return Concentration(
        mass=float(weights.topk(top, -1).values.sum(-1).mean()),
        overlap=_share((few[1:] & few[:-1]), _FEW),
        wide_overlap=_share((many[1:] & many[:-1]), top),
        exact_error=errors(exact, weights @ sample.v, sample.v).relative,
        lasting=_share(few[2:] & few[1:-1] & few[:-2], _FEW),
    )


def _top(mass: Tensor, k: int) -> Tensor:
    return torch.zeros_like(mass, dtype=torch.bool).scatter_(1, mass.topk(k).indices, True)


def _share(chosen: Tensor, k: int) -> float:
    return float(chosen.sum(1).float().mean() / k)
