"""How long it takes to load the prefixes of requests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvcm.optimizer.tiers.outcome import FloatColumn, LoadTimes
from kvcm.optimizer.tiers.tier import Tier
from kvcm.optimizer.trace import BoolColumn, Int32Column

__all__ = ["load_seconds_of", "load_times"]


def load_seconds_of(hits: Int32Column, tiers: Sequence[Tier], block_bytes: int) -> FloatColumn:
    """Return [R] seconds for [R, T] blocks, level after level; each costs its latency if anything comes from it."""
    latency = np.array([tier.latency_seconds for tier in tiers])
    bandwidth = np.array([tier.bandwidth_bytes_per_second for tier in tiers])
    each = np.where(hits > 0, latency + hits * (block_bytes / bandwidth), 0.0)
    seconds: FloatColumn = each.sum(axis=1)
    return seconds


def load_times(seconds: FloatColumn, loads: BoolColumn) -> LoadTimes:
    """Return what people want to know of [R] seconds, over the requests that load."""
    loaded = seconds[loads]
    if not loaded.size:
        return LoadTimes(0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    median, p90, p99 = np.percentile(loaded, (50, 90, 99))
    return LoadTimes(
        loaded.size,
        float(loaded.sum()),
        float(loaded.mean()),
        float(median),
        float(p90),
        float(p99),
        float(loaded.max()),
    )
