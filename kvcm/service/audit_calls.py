"""Audits calls that change something beside the configuration, whose changes are audited where they are made."""

from __future__ import annotations

from typing import Any, Final

from kvcm.model.errors import ErrorCode
from kvcm.model.principals import Errand, errand
from kvcm.registry.audit_trail import AuditTrail
from kvcm.service.calls import Arrival, Call, Outcome
from kvcm.telemetry.logs import request_in_hand

__all__ = ["AUDITED", "AuditCalls"]

_LOGIN: Final = "Login"
AUDITED: Final = frozenset(
    {
        *("RemoveCache", "TrimCache", "PinPrefix", "UnpinPrefix"),
        *("CollectGarbage", "ScrubStorage", "LoadConfigSnapshot"),
        *("LeaderDemote", "UpdateLeaderElectorConfig", "UpdateLogger", "ReloadConfig"),
        *("InjectFault", "RemoveFault", "ClearFaults", _LOGIN, "SetPassword"),
    }
)
"""Names of such calls."""

_NOT_PROVEN: Final = "unauthenticated"  # as the call is turned away


class AuditCalls:
    """A `CallObserver`.

    A login is a stranger's, who may try as often as there is bandwidth. So of those that fail only wrong passwords are
    written down, which are bounded by the patience with them; the others are in the counters of calls.

    Args:
        trail: makes the entries.
    """

    def __init__(self, trail: AuditTrail) -> None:
        self._trail = trail
        self._failed_login: tuple[Arrival, Any] | None = None

    def begin(self, _call: Call, _request: Any, _arrival: Arrival) -> None:
        """It is told at its end."""

    def end(self, _begun: None, call: Call, request: Any, arrival: Arrival, outcome: Outcome) -> None:
        """Record the call if it is such a one."""
        if call.name not in AUDITED:
            return
        if call.name == _LOGIN and outcome.code is not ErrorCode.OK:
            self._failed_login = arrival, request  # `turned_away` follows at once if it was the password
        else:
            self._record(call, request, arrival, outcome.code)

    def turned_away(self, call: Call, arrival: Arrival, reason: str) -> None:
        """Record a wrong password; whatever else is turned away has changed nothing."""
        login, self._failed_login = self._failed_login, None
        if login is not None and login[0] is arrival and reason == _NOT_PROVEN:
            self._record(call, login[1], arrival, ErrorCode.UNSPECIFIED)

    def _record(self, call: Call, request: Any, arrival: Arrival, code: ErrorCode) -> None:
        worked_for = errand.set(Errand(arrival.principal, call.name, arrival.peer))
        in_hand = request_in_hand.set(request if call.is_traced else None)
        try:
            self._trail.called(call.name, code.name, dict(_fields(request)))
        finally:
            request_in_hand.reset(in_hand)
            errand.reset(worked_for)


def _fields(request: Any) -> list[tuple[str, object]]:
    """Return what a request says, of lists only how long they are: keys of blocks tell of prompts."""
    found: list[tuple[str, object]] = []
    for field, value in request.ListFields():
        if field.name == "trace_id":
            continue
        if field.is_repeated:
            found.append((f"{field.name}_count", len(value)))
        elif field.message_type is None and field.name != "config_snapshot":
            found.append((field.name, value))
    return found
