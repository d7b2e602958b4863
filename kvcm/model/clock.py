"""Time is injected: the core never reads a wall clock itself."""

from __future__ import annotations

import math
import time
from typing import Protocol

__all__ = ["Clock", "SystemClock", "common_due"]

_PARTS_OF_A_SECOND = 64  # exact in binary


class Clock(Protocol):
    """Source of the current time."""

    def now(self) -> float:
        """Return the time in unix seconds."""


class SystemClock:
    """Unix time that never runs backwards within the process, even when the system's clock is set back."""

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()

    def now(self) -> float:
        return time.monotonic() + self._offset


def common_due(now: float, delay_seconds: float) -> float:
    """Return when things are due that are marked now, the same for all that is marked at about this moment: up to 16 ms
    after the delay, and at once where there is none.

    A store of runs keeps blocks together whose records differ in nothing but their chunks (`kvcm.index.run_codec`); a
    due time of its own would tear each out of its run.
    """
    if delay_seconds <= 0:
        return math.floor(now * _PARTS_OF_A_SECOND) / _PARTS_OF_A_SECOND
    return math.ceil((now + delay_seconds) * _PARTS_OF_A_SECOND) / _PARTS_OF_A_SECOND
