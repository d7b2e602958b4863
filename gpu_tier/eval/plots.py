"""Plots of the quality report. Needs matplotlib, which only reports do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["plot_lines"]

_COLORS = {
    "oracle": "#212529", "quest": "#0b7285", "dsa": "#e8590c", "snapkv": "#5f3dc4", "streaming_llm": "#868e96",
    "wave": "#0b7285", "wave, no estimation": "#74c0fc", "pq m4b8": "#5f3dc4", "pq m2b6": "#e8590c",
    "dsa stand-in": "#e8590c", "sharp": "#0b7285", "mid": "#e8590c", "diffuse": "#5f3dc4",
}  # fmt: skip
_FAINT = "#dee2e6"

Line = Sequence[tuple[float, float]]


def plot_lines(
    panels: Mapping[str, Mapping[str, Line]], x_label: str, y_label: str, path: Path, *, log_x: bool = False
) -> None:
    """Draw one panel of lines per entry, side by side with one scale, as SVG.

    Args:
        panels: title of each panel → name of each line → its points.
        x_label: of all panels.
        y_label: of the first.
        path: file to write.
        log_x: whether x is logarithmic.
    """
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot

    with mpl.rc_context({"svg.hashsalt": "kvcm", "svg.fonttype": "none", "font.family": "sans-serif"}):
        figure, axes = pyplot.subplots(
            1, len(panels), figsize=(3.6 * len(panels), 3.2), sharey=True, squeeze=False, layout="constrained"
        )
        for axis, (title, lines) in zip(axes[0], panels.items(), strict=True):
            _draw(axis, title, lines, log_x=log_x)
            axis.set_xlabel(x_label)
        axes[0][0].set_ylabel(y_label)
        axes[0][-1].legend(frameon=False, fontsize=8)
        figure.savefig(path, metadata={"Date": None}, facecolor="white")
        pyplot.close(figure)


def _draw(axis: Any, title: str, lines: Mapping[str, Line], *, log_x: bool) -> None:
    for name, points in lines.items():
        x, y = zip(*sorted(points), strict=True)
        axis.plot(x, y, marker="o", markersize=3, label=name, color=_COLORS.get(name))
    if log_x:
        _log_ticks(axis, sorted({x for points in lines.values() for x, _ in points}))
    axis.set_title(title, loc="left", fontsize=10, fontweight="bold")
    axis.grid(color=_FAINT)
    axis.set_axisbelow(True)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def _log_ticks(axis: Any, values: Sequence[float]) -> None:
    """Mark the measured values themselves: powers of ten say little between 2 and 20 %."""
    axis.set_xscale("log")
    axis.set_xticks(values, [f"{value:g}" for value in values])
    axis.set_xticks([], minor=True)
