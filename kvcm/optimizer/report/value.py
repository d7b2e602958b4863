"""What a cache returns: GPUs and money over its capacity, and where the link to it is busy."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from kvcm.optimizer.report import html
from kvcm.optimizer.report.charts import (
    Chart,
    Pane,
    Table,
    capacity_axis,
    duration_axis,
    figure,
    geometric_places,
    money_ticks,
    share_axis,
)
from kvcm.optimizer.report.html import INK, MUTED, SERIES, Markup, Section, policy_style, table, tag
from kvcm.optimizer.roi import FirstTokens, Grid, Returns, Spread, Swing
from kvcm.optimizer.study import BOUND, Recommendation, Services, Study

__all__ = ["first_tokens", "sensitivity", "services", "value"]

_MOST_LINES = 200


def value(study: Study, key: str) -> Section | None:
    """Return the section on GPUs and money; None without a policy that could be set."""
    found = study.recommendation
    if found is None:
        return None
    return Section(
        key,
        "Value: GPUs and money",
        "Every token that is found is not computed, so fewer nodes prefill. Against that stands the price of the "
        "storage; "
        "the best capacity is where the difference is greatest. Loads go over the nodes' links: above a share of hits "
        "these are busier than the GPUs, and more hits add nothing.",
        (
            figure(_over_capacity(study, found, f"{key}-capacity")),
            figure(_nodes(found, f"{key}-nodes")),
            _inputs(study, found),
        ),
    )


def _over_capacity(study: Study, found: Recommendation, key: str) -> Chart:
    best = found.returns.row(found.returns.best)
    return Chart(
        key,
        "GPUs saved and net value over capacity",
        f"{found.policy} returns most, {html.money(best['net_per_hour'], 2)} per hour, at "
        f"{html.count(best['capacity_blocks'])} blocks ({html.size(best['capacity_gib'] * 2**30)}); the "
        "circle marks "
        "the smallest capacity that comes within 1 % of it, which is the one recommended.",
        lambda pane: _draw_over_capacity(study, found, pane),
        _capacity_table(found.returns),
        panels=2,
        height=340,
    )


def _draw_over_capacity(study: Study, found: Recommendation, pane: Pane) -> None:
    left, right = pane.axes
    for label, each in study.returns.items():
        color, dashes, marker = policy_style(label)
        places = _drawn_places(each)
        is_curve = len(each.capacity_blocks) > _MOST_LINES
        for axes, column in ((left, each.gpus_saved), (right, each.net_per_hour)):
            axes.plot(
                each.capacity_blocks[places],
                column[places],
                dashes,
                color=color,
                marker="" if is_curve else marker,
                markersize=4,
                linewidth=1.8 if is_curve else 1.2,
                label=f"upper bound ({BOUND})" if label == BOUND else label,
            )
    if found.pays:
        for axes, column in ((left, found.returns.gpus_saved), (right, found.returns.net_per_hour)):
            axes.plot(found.capacity_blocks, column[found.place], "o", color=INK, markersize=9, fillstyle="none", mew=2)
    right.axhline(0, color=MUTED, linewidth=1)
    left.set_ylabel("GPUs saved")
    right.set_ylabel("net value per hour")
    money_ticks(right.yaxis, 5)
    for axes in pane.axes:
        axes.set_xlim(max(1.0, study.trace.unique_blocks / 1000), study.trace.unique_blocks * 1.1)
        _fit(axes)
        capacity_axis(axes, study.bytes_per_block, is_narrow=True)
    pane.legend(left)


def _fit(axes: Axes) -> None:
    """Leave out values far below 0: a capacity that does not pay would squeeze the rest."""
    low, high = axes.get_ylim()
    axes.set_ylim(max(low, -0.5 * abs(high)) if high > 0 else low, high)


def _drawn_places(returns: Returns) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    if len(returns.capacity_blocks) <= _MOST_LINES:
        return np.arange(1, len(returns.capacity_blocks))
    return geometric_places(len(returns.capacity_blocks) - 1)


def _capacity_table(returns: Returns) -> Table:
    last = len(returns.capacity_blocks) - 1
    places = sorted({*geometric_places(last, 12).tolist(), returns.nearly_best, returns.best})
    columns = (
        "capacity (blocks)", "size", "tokens found", "GPUs saved", "whole GPUs", "saved per hour", "storage per hour",
        "net per hour",
    )  # fmt: skip
    rows = []
    for place in places:
        row = returns.row(place)
        rows.append(
            (
                html.count(row["capacity_blocks"]),
                html.size(row["capacity_gib"] * 2**30),
                html.percent(row["hit_share"]),
                f"{row['gpus_saved']:,.2f}",
                f"{row['whole_gpus_saved']:,.0f}",
                html.money(row["saved_per_hour"], 2),
                html.money(row["storage_per_hour"], 2),
                html.money(row["net_per_hour"], 2),
            )
        )
    return Table(columns, rows)


def _nodes(found: Recommendation, key: str) -> Chart:
    returns = found.returns
    share = float(returns.hit_share[found.place])
    where = "below" if share < returns.turning_share else "above"
    shares = np.linspace(0, 1, 11)
    compute, link = _bounds(returns, shares)
    rows = [
        (html.percent(each, 0), f"{nodes:,.2f}", f"{links:,.2f}")
        for each, nodes, links in zip(shares, compute, link, strict=True)
    ]
    return Chart(
        key,
        "What limits the nodes",
        "Nodes that prefill the rest, and nodes whose links carry the loads; the greater of both is needed. They "
        "meet at "
        f"{html.percent(returns.turning_share)} found; the recommended setting is {where} that.",
        lambda pane: _draw_nodes(found, pane),
        Table(("tokens found", "nodes for prefill", "nodes for links"), rows),
        height=300,
    )


def _bounds(returns: Returns, shares: np.ndarray[tuple[int], np.dtype[np.float64]]) -> tuple[list[float], list[float]]:
    link = returns.offered_tokens_per_second * returns.deployment.link_seconds_per_token * shares
    return (returns.nodes_without * (1 - shares)).tolist(), link.tolist()


def _draw_nodes(found: Recommendation, pane: Pane) -> None:
    (axes,) = pane.axes
    returns = found.returns
    shares = np.linspace(0, 1, 101)
    compute, link = _bounds(returns, shares)
    axes.fill_between(shares, np.maximum(compute, link), color=SERIES[5], alpha=0.12, linewidth=0)
    axes.plot(shares, compute, color=SERIES[0], label="for prefill")
    axes.plot(shares, link, "--", color=SERIES[2], label="for links")
    axes.axvline(returns.turning_share, color=MUTED, linewidth=1)
    axes.plot(
        float(returns.hit_share[found.place]),
        float(returns.nodes[found.place]),
        "o",
        color=INK,
        markersize=8,
        label="recommended",
    )
    axes.set_xlim(0, 1)
    axes.set_ylim(0, max(returns.nodes_without * 1.1, 1e-9))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda each, _: f"{100 * each:g} %"))
    axes.set_xlabel("prompt tokens found")
    axes.set_ylabel("nodes needed")
    pane.legend(columns=3)


def _inputs(study: Study, found: Recommendation) -> Markup:
    deployment, returns = study.options.deployment, found.returns
    threshold = deployment.threshold_tokens
    rows = [
        ("prefill of a node", html.rate(deployment.prefill_tokens_per_second, "tokens/s")),
        ("GPUs per node", f"{deployment.gpus_per_node:g}"),
        ("KV", f"{html.count(deployment.kv_bytes_per_token)} bytes per token"),
        (
            "link of a node to the cache",
            f"{deployment.bandwidth_bytes_per_second / 1e9:,.3g} GB/s, of which "
            f"{html.percent(deployment.usable_share, 0)} "
            f"usable, after {html.duration(deployment.latency_seconds)}",
        ),
        ("planned utilisation", html.percent(deployment.utilisation, 0)),
        ("prices", f"{html.money(deployment.price_per_gpu_hour, 2)} per GPU-hour, "
                   f"{html.money(deployment.price_per_gib_month, 2)} per GiB-month of storage"),
        ("offered load", html.rate(returns.offered_tokens_per_second, "prompt tokens/s")),
        ("nodes without a cache", f"{returns.nodes_without:,.2f}"),
        ("a prefix is worth loading from", "never" if threshold == float("inf") else f"{threshold:,.0f} tokens"),
        ("storage price that leaves nothing", f"{html.money(returns.break_even_gib_month, 2)} per GiB-month"),
    ]  # fmt: skip
    return tag("div", table(("", ""), rows, caption=f"Deployment: {study.options.deployment_name}"), class_="facts")


# How long requests wait for their first token, with and without a cache.

_DASHES = ("-", "--", "-.", ":")
_POINTS = 300


def first_tokens(study: Study, key: str) -> Section:
    """Return the section on times to the first token."""
    without, best = study.first_tokens[0], study.first_tokens[min(1, len(study.first_tokens) - 1)]
    nodes = without.queued.nodes
    chart = Chart(
        f"{key}-spread",
        "Time to the first token",
        f"On {nodes} {'node' if nodes == 1 else 'nodes'}, as many as are needed without a cache; requests wait "
        "for each "
        f"other. Half of them have their first token within {html.duration(without.queued.spread.p50)} without "
        "a cache "
        f"and {html.duration(best.queued.spread.p50)} with the recommended one; 95 % within "
        f"{html.duration(without.queued.spread.p95)} and {html.duration(best.queued.spread.p95)}.",
        lambda pane: _draw_first_tokens(study, pane),
        _first_token_table(study.first_tokens),
        height=320,
    )
    return Section(
        key,
        "Time to the first token",
        "A hit is loaded instead of computed. Hits are those of the replay: that shorter waits change the order "
        "of requests "
        "is left out.",
        (figure(chart),),
    )


def _label(each: FirstTokens) -> str:
    return f"{each.policy}, {html.short(each.capacity_blocks)} blocks" if each.capacity_blocks else "no cache"


def _draw_first_tokens(study: Study, pane: Pane) -> None:
    (axes,) = pane.axes
    for number, each in enumerate(study.first_tokens):
        seconds = np.maximum(np.sort(each.queued.seconds), 1e-4)
        places = np.unique(np.linspace(0, len(seconds) - 1, _POINTS).astype(np.int64))
        color, dashes = SERIES[(2, 0, 1, 3)[number % 4]], _DASHES[number % 4]
        axes.plot(seconds[places], (places + 1) / len(seconds), dashes, color=color, label=_label(each))
    share_axis(axes, "share of requests", 1.02)
    duration_axis(axes, "time to the first token", is_narrow=pane.is_narrow)
    pane.legend(columns=3)


def _first_token_table(found: tuple[FirstTokens, ...]) -> Table:
    columns = ("", "mean", "50 %", "90 %", "95 %", "99 %", "GPUs busy", "links busy")
    rows = []
    for each in found:
        busy = (html.percent(each.queued.prefill_busy), html.percent(each.queued.link_busy))
        rows.append((_label(each), *_times(each.queued.spread), *busy))
        rows.append((f"{_label(each)}, without waiting for others", *_times(each.unqueued), "", ""))
    return Table(columns, rows)


def _times(spread: Spread) -> tuple[str, ...]:
    return tuple(html.duration(each) for each in (spread.mean, spread.p50, spread.p90, spread.p95, spread.p99))


# How much of the answer hangs on each input of the deployment.

_NAMES = {
    "prefill_tokens_per_second": "prefill throughput",
    "gpus_per_node": "GPUs per node",
    "kv_bytes_per_token": "KV per token",
    "bandwidth_bytes_per_second": "bandwidth of a link",
    "latency_seconds": "latency of loads",
    "usable_share": "usable bandwidth",
    "utilisation": "planned utilisation",
    "price_per_gpu_hour": "price of a GPU",
    "price_per_gib_month": "price of storage",
    "load_factor": "offered load",
}


def sensitivity(study: Study, key: str) -> Section | None:
    """Return the section on uncertain inputs; None without a policy that could be set."""
    if not study.swings or study.grid is None or study.recommendation is None:
        return None
    widest = study.swings[0]
    now = float(study.recommendation.returns.net_per_hour.max())
    chart = Chart(
        f"{key}-tornado",
        "Net value when one input is off by 20 %",
        "Each bar is the best net value per hour at the low and at the high end of one input; the line is the "
        "value as "
        f"assumed, {html.money(now, 2)}. Most hangs on {_input_name(widest)}.",
        lambda pane: _draw_swings(study.swings, now, pane),
        _swing_table(study.swings),
        height=380,
    )
    return Section(
        key,
        "Sensitivity",
        "Which of the assumed figures are worth measuring first, and whether the recommended capacity would change.",
        (figure(chart), _grid(study.grid, study.bytes_per_block)),
    )


def _input_name(swing: Swing) -> str:
    return _NAMES.get(swing.input, swing.input.replace("_", " "))


def _draw_swings(swings: tuple[Swing, ...], now: float, pane: Pane) -> None:
    (axes,) = pane.axes
    places = range(len(swings))
    for each, color, name in ((0, SERIES[2], "input 20 % lower"), (1, SERIES[0], "input 20 % higher")):
        widths = [(swing.low_net, swing.high_net)[each] - now for swing in swings]
        axes.barh(places, widths, left=now, color=color, alpha=0.85, height=0.7, label=name)
    axes.axvline(now, color=INK, linewidth=1)
    axes.set_yticks(places, [_sensitivity_label(swing, is_narrow=pane.is_narrow) for swing in swings])
    axes.set_ylim(len(swings) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    money_ticks(axes.xaxis, 4 if pane.is_narrow else 7)
    axes.set_xlabel("net value per hour")
    pane.legend()


def _sensitivity_label(swing: Swing, *, is_narrow: bool) -> str:
    return _input_name(swing).replace(" ", "\n", 1) if is_narrow else _input_name(swing)


def _swing_table(swings: tuple[Swing, ...]) -> Table:
    columns = ("input", "low", "high", "net if low", "net if high", "best capacity if low", "if high", "widest swing")
    rows = [
        (
            _input_name(swing),
            f"{swing.low:,.4g}",
            f"{swing.high:,.4g}",
            html.money(swing.low_net, 2),
            html.money(swing.high_net, 2),
            f"{swing.low_blocks:,} blocks",
            f"{swing.high_blocks:,} blocks",
            html.money(swing.width, 2),
        )
        for swing in swings
    ]
    return Table(columns, rows)


def _grid(found: Grid, bytes_per_block: float) -> Markup:
    columns = ("link of a node", *(f"{html.money(price, 2)} per GiB-month" for price in found.prices))
    rows = [
        (
            f"{bandwidth / 1e9:,.3g} GB/s",
            *(
                f"{html.money(net, 2)}, {html.size(blocks * bytes_per_block)}"
                for net, blocks in zip(found.net_per_hour[row], found.best_blocks[row], strict=True)
            ),
        )
        for row, bandwidth in enumerate(found.bandwidths)
    ]
    return table(columns, rows, caption="Best net value per hour, and the capacity it takes, by bandwidth and price")


# Several traces as several services: which of them gains most from capacity, and how to split a budget.


def services(found: Services, key: str) -> Section:
    """Return the section on several services."""
    rows = [
        (
            rank.name,
            f"{html.money(rank.per_gib_hour, 4)} per GiB-hour",
            html.size(rank.next_bytes),
            html.size(rank.best_bytes),
            html.money(rank.best_net_per_hour, 2),
        )
        for rank in found.ranks
    ]
    ranked = table(
        ("service", "first room saves", "up to", "best alone", "net per hour then"),
        rows,
        caption="Services by what a GiB saves, the most first",
    )
    columns = (
        ("budget", *(share.name for share in found.splits[0].shares), "net per hour", "exact") if found.splits else ()
    )
    split = [
        (
            html.size(budget),
            *(html.size(share.stored_bytes) for share in each.shares),
            html.money(each.net_per_hour, 2),
            "yes" if each.is_exact else f"within {html.money(each.at_most - each.net_per_hour, 2)}",
        )
        for budget, each in zip(found.budgets, found.splits, strict=True)
    ]
    return Section(
        key,
        "Services compared",
        f"{len(found.ranks)} traces as services that could share one store: where room saves most, and how a "
        "budget is split so "
        "that all together return most.",
        (ranked, table(columns, split, caption="Budgets of bytes, split so that the net value is greatest")),
    )
