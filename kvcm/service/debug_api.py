"""DebugService: makes calls fail on purpose. Thin translation; served only when it is switched on."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable
from typing import Any

from kvcm.model.errors import InvalidArgumentError, KvcmError
from kvcm.protocol import debug_service_pb2 as pb
from kvcm.registry.validation import require
from kvcm.service.calls import Call, Plane, Reply

__all__ = ["DebugApi", "Faults"]

# Faults that are injected on purpose, for tests of clients (wire.md 7). They belong to this process.

_BREAKABLE = {"GetCacheLocation", "StartWriteCache", "FinishWriteCache"}
_NUMBER = re.compile("_([+-]?[0-9]{1,19})$")


class Faults:
    """Which calls fail: by name of the rpc, and of those all, or those whose trace id ends in `_` and a number."""

    def __init__(self) -> None:
        self._by_api: dict[str, int | None] = {}

    def inject(self, api_name: str, number: int | None) -> None:
        """Make an api fail, in place of an earlier fault.

        Args:
            api_name: name of the rpc; of unknown ones nothing follows.
            number: that the trace id has to end in; None for any trace id.
        """
        self._by_api[api_name] = number

    def remove(self, api_name: str) -> None:
        """End a fault.

        Raises:
            InvalidArgumentError: there is none.
        """
        if api_name not in self._by_api:
            raise InvalidArgumentError(f"api_name is {api_name!r}, which has no fault")
        del self._by_api[api_name]

    def clear(self) -> None:
        """End all faults."""
        self._by_api.clear()

    def breakable(self, calls: Iterable[Call]) -> list[Call]:
        """Return the calls, those that can fail on purpose wrapped."""
        return [self._wrapped(call) if call.name in _BREAKABLE else call for call in calls]

    def _wrapped(self, call: Call) -> Call:
        answer: Callable[[Any], Any] = call.handler

        async def answer_or_fail(request: Any) -> Reply:
            if self._hits(call.name, request.trace_id):
                raise KvcmError("this fault was injected through the debug service")
            reply: Reply = await answer(request)
            return reply

        return dataclasses.replace(call, handler=answer_or_fail)

    def _hits(self, api_name: str, trace_id: str) -> bool:
        if api_name not in self._by_api:
            return False
        number = self._by_api[api_name]
        if number is None:
            return True
        found = _NUMBER.search(trace_id)
        return found is not None and int(found[1]) == number


_SERVICE = "kv_cache_manager.proto.debug.DebugService"


class DebugApi:
    """Handlers of the debug calls.

    Args:
        faults: what they change.
    """

    def __init__(self, faults: Faults) -> None:
        self._faults = faults

    def calls(self) -> list[Call]:
        """Return every call. Faults are of this process, whether it leads or not."""
        calls = {
            "InjectFault": (pb.InjectFaultRequest, self.inject),
            "RemoveFault": (pb.RemoveFaultRequest, self.remove),
            "ClearFaults": (pb.ClearFaultsRequest, self.clear),
        }
        return [
            Call(
                service=_SERVICE,
                name=name,
                plane=Plane.ADMIN,
                request_type=request,
                response_type=pb.CommonResponse,
                handler=answer,
                leader_only=False,
                is_traced=False,
            )
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
