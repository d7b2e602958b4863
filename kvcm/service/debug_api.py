"""DebugService: makes calls fail on purpose. Thin translation; served only when it is switched on."""

from __future__ import annotations

from typing import Any

from kvcm.model.errors import InvalidArgumentError
from kvcm.protocol import debug_service_pb2 as pb
from kvcm.registry.validation import require
from kvcm.service.calls import Call, Plane, Reply
from kvcm.service.faults import Faults

__all__ = ["DebugApi"]

_SERVICE = "kv_cache_manager.proto.debug.DebugService"


class DebugApi:
    """Handlers of the debug calls.

    Args:
        faults: what they change.
    """

    def __init__(self, faults: Faults) -> None:
        self._faults = faults

    def calls(self) -> list[Call]:
        """Return every call. Faults are of this process, whoever leads."""
        calls = {
            "InjectFault": (pb.InjectFaultRequest, self.inject),
            "RemoveFault": (pb.RemoveFaultRequest, self.remove),
            "ClearFaults": (pb.ClearFaultsRequest, self.clear),
        }
        return [
            Call(_SERVICE, name, Plane.ADMIN, request, pb.CommonResponse, answer, leader_only=False, is_traced=False)
            for name, (request, answer) in calls.items()
        ]

    async def inject(self, request: Any) -> Reply:
        """Make an api fail."""
        require(request.api_name, "InjectFault.api_name")
        _check_enum("fault_type", request.fault_type, pb.FaultType)
        _check_enum("fault_trigger_strategy", request.fault_trigger_strategy, pb.FaultTriggerStrategy)
        is_once = request.fault_trigger_strategy == pb.ONCE
        self._faults.inject(request.api_name, request.trigger_at_call if is_once else None)
        return Reply(pb.CommonResponse())

    async def remove(self, request: Any) -> Reply:
        """End the fault of an api."""
        require(request.api_name, "RemoveFault.api_name")
        self._faults.remove(request.api_name)
        return Reply(pb.CommonResponse())

    async def clear(self, _request: Any) -> Reply:
        """End all faults."""
        self._faults.clear()
        return Reply(pb.CommonResponse())


def _check_enum(field: str, number: int, enum: Any) -> None:
    if number not in enum.values():
        raise InvalidArgumentError(f"InjectFault.{field} is {number}, must be one of {', '.join(enum.keys())}")
