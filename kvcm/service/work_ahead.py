"""How long a request that comes now will wait for those that came before it.

The event loop turns to requests in the order in which they come, and to tell somebody that it cannot serve him costs it
a twentieth of serving him, if it does so at once. So what counts is known when the head of a request is there: the work
that was let in and is not done. Its size is guessed from bodies, whose larger part are keys, and its pace is measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

__all__ = ["WorkAhead"]

_BYTES_OF_NONE: Final = 10_000
"""A request without a body costs about as much as so many bytes of keys."""
_MOST_BYTES: Final = 1 << 16
"""Of a request: what is longer is worked on piece by piece, and lets others pass."""
_SECONDS_PER_BYTE: Final = 5e-8
_LEARNT_FROM_BYTES: Final = 2_000_000
_BUSY: Final = 0.7
_MOST_CHANGE: Final = 2.0


class WorkAhead:
    """The requests of one event loop that were let in and are not answered.

    Args:
        wall_seconds: clock.
        busy_seconds: CPU time of the loop's thread.

    Attributes:
        seconds_per_byte: pace, measured while the loop is busy: otherwise it is hardly requests that it works on.
    """

    def __init__(
        self,
        wall_seconds: Callable[[], float] = time.monotonic,
        busy_seconds: Callable[[], float] = time.thread_time,
    ) -> None:
        self._wall_seconds = wall_seconds
        self._busy_seconds = busy_seconds
        self._bytes = 0
        self._done_bytes = 0
        self._since = (wall_seconds(), busy_seconds())
        self.seconds_per_byte = _SECONDS_PER_BYTE

    @property
    def seconds(self) -> float:
        """How long a request that comes now will wait, about."""
        return self._bytes * self.seconds_per_byte

    def begin(self, body_bytes: int) -> None:
        """Let a request in, with a body of so many bytes."""
        self._bytes += _counted(body_bytes)

    def end(self, body_bytes: int) -> None:
        """It is answered, or was turned away after all."""
        self._bytes -= _counted(body_bytes)
        self._done_bytes += _counted(body_bytes)
        if self._done_bytes >= _LEARNT_FROM_BYTES:
            self._learn()

    def _learn(self) -> None:
        wall, busy = self._wall_seconds(), self._busy_seconds()
        wall_before, busy_before = self._since
        if busy - busy_before >= _BUSY * (wall - wall_before):
            known, measured = self.seconds_per_byte, (busy - busy_before) / self._done_bytes
            self.seconds_per_byte = min(max(measured, known / _MOST_CHANGE), known * _MOST_CHANGE)
        self._since, self._done_bytes = (wall, busy), 0


def _counted(body_bytes: int) -> int:
    return _BYTES_OF_NONE + min(body_bytes, _MOST_BYTES)
