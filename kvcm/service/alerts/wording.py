"""Numbers as people read them, in sentences."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["counted", "joined", "lasting", "percent", "sentence"]

_MINUTE = 60
_HOUR = 3600
_DAY = 86_400


def percent(part: int, whole: int) -> str:
    """Return a part as per cent of the whole, never 100 where something is left."""
    if part < whole:
        return f"{min(99.9, 100 * part / whole):.3g} %"
    return f"{100 * part / whole:.0f} %" if whole > 0 else "100 %"


def counted(number: int, noun: str) -> str:
    """Return a number and its noun, which takes an s for more than one."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def lasting(seconds: float) -> str:
    """Return a time in its largest unit."""
    for length, name in ((_DAY, "day"), (_HOUR, "hour"), (_MINUTE, "minute")):
        if seconds >= 2 * length:
            return counted(int(seconds // length), name)
    return f"{seconds:.0f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"


def joined(parts: Sequence[str]) -> str:
    """Return clauses as one."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}" if parts else ""


def sentence(clause: str) -> str:
    """Return a clause as a sentence."""
    return f"{clause[:1].upper()}{clause[1:]}."
