"""Capacities as they are asked for: blocks, or per cent of a trace's unique blocks."""

from __future__ import annotations

from contextlib import suppress
from decimal import Decimal, InvalidOperation

from kvcm.optimizer.errors import OptionError

__all__ = ["DEFAULT_CAPACITIES", "parse_capacities", "percent_of"]

DEFAULT_CAPACITIES = "1%,2%,5%,10%,20%,50%,100%"
_ALLOWED = "blocks such as 5000, or a share of the unique blocks such as 10%"


def percent_of(unique_blocks: int, percent: Decimal) -> int:
    """Return C(p%) = max(1, floor(U·p/100)) (optimizer.md, Counting)."""
    return max(1, int(unique_blocks * percent / 100))


def parse_capacities(text: str, unique_blocks: int) -> tuple[int, ...]:
    """Return the capacities of a list with commas, in blocks, as they stand there, each once.

    Raises:
        OptionError: one of them is none.
    """
    return tuple(dict.fromkeys(_capacity(part.strip(), unique_blocks) for part in text.split(",")))


def _capacity(text: str, unique_blocks: int) -> int:
    number = Decimal("NaN")
    if text.isascii() and "_" not in text:  # both of which Decimal takes for digits
        with suppress(InvalidOperation):
            number = Decimal(text.removesuffix("%"))
    is_whole = number.is_finite() and number == number.to_integral_value()
    if number.is_finite() and text.endswith("%") and 0 < number <= 100_000:
        return percent_of(unique_blocks, number)
    if is_whole and not text.endswith("%") and 1 <= number < 1 << 31:
        return int(number)
    raise OptionError(f"capacities: {text!r} is none; allowed: {_ALLOWED}")
