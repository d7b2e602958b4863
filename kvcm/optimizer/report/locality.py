"""How a trace uses its blocks again: how far apart, how soon, how unequally, and by whom."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from kvcm.optimizer.locality import Distribution, Locality, SessionReuse
from kvcm.optimizer.report import amounts
from kvcm.optimizer.report.drawing import Chart, Pane, Table, figure
from kvcm.optimizer.report.palette import INK, MUTED, SERIES
from kvcm.optimizer.report.scales import duration_axis, log_axis, share_axis, time_axis
from kvcm.optimizer.report.section import Section
from kvcm.optimizer.study import Study

__all__ = ["locality"]

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
        f"Half of all reuses come within {amounts.count(median)} other blocks and {amounts.duration(wait)}. A revisit "
        "is a request that continues a known prefix; its time is that since the deepest known block was last used.",
        lambda pane: _draw_reuse(found, pane),
        _quantiles(
            {
                "reuse distance (blocks)": (found.reuse_distance_blocks, amounts.count),
                "time to reuse": (found.reuse_seconds, amounts.duration),
                "revisit interval": (found.revisit_seconds, amounts.duration),
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
        (name, amounts.count(found.count), *(shown(value) for value in found.quantiles.values()))  # type: ignore[operator]
        for name, (found, shown) in distributions.items()
    ]
    return Table(columns, rows)


def _popularity(found: Locality, key: str) -> Chart:
    popularity = found.popularity
    picked = range(0, len(popularity.ranks), max(1, len(popularity.ranks) // 12))
    rows = [
        (
            amounts.count(popularity.ranks[at]),
            amounts.count(popularity.accesses[at]),
            amounts.percent(popularity.shares[at]),
        )
        for at in picked
    ]
    return Chart(
        key,
        "How unequally blocks are used",
        f"{amounts.percent(popularity.once_share)} of the blocks are used once: a cache keeps these in vain. Accesses "
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
    left.yaxis.set_major_formatter(FuncFormatter(lambda value, _: amounts.short(value)))
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
            amounts.duration(found.lifetimes_seconds[at]),
            amounts.count(found.mean_blocks[at]),
            amounts.percent(found.hit_share[at]),
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
        left.plot(found.seconds, blocks, dashes, color=SERIES[number], label=f"of the last {amounts.duration(seconds)}")
    left.yaxis.set_major_formatter(FuncFormatter(lambda value, _: amounts.short(value)))
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
                amounts.duration(seconds),
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
        f"Of the blocks read by {amounts.count(found.sessions)} sessions {amounts.percent(found.own_share)} were last "
        f"used by the same session, {amounts.percent(found.other_share)} by another one, and "
        f"{amounts.percent(found.new_share)} were new.",
        lambda pane: _draw_sessions(found, pane),
        _quantiles(
            {
                "turns per session": (found.turns, amounts.count),
                "time between turns": (found.turn_interval_seconds, amounts.duration),
                "blocks read that were known": (found.reuse_rates, amounts.percent),
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
