"""Managers as others see them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["METHODS", "Endpoint", "GroupTotals", "Vitals"]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a manager can be reached."""

    node_id: str
    host: str
    meta_rpc_port: int
    meta_http_port: int
    admin_rpc_port: int
    admin_http_port: int


# The state that a manager reports to the others: counters since it started, and its state at one moment.

METHODS = ("match", "start", "finish", "other")
"""Kinds of requests of engines: lookups, beginnings and ends of writes, and the rest."""


@dataclass(frozen=True, slots=True)
class GroupTotals:
    """The counters of one group, since the manager started.

    Attributes:
        hit_keys: block keys asked for and handed out.
        missed_keys: those that were not.
        evicted_bytes: by this manager, while it led.
        refused_writes: for lack of space.
    """

    hit_keys: int = 0
    missed_keys: int = 0
    evicted_bytes: int = 0
    refused_writes: int = 0


@dataclass(frozen=True, slots=True)
class Vitals:
    """One manager at one moment. Releases on one store differ: a new field needs a default.

    Attributes:
        endpoint: where it is.
        version: of its code.
        started_at: unix seconds of its own clock, as `at`; counters begin then.
        at: when this was true.
        phase: stage of its life.
        is_leader: whether it runs the background duties.
        requests: answered ones, by method.
        errors: those of them whose outcome was not OK.
        match_bounds: upper bounds in seconds of `match_counts`.
        match_counts: lookups by how long they took; the last one is for those beyond all bounds.
        groups: by name; of too many, some are summed up.
        loop_lag_seconds: how late the event loop was at most, since the vitals before.
        open_sessions: write sessions that it opened and that are open.
        used_bytes: by group and kind of storage, reported by the leader alone.
        block_stores: names of the further metadata stores of its settings, in order.
    """

    endpoint: Endpoint
    version: str
    started_at: float
    at: float
    phase: str
    is_leader: bool
    requests: Mapping[str, int]
    errors: Mapping[str, int]
    match_bounds: tuple[float, ...]
    match_counts: tuple[int, ...]
    groups: Mapping[str, GroupTotals] = field(default_factory=dict)
    loop_lag_seconds: float = 0.0
    open_sessions: int = 0
    used_bytes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    block_stores: tuple[str, ...] = ()
