"""Tells the log which request is being handled."""

from __future__ import annotations

from contextvars import Token
from typing import Any

from kvcm.service.calls import Arrival, Call, Outcome
from kvcm.telemetry.logs import request_in_hand

__all__ = ["RequestContext"]


class RequestContext:
    """A `CallObserver` that binds the request while it is handled. It stands last, so that those before it can still
    log the end of the request under its trace id."""

    def begin(self, call: Call, request: Any, _arrival: Arrival) -> Token[Any] | None:
        """Bind the request."""
        return request_in_hand.set(request) if call.is_traced else None

    def end(self, begun: Token[Any] | None, _call: Call, _request: Any, _arrival: Arrival, _outcome: Outcome) -> None:
        """Let go of it."""
        if begun is not None:
            request_in_hand.reset(begun)

    def turned_away(self, _call: Call, _arrival: Arrival, _reason: str) -> None:
        """It is not handled."""
