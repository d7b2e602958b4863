"""All statistics of locality of a trace."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from kvcm.optimizer.curves import lru_curve
from kvcm.optimizer.locality.accesses import Accesses, accesses_of
from kvcm.optimizer.locality.distribution import Distribution, distribution
from kvcm.optimizer.locality.popularity import Popularity, popularity_of
from kvcm.optimizer.locality.sessions import SessionReuse, session_reuse_of
from kvcm.optimizer.locality.working_set import WorkingSet, working_set_of
from kvcm.optimizer.results import Curve
from kvcm.optimizer.trace import Int64Column, Trace

__all__ = ["Locality", "locality_of"]


@dataclass(frozen=True, slots=True, eq=False)
class Locality:
    """How a trace uses its blocks again.

    Attributes:
        reuse_distance_blocks: of each access to a known block: different blocks accessed since its last access, itself
            included (the LRU stack distance; a cache of so many blocks still holds it).
        reuse_seconds: of each read of a known block: since its last access.
        revisit_seconds: of each request that finds its first block known: since the last access of the deepest known
            block of its prefix, which is the conversation or prompt it continues.
        popularity: how unequally blocks are used.
        working_set: how many blocks are in use.
        sessions: who uses blocks again; None where the trace names no sessions.
    """

    reuse_distance_blocks: Distribution
    reuse_seconds: Distribution
    revisit_seconds: Distribution
    popularity: Popularity
    working_set: WorkingSet
    sessions: SessionReuse | None


def locality_of(trace: Trace, lru: Curve | None = None) -> Locality:
    """Return how a trace uses its blocks again.

    Args:
        trace: any.
        lru: its curve, made if it is not there yet; of a trace with lookups that do not write, one is always made, in
            which they count as accesses like all others.
    """
    accesses = accesses_of(trace)
    again = accesses.reuses
    waits_us = accesses.times_us[again] - accesses.times_us[accesses.previous[again]]
    if lru is None or not trace.writes.all():
        lru = lru_curve(replace(trace, writes=np.ones_like(trace.writes)))
    return Locality(
        reuse_distance_blocks=_distances(lru),
        reuse_seconds=distribution(waits_us / 1e6),
        revisit_seconds=distribution(_revisits_us(trace, accesses) / 1e6),
        popularity=popularity_of(trace),
        working_set=working_set_of(trace, accesses),
        sessions=session_reuse_of(trace, accesses),
    )


def _distances(lru: Curve) -> Distribution:
    """Return the stack distances: so many blocks more are hits with every block of capacity."""
    counts = np.diff(lru.object_blocks)
    return distribution(np.repeat(np.arange(1, len(counts) + 1), counts))


def _revisits_us(trace: Trace, accesses: Accesses) -> Int64Column:
    """Return the wait of each reading request behind whoever used the deepest known block of its prefix."""
    is_known = accesses.is_read & (accesses.previous >= 0)
    # The first access of a request that is not a known block ends its prefix.
    ends = np.flatnonzero(~is_known)
    reading = np.flatnonzero(trace.read_blocks > 0)
    starts = trace.offsets[reading]
    places = np.searchsorted(ends, starts)
    first_ends = np.concatenate([ends, [trace.accesses]])[places]
    stops = np.minimum(first_ends, trace.offsets[reading + 1])
    deepest = stops[stops > starts] - 1
    waits: Int64Column = accesses.times_us[deepest] - accesses.times_us[accesses.previous[deepest]]
    return waits
