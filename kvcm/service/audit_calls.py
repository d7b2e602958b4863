"""Audits calls that change something beside the configuration, whose changes are audited where they are made."""

from __future__ import annotations

from typing import Any, Final

from kvcm.model.principals import Errand, errand
from kvcm.registry.audit_trail import AuditTrail
from kvcm.service.calls import Arrival, Call, Outcome

__all__ = ["AUDITED", "AuditCalls"]

AUDITED: Final = frozenset(
    {
        *("RemoveCache", "TrimCache", "PinPrefix", "UnpinPrefix"),
        *("CollectGarbage", "ScrubStorage", "LoadConfigSnapshot"),
        *("LeaderDemote", "UpdateLeaderElectorConfig", "UpdateLogger", "ReloadConfig"),
        *("InjectFault", "RemoveFault", "ClearFaults", "Login", "SetPassword"),
    }
)
"""Names of such calls."""


class AuditCalls:
    """A `CallObserver`.

    Args:
        trail: makes the entries.
    """

    def __init__(self, trail: AuditTrail) -> None:
        self._trail = trail

    def begin(self, _call: Call, _request: Any, _arrival: Arrival) -> None:
        """It is told at its end."""

    def end(self, _begun: None, call: Call, request: Any, arrival: Arrival, outcome: Outcome) -> None:
        """Record the call if it is such a one."""
        if call.name not in AUDITED:
            return
        before = errand.set(Errand(arrival.principal, call.name, arrival.peer))
        try:
            self._trail.called(call.name, outcome.code.name, dict(_fields(request)))
        finally:
            errand.reset(before)

    def turned_away(self, _call: Call, _arrival: Arrival, _reason: str) -> None:
        """Nothing was changed."""


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
