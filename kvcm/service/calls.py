"""What a call of the interface is, and how one is answered: the same on gRPC and HTTP.

Every request passes `Caller.answer`: it is admitted or turned away (`Admission`), carried out, and whoever counts,
logs or traces calls (`CallObserver`) is told how it began and ended.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, Protocol

import structlog
from google.protobuf.message import Message

from kvcm.model.errors import ErrorCode, KvcmError, UnknownInstanceError
from kvcm.model.principals import EVERYBODY, Errand, Principal, errand
from kvcm.service.access import Access, Credentials, OpenAccess
from kvcm.service.call_timing import CallTiming
from kvcm.service.policies import policy_of
from kvcm.service.turned_away import TurnedAwayError

__all__ = ["LOCAL", "Admission", "Arrival", "Call", "CallObserver", "Caller", "Outcome", "Plane", "Reply"]

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
        came: on the same clock, when its first bytes were seen; None when the transport does not say.
        principal: on whose behalf it came.
    """

    transport: str = ""
    peer: str = ""
    deadline: float | None = None
    trace_parent: str = ""
    came: float | None = None
    principal: Principal = EVERYBODY


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

    def turned_away(self, call: Call, arrival: Arrival, reason: str) -> None:
        """A request was not admitted; `reason` is one of few words, fit for a label."""


class Admission(Protocol):
    """Decides whether a request is worked on now."""

    def knock(self, call: Call, body_bytes: int) -> TurnedAwayError | None:
        """Return why a request whose head has come, with a body of so many bytes to follow, is not let in; None where
        it is, and `gone` says when it is done."""

    def gone(self, call: Call, body_bytes: int) -> None:
        """A request that was let in is answered, in whatever way."""

    def refusal(self, call: Call, arrival: Arrival) -> TurnedAwayError | None:
        """Return why a request that has come is not even read; None while it may be served."""

    async def enter(self, call: Call, request: Any, arrival: Arrival) -> Any:
        """Return when the request's turn has come; what is returned comes back when it leaves.

        Raises:
            TurnedAwayError: it is not served, and when to try again.
        """

    def leave(self, entered: Any) -> None:
        """The request that entered was answered."""


class _AllAtOnce:
    """Admits everybody."""

    def knock(self, _call: Call, _body_bytes: int) -> TurnedAwayError | None:
        return None

    def gone(self, _call: Call, _body_bytes: int) -> None:
        pass

    def refusal(self, _call: Call, _arrival: Arrival) -> TurnedAwayError | None:
        return None

    async def enter(self, call: Call, request: Any, arrival: Arrival) -> None:
        pass

    def leave(self, _entered: None) -> None:
        pass


async def _nothing_new() -> bool:
    return False


def _any_size(_request: Any) -> None:
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
        refresh: Callable[[], Awaitable[bool]] = _nothing_new,
        admission: Admission | None = None,
        check_sizes: Callable[[Any], None] = _any_size,
        access: Access | None = None,
        *,
        wants_trace_parents: bool = False,
    ) -> None:
        self.wants_trace_parents = wants_trace_parents
        self._observers = tuple(observers)
        self._refuse = refuse
        self._labels = labels
        self._refresh = refresh
        self._admission: Admission = admission if admission is not None else _AllAtOnce()
        self._check_sizes = check_sizes
        self.access: Access = access if access is not None else OpenAccess()

    def recognised(self, call: Call, arrival: Arrival, credentials: Credentials) -> Arrival:
        """Return the arrival with its principal; to be asked before a request is read, where `access` asks.

        Raises:
            TurnedAwayError: it may make no such call; observers are told.
        """
        try:
            principal = self.access.principal(policy_of(call.service, call.name), credentials)
        except TurnedAwayError as error:
            self.tell_turned_away(call, arrival, error)
            raise
        return Arrival(*arrival[:-1], principal)  # several times as fast as _replace

    def visitor(self, path: str, credentials: Credentials) -> Principal:
        """Return who asks for a page or a stream.

        Raises:
            TurnedAwayError: it may not.
        """
        return self.access.page_principal(path, credentials)

    def knock(self, call: Call, arrival: Arrival, body_bytes: int) -> TurnedAwayError | None:
        """Return why a request whose head has come is not let in, observers are told then; None where it is, and `gone`
        is to follow."""
        error = self._admission.knock(call, body_bytes)
        if error is not None:
            self.tell_turned_away(call, arrival, error)
        return error

    def gone(self, call: Call, body_bytes: int) -> None:
        """A request that was let in by `knock` is answered, in whatever way."""
        self._admission.gone(call, body_bytes)

    def refusal(self, call: Call, arrival: Arrival) -> TurnedAwayError | None:
        """Return why a request that has come is not to be read, None where it is; observers are told. To be asked
        before `answer`."""
        error = self._admission.refusal(call, arrival)
        if error is not None:
            self.tell_turned_away(call, arrival, error)
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
                self._check_again(call, request, arrival, entered)
        except TurnedAwayError as error:
            self.tell_turned_away(call, arrival, error)
            raise
        try:
            return await self._admitted(call, request, arrival)
        finally:
            self._admission.leave(entered)

    def _check_again(self, call: Call, request: Any, arrival: Arrival, entered: Any) -> None:
        try:
            self.access.check(call.service, call.name, request, arrival.principal)
        except TurnedAwayError:
            self._admission.leave(entered)
            raise

    def tell_turned_away(self, call: Call, arrival: Arrival, error: TurnedAwayError) -> None:
        """Tell the observers of a request that is not served, where a transport finds that out itself."""
        for observer in self._observers:
            observer.turned_away(call, arrival, error.reason)

    async def _admitted(self, call: Call, request: Any, arrival: Arrival) -> Reply:
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
        except TurnedAwayError as error:
            outcome = Outcome(ErrorCode.UNSPECIFIED, str(error), time.perf_counter() - begin, labels)
            self._tell_end(begun, call, request, arrival, outcome)
            self.tell_turned_away(call, arrival, error)
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
            self._tell_end(begun, call, request, arrival, outcome)
            raise
        seconds = time.perf_counter() - begin
        _fill_header(reply.message, trace_id, code, text)
        if timing is not None:
            timing.tell(reply.message.header, seconds)
        outcome = Outcome(code, text, seconds, labels)
        self._tell_end(begun, call, request, arrival, outcome)
        return reply

    def _tell_end(self, begun: list[Any], call: Call, request: Any, arrival: Arrival, outcome: Outcome) -> None:
        for observer, token in zip(self._observers, begun, strict=True):
            observer.end(token, call, request, arrival, outcome)

    async def _run(self, call: Call, request: Any, arrival: Arrival) -> Reply:
        """Run the handler; again when another manager registered the instance a moment ago."""
        before = errand.set(Errand(arrival.principal, call.name, arrival.peer))
        try:
            try:
                return await call.handler(request)
            except UnknownInstanceError:
                if not await self._refresh():
                    raise
            self.access.check(call.service, call.name, request, arrival.principal)  # only now its group is known
            return await call.handler(request)
        finally:
            errand.reset(before)


def _fill_header(message: Any, trace_id: str | None, code: ErrorCode, text: str) -> None:
    header = message.header
    header.status.code = code
    if text:  # a handler may have left a remark on a success
        header.status.message = text
    if trace_id is not None and hasattr(header, "request_id"):
        header.request_id = f"{trace_id}_{time.time_ns() // 1000}"
