"""What it is worth that engines share one pool."""

from __future__ import annotations

from collections.abc import Iterable

from matplotlib.ticker import FuncFormatter

from kvcm.optimizer.pooling import PoolingRow, PoolingStudy, Router, Topology
from kvcm.optimizer.report import amounts
from kvcm.optimizer.report.drawing import Chart, Pane, Table, figure
from kvcm.optimizer.report.palette import INK, SERIES
from kvcm.optimizer.report.section import Section
from kvcm.optimizer.study import Study

__all__ = ["pooling"]


_NOTABLE = 0.05
"""Points of hit rate."""


def pooling(study: Study, key: str) -> Section:
    """Return the section on pooling."""
    found = study.pooling
    return Section(
        key,
        "One pool against local caches",
        f"{found.engines} engines with caches of their own find only what they computed themselves, so it matters "
        "where a "
        "request goes; a pool finds what any of them computed, wherever it goes. All caches are LRU and the room "
        "in total "
        "is the same; with both, the pool comes on top of the local caches.",
        (figure(_chart(found, f"{key}-rates")),),
    )


def _routers(found: PoolingStudy) -> list[Router]:
    return list(dict.fromkeys(row.router for row in found.rows))


def _told(found: PoolingStudy) -> str:
    pool = next(row for row in found.rows if row.topology is Topology.POOL)
    local = [row for row in found.rows if row.topology is Topology.LOCAL]
    best, worst = max(local, key=_rate), min(local, key=_rate)
    gain = 100 * (pool.token_hit_rate - best.token_hit_rate)
    saved = pool.hits.prefix_tokens - best.hits.prefix_tokens
    than = f"the best router of local caches ({best.router.label})"
    if gain >= _NOTABLE:
        comparison = f"{gain:.1f} points more than {than}: {amounts.short(saved)} tokens less to compute"
    elif gain > -_NOTABLE:
        comparison = f"as many as {than}"
    else:
        comparison = f"{-gain:.1f} points less than {than}"
    return (
        f"The pool finds {amounts.percent(pool.token_hit_rate)} of the tokens, {comparison}, and "
        f"{100 * (pool.token_hit_rate - worst.token_hit_rate):.1f} points more than {worst.router.label}."
    )


def _rate(row: PoolingRow) -> float:
    return row.token_hit_rate


def _chart(found: PoolingStudy, key: str) -> Chart:
    local = next(row for row in found.rows if row.topology is Topology.LOCAL)
    return Chart(
        key,
        "Tokens found by router and topology",
        f"Local caches of {amounts.count(local.local_blocks)} blocks each "
        f"({amounts.size(local.local_blocks * local.block_bytes)}). {_told(found)}",
        lambda pane: _draw(found, pane),
        _table(found.rows),
        height=320,
    )


def _draw(found: PoolingStudy, pane: Pane) -> None:
    (axes,) = pane.axes
    routers = _routers(found)
    pool = next(row for row in found.rows if row.topology is Topology.POOL)
    axes.axvline(pool.token_hit_rate, color=INK, linewidth=2, linestyle="--", label="one pool, whatever the router")
    styles = {
        Topology.LOCAL: (SERIES[2], "o", "local caches"),
        Topology.BOTH: (SERIES[0], "D", "local caches and pool"),
    }
    for topology, (color, marker, name) in styles.items():
        rows = {row.router: row for row in found.rows if row.topology is topology}
        rates = [rows[router].token_hit_rate for router in routers if router in rows]
        axes.plot(rates, range(len(rates)), marker, color=color, markersize=8, label=name)
    axes.set_yticks(range(len(routers)), [router.label.replace("+", "\n+ ").replace("_", " ") for router in routers])
    axes.set_ylim(len(routers) - 0.5, -0.5)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda each, _: f"{100 * each:g} %"))
    axes.set_xlabel("prompt tokens found")
    pane.legend(columns=3)


def _table(rows: Iterable[PoolingRow]) -> Table:
    columns = (
        "router", "caches", "tokens found", "in local caches", "in the pool", "busiest engine", "migrations",
        "mean wait", "kept twice",
    )  # fmt: skip
    return Table(columns, [_row(row) for row in rows])


def _row(row: PoolingRow) -> tuple[str, ...]:
    tokens = max(1, row.totals.tokens)
    return (
        row.router.label,
        row.topology.value,
        amounts.percent(row.token_hit_rate),
        amounts.percent(row.local_hit_tokens / tokens),
        amounts.percent(row.pool_hit_tokens / tokens),
        f"{row.imbalance:.2f} × the mean",
        amounts.count(row.migrations),
        amounts.duration(row.mean_wait_seconds),
        amounts.size(row.mean_duplicate_bytes),
    )
