"""What a hierarchy of caches gives: each level, and how to split capacity and money among them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from kvcm.optimizer.pooling import PoolingRow, PoolingStudy, Topology
from kvcm.optimizer.report import html
from kvcm.optimizer.report.charts import Chart, Pane, Table, figure, share_axis, time_axis
from kvcm.optimizer.report.html import INK, MUTED, SERIES, Markup, Section, table
from kvcm.optimizer.study import Splits, Study, Tiering
from kvcm.optimizer.tiers import TierUse

__all__ = ["pooling", "tiering"]

_DASHES = ("-", "--", "-.", ":")


def tiering(study: Study, key: str) -> Section:
    """Return the section on tiers."""
    found = study.tiering
    charts = [_busy(study, found, f"{key}-busy")]
    if found.splits is not None:
        charts = [_split(found, found.splits, f"{key}-split"), *_budget_charts(found, found.splits, key), *charts]
    return Section(
        key,
        "Tiers",
        "An exclusive hierarchy under LRU: a block lies in one level, goes up when it is hit and down when it is "
        "evicted, so all levels together hold what one cache of their size would. What differs is how long loading "
        "takes. Bandwidths and prices are assumptions unless --tiers says others.",
        (_levels(found), *map(figure, charts)),
    )


def _levels(found: Tiering) -> Markup:
    replay = found.replay
    columns = (
        "tier", "blocks", "size", "blocks hit", "read", "written", "bandwidth", "saturated", "price per month",
    )  # fmt: skip
    rows = [_level(use, replay.totals.blocks) for use in replay.tiers]
    rate = html.percent(replay.block_hit_rate)
    times = replay.load_times
    caption = (
        f"All tiers together find {rate} of the blocks; loading takes {html.duration(times.mean)} on average and "
        f"{html.duration(times.p99)} for 99 % of the requests that load"
    )
    return table(columns, rows, caption=caption)


def _level(use: TierUse, read_blocks: int) -> tuple[str, ...]:
    bandwidth = use.tier.bandwidth_bytes_per_second
    return (
        use.tier.name,
        html.count(use.tier.capacity_blocks),
        html.size(use.tier.capacity_blocks * use.block_bytes),
        html.percent(use.prefix_blocks / max(1, read_blocks)),
        html.size(use.read_bytes),
        html.size(use.written_bytes),
        "no limit" if np.isinf(bandwidth) else f"{bandwidth / 1e9:g} GB/s",
        html.duration(use.saturated_seconds),
        html.money(use.price_per_month),
    )


def _names(found: Tiering) -> list[str]:
    return [use.tier.name for use in found.replay.tiers]


def _split(found: Tiering, splits: Splits, key: str) -> Chart:
    names = _names(found)
    best = int(splits.saved_seconds.argmax())
    rates = splits.hits.prefix_blocks / max(1, found.replay.totals.blocks)
    rows = [
        (html.percent(splits.shares[at], 0), *map(html.percent, rates[at]), _node_time(splits.saved_seconds[at]))
        for at in range(0, len(splits.shares), 4)
    ]
    return Chart(
        key,
        "Where hits lie when room is split differently",
        f"All room stays as it is, its share in the fastest tier ({names[0]}) varies, the others share the rest. "
        "Prefill "
        f"saved, less loading, is greatest with {html.percent(splits.shares[best], 0)} of the room in {names[0]}: "
        f"{_node_time(splits.saved_seconds[best])} of a node, if the price does not matter.",
        lambda pane: _draw_split(found, splits, pane),
        Table((f"room in {names[0]}", *(f"hits in {name}" for name in names), "node time saved"), rows),
        panels=2,
        height=320,
    )


def _node_time(seconds: float) -> str:
    return html.duration(float(seconds))


def _draw_split(found: Tiering, splits: Splits, pane: Pane) -> None:
    left, right = pane.axes
    rates = splits.hits.prefix_blocks / max(1, found.replay.totals.blocks)
    below = np.zeros(len(splits.shares))
    for number, name in enumerate(_names(found)):
        above = below + rates[:, number]
        color = SERIES[number % len(SERIES)]
        left.fill_between(splits.shares, below, above, color=color, alpha=0.75 - 0.15 * (number % 3), label=name, lw=0)
        below = above
    share_axis(left, "blocks hit", max(0.05, float(below.max()) * 1.1))
    right.plot(splits.shares, splits.saved_seconds / 3600, color=SERIES[0])
    best = int(splits.saved_seconds.argmax())
    right.plot(splits.shares[best], splits.saved_seconds[best] / 3600, "o", color=INK)
    right.set_ylabel("node hours of prefill saved")
    for axes in pane.axes:
        axes.set_xlim(0, 1)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda each, _: f"{100 * each:g} %"))
        axes.set_xlabel(f"room in {_names(found)[0]}")
    pane.legend(left)


def _budget_charts(found: Tiering, splits: Splits, key: str) -> list[Chart]:
    return [_budgets(found, splits, f"{key}-budget")] if splits.budgets else []


def _budgets(found: Tiering, splits: Splits, key: str) -> Chart:
    names = _names(found)
    rows = [
        (
            html.money(budget),
            *(html.size(blocks * found.replay.tiers[0].block_bytes) for blocks in best.capacities),
            html.percent(sum(best.prefix_blocks) / max(1, found.replay.totals.blocks)),
            _node_time(best.saved_seconds),
        )
        for budget, best in zip(splits.budgets, splits.best, strict=True)
    ]
    return Chart(
        key,
        "The best split of a budget",
        "For each monthly budget, the room in each tier that saves most prefill less loading, found by a search "
        "over splits; "
        "with more money, room in faster tiers.",
        lambda pane: _draw_budgets(found, splits, pane),
        Table(("budget per month", *names, "blocks hit", "node time saved"), rows),
        panels=2,
        height=320,
    )


def _draw_budgets(found: Tiering, splits: Splits, pane: Pane) -> None:
    left, right = pane.axes
    places = np.arange(len(splits.budgets))
    bottom = np.zeros(len(places))
    for number, name in enumerate(_names(found)):
        blocks = np.array([best.capacities[number] for best in splits.best], np.float64)
        size = blocks * found.replay.tiers[0].block_bytes / 2**30
        color = SERIES[number % len(SERIES)]
        left.bar(places, size, bottom=bottom, color=color, alpha=0.75 - 0.15 * (number % 3), label=name, width=0.75)
        bottom += size
    left.set_ylabel("room (GiB)")
    left.yaxis.set_major_formatter(FuncFormatter(lambda each, _: html.short(each)))
    right.bar(places, [best.saved_seconds / 3600 for best in splits.best], color=MUTED, width=0.75)
    right.set_ylabel("node hours of prefill saved")
    every = 2 if pane.is_narrow else 1
    for axes in pane.axes:
        axes.grid(visible=False, axis="x")
        axes.set_xticks(places[::every], [f"${html.short(each)}" for each in splits.budgets[::every]])
        axes.set_xlabel("budget per month")
        if not pane.is_narrow:
            axes.tick_params(axis="x", labelsize=10)
    pane.legend(left)


def _busy(study: Study, found: Tiering, key: str) -> Chart:
    series = found.replay.series
    names = _names(found)
    every = range(0, len(series.starts_seconds), max(1, len(series.starts_seconds) // 12))
    rows = [
        (
            html.duration(float(series.starts_seconds[at])),
            *(f"{html.size(series.read_bytes_per_second[level, at])}/s" for level in range(len(names))),
            *(html.percent(series.utilisation[level, at]) for level in range(len(names))),
        )
        for at in every
    ]
    most = [f"{name} {html.percent(float(series.utilisation[at].max(initial=0)))}" for at, name in enumerate(names)]
    return Chart(
        key,
        "How busy tiers are",
        "Bytes moved for loads, promotions, demotions and insertions, against the bandwidth, in windows of "
        f"{html.duration(series.window_seconds)}; the busiest: {', '.join(most)}. Above 100 % a tier cannot "
        "keep up.",
        lambda pane: _draw_busy(study, found, pane),
        Table(("from", *(f"{name} reads" for name in names), *(f"{name} busy" for name in names)), rows),
        height=300,
    )


def _draw_busy(study: Study, found: Tiering, pane: Pane) -> None:
    (axes,) = pane.axes
    series = found.replay.series
    for number, name in enumerate(_names(found)):
        color, dashes = SERIES[number % len(SERIES)], _DASHES[number % len(_DASHES)]
        axes.plot(series.starts_seconds, series.utilisation[number], dashes, color=color, label=name, linewidth=1.6)
    axes.axhline(1.0, color=MUTED, linewidth=1)
    most = float(series.utilisation.max(initial=0))
    share_axis(axes, "bandwidth in use", max(0.01, min(most * 1.1, 20.0)))
    time_axis(axes, study.trace.span_seconds, is_narrow=pane.is_narrow)
    pane.legend()


# What it is worth that engines share one pool, and that requests go where their KV is.

_NOTABLE = 0.05
"""Points of hit rate."""
_SOURCES = ("own memory", "the pool, over the network", "computed")


def pooling(study: Study, key: str) -> Section:
    """Return the section on pooling and routing."""
    found = study.pooling
    return Section(
        key,
        "Routing and pooling",
        f"{found.engines} engines with memory of their own find only what they computed themselves, so it matters "
        "where a request goes; a pool finds what any of them computed, wherever it goes, and sends it over the "
        "network. The policies are those of kvcm gateway. An engine computes prompts one after the other; what is in "
        "flight is what policies see. Chains are evicted from their ends, the ones used longest ago first.",
        (figure(_sources_chart(found, f"{key}-sources")), figure(_rates_chart(found, f"{key}-rates"))),
    )


def _labels(found: PoolingStudy) -> list[str]:
    return list(dict.fromkeys(row.routing.label for row in found.rows))


def _rows_of(found: PoolingStudy, topology: Topology) -> list[PoolingRow]:
    return [row for row in found.rows if row.topology is topology]


def _rate(row: PoolingRow) -> float:
    return row.token_hit_rate


def _local_share(row: PoolingRow) -> float:
    return row.local_share


def _sources_chart(found: PoolingStudy, key: str) -> Chart:
    rows = _rows_of(found, Topology.BOTH)
    best, worst = max(rows, key=_local_share), min(rows, key=_local_share)
    first = rows[0]
    return Chart(
        key,
        "Where tokens come from by policy",
        f"Engines of {html.count(first.local_blocks)} blocks ({html.size(first.local_blocks * first.block_bytes)}) "
        f"before a pool of {html.count(first.pool_blocks)}. With {best.routing.label} "
        f"{html.percent(best.pool_share)} of the tokens cross the network, with {worst.routing.label} "
        f"{html.percent(worst.pool_share)}.",
        lambda pane: _draw_sources(rows, pane),
        _table(found.rows),
        height=320,
    )


def _draw_sources(rows: list[PoolingRow], pane: Pane) -> None:
    (axes,) = pane.axes
    places, left = np.arange(len(rows)), np.zeros(len(rows))
    shares = [[row.local_share, row.pool_share, row.computed_share] for row in rows]
    colors = (SERIES[0], SERIES[2], MUTED)
    for name, color, widths in zip(_SOURCES, colors, np.array(shares).T, strict=True):
        axes.barh(places, widths, left=left, color=color, label=name, height=0.6)
        left += widths
    _policy_axis(axes, [row.routing.label for row in rows])
    axes.set_xlim(0, 1)
    axes.set_xlabel("prompt tokens")
    pane.legend(columns=3)


def _policy_axis(axes: Axes, labels: list[str]) -> None:
    axes.set_yticks(range(len(labels)), [label.replace(":", "\n").replace("_", " ") for label in labels])
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda each, _: f"{100 * each:g} %"))


def _rates_chart(found: PoolingStudy, key: str) -> Chart:
    first = _rows_of(found, Topology.LOCAL)[0]
    return Chart(
        key,
        "Tokens found by policy and topology",
        f"Memory of {html.count(first.local_blocks)} blocks in each engine. {_description(found)}",
        lambda pane: _draw_rates(found, pane),
        _table(found.rows),
        height=320,
    )


def _description(found: PoolingStudy) -> str:
    (pool,) = _rows_of(found, Topology.POOL)
    local = _rows_of(found, Topology.LOCAL)
    best, worst = max(local, key=_rate), min(local, key=_rate)
    gain = 100 * (pool.token_hit_rate - best.token_hit_rate)
    saved = pool.hits.prefix_tokens - best.hits.prefix_tokens
    than = f"the best policy before engines without a pool ({best.routing.label})"
    if gain >= _NOTABLE:
        comparison = f"{gain:.1f} points more than {than}: {html.short(saved)} tokens less to compute"
    elif gain > -_NOTABLE:
        comparison = f"as many as {than}"
    else:
        comparison = f"{-gain:.1f} points less than {than}"
    return (
        f"The pool finds {html.percent(pool.token_hit_rate)} of the tokens, {comparison}, and "
        f"{100 * (pool.token_hit_rate - worst.token_hit_rate):.1f} points more than {worst.routing.label}."
    )


def _draw_rates(found: PoolingStudy, pane: Pane) -> None:
    (axes,) = pane.axes
    (pool,) = _rows_of(found, Topology.POOL)
    axes.axvline(pool.token_hit_rate, color=INK, linewidth=2, linestyle="--", label="one pool, whatever the policy")
    styles = {
        Topology.LOCAL: (SERIES[2], "o", "own memory"),
        Topology.BOTH: (SERIES[0], "D", "own memory and pool"),
    }
    for topology, (color, marker, name) in styles.items():
        rates = [row.token_hit_rate for row in _rows_of(found, topology)]
        axes.plot(rates, range(len(rates)), marker, color=color, markersize=8, label=name)
    _policy_axis(axes, _labels(found))
    axes.set_xlim(left=0)
    axes.set_xlabel("prompt tokens found")
    pane.legend(columns=3)


def _table(rows: Iterable[PoolingRow]) -> Table:
    columns = (
        "policy", "blocks in", "tokens found", "in own memory", "in the pool", "computed", "most computed",
        "most requests", "mean wait", "kept twice",
    )  # fmt: skip
    return Table(columns, [_row(row) for row in rows])


def _row(row: PoolingRow) -> tuple[str, ...]:
    return (
        row.routing.label,
        row.topology.value,
        html.percent(row.token_hit_rate),
        html.percent(row.local_share),
        html.percent(row.pool_share),
        html.percent(row.computed_share),
        f"{row.imbalance:.2f} × the mean",
        f"{row.request_imbalance:.2f} × the mean",
        html.duration(row.mean_wait_seconds),
        html.size(row.mean_duplicate_bytes),
    )
