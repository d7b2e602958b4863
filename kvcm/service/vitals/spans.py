"""A part of the history as it is told: merged to fewer values, hit ratios worked out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from kvcm.service.vitals import samples
from kvcm.service.vitals.ring import Floats, Series

__all__ = ["HistorySpan", "SpanSeries", "told"]

_HIT_RATIO: Final = "hit_ratio"
_LOOKUP_KEYS: Final = "lookup_keys_per_second"
_RESULTS: Final = {samples.HIT_KEYS: "hit", samples.MISSED_KEYS: "miss"}
_UNITS: Final = {
    samples.REQUESTS: "requests/s",
    samples.ERRORS: "requests/s",
    samples.P50: "seconds",
    samples.P99: "seconds",
    samples.USED: "bytes",
    samples.QUOTA: "bytes",
    samples.EVICTED: "bytes/s",
    samples.REFUSED: "writes/s",
    _HIT_RATIO: "ratio",
    _LOOKUP_KEYS: "keys/s",
}


class SpanSeries(NamedTuple):
    """One series of a span.

    Attributes:
        name: of the measure.
        labels: names and values.
        unit: of the values.
        values: the oldest first; None where nothing is known.
    """

    name: str
    labels: Mapping[str, str]
    unit: str
    values: list[float | None]


@dataclass(frozen=True, slots=True)
class HistorySpan:
    """A part of the history.

    Attributes:
        interval_seconds: from one value to the next.
        until: unix seconds at the end of the last value's interval.
        series: those that are known, ordered by name and labels.
    """

    interval_seconds: int
    until: float
    series: tuple[SpanSeries, ...]


def told(known: Mapping[Series, Floats], step: int, *, has_total: bool) -> tuple[SpanSeries, ...]:
    """Return series as they are told.

    Args:
        known: of every series the same number of slots, a multiple of `step`.
        step: slots that become one value: the mean of what is known, of the 99th percentile the most.
        has_total: whether the hit ratio of all of them is told, too.
    """
    with np.errstate(divide="ignore", invalid="ignore"):  # a mean of nothing is not known; of this thread alone
        merged = {series: _merged(series, values.reshape(-1, step)) for series, values in known.items()}
        ratios = dict(_ratios(merged, has_total=has_total))
    found = {_shown(series): values for series, values in merged.items()} | ratios
    return tuple(
        SpanSeries(name, dict(labels), _UNITS[name], _listed(found[Series(name, labels)]))
        for name, labels in sorted(found)
    )


def _merged(series: Series, values: Floats) -> Floats:
    merged: Floats
    if series.name == samples.P99:
        merged = np.fmax.reduce(values, axis=1)
    else:
        merged = np.nansum(values, axis=1) / np.count_nonzero(~np.isnan(values), axis=1).astype(np.float32)
    return merged


def _ratios(merged: Mapping[Series, Floats], *, has_total: bool) -> Iterator[tuple[Series, Floats]]:
    hits = {series.labels: values for series, values in merged.items() if series.name == samples.HIT_KEYS}
    missed = {series.labels: values for series, values in merged.items() if series.name == samples.MISSED_KEYS}
    for labels, values in hits.items():
        yield Series(_HIT_RATIO, labels), values / (values + missed[labels])
    if hits and has_total:
        all_hits, all_missed = np.nansum([*hits.values()], axis=0), np.nansum([*missed.values()], axis=0)
        yield Series(_HIT_RATIO), all_hits / (all_hits + all_missed)


def _shown(series: Series) -> Series:
    """Return what a series is called outside."""
    result = _RESULTS.get(series.name)
    return series if result is None else Series(_LOOKUP_KEYS, (*series.labels, ("result", result)))


def _listed(values: Floats) -> list[float | None]:
    """Return plain numbers of six digits, as many as these floats have."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values.tolist()]
