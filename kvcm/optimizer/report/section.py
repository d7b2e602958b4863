"""A part of a report: a heading, a sentence on what is to be learnt, charts and tables."""

from __future__ import annotations

from dataclasses import dataclass

from kvcm.optimizer.report.markup import Markup, joined, tag

__all__ = ["Section", "rendered"]


@dataclass(frozen=True, slots=True)
class Section:
    """Part of a report.

    Attributes:
        key: unique on the page.
        title: its heading.
        lead: what is to be learnt from it; text.
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
