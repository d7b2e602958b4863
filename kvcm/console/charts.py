"""Charts as SVG, drawn on the server: lines over time, with their figures in a table behind them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Final, NamedTuple

from markupsafe import Markup, escape

__all__ = ["chart", "sparkline"]

_WIDTH: Final = 640
_HEIGHT: Final = 180
_CHARACTER: Final = 10  # width of one in a label, which is larger on small screens
_BOTTOM: Final = 24
_TOP: Final = 10
_COLOURS: Final = 6  # that the style sheet has
_MAX_ROWS: Final = 30
_NOTHING: Final = 1e-12  # less than this is drawn as 0
Values = Sequence[float | None]
Line = tuple[str, Values]
"""Its name, and a value for each moment, None for unknown."""


def sparkline(values: Values, label: str) -> Markup:
    """Return a small line without axes.

    Args:
        values: for each moment.
        label: its subject, for screen readers.
    """
    top = max((value for value in values if value is not None), default=0.0) or 1.0
    paths = _paths(values, top, _Area(left=0, top=2, width=120, height=28))
    return Markup(
        '<svg class="spark" viewBox="0 0 120 32" role="img" preserveAspectRatio="none"><title>{}</title>{}</svg>'
    ).format(label, Markup("").join(Markup('<path class="line c0" d="{}"/>').format(path) for path in paths))


def chart(
    title: str,
    lines: Sequence[Line],
    until_ms: float,
    interval_seconds: float,
    shown: Callable[[float], str],
    base: int = 1000,
) -> Markup:
    """Return a chart of lines over time.

    Args:
        title: its subject, with the unit.
        lines: at most six; those with values have the same length.
        until_ms: Unix milliseconds of the last value.
        interval_seconds: between values.
        shown: formats a value.
        base: 1024 for values in KiB and MiB.
    """
    known = [value for _, values in lines for value in values if value is not None]
    if len(known) < 2:
        return Markup(
            '<figure class="chart"><figcaption>{}</figcaption><p class="empty">Nothing was measured yet.</p></figure>'
        ).format(title)
    ticks = _ticks(max(known), base)
    left = 14 + _CHARACTER * max(len(shown(tick)) for tick in ticks)
    count = max(len(values) for _, values in lines)
    lines = [(name, values or (None,) * count) for name, values in lines]
    moments = [until_ms - (count - 1 - place) * interval_seconds * 1000 for place in range(count)]
    drawn = [_axes(ticks, moments, shown, left)]
    area = _Area(left=left, top=_TOP, width=_WIDTH - left - 8, height=_HEIGHT - _TOP - _BOTTOM)
    for number, (name, values) in enumerate(lines):
        paths = _paths(values, ticks[-1], area)
        drawn += [
            Markup('<path class="line c{}" d="{}"><title>{}</title></path>').format(number % _COLOURS, path, name)
            for path in paths
        ]
    return Markup(
        '<figure class="chart"><figcaption>{}{}</figcaption>'
        '<svg viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>{}</figure>'
    ).format(
        title, _legend(lines, shown), _WIDTH, _HEIGHT, title, Markup("").join(drawn), _table(lines, moments, shown)
    )


def _legend(lines: Sequence[Line], shown: Callable[[float], str]) -> Markup:
    entries = [
        Markup('<li><span class="key c{}"></span>{} <b>{}</b></li>').format(
            number % _COLOURS, name, shown(values[-1]) if values and values[-1] is not None else "–"
        )
        for number, (name, values) in enumerate(lines)
    ]
    return Markup('<ul class="legend">{}</ul>').format(Markup("").join(entries))


def _table(lines: Sequence[Line], moments: Sequence[float], shown: Callable[[float], str]) -> Markup:
    """Return the figures; of many moments, a sample."""
    step = max(1, math.ceil(len(moments) / _MAX_ROWS))
    head = Markup("").join(Markup('<th scope="col">{}</th>').format(name) for name, _ in lines)
    rows = [
        Markup('<tr><th scope="row">{}</th>{}</tr>').format(
            _clock(moments[place]),
            Markup("").join(
                Markup("<td>{}</td>").format("–" if (value := values[place]) is None else shown(value))
                for _, values in lines
            ),
        )
        for place in range(len(moments) - 1, -1, -step)
    ]
    return Markup(
        '<details class="figures"><summary>Figures</summary><div class="table" tabindex="0"><table>'
        '<thead><tr><th scope="col">UTC</th>{}'
        "</tr></thead><tbody>{}</tbody></table></div></details>"
    ).format(head, Markup("").join(rows))


def _axes(ticks: Sequence[float], moments: Sequence[float], shown: Callable[[float], str], left: float) -> Markup:
    height, drawn = _HEIGHT - _TOP - _BOTTOM, []
    for tick in ticks:
        y = _TOP + height * (1 - tick / ticks[-1])
        drawn.append(
            Markup('<path class="grid" d="M{} {:.1f}H{}"/><text class="tick y" x="{}" y="{:.1f}">{}</text>').format(
                left, y, _WIDTH - 8, left - 6, y + 4, shown(tick)
            )
        )
    for place, anchor in ((0, "start"), (len(moments) // 2, "middle"), (len(moments) - 1, "end")):
        x = left + (_WIDTH - left - 8) * place / max(1, len(moments) - 1)
        drawn.append(
            Markup('<text class="tick" text-anchor="{}" x="{:.1f}" y="{}">{}</text>').format(
                anchor, x, _HEIGHT - 6, _clock(moments[place])
            )
        )
    return Markup("").join(drawn)


def _ticks(most: float, base: int) -> list[float]:
    """Return round values from 0 to the first that is not below the largest."""
    if most < _NOTHING:
        return [0.0, 1.0]
    if base != 1000 and most * 1.01 >= base:
        unit = float(base ** int(math.log(most * 1.01, base)))  # figures of six digits may lie just below
        return [tick * unit for tick in _ticks(most / unit, 1000)]
    raw = most / 4
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    return [step * number for number in range(math.ceil(most / step * 0.999) + 1)]


class _Area(NamedTuple):
    """The part of a drawing that a line fills."""

    left: float
    top: float
    width: float
    height: float


def _paths(values: Values, most: float, area: _Area) -> list[str]:
    """Return the paths of a line from 0 to `most`: one for each stretch without a gap."""
    paths: list[list[str]] = [[]]
    for place, value in enumerate(values):
        if value is None:
            paths.append([])
            continue
        x = area.left + area.width * place / max(1, len(values) - 1)
        y = area.top + area.height * (1 - value / most)
        paths[-1].append(f"{x:.1f} {y:.1f}")
    return [f"M{' L'.join(points)}{'h0.1' if len(points) == 1 else ''}" for points in paths if points]


def _clock(at_ms: float) -> str:
    return str(escape(datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%H:%M:%S")))
