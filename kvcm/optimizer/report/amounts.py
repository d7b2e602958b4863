"""Amounts as a report writes them: with units, and no more digits than they deserve."""

from __future__ import annotations

import math

__all__ = ["count", "duration", "money", "percent", "rate", "short", "size"]

_SPANS = ((86_400.0, "d"), (3_600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"))


def count(value: float) -> str:
    """Return a whole number with commas."""
    return f"{value:,.0f}"


def percent(share: float, digits: int = 1) -> str:
    """Return a share: `36.6 %`."""
    return f"{100 * share:.{digits}f} %"


def short(value: float) -> str:
    """Return a number in three digits or so: `172 k`, `4.03 M`."""
    for power, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= power:
            return f"{_three(value / power)} {letter}"
    return _three(value)


def rate(value: float, unit: str) -> str:
    """Return a number per time or the like: `32.2 k tokens/s`."""
    text = short(value)
    return f"{text} {unit}"


def size(size_bytes: float) -> str:
    """Return bytes: `1.5 GiB`."""
    for power, unit in ((5, "PiB"), (4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if abs(size_bytes) >= 1024**power:
            return f"{_three(size_bytes / 1024**power)} {unit}"
    return f"{size_bytes:.0f} B"


def duration(seconds: float) -> str:
    """Return a time: `40 ms`, `1.5 h`."""
    if not math.isfinite(seconds) or not seconds:
        return "0 s" if not seconds else "never"
    span, unit = next(((span, unit) for span, unit in _SPANS if seconds >= span), (1e-6, "µs"))
    value = seconds / span
    return f"{value:.0f} {unit}" if value >= 10 or value == int(value) else f"{value:.1f} {unit}"


def money(amount: float, digits: int = 0) -> str:
    """Return an amount of money, in whatever currency the prices are."""
    sign = "−" if round(amount, digits) < 0 else ""
    return f"{sign}${abs(amount):,.{digits}f}"


def _three(value: float) -> str:
    size = abs(value)
    digits = 0 if size >= 100 or value == int(value) else 1 if size >= 10 else 2
    return f"{value:,.{digits}f}"
