"""The manager's calls: path and messages of each, trace ids, and the policy of retries, timeouts and the breaker."""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Generic, Protocol, TypeAlias, TypeVar
from uuid import uuid4

import grpc

from kvcm.connectors.addresses import Addresses
from kvcm.connectors.results import Outcome
from kvcm.model.errors import ErrorCode
from kvcm.protocol import meta_service_pb2 as meta
from kvcm.protocol.kvcm.v1 import lease_service_pb2 as lease
from kvcm.protocol.kvcm.v1 import pin_service_pb2 as pins
from kvcm.protocol.kvcm.v1 import pool_service_pb2 as pools
from kvcm.protocol.kvcm.v1 import residency_service_pb2 as residency
from kvcm.protocol.kvcm.v1 import unread_pb2 as unread

__all__ = [
    "DESCRIBE_INDEX",
    "FINISH_WRITE",
    "GET_CLUSTER_INFO",
    "LIST_PINS",
    "MATCH",
    "MATCH_LENGTH",
    "MATCH_UNREAD",
    "PIN_PREFIX",
    "REGISTER_INSTANCE",
    "REGISTER_PUBLISHER",
    "RELEASE_READ_LEASE",
    "REMOVE",
    "RENEW_WRITE_SESSION",
    "REPORT_MISSING",
    "REPORT_POOL",
    "REPORT_RESIDENCY",
    "START_WRITE",
    "UNPIN_PREFIX",
    "Answer",
    "Breaker",
    "Call",
    "CallSteps",
    "Pause",
    "Policy",
    "Reply",
    "RetrySettings",
    "Send",
    "Verdict",
    "new_trace_id",
    "ok_answer",
    "use_trace_id",
]

_META = "kv_cache_manager.proto.meta.MetaService"
_LEASE = "kvcm.v1.LeaseService"
_PIN = "kvcm.v1.PinService"
_POOL = "kvcm.v1.PoolService"
_RESIDENCY = "kvcm.v1.ResidencyService"


class Answer(Protocol):
    """Any answer: all of them begin with a header."""

    @property
    def header(self) -> meta.CommonResponseHeader:
        """Outcome of the call."""


AnswerT = TypeVar("AnswerT", bound=Answer)


@dataclass(frozen=True, slots=True)
class Call(Generic[AnswerT]):
    """One remote procedure.

    Attributes:
        name: as it is counted and logged.
        path: full gRPC method name.
        decode: makes the answer from its bytes.
    """

    name: str
    path: str
    decode: Callable[[bytes], AnswerT]


# None of these calls does harm when it is repeated, so all share one retry policy. For those that are not idempotent:
# * StartWriteCache: when an answer is lost, the blocks stay reserved by an orphan session. The repeated call
#   finds them being written and masks them: two writers never get the same address. They stay missing until the lost
#   session ends; without the repetition they would too.
# * FinishWriteCache: when an answer is lost, the session is already finished. The repeated call is refused (unknown
#   session) and we report failure for blocks that were in fact published; the next match finds them.
# * PinPrefix: when an answer is lost, the repeated call pins a second time. The first pin takes budget until its
#   deadline; ListPins lists it under its owner, so that the owner can end it.
REGISTER_INSTANCE = Call("register_instance", f"/{_META}/RegisterInstance", meta.RegisterInstanceResponse.FromString)
MATCH = Call("match", f"/{_META}/GetCacheLocation", meta.GetCacheLocationResponse.FromString)
MATCH_UNREAD = Call("match", f"/{_META}/GetCacheLocation", unread.UnreadCacheLocations.FromString)
MATCH_LENGTH = Call("match_length", f"/{_META}/GetCacheLocationLen", meta.GetCacheLocationLenResponse.FromString)
START_WRITE = Call("start_write", f"/{_META}/StartWriteCache", meta.StartWriteCacheResponse.FromString)
FINISH_WRITE = Call("finish_write", f"/{_META}/FinishWriteCache", meta.CommonResponse.FromString)
REMOVE = Call("remove", f"/{_META}/RemoveCache", meta.CommonResponse.FromString)
GET_CLUSTER_INFO = Call("cluster_info", f"/{_META}/GetClusterInfo", meta.GetClusterInfoResponse.FromString)
RENEW_WRITE_SESSION = Call("renew_write", f"/{_LEASE}/RenewWriteSession", lease.RenewWriteSessionResponse.FromString)
RELEASE_READ_LEASE = Call("release_lease", f"/{_LEASE}/ReleaseReadLease", meta.CommonResponse.FromString)
PIN_PREFIX = Call("pin_prefix", f"/{_PIN}/PinPrefix", pins.PinPrefixResponse.FromString)
UNPIN_PREFIX = Call("unpin", f"/{_PIN}/UnpinPrefix", meta.CommonResponse.FromString)
LIST_PINS = Call("list_pins", f"/{_PIN}/ListPins", pins.ListPinsResponse.FromString)
REPORT_MISSING = Call("report_missing", f"/{_PIN}/ReportMissing", pins.ReportMissingResponse.FromString)
REPORT_POOL = Call("report_pool", f"/{_POOL}/ReportPool", pools.ReportPoolResponse.FromString)
# Its sender repeats it by itself: an answer of another manager than the one that was asked means nothing.
REPORT_RESIDENCY = Call(
    "report_residency", f"/{_RESIDENCY}/ReportResidency", residency.ReportResidencyResponse.FromString
)

DESCRIBE_INDEX = Call("describe_index", f"/{_RESIDENCY}/DescribeIndex", residency.DescribeIndexResponse.FromString)
REGISTER_PUBLISHER = Call(
    "register_publisher", f"/{_RESIDENCY}/RegisterPublisher", residency.RegisterPublisherResponse.FromString
)

# ---- retries, timeouts and the circuit breaker: the same for both clients, without any I/O ----
#
# `Policy.steps` is a generator: it yields the next step (send to an address, or pause), receives the step's reply, and
# returns the verdict. A client only carries the steps out. Invariants:
#
# 1. A call ends within the caller's budget, pauses included.
# 2. Only transient failures are retried: gRPC UNAVAILABLE, RESOURCE_EXHAUSTED (the server sheds load) and CANCELLED (a
#    server that stops cancels requests that it has not begun, grpc/grpc#41785), and the answer codes SERVICE_NOT_READY
#    and SERVER_NOT_LEADER. A timeout of the whole budget is final.
# 3. Each of several given addresses gets its share of the remaining budget, and a failed attempt moves on to the next
#    address at once. The assigned manager comes first (`addresses.py`) and has the share of a given one. After a full
#    round the client pauses, for a time drawn from 0 to an exponentially growing limit ("full jitter"), so that the
#    engines of a cluster do not come back all at the same moment.
# 4. A manager that sheds a request says when to retry (pushback). If all managers of a round push back, the client
#    waits once, for the shortest pushback plus the drawn pause. If they push back again, or the pushback ends after the
#    deadline, the call ends. Such managers count as alive.
# 5. After several calls in a row without an answer the breaker opens: calls are misses at once, without a byte sent,
#    until a single probe is answered. A dead manager then costs its deadline a few times and not once per request.
#    Calls that sent nothing do not count.

_KNOWN_CODES = frozenset(map(int, ErrorCode))
_RETRIED_STATUSES = frozenset(
    {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.CANCELLED}
)
_RETRIED_CODES = frozenset({ErrorCode.SERVICE_NOT_READY, ErrorCode.SERVER_NOT_LEADER})


@dataclass(frozen=True, slots=True)
class RetrySettings:
    """How patient a client is.

    Attributes:
        max_rounds: most times the list of addresses is walked for one call.
        first_pause_seconds: limit of the pause after the first round; it doubles with every round.
        max_pause_seconds: where the doubling ends.
        breaker_failures: calls in a row without an answer that open the breaker.
        breaker_seconds: how long it stays open at first; doubles while probes fail.
        breaker_max_seconds: where that doubling ends.
    """

    max_rounds: int = 4
    first_pause_seconds: float = 0.05
    max_pause_seconds: float = 1.0
    breaker_failures: int = 3
    breaker_seconds: float = 1.0
    breaker_max_seconds: float = 30.0


@dataclass(frozen=True, slots=True)
class Send:
    """Send the request to an address and wait so long for the answer."""

    address: str
    timeout_seconds: float


@dataclass(frozen=True, slots=True)
class Pause:
    """Do nothing for so long."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Reply(Generic[AnswerT]):
    """The reply to a `Send`: an answer, or the gRPC status and its details.

    Attributes:
        answer: None without one.
        status: of gRPC.
        details: its text.
        pushback_seconds: when the manager wants a retry, None when it does not say.
    """

    answer: AnswerT | None
    status: grpc.StatusCode = grpc.StatusCode.OK
    details: str = ""
    pushback_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Verdict(Generic[AnswerT]):
    """How a call ended.

    Attributes:
        outcome: ok only with an answer whose code is OK.
        answer: of the manager, also when it refused; None when there was none.
        code: of the answer, None without one.
        reason: why it is not ok.
        retries: attempts after the first.
    """

    outcome: Outcome
    answer: AnswerT | None = None
    code: ErrorCode | int | None = None
    reason: str = ""
    retries: int = 0


# Next step → its reply (None after a pause) → verdict.
CallSteps: TypeAlias = Generator[Send | Pause, Reply[AnswerT] | None, Verdict[AnswerT]]

# With the verdict: whether a manager is alive, None when nothing was sent.
_Attempts: TypeAlias = Generator[Send | Pause, Reply[AnswerT] | None, tuple[Verdict[AnswerT], bool | None]]


class Breaker:
    """Opens after failures in a row, lets one probe through after a while; safe to use from several threads.

    Args:
        settings: how many failures, how long.
        clock: seconds of a clock that never runs backwards.
    """

    def __init__(self, settings: RetrySettings, clock: Callable[[], float]) -> None:
        self._settings = settings
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._open_until: float | None = None
        self._open_seconds = settings.breaker_seconds

    def allows_call(self) -> bool:
        """Whether to make a call now. While open, one caller is let through at a time as the probe."""
        with self._lock:
            if self._open_until is None:
                return True
            if self._clock() < self._open_until:
                return False
            # If the probe never comes back, the next one follows after the same time.
            self._open_until = self._clock() + self._open_seconds
            return True

    @property
    def is_open(self) -> bool:
        """Whether calls are misses, but for probes."""
        return self._open_until is not None

    def record_success(self) -> None:
        """A manager answered."""
        with self._lock:
            self._failures = 0
            self._open_until = None
            self._open_seconds = self._settings.breaker_seconds

    def record_failure(self) -> None:
        """No manager answered in time."""
        with self._lock:
            self._failures += 1
            if self._open_until is not None:
                self._open_seconds = min(self._open_seconds * 2, self._settings.breaker_max_seconds)
            if self._failures >= self._settings.breaker_failures:
                self._open_until = self._clock() + self._open_seconds


class Policy:
    """Decides the steps of every call of one client; safe to use from several threads.

    Args:
        addresses: where to send.
        settings: how patient to be.
        clock: seconds of a clock that never runs backwards.
        uniform: draws from a range.
    """

    def __init__(
        self,
        addresses: Addresses,
        settings: RetrySettings,
        clock: Callable[[], float] = time.monotonic,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self._addresses = addresses
        self._settings = settings
        self._clock = clock
        self._uniform = uniform
        self._breaker = Breaker(settings, clock)

    @property
    def is_suspended(self) -> bool:
        """Whether the breaker is open: calls are misses, except for a probe now and then."""
        return self._breaker.is_open

    def steps(self, budget_seconds: float) -> CallSteps[AnswerT]:
        """Yield the steps of one call and return its verdict.

        Args:
            budget_seconds: time for everything; each `Send` and `Pause` stays inside it.
        """
        deadline = self._clock() + budget_seconds
        attempts: _Attempts[AnswerT] = self._attempts(deadline)
        verdict, is_alive = yield from attempts
        if is_alive:
            self._breaker.record_success()
        elif is_alive is not None:
            self._breaker.record_failure()
        return verdict

    def _attempts(self, deadline: float) -> _Attempts[AnswerT]:
        """Yield the attempts; return the last verdict, and whether a manager is alive, None when nothing was sent."""
        order, given = self._addresses.order, self._addresses.given_count
        is_alive: bool | None = None
        last: Verdict[AnswerT] = Verdict(Outcome.TIMEOUT, reason="the budget is 0 or less")
        pushed_back: list[float] = []  # of this round
        waits_again = False
        for attempt in range(self._settings.max_rounds * len(order)):
            round_number, position = divmod(attempt, len(order))
            if position == 0 and round_number > 0:
                pause_seconds = self._pause_seconds(round_number)
                if len(pushed_back) == len(order):
                    if waits_again:
                        break
                    waits_again = True
                    pause_seconds += min(pushed_back)
                pushed_back.clear()
                if self._clock() + pause_seconds >= deadline:
                    break
                yield Pause(pause_seconds)
            left_seconds = deadline - self._clock()
            if left_seconds <= 0:
                break
            # Only now: the call that passes as the probe must also send it.
            if attempt == 0 and not self._breaker.allows_call():
                return Verdict(Outcome.MISS_ON_ERROR, reason="no manager answered lately; not asked"), None
            address = order[position]
            reply = yield Send(address, left_seconds / min(given, len(order) - position))
            assert reply is not None
            last, is_final = _verdict_of(reply, attempt)
            # Every answer comes from a living manager, whatever it says, and so do statuses that stay.
            is_alive = is_final or reply.answer is not None or reply.pushback_seconds is not None
            if reply.pushback_seconds is not None:
                pushed_back.append(reply.pushback_seconds)
            self._record(address, reply, is_final=is_final)
            if is_final:
                break
        return last, is_alive

    def _record(self, address: str, reply: Reply[AnswerT], *, is_final: bool) -> None:
        if is_final:
            self._addresses.on_answer(address)
        elif reply.pushback_seconds is None and reply.status is not grpc.StatusCode.RESOURCE_EXHAUSTED:
            self._addresses.on_failure(address)  # one that sheds stays the assigned one

    def _pause_seconds(self, round_number: int) -> float:
        doubled = self._settings.first_pause_seconds * 2.0 ** (round_number - 1)
        return self._uniform(0.0, min(doubled, self._settings.max_pause_seconds))


def ok_answer(reply: Reply[AnswerT]) -> AnswerT | None:
    """Return the answer of one attempt if its code is OK, else None."""
    answer = reply.answer
    return answer if answer is not None and _status(answer)[0] == ErrorCode.OK else None


def _verdict_of(reply: Reply[AnswerT], retries: int) -> tuple[Verdict[AnswerT], bool]:
    """Return the verdict if this were the last attempt, and whether it is."""
    if reply.answer is not None:
        return _verdict_of_answer(reply.answer, retries)
    reason = f"gRPC {reply.status.name}: {reply.details}"
    if reply.status is grpc.StatusCode.DEADLINE_EXCEEDED:
        # Final when the whole budget is gone; after its share only, the next address gets a try.
        return Verdict(Outcome.TIMEOUT, reason=reason, retries=retries), False
    return Verdict(Outcome.MISS_ON_ERROR, reason=reason, retries=retries), reply.status not in _RETRIED_STATUSES


def _verdict_of_answer(answer: AnswerT, retries: int) -> tuple[Verdict[AnswerT], bool]:
    code, message = _status(answer)
    if code == ErrorCode.OK:
        return Verdict(Outcome.OK, answer, code, retries=retries), True
    verdict = Verdict(Outcome.MISS_ON_ERROR, answer, code, f"{_name(code)}: {message}", retries)
    return verdict, code not in _RETRIED_CODES


def _status(answer: Answer) -> tuple[ErrorCode | int, str]:
    status = answer.header.status
    known = int(status.code) in _KNOWN_CODES
    return (ErrorCode(status.code) if known else int(status.code)), status.message


def _name(code: ErrorCode | int) -> str:
    return code.name if isinstance(code, ErrorCode) else f"code {code}"


# ---- trace ids: that of the engine's request, else a random one; the manager's access log holds it, too ----

_MAX_CHARACTERS = 128
_FORBIDDEN_CHARACTERS = re.compile(r"[^A-Za-z0-9._:/-]")
_current: ContextVar[str] = ContextVar("kvcm_trace_id", default="")


def new_trace_id() -> str:
    """Return the id for one call."""
    return _current.get() or uuid4().hex


@contextmanager
def use_trace_id(request_id: str) -> Iterator[None]:
    """Let calls of this thread or task carry the id of a request, cut to what logs can hold."""
    token = _current.set(_FORBIDDEN_CHARACTERS.sub("_", request_id[:_MAX_CHARACTERS]))
    try:
        yield
    finally:
        _current.reset(token)
