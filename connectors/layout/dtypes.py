"""Bytes per element of the types that KV is kept in."""

from __future__ import annotations

from kvcm.model.errors import InvalidArgumentError

__all__ = ["item_bytes"]

_ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "uint8": 1,
    "int8": 1,
}


def item_bytes(dtype: str) -> int:
    """Return the bytes of one element.

    Args:
        dtype: as torch names it: `float32`, `bfloat16`, ...; `uint8` and `int8` are for what an engine has packed.

    Raises:
        InvalidArgumentError: the dtype is unknown.
    """
    if dtype not in _ITEM_BYTES:
        raise InvalidArgumentError(f"dtype is {dtype!r}, must be one of {', '.join(_ITEM_BYTES)}")
    return _ITEM_BYTES[dtype]
