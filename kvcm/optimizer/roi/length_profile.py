"""How long a prefill takes by its length: attention to the tokens before makes later tokens dearer."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvcm.optimizer.errors import OptionError
from kvcm.optimizer.roi.formulas import Floats, prefill_seconds

__all__ = ["LengthProfile", "fit_profile", "read_profile"]

Point = tuple[float, float]
_COLUMNS = ("tokens", "seconds")
_ALLOWED = "CSV with the columns tokens,seconds or a JSON list of [tokens, seconds]"


@dataclass(frozen=True, slots=True)
class LengthProfile:
    """T(n, k) = a(n − k) + q(n² − k²)/2.

    Attributes:
        linear: a, seconds per token.
        quadratic: q, seconds per token and token before it.
        largest_error_seconds: how far it is from a point that it was fitted to.

    Raises:
        OptionError: a coefficient is below zero, or both are zero.
    """

    linear: float
    quadratic: float = 0.0
    largest_error_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not (0 <= self.linear < 1e12 and 0 <= self.quadratic < 1e12 and self.linear + self.quadratic > 0):
            raise OptionError(
                f"profile: linear {self.linear:g}, quadratic {self.quadratic:g}; allowed: from 0, one of them above 0"
            )

    def seconds(self, tokens: Floats, cached: Floats) -> Floats:
        """Return the seconds of a prefill of `tokens`, of which `cached` are loaded."""
        return prefill_seconds(self.linear, self.quadratic, tokens, cached)

    def saved_seconds(self, cached: Floats) -> Floats:
        """Return T(n, 0) − T(n, k), the same for every n."""
        return self.seconds(cached, np.zeros_like(cached))


def fit_profile(points: Sequence[Point]) -> LengthProfile:
    """Return the profile with a, q ≥ 0 whose squared errors are least.

    Args:
        points: (tokens, seconds) of prefills without a cached prefix.

    Raises:
        OptionError: no point, or one that is not above zero.
    """
    for point in points:
        if not all(0 < each < 1e12 for each in point):
            raise OptionError(f"profile: {point} is no point; allowed: tokens and seconds above 0")
    if not points:
        raise OptionError("profile: it has no points; allowed: at least one of tokens and seconds")
    measured = np.array(points, np.float64)
    tokens, seconds = measured[:, 0], measured[:, 1]
    columns = np.stack([tokens, tokens * tokens / 2], axis=1)
    linear, quadratic = _least_squares_above_zero(columns, seconds)
    errors = np.abs(columns @ np.array([linear, quadratic]) - seconds)
    return LengthProfile(linear, quadratic, float(errors.max()))


def _least_squares_above_zero(columns: Floats, target: Floats) -> tuple[float, float]:
    # With two coefficients there are three candidates: both free, or either at zero.
    scale = np.linalg.norm(columns, axis=0)
    scaled = columns / scale
    both = np.linalg.lstsq(scaled, target, rcond=None)[0]
    candidates = [both] if (both >= 0).all() else []
    candidates += [np.array([scaled[:, 0] @ target, 0.0]), np.array([0.0, scaled[:, 1] @ target])]
    best = min(candidates, key=lambda each: float(np.square(scaled @ each - target).sum()))
    linear, quadratic = best / scale
    return float(linear), float(quadratic)


def read_profile(path: Path) -> LengthProfile:
    """Return the profile of measured points in a file.

    Raises:
        OptionError: the file cannot be read or holds no points.
    """
    try:
        text = path.read_text()
        points = _json_points(text) if text.lstrip().startswith("[") else _csv_points(text)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise OptionError(f"profile: {str(path)!r} holds no points ({error}); allowed: {_ALLOWED}") from error
    return fit_profile(points)


def _json_points(text: str) -> list[Point]:
    rows = [[row[name] for name in _COLUMNS] if isinstance(row, dict) else row for row in json.loads(text)]
    return [(float(tokens), float(seconds)) for tokens, seconds in rows]


def _csv_points(text: str) -> list[Point]:
    rows = csv.DictReader(io.StringIO(text), skipinitialspace=True)
    return [(float(row["tokens"]), float(row["seconds"])) for row in rows]
