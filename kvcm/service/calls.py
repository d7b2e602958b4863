"""One call of the interface, from the parsed request to the answer: the same on gRPC and HTTP.

`Caller.answer` is the whole path: permission, admission, leader check, limits of size, handler, header. All observers
of a call are one `CallRecorder`: metrics, the access log, the audit trail, the span, the trace id of log lines.

Every admitted request ends in one answer whose header has the outcome, or in a cancellation (invariant 9). A request
that is not admitted has no header; the transport rejects it in its own way (design.md decision 9).
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextvars import Token
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, NamedTuple, Protocol, TypeVar

import structlog
from google.protobuf.message import Message

from kvcm.model.errors import ErrorCode, KvcmError, UnknownInstanceError
from kvcm.model.principals import UNRESTRICTED, CallContext, Principal, call_context
from kvcm.registry.audit_trail import AuditTrail
from kvcm.service.access import Access, Credentials, OpenAccess, policy_of
from kvcm.service.rejections import RejectedError
from kvcm.telemetry import metrics as catalog
from kvcm.telemetry.logs import current_request_id, is_enabled
from kvcm.telemetry.metrics import (
    KEYS,
    ApiMetrics,
    BoundedLabels,
    Histogram,
    Measures,
    Reading,
    close_measures,
    open_measures,
)
from kvcm.telemetry.tracing import Stage, open_stage

__all__ = [
    "LOCAL",
    "AccessLog",
    "Admission",
    "Arrival",
    "AuditCalls",
    "Call",
    "CallObserver",
    "CallRecorder",
    "Caller",
    "Outcome",
    "Plane",
    "Reply",
    "instance_call",
]

Result = TypeVar("Result")
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
        code: outcome for the header: not OK in an answer that says of each of several things what became of it.
        text: message for the header, "" to leave it as it is.
    """

    message: Any
    chunks: Sequence[bytes] = ()
    code: ErrorCode = ErrorCode.OK
    text: str = ""

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
        name: name of the rpc; the HTTP path is /api/<name with lower-case first letter>, unless `http_name` is given.
        plane: which port serves it.
        request_type: message class of the request.
        response_type: message class of the response, with a `header`.
        handler: answers it, or raises KvcmError.
        leader_only: whether a manager that must lead to serve refuses it while it does not.
        per_instance: whether its metrics carry the instance.
        is_traced: whether its request has a `trace_id`, and the answer a request id made of it.
        http_name: last part of the HTTP path where another call of the same port has that of the name.
    """

    service: str
    name: str
    plane: Plane
    request_type: type[Message]
    response_type: type[Any]
    handler: Handler
    leader_only: bool = True
    per_instance: bool = False
    is_traced: bool = True
    http_name: str = ""

    @property
    def path(self) -> str:
        """HTTP path."""
        return f"/api/{self.http_name or self.name[0].lower() + self.name[1:]}"


def instance_call(
    service: str, name: str, request_type: type[Message], response_type: type[Any], handler: Handler
) -> Call:
    """Return a call of engines about one instance."""
    return Call(
        service=service,
        name=name,
        plane=Plane.DATA,
        request_type=request_type,
        response_type=response_type,
        handler=handler,
        per_instance=True,
    )


class Arrival(NamedTuple):
    """How a request came.

    Attributes:
        transport: "grpc", "http", or "" for a call from inside.
        peer: address of the client without its port, "" when unknown. While authentication is disabled, it stands for
            the principal.
        deadline: on `time.monotonic`'s clock, when the client gives up; None without a deadline.
        trace_parent: W3C trace context that the client sent, "" for none, and while calls are not traced.
        received_at: on the same clock, when its first bytes arrived; None when the transport does not report it.
        principal: on whose behalf it came.
    """

    transport: str = ""
    peer: str = ""
    deadline: float | None = None
    trace_parent: str = ""
    received_at: float | None = None
    principal: Principal = UNRESTRICTED


LOCAL = Arrival()


class Outcome(NamedTuple):
    """How a request was answered.

    Attributes:
        code: of the answer's header; UNSPECIFIED where there is none, since the client went away.
        text: the header's message, "" when there is none.
        seconds: from the parsed request to the answer.
        labels: `instance_group` and `instance_id` where the call named a registered instance, else empty.
    """

    code: ErrorCode
    text: str
    seconds: float
    labels: Mapping[str, str]


class CallObserver(Protocol):
    """Follows every request. It runs on the path of each, so it does little and never waits or raises."""

    def begin(self, call: Call, request: Any, arrival: Arrival) -> Any:
        """A request was admitted; the result comes back with its end."""

    def end(self, begun: Any, call: Call, request: Any, arrival: Arrival, outcome: Outcome) -> None:
        """The request was answered, or its client went away."""

    def rejected(self, call: Call, arrival: Arrival, reason: str) -> None:
        """A request was not admitted; `reason` is one of few words, fit for a label."""


class Admission(Protocol):
    """Decides whether the manager works on a request now."""

    def check_head(self, call: Call, body_bytes: int) -> RejectedError | None:
        """Return why a request is rejected by its head, with a body of so many bytes to follow; None where it is
        admitted, and `release_body` follows."""

    def release_body(self, call: Call, body_bytes: int) -> None:
        """A request that was admitted by its head is answered, in whatever way."""

    def rejection(self, call: Call, arrival: Arrival) -> RejectedError | None:
        """Return why a request is rejected before it is read; None while it may be served."""

    async def enter(self, call: Call, request: Any, arrival: Arrival) -> Any:
        """Wait for the request's turn; `leave` takes the result, unless it is None.

        Raises:
            RejectedError: it is not served, and when to try again.
        """

    async def within_budget(self, work: Coroutine[Any, Any, Reply]) -> Reply:
        """Return the result of the work on a request that entered, or end it when it takes too long.

        Raises:
            RejectedError: it did.
        """

    def leave(self, entered: Any) -> None:
        """The request that entered was answered."""


class _NoAdmission:
    """Admits every request."""

    def check_head(self, _call: Call, _body_bytes: int) -> RejectedError | None:
        return None

    def release_body(self, _call: Call, _body_bytes: int) -> None:
        pass

    def rejection(self, _call: Call, _arrival: Arrival) -> RejectedError | None:
        return None

    async def enter(self, _call: Call, _request: Any, _arrival: Arrival) -> None:
        pass

    async def within_budget(self, work: Coroutine[Any, Any, Reply]) -> Reply:
        return await work

    def leave(self, _entered: None) -> None:
        pass


class _NoObserver:
    """Records no call."""

    def begin(self, _call: Call, _request: Any, _arrival: Arrival) -> None:
        pass

    def end(self, _begun: None, _call: Call, _request: Any, _arrival: Arrival, _outcome: Outcome) -> None:
        pass

    def rejected(self, _call: Call, _arrival: Arrival, _reason: str) -> None:
        pass


async def _no_refresh() -> bool:
    return False


def _unchecked_size(_request: Any) -> None:
    pass


class Caller:
    """Runs calls.

    Args:
        observer: follows every call.
        refuse: raises KvcmError while leader-only calls of a plane cannot be served.
        labels: from an instance id to the labels of its metrics; empty when it is not registered.
        refresh: reads the changes of other managers, and returns whether there were any.
        admission: admits or rejects requests.
        check_sizes: raises InvalidArgumentError for a request with a field above its limit.
        access: permissions of principals.
        wants_trace_parents: whether the observer reads `Arrival.trace_parent`.
    """

    def __init__(
        self,
        observer: CallObserver | None,
        refuse: Callable[[Plane], None],
        labels: Callable[[str], Mapping[str, str]],
        refresh: Callable[[], Awaitable[bool]] = _no_refresh,
        admission: Admission | None = None,
        check_sizes: Callable[[Any], None] = _unchecked_size,
        access: Access | None = None,
        *,
        wants_trace_parents: bool = False,
    ) -> None:
        self.wants_trace_parents = wants_trace_parents
        self._observer: CallObserver = observer if observer is not None else _NoObserver()
        self._refuse = refuse
        self._labels = labels
        self._refresh = refresh
        self.admission: Admission = admission if admission is not None else _NoAdmission()
        self._check_sizes = check_sizes
        self.access: Access = access if access is not None else OpenAccess()
        self._is_guarded = self.access.requires_credentials

    # Before the request is read.

    def release_body(self, call: Call, body_bytes: int) -> None:
        """A request that was admitted by its head is answered, in whatever way."""
        self.admission.release_body(call, body_bytes)

    def rejection(self, call: Call, arrival: Arrival) -> RejectedError | None:
        """Return why a request is not to be read, and record that; None where it is. To be called before `answer`."""
        error = self.admission.rejection(call, arrival)
        if error is not None:
            self.report_rejection(call, arrival, error)
        return error

    def authenticate(self, call: Call, arrival: Arrival, credentials: Credentials) -> Arrival:
        """Return the arrival with its principal; to be called before a request is read, where `access` requires
        credentials.

        Raises:
            RejectedError: it may make no such call; that is recorded.
        """
        try:
            principal = self.access.principal(policy_of(call.service, call.name), credentials)
        except RejectedError as error:
            self.report_rejection(call, arrival, error)
            raise
        return Arrival(*arrival[:-1], principal)  # several times as fast as _replace

    def authenticate_page(self, path: str, credentials: Credentials) -> Principal:
        """Return the principal that asks for a page or a stream.

        Raises:
            RejectedError: it may not.
        """
        return self.access.page_principal(path, credentials)

    def report_rejection(self, call: Call, arrival: Arrival, error: RejectedError) -> None:
        """Record a request that is not served; for transports that find that out themselves."""
        self._observer.rejected(call, arrival, error.reason)

    # The call itself.

    async def answer(self, call: Call, request: Any, arrival: Arrival = LOCAL) -> Reply:
        """Answer a request; any outcome is in the header (invariant 9).

        Raises:
            RejectedError: the request was not admitted.
        """
        try:
            if self._is_guarded:
                self.access.check(call.service, call.name, request, arrival.principal)
            entered = await self.admission.enter(call, request, arrival)
            if self._is_guarded and entered is not None:  # it waited: its key or its permission may be gone
                self._recheck_access(call, request, arrival, entered)
        except RejectedError as error:
            self.report_rejection(call, arrival, error)
            raise
        try:
            return await self._answer_admitted(call, request, arrival, is_long=entered is not None)
        finally:
            if entered is not None:
                self.admission.leave(entered)

    def _recheck_access(self, call: Call, request: Any, arrival: Arrival, entered: Any) -> None:
        try:
            self.access.check(call.service, call.name, request, arrival.principal)
        except RejectedError:
            self.admission.leave(entered)
            raise

    async def _answer_admitted(self, call: Call, request: Any, arrival: Arrival, *, is_long: bool) -> Reply:
        start = time.perf_counter()
        begun = self._observer.begin(call, request, arrival)
        labels = self._labels(request.instance_id) if call.per_instance else {}
        trace_id = request.trace_id if call.is_traced else ""
        timing = _CallTiming(call.name) if trace_id.endswith(_TIMING_SUFFIX) else None
        try:
            if call.leader_only:
                self._refuse(call.plane)
            self._check_sizes(request)
            run = self._run(call, request, arrival)
            if is_long:
                run = self.admission.within_budget(run)
            reply = await (run if timing is None else timing.measure(run))
            code, text = reply.code, reply.text
        except (RejectedError, asyncio.CancelledError) as error:
            text = str(error) if isinstance(error, RejectedError) else "the client went away"
            outcome = Outcome(ErrorCode.UNSPECIFIED, text, time.perf_counter() - start, labels)
            self._observer.end(begun, call, request, arrival, outcome)
            if isinstance(error, RejectedError):
                self.report_rejection(call, arrival, error)
            raise
        except KvcmError as error:
            reply, code, text = Reply(call.response_type()), error.code, str(error)
            _log.debug("refused", api=call.name, code=code.name, reason=text)
        except Exception:
            _log.exception("failed", api=call.name)
            reply, code = Reply(call.response_type()), ErrorCode.INTERNAL_ERROR
            text = "the manager failed to answer; its log has the reason"
        seconds = time.perf_counter() - start
        header = reply.message.header
        header.status.code = code
        if text:  # a handler may have left a remark on a success
            header.status.message = text
        if call.is_traced and hasattr(header, "request_id"):
            header.request_id = f"{trace_id[:_MOST_ECHOED]}_{time.time_ns() // 1000}"
        if timing is not None:
            timing.fill_header(header, seconds)
        self._observer.end(begun, call, request, arrival, Outcome(code, text, seconds, labels))
        return reply

    async def _run(self, call: Call, request: Any, arrival: Arrival) -> Reply:
        """Run the handler; a second time when another manager registered the instance a moment ago."""
        before = call_context.set(CallContext(arrival.principal, call.name, arrival.peer))
        try:
            try:
                return await self._run_on_covered(call, request, arrival)
            except UnknownInstanceError:
                if not await self._refresh():
                    raise
            return await self._run_on_covered(call, request, arrival)
        finally:
            call_context.reset(before)

    def _run_on_covered(self, call: Call, request: Any, arrival: Arrival) -> Awaitable[Reply]:
        if self._is_guarded:
            self.access.check_instance(call.service, call.name, request, arrival.principal)
        return call.handler(request)


# Everything that observes a call.

_MOST_ECHOED: Final = 1024  # characters of a trace id, which may be what is refused
_CANCELLED: Final = "CANCELLED"
_DECLARED_CODES: Final = (ErrorCode.OK, ErrorCode.INTERNAL_ERROR)
_MAX_REASONS: Final = 32


class _Method:
    """The counters of one call."""

    __slots__ = ("codes", "has_keys", "is_measured", "keys", "seconds")

    def __init__(self, call: Call) -> None:
        self.is_measured = _is_measured(call)
        self.codes = [0] * (max(ErrorCode) + 1)  # by number: an enum takes long to hash
        self.seconds = Histogram()
        self.has_keys = "block_keys" in call.request_type.DESCRIPTOR.fields_by_name
        self.keys = Histogram(KEYS)


_Begun = tuple[_Method, Any, Measures | None, Token[Any] | None, Token[Any] | None]
"""A call in progress: its counters, its span, its measures, and how to close them and to unbind it from log lines."""


def _is_measured(call: Call) -> bool:
    """Whether GetMetrics says what a call did in the index: those that name an instance may do something there."""
    return "instance_id" in call.request_type.DESCRIPTOR.fields_by_name


class CallRecorder:
    """The `CallObserver` of a manager: counts every call, and passes on those that are logged, audited or traced.

    Args:
        metrics: the table that GetMetrics lists.
        reasons: of rejections, so that their series exist from the start.
        access_log: logs calls.
        audit: records changes.
        tracing: makes spans.
    """

    def __init__(
        self,
        metrics: ApiMetrics,
        reasons: Iterable[str] = (),
        *,
        access_log: AccessLog | None = None,
        audit: AuditCalls | None = None,
        tracing: CallObserver | None = None,
    ) -> None:
        self._metrics = metrics
        self._access_log = access_log if access_log is not None else AccessLog(lambda: 0.0)
        self._audit = audit
        self._tracing = tracing
        self._methods: dict[str, _Method] = {}
        self._inflight = 0
        self._reasons = BoundedLabels(_MAX_REASONS)
        self._rejected = {self._reasons.label(reason): 0 for reason in reasons}

    def declare(self, call: Call) -> None:
        """Make the series of a call exist before its first request."""
        self._metrics.declare(call.name, is_measured=_is_measured(call))
        self._method(call)

    def _method(self, call: Call) -> _Method:
        """Return the counters of a call; one name may stand for calls of several services, as in GetMetrics."""
        method = self._methods.get(call.name)
        if method is None:
            method = self._methods[call.name] = _Method(call)
        return method

    def begin(self, call: Call, request: Any, arrival: Arrival) -> _Begun:
        """Count a request in flight and its keys, begin its span, and bind it to log lines."""
        method = self._methods.get(call.name) or self._method(call)
        measures: Measures | None = None
        opened = None
        if method.is_measured:
            measures = {"service.request_queue_size": self._inflight}
            opened = open_measures(measures)
        self._inflight += 1
        if method.has_keys and (count := len(request.block_keys)):
            method.keys.observe(count)
            if measures is not None:
                measures["manager.request_key_count"] = count
        span = self._tracing.begin(call, request, arrival) if self._tracing is not None else None
        return method, span, measures, opened, current_request_id.set(request) if call.is_traced else None

    def end(self, begun: _Begun, call: Call, request: Any, arrival: Arrival, outcome: Outcome) -> None:
        """Count the outcome, log and audit it, and end the span. The request is unbound last, so that these log lines
        still have its trace id."""
        method, span, measures, opened, bound = begun
        code, seconds = outcome.code, outcome.seconds
        self._inflight -= 1
        assert self._inflight >= 0
        method.codes[code] += 1
        method.seconds.observe(seconds)
        if code is not ErrorCode.UNSPECIFIED:  # GetMetrics counts answers only
            is_ok = code is ErrorCode.OK
            self._metrics.record(call.name, outcome.labels, code, is_ok, seconds * 1e6, measures=measures)
        log = self._access_log
        if log.sample or seconds > log.slow_seconds:
            log.end(call, request, arrival, outcome)
        if self._audit is not None and call.name in _AUDITED:
            self._audit.end(call, request, arrival, outcome)
        if self._tracing is not None:
            self._tracing.end(span, call, request, arrival, outcome)
        if opened is not None:
            close_measures(opened)
        if bound is not None:
            current_request_id.reset(bound)

    def rejected(self, call: Call, arrival: Arrival, reason: str) -> None:
        """Count, log and audit a request that is not served. It has no span: in an overload there would be too many."""
        label = self._reasons.label(reason)
        self._rejected[label] = self._rejected.get(label, 0) + 1
        self._access_log.rejected(call, arrival, reason)
        if self._audit is not None:
            self._audit.rejected(call, arrival, reason)

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
        """Yield the metrics."""
        yield Reading(catalog.RPC_INFLIGHT, self._inflight)
        for reason, count in list(self._rejected.items()):
            yield Reading(catalog.RPC_REJECTED, count, (reason,))
        for name, method in list(self._methods.items()):
            for code in ErrorCode:
                if (count := method.codes[code]) or code in _DECLARED_CODES:
                    yield Reading(catalog.RPC_REQUESTS, count, (name, code.name if code else _CANCELLED))
            yield Reading(catalog.RPC_DURATION, method.seconds.read(), (name,))
            if method.has_keys:
                yield Reading(catalog.RPC_REQUEST_KEYS, method.keys.read(), (name,))


# The access log: one event per sampled request, and per slow one. Never keys, tokens or uris.

_MAX_NAME_BYTES = 256  # longer ones are of no instance
_access_log = structlog.get_logger("kvcm.access")


class AccessLog:
    """Logs requests, at level INFO.

    Args:
        draw: a random number from 0 to 1, excluding 1.

    Attributes:
        sample: ratio of requests that are logged, from 0 to 1.
        slow_seconds: requests that took longer are always logged; infinity for none.
    """

    def __init__(self, draw: Callable[[], float]) -> None:
        self._draw = draw
        self.sample = 0.0
        self.slow_seconds = math.inf

    def set(self, sample: float, slow_seconds: float) -> None:
        """Change what is logged.

        Args:
            sample: ratio of requests, from 0 to 1.
            slow_seconds: requests that took longer are always logged; 0 for none.
        """
        self.sample = sample
        self.slow_seconds = slow_seconds or math.inf

    def end(self, call: Call, request: Any, arrival: Arrival, outcome: Outcome) -> None:
        """Log the request if it is sampled or slow."""
        is_slow = outcome.seconds > self.slow_seconds
        if (is_slow or self._is_sampled()) and is_enabled(logging.INFO):
            _access_log.info("request", is_slow=is_slow, **_log_fields(call, request, arrival, outcome))

    def rejected(self, call: Call, arrival: Arrival, reason: str) -> None:
        """Log a rejected request if it is sampled."""
        if self._is_sampled() and is_enabled(logging.INFO):
            _access_log.info(
                "turned_away", method=call.name, reason=reason, transport=arrival.transport, peer=arrival.peer
            )

    def _is_sampled(self) -> bool:
        return self.sample > 0 and self._draw() < self.sample


def _log_fields(call: Call, request: Any, arrival: Arrival, outcome: Outcome) -> dict[str, Any]:
    names = request.DESCRIPTOR.fields_by_name
    return {
        "method": call.name,
        "code": outcome.code.name,
        "keys": len(request.block_keys) if "block_keys" in names else 0,
        "instance": request.instance_id[:_MAX_NAME_BYTES] if "instance_id" in names else "",
        "duration_ms": round(outcome.seconds * 1000, 3),
        "transport": arrival.transport,
        "peer": arrival.peer,
    }


# The audit of calls that change something beside the configuration, whose changes are audited where they are made.

_LOGIN: Final = "Login"
_AUDITED: Final = frozenset(
    {
        *("RemoveCache", "TrimCache", "PinPrefix", "UnpinPrefix"),
        *("CollectGarbage", "ScrubStorage", "LoadConfigSnapshot"),
        *("LeaderDemote", "UpdateLeaderElectorConfig", "UpdateLogger", "ReloadConfig"),
        *("InjectFault", "RemoveFault", "ClearFaults", _LOGIN, "SetPassword"),
    }
)
"""Names of such calls."""
_WRONG_PASSWORD_REASON: Final = "unauthenticated"  # noqa: S105 - a reason, no secret


class AuditCalls:
    """Records audited calls.

    Strangers may try to log in as often as their bandwidth allows. So only wrong passwords are recorded of failed
    logins, and the number of attempts bounds those; the metrics count the others.

    Args:
        trail: makes the entries.
    """

    def __init__(self, trail: AuditTrail) -> None:
        self._trail = trail
        self._failed_login: tuple[Arrival, Any] | None = None

    def end(self, call: Call, request: Any, arrival: Arrival, outcome: Outcome) -> None:
        """Record the call if it is an audited one."""
        if call.name not in _AUDITED:
            return
        if call.name == _LOGIN and outcome.code is not ErrorCode.OK:
            self._failed_login = arrival, request  # `rejected` follows at once if the password was wrong
        else:
            self._record(call, request, arrival, outcome.code)

    def rejected(self, call: Call, arrival: Arrival, reason: str) -> None:
        """Record a wrong password; other rejected requests have changed nothing."""
        login, self._failed_login = self._failed_login, None
        if login is not None and login[0] is arrival and reason == _WRONG_PASSWORD_REASON:
            self._record(call, login[1], arrival, ErrorCode.UNSPECIFIED)

    def _record(self, call: Call, request: Any, arrival: Arrival, code: ErrorCode) -> None:
        context = call_context.set(CallContext(arrival.principal, call.name, arrival.peer))
        bound = current_request_id.set(request if call.is_traced else None)
        try:
            self._trail.called(call.name, code.name, dict(_audit_fields(request)))
        finally:
            current_request_id.reset(bound)
            call_context.reset(context)


def _audit_fields(request: Any) -> list[tuple[str, object]]:
    """Return the fields of a request, of lists only their length: block keys reveal prompts."""
    found: list[tuple[str, object]] = []
    for field, value in request.ListFields():
        if field.name == "trace_id":
            continue
        if field.is_repeated:
            found.append((f"{field.name}_count", len(value)))
        elif field.message_type is None and field.name != "config_snapshot":
            found.append((field.name, value))
    return found


# The timing tree in an answer's header, for trace ids that ask for it (wire.md 2.4).

_TIMING_SUFFIX: Final = "__kvcm_need_span_tracer"
_STAGE_OF_CALL: Final = {
    "RegisterInstance": "meta_api.py:register_instance",
    "GetInstanceInfo": "meta_api.py:get_instance_info",
    "GetCacheMeta": "block_calls.py:get_cache_meta",
    "GetCacheLocation": "meta_api.py:match",
    "GetCacheLocationLen": "meta_api.py:match_length",
    "StartWriteCache": "meta_api.py:start_write",
    "FinishWriteCache": "meta_api.py:finish_write",
    "RemoveCache": "block_calls.py:remove_cache",
    "TrimCache": "meta_api.py:trim",
    "GetClusterInfo": "meta_api.py:cluster_info",
    "RenewReadLease": "meta_api.py:renew_lease",
    "ReleaseReadLease": "meta_api.py:release_lease",
    "RenewWriteSession": "meta_api.py:renew_write",
    "PinPrefix": "pin_api.py:pin_prefix",
    "UnpinPrefix": "pin_api.py:unpin_prefix",
    "ListPins": "pin_api.py:list_pins",
    "ReportMissing": "pin_api.py:report_missing",
    "ReportPool": "pool_api.py:report_pool",
}
"""How the outermost stage of a call is called. Clients read these names: they stay, wherever the code goes."""


class _CallTiming:
    """Measures one call.

    Args:
        name: of the call.
    """

    def __init__(self, name: str) -> None:
        self._place = _STAGE_OF_CALL.get(name, name)
        self._stage: Stage | None = None

    async def measure(self, work: Awaitable[Result]) -> Result:
        """Do the work."""
        with open_stage("handle", self._place) as self._stage:
            return await work

    def fill_header(self, header: Any, seconds: float) -> None:
        """Put the tree in the header of an answer, if it has a field for it: those of the admin package have none.

        Args:
            header: of the answer.
            seconds: that the whole call took.
        """
        if "tracer_result" in header.DESCRIPTOR.fields_by_name:
            tree: dict[str, Any] = {"span_time_us": round(seconds * 1e6)}
            if self._stage is not None:
                tree |= _by_place([self._stage])
            header.tracer_result = json.dumps(tree, separators=(",", ":"))


def _by_place(stages: list[Stage]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for stage in stages:
        span = {"span_time_us": stage.microseconds, **_by_place(stage.parts)}
        found.setdefault(stage.place, []).append(span)
    return found
