"""Charts: each is drawn for wide and for narrow screens, as SVG whose text is text and whose colours are the page's.

A drawing that is merely scaled down has letters that nobody can read on a telephone. What is drawn is the same for the
same figures, byte for byte: reports can be compared.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from kvcm.optimizer.report.markup import Markup, joined, table, tag
from kvcm.optimizer.report.palette import FAINT, INK, MUTED, PAPER, as_variables

__all__ = ["Chart", "Pane", "Table", "figure"]

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
        description: what is to be seen, for those who do not see it, and as its caption.
        draw: draws it.
        table: the same in figures.
        panels: beside each other where there is room, below each other where not.
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
