"""The whole report: one file that needs nothing but a browser."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvcm.optimizer.report.document import document
from kvcm.optimizer.report.facts import facts, method
from kvcm.optimizer.report.first_tokens import first_tokens
from kvcm.optimizer.report.hit_rates import hit_rates
from kvcm.optimizer.report.locality import locality
from kvcm.optimizer.report.markup import Markup, joined, tag
from kvcm.optimizer.report.over_time import over_time
from kvcm.optimizer.report.pooling import pooling
from kvcm.optimizer.report.prefixes import prefixes
from kvcm.optimizer.report.section import Section, rendered
from kvcm.optimizer.report.sensitivity import sensitivity
from kvcm.optimizer.report.services import services
from kvcm.optimizer.report.summary import summary
from kvcm.optimizer.report.tiering import tiering
from kvcm.optimizer.report.value import value
from kvcm.optimizer.study import Progress, Study, services_of

__all__ = ["page"]

_TITLE = "What a cache is worth"

SECTIONS: dict[str, Callable[[Study, str], Section | None]] = {
    "rates": hit_rates,
    "value": value,
    "sensitivity": sensitivity,
    "ttft": first_tokens,
    "tiers": tiering,
    "pooling": pooling,
    "time": over_time,
    "locality": locality,
    "prefixes": prefixes,
    "trace": facts,
    "method": method,
}
"""Parts of a report, in their order; a part that has nothing to say is None."""


def page(studies: Sequence[Study], progress: Progress | None = None) -> str:
    """Return a report on one or more traces, as HTML.

    Args:
        studies: one for each trace.
        progress: told about the parts that are done.
    """
    names = ", ".join(study.name for study in studies)
    total = len(SECTIONS) * len(studies)
    parts = []
    for number, study in enumerate(studies):
        sections = []
        for place, (key, section) in enumerate(SECTIONS.items(), start=1):
            sections.append(section(study, f"t{number}-{key}"))
            if progress is not None:
                progress("report", number * len(SECTIONS) + place, total)
        parts.append(_part(study, [each for each in sections if each is not None], number))
    compared = _compared(studies)
    return document(f"{_TITLE}: {names}", _TITLE, compared, *parts)


def _compared(studies: Sequence[Study]) -> Markup:
    """Return the comparison of several services, nothing for a single one."""
    found = {study.name: study.recommendation.returns for study in studies if study.recommendation is not None}
    return rendered(services(services_of(found), "services")) if 1 < len(found) == len(studies) else Markup()


def _part(study: Study, sections: Sequence[Section], number: int) -> Markup:
    links = tag("ul", *(tag("li", tag("a", each.title, href=f"#{each.key}")) for each in sections))
    menu = tag("nav", links, aria_label=f"Parts of the report on {study.trace.name}")
    return tag(
        "article",
        tag("h2", study.name),
        _asked(study),
        summary(study, f"t{number}-summary"),
        menu,
        *(rendered(each) for each in sections),
        id=f"t{number}",
    )


def _asked(study: Study) -> Markup:
    trace = study.trace
    text = (
        f"{len(trace):,} requests with {trace.accesses:,} block accesses; deployment {study.options.deployment_name}, "
        f"mode {study.options.mode}."
    )
    return joined(tag("p", text, class_="muted"))
