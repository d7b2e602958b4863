"""Numbers in protobuf's variable length, read by whoever looks into encoded messages without making objects of them."""

from __future__ import annotations

__all__ = ["read_varint"]

_MOST_SHIFT = 63


def read_varint(data: bytes, position: int) -> tuple[int, int]:
    """Return the number at a position and where it ends.

    Raises:
        IndexError: the data ends within it.
        ValueError: it is longer than 64 bits.
    """
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position
        shift += 7
        if shift > _MOST_SHIFT:
            raise ValueError("a number is longer than 64 bits")
