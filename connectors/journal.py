"""Counts how calls end and logs why they failed, at a bounded rate."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace

from connectors.results import CallCounters, Outcome

__all__ = ["Journal"]

_log = logging.getLogger(__name__)


class Journal:
    """Counters and log of one client; safe to use from several threads.

    Args:
        clock: seconds of a clock that never runs backwards.
        log_every_seconds: least time between two lines about the same call; a dead manager fails every request of a
            busy engine, and its log must stay readable.
    """

    def __init__(self, clock: Callable[[], float], log_every_seconds: float = 10.0) -> None:
        self._clock = clock
        self._log_every_seconds = log_every_seconds
        self._lock = threading.Lock()
        self._counters: dict[str, CallCounters] = {}
        self._silent_until: dict[str, float] = {}
        self._suppressed: dict[str, int] = {}

    def counters(self) -> dict[str, CallCounters]:
        """Return a snapshot, by name of the call."""
        with self._lock:
            return dict(self._counters)

    def record(self, call: str, outcome: Outcome, retries: int, reason: str) -> None:
        """Count one call, and log the reason when it failed."""
        with self._lock:
            counters = self._counters.get(call, CallCounters())
            count = getattr(counters, outcome.value) + 1
            self._counters[call] = replace(counters, **{outcome.value: count, "retries": counters.retries + retries})
            suppressed = None if outcome is Outcome.OK else self._suppressed_lines(call)
        if suppressed is not None:
            _log.warning("%s failed, treated as a miss (%d more lines left out): %s", call, suppressed, reason)

    def _suppressed_lines(self, call: str) -> int | None:
        """Return how many lines were left out since the last one, None to leave this one out too."""
        now = self._clock()
        if now < self._silent_until.get(call, now):
            self._suppressed[call] = self._suppressed.get(call, 0) + 1
            return None
        self._silent_until[call] = now + self._log_every_seconds
        return self._suppressed.pop(call, 0)
