"""What was replayed, and how: facts of the trace, bad lines, method."""

from __future__ import annotations

from collections.abc import Sequence

from kvcm.optimizer.report import amounts
from kvcm.optimizer.report.markup import Markup, joined, table, tag
from kvcm.optimizer.report.section import Section
from kvcm.optimizer.study import Study
from kvcm.optimizer.trace import Trace

__all__ = ["facts", "method"]

_SHOWN_INSTANCES = 20


def facts(study: Study, key: str) -> Section:
    """Return the section on the trace."""
    trace = study.trace
    parts = [tag("div", table(("", ""), _rows(study), caption="Facts of the trace"), class_="facts")]
    if trace.bad_line_count:
        parts.append(_bad_lines(trace))
    return Section(key, "The trace", "What was read, and what was left out.", tuple(parts))


def _rows(study: Study) -> list[tuple[str, str]]:
    trace, totals, unlimited = study.trace, study.trace.totals, study.unlimited
    names = trace.instance_names
    more = f" and {len(names) - _SHOWN_INSTANCES} more" if len(names) > _SHOWN_INSTANCES else ""
    block = f"{trace.block_tokens} tokens" if trace.block_tokens else "differs between instances"
    if study.bytes_per_block:
        block += f", {amounts.size(study.bytes_per_block)} of KV in this deployment"
    everything = f" ({amounts.size(trace.unique_blocks * study.bytes_per_block)})" if study.bytes_per_block else ""
    return [
        ("name", trace.name),
        ("requests", f"{len(trace):,}, of which {totals.requests:,} read"),
        ("time span", amounts.duration(trace.span_seconds)),
        ("prompt tokens", f"{totals.tokens:,}"),
        ("block", block),
        ("block accesses", f"{trace.accesses:,}"),
        ("unique blocks", f"{trace.unique_blocks:,}{everything}"),
        ("instances", f"{len(names):,}: {', '.join(names[:_SHOWN_INSTANCES])}{more}"),
        (
            "hit rate of an unlimited cache",
            f"{amounts.percent(unlimited.block_hit_rate, 2)} of blocks, "
            f"{amounts.percent(unlimited.token_hit_rate, 2)} of tokens",
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


def _how_told(curves: Sequence[str]) -> str:
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
    )
    notes = (
        "A request hits its leading resident blocks, up to the first that is missing; rates are blocks hit per block "
        "read, and tokens hit per token of the prompts. No warm-up is left out.",
        mode,
        _how_told(tuple(study.curves)),
        "The bound (belady) evicts what is needed last, and does not take a block that would be it: no policy finds "
        "more prefix blocks in this order of requests.",
        "A trace is replayed as it was recorded: that hits make answers faster, so that users ask sooner, is left out.",
        "The running manager evicts in rounds between two marks below its quota, so it holds somewhat less than the "
        "capacity here.",
        "Money is in whatever currency the prices of the deployment are. The deployment's figures are inputs, not "
        "measurements; replace them with your own.",
    )
    return Section(
        key,
        "Method",
        "How these figures came about, and what they leave out.",
        (tag("ul", *(tag("li", joined(note)) for note in notes)),),
    )
