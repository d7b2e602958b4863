"""How much of the answer hangs on each input of the deployment."""

from __future__ import annotations

from kvcm.optimizer.report import amounts
from kvcm.optimizer.report.drawing import Chart, Pane, Table, figure
from kvcm.optimizer.report.markup import Markup, table
from kvcm.optimizer.report.palette import INK, SERIES
from kvcm.optimizer.report.scales import money_ticks
from kvcm.optimizer.report.section import Section
from kvcm.optimizer.roi import Grid, Swing
from kvcm.optimizer.study import Study

__all__ = ["sensitivity"]


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
    """Return the section on what is not known well; None without a policy that could be set."""
    if not study.swings or study.grid is None or study.recommendation is None:
        return None
    widest = study.swings[0]
    now = float(study.recommendation.returns.net_per_hour.max())
    chart = Chart(
        f"{key}-tornado",
        "Net value when one input is off by 20 %",
        "Each bar is the best net value per hour at the low and at the high end of one input; the line is the "
        "value as "
        f"assumed, {amounts.money(now, 2)}. Most hangs on {_name(widest)}.",
        lambda pane: _draw(study.swings, now, pane),
        _table(study.swings),
        height=380,
    )
    return Section(
        key,
        "Sensitivity",
        "Which of the assumed figures are worth measuring first, and whether the recommended capacity would change.",
        (figure(chart), _grid(study.grid, study.bytes_per_block)),
    )


def _name(swing: Swing) -> str:
    return _NAMES.get(swing.input, swing.input.replace("_", " "))


def _draw(swings: tuple[Swing, ...], now: float, pane: Pane) -> None:
    (axes,) = pane.axes
    places = range(len(swings))
    for each, color, name in ((0, SERIES[2], "input 20 % lower"), (1, SERIES[0], "input 20 % higher")):
        widths = [(swing.low_net, swing.high_net)[each] - now for swing in swings]
        axes.barh(places, widths, left=now, color=color, alpha=0.85, height=0.7, label=name)
    axes.axvline(now, color=INK, linewidth=1)
    axes.set_yticks(places, [_label(swing, is_narrow=pane.is_narrow) for swing in swings])
    axes.set_ylim(len(swings) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    money_ticks(axes.xaxis, 4 if pane.is_narrow else 7)
    axes.set_xlabel("net value per hour")
    pane.legend()


def _label(swing: Swing, *, is_narrow: bool) -> str:
    return _name(swing).replace(" ", "\n", 1) if is_narrow else _name(swing)


def _table(swings: tuple[Swing, ...]) -> Table:
    columns = ("input", "low", "high", "net if low", "net if high", "best capacity if low", "if high", "widest swing")
    rows = [
        (
            _name(swing),
            f"{swing.low:,.4g}",
            f"{swing.high:,.4g}",
            amounts.money(swing.low_net, 2),
            amounts.money(swing.high_net, 2),
            f"{swing.low_blocks:,} blocks",
            f"{swing.high_blocks:,} blocks",
            amounts.money(swing.width, 2),
        )
        for swing in swings
    ]
    return Table(columns, rows)


def _grid(found: Grid, bytes_per_block: float) -> Markup:
    columns = ("link of a node", *(f"{amounts.money(price, 2)} per GiB-month" for price in found.prices))
    rows = [
        (
            f"{bandwidth / 1e9:,.3g} GB/s",
            *(
                f"{amounts.money(net, 2)}, {amounts.size(blocks * bytes_per_block)}"
                for net, blocks in zip(found.net_per_hour[row], found.best_blocks[row], strict=True)
            ),
        )
        for row, bandwidth in enumerate(found.bandwidths)
    ]
    return table(columns, rows, caption="Best net value per hour, and the capacity it takes, by bandwidth and price")
