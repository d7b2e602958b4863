"""What a cache returns: GPUs and money over its capacity, and where the link to it is busy."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from kvcm.optimizer.report import amounts
from kvcm.optimizer.report.drawing import Chart, Pane, Table, figure
from kvcm.optimizer.report.markup import Markup, table, tag
from kvcm.optimizer.report.palette import INK, MUTED, SERIES, policy_style
from kvcm.optimizer.report.scales import capacity_axis, geometric_places, money_ticks
from kvcm.optimizer.report.section import Section
from kvcm.optimizer.roi import Returns
from kvcm.optimizer.study import BOUND, Recommendation, Study

__all__ = ["value"]

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
        f"{found.policy} returns most, {amounts.money(best['net_per_hour'], 2)} per hour, at "
        f"{amounts.count(best['capacity_blocks'])} blocks ({amounts.size(best['capacity_gib'] * 2**30)}); the "
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
    """Leave out what is far below 0: a capacity that nobody would buy is not to squeeze the rest."""
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
                amounts.count(row["capacity_blocks"]),
                amounts.size(row["capacity_gib"] * 2**30),
                amounts.percent(row["hit_share"]),
                f"{row['gpus_saved']:,.2f}",
                f"{row['whole_gpus_saved']:,.0f}",
                amounts.money(row["saved_per_hour"], 2),
                amounts.money(row["storage_per_hour"], 2),
                amounts.money(row["net_per_hour"], 2),
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
        (amounts.percent(each, 0), f"{nodes:,.2f}", f"{links:,.2f}")
        for each, nodes, links in zip(shares, compute, link, strict=True)
    ]
    return Chart(
        key,
        "What limits the nodes",
        "Nodes that prefill the rest, and nodes whose links carry the loads; the greater of both is needed. They "
        "meet at "
        f"{amounts.percent(returns.turning_share)} found; the recommended setting is {where} that.",
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
        ("prefill of a node", amounts.rate(deployment.prefill_tokens_per_second, "tokens/s")),
        ("GPUs per node", f"{deployment.gpus_per_node:g}"),
        ("KV", f"{amounts.count(deployment.kv_bytes_per_token)} bytes per token"),
        (
            "link of a node to the cache",
            f"{deployment.bandwidth_bytes_per_second / 1e9:,.3g} GB/s, of which "
            f"{amounts.percent(deployment.usable_share, 0)} "
            f"usable, after {amounts.duration(deployment.latency_seconds)}",
        ),
        ("planned utilisation", amounts.percent(deployment.utilisation, 0)),
        ("prices", f"{amounts.money(deployment.price_per_gpu_hour, 2)} per GPU-hour, "
                   f"{amounts.money(deployment.price_per_gib_month, 2)} per GiB-month of storage"),
        ("offered load", amounts.rate(returns.offered_tokens_per_second, "prompt tokens/s")),
        ("nodes without a cache", f"{returns.nodes_without:,.2f}"),
        ("a prefix is worth loading from", "never" if threshold == float("inf") else f"{threshold:,.0f} tokens"),
        ("storage price that leaves nothing", f"{amounts.money(returns.break_even_gib_month, 2)} per GiB-month"),
    ]  # fmt: skip
    return tag("div", table(("", ""), rows, caption=f"Deployment: {study.options.deployment_name}"), class_="facts")
