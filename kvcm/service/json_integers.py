"""64-bit numbers as JSON has them: as texts. A request holds a thousand and more, nearly all written in one way."""

from __future__ import annotations

__all__ = ["plain_integers"]

_MOST_DIGITS = 20  # of a number of 64 bits, with its sign


def plain_integers(texts: list[str]) -> list[int]:
    """Read numbers that are all written as Python writes them; return nothing where one is not, so that whoever knows
    all the ways of writing a number reads them one by one."""
    if max(map(len, texts)) > _MOST_DIGITS:
        return []
    try:
        numbers = list(map(int, texts))
    except ValueError:
        return []
    return numbers if list(map(str, numbers)) == texts else []  # int() takes "1_0" and " 1", too
