"""What a call of the interface is, and how one is answered: the same on gRPC and HTTP.

Every request passes `Caller.answer`: it is admitted or turned away (`Admission`), carried out, and whoever counts,
logs or traces calls (`CallObserver`) is told how it began and ended.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
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
from kvcm.telemetry.metrics import KEYS, ApiMetrics, BoundedLabels, Histogram, Reading
from kvcm.telemetry.tracing import Stage, open_stage

__all__ = [
    "LOCAL",
    "AccessLog",
    "Admission",
    "Arrival",
    "AuditCalls",
    "Call",
    "CallMetrics",
    "CallObserver",
    "CallTiming",
    "Caller",
    "Outcome",
    "Plane",
    "Reply",
    "RequestContext",
]

# The timing tree of an answer's header, for trace ids that ask for it (wire.md 2.4).

_SUFFIX: Final = "__kvcm_need_span_tracer"
Result = TypeVar("Result")


class CallTiming:
    """Measures one call. To be made by `of`, which knows whether somebody wants to know.

    Args:
        place: of the handler, as `<file>:<function>`.
    """

    def __init__(self, place: str) -> None:
        self._place = place
        self._stage: Stage | None = None

    @classmethod
    def of(cls, handler: Any, name: str, trace_id: str | None) -> CallTiming | None:
        """Return what measures a call, None if its trace id does not ask for that.

        Args:
            handler: of the call.
            name: of the call, for a handler that has none.
            trace_id: of the request.
        """
        if trace_id is None or not trace_id.endswith(_SUFFIX):
            return None
        module = handler.__module__.rpartition(".")[2]
        return cls(f"{module}.py:{getattr(handler, '__name__', name)}")

    async def measure(self, work: Awaitable[Result]) -> Result:
        """Do the work."""
        with open_stage("handle", self._place) as self._stage:
            return await work

    def fill_header(self, header: Any, seconds: float) -> None:
        """Put the tree in a header, if it has a place for it: those of the admin package have none.

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
        is_traced: whether its request has a `trace_id`, and the answer a request id made of it.
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

    @property
    def path(self) -> str:
        """HTTP path."""
        return f"/api/{self.name[0].lower()}{self.name[1:]}"


class Arrival(NamedTuple):
    """How a request came.

    Attributes:
        transport: "grpc", "http", or "" for a call from inside.
        peer: address of the client without its port, "" when unknown. While nobody is asked who he is, it stands for
            the principal.
        deadline: on `time.monotonic`'s clock, when the client gives up; None when it does not say.
        trace_parent: W3C trace context that the client sent, "" for none, and while calls are not traced.
        received_at: on the same clock, when its first bytes were seen; None when the transport does not say.
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
    """Is told of every request; on the path of each, so it does little and never waits or raises."""

    def begin(self, call: Call, request: Any, arrival: Arrival) -> Any:
        """A request was admitted; what is returned comes back with its end."""

    def end(self, begun: Any, call: Call, request: Any, arrival: Arrival, outcome: Outcome) -> None:
        """It was answered, or its client went away."""

    def rejected(self, call: Call, arrival: Arrival, reason: str) -> None:
        """A request was not admitted; `reason` is one of few words, fit for a label."""


class Admission(Protocol):
    """Decides whether a request is worked on now."""

    def check_head(self, call: Call, body_bytes: int) -> RejectedError | None:
        """Return why a request whose head has come, with a body of so many bytes to follow, is not let in; None where
        it is, and `gone` says when it is done."""

    def release_body(self, call: Call, body_bytes: int) -> None:
        """A request that was let in is answered, in whatever way."""

    def rejection(self, call: Call, arrival: Arrival) -> RejectedError | None:
        """Return why a request that has come is not even read; None while it may be served."""

    async def enter(self, call: Call, request: Any, arrival: Arrival) -> Any:
        """Return when the request's turn has come; what is returned comes back when it leaves.

        Raises:
            TurnedAwayError: it is not served, and when to try again.
        """

    def leave(self, entered: Any) -> None:
        """The request that entered was answered."""


class _NoAdmission:
    """Admits everybody."""

    def check_head(self, _call: Call, _body_bytes: int) -> RejectedError | None:
        return None

    def release_body(self, _call: Call, _body_bytes: int) -> None:
        pass

    def rejection(self, _call: Call, _arrival: Arrival) -> RejectedError | None:
        return None

    async def enter(self, call: Call, request: Any, arrival: Arrival) -> None:
        pass

    def leave(self, _entered: None) -> None:
        pass


async def _no_refresh() -> bool:
    return False


def _unchecked_size(_request: Any) -> None:
    pass


class Caller:
    """Runs calls: admission, leader check, header, errors.

    Args:
        observers: are told of every call.
        refuse: raises KvcmError while leader-only calls of a plane cannot be served.
        labels: from an instance id to the labels of its metrics; empty when it is not registered.
        refresh: brings in what other managers changed, and says whether there was anything.
        admission: whom to serve.
        check_sizes: raises InvalidArgumentError for a request that has too much of something.
        access: who may call what.
        wants_trace_parents: whether an observer looks at `Arrival.trace_parent`.
    """

    def __init__(
        self,
        observers: Sequence[CallObserver],
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
        self._observers = tuple(observers)
        self._refuse = refuse
        self._labels = labels
        self._refresh = refresh
        self._admission: Admission = admission if admission is not None else _NoAdmission()
        self._check_sizes = check_sizes
        self.access: Access = access if access is not None else OpenAccess()

    def authenticate(self, call: Call, arrival: Arrival, credentials: Credentials) -> Arrival:
        """Return the arrival with its principal; to be asked before a request is read, where `access` asks.

        Raises:
            TurnedAwayError: it may make no such call; observers are told.
        """
        try:
            principal = self.access.principal(policy_of(call.service, call.name), credentials)
        except RejectedError as error:
            self.report_rejection(call, arrival, error)
            raise
        return Arrival(*arrival[:-1], principal)  # several times as fast as _replace

    def authenticate_page(self, path: str, credentials: Credentials) -> Principal:
        """Return who asks for a page or a stream.

        Raises:
            TurnedAwayError: it may not.
        """
        return self.access.page_principal(path, credentials)

    def check_head(self, call: Call, arrival: Arrival, body_bytes: int) -> RejectedError | None:
        """Return why a request whose head has come is not let in, observers are told then; None where it is, and `gone`
        is to follow."""
        error = self._admission.check_head(call, body_bytes)
        if error is not None:
            self.report_rejection(call, arrival, error)
        return error

    def release_body(self, call: Call, body_bytes: int) -> None:
        """A request that was let in by `knock` is answered, in whatever way."""
        self._admission.release_body(call, body_bytes)

    def rejection(self, call: Call, arrival: Arrival) -> RejectedError | None:
        """Return why a request that has come is not to be read, None where it is; observers are told. To be asked
        before `answer`."""
        error = self._admission.rejection(call, arrival)
        if error is not None:
            self.report_rejection(call, arrival, error)
        return error

    async def answer(self, call: Call, request: Any, arrival: Arrival = LOCAL) -> Reply:
        """Answer a request; any outcome is in the header (invariant 9).

        Raises:
            TurnedAwayError: the request was not admitted; the transport says so in its own way (design.md decision 9).
        """
        try:
            self.access.check(call.service, call.name, request, arrival.principal)
            entered = await self._admission.enter(call, request, arrival)
            if entered is not None:  # it has waited: its principal may have lost its key meanwhile, or the right
                self._recheck_access(call, request, arrival, entered)
        except RejectedError as error:
            self.report_rejection(call, arrival, error)
            raise
        try:
            return await self._answer_admitted(call, request, arrival)
        finally:
            self._admission.leave(entered)

    def _recheck_access(self, call: Call, request: Any, arrival: Arrival, entered: Any) -> None:
        try:
            self.access.check(call.service, call.name, request, arrival.principal)
        except RejectedError:
            self._admission.leave(entered)
            raise

    def report_rejection(self, call: Call, arrival: Arrival, error: RejectedError) -> None:
        """Tell the observers of a request that is not served, where a transport finds that out itself."""
        for observer in self._observers:
            observer.rejected(call, arrival, error.reason)

    async def _answer_admitted(self, call: Call, request: Any, arrival: Arrival) -> Reply:
        begin = time.perf_counter()
        begun = [observer.begin(call, request, arrival) for observer in self._observers]
        labels = self._labels(request.instance_id) if call.per_instance else {}
        trace_id = request.trace_id if call.is_traced else None
        timing = CallTiming.of(call.handler, call.name, trace_id)
        try:
            if call.leader_only:
                self._refuse(call.plane)
            self._check_sizes(request)
            run = self._run(call, request, arrival)
            reply = await (run if timing is None else timing.measure(run))
            code, text = ErrorCode.OK, ""
        except RejectedError as error:
            outcome = Outcome(ErrorCode.UNSPECIFIED, str(error), time.perf_counter() - begin, labels)
            self._report_end(begun, call, request, arrival, outcome)
            self.report_rejection(call, arrival, error)
            raise
        except KvcmError as error:
            reply, code, text = Reply(call.response_type()), error.code, str(error)
            _log.debug("refused", api=call.name, code=code.name, reason=text)
        except Exception:
            _log.exception("failed", api=call.name)
            reply, code = Reply(call.response_type()), ErrorCode.INTERNAL_ERROR
            text = "the manager failed to answer; its log has the reason"
        except asyncio.CancelledError:
            outcome = Outcome(ErrorCode.UNSPECIFIED, "the client went away", time.perf_counter() - begin, labels)
            self._report_end(begun, call, request, arrival, outcome)
            raise
        seconds = time.perf_counter() - begin
        _fill_header(reply.message, trace_id, code, text)
        if timing is not None:
            timing.fill_header(reply.message.header, seconds)
        outcome = Outcome(code, text, seconds, labels)
        self._report_end(begun, call, request, arrival, outcome)
        return reply

    def _report_end(self, begun: list[Any], call: Call, request: Any, arrival: Arrival, outcome: Outcome) -> None:
        for observer, token in zip(self._observers, begun, strict=True):
            observer.end(token, call, request, arrival, outcome)

    async def _run(self, call: Call, request: Any, arrival: Arrival) -> Reply:
        """Run the handler; again when another manager registered the instance a moment ago."""
        before = call_context.set(CallContext(arrival.principal, call.name, arrival.peer))
        try:
            try:
                return await call.handler(request)
            except UnknownInstanceError:
                if not await self._refresh():
                    raise
            self.access.check(call.service, call.name, request, arrival.principal)  # only now its group is known
            return await call.handler(request)
        finally:
            call_context.reset(before)


def _fill_header(message: Any, trace_id: str | None, code: ErrorCode, text: str) -> None:
    header = message.header
    header.status.code = code
    if text:  # a handler may have left a remark on a success
        header.status.message = text
    if trace_id is not None and hasattr(header, "request_id"):
        header.request_id = f"{trace_id}_{time.time_ns() // 1000}"


# Counts calls as they are answered: for Prometheus by method and code, for GetMetrics by api and instance.

_CANCELLED: Final = "CANCELLED"
_DECLARED_CODES: Final = (ErrorCode.OK, ErrorCode.INTERNAL_ERROR)
_MAX_REASONS: Final = 32


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
        self._reasons = BoundedLabels(_MAX_REASONS)
        self._rejected = {self._reasons.label(reason): 0 for reason in reasons}

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

    def rejected(self, _call: Call, _arrival: Arrival, reason: str) -> None:
        """Count a request that was not worked on."""
        reason = self._reasons.label(reason)
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
                if (count := method.codes[code]) or code in _DECLARED_CODES:
                    yield Reading(catalog.RPC_REQUESTS, count, (name, code.name if code else _CANCELLED))
            yield Reading(catalog.RPC_DURATION, method.seconds.read(), (name,))
            if method.has_keys:
                yield Reading(catalog.RPC_REQUEST_KEYS, method.keys.read(), (name,))


# The access log: one event per request that is drawn from all, or that took long. Never keys, tokens or uris.

_MAX_NAME_BYTES = 256  # those that are longer are of no instance
_access_log = structlog.get_logger("kvcm.access")


class AccessLog:
    """A `CallObserver` that logs requests, at level INFO. One that is not logged costs two comparisons.

    Args:
        draw: a random number from 0 to 1, excluding 1.
    """

    def __init__(self, draw: Callable[[], float]) -> None:
        self._draw = draw
        self._sample = 0.0
        self._slow_seconds = math.inf

    def set(self, sample: float, slow_seconds: float) -> None:
        """Say what is logged from now on.

        Args:
            sample: ratio of requests, from 0 to 1.
            slow_seconds: those that took longer are logged always; 0 for none.
        """
        self._sample = sample
        self._slow_seconds = slow_seconds or math.inf

    def begin(self, _call: Call, _request: Any, _arrival: Arrival) -> None:
        """Whether it is logged is decided at the end."""

    def end(self, _begun: Any, call: Call, request: Any, arrival: Arrival, outcome: Outcome) -> None:
        """Log the request if it is to be logged."""
        is_slow = outcome.seconds > self._slow_seconds
        if (is_slow or self._is_sampled()) and is_enabled(logging.INFO):
            _access_log.info("request", is_slow=is_slow, **_log_fields(call, request, arrival, outcome))

    def rejected(self, call: Call, arrival: Arrival, reason: str) -> None:
        """Log a request that was not worked on."""
        if self._is_sampled() and is_enabled(logging.INFO):
            _access_log.info(
                "turned_away", method=call.name, reason=reason, transport=arrival.transport, peer=arrival.peer
            )

    def _is_sampled(self) -> bool:
        return self._sample > 0 and self._draw() < self._sample


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


# Audits calls that change something beside the configuration, whose changes are audited where they are made.

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
_WRONG_PASSWORD_REASON: Final = "unauthenticated"  # noqa: S105 - as the call is turned away


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
        if call.name not in _AUDITED:
            return
        if call.name == _LOGIN and outcome.code is not ErrorCode.OK:
            self._failed_login = arrival, request  # `turned_away` follows at once if it was the password
        else:
            self._record(call, request, arrival, outcome.code)

    def rejected(self, call: Call, arrival: Arrival, reason: str) -> None:
        """Record a wrong password; whatever else is turned away has changed nothing."""
        login, self._failed_login = self._failed_login, None
        if login is not None and login[0] is arrival and reason == _WRONG_PASSWORD_REASON:
            self._record(call, login[1], arrival, ErrorCode.UNSPECIFIED)

    def _record(self, call: Call, request: Any, arrival: Arrival, code: ErrorCode) -> None:
        worked_for = call_context.set(CallContext(arrival.principal, call.name, arrival.peer))
        in_hand = current_request_id.set(request if call.is_traced else None)
        try:
            self._trail.called(call.name, code.name, dict(_audit_fields(request)))
        finally:
            current_request_id.reset(in_hand)
            call_context.reset(worked_for)


def _audit_fields(request: Any) -> list[tuple[str, object]]:
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


# Tells the log which request is being handled.


class RequestContext:
    """A `CallObserver` that binds the request while it is handled. It stands last, so that those before it can still
    log the end of the request under its trace id."""

    def begin(self, call: Call, request: Any, _arrival: Arrival) -> Token[Any] | None:
        """Bind the request."""
        return current_request_id.set(request) if call.is_traced else None

    def end(self, begun: Token[Any] | None, _call: Call, _request: Any, _arrival: Arrival, _outcome: Outcome) -> None:
        """Let go of it."""
        if begun is not None:
            current_request_id.reset(begun)

    def rejected(self, _call: Call, _arrival: Arrival, _reason: str) -> None:
        """It is not handled."""
