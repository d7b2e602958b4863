"""Axes of charts: capacities in blocks and bytes, times, shares."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import XAxis, YAxis
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from kvcm.optimizer.report import amounts
from kvcm.optimizer.trace import Int64Column

__all__ = ["capacity_axis", "duration_axis", "geometric_places", "log_axis", "money_ticks", "share_axis", "time_axis"]

_FEW, _MANY = 4, 8


def capacity_axis(axes: Axes, bytes_per_block: float, *, is_narrow: bool, name: str = "capacity") -> None:
    """Make x capacities in blocks, logarithmic, with bytes above.

    Args:
        bytes_per_block: of KV; 0 where it is not known, then there is no axis above.
    """
    low, high = axes.get_xlim()
    axes.set_xscale("log")
    axes.set_xlim(max(low, 1), high)
    _log_ticks(axes, amounts.short, is_narrow=is_narrow)
    axes.set_xlabel(f"{name} (blocks)")
    if bytes_per_block:
        low, high = axes.get_xlim()
        above = axes.twiny()
        above.grid(visible=False)
        above.spines["top"].set_visible(True)
        above.set_xscale("log")
        above.set_xlim(low * bytes_per_block, high * bytes_per_block)
        ticks = _powers(low * bytes_per_block, high * bytes_per_block, 1024.0, _FEW if is_narrow else _MANY)
        above.xaxis.set_major_locator(FixedLocator(ticks))
        above.xaxis.set_major_formatter(FuncFormatter(lambda value, _: amounts.size(value)))
        above.xaxis.set_minor_locator(NullLocator())


def log_axis(axes: Axes, label: str, *, is_narrow: bool) -> None:
    """Make x a logarithmic count."""
    axes.set_xscale("log")
    _log_ticks(axes, amounts.short, is_narrow=is_narrow)
    axes.set_xlabel(label)


def duration_axis(axes: Axes, label: str, *, is_narrow: bool) -> None:
    """Make x logarithmic times, at spans that people know."""
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    known = (1e-3, 1e-2, 0.1, 1, 10, 60, 600, 3600, 6 * 3600, 86400, 7 * 86400)
    ticks = [each for each in known if low <= each <= high]
    while len(ticks) > (_FEW if is_narrow else _MANY):
        ticks = ticks[::2]
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: amounts.duration(value)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(label)


def time_axis(axes: Axes, span_seconds: float, *, is_narrow: bool) -> None:
    """Make x the time since the trace began, which it is in seconds."""
    step, unit = next(((s, u) for s, u in ((3600.0, "h"), (60.0, "min")) if span_seconds >= 2 * s), (1.0, "s"))
    axes.set_xlim(0, max(span_seconds, 1.0))
    places = MaxNLocator(_FEW if is_narrow else _MANY, steps=[1, 2, 5, 10]).tick_values(
        0, max(span_seconds, 1.0) / step
    )
    axes.xaxis.set_major_locator(FixedLocator([place * step for place in places if place * step <= span_seconds]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / step:g}"))
    axes.set_xlabel(f"time since the first request ({unit})")


def share_axis(axes: Axes, label: str, most: float = 1.0) -> None:
    """Make y a share, from 0 on."""
    axes.set_ylim(0, most)
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))
    axes.set_ylabel(label)


def money_ticks(axis: XAxis | YAxis, most: int) -> None:
    """Make the ticks of an axis round amounts of money."""
    axis.set_major_locator(MaxNLocator(most, steps=[1, 2, 5, 10]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: amounts.money(value, 0 if value == round(value) else 2)))


def geometric_places(last: int, most: int = 160) -> Int64Column:
    """Return whole numbers from 1 to `last`, evenly spread on a logarithmic scale."""
    if last < 1:
        return np.zeros(0, np.int64)
    return np.unique(np.geomspace(1, last, most).round().astype(np.int64))


def _log_ticks(axes: Axes, shown: Callable[[float], str], *, is_narrow: bool) -> None:
    low, high = axes.get_xlim()
    axes.xaxis.set_major_locator(FixedLocator(_powers(low, high, 10.0, _FEW if is_narrow else _MANY)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: shown(value)))
    axes.xaxis.set_minor_locator(NullLocator())


def _powers(low: float, high: float, base: float, most: int) -> Sequence[float]:
    """Return few round numbers between two: powers of the base, and steps between them where there is room."""
    steps = (1.0, 2.0, 5.0) if base == 10 else (1.0, 4.0, 16.0, 64.0, 256.0)
    span = range(math.floor(math.log(low, base)), math.ceil(math.log(high, base)) + 1)
    fine = [step * base**power for power in span for step in steps if low <= step * base**power <= high]
    coarse = [each for each in fine if math.isclose(power := math.log(each, base), round(power), abs_tol=1e-9)]
    ticks = fine if len(fine) <= most else coarse if base == 10 else fine[::2]
    while len(ticks) > most:
        ticks = ticks[::2]
    return ticks
