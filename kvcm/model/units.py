"""Sizes in bytes as people write and read them."""

from __future__ import annotations

import re
from fractions import Fraction

from kvcm.model.errors import InvalidArgumentError

__all__ = ["format_duration", "format_size", "parse_duration", "parse_size"]

_UNITS: dict[str, int] = {"": 1, "B": 1} | {
    f"{letter}{suffix}": base**power
    for base, suffix in ((1000, "B"), (1024, "iB"))
    for power, letter in enumerate("KMGTP", start=1)
}
_SIZE = re.compile(r"([0-9]+)(?:\.([0-9]+))? ?([A-Za-z]*)", re.ASCII)
_MAX_BYTES = (1 << 63) - 1
_LONGEST = 40


def parse_size(text: str) -> int:
    """Return the bytes that a text means: `10GiB`, `500MB`, `1.5 TiB` or plain bytes.

    Args:
        text: a number and at most one unit, spelled exactly: B, KB to PB (powers of 1000), KiB to PiB (of 1024).

    Raises:
        InvalidArgumentError: it is no such size, no whole number of bytes, or too large.
    """
    found = _SIZE.fullmatch(text) if len(text) <= _LONGEST else None
    if found is None or found[3] not in _UNITS:
        units = ", ".join(unit for unit in _UNITS if unit)
        raise InvalidArgumentError(f"size {text[:_LONGEST]!r} must be a number of bytes, or one with a unit of {units}")
    size = Fraction(f"{found[1]}.{found[2] or 0}") * _UNITS[found[3]]
    if size.denominator != 1:
        raise InvalidArgumentError(f"size {text!r} is {float(size)} bytes, must be a whole number of them")
    if size > _MAX_BYTES:
        raise InvalidArgumentError(f"size {text!r} is larger than {_MAX_BYTES} bytes")
    return int(size)


def format_size(size_bytes: int) -> str:
    """Return a size with four digits at most, in the largest unit of which there is one: `1.5 GiB`."""
    if abs(size_bytes) < 1024:
        return f"{size_bytes} B"
    value = float(size_bytes)
    for unit in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        value /= 1024
        if abs(value) < 999.95 or unit == "PiB":
            break
    return f"{value:,.1f} {unit}"


# Spans of time as people write and read them.

_SPANS_UNITS = {"d": 86_400, "h": 3600, "m": 60, "s": 1}
_DURATION = re.compile("([0-9]{1,12})([smhd]?)", re.ASCII)


def parse_duration(text: str) -> int:
    """Return the seconds that a text means: `30d`, `12h`, `15m`, `90s` or plain seconds.

    Raises:
        InvalidArgumentError: it is no such span.
    """
    found = _DURATION.fullmatch(text)
    if found is None:
        raise InvalidArgumentError(f"time {text[:40]!r} must be a whole number of seconds, or one with s, m, h or d")
    return int(found[1]) * _SPANS_UNITS[found[2] or "s"]


def format_duration(seconds: float) -> str:
    """Return a span in the largest unit of which there is one: `3.5 h`."""
    for unit, size in _SPANS_UNITS.items():
        if abs(seconds) >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"
