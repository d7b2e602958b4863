"""Runs the interface's calls for resources: the same way, limits, counters and log as POST /api/<call>."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, Final

from google.protobuf.message import Message
from starlette.requests import Request

from kvcm.model.errors import ErrorCode
from kvcm.service.calls import LOCAL, Arrival, Call, Caller
from kvcm.service.http_app import ARRIVAL
from kvcm.service.json_codec import MalformedBody, parse_request
from kvcm.service.rest.problem import Problem, ProblemError, problem_of_code

__all__ = ["CallBook", "RefusedError"]

_TRACE_ID: Final = re.compile(r"[\x21-\x7e]{1,128}")
_ABSENT: Final = {ErrorCode.INVALID_ARGUMENT, ErrorCode.INSTANCE_NOT_EXIST}


class RefusedError(ProblemError):
    """A call was carried out, and its outcome is not OK."""

    def __init__(self, code: ErrorCode, text: str, request_id: str) -> None:
        super().__init__(problem_of_code(code, text, request_id))
        self.code = code


class CallBook:
    """The calls by name.

    Args:
        calls: those that are served.
        caller: runs them.
    """

    def __init__(self, calls: Iterable[Call], caller: Caller) -> None:
        self._calls = {f"{call.service.rpartition('.')[2]}.{call.name}": call for call in calls}
        self._caller = caller

    def serves(self, name: str) -> bool:
        """Return whether there is a call of that name, e.g. `AdminService.ListStorage`."""
        return name in self._calls

    async def run(self, request: Request, name: str, /, **fields: Any) -> Any:
        """Run a call for a request, and return its answer.

        Args:
            request: that came.
            name: of the call.
            fields: of the call's request, as JSON has them.

        Raises:
            RefusedError: its outcome is not OK.
            ProblemError: the fields cannot be read.
            TurnedAwayError: it is not let in.
        """
        call, arrival = self._calls[name], _arrival(request)
        message = request_message(call, trace_id_of(request), fields)
        if (refusal := self._caller.refusal(call, arrival)) is not None:
            raise refusal
        reply = await self._caller.answer(call, message, arrival)
        answer: Any = reply.complete()
        header = answer.header
        request.state.request_id = header.request_id
        if header.status.code != ErrorCode.OK:
            raise RefusedError(ErrorCode(header.status.code), header.status.message, header.request_id)
        if header.status.message:
            request.state.warning = header.status.message
        return answer

    async def find(self, request: Request, name: str, /, **fields: Any) -> Any | None:
        """Run a call that names one thing; None where there is no such thing.

        Raises:
            ProblemError: as `run`.
            TurnedAwayError: as `run`.
        """
        try:
            return await self.run(request, name, **fields)
        except RefusedError as error:
            if error.code in _ABSENT:
                return None
            raise


def request_message(call: Call, trace_id: str, fields: dict[str, Any]) -> Message:
    """Return the request of a call.

    Raises:
        ProblemError: a field is of the wrong kind or out of range.
    """
    body = json.dumps({"trace_id": trace_id, **fields}).encode()
    try:
        return parse_request(body, call.request_type)
    except MalformedBody as error:
        raise ProblemError(Problem(400, str(error), ErrorCode.INVALID_ARGUMENT.name)) from None


def trace_id_of(request: Request) -> str:
    """Return what the request is to be known by: its `x-request-id`, if that is fit for logs."""
    given = request.headers.get("x-request-id", "")
    return given if _TRACE_ID.fullmatch(given) else "rest"


def _arrival(request: Request) -> Arrival:
    arrival: Arrival = request.scope.get(ARRIVAL, LOCAL)
    return arrival
