"""Hit rates and resident blocks over the time of a trace."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvcm.optimizer.locality.distribution import FloatColumn
from kvcm.optimizer.report import amounts
from kvcm.optimizer.report.drawing import Chart, Pane, Table, figure
from kvcm.optimizer.report.palette import MUTED, SERIES
from kvcm.optimizer.report.scales import share_axis, time_axis
from kvcm.optimizer.report.section import Section
from kvcm.optimizer.results import Replay
from kvcm.optimizer.study import Study
from kvcm.optimizer.trace import Int64Column, Trace

__all__ = ["over_time"]

_WINDOWS = 60
_DASHES = ("-", "--", "-.", ":")


@dataclass(frozen=True, slots=True, eq=False)
class _Series:
    """One replay over W windows of equal length.

    Attributes:
        name: for people.
        rates: [W] blocks hit per block read; NaN where nothing was read.
        resident: [W] blocks in the cache at the end of each, as a share of its capacity.
    """

    name: str
    rates: FloatColumn
    resident: FloatColumn


def over_time(study: Study, key: str) -> Section:
    """Return the section on how hit rates come about over time."""
    starts, series = _windows(study.trace), [_series(study.trace, replay) for replay in study.over_time]
    fills = [_filled(study.trace, replay) for replay in study.over_time]
    told = " ".join(
        f"{each.name}: {'full after ' + amounts.duration(fill) if fill is not None else 'never full'}."
        for each, fill in zip(series, fills, strict=True)
    )
    chart = Chart(
        f"{key}-rates",
        "Hit rate and filling over time",
        f"Blocks hit in {_WINDOWS} windows of {amounts.duration(study.trace.span_seconds / _WINDOWS)} each, and how "
        f"much of the cache is used. {told}",
        lambda pane: _draw(study, series, starts, pane),
        _table(series, starts),
        panels=2,
        height=320,
    )
    return Section(
        key,
        "Over time",
        "A cache that is not full yet says little about eviction, and the first requests find nothing whatever its "
        "size: no warm-up is left out of the rates in this report.",
        (figure(chart),),
    )


def _windows(trace: Trace) -> FloatColumn:
    return np.arange(_WINDOWS) * max(trace.span_seconds, 1e-6) / _WINDOWS


def _window_of(trace: Trace) -> Int64Column:
    since = (trace.times_us - trace.times_us[0]) / 1e6
    windows: Int64Column = (since / max(trace.span_seconds, 1e-6) * _WINDOWS).astype(np.int64)
    return np.minimum(windows, _WINDOWS - 1)


def _series(trace: Trace, replay: Replay) -> _Series:
    assert replay.request_hits is not None
    assert replay.request_resident is not None
    window = _window_of(trace)
    hits = np.bincount(window, replay.request_hits, _WINDOWS)
    reads = np.bincount(window, trace.read_blocks, _WINDOWS)
    rates = np.divide(hits, reads, out=np.full(_WINDOWS, np.nan), where=reads > 0)
    last = np.maximum(np.searchsorted(window, np.arange(_WINDOWS), side="right") - 1, 0)
    resident = replay.request_resident[last] / replay.capacity_blocks
    return _Series(f"{replay.policy}, {amounts.short(replay.capacity_blocks)} blocks", rates, resident)


def _filled(trace: Trace, replay: Replay) -> float | None:
    """Return when the cache was full, in seconds since the first request; None if it never was."""
    assert replay.request_resident is not None
    full = np.flatnonzero(replay.request_resident >= replay.capacity_blocks)
    return float(trace.times_us[full[0]] - trace.times_us[0]) / 1e6 if len(full) else None


def _draw(study: Study, series: list[_Series], starts: FloatColumn, pane: Pane) -> None:
    left, right = pane.axes
    for number, each in enumerate(series):
        color, dashes = SERIES[number % len(SERIES)], _DASHES[number % len(_DASHES)]
        left.plot(starts, each.rates, dashes, color=color, label=each.name, linewidth=1.6)
        right.plot(starts, each.resident, dashes, color=color, linewidth=1.6)
    right.axhline(1.0, color=MUTED, linewidth=1)
    share_axis(left, "blocks hit")
    share_axis(right, "cache in use", 1.1)
    for axes in pane.axes:
        time_axis(axes, study.trace.span_seconds, is_narrow=True)
    pane.legend(left, columns=3)


def _table(series: list[_Series], starts: FloatColumn) -> Table:
    columns = ("from", *(f"{each.name}: {what}" for each in series for what in ("hit", "in use")))
    every = range(0, _WINDOWS, 5)
    rows = [
        (amounts.duration(starts[at]), *(_shown(value[at]) for each in series for value in (each.rates, each.resident)))
        for at in every
    ]
    return Table(columns, rows)


def _shown(share: float) -> str:
    return "" if np.isnan(share) else amounts.percent(share)
