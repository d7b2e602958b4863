"""What a policy is worth at every capacity: exact from one pass over a trace, or estimated from samples of it."""

from __future__ import annotations

from kvcm.optimizer.curves.exact import CURVES, belady_curve, leaf_lru_curve, lru_curve
from kvcm.optimizer.curves.sampled import MOST_RATE, MOST_REPEATS, SampledCurve, sampled_curves

__all__ = [
    "CURVES", "MOST_RATE", "MOST_REPEATS", "SampledCurve", "belady_curve", "leaf_lru_curve", "lru_curve",
    "sampled_curves",
]  # fmt: skip
