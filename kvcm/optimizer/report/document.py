"""A page as one file that needs nothing but a browser."""

from __future__ import annotations

from importlib.resources import files

from kvcm.optimizer.report.markup import Markup, tag
from kvcm.optimizer.report.palette import style_sheet

__all__ = ["document"]


def document(title: str, heading: str, *parts: Markup) -> str:
    """Return a whole page.

    Args:
        title: of the window.
        heading: above everything.
        parts: below that.
    """
    style = files(__package__).joinpath("report.css").read_text("utf-8") + style_sheet()
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", title),
        tag("style", Markup(style)),
    )
    body = tag("body", tag("header", tag("h1", heading)), tag("main", *parts))
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"
