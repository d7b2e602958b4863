"""HTML that cannot be forged: whatever is no markup yet is escaped.

Names of traces, instances and sessions are what clients chose, so nothing reaches a page but through `tag`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files

__all__ = [
    "FAINT",
    "INK",
    "MUTED",
    "PAPER",
    "SERIES",
    "Markup",
    "Section",
    "as_variables",
    "count",
    "document",
    "duration",
    "joined",
    "money",
    "percent",
    "policy_style",
    "rate",
    "rendered",
    "short",
    "size",
    "table",
    "tag",
]

_VOID = {"meta", "col", "br"}


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def tag(name: str, /, *children: str, **attributes: str) -> Markup:
    """Return an element.

    Args:
        name: of the element.
        children: `Markup`, or text that is escaped.
        attributes: a trailing underscore is dropped (`class_`), others become hyphens (`aria_label`).
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(value, quote=True)}"' for key, value in attributes.items()
    )
    return Markup(f"<{name}{written}>" if name in _VOID else f"<{name}{written}>{joined(*children)}</{name}>")


def joined(*children: str) -> Markup:
    """Return several pieces as one."""
    return Markup("".join(each if isinstance(each, Markup) else escape(each, quote=True) for each in children))


def table(columns: tuple[str, ...], rows: Sequence[tuple[str, ...]], *, caption: str = "") -> Markup:
    """Return a table whose first column names the rows."""
    titles = tag("thead", tag("tr", *(tag("th", each, scope="col") for each in columns)))
    head = titles if any(columns) else Markup()
    body = tag("tbody", *(_row(row) for row in rows))
    name = tag("p", caption, class_="caption") if caption else Markup()
    label = caption or "Figures"
    return joined(
        name, tag("div", tag("table", head, body), class_="scroll", tabindex="0", role="group", aria_label=label)
    )


def _row(row: tuple[str, ...]) -> Markup:
    first, *others = row
    return tag("tr", tag("th", first, scope="row"), *(tag("td", each) for each in others))


# Colours of charts, each a variable of the page's style sheet: light, dark and print have their own values.
#
# Those of policies are by Okabe and Ito, which people with any kind of colour blindness distinguish, darkened where
# thin lines need it; policies differ in dashes and markers too.

INK, MUTED, FAINT, PAPER = "#010203", "#010204", "#010205", "#010206"
"""What charts are drawn in: text and axes, secondary text, grids, background. Stand-ins, see `as_variables`."""
SERIES = tuple(f"#0103{number:02x}" for number in range(8))
"""Series of charts, as stand-ins."""
_LIGHT = ("#0072b2", "#00805d", "#c8500a", "#a8457f", "#9a6a00", "#2a8fc7", "#6b7280", "#8a5a44")
_DARK = ("#5cb2ec", "#3ec79b", "#ff8a4c", "#e58bbf", "#e3b341", "#8fd0f5", "#a3acb9", "#cfa08a")
_NAMES = {INK: "ink", MUTED: "muted", FAINT: "faint", PAPER: "paper"} | {
    color: f"series-{number}" for number, color in enumerate(SERIES)
}
_POLICIES = {
    "lru": (0, "-", "o"),
    "leaf_lru": (1, "-", "s"),
    "lfu": (2, "--", "^"),
    "fifo": (3, "-.", "v"),
    "sieve": (4, "--", "D"),
    "s3fifo": (5, "-", "P"),
    "ttl": (6, ":", "X"),
    "random_lru": (7, ":", "*"),
    "lfu_aging": (2, "-", "<"),
}
BOUND = "belady"


def policy_style(policy: str) -> tuple[str, str, str]:
    """Return the colour, dashes and marker of a policy's label, the same in every chart."""
    name = policy.split(":")[0]
    if name == BOUND:
        return INK, "--", ""
    number, dashes, marker = _POLICIES.get(name, (6, ":", "X"))
    return SERIES[number], dashes, marker


def as_variables(svg: str) -> str:
    """Return a drawing in which each stand-in is a variable of the style sheet."""
    for color, name in _NAMES.items():
        svg = svg.replace(color, f"var(--{name})")
    return svg


def _style_sheet() -> str:
    """Return the variables of series, light and dark."""
    return (
        f":root{{{_series(_LIGHT)}}}\n"
        f"@media screen and (prefers-color-scheme: dark){{:root{{{_series(_DARK)}}}}}\n"
    )  # fmt: skip


def _series(colors: Sequence[str]) -> str:
    return ";".join(f"--series-{number}:{color}" for number, color in enumerate(colors))


# A page as one file that needs nothing but a browser.


def document(title: str, heading: str, *parts: Markup) -> str:
    """Return a whole page.

    Args:
        title: of the window.
        heading: above everything.
        parts: below that.
    """
    style = files(__package__).joinpath("report.css").read_text("utf-8") + _style_sheet()
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", title),
        tag("style", Markup(style)),
    )
    body = tag("body", tag("header", tag("h1", heading)), tag("main", *parts))
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


# A part of a report: a heading, a sentence with the finding, charts and tables.


@dataclass(frozen=True, slots=True)
class Section:
    """Part of a report.

    Attributes:
        key: unique on the page.
        title: its heading.
        lead: the finding; text.
        parts: charts, tables, paragraphs.
    """

    key: str
    title: str
    lead: str
    parts: tuple[Markup, ...]


def rendered(section: Section) -> Markup:
    """Return a section as part of a page."""
    heading = joined(tag("h3", section.title), tag("p", section.lead))
    return tag("section", heading, *section.parts, id=section.key)


# Amounts as a report writes them: with units, and no more digits than they deserve.

_DURATION_UNITS = ((86_400.0, "d"), (3_600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"))


def count(value: float) -> str:
    """Return a whole number with commas."""
    return f"{value:,.0f}"


def percent(share: float, digits: int = 1) -> str:
    """Return a share: `36.6 %`."""
    return f"{100 * share:.{digits}f} %"


def short(value: float) -> str:
    """Return a number in three digits or so: `172 k`, `4.03 M`."""
    for power, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= power:
            return f"{_three(value / power)} {letter}"
    return _three(value)


def rate(value: float, unit: str) -> str:
    """Return a number per time or the like: `32.2 k tokens/s`."""
    text = short(value)
    return f"{text} {unit}"


def size(size_bytes: float) -> str:
    """Return bytes: `1.5 GiB`."""
    for power, unit in ((5, "PiB"), (4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if abs(size_bytes) >= 1024**power:
            return f"{_three(size_bytes / 1024**power)} {unit}"
    return f"{size_bytes:.0f} B"


def duration(seconds: float) -> str:
    """Return a time: `40 ms`, `1.5 h`."""
    if not math.isfinite(seconds) or not seconds:
        return "0 s" if not seconds else "never"
    span, unit = next(((span, unit) for span, unit in _DURATION_UNITS if seconds >= span), (1e-6, "µs"))
    value = seconds / span
    return f"{value:.0f} {unit}" if value >= 10 or value == int(value) else f"{value:.1f} {unit}"


def money(amount: float, digits: int = 0) -> str:
    """Return an amount of money, in whatever currency the prices are."""
    sign = "−" if round(amount, digits) < 0 else ""
    return f"{sign}${abs(amount):,.{digits}f}"


def _three(value: float) -> str:
    size = abs(value)
    digits = 0 if size >= 100 or value == int(value) else 1 if size >= 10 else 2
    return f"{value:,.{digits}f}"
