"""Counts calls as they are answered."""

from __future__ import annotations

from typing import Any

from kvcm.model.errors import ErrorCode
from kvcm.service.calls import Arrival, Call, Outcome
from kvcm.telemetry.metrics import ApiMetrics

__all__ = ["CallMetrics"]


class CallMetrics:
    """A `CallObserver` that counts.

    Args:
        metrics: the table that GetMetrics lists.
    """

    def __init__(self, metrics: ApiMetrics) -> None:
        self._metrics = metrics

    def begin(self, _call: Call, _request: Any, _arrival: Arrival) -> None:
        """Nothing is counted yet."""

    def end(self, _begun: Any, call: Call, _request: Any, _arrival: Arrival, outcome: Outcome) -> None:
        """Count the call."""
        code = outcome.code
        self._metrics.record(call.name, outcome.labels, code, code is ErrorCode.OK, outcome.seconds * 1e6)

    def turned_away(self, _call: Call, _arrival: Arrival, _reason: str) -> None:
        """Nothing was worked on."""
