"""Draws docs/optimizer.svg: what policies find of a published trace at every capacity, and the bound."""

from __future__ import annotations

import matplotlib as mpl

mpl.use("svg")
import numpy as np
from matplotlib import pyplot
from optimizer import ROOT, traces_directory

from kvcm.optimizer.curves import CURVES
from kvcm.optimizer.options import PolicySpec
from kvcm.optimizer.readers import read_trace
from kvcm.optimizer.replay import Job, replay_all
from kvcm.optimizer.trace import Trace

_INK, _FAINT = "#212529", "#dee2e6"
_EXACT = (
    ("belady", "no policy finds more (belady)", "#212529"),
    ("leaf_lru", "leaf_lru", "#0b7285"),
    ("lru", "lru", "#e67700"),
)
_REPLAYED = (("s3fifo", "#5f3dc4"), ("fifo", "#c2255c"), ("lfu", "#868e96"))
_PERCENT = (1, 2, 3, 5, 7, 10, 14, 20, 30, 50, 70, 100)


def main() -> int:
    directory = traces_directory()
    if directory is None:
        raise SystemExit("KVCM_TRACES names no directory of traces")
    trace = read_trace(directory / "agentic_composed.jsonl.gz", use_cache=False)
    style = {
        "svg.hashsalt": "kvcm", "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 10,
        "text.color": _INK, "axes.labelcolor": _INK, "xtick.color": _INK, "ytick.color": _INK,
    }  # fmt: skip
    with mpl.rc_context(style):
        _draw(trace)
    return 0


def _draw(trace: Trace) -> None:
    figure, axis = pyplot.subplots(figsize=(9, 3.8), layout="constrained")
    everything = trace.unique_blocks
    places = np.unique(np.geomspace(everything / 200, everything, 300).astype(int))
    for policy, label, color in _EXACT:
        curve = CURVES[policy](trace)
        dashes = "--" if policy == "belady" else "-"
        axis.plot(
            places / everything, curve.prefix_blocks[places] / curve.totals.blocks, dashes, color=color, label=label
        )
    for policy, color in _REPLAYED:
        jobs = [Job(PolicySpec(policy), everything * percent // 100) for percent in _PERCENT]
        rates = [replay.block_hit_rate for replay in replay_all(trace, jobs)]
        axis.plot(
            [percent / 100 for percent in _PERCENT], rates, "o-", color=color, markersize=3, linewidth=1, label=policy
        )
    axis.set_xscale("log")
    axis.xaxis.set_major_locator(mpl.ticker.FixedLocator([0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1]))
    axis.xaxis.set_minor_locator(mpl.ticker.NullLocator())
    axis.xaxis.set_major_formatter(mpl.ticker.FuncFormatter(lambda share, _: f"{share * 100:g} %"))
    axis.yaxis.set_major_formatter(mpl.ticker.PercentFormatter(1, symbol=" %", decimals=0))
    axis.set_title(
        f"Blocks found of {trace.accesses / 1e6:.1f} million that 40 coding sessions ask for",
        loc="left",
        fontsize=11,
        fontweight="bold",
    )
    axis.set_xlabel(f"capacity, in % of all {everything:,} blocks")
    axis.grid(color=_FAINT)
    axis.set_ylim(0, 1)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.tick_params(length=0)
    axis.legend(frameon=False, loc="upper left")
    figure.savefig(ROOT / "docs" / "optimizer.svg", metadata={"Date": None}, facecolor="white")


if __name__ == "__main__":
    raise SystemExit(main())
