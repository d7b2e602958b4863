"""Rates of one manager: what its counters gained between two of its vitals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from kvcm.model.vitals import METHODS, GroupTotals, Vitals

__all__ = ["GroupRates", "Rates", "quantile", "rates_between"]

_LEAST_SECONDS = 1.0  # a manager that started a moment ago has no rates worth the name
_NOTHING = GroupTotals()


class GroupRates(NamedTuple):
    """Of one group, per second."""

    hit_keys: float
    missed_keys: float
    evicted_bytes: float
    refused_writes: float


class Rates(NamedTuple):
    """Of one manager.

    Attributes:
        requests: per second, by method.
        errors: per second, by method.
        groups: by name.
        match_bounds: upper bounds in seconds of `match_counts`.
        match_counts: lookups between the two moments, by how long they took.
    """

    requests: Mapping[str, float]
    errors: Mapping[str, float]
    groups: Mapping[str, GroupRates]
    match_bounds: Sequence[float]
    match_counts: Sequence[int]


def rates_between(before: Vitals | None, after: Vitals, since: float) -> Rates | None:
    """Return the rates between two vitals of one manager, None where they cannot be told.

    A manager that started meanwhile began to count at nothing, so a restart makes no rate negative.

    Args:
        before: the earlier ones; None where there are none.
        after: the later ones.
        since: unix seconds; a manager without earlier vitals that started before this was there and not heard.
    """
    if before is not None and before.started_at == after.started_at:
        return _gained(before, after, after.at - before.at) if after.at > before.at else None
    since = before.at if before is not None else since
    return _gained(None, after, after.at - after.started_at) if after.started_at >= since else None


def _gained(before: Vitals | None, after: Vitals, seconds: float) -> Rates:
    seconds = max(seconds, _LEAST_SECONDS)

    def by_method(now: Mapping[str, int], then: Mapping[str, int]) -> Mapping[str, float]:
        return {name: max(0, now.get(name, 0) - then.get(name, 0)) / seconds for name in METHODS}

    known = before.groups if before is not None else {}
    return Rates(
        by_method(after.requests, before.requests if before is not None else {}),
        by_method(after.errors, before.errors if before is not None else {}),
        {name: _group(known.get(name, _NOTHING), totals, seconds) for name, totals in after.groups.items()},
        after.match_bounds,
        _more(before.match_counts if before is not None else (), after.match_counts),
    )


def _group(then: GroupTotals, now: GroupTotals, seconds: float) -> GroupRates:
    return GroupRates(
        max(0, now.hit_keys - then.hit_keys) / seconds,
        max(0, now.missed_keys - then.missed_keys) / seconds,
        max(0, now.evicted_bytes - then.evicted_bytes) / seconds,
        max(0, now.refused_writes - then.refused_writes) / seconds,
    )


def _more(then: Sequence[int], now: Sequence[int]) -> Sequence[int]:
    if len(then) != len(now):
        return tuple(now)
    return tuple(max(0, late - early) for early, late in zip(then, now, strict=True))


def quantile(share: float, bounds: Sequence[float], counts: Sequence[int]) -> float | None:
    """Return what a share of the values does not exceed, evenly spread inside each bucket; None without values.

    Args:
        share: 0 to 1.
        bounds: upper bounds of the buckets, ascending.
        counts: values in each bucket, and those beyond all bounds, which count as the highest bound.
    """
    total = sum(counts)
    if not total:
        return None
    wanted, low, below = share * total, 0.0, 0
    for bound, until in zip(bounds, accumulate(counts), strict=False):
        if until >= wanted and until > below:
            return low + (bound - low) * (wanted - below) / (until - below)
        low, below = bound, until
    return bounds[-1]
