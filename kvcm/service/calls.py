"""What a call of the interface is, and how one is answered: the same on gRPC and HTTP."""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import structlog
from google.protobuf.message import Message

from kvcm.model.errors import ErrorCode, KvcmError, UnknownInstanceError
from kvcm.telemetry.metrics import ApiMetrics

__all__ = ["Call", "Caller", "Plane", "Reply"]

_TRACER_SUFFIX = "__kvcm_need_span_tracer"

_log = structlog.get_logger("kvcm.service")


class Plane(Enum):
    """Which port serves a call."""

    DATA = "data"
    ADMIN = "admin"


class Reply(NamedTuple):
    """An answer: a message, and encoded fields that belong behind it.

    Attributes:
        message: the response; its header is filled by the caller.
        chunks: fields already encoded, tags included.
    """

    message: Any
    chunks: Sequence[bytes] = ()

    def encoded(self) -> bytes:
        """Return the response's bytes."""
        return b"".join((self.message.SerializeToString(), *self.chunks))

    def complete(self) -> Message:
        """Return the response as one message."""
        message: Message = self.message
        if self.chunks:
            message.MergeFromString(b"".join(self.chunks))
        return message


Handler = Callable[[Any], Awaitable[Reply]]


@dataclass(frozen=True, slots=True)
class Call:
    """One rpc.

    Attributes:
        service: full name of the gRPC service.
        name: name of the rpc; the HTTP path is /api/<name with lower-case first letter>.
        plane: which port serves it.
        request_type: message class of the request.
        response_type: message class of the response, with a `header`.
        handler: answers it, or raises KvcmError.
        leader_only: whether a manager that must lead to serve refuses it while it does not.
        per_instance: whether its metrics carry the instance.
    """

    service: str
    name: str
    plane: Plane
    request_type: type[Message]
    response_type: type[Any]
    handler: Handler
    leader_only: bool = True
    per_instance: bool = False

    @property
    def path(self) -> str:
        """HTTP path."""
        return f"/api/{self.name[0].lower()}{self.name[1:]}"


async def _nothing_new() -> bool:
    return False


class Caller:
    """Runs calls: leader check, header, errors, metrics.

    Args:
        metrics: counts every call.
        refuse: raises KvcmError while leader-only calls of a plane cannot be served.
        labels: from an instance id to the labels of its metrics; empty when it is not registered.
        refresh: brings in what other managers changed, and says whether there was anything.
    """

    def __init__(
        self,
        metrics: ApiMetrics,
        refuse: Callable[[Plane], None],
        labels: Callable[[str], Mapping[str, str]],
        refresh: Callable[[], Awaitable[bool]] = _nothing_new,
    ) -> None:
        self._metrics = metrics
        self._refuse = refuse
        self._labels = labels
        self._refresh = refresh

    async def answer(self, call: Call, request: Any) -> Reply:
        """Answer a request; any outcome is in the header (invariant 9)."""
        begin = time.perf_counter()
        labels = self._labels(request.instance_id) if call.per_instance else {}
        try:
            if call.leader_only:
                self._refuse(call.plane)
            reply = await self._run(call, request)
            code, text = ErrorCode.OK, ""
        except KvcmError as error:
            reply, code, text = Reply(call.response_type()), error.code, str(error)
            _log.debug("refused", api=call.name, code=code.name, reason=text)
        except Exception:
            _log.exception("failed", api=call.name)
            reply, code = Reply(call.response_type()), ErrorCode.INTERNAL_ERROR
            text = "the manager failed to answer; its log has the reason"
        duration_us = (time.perf_counter() - begin) * 1e6
        _fill_header(reply.message, request, code, text)
        if request.trace_id.endswith(_TRACER_SUFFIX):
            _add_timing(reply.message.header, call, duration_us)
        self._metrics.record(call.name, labels, code, code is ErrorCode.OK, duration_us)
        return reply

    async def _run(self, call: Call, request: Any) -> Reply:
        """Run the handler; again when another manager registered the instance a moment ago."""
        try:
            return await call.handler(request)
        except UnknownInstanceError:
            if not await self._refresh():
                raise
        return await call.handler(request)


def _add_timing(header: Any, call: Call, duration_us: float) -> None:
    """Tell how long the call took, as the original's timing tree (wire.md 2.4); admin headers have no place for it."""
    if "tracer_result" in header.DESCRIPTOR.fields_by_name:
        module = call.handler.__module__.rpartition(".")[2]
        name = getattr(call.handler, "__name__", call.name)
        span = {"span_time_us": round(duration_us)}
        header.tracer_result = json.dumps({**span, f"{module}.py:{name}": [span]}, separators=(",", ":"))


def _fill_header(message: Any, request: Any, code: ErrorCode, text: str) -> None:
    header = message.header
    header.status.code = code
    if text:  # a handler may have left a remark on a success
        header.status.message = text
    if hasattr(header, "request_id"):
        header.request_id = f"{request.trace_id}_{time.time_ns() // 1000}"
