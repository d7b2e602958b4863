"""Shows what a rank's reuse counts in the metrics of the SGLang server.

SGLang collects the metrics of its processes through files, which only counters and histograms of `prometheus_client`
write. They are made when a process is told to have metrics, and brought up to date whenever SGLang asks a storage for
its figures.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from connectors.reuse.statistics import BUCKETS_SECONDS, COUNTERS, TIMES, ReuseStatistics

__all__ = ["ReuseMetrics"]

_PREFIX = "sglang:kvcm_"

_made: dict[tuple[str, ...], tuple[dict[str, Any], dict[str, Any]]] = {}  # a process registers a name once


class ReuseMetrics:
    """Counters and histograms of one rank.

    Args:
        statistics: what is shown.
        labels: of the rank.
    """

    def __init__(self, statistics: ReuseStatistics, labels: Mapping[str, str]) -> None:
        names = tuple(sorted(labels))
        if names not in _made:
            _made[names] = _make(names)
        counters, times = _made[names]
        self._statistics = statistics
        self._counters = {name: counter.labels(**labels) for name, counter in counters.items()}
        self._times = {name: time.labels(**labels) for name, time in times.items()}

    def update(self) -> None:
        """Add what was counted since the last call."""
        for name, value in self._statistics.take().items():
            if isinstance(value, list):
                self._observe(name, value)
            else:
                self._counters[name].inc(value)

    def _observe(self, name: str, samples: list[float]) -> None:
        """Enter times by the upper ends of their buckets: the histogram is exact, and its sum a little too large."""
        ends = [*BUCKETS_SECONDS, 2 * BUCKETS_SECONDS[-1]]
        for end, count in zip(ends, samples, strict=False):
            for _ in range(int(count)):
                self._times[name].observe(end)


def _make(labels: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
    from prometheus_client import Counter, Histogram

    counters = {name: Counter(f"{_PREFIX}{name}", text, labels) for name, text in COUNTERS.items()}
    times = {name: Histogram(f"{_PREFIX}{name}", text, labels, buckets=BUCKETS_SECONDS) for name, text in TIMES.items()}
    return counters, times
