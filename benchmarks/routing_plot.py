"""Draws docs/routing.svg from benchmarks/results/routing.json."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib as mpl

mpl.use("svg")
from matplotlib import pyplot

ROOT = Path(__file__).parents[1]
_OURS, _OTHERS, _BOUND, _INK, _FAINT = "#0b7285", "#adb5bd", "#e9ecef", "#212529", "#dee2e6"
_ORDER = ("one engine alone", "round_robin", "consistent_hash", "kvcm", "oracle")


def main() -> int:
    rows = json.loads((ROOT / "benchmarks" / "results" / "routing.json").read_text())["rows"]
    rates = {row["case"].rpartition(", ")[2]: row["value"] for row in rows if row["metric"] == "hit rate in engines"}
    colors = {"kvcm": _OURS, "oracle": _BOUND, "one engine alone": _BOUND}
    style = {
        "svg.hashsalt": "kvcm", "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 10,
        "text.color": _INK, "axes.labelcolor": _INK, "xtick.color": _INK, "ytick.color": _INK,
    }  # fmt: skip
    with mpl.rc_context(style):
        figure, axis = pyplot.subplots(figsize=(7.5, 2.6), layout="constrained")
        names = [name for name in reversed(_ORDER) if name in rates]
        axis.barh(names, [100 * rates[name] for name in names], color=[colors.get(name, _OTHERS) for name in names])
        for position, name in enumerate(names):
            axis.text(100 * rates[name] + 1, position, f"{100 * rates[name]:.0f} %", va="center")
        axis.set_title("Prompt tokens that engines did not compute", loc="left", fontsize=11, fontweight="bold")
        axis.set_xlim(0, 100)
        axis.set_xlabel("% of all prompt tokens; two vLLM and one SGLang on CPUs")
        axis.grid(axis="x", color=_FAINT)
        axis.set_axisbelow(True)
        for side in ("top", "right", "left"):
            axis.spines[side].set_visible(False)
        axis.tick_params(length=0)
        figure.savefig(ROOT / "docs" / "routing.svg", metadata={"Date": None}, facecolor="white")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
