"""Tokens and block keys as people paste them."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["MOST_KEYS", "NumbersError", "numbers_in"]

MOST_KEYS: Final = 65_536
"""Blocks of one chain."""

_KEY: Final = re.compile(r"(?<![\d.])-?\d+(?:\.\d+)?")
_TOKEN: Final = re.compile(r"(?<![\d.])\d+(?:\.\d+)?")
_INT64: Final = 1 << 63
_MOST_TOKENS: Final = 1 << 20


class NumbersError(ValueError):
    """A text holds no tokens, or no keys; the message says why."""


def numbers_in(text: str, *, are_tokens: bool) -> list[int]:
    """Return the numbers of a text, whatever stands between them: lists, commas, lines, JSON.

    Args:
        text: as somebody pasted it.
        are_tokens: whether they are tokens, which are not negative; else block keys.

    Raises:
        NumbersError: there are none, too many, or some cannot be such numbers.
    """
    what, most = ("tokens", _MOST_TOKENS) if are_tokens else ("block keys", MOST_KEYS)
    found = [_whole(each[0], what) for each in (_TOKEN if are_tokens else _KEY).finditer(text)]
    if not found:
        raise NumbersError(f"There is no number in it: paste {what}, with anything between them.")
    if len(found) > most:
        raise NumbersError(f"There are {len(found):,} numbers in it, at most {most:,} {what} are allowed.")
    return found


def _whole(text: str, what: str) -> int:
    if "." in text:
        raise NumbersError(f"{text[:40]} is no whole number, as {what} are.")
    if len(text) > 20 or not -_INT64 <= int(text) < _INT64:
        raise NumbersError(f"{text[:40]} does not fit into 64 bits, as {what} do.")
    return int(text)
