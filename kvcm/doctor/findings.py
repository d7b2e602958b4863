"""Findings of checks, and the check of clocks, which several others use."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from kvcm.model.units import format_duration

__all__ = ["Finding", "Level", "check_skew", "fail", "ok", "warn"]


class Level(Enum):
    """Severity of a finding."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


class Finding(NamedTuple):
    """The result of a check: one line.

    Attributes:
        level: severity.
        check: name of the check.
        found: its result.
        advice: what to do, "" if nothing has to be done.
    """

    level: Level
    check: str
    found: str
    advice: str = ""


def ok(check: str, found: str) -> Finding:
    """Return a finding without a problem."""
    return Finding(Level.OK, check, found)


def warn(check: str, found: str, advice: str) -> Finding:
    """Return a finding that works, and may not be intended."""
    return Finding(Level.WARN, check, found, advice)


def fail(check: str, found: str, advice: str) -> Finding:
    """Return a finding that does not work."""
    return Finding(Level.FAIL, check, found, advice)


# Clocks: deadlines, leases and pins are the same time on every host only if the clocks agree.

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
