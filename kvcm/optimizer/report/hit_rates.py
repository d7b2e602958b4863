"""Hit rates of policies over capacity, against the bound that no policy can beat."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from kvcm.optimizer.locality import Distribution, FloatColumn, Locality, PrefixNode, PrefixTree, SessionReuse
from kvcm.optimizer.report import html
from kvcm.optimizer.report.charts import (
    Chart,
    Pane,
    Table,
    capacity_axis,
    duration_axis,
    figure,
    geometric_places,
    log_axis,
    share_axis,
    time_axis,
)
from kvcm.optimizer.report.html import BOUND, INK, MUTED, SERIES, Markup, Section, joined, policy_style, tag
from kvcm.optimizer.results import Replay
from kvcm.optimizer.study import Study
from kvcm.optimizer.trace import Int64Column, Trace

__all__ = ["hit_rates", "locality", "over_time", "prefixes"]


def hit_rates(study: Study, key: str) -> Section:
    """Return the section on policies and capacities."""
    return Section(
        key,
        "Hit rates by policy and capacity",
        "A block counts as a hit when it and all blocks before it are in the cache: engines reuse prefixes. "
        + (
            "Between the dashed bound and the policies lies what better eviction could still give; the bound itself "
            "knows the future."
            if BOUND in study.curves
            else "Capacities are those that were asked for."
        ),
        (figure(_chart(study, f"{key}-rates")),),
    )


def _chart(study: Study, key: str) -> Chart:
    best = _best_at(study.replays)
    return Chart(
        key,
        "Hit rate over capacity",
        f"Blocks of prompts found in the cache, mode {study.options.mode}; above, the capacity in bytes. {best}",
        lambda pane: _draw_hit_rates(study, pane),
        _hit_rate_table(study),
        height=420,
    )


def _best_at(replays: Iterable[Replay]) -> str:
    live = [replay for replay in replays if not replay.policy.startswith(BOUND)]
    if not live:
        return ""
    middle = sorted({replay.capacity_blocks for replay in live})
    capacity = middle[len(middle) // 2]
    best = max((each for each in live if each.capacity_blocks == capacity), key=lambda each: each.block_hit_rate)
    return f"At {html.count(capacity)} blocks {best.policy} finds most: {html.percent(best.block_hit_rate)}."


def _draw_hit_rates(study: Study, pane: Pane) -> None:
    axes = pane.axes[0]
    by_policy = _by_policy(study.replays)
    unlimited = study.unlimited.block_hit_rate
    for policy in dict.fromkeys([*study.curves, *by_policy]):
        color, dashes, marker = policy_style(policy)
        name = "upper bound (belady)" if policy == BOUND else policy
        if policy in study.curves:
            curve = study.curves[policy]
            places = geometric_places(len(curve.prefix_blocks) - 1)
            rates = curve.prefix_blocks[places] / max(1, curve.totals.blocks)
            axes.plot(places, rates, dashes, color=color, label=name, zorder=3)
        else:
            points = sorted(by_policy[policy].items())
            x, y = [capacity for capacity, _ in points], [replay.block_hit_rate for _, replay in points]
            axes.plot(x, y, dashes, color=color, marker=marker, markersize=5, label=name, linewidth=1.4)
    axes.axhline(unlimited, color=MUTED, linewidth=1, zorder=1)
    axes.annotate(
        f"unlimited: {html.percent(unlimited)}",
        (0.01, unlimited),
        xycoords=("axes fraction", "data"),
        xytext=(0, 4),
        textcoords="offset points",
        color=INK,
        fontsize=11,
    )
    share_axis(axes, "blocks hit", min(1.0, max(0.05, unlimited * 1.15)))
    most = max([study.trace.unique_blocks, *(each.capacity_blocks for each in study.replays)])
    axes.set_xlim(max(1.0, study.trace.unique_blocks / 1000), most * 1.05)
    capacity_axis(axes, study.bytes_per_block, is_narrow=pane.is_narrow)
    pane.legend()


def _by_policy(replays: Iterable[Replay]) -> dict[str, dict[int, Replay]]:
    found: dict[str, dict[int, Replay]] = {}
    for replay in replays:
        found.setdefault(replay.policy, {})[replay.capacity_blocks] = replay
    return found


def _hit_rate_table(study: Study) -> Table:
    by_policy = _by_policy(study.replays)
    columns = ("capacity (blocks)", "of unique", *(["size"] if study.bytes_per_block else []), *by_policy)
    capacities = sorted({replay.capacity_blocks for replay in study.replays})
    return Table(columns, [_row(study, capacity, by_policy) for capacity in capacities])


def _row(study: Study, capacity: int, by_policy: Mapping[str, Mapping[int, Replay]]) -> tuple[str, ...]:
    size = [html.size(capacity * study.bytes_per_block)] if study.bytes_per_block else []
    share = html.percent(capacity / max(1, study.trace.unique_blocks))
    rates = (np.nan if capacity not in each else each[capacity].block_hit_rate for each in by_policy.values())
    shown = ("" if np.isnan(rate) else html.percent(rate, 2) for rate in rates)
    return (html.count(capacity), share, *size, *shown)


# Hit rates and resident blocks over the time of a trace.

_WINDOWS = 60
_DASHES = ("-", "--", "-.", ":")


@dataclass(frozen=True, slots=True, eq=False)
class _Series:
    """One replay over W windows of equal length.

    Attributes:
        name: for people.
        rates: [W] blocks hit per block read; NaN where nothing was read.
        resident: [W] blocks in the cache at the end of each, as a share of its capacity.
    """

    name: str
    rates: FloatColumn
    resident: FloatColumn


def over_time(study: Study, key: str) -> Section:
    """Return the section on how hit rates come about over time."""
    starts, series = _windows(study.trace), [_series(study.trace, replay) for replay in study.over_time]
    fills = [_filled(study.trace, replay) for replay in study.over_time]
    filling = " ".join(
        f"{each.name}: {'full after ' + html.duration(fill) if fill is not None else 'never full'}."
        for each, fill in zip(series, fills, strict=True)
    )
    chart = Chart(
        f"{key}-rates",
        "Hit rate and filling over time",
        f"Blocks hit in {_WINDOWS} windows of {html.duration(study.trace.span_seconds / _WINDOWS)} each, and how "
        f"much of the cache is used. {filling}",
        lambda pane: _draw_over_time(study, series, starts, pane),
        _table_over_time(series, starts),
        panels=2,
        height=320,
    )
    return Section(
        key,
        "Over time",
        "A cache that is not full yet says little about eviction, and the first requests find nothing whatever its "
        "size: no warm-up is left out of the rates in this report.",
        (figure(chart),),
    )


def _windows(trace: Trace) -> FloatColumn:
    return np.arange(_WINDOWS) * max(trace.span_seconds, 1e-6) / _WINDOWS


def _window_of(trace: Trace) -> Int64Column:
    since = (trace.times_us - trace.times_us[0]) / 1e6
    windows: Int64Column = (since / max(trace.span_seconds, 1e-6) * _WINDOWS).astype(np.int64)
    return np.minimum(windows, _WINDOWS - 1)


def _series(trace: Trace, replay: Replay) -> _Series:
    assert replay.request_hits is not None
    assert replay.request_resident is not None
    window = _window_of(trace)
    hits = np.bincount(window, replay.request_hits, _WINDOWS)
    reads = np.bincount(window, trace.read_blocks, _WINDOWS)
    rates = np.divide(hits, reads, out=np.full(_WINDOWS, np.nan), where=reads > 0)
    last = np.maximum(np.searchsorted(window, np.arange(_WINDOWS), side="right") - 1, 0)
    resident = replay.request_resident[last] / replay.capacity_blocks
    return _Series(f"{replay.policy}, {html.short(replay.capacity_blocks)} blocks", rates, resident)


def _filled(trace: Trace, replay: Replay) -> float | None:
    """Return when the cache was full, in seconds since the first request; None if it never was."""
    assert replay.request_resident is not None
    full = np.flatnonzero(replay.request_resident >= replay.capacity_blocks)
    return float(trace.times_us[full[0]] - trace.times_us[0]) / 1e6 if len(full) else None


def _draw_over_time(study: Study, series: list[_Series], starts: FloatColumn, pane: Pane) -> None:
    left, right = pane.axes
    for number, each in enumerate(series):
        color, dashes = SERIES[number % len(SERIES)], _DASHES[number % len(_DASHES)]
        left.plot(starts, each.rates, dashes, color=color, label=each.name, linewidth=1.6)
        right.plot(starts, each.resident, dashes, color=color, linewidth=1.6)
    right.axhline(1.0, color=MUTED, linewidth=1)
    share_axis(left, "blocks hit")
    share_axis(right, "cache in use", 1.1)
    for axes in pane.axes:
        time_axis(axes, study.trace.span_seconds, is_narrow=True)
    pane.legend(left, columns=3)


def _table_over_time(series: list[_Series], starts: FloatColumn) -> Table:
    columns = ("from", *(f"{each.name}: {what}" for each in series for what in ("hit", "in use")))
    every = range(0, _WINDOWS, 5)
    rows = [
        (
            html.duration(starts[at]),
            *(_percent_or_blank(value[at]) for each in series for value in (each.rates, each.resident)),
        )
        for at in every
    ]
    return Table(columns, rows)


def _percent_or_blank(share: float) -> str:
    return "" if np.isnan(share) else html.percent(share)


# How a trace uses its blocks again: how far apart, how soon, how unequally, and by whom.

_LEAST_SECONDS = 1e-3
"""Where logarithmic axes of time begin: what comes at once has to be somewhere."""


def locality(study: Study, key: str) -> Section:
    """Return the section on locality."""
    found = study.locality
    charts = [_reuse(found, f"{key}-reuse"), _popularity(found, f"{key}-popularity"), _working_set(study, key)]
    if found.sessions is not None:
        charts.append(_sessions(found.sessions, f"{key}-sessions"))
    return Section(
        key,
        "Locality",
        "Why the curves above look as they do. A cache helps when blocks come back before it needs their room: the "
        "reuse distance says how much room that is, the time to reuse how long they have to be kept.",
        tuple(figure(chart) for chart in charts),
    )


def _reuse(found: Locality, key: str) -> Chart:
    median = found.reuse_distance_blocks.quantiles.get(0.5, 0.0)
    wait = found.reuse_seconds.quantiles.get(0.5, 0.0)
    return Chart(
        key,
        "How far apart and how soon blocks come back",
        f"Half of all reuses come within {html.count(median)} other blocks and {html.duration(wait)}. A revisit "
        "is a request that continues a known prefix; its time is that since the deepest known block was last used.",
        lambda pane: _draw_reuse(found, pane),
        _quantiles(
            {
                "reuse distance (blocks)": (found.reuse_distance_blocks, html.count),
                "time to reuse": (found.reuse_seconds, html.duration),
                "revisit interval": (found.revisit_seconds, html.duration),
            }
        ),
        panels=2,
        height=320,
    )


def _draw_reuse(found: Locality, pane: Pane) -> None:
    left, right = pane.axes
    _cdf(left, found.reuse_distance_blocks, SERIES[0], "reuse distance")
    log_axis(left, "reuse distance (different blocks)", is_narrow=True)
    _cdf(right, found.reuse_seconds, SERIES[1], "reuse of a block", least=_LEAST_SECONDS)
    _cdf(right, found.revisit_seconds, SERIES[2], "revisit of a prefix", dashes="--", least=_LEAST_SECONDS)
    duration_axis(right, "time since the last use", is_narrow=True)
    share_axis(left, "share of reuses", 1.02)
    share_axis(right, "share", 1.02)
    right.legend(loc="lower right")


def _cdf(axes: Axes, found: Distribution, color: str, name: str, dashes: str = "-", least: float | None = None) -> None:
    values = found.values if least is None else found.values.clip(least)
    axes.plot(values, found.shares, dashes, color=color, label=name, drawstyle="steps-post")


def _quantiles(distributions: dict[str, tuple[Distribution, object]]) -> Table:
    shares = next(iter(distributions.values()))[0].quantiles
    columns = ("", "values", *(f"{100 * share:g} % at most" for share in shares))
    rows = [
        (name, html.count(found.count), *(shown(value) for value in found.quantiles.values()))  # type: ignore[operator]
        for name, (found, shown) in distributions.items()
    ]
    return Table(columns, rows)


def _popularity(found: Locality, key: str) -> Chart:
    popularity = found.popularity
    picked = range(0, len(popularity.ranks), max(1, len(popularity.ranks) // 12))
    rows = [
        (
            html.count(popularity.ranks[at]),
            html.count(popularity.accesses[at]),
            html.percent(popularity.shares[at]),
        )
        for at in picked
    ]
    return Chart(
        key,
        "How unequally blocks are used",
        f"{html.percent(popularity.once_share)} of the blocks are used once: a cache keeps these in vain. Accesses "
        f"fall with rank to the power of −{popularity.zipf_exponent:.2f}.",
        lambda pane: _draw_popularity(found, pane),
        Table(("rank of block", "its accesses", "accesses up to it"), rows),
        panels=2,
        height=300,
    )


def _draw_popularity(found: Locality, pane: Pane) -> None:
    left, right = pane.axes
    popularity = found.popularity
    left.plot(popularity.ranks, popularity.accesses, color=SERIES[0])
    left.set_yscale("log")
    left.yaxis.set_major_locator(LogLocator(numticks=5))
    left.yaxis.set_minor_locator(NullLocator())
    left.yaxis.set_major_formatter(FuncFormatter(lambda value, _: html.short(value)))
    left.set_ylabel("accesses of the block")
    right.plot(popularity.ranks, popularity.shares, color=SERIES[0])
    share_axis(right, "accesses up to that rank", 1.02)
    for axes in pane.axes:
        log_axis(axes, "rank of the block", is_narrow=True)


def _working_set(study: Study, key: str) -> Chart:
    found = study.locality.working_set
    picked = range(0, len(found.lifetimes_seconds), max(1, len(found.lifetimes_seconds) // 12))
    rows = [
        (
            html.duration(found.lifetimes_seconds[at]),
            html.count(found.mean_blocks[at]),
            html.percent(found.hit_share[at]),
        )
        for at in picked
    ]
    return Chart(
        f"{key}-working-set",
        "Working set",
        "Blocks used within a window that reaches back from each moment, and what keeping blocks for some time after "
        "their last use would take and give: this is what a time to live is worth without a limit of capacity.",
        lambda pane: _draw_working_set(study, pane),
        Table(("kept for", "blocks kept, on average", "reads that find their block"), rows),
        panels=2,
        height=320,
    )


def _draw_working_set(study: Study, pane: Pane) -> None:
    left, right = pane.axes
    found = study.locality.working_set
    left.plot(found.seconds, found.seen, color=MUTED, label="all blocks so far")
    for number, (seconds, blocks) in enumerate(list(found.windows.items())[-3:]):
        dashes = ("--", "-.", ":")[number]
        left.plot(found.seconds, blocks, dashes, color=SERIES[number], label=f"of the last {html.duration(seconds)}")
    left.yaxis.set_major_formatter(FuncFormatter(lambda value, _: html.short(value)))
    left.set_ylim(bottom=0)
    left.set_ylabel("different blocks")
    time_axis(left, study.trace.span_seconds, is_narrow=True)
    left.legend(loc="upper left")
    kept = found.mean_blocks.clip(1)
    right.plot(kept, found.hit_share, color=SERIES[0])
    for seconds in (60, 600, 3600):
        at = int(found.lifetimes_seconds.searchsorted(seconds))
        if at < len(found.lifetimes_seconds):
            right.plot(kept[at], found.hit_share[at], "o", color=SERIES[0])
            right.annotate(
                html.duration(seconds),
                (kept[at], found.hit_share[at]),
                xytext=(5, -13),
                textcoords="offset points",
                color=INK,
            )
    share_axis(right, "reads that find their block")
    log_axis(right, "blocks kept on average", is_narrow=True)


def _sessions(found: SessionReuse, key: str) -> Chart:
    return Chart(
        key,
        "Sessions",
        f"Of the blocks read by {html.count(found.sessions)} sessions {html.percent(found.own_share)} were last "
        f"used by the same session, {html.percent(found.other_share)} by another one, and "
        f"{html.percent(found.new_share)} were new.",
        lambda pane: _draw_sessions(found, pane),
        _quantiles(
            {
                "turns per session": (found.turns, html.count),
                "time between turns": (found.turn_interval_seconds, html.duration),
                "blocks read that were known": (found.reuse_rates, html.percent),
            }
        ),
        panels=2,
        height=300,
    )


def _draw_sessions(found: SessionReuse, pane: Pane) -> None:
    left, right = pane.axes
    _cdf(left, found.turn_interval_seconds, SERIES[1], "time between turns", least=_LEAST_SECONDS)
    duration_axis(left, "time between turns", is_narrow=True)
    share_axis(left, "share of turns", 1.02)
    _cdf(right, found.reuse_rates, SERIES[0], "reuse")
    right.set_xlim(0, 1)
    right.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))
    right.set_xlabel("known blocks among those read")
    share_axis(right, "share of sessions", 1.02)


# The prefixes that save most, as a tree.


def prefixes(study: Study, key: str) -> Section:
    """Return the section on prefixes."""
    tree = study.prefixes
    return Section(
        key,
        "Most valuable prefixes",
        f"Runs of blocks that are reused together, by the tokens that an unlimited cache would not compute again: "
        f"{html.short(tree.saved_tokens)} in all. Shown are {len(tree.nodes)} of {html.count(tree.node_count)} "
        "runs, each below what it continues; bars are shares of the greatest. These are candidates for pinning.",
        (_tree(study, tree),) if tree.nodes else (tag("p", "No block is ever read again."),),
    )


def _tree(study: Study, tree: PrefixTree) -> Markup:
    children: dict[int, list[int]] = {}
    for number, node in enumerate(tree.nodes):
        children.setdefault(node.parent, []).append(number)
    greatest = max(node.saved_tokens for node in tree.nodes)
    has_instances = len(study.trace.instance_names) > 1
    # Chains of runs can be long: those below are written first, so that no recursion is needed.
    written: dict[int, Markup] = {}
    for number in range(len(tree.nodes) - 1, -1, -1):
        node = tree.nodes[number]
        text = _description(node, tree.saved_tokens, has_instances=has_instances)
        bar = tag("span", class_="bar", style=f"width:{100 * node.saved_tokens / max(1, greatest):.1f}%")
        below = [written.pop(each) for each in children.get(number, [])]
        written[number] = tag("li", text, bar, *([tag("ul", *below)] if below else []))
    return tag("ul", *(written[each] for each in children[-1]), class_="tree")


def _description(node: PrefixNode, saved_tokens: int, *, has_instances: bool) -> Markup:
    where = f"{node.instance}: " if has_instances else ""
    first, last = node.depth + 1, node.depth + node.blocks
    place = f"blocks {first:,}–{last:,}" if node.blocks > 1 else f"block {first:,}"
    by = f" by {node.sessions:,} sessions" if node.sessions > 1 else " by one session" if node.sessions else ""
    share = html.percent(node.saved_tokens / max(1, saved_tokens))
    span = f"{html.duration(node.first_seconds)} to {html.duration(node.last_seconds)}"
    return joined(
        tag("strong", f"{html.short(node.saved_tokens)} tokens"),
        f" ({share}): {where}{place}, reused {node.reuses:,} times{by}",
        tag("span", f", from {span}", class_="muted"),
    )
