"""Decodes lines into typed values; what does not fit is told with its field, its value and what is allowed."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import msgspec

from kvcm.optimizer.formats.lines import LineError

__all__ = ["MOST_MICROS", "Key", "Length", "Micros", "decoder", "signed_keys"]

Key = int
"""A block key: any 64 bits; those above 2^63 - 1 are taken for the signed number of the same bits."""

MOST_MICROS = 1 << 60
MOST_LENGTH = (1 << 31) - 1

Length = Annotated[int, msgspec.Meta(ge=0, le=MOST_LENGTH)]
Micros = Annotated[int, msgspec.Meta(ge=0, le=MOST_MICROS)]

_PATH = re.compile(r"^(?P<wanted>.*) - at `\$\.?(?P<path>[^`]*)`$")
_STEP = re.compile(r"\[(\d+)\]|([^.\[\]]+)")
_MOST_SHOWN = 60
_WRONG = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

Line = TypeVar("Line")


def decoder(kind: type[Line]) -> Callable[[bytes], Line]:
    """Return what decodes a line into a value of this kind, and raises `LineError` where it is none."""
    decode = msgspec.json.Decoder(kind).decode

    def decoded(line: bytes) -> Line:
        try:
            return decode(line)
        except _WRONG as error:
            raise LineError(_reason(error, line)) from None

    return decoded


def signed_keys(keys: list[int], name: str) -> list[int]:
    """Return keys as signed 64-bit numbers.

    Raises:
        LineError: one of them has more bits.
    """
    if not keys or (min(keys) >= -(1 << 63) and max(keys) < 1 << 63):
        return keys
    for place, key in enumerate(keys):
        if not -(1 << 63) <= key < 1 << 64:
            raise LineError(f"{name}[{place}]: {_shown(key)} has more than 64 bits")
    return [key - (1 << 64) if key >> 63 > 0 else key for key in keys]


def _reason(error: Exception, line: bytes) -> str:
    if isinstance(error, RecursionError):
        return "is nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return f"is no UTF-8: {error.reason}"
    found = _PATH.match(str(error))
    if found is None:
        return str(error).replace("`", "")
    try:
        value = _shown(_at(msgspec.json.decode(line), found["path"]))
    except (*_WRONG, LookupError, TypeError):  # what is behind the field may be damaged as well
        value = "the value"
    return f"{found['path']}: {value} does not fit: {found['wanted'].replace('`', '')}"


def _at(value: Any, path: str) -> Any:
    for index, name in _STEP.findall(path):
        value = value[int(index)] if index else value[name]
    return value


def _shown(value: object) -> str:
    if isinstance(value, int) and value.bit_length() > 512:
        return "a number of many digits"
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"
