"""The whole report: one file that needs nothing but a browser."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kvcm.optimizer.report import html
from kvcm.optimizer.report.hit_rates import hit_rates, locality, over_time, prefixes
from kvcm.optimizer.report.html import Markup, Section, document, joined, rendered, table, tag
from kvcm.optimizer.report.tiering import pooling, tiering
from kvcm.optimizer.report.value import first_tokens, sensitivity, services, value
from kvcm.optimizer.study import BOUND, Progress, Recommendation, Study, services_of
from kvcm.optimizer.trace import Trace

__all__ = ["facts", "method", "page", "summary"]

# The trace and the method: facts, bad lines, how it was replayed.

_SHOWN_INSTANCES = 20


def facts(study: Study, key: str) -> Section:
    """Return the section on the trace."""
    trace = study.trace
    parts = [tag("div", table(("", ""), _rows(study), caption="Facts of the trace"), class_="facts")]
    if trace.bad_line_count:
        parts.append(_bad_lines(trace))
    return Section(key=key, title="The trace", lead="What was read, and what was left out.", parts=tuple(parts))


def _rows(study: Study) -> list[tuple[str, str]]:
    trace, totals, unlimited = study.trace, study.trace.totals, study.unlimited
    names = trace.instance_names
    more = f" and {len(names) - _SHOWN_INSTANCES} more" if len(names) > _SHOWN_INSTANCES else ""
    block = f"{trace.block_tokens} tokens" if trace.block_tokens else "differs between instances"
    if study.bytes_per_block:
        block += f", {html.size(study.bytes_per_block)} of KV in this deployment"
    everything = f" ({html.size(trace.unique_blocks * study.bytes_per_block)})" if study.bytes_per_block else ""
    return [
        ("name", trace.name),
        ("requests", f"{len(trace):,}, of which {totals.requests:,} read"),
        ("time span", html.duration(trace.span_seconds)),
        ("prompt tokens", f"{totals.tokens:,}"),
        ("block", block),
        ("block accesses", f"{trace.accesses:,}"),
        ("unique blocks", f"{trace.unique_blocks:,}{everything}"),
        ("instances", f"{len(names):,}: {', '.join(names[:_SHOWN_INSTANCES])}{more}"),
        (
            "hit rate of an unlimited cache",
            f"{html.percent(unlimited.block_hit_rate, 2)} of blocks, "
            f"{html.percent(unlimited.token_hit_rate, 2)} of tokens",
        ),
        ("every block has one parent", "yes" if trace.has_one_parent else "no"),
        ("bad lines left out", f"{trace.bad_line_count:,}"),
    ]


def _bad_lines(trace: Trace) -> Markup:
    rows = [(f"{bad.number:,}", bad.reason) for bad in trace.bad_lines]
    return tag(
        "details",
        tag("summary", f"{len(rows):,} of {trace.bad_line_count:,} bad lines"),
        tag("div", table(("line", "reason"), rows), class_="facts"),
    )


def _how_counted(curves: Sequence[str]) -> str:
    replayed = "replayed at the capacities in the tables"
    if not curves:
        return f"All policies are {replayed}."
    return (
        f"Exact at every capacity, from one pass over the trace: {', '.join(curves)}. Other policies are {replayed}, "
        "and so is one of lru, leaf_lru and belady that is not named here: one pass does not tell it on this trace, or "
        "takes too long."
    )


def method(study: Study, key: str) -> Section:
    """Return the section on how figures came about."""
    mode = (
        "Before each block that is inserted one is evicted when the cache is full (mode block)."
        if study.options.mode == "block"
        else "A whole request is read and written, then the cache evicts down to its capacity (mode request)."
        if study.options.mode == "request"
        else "As a manager evicts: while a request is written, the tail of a chain before its head (mode manager)."
    )
    notes = (
        "A request hits its leading resident blocks, up to the first that is missing; rates are blocks hit per block "
        "read, and tokens hit per token of the prompts. No warm-up is left out.",
        mode,
        _how_counted(tuple(study.curves)),
        "The bound (belady) evicts what is needed last, and does not take a block that would be it: no policy finds "
        "more prefix blocks in this order of requests.",
        "A trace is replayed as it was recorded: that hits make answers faster, so that users ask sooner, is left out.",
        "The running manager evicts in rounds between two marks below its quota, so it holds somewhat less than the "
        "capacity here.",
        "Money is in whatever currency the prices of the deployment are. The deployment's figures are inputs, not "
        "measurements; replace them with your own.",
    )
    return Section(
        key=key,
        title="Method",
        lead="How these figures came about, and what they leave out.",
        parts=(tag("ul", *(tag("li", joined(note)) for note in notes)),),
    )


# The answer in a few sentences: what to set, what it gives, and what to doubt.


def summary(study: Study, key: str) -> Markup:
    """Return the summary of one trace."""
    found = study.recommendation
    if found is None:
        answer, tiles = "Only the bound was asked for, which is no policy that can be set.", Markup()
    elif not found.pays:
        answer, tiles = _nothing(study, found), Markup()
    else:
        answer, tiles = _answer(study, found), _tiles(study, found)
    doubts = list(_doubts(study))
    listed = tag("ul", *(tag("li", doubt) for doubt in doubts)) if doubts else Markup()
    return tag("div", tag("p", answer), tiles, listed, class_="summary", id=key)


def _answer(study: Study, found: Recommendation) -> str:
    row = found.returns.row(found.place)
    best = found.returns.row(found.returns.best)
    text = (
        f"Take {found.policy} with {html.count(found.capacity_blocks)} blocks"
        f" ({html.size(found.capacity_blocks * study.bytes_per_block)}): it finds "
        f"{html.percent(row['hit_share'])} of the prompt tokens. That saves "
        f"{row['gpus_saved']:,.1f} GPUs, worth {html.money(row['net_per_hour'], 2)} per hour after the storage "
        "is paid."
    )
    if best["capacity_blocks"] > row["capacity_blocks"]:
        text += (
            f" The very best would be {html.count(best['capacity_blocks'])} blocks, for "
            f"{html.money(best['net_per_hour'] - row['net_per_hour'], 2)} per hour more."
        )
    return text


def _nothing(study: Study, found: Recommendation) -> str:
    where = (
        "nothing is used again" if not study.unlimited.hits.prefix_blocks else "the hits are worth less than they cost"
    )
    return f"No cache pays for itself on this trace in this deployment: {where}. {found.policy} was the least bad."


def _tiles(study: Study, found: Recommendation) -> Markup:
    row = found.returns.row(found.place)
    tiles = {
        "policy": found.policy,
        "capacity": html.size(found.capacity_blocks * study.bytes_per_block),
        "of prompt tokens found": html.percent(row["hit_share"]),
        "GPUs saved": f"{row['gpus_saved']:,.1f} of {found.returns.nodes_without * _gpus(study):,.1f}",
        "net value per hour": html.money(row["net_per_hour"], 2),
    }
    return tag("dl", *(tag("div", tag("dt", name), tag("dd", value)) for name, value in tiles.items()), class_="tiles")


def _gpus(study: Study) -> float:
    return study.options.deployment.gpus_per_node


def _doubts(study: Study) -> Iterator[str]:
    found = study.recommendation
    if found is not None and found.pays:
        yield from _doubts_of_setting(study, found)
    for sentence in study.trace.assumed:
        yield f"{sentence}."
    if study.trace.bad_line_count:
        yield f"{study.trace.bad_line_count:,} bad lines were left out."
    yield (
        "GPUs and money rest on the deployment's figures, which are assumptions until they are replaced by your own; "
        "what lies in the cache at other hours than the recorded ones is not known."
    )


def _doubts_of_setting(study: Study, found: Recommendation) -> Iterator[str]:
    capacity = found.capacity_blocks
    if BOUND in study.curves:
        # The bound is one of blocks: which tokens a policy would find with as many is not said.
        bound, own = study.curves[BOUND].at(capacity).block_hit_rate, study.over_time[0].block_hit_rate
        yield (
            f"No policy could find more than {html.percent(bound)} of the blocks at this capacity; this one finds "
            f"{html.percent(own)}, so at most {100 * max(0.0, bound - own):.1f} points are left for better eviction."
        )
    if capacity >= study.trace.unique_blocks:
        yield (
            "The recommended capacity holds everything in this trace: it is too short to say where more stops helping. "
            "Record a longer one before buying."
        )
    saturated = found.returns.saturated
    if saturated is not None and saturated <= found.place:
        yield (
            "The link to the cache is saturated: more hits than "
            f"{html.percent(found.returns.turning_share)} of the tokens cannot be loaded in time, and add nothing."
        )


_TITLE = "What a cache is worth"
_SECTIONS: dict[str, Callable[[Study, str], Section | None]] = {
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
        progress: called with the parts that are done.
    """
    names = ", ".join(study.name for study in studies)
    total = len(_SECTIONS) * len(studies)
    parts = []
    for number, study in enumerate(studies):
        sections = []
        for place, (key, section) in enumerate(_SECTIONS.items(), start=1):
            sections.append(section(study, f"t{number}-{key}"))
            if progress is not None:
                progress("report", number * len(_SECTIONS) + place, total)
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
        _options_of(study),
        summary(study, f"t{number}-summary"),
        menu,
        *(rendered(each) for each in sections),
        id=f"t{number}",
    )


def _options_of(study: Study) -> Markup:
    trace = study.trace
    text = (
        f"{len(trace):,} requests with {trace.accesses:,} block accesses; deployment {study.options.deployment_name}, "
        f"mode {study.options.mode}."
    )
    return joined(tag("p", text, class_="muted"))
