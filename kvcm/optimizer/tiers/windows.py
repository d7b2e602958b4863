"""What a hierarchy gave and moved over time, in windows of equal width."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvcm.optimizer.tiers.counting import Counted
from kvcm.optimizer.tiers.outcome import FloatColumn, TierSeries
from kvcm.optimizer.tiers.tier import Tier
from kvcm.optimizer.trace import Int32Column, Int64Column, Trace

__all__ = ["series_of"]

_WINDOWS = 100
_LATEST = np.iinfo(np.int64).max


def series_of(trace: Trace, tiers: Sequence[Tier], counted: Counted, block_bytes: int) -> TierSeries:
    """Return [T, W] figures; what a request moves counts for the window in which it arrives.

    A window is a hundredth of the trace's time, but at least a second.
    """
    span_seconds = float(np.ptp(trace.times_us)) / 1e6 if len(trace) else 0.0
    width = max(1.0, span_seconds / _WINDOWS)
    places = ((trace.times_us - trace.times_us.min(initial=_LATEST)) // (width * 1e6)).astype(np.int64)
    windows = int(places.max(initial=0)) + 1
    hits = _sums(counted.hits, places, windows)
    read = hits + _sums(counted.demoted, places, windows)
    written = _sums(counted.arrived, places, windows)
    asked = np.bincount(places, trace.read_blocks, windows)
    bandwidth = np.array([[tier.bandwidth_bytes_per_second] for tier in tiers])
    return TierSeries(
        window_seconds=width,
        starts_seconds=np.arange(windows, dtype=np.float64) * width,
        hit_rate=hits / np.maximum(asked, 1),
        read_bytes_per_second=read * block_bytes / width,
        written_bytes_per_second=written * block_bytes / width,
        utilisation=(read + written) * block_bytes / width / bandwidth,
    )


def _sums(counts: Int32Column, places: Int64Column, windows: int) -> FloatColumn:
    """Return [T, W] sums of [R, T] counts."""
    return np.stack([np.bincount(places, column, windows) for column in counts.T])
