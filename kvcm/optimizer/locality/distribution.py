"""How values are spread: a cumulative curve that is small enough to draw, and exact quantiles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvcm.optimizer.trace import Int64Column

__all__ = ["QUANTILES", "Distribution", "FloatColumn", "distribution"]

FloatColumn = npt.NDArray[np.float64]

QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.99)
_POINTS = 200


@dataclass(frozen=True, slots=True, eq=False)
class Distribution:
    """Of a count of values.

    Attributes:
        count: of values.
        values: ascending; spaced evenly on a logarithmic scale where there are many.
        shares: what part of the values is at most so large.
        quantiles: by share: the least value that so many are at most as large as.
    """

    count: int
    values: FloatColumn
    shares: FloatColumn
    quantiles: Mapping[float, float] = field(default_factory=dict)


def distribution(samples: FloatColumn | Int64Column) -> Distribution:
    """Return how non-negative numbers are spread; nothing is known of none."""
    ordered = np.sort(samples).astype(np.float64)
    count = len(ordered)
    if not count:
        return Distribution(0, ordered, ordered)
    values = _thresholds(ordered)
    shares = np.searchsorted(ordered, values, side="right") / count
    places = [min(count - 1, max(0, int(np.ceil(share * count)) - 1)) for share in QUANTILES]
    return Distribution(count, values, shares, dict(zip(QUANTILES, ordered[places].tolist(), strict=True)))


def _thresholds(ordered: FloatColumn) -> FloatColumn:
    """Return the distinct values, or points between the least and the greatest where there are more than can be drawn.

    The greatest is among them as it is: a power of ten that is rounded must not leave it out.
    """
    distinct = np.unique(ordered)
    if len(distinct) <= _POINTS:
        return distinct
    positive = distinct[distinct > 0]
    spaced = np.geomspace(positive[0], positive[-1], _POINTS)
    return np.concatenate([distinct[:1], spaced[1:-1], distinct[-1:]])
