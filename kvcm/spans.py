"""Spans of time as people write and read them."""

from __future__ import annotations

import re

from kvcm.model.errors import InvalidArgumentError

__all__ = ["parse_span", "shown_span"]

_UNITS = {"d": 86_400, "h": 3600, "m": 60, "s": 1}
_SPAN = re.compile("([0-9]{1,12})([smhd]?)", re.ASCII)


def parse_span(text: str) -> int:
    """Return the seconds that a text means: `30d`, `12h`, `15m`, `90s` or plain seconds.

    Raises:
        InvalidArgumentError: it is no such span.
    """
    found = _SPAN.fullmatch(text)
    if found is None:
        raise InvalidArgumentError(f"time {text[:40]!r} must be a whole number of seconds, or one with s, m, h or d")
    return int(found[1]) * _UNITS[found[2] or "s"]


def shown_span(seconds: float) -> str:
    """Return a span in the largest unit of which there is one: `3.5 h`."""
    for unit, size in _UNITS.items():
        if abs(seconds) >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"
