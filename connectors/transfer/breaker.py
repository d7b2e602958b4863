"""Circuit breaker of a storage: while it fails, calls fail at once and do not cost their deadlines.

Closed: calls go through, and so many failed ones in a row open it. Open: no call goes through until a pause is over.
Then one call, the trial, does; when it succeeds the breaker closes, when it fails the next pause is twice as long.

Invariants: (1) while open, at most one call goes through per pause; (2) a call that was let through before the breaker
opened changes nothing afterwards; (3) a trial that shows nothing, because it was cancelled, leaves its turn
to the next call.
"""

from __future__ import annotations

from enum import StrEnum

__all__ = ["BreakerState", "CallAdmission", "StorageBreaker"]


class BreakerState(StrEnum):
    """What a breaker does with calls."""

    CLOSED = "closed"  # lets them through
    OPEN = "open"  # refuses them until the pause is over
    HALF_OPEN = "trial"  # refuses them until the one under way has ended


class CallAdmission(StrEnum):
    """How a call came through."""

    ORDINARY = "ordinary"
    TRIAL = "trial"


class StorageBreaker:
    """Breaker of one storage in one direction. Not locked: its owner does that.

    Args:
        failures_to_open: failed calls in a row that open it, > 0.
        first_pause_seconds: pause after it opened.
        longest_pause_seconds: pauses double up to this.
    """

    def __init__(
        self,
        failures_to_open: int = 3,
        first_pause_seconds: float = 1.0,
        longest_pause_seconds: float = 60.0,
    ) -> None:
        self.state = BreakerState.CLOSED
        self._failures_to_open = failures_to_open
        self._first_pause_seconds = first_pause_seconds
        self._longest_pause_seconds = longest_pause_seconds
        self._failures = 0
        self._pause_seconds = first_pause_seconds
        self._opens_at = 0.0

    def admit(self, now: float) -> CallAdmission | None:
        """Let a call through, or not (None). Every call that came through must end with `leave`."""
        if self.state is BreakerState.CLOSED:
            return CallAdmission.ORDINARY
        if self.state is BreakerState.HALF_OPEN or now < self._opens_at:
            return None
        self.state = BreakerState.HALF_OPEN
        return CallAdmission.TRIAL

    def record_result(self, passage: CallAdmission, succeeded: bool | None, now: float) -> None:
        """Say how a call ended.

        Args:
            passage: what `enter` returned for it.
            succeeded: whether the storage answered; None when the call showed neither.
            now: seconds of the owner's clock.
        """
        if passage is CallAdmission.TRIAL:
            self._finish_trial(succeeded, now)
        elif self.state is not BreakerState.CLOSED or succeeded is None:
            return
        elif succeeded:
            self._failures = 0
        else:
            self._failures += 1
            if self._failures >= self._failures_to_open:
                self._open(self._first_pause_seconds, now)

    def end_pause(self, now: float) -> None:
        """End the pause: the storage has shown that it is alive."""
        self._opens_at = min(self._opens_at, now)

    def _finish_trial(self, succeeded: bool | None, now: float) -> None:
        if succeeded:
            self.state = BreakerState.CLOSED
            self._failures = 0
        elif succeeded is None:
            self.state = BreakerState.OPEN
        else:
            self._open(min(2 * self._pause_seconds, self._longest_pause_seconds), now)

    def _open(self, pause_seconds: float, now: float) -> None:
        self.state = BreakerState.OPEN
        self._pause_seconds = pause_seconds
        self._opens_at = now + pause_seconds
