"""A ring of samples: the last so many slots of time, as one array of floats per series.

Slots are numbered from the epoch on. A slot that nobody wrote is not known, and neither is a series in a slot whose
sample lacks it. Floats of 32 bits: seven digits are more than a chart shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["Floats", "Ring", "Series"]

Floats = npt.NDArray[np.float32]
_TIDY_SLOTS = 60


class Series(NamedTuple):
    """What is measured, and of what.

    Attributes:
        name: of the measure.
        labels: names and values.
    """

    name: str
    labels: tuple[tuple[str, str], ...] = ()


class Ring:
    """The samples.

    Args:
        size: slots that are kept.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.latest = -1
        self._slots = np.full(size, -1, np.int64)
        self._series: dict[Series, Floats] = {}

    def __iter__(self) -> Iterator[Series]:
        return iter(self._series)

    def put(self, slot: int, sample: Mapping[Series, float]) -> None:
        """Keep a sample; slots come in ascending order."""
        assert slot > self.latest, "time runs backwards"
        if slot // _TIDY_SLOTS != self.latest // _TIDY_SLOTS:
            self._tidy(slot)
        at = slot % self.size
        self.latest = self._slots[at] = slot
        for series in sample.keys() - self._series.keys():
            self._series[series] = np.full(self.size, np.nan, np.float32)
        for series, values in self._series.items():
            values[at] = sample.get(series, np.nan)

    def _tidy(self, slot: int) -> None:
        """Let go of series of which nothing is left."""
        kept = self._slots > slot - self.size
        self._series = {series: values for series, values in self._series.items() if not np.isnan(values[kept]).all()}

    def read(self, until: int, count: int) -> Mapping[Series, Floats]:
        """Return `count` slots up to and with `until`, of every series; NaN is what is not known."""
        wanted = np.arange(until - count + 1, until + 1, dtype=np.int64)
        at = wanted % self.size
        missing = self._slots[at] != wanted
        found = {}
        for series, values in self._series.items():
            picked = values[at]
            picked[missing] = np.nan
            found[series] = picked
        return found
