"""The policies that have an exact curve."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvcm.optimizer.curves.belady import belady_curve
from kvcm.optimizer.curves.leaf_lru import leaf_lru_curve
from kvcm.optimizer.curves.lru import lru_curve
from kvcm.optimizer.results import Curve
from kvcm.optimizer.trace import Trace

__all__ = ["CURVES"]

CURVES: Mapping[str, Callable[[Trace], Curve]] = {
    "lru": lru_curve,
    "leaf_lru": leaf_lru_curve,
    "belady": belady_curve,
}
"""By the label of the policy."""
