"""How long requests wait for their first token, with and without a cache."""

from __future__ import annotations

import numpy as np

from kvcm.optimizer.report import amounts
from kvcm.optimizer.report.drawing import Chart, Pane, Table, figure
from kvcm.optimizer.report.palette import SERIES
from kvcm.optimizer.report.scales import duration_axis, share_axis
from kvcm.optimizer.report.section import Section
from kvcm.optimizer.roi import FirstTokens, Spread
from kvcm.optimizer.study import Study

__all__ = ["first_tokens"]

_DASHES = ("-", "--", "-.", ":")
_POINTS = 300


def first_tokens(study: Study, key: str) -> Section:
    """Return the section on times to the first token."""
    without, best = study.first_tokens[0], study.first_tokens[min(1, len(study.first_tokens) - 1)]
    nodes = without.queued.nodes
    chart = Chart(
        f"{key}-spread",
        "Time to the first token",
        f"On {nodes} {'node' if nodes == 1 else 'nodes'}, as many as are needed without a cache; requests wait "
        "for each "
        f"other. Half of them have their first token within {amounts.duration(without.queued.spread.p50)} without "
        "a cache "
        f"and {amounts.duration(best.queued.spread.p50)} with the recommended one; 95 % within "
        f"{amounts.duration(without.queued.spread.p95)} and {amounts.duration(best.queued.spread.p95)}.",
        lambda pane: _draw(study, pane),
        _table(study.first_tokens),
        height=320,
    )
    return Section(
        key,
        "Time to the first token",
        "A hit is loaded instead of computed. Hits are those of the replay: that shorter waits change the order "
        "of requests "
        "is left out.",
        (figure(chart),),
    )


def _name(each: FirstTokens) -> str:
    return f"{each.policy}, {amounts.short(each.capacity_blocks)} blocks" if each.capacity_blocks else "no cache"


def _draw(study: Study, pane: Pane) -> None:
    (axes,) = pane.axes
    for number, each in enumerate(study.first_tokens):
        seconds = np.maximum(np.sort(each.queued.seconds), 1e-4)
        places = np.unique(np.linspace(0, len(seconds) - 1, _POINTS).astype(np.int64))
        color, dashes = SERIES[(2, 0, 1, 3)[number % 4]], _DASHES[number % 4]
        axes.plot(seconds[places], (places + 1) / len(seconds), dashes, color=color, label=_name(each))
    share_axis(axes, "share of requests", 1.02)
    duration_axis(axes, "time to the first token", is_narrow=pane.is_narrow)
    pane.legend(columns=3)


def _table(found: tuple[FirstTokens, ...]) -> Table:
    columns = ("", "mean", "50 %", "90 %", "95 %", "99 %", "GPUs busy", "links busy")
    rows = []
    for each in found:
        busy = (amounts.percent(each.queued.prefill_busy), amounts.percent(each.queued.link_busy))
        rows.append((_name(each), *_times(each.queued.spread), *busy))
        rows.append((f"{_name(each)}, without waiting for others", *_times(each.unqueued), "", ""))
    return Table(columns, rows)


def _times(spread: Spread) -> tuple[str, ...]:
    return tuple(amounts.duration(each) for each in (spread.mean, spread.p50, spread.p90, spread.p95, spread.p99))
