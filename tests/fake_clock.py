"""Time as a test says."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FakeClock"]


@dataclass
class FakeClock:
    """A clock that stands still until it is moved.

    Attributes:
        time: in seconds.
    """

    time: float = 1_000_000.0

    def now(self) -> float:
        """Return the time."""
        return self.time
