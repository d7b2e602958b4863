"""What is counted between two scrapes: plain numbers of the event loop's thread.

A request touches several of them, so they cost as little as numbers do: a histogram of prometheus-client takes some ten
times as long per value, for locks that one thread does not need. That library writes them down when somebody asks
(`kvcm/service/prometheus_text.py`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Sequence
from itertools import accumulate
from typing import NamedTuple

from kvcm.telemetry.metrics_catalog import Metric

__all__ = ["AGES", "DURATIONS", "KEYS", "OTHER", "BoundedNames", "Distribution", "Histogram", "Reading"]

DURATIONS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
"""Seconds. From 100 µs, where the calls are; beyond 5 s nobody waits any more."""

KEYS = (1.0, 4.0, 16.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0, 32768.0, 65536.0)
"""Blocks of a request or a prefix; 128 is where the objective of latency ends."""

AGES = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 43200.0, 86400.0, 259200.0, 604800.0)
"""Seconds that blocks live: from a second to a week."""

OTHER = "other"
"""Stands for every name beyond the bound."""


class Distribution(NamedTuple):
    """A histogram at one moment.

    Attributes:
        bounds: upper bounds, ascending, without infinity.
        counts: values up to each bound and all of them: cumulative, one entry more than bounds.
        total: sum of the values.
    """

    bounds: Sequence[float]
    counts: Sequence[int]
    total: float


class Histogram:
    """Counts values by size.

    Args:
        bounds: upper bounds of the buckets, inclusive, ascending.
    """

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: Sequence[float] = DURATIONS) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    @property
    def bounds(self) -> tuple[float, ...]:
        """Upper bounds of the buckets."""
        return tuple(self._bounds)

    @property
    def counts(self) -> tuple[int, ...]:
        """Values in each bucket so far, and those beyond all bounds."""
        return tuple(self._counts)

    def read(self) -> Distribution:
        """Return what was counted so far."""
        return Distribution(self._bounds, tuple(accumulate(self._counts)), self._total)


class Reading(NamedTuple):
    """One series at one moment; labels are in the order of the metric's."""

    metric: Metric
    value: float | Distribution
    labels: tuple[str, ...] = ()


class BoundedNames:
    """Names that become labels: the first ones seen stay themselves, so that nobody grows the table without bound.

    Args:
        most: how many stay themselves.
    """

    def __init__(self, most: int = 1000) -> None:
        self._most = most
        self._names: set[str] = set()

    def keep(self, names: Container[str]) -> None:
        """Forget all others: there is room for new ones."""
        self._names = {name for name in self._names if name in names}

    def of(self, name: str) -> str:
        """Return the name, or `OTHER` where there are too many."""
        if name not in self._names:
            if len(self._names) >= self._most:
                return OTHER
            self._names.add(name)
        return name
