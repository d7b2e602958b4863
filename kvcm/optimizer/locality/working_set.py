"""How many different blocks are in use: over time, and by how far back "in use" reaches.

A block is in the working set W(t, T) when it was accessed in the last T seconds before t (Denning 1968, "The working
set model for program behavior"). A cache whose blocks live T seconds after their last access holds just this set.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvcm.optimizer.locality.accesses import Accesses
from kvcm.optimizer.locality.distribution import FloatColumn
from kvcm.optimizer.trace import Int64Column, Trace

__all__ = ["WorkingSet", "working_set_of"]

_SAMPLES = 200
_LIFETIMES = 60
_WINDOWS_SECONDS = (10, 60, 300, 1800, 3600, 4 * 3600, 24 * 3600, 7 * 24 * 3600)


@dataclass(frozen=True, slots=True, eq=False)
class WorkingSet:
    """Blocks in use.

    Attributes:
        seconds: [S] since the first request.
        seen: [S] different blocks accessed until then.
        windows: seconds that a window reaches back -> [S] blocks in it.
        lifetimes_seconds: [L] how long blocks live after an access.
        mean_blocks: [L] blocks that so live, on average over the trace.
        hit_share: [L] part of the reads that find their block alive (the object hit rate of a cache without bound).
    """

    seconds: FloatColumn
    seen: Int64Column
    windows: dict[int, Int64Column]
    lifetimes_seconds: FloatColumn
    mean_blocks: FloatColumn
    hit_share: FloatColumn


def working_set_of(trace: Trace, accesses: Accesses) -> WorkingSet:
    """Return how many blocks are in use."""
    since_us = accesses.times_us - (trace.times_us[0] if len(trace) else 0)
    span_us = int(trace.span_seconds * 1e6)
    next_us = _next_times(accesses, since_us)
    samples_us = np.linspace(0, span_us, _SAMPLES)
    seen = np.searchsorted(np.sort(since_us[accesses.previous < 0]), samples_us, side="right")
    windows = {
        seconds: _alive(since_us, next_us, seconds * 1e6, samples_us)
        for seconds in _WINDOWS_SECONDS
        if seconds * 1e6 <= span_us
    }
    lifetimes = np.geomspace(1.0, max(2.0, trace.span_seconds), _LIFETIMES)
    mean_blocks, hit_share = _by_lifetime(accesses, since_us, next_us, lifetimes, span_us)
    return WorkingSet(samples_us / 1e6, seen, windows, lifetimes, mean_blocks, hit_share)


def _next_times(accesses: Accesses, since_us: Int64Column) -> FloatColumn:
    """Return [N] when the block of each access is accessed again; infinity if it is not."""
    next_us = np.full(len(since_us), np.inf)
    again = np.flatnonzero(accesses.previous >= 0)
    next_us[accesses.previous[again]] = since_us[again]
    return next_us


def _alive(since_us: Int64Column, next_us: FloatColumn, life_us: float, samples_us: FloatColumn) -> Int64Column:
    """Return the blocks whose last access is at most `life_us` ago, at each sample."""
    ends = np.minimum(next_us, np.nextafter(since_us + life_us, np.inf))
    begun = np.searchsorted(np.sort(since_us), samples_us, side="right")
    ended = np.searchsorted(np.sort(ends), samples_us, side="right")
    return (begun - ended).astype(np.int64)


def _by_lifetime(
    accesses: Accesses, since_us: Int64Column, next_us: FloatColumn, lifetimes: FloatColumn, span_us: int
) -> tuple[FloatColumn, FloatColumn]:
    """Return the mean number of living blocks and the part of reads that find theirs, for each lifetime.

    Both are sums over sorted gaps: a block lives for the gap to its next access, at most the lifetime, and not beyond
    the end of the trace.
    """
    gaps_us = np.sort(np.minimum(next_us, span_us) - since_us)
    sums = np.concatenate([[0.0], np.cumsum(gaps_us)])
    shorter = np.searchsorted(gaps_us, lifetimes * 1e6, side="right")
    living_us = sums[shorter] + (len(gaps_us) - shorter) * lifetimes * 1e6
    again = accesses.reuses
    waits_us = np.sort(since_us[again] - since_us[accesses.previous[again]])
    found = np.searchsorted(waits_us, lifetimes * 1e6, side="right")
    return living_us / max(1, span_us), found / max(1, int(accesses.is_read.sum()))
