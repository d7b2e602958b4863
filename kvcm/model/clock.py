"""Time is injected: the core never reads a wall clock itself."""

from __future__ import annotations

import time
from typing import Protocol

__all__ = ["Clock", "SystemClock"]


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
