"""Hit rates of policies over capacity, against the bound that no policy can beat."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from kvcm.optimizer.report import amounts
from kvcm.optimizer.report.drawing import Chart, Pane, Table, figure
from kvcm.optimizer.report.palette import BOUND, INK, MUTED, policy_style
from kvcm.optimizer.report.scales import capacity_axis, geometric_places, share_axis
from kvcm.optimizer.report.section import Section
from kvcm.optimizer.results import Replay
from kvcm.optimizer.study import Study

__all__ = ["hit_rates"]


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
        lambda pane: _draw(study, pane),
        _table(study),
        height=420,
    )


def _best_at(replays: Iterable[Replay]) -> str:
    live = [replay for replay in replays if not replay.policy.startswith(BOUND)]
    if not live:
        return ""
    middle = sorted({replay.capacity_blocks for replay in live})
    capacity = middle[len(middle) // 2]
    best = max((each for each in live if each.capacity_blocks == capacity), key=lambda each: each.block_hit_rate)
    return f"At {amounts.count(capacity)} blocks {best.policy} finds most: {amounts.percent(best.block_hit_rate)}."


def _draw(study: Study, pane: Pane) -> None:
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
        f"unlimited: {amounts.percent(unlimited)}",
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


def _table(study: Study) -> Table:
    by_policy = _by_policy(study.replays)
    columns = ("capacity (blocks)", "of unique", *(["size"] if study.bytes_per_block else []), *by_policy)
    capacities = sorted({replay.capacity_blocks for replay in study.replays})
    return Table(columns, [_row(study, capacity, by_policy) for capacity in capacities])


def _row(study: Study, capacity: int, by_policy: Mapping[str, Mapping[int, Replay]]) -> tuple[str, ...]:
    size = [amounts.size(capacity * study.bytes_per_block)] if study.bytes_per_block else []
    share = amounts.percent(capacity / max(1, study.trace.unique_blocks))
    rates = (np.nan if capacity not in each else each[capacity].block_hit_rate for each in by_policy.values())
    shown = ("" if np.isnan(rate) else amounts.percent(rate, 2) for rate in rates)
    return (amounts.count(capacity), share, *size, *shown)
