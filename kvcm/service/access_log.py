"""The access log: one event per request that is drawn from all, or that took long. Never keys, tokens or uris."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import structlog

from kvcm.service.calls import Arrival, Call, Outcome
from kvcm.telemetry.logs import is_logged

__all__ = ["AccessLog"]

_MOST_NAME = 256  # those that are longer are of no instance

_log = structlog.get_logger("kvcm.access")


class AccessLog:
    """A `CallObserver` that logs requests, at level INFO. One that is not logged costs two comparisons.

    Args:
        draw: a random number from 0 to 1, excluding 1.
    """

    def __init__(self, draw: Callable[[], float]) -> None:
        self._draw = draw
        self._sample = 0.0
        self._slow_seconds = math.inf

    def set(self, sample: float, slow_seconds: float) -> None:
        """Say what is logged from now on.

        Args:
            sample: ratio of requests, from 0 to 1.
            slow_seconds: those that took longer are logged always; 0 for none.
        """
        self._sample = sample
        self._slow_seconds = slow_seconds or math.inf

    def begin(self, _call: Call, _request: Any, _arrival: Arrival) -> None:
        """Whether it is logged is decided at the end."""

    def end(self, _begun: Any, call: Call, request: Any, arrival: Arrival, outcome: Outcome) -> None:
        """Log the request if it is to be logged."""
        is_slow = outcome.seconds > self._slow_seconds
        if (is_slow or self._is_drawn()) and is_logged(logging.INFO):
            _log.info("request", is_slow=is_slow, **_fields(call, request, arrival, outcome))

    def turned_away(self, call: Call, arrival: Arrival, reason: str) -> None:
        """Log a request that was not worked on."""
        if self._is_drawn() and is_logged(logging.INFO):
            _log.info("turned_away", method=call.name, reason=reason, transport=arrival.transport, peer=arrival.peer)

    def _is_drawn(self) -> bool:
        return self._sample > 0 and self._draw() < self._sample


def _fields(call: Call, request: Any, arrival: Arrival, outcome: Outcome) -> dict[str, Any]:
    names = request.DESCRIPTOR.fields_by_name
    return {
        "method": call.name,
        "code": outcome.code.name,
        "keys": len(request.block_keys) if "block_keys" in names else 0,
        "instance": request.instance_id[:_MOST_NAME] if "instance_id" in names else "",
        "duration_ms": round(outcome.seconds * 1000, 3),
        "transport": arrival.transport,
        "peer": arrival.peer,
    }
