"""Remembers what a pure function makes of encoded locations.

A chunk never changes, so what is made of it never gets stale: nothing has to be invalidated. Bytes keep their hash, so
a known chunk costs one lookup in C, with no per-block Python.

Blocks come and go, and nobody tells that a chunk will never be asked for again. So there are two generations: what is
asked for is in the younger one, and a new one begins when that is full, and when it is old: a memo holds what was asked
for lately, however many blocks there were before. Rejected: to start over when all is full, which keeps the chunks of
blocks that are long gone until then, and may be the larger part of a manager's memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence, Sized
from typing import Generic, TypeVar, cast

__all__ = ["ChunkMemo"]

Value = TypeVar("Value", bound=Sized)

_ENTRY_BYTES = 200  # slot of the table, headers of chunk and value
_GENERATION_SECONDS = 60.0


class ChunkMemo(Generic[Value]):
    """Results of one function, by chunk.

    Args:
        function: pure, from an encoded location to anything but None.
        most_bytes: kept, about; half of it may be of chunks that nobody asks for any more.
        clock: seconds of a clock that never runs backwards.

    Attributes:
        computed: how often the function was asked.
    """

    def __init__(
        self,
        function: Callable[[bytes], Value],
        most_bytes: int = 32 << 20,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._function = function
        self._most_bytes = most_bytes // 2
        self._clock = clock
        self._young: dict[bytes, Value] = {}
        self._old: dict[bytes, Value] = {}
        self._young_bytes = 0
        self.computed = 0
        self._old_from = clock() + _GENERATION_SECONDS

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    @property
    def young_bytes(self) -> int:
        """Bytes of the younger generation, about."""
        return self._young_bytes

    def map(self, chunks: Sequence[bytes]) -> list[Value]:
        """Return the function's result for every chunk, in order."""
        if self._clock() >= self._old_from:
            self._begin_generation()
        found = list(map(self._young.get, chunks))
        if None not in found:
            return cast("list[Value]", found)
        return [self._value(chunk) if value is None else value for chunk, value in zip(chunks, found, strict=True)]

    def _value(self, chunk: bytes) -> Value:
        value = self._young.get(chunk)
        if value is not None:  # it is there twice
            return value
        value = self._old.pop(chunk, None)
        if value is None:
            value = self._function(chunk)
            self.computed += 1
        if self._young_bytes > self._most_bytes:
            self._begin_generation()
        self._young[chunk] = value
        self._young_bytes += len(chunk) + len(value) + _ENTRY_BYTES
        return value

    def _begin_generation(self) -> None:
        self._young, self._old, self._young_bytes = {}, self._young, 0
        self._old_from = self._clock() + _GENERATION_SECONDS
