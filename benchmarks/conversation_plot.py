"""Draws docs/conversation.svg from benchmarks/results/conversation.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
from matplotlib import pyplot

ROOT = Path(__file__).parents[1]
_WITH, _ALONE, _INK, _FAINT = "#0b7285", "#adb5bd", "#212529", "#dee2e6"
_PANELS = (
    ("prompt tokens computed", "Prompt tokens computed", 1000, "thousand"),
    ("median time to first token", "Median time to first token", 1, "s"),
)


def main() -> int:
    rows = json.loads((ROOT / "benchmarks" / "results" / "conversation.json").read_text())["rows"]
    style = {
        "svg.hashsalt": "kvcm", "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 10,
        "text.color": _INK, "axes.labelcolor": _INK, "xtick.color": _INK, "ytick.color": _INK,
    }  # fmt: skip
    with mpl.rc_context(style):
        figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
        for panel, axis in zip(_PANELS, axes, strict=True):
            _draw(axis, rows, *panel)
        figure.savefig(ROOT / "docs" / "conversation.svg", metadata={"Date": None}, facecolor="white")
    return 0


def _draw(axis: Any, rows: list[dict[str, Any]], metric: str, title: str, unit: float, unit_name: str) -> None:
    turns = [row for row in rows if row["metric"] == metric and row["case"].startswith("turn ")]
    numbers = list(range(1, len(turns) + 1))
    width = 0.4
    for shift, key, color, label in (
        (-width / 2, "baseline", _ALONE, "vLLM alone"),
        (width / 2, "value", _WITH, "with KVCM"),
    ):
        heights = [row[key] / unit for row in turns]
        axis.bar([number + shift for number in numbers], heights, width, color=color, label=label)
    axis.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axis.set_xlabel("turn; the engine is restarted before each")
    axis.set_ylabel(unit_name)
    axis.set_xticks(numbers)
    axis.grid(axis="y", color=_FAINT)
    axis.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.tick_params(length=0)
    axis.legend(frameon=False, loc="upper left")


if __name__ == "__main__":
    raise SystemExit(main())
