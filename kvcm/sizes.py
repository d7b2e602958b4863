"""Sizes in bytes as people write and read them."""

from __future__ import annotations

import re
from fractions import Fraction

from kvcm.model.errors import InvalidArgumentError

__all__ = ["parse_size", "shown_size"]

_UNITS: dict[str, int] = {"": 1, "B": 1} | {
    f"{letter}{suffix}": base**power
    for base, suffix in ((1000, "B"), (1024, "iB"))
    for power, letter in enumerate("KMGTP", start=1)
}
_SIZE = re.compile(r"([0-9]+)(?:\.([0-9]+))? ?([A-Za-z]*)", re.ASCII)
_MOST_BYTES = (1 << 63) - 1
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
    if size > _MOST_BYTES:
        raise InvalidArgumentError(f"size {text!r} is larger than {_MOST_BYTES} bytes")
    return int(size)


def shown_size(size_bytes: int) -> str:
    """Return a size with four digits at most, in the largest unit of which there is one: `1.5 GiB`."""
    if abs(size_bytes) < 1024:
        return f"{size_bytes} B"
    value = float(size_bytes)
    for unit in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        value /= 1024
        if abs(value) < 999.95 or unit == "PiB":
            break
    return f"{value:,.1f} {unit}"
