"""Draws a game: availability and hits over time, and below them every fault with its recovery as a bar."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl

mpl.use("svg")
from game_plan import KINDS
from matplotlib import pyplot

if TYPE_CHECKING:
    from game_run import Game

__all__ = ["draw"]

_GOOD, _HITS, _FAULT, _RECOVERY, _INK, _FAINT = "#0b7285", "#5c7cfa", "#e8590c", "#ffd8a8", "#212529", "#dee2e6"
_BUCKETS = 120
_STYLE = {
    "svg.hashsalt": "kvcm", "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9,
    "text.color": _INK, "axes.labelcolor": _INK, "xtick.color": _INK, "ytick.color": _INK,
}  # fmt: skip


def draw(game: Game, file: Path) -> None:
    """Write the plot of a game."""
    kinds = [kind.name for kind in KINDS if any(each.step.kind == kind.name for each in game.done)]
    with mpl.rc_context(_STYLE):
        figure, axes = pyplot.subplots(
            3, 1, figsize=(10, 3.2 + 0.17 * len(kinds)), layout="constrained", sharex=True,
            height_ratios=[1.0, 1.0, 0.4 + 0.16 * len(kinds)],
        )  # fmt: skip
        _line(axes[0], game, _availability(game), "calls answered well", _GOOD)
        _line(axes[1], game, _hits(game), "tokens loaded", _HITS)
        _bars(axes[2], game, kinds)
        figure.savefig(file, metadata={"Date": None}, facecolor="white")
        pyplot.close(figure)


def _availability(game: Game) -> list[tuple[float, float, float]]:
    return [(sample.at, float(sample.is_good), 1.0) for sample in game.samples]


def _hits(game: Game) -> list[tuple[float, float, float]]:
    return [(each["at"], each.get("loaded_tokens", 0), each.get("prompt_tokens", 0)) for each in game.results]


def _line(axis: Any, game: Game, points: Sequence[tuple[float, float, float]], title: str, color: str) -> None:
    """Draw the ratio of two sums over time; gaps where there is nothing."""
    width = (game.ended - game.began) / _BUCKETS
    sums = [[0.0, 0.0] for _ in range(_BUCKETS)]
    for at, part, whole in points:
        bucket = int((at - game.began) / width)
        if 0 <= bucket < _BUCKETS:
            sums[bucket][0] += part
            sums[bucket][1] += whole
    shown = [100.0 * part / whole if whole else float("nan") for part, whole in sums]
    axis.step([number * width for number in range(_BUCKETS)], shown, where="post", color=color, linewidth=1.4)
    _shade(axis, game)
    axis.set_ylim(-4, 104)
    axis.set_yticks([0, 50, 100], ["0", "50", "100 %"])
    axis.set_title(title, loc="left", fontsize=10, fontweight="bold")
    _plain(axis)


def _shade(axis: Any, game: Game) -> None:
    for window in game.windows:
        axis.axvspan(window.began - game.began, window.until - game.began, color=_RECOVERY, alpha=0.35, linewidth=0)


def _bars(axis: Any, game: Game, kinds: Sequence[str]) -> None:
    place: Callable[[str], int] = {name: number for number, name in enumerate(kinds)}.__getitem__
    for window in game.windows:
        begin, row = window.began - game.began, place(window.kind)
        axis.barh(row, window.until - window.began, left=begin, height=0.62, color=_RECOVERY)
        axis.barh(row, max(0.4, window.ended - window.began), left=begin, height=0.62, color=_FAULT)
    axis.set_yticks(range(len(kinds)), kinds, fontsize=8)
    axis.invert_yaxis()
    axis.set_xlim(0, game.ended - game.began)
    axis.set_xlabel("seconds; dark: the fault, light: the recovery that is stated for it")
    _plain(axis)


def _plain(axis: Any) -> None:
    axis.grid(axis="x", color=_FAINT)
    axis.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.tick_params(length=0)
