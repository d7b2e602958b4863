"""What a check found."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from kvcm.model.units import format_duration

__all__ = ["Finding", "Level", "check_skew", "fail", "ok", "warn"]


class Level(Enum):
    """How bad it is."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


class Finding(NamedTuple):
    """One line.

    Attributes:
        level: how bad it is.
        check: what was looked at.
        found: how it is.
        advice: what to do, "" when there is nothing to be done.
    """

    level: Level
    check: str
    found: str
    advice: str = ""


def ok(check: str, found: str) -> Finding:
    """Return that all is well."""
    return Finding(Level.OK, check, found)


def warn(check: str, found: str, advice: str) -> Finding:
    """Return that it works, and may not be what was meant."""
    return Finding(Level.WARN, check, found, advice)


def fail(check: str, found: str, advice: str) -> Finding:
    """Return that it does not work."""
    return Finding(Level.FAIL, check, found, advice)


# Clocks: deadlines, leases and pins mean the same time on every host only where the clocks agree.

_CHECK = "clocks"
_MAX_SECONDS = 1.0


def check_skew(whose: str, ahead_seconds: float) -> Finding:
    """Return whether a clock agrees with ours."""
    if abs(ahead_seconds) <= _MAX_SECONDS:
        return ok(_CHECK, f"that of {whose} agrees with this host's")
    word = "ahead of" if ahead_seconds > 0 else "behind"
    return warn(
        _CHECK, f"that of {whose} is {format_duration(abs(ahead_seconds))} {word} this host's", "let NTP set both"
    )
