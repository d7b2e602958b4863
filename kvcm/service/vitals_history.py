"""History of vitals: rates of managers between two of their vitals, sampled into rings."""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvcm.model.nodes import METHODS, GroupTotals, Vitals
from kvcm.telemetry.metrics import BoundedLabels

__all__ = [
    "ERRORS",
    "HIT_KEYS",
    "LONGEST_SECONDS",
    "P50",
    "P99",
    "QUOTA",
    "REFUSED",
    "REQUESTS",
    "USED",
    "Floats",
    "GroupRates",
    "History",
    "HistoryRange",
    "RangeSeries",
    "Rates",
    "Ring",
    "Series",
    "quantile",
    "rates_between",
    "sample_of",
]

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
    """Return the rates between two vitals of one manager, None where they are unknown.

    A manager that started meanwhile began to count at nothing, so a restart makes no rate negative.

    Args:
        before: the earlier ones; None where there are none.
        after: the later ones.
        since: unix seconds; a manager without earlier vitals that started before this was missed.
    """
    if before is not None and before.started_at == after.started_at:
        return _rates(before, after, after.at - before.at) if after.at > before.at else None
    since = before.at if before is not None else since
    return _rates(None, after, after.at - after.started_at) if after.started_at >= since else None


def _rates(before: Vitals | None, after: Vitals, seconds: float) -> Rates:
    seconds = max(seconds, _LEAST_SECONDS)

    def by_method(now: Mapping[str, int], then: Mapping[str, int]) -> Mapping[str, float]:
        return {name: max(0, now.get(name, 0) - then.get(name, 0)) / seconds for name in METHODS}

    known = before.groups if before is not None else {}
    return Rates(
        by_method(after.requests, before.requests if before is not None else {}),
        by_method(after.errors, before.errors if before is not None else {}),
        {name: _group(known.get(name, _NOTHING), totals, seconds) for name, totals in after.groups.items()},
        after.match_bounds,
        _increase(before.match_counts if before is not None else (), after.match_counts),
    )


def _group(then: GroupTotals, now: GroupTotals, seconds: float) -> GroupRates:
    return GroupRates(
        max(0, now.hit_keys - then.hit_keys) / seconds,
        max(0, now.missed_keys - then.missed_keys) / seconds,
        max(0, now.evicted_bytes - then.evicted_bytes) / seconds,
        max(0, now.refused_writes - then.refused_writes) / seconds,
    )


def _increase(then: Sequence[int], now: Sequence[int]) -> Sequence[int]:
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


# A ring of samples: the last so many slots of time, as one array of floats per series.
#
# Slots are numbered from the epoch on. A slot without a sample is unknown, and so is a series in a slot whose
# sample lacks it. Floats of 32 bits: seven digits are more than a chart shows.

Floats = npt.NDArray[np.float32]
_TIDY_SLOTS = 60


class Series(NamedTuple):
    """A measure with its labels.

    Attributes:
        name: of the measure.
        labels: names and values.
    """

    name: str
    labels: tuple[tuple[str, str], ...] = ()


class Ring:
    """The samples.

    Args:
        size: slots that are kept.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.latest = -1
        self._slots = np.full(size, -1, np.int64)
        self._series: dict[Series, Floats] = {}

    def __iter__(self) -> Iterator[Series]:
        return iter(self._series)

    def append(self, slot: int, sample: Mapping[Series, float]) -> None:
        """Keep a sample; slots come in ascending order."""
        assert slot > self.latest, "time runs backwards"
        if slot // _TIDY_SLOTS != self.latest // _TIDY_SLOTS:
            self._tidy(slot)
        at = slot % self.size
        self.latest = self._slots[at] = slot
        for series in sample.keys() - self._series.keys():
            self._series[series] = np.full(self.size, np.nan, np.float32)
        for series, values in self._series.items():
            values[at] = sample.get(series, np.nan)

    def _tidy(self, slot: int) -> None:
        """Let go of series of which nothing is left."""
        kept = self._slots > slot - self.size
        self._series = {series: values for series, values in self._series.items() if not np.isnan(values[kept]).all()}

    def read(self, until: int, count: int) -> Mapping[Series, Floats]:
        """Return `count` slots up to and with `until`, of every series; NaN is unknown."""
        wanted = np.arange(until - count + 1, until + 1, dtype=np.int64)
        at = wanted % self.size
        missing = self._slots[at] != wanted
        found = {}
        for series, values in self._series.items():
            picked = values[at]
            picked[missing] = np.nan
            found[series] = picked
        return found


# One sample of the whole deployment: the rates of all managers summed up, and what groups use and may use.

REQUESTS = "requests_per_second"
ERRORS = "errors_per_second"
HIT_KEYS = "hit_keys_per_second"
_MISSED_KEYS = "missed_keys_per_second"
P50 = "match_p50_seconds"
P99 = "match_p99_seconds"
USED = "used_bytes"
QUOTA = "quota_bytes"
_EVICTED = "evicted_bytes_per_second"
REFUSED = "refused_writes_per_second"


def sample_of(
    rates: Sequence[Rates], vitals: Iterable[Vitals], quotas: Mapping[str, int], name_of: Callable[[str], str]
) -> Mapping[Series, float]:
    """Return the series at one moment; unknown ones are missing.

    Args:
        rates: of every manager that has some.
        vitals: of every manager; those of the leader have the usage.
        quotas: bytes by group.
        name_of: label of a group: there may be too many.
    """
    sample: defaultdict[Series, float] = defaultdict(float)
    if rates:
        _add_requests(sample, rates)
        _add_groups(sample, rates, name_of)
    leaders = [each for each in vitals if each.is_leader and each.used_bytes]
    if leaders:
        _add_used(sample, max(leaders, key=lambda each: each.at).used_bytes, name_of)
    for group, capacity in quotas.items():
        sample[_of_group(QUOTA, name_of(group))] += capacity
    return sample


def _of_group(name: str, group: str, *labels: tuple[str, str]) -> Series:
    return Series(name, (("group", group), *labels))


def _add_requests(sample: dict[Series, float], rates: Sequence[Rates]) -> None:
    for method in METHODS:
        sample[Series(REQUESTS, (("method", method),))] = sum(each.requests.get(method, 0.0) for each in rates)
    sample[Series(ERRORS)] = sum(sum(each.errors.values()) for each in rates)
    bounds = rates[0].match_bounds
    comparable = [each.match_counts for each in rates if each.match_bounds == bounds]  # another release may have others
    counts = [sum(column) for column in zip(*comparable, strict=True)]
    for name, share in ((P50, 0.5), (P99, 0.99)):
        if (seconds := quantile(share, bounds, counts)) is not None:
            sample[Series(name)] = seconds


def _add_groups(sample: defaultdict[Series, float], rates: Iterable[Rates], name_of: Callable[[str], str]) -> None:
    for each in rates:
        for group, found in each.groups.items():
            name = name_of(group)
            sample[_of_group(HIT_KEYS, name)] += found.hit_keys
            sample[_of_group(_MISSED_KEYS, name)] += found.missed_keys
            sample[_of_group(_EVICTED, name)] += found.evicted_bytes
            sample[_of_group(REFUSED, name)] += found.refused_writes


def _add_used(
    sample: defaultdict[Series, float], used_bytes: Mapping[str, Mapping[str, int]], name_of: Callable[[str], str]
) -> None:
    for group, tiers in used_bytes.items():
        for tier, size in tiers.items():
            sample[_of_group(USED, name_of(group), ("tier", tier))] += size


# A part of the history as reported: merged to fewer values, with hit ratios.

_HIT_RATIO: Final = "hit_ratio"
_LOOKUP_KEYS: Final = "lookup_keys_per_second"
_RESULTS: Final = {HIT_KEYS: "hit", _MISSED_KEYS: "miss"}
_UNITS: Final = {
    REQUESTS: "requests/s",
    ERRORS: "requests/s",
    P50: "seconds",
    P99: "seconds",
    USED: "bytes",
    QUOTA: "bytes",
    _EVICTED: "bytes/s",
    REFUSED: "writes/s",
    _HIT_RATIO: "ratio",
    _LOOKUP_KEYS: "keys/s",
}


class RangeSeries(NamedTuple):
    """One series of a span.

    Attributes:
        name: of the measure.
        labels: names and values.
        unit: of the values.
        values: the oldest first; None where unknown.
    """

    name: str
    labels: Mapping[str, str]
    unit: str
    values: list[float | None]


@dataclass(frozen=True, slots=True)
class HistoryRange:
    """A part of the history.

    Attributes:
        interval_seconds: from one value to the next.
        until: unix seconds at the end of the last value's interval.
        series: those that are known, ordered by name and labels.
    """

    interval_seconds: int
    until: float
    series: tuple[RangeSeries, ...]


def _range_series(known: Mapping[Series, Floats], step: int, *, has_total: bool) -> tuple[RangeSeries, ...]:
    """Return series as reported.

    Args:
        known: of every series the same number of slots, a multiple of `step`.
        step: slots that become one value: the mean of the known ones, of the 99th percentile the most.
        has_total: whether to add the hit ratio of all of them.
    """
    with np.errstate(divide="ignore", invalid="ignore"):  # a mean of nothing is not known; of this thread alone
        merged = {series: _merged(series, values.reshape(-1, step)) for series, values in known.items()}
        ratios = dict(_ratios(merged, has_total=has_total))
    found = {_public_series(series): values for series, values in merged.items()} | ratios
    return tuple(
        RangeSeries(name, dict(labels), _UNITS[name], _listed(found[Series(name, labels)]))
        for name, labels in sorted(found)
    )


def _merged(series: Series, values: Floats) -> Floats:
    merged: Floats
    if series.name == P99:
        merged = np.fmax.reduce(values, axis=1)
    else:
        merged = np.nansum(values, axis=1) / np.count_nonzero(~np.isnan(values), axis=1).astype(np.float32)
    return merged


def _ratios(merged: Mapping[Series, Floats], *, has_total: bool) -> Iterator[tuple[Series, Floats]]:
    hits = {series.labels: values for series, values in merged.items() if series.name == HIT_KEYS}
    missed = {series.labels: values for series, values in merged.items() if series.name == _MISSED_KEYS}
    for labels, values in hits.items():
        yield Series(_HIT_RATIO, labels), values / (values + missed[labels])
    if hits and has_total:
        all_hits, all_missed = np.nansum([*hits.values()], axis=0), np.nansum([*missed.values()], axis=0)
        yield Series(_HIT_RATIO), all_hits / (all_hits + all_missed)


def _public_series(series: Series) -> Series:
    """Return what a series is called outside."""
    result = _RESULTS.get(series.name)
    return series if result is None else Series(_LOOKUP_KEYS, (*series.labels, ("result", result)))


def _listed(values: Floats) -> list[float | None]:
    """Return plain numbers of six digits, as many as these floats have."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values.tolist()]


# What the deployment did and held, over the last day: two rings of samples, a fine one and a coarse one.
#
# Bounds: 2,160 slots of 4 bytes per series, and as many groups as `_MOST_GROUPS`; the others are summed up. That is
#   some
# 80 KiB per group, and 5 MiB at most.

_MAX_GROUPS: Final = 64
_MAX_POINTS: Final = 360
_FINE: Final = (10, 720)  # seconds of a slot, and slots: two hours
_COARSE: Final = (60, 1440)  # a day
LONGEST_SECONDS: Final = _COARSE[0] * _COARSE[1]


class _Resolution:
    """Samples at one interval; rates are over that interval exactly."""

    def __init__(self, interval_seconds: int, size: int, since: float) -> None:
        self.interval_seconds = interval_seconds
        self.ring = Ring(size)
        self.rates: Mapping[str, Rates] = {}
        self._names = BoundedLabels(_MAX_GROUPS)
        self._before: Mapping[str, Vitals] = {}
        self._since = since

    def add(self, now: float, vitals: Mapping[str, Vitals], quotas: Mapping[str, int]) -> None:
        slot = int(now // self.interval_seconds)
        if slot <= self.ring.latest:
            return
        found = {name: rates_between(self._before.get(name), each, self._since) for name, each in vitals.items()}
        self.rates = {name: rates for name, rates in found.items() if rates is not None}
        self._names.retain({value for series in self.ring for label, value in series.labels if label == "group"})
        self.ring.append(slot, sample_of([*self.rates.values()], vitals.values(), quotas, self._names.label))
        self._before, self._since = dict(vitals), now


class History:
    """Samples of the deployment.

    Args:
        since: unix seconds when this manager started; others that start later are complete from their start.
    """

    def __init__(self, since: float) -> None:
        self._levels = tuple(_Resolution(seconds, size, since) for seconds, size in (_FINE, _COARSE))

    def add(self, now: float, vitals: Mapping[str, Vitals], quotas: Mapping[str, int]) -> None:
        """Keep how managers are, if it is time for another sample.

        Args:
            now: unix seconds.
            vitals: of every manager that lives, by node id.
            quotas: bytes by group.
        """
        for level in self._levels:
            level.add(now, vitals, quotas)

    @property
    def rates(self) -> Mapping[str, Rates]:
        """Rates of the managers by node id, over the last interval; those of which none are known are missing."""
        return self._levels[0].rates

    async def range(
        self, now: float, seconds: int, group: str = "", groups: Collection[str] | None = None
    ) -> HistoryRange:
        """Return the last seconds, in 360 values at most. A thread merges large parts.

        Args:
            now: unix seconds.
            seconds: how many, up to `LONGEST_SECONDS`.
            group: only its series; empty for all.
            groups: only their series; None for all.
        """
        fine, coarse = self._levels
        level = fine if seconds <= fine.interval_seconds * fine.ring.size else coarse
        count = max(1, seconds // level.interval_seconds)
        step = -(-count // _MAX_POINTS)
        points = count // step
        until = max(level.ring.latest, int(now // level.interval_seconds) - 1)
        known = level.ring.read(until, points * step)
        wanted = {series: values for series, values in known.items() if _is_wanted(series, group, groups)}
        series = await asyncio.to_thread(_range_series, wanted, step, has_total=not group and groups is None)
        return HistoryRange(level.interval_seconds * step, float(until * level.interval_seconds), series)


def _is_wanted(series: Series, group: str, groups: Collection[str] | None) -> bool:
    name = dict(series.labels).get("group")
    if group and name != group:
        return False
    return groups is None or name in groups
