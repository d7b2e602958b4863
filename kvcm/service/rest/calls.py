"""Runs calls for resources, with the same limits, metrics and logs as POST /api/<call>, and retries of changes."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar
from weakref import WeakValueDictionary

from fastapi.exceptions import RequestValidationError
from google.protobuf.message import Message
from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from kvcm.model.errors import ErrorCode
from kvcm.service.calls import LOCAL, Arrival, Call, Caller
from kvcm.service.http_server import ARRIVAL
from kvcm.service.json_codec import MalformedBody, parse_request
from kvcm.service.rejections import FieldError, Problem, ProblemError, problem_of_code
from kvcm.service.rest.conversion import merge_patch

__all__ = [
    "MAX_ATTEMPTS",
    "CallRefusedError",
    "CallRunner",
    "ResourceLocks",
    "apply_patch",
    "change_existing",
    "check_one_prompt",
    "check_same_name",
    "conflict",
    "fields_of",
]

_TRACE_ID: Final = re.compile(r"[\x21-\x7e]{1,128}")
_ABSENT: Final = {ErrorCode.INVALID_ARGUMENT, ErrorCode.INSTANCE_NOT_EXIST}


class CallRefusedError(ProblemError):
    """The outcome of a call is not OK."""

    def __init__(self, code: ErrorCode, text: str, request_id: str) -> None:
        super().__init__(problem_of_code(code, text, request_id))
        self.code = code


class CallRunner:
    """Runs calls by name.

    Args:
        calls: the served calls.
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
            request: of the resource.
            name: of the call.
            fields: of the call's request, in JSON.

        Raises:
            CallRefusedError: its outcome is not OK.
            ProblemError: a field is malformed.
            RejectedError: admission or access rejects it.
        """
        call, arrival = self._calls[name], _arrival(request)
        message = _request_message(call, _trace_id_of(request), fields)
        if (refusal := self._caller.rejection(call, arrival)) is not None:
            raise refusal
        reply = await self._caller.answer(call, message, arrival)
        answer: Any = reply.complete()
        header = answer.header
        request.state.request_id = header.request_id
        if header.status.code != ErrorCode.OK:
            raise CallRefusedError(ErrorCode(header.status.code), header.status.message, header.request_id)
        if header.status.message:
            request.state.warning = header.status.message
        return answer

    async def find(self, request: Request, name: str, /, **fields: Any) -> Any | None:
        """Run a call that gets one entity; None if it does not exist.

        Raises:
            ProblemError, RejectedError: as `run`.
        """
        try:
            return await self.run(request, name, **fields)
        except CallRefusedError as error:
            if error.code in _ABSENT:
                return None
            raise


def _request_message(call: Call, trace_id: str, fields: dict[str, Any]) -> Message:
    """Return the request of a call.

    Raises:
        ProblemError: a field is of the wrong kind or out of range.
    """
    body = json.dumps({"trace_id": trace_id, **fields}).encode()
    try:
        return parse_request(body, call.request_type)
    except MalformedBody as error:
        raise ProblemError(Problem(400, str(error), ErrorCode.INVALID_ARGUMENT.name)) from None


def _trace_id_of(request: Request) -> str:
    """Return the trace id of a request: its `x-request-id`, if that is fit for logs."""
    given = request.headers.get("x-request-id", "")
    return given if _TRACE_ID.fullmatch(given) else "rest"


def _arrival(request: Request) -> Arrival:
    arrival: Arrival = request.scope.get(ARRIVAL, LOCAL)
    return arrival


# Read, change and store a document without overwriting concurrent changes.

MAX_ATTEMPTS = 5
"""Of a change that conflicts with concurrent ones."""
Answer = TypeVar("Answer")
Doc = TypeVar("Doc", bound=BaseModel)


class ResourceLocks:
    """One change of each entity at a time, among the clients of this manager's resources."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @asynccontextmanager
    async def lock(self, name: str) -> AsyncIterator[None]:
        """Hold the lock of an entity."""
        lock = self._locks.get(name)
        if lock is None:
            lock = self._locks[name] = asyncio.Lock()
        async with lock:
            yield


async def change_existing(change: Awaitable[Answer], check: Callable[[], Awaitable[Any]]) -> Answer:
    """Run a change of an entity that may not exist: the code of calls for that is the one for invalid fields.

    Args:
        change: runs the call.
        check: raises ProblemError if the entity does not exist.

    Raises:
        ProblemError: that of `check`, or the call's own.
    """
    try:
        return await change
    except CallRefusedError as error:
        if error.code is ErrorCode.INVALID_ARGUMENT:
            await check()
        raise


def apply_patch(model: type[Doc], document: Mapping[str, Any], patch: Mapping[str, Any]) -> Doc:
    """Return a document with a merge patch applied (RFC 7396).

    Raises:
        RequestValidationError: the result is not valid.
    """
    try:
        return model.model_validate(merge_patch(document, patch))
    except ValidationError as error:
        found: list[Any] = [{**each, "loc": ("body", *each["loc"])} for each in error.errors(include_url=False)]
        raise RequestValidationError(found) from None


def fields_of(document: BaseModel, **others: Any) -> dict[str, Any]:
    """Return a document as the fields of a message, updated with `others`."""
    return {**document.model_dump(exclude_none=True), **others}


def check_one_prompt(block_keys: Collection[str], token_ids: Collection[int]) -> None:
    """Check that a prompt is given in one way.

    Raises:
        ProblemError: both are given, or neither.
    """
    if bool(block_keys) == bool(token_ids):
        given = "both are" if block_keys else "neither is"
        error = FieldError("body.block_keys", None, "one of block_keys and token_ids")
        text = f"block_keys or token_ids: {given} given, must be one of the two"
        raise ProblemError(Problem(400, text, "INVALID_ARGUMENT", errors=[error]))


def check_same_name(field: str, given: str, name: str) -> None:
    """Refuse a document whose name differs from that of its path.

    Raises:
        ProblemError: 400.
    """
    if given and given != name:
        error = FieldError(f"body.{field}", given[:256], f"{name!r}, or nothing")
        raise ProblemError(Problem(400, f"{field} is {given[:256]!r}, but the path is of {name!r}", errors=[error]))


def conflict(request: Request, name: str) -> ProblemError:
    """Return the error of a change that conflicted with others in every attempt."""
    text = f"{name!r} was changed by others while {request.method} was trying to: try again"
    return ProblemError(Problem(409, text, headers=[("retry-after", "1")]))
