"""What a check found."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

__all__ = ["Finding", "Level", "fail", "ok", "warn"]


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
