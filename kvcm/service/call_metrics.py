"""Counts calls as they are answered: for Prometheus by method and code, for GetMetrics by api and instance."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

from kvcm.model.errors import ErrorCode
from kvcm.service.calls import Arrival, Call, Outcome
from kvcm.telemetry import metrics_catalog as catalog
from kvcm.telemetry.metrics import ApiMetrics
from kvcm.telemetry.metrics_values import KEYS, BoundedNames, Histogram, Reading

__all__ = ["CallMetrics"]

_CANCELLED: Final = "CANCELLED"
_FROM_THE_START: Final = (ErrorCode.OK, ErrorCode.INTERNAL_ERROR)
_MOST_REASONS: Final = 32


class _Method:
    """What is counted of one call."""

    __slots__ = ("codes", "has_keys", "keys", "seconds")

    def __init__(self, call: Call) -> None:
        self.codes = [0] * (max(ErrorCode) + 1)  # by number: an enum takes long to hash
        self.seconds = Histogram()
        self.has_keys = "block_keys" in call.request_type.DESCRIPTOR.fields_by_name
        self.keys = Histogram(KEYS)


class CallMetrics:
    """A `CallObserver` that counts; some microseconds per call.

    Args:
        metrics: the table that GetMetrics lists.
        reasons: why requests may be turned away, so that their series exist from the start.
    """

    def __init__(self, metrics: ApiMetrics, reasons: Iterable[str] = ()) -> None:
        self._metrics = metrics
        self._methods: dict[str, _Method] = {}
        self._inflight = 0
        self._reasons = BoundedNames(_MOST_REASONS)
        self._rejected = {self._reasons.of(reason): 0 for reason in reasons}

    def declare(self, call: Call) -> None:
        """Make the series of a call exist before it is first asked."""
        self._metrics.declare(call.name)
        self._method(call)

    def _method(self, call: Call) -> _Method:
        """Return what is counted of a call; one name may stand for calls of several services, as in GetMetrics."""
        method = self._methods.get(call.name)
        if method is None:
            method = self._methods[call.name] = _Method(call)
        return method

    def begin(self, call: Call, request: Any, _arrival: Arrival) -> _Method:
        """Count a request that is being worked on, and its keys."""
        method = self._method(call)
        self._inflight += 1
        if method.has_keys and (count := len(request.block_keys)):
            method.keys.observe(count)
        return method

    def end(self, begun: _Method, call: Call, _request: Any, _arrival: Arrival, outcome: Outcome) -> None:
        """Count the call."""
        code, seconds = outcome.code, outcome.seconds
        self._inflight -= 1
        begun.codes[code] += 1
        begun.seconds.observe(seconds)
        if code is not ErrorCode.UNSPECIFIED:  # GetMetrics knows of answers only
            self._metrics.record(call.name, outcome.labels, code, code is ErrorCode.OK, seconds * 1e6)

    def turned_away(self, _call: Call, _arrival: Arrival, reason: str) -> None:
        """Count a request that was not worked on."""
        reason = self._reasons.of(reason)
        self._rejected[reason] = self._rejected.get(reason, 0) + 1

    def answers(self, name: str) -> tuple[int, int]:
        """Return how many calls of a name were answered, and how many of those with an outcome that is not OK."""
        method = self._methods.get(name)
        if method is None:
            return 0, 0
        answered = sum(method.codes) - method.codes[ErrorCode.UNSPECIFIED]
        return answered, answered - method.codes[ErrorCode.OK]

    def durations(self, call: Call) -> Histogram:
        """Return how long calls took, in seconds."""
        return self._method(call).seconds

    def readings(self) -> Iterator[Reading]:
        """Yield what was counted."""
        yield Reading(catalog.RPC_INFLIGHT, self._inflight)
        for reason, count in list(self._rejected.items()):
            yield Reading(catalog.RPC_REJECTED, count, (reason,))
        for name, method in list(self._methods.items()):
            for code in ErrorCode:
                if (count := method.codes[code]) or code in _FROM_THE_START:
                    yield Reading(catalog.RPC_REQUESTS, count, (name, code.name if code else _CANCELLED))
            yield Reading(catalog.RPC_DURATION, method.seconds.read(), (name,))
            if method.has_keys:
                yield Reading(catalog.RPC_REQUEST_KEYS, method.keys.read(), (name,))
