"""Who uses blocks again: the conversation that wrote them, or another one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvcm.optimizer.locality.accesses import Accesses
from kvcm.optimizer.locality.distribution import Distribution, distribution
from kvcm.optimizer.trace import Int64Column, Trace

__all__ = ["SessionReuse", "session_reuse_of"]


@dataclass(frozen=True, slots=True, eq=False)
class SessionReuse:
    """Of a trace that names its sessions.

    Attributes:
        sessions: how many.
        own_share: part of the blocks read whose last user was the same session.
        other_share: part whose last user was another session, or one that is not named.
        new_share: part that was never accessed before.
        turns: requests per session.
        turn_interval_seconds: from one request of a session to its next.
        reuse_rates: of each session: the part of its blocks read that were accessed before.
    """

    sessions: int
    own_share: float
    other_share: float
    new_share: float
    turns: Distribution
    turn_interval_seconds: Distribution
    reuse_rates: Distribution


def session_reuse_of(trace: Trace, accesses: Accesses) -> SessionReuse | None:
    """Return who uses blocks again; None where the trace names no sessions."""
    named = trace.sessions >= 0
    if not named.any():
        return None
    is_counted = accesses.is_read & named[accesses.requests]
    counted = np.flatnonzero(is_counted)
    users = trace.sessions[accesses.requests[counted]]
    before = accesses.previous[counted]
    is_again = before >= 0
    last_users = np.where(is_again, trace.sessions[accesses.requests[before]], -2)
    own, total = int((last_users == users).sum()), max(1, len(counted))
    again = int(is_again.sum())
    reads = np.bincount(users)
    reused = np.bincount(users, weights=is_again, minlength=len(reads))
    return SessionReuse(
        sessions=len(np.unique(trace.sessions[named])),
        own_share=own / total,
        other_share=(again - own) / total,
        new_share=(len(counted) - again) / total,
        turns=distribution(_positive(np.bincount(trace.sessions[named]))),
        turn_interval_seconds=distribution(_turn_intervals_us(trace) / 1e6),
        reuse_rates=distribution(reused[reads > 0] / reads[reads > 0]),
    )


def _positive(counts: Int64Column) -> Int64Column:
    return counts[counts > 0]


def _turn_intervals_us(trace: Trace) -> Int64Column:
    order = np.argsort(trace.sessions, kind="stable")
    order = order[trace.sessions[order] >= 0]
    is_same = trace.sessions[order[1:]] == trace.sessions[order[:-1]]
    intervals: Int64Column = (trace.times_us[order[1:]] - trace.times_us[order[:-1]])[is_same]
    return intervals
