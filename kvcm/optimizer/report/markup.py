"""HTML that cannot be forged: whatever is no markup yet is escaped.

Names of traces, instances and sessions are what clients chose, so nothing reaches a page but through `tag`.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

__all__ = ["Markup", "joined", "table", "tag"]

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
