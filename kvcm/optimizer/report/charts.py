"""Charts: each is drawn for wide and for narrow screens, as SVG whose text is text and whose colours are the page's.

A drawing that is merely scaled down has unreadable letters on a telephone. The drawing is the same for the
same figures, byte for byte: reports can be compared.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import XAxis, YAxis
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from kvcm.optimizer.report import html
from kvcm.optimizer.report.html import FAINT, INK, MUTED, PAPER, Markup, as_variables, joined, table, tag
from kvcm.optimizer.trace import Int64Column

__all__ = [
    "Chart",
    "Pane",
    "Table",
    "capacity_axis",
    "duration_axis",
    "figure",
    "geometric_places",
    "log_axis",
    "money_ticks",
    "share_axis",
    "time_axis",
]

WIDE, NARROW = 760, 350
"""Pixels; a point of the drawing is one."""
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 12.0,
    "axes.titlesize": 12.0,
    "axes.labelsize": 12.0,
    "xtick.labelsize": 11.5,
    "ytick.labelsize": 11.5,
    "legend.fontsize": 11.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "grid.color": FAINT,
    "grid.linewidth": 0.8,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.facecolor": "none",
    "legend.frameon": False,
    "lines.linewidth": 2.0,
    "hatch.color": PAPER,
}
_LONG_LABEL = 22  # letters, of which two do not fit beside each other on a narrow screen
_NO_METADATA = {"Date": None, "Creator": None}
_REFERENCES = re.compile(r'(?:href="#|url\(#)([^")]+)')
_IDS = re.compile(r' id="([^"]+)"')


@dataclass(frozen=True, slots=True)
class Table:
    """What a chart shows, in figures.

    Attributes:
        columns: their names, with units.
        rows: texts; the first of each names it.
    """

    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Pane:
    """Where a chart draws.

    Attributes:
        axes: one for each panel.
        is_narrow: whether it is for a narrow screen: fewer ticks, legends in fewer columns.
    """

    figure: Figure
    axes: tuple[Axes, ...]
    is_narrow: bool

    def legend(self, axes: Axes | None = None, *, columns: int = 4) -> None:
        """Put the legend below everything."""
        handles, labels = (axes or self.axes[0]).get_legend_handles_labels()
        if self.is_narrow:
            columns = 2 if max(map(len, labels), default=0) <= _LONG_LABEL else 1
        self.figure.legend(handles, labels, loc="outside lower center", ncols=columns)


@dataclass(frozen=True, slots=True)
class Chart:
    """A drawing with its words.

    Attributes:
        key: unique on the page; names the element.
        title: what it shows.
        description: of the chart, for screen readers and as its caption.
        draw: draws it.
        table: the same in figures.
        panels: beside each other on a wide screen, below each other where not.
        height: of a panel, in pixels.
    """

    key: str
    title: str
    description: str
    draw: Callable[[Pane], None]
    table: Table
    panels: int = 1
    height: int = 340


def figure(chart: Chart) -> Markup:
    """Return a chart as part of a page."""
    caption = tag("figcaption", tag("strong", chart.title), " ", tag("span", chart.description))
    figures = tag("details", tag("summary", "Figures"), table(chart.table.columns, chart.table.rows))
    return tag("figure", caption, _drawn(chart, WIDE), _drawn(chart, NARROW), figures, id=chart.key)


def _drawn(chart: Chart, width: int) -> Markup:
    kind = "narrow" if width == NARROW else "wide"
    rows, columns = (chart.panels, 1) if width == NARROW else (1, chart.panels)
    key = f"{chart.key}-{kind}"
    with mpl.rc_context({**_STYLE, "svg.hashsalt": key}):
        drawing = Figure(figsize=(width / 72, chart.height * rows / 72), layout="constrained")
        drawing.patch.set_visible(False)
        engine = drawing.get_layout_engine()
        assert isinstance(engine, ConstrainedLayoutEngine)
        engine.set(wspace=0.06, hspace=0.06)
        axes = drawing.subplots(rows, columns, squeeze=False)
        chart.draw(Pane(drawing, tuple(axes.flat), width == NARROW))
        written = io.StringIO()
        # Figure.savefig draws once more only to lay out, which drawing does anyway.
        FigureCanvasSVG(drawing).print_svg(written, metadata=_NO_METADATA)  # type: ignore[no-untyped-call]
    return tag("div", _embedded(written.getvalue(), key, chart), class_=kind)


def _embedded(svg: str, key: str, chart: Chart) -> Markup:
    """Return a drawing without what a file of its own needs, and with names for readers of screens."""
    body = re.sub(r"<metadata>.*?</metadata>\s*", "", svg[svg.index("<svg") :], count=1, flags=re.DOTALL)
    body = re.sub(r"\s*<!--.*?-->\s*", "\n", body, flags=re.DOTALL)
    needed = set(_REFERENCES.findall(body))
    body = _IDS.sub(lambda found: found[0] if found[1] in needed else "", body)
    names = joined(tag("title", chart.title, id=f"{key}-t"), tag("desc", chart.description, id=f"{key}-d"))
    start = body.index(">") + 1
    box = re.search(r'viewBox="([^"]+)"', body[:start])
    head = f'<svg viewBox="{box[1] if box else ""}" role="img" aria-labelledby="{key}-t {key}-d">'
    return Markup(head + names + as_variables(re.sub(r">\s+<", "><", body[start:])))


# Axes of charts: capacities in blocks and bytes, times, shares.

_FEW, _MANY = 4, 8


def capacity_axis(axes: Axes, bytes_per_block: float, *, is_narrow: bool, name: str = "capacity") -> None:
    """Make x capacities in blocks, logarithmic, with bytes above.

    Args:
        bytes_per_block: of KV; 0 where it is not known, then there is no axis above.
    """
    low, high = axes.get_xlim()
    axes.set_xscale("log")
    axes.set_xlim(max(low, 1), high)
    _log_ticks(axes, html.short, is_narrow=is_narrow)
    axes.set_xlabel(f"{name} (blocks)")
    if bytes_per_block:
        low, high = axes.get_xlim()
        above = axes.twiny()
        above.grid(visible=False)
        above.spines["top"].set_visible(True)
        above.set_xscale("log")
        above.set_xlim(low * bytes_per_block, high * bytes_per_block)
        ticks = _powers(
            low=low * bytes_per_block, high=high * bytes_per_block, base=1024.0, most=_FEW if is_narrow else _MANY
        )
        above.xaxis.set_major_locator(FixedLocator(ticks))
        above.xaxis.set_major_formatter(FuncFormatter(lambda value, _: html.size(value)))
        above.xaxis.set_minor_locator(NullLocator())


def log_axis(axes: Axes, label: str, *, is_narrow: bool) -> None:
    """Make x a logarithmic count."""
    axes.set_xscale("log")
    _log_ticks(axes, html.short, is_narrow=is_narrow)
    axes.set_xlabel(label)


def duration_axis(axes: Axes, label: str, *, is_narrow: bool) -> None:
    """Make x logarithmic times, at spans that people know."""
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    known = (1e-3, 1e-2, 0.1, 1, 10, 60, 600, 3600, 6 * 3600, 86400, 7 * 86400)
    ticks = [each for each in known if low <= each <= high]
    while len(ticks) > (_FEW if is_narrow else _MANY):
        ticks = ticks[::2]
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: html.duration(value)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(label)


def time_axis(axes: Axes, span_seconds: float, *, is_narrow: bool) -> None:
    """Make x the time since the trace began, which it is in seconds."""
    step, unit = next(((s, u) for s, u in ((3600.0, "h"), (60.0, "min")) if span_seconds >= 2 * s), (1.0, "s"))
    axes.set_xlim(0, max(span_seconds, 1.0))
    places = MaxNLocator(_FEW if is_narrow else _MANY, steps=[1, 2, 5, 10]).tick_values(
        0, max(span_seconds, 1.0) / step
    )
    axes.xaxis.set_major_locator(FixedLocator([place * step for place in places if place * step <= span_seconds]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / step:g}"))
    axes.set_xlabel(f"time since the first request ({unit})")


def share_axis(axes: Axes, label: str, most: float = 1.0) -> None:
    """Make y a share, from 0 on."""
    axes.set_ylim(0, most)
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))
    axes.set_ylabel(label)


def money_ticks(axis: XAxis | YAxis, most: int) -> None:
    """Make the ticks of an axis round amounts of money."""
    axis.set_major_locator(MaxNLocator(most, steps=[1, 2, 5, 10]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: html.money(value, 0 if value == round(value) else 2)))


def geometric_places(last: int, most: int = 160) -> Int64Column:
    """Return whole numbers from 1 to `last`, evenly spread on a logarithmic scale."""
    if last < 1:
        return np.zeros(0, np.int64)
    return np.unique(np.geomspace(1, last, most).round().astype(np.int64))


def _log_ticks(axes: Axes, shown: Callable[[float], str], *, is_narrow: bool) -> None:
    low, high = axes.get_xlim()
    axes.xaxis.set_major_locator(
        FixedLocator(_powers(low=low, high=high, base=10.0, most=_FEW if is_narrow else _MANY))
    )
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: shown(value)))
    axes.xaxis.set_minor_locator(NullLocator())


def _powers(low: float, high: float, base: float, most: int) -> Sequence[float]:
    """Return few round numbers between two: powers of the base, and steps between them where they fit."""
    steps = (1.0, 2.0, 5.0) if base == 10 else (1.0, 4.0, 16.0, 64.0, 256.0)
    span = range(math.floor(math.log(low, base)), math.ceil(math.log(high, base)) + 1)
    fine = [step * base**power for power in span for step in steps if low <= step * base**power <= high]
    coarse = [each for each in fine if math.isclose(power := math.log(each, base), round(power), abs_tol=1e-9)]
    ticks = fine if len(fine) <= most else coarse if base == 10 else fine[::2]
    while len(ticks) > most:
        ticks = ticks[::2]
    return ticks
