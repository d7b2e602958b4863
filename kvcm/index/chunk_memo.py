"""Remembers what a pure function makes of encoded locations.

A chunk never changes, so what is made of it never gets stale: nothing has to be invalidated. Bytes keep their hash, so
a known chunk costs one lookup in C, with no per-block Python. Bounded by starting over: what is in use comes back at
once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar, cast

__all__ = ["ChunkMemo"]

Value = TypeVar("Value")


class ChunkMemo(Generic[Value]):
    """Results of one function, by chunk.

    Args:
        function: pure, from an encoded location to anything but None.
        most: results kept.
    """

    def __init__(self, function: Callable[[bytes], Value], most: int = 1 << 20) -> None:
        self._function = function
        self._most = most
        self._known: dict[bytes, Value] = {}

    def map(self, chunks: Sequence[bytes]) -> list[Value]:
        """Return the function's result for every chunk, in order."""
        found = list(map(self._known.get, chunks))
        if None not in found:
            return cast("list[Value]", found)
        if len(self._known) > self._most:
            self._known.clear()
        return [self._value(chunk) for chunk in chunks]

    def _value(self, chunk: bytes) -> Value:
        value = self._known.get(chunk)
        if value is None:
            value = self._known[chunk] = self._function(chunk)
        return value
