"""What is counted all the time, beside calls: lookups, write sessions, and how late the event loop is."""

from __future__ import annotations

import asyncio
import platform
import time
from collections import deque
from collections.abc import Iterator
from typing import Final

from kvcm import __version__
from kvcm.service.prometheus_cache import CacheMetrics
from kvcm.service.prometheus_evictions import EvictionMetrics
from kvcm.telemetry import metrics_catalog as catalog
from kvcm.telemetry.metrics_values import BoundedNames, Histogram, Reading

__all__ = ["Counts", "LoopLag"]

_LAG_SECONDS: Final = 0.1
_STANDING: Final = 3


class LoopLag:
    """Measures how late the event loop wakes what is due."""

    def __init__(self) -> None:
        self._histogram = Histogram()
        self._latest_seconds = deque([0.0], maxlen=_STANDING)
        self._peak_seconds = 0.0

    async def run(self) -> None:
        """Measure for good."""
        while True:
            due = time.perf_counter() + _LAG_SECONDS  # the loop's own clock has milliseconds
            await asyncio.sleep(_LAG_SECONDS)
            late_seconds = max(0.0, time.perf_counter() - due)
            self._histogram.observe(late_seconds)
            self._latest_seconds.append(late_seconds)
            self._peak_seconds = max(self._peak_seconds, late_seconds)

    def take_peak_seconds(self) -> float:
        """Return how late it was at most since this was asked before."""
        peak, self._peak_seconds = self._peak_seconds, 0.0
        return peak

    def standing_seconds(self) -> float:
        """Return how late it is for good: every time of late. One large request is late once and over."""
        return min(self._latest_seconds)

    def readings(self) -> Iterator[Reading]:
        """Yield what was measured."""
        yield Reading(catalog.LOOP_LAG, self._histogram.read())


class Counts:
    """Counters of one manager.

    Attributes:
        groups: bounds the names of groups that become labels.
        cache: to be told of lookups and write sessions.
        evictions: to be told of evictions.
        lag: to be run.
    """

    def __init__(self) -> None:
        self.groups = BoundedNames()
        self.evictions = EvictionMetrics()
        self.cache = CacheMetrics(self.groups, self.evictions.missed)
        self.lag = LoopLag()

    def readings(self) -> Iterator[Reading]:
        """Yield everything that was counted."""
        yield from self.cache.readings()
        yield from self.evictions.readings()
        yield from self.lag.readings()
        yield Reading(catalog.BUILD_INFO, 1, (__version__, platform.python_version()))
