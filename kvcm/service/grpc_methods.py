"""How a call is answered on gRPC: who makes it is found out before its request is received.

gRPC receives the whole request of a unary handler before it calls that; a handler of streams is called first, and asks
for the request. On the wire both look the same. So whoever is not known by the metadata has a handler of streams.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from typing import Any, Final, NoReturn

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from kvcm.model.principals import EVERYBODY, STRANGER, Principal
from kvcm.service.access import Credentials
from kvcm.service.bodies import BodyReader
from kvcm.service.calls import Arrival, Call, Caller
from kvcm.service.gate import Gate
from kvcm.service.lanes import DEADLINE
from kvcm.service.policies import policy_of
from kvcm.service.turned_away import TurnedAwayError

__all__ = ["GrpcMethod", "Metadata", "StrangerRequests", "turn_away"]

Metadata = Sequence[tuple[str, str | bytes]]

_TURNED_AWAY: Final = {
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
}
_STRANGERS: Final = 8
_STRANGER_SECONDS: Final = 5.0

_principal: ContextVar[Principal] = ContextVar("grpc_principal", default=EVERYBODY)
"""Who made the request that the present task answers: gRPC looks its method up in the same task."""


class StrangerRequests:
    """Receives requests of those who are not asked who they are: any of them may be as large as those of engines, so
    there are few at a time, and not for long."""

    def __init__(self) -> None:
        self._slots = asyncio.Semaphore(_STRANGERS)

    async def receive(self, context: Any) -> bytes:
        """Return the body of a request.

        Raises:
            TurnedAwayError: it did not come in time.
        """
        try:
            async with asyncio.timeout(_STRANGER_SECONDS), self._slots:
                return await _received(context)
        except TimeoutError:
            raise TurnedAwayError("the request did not come in time", DEADLINE, _STRANGER_SECONDS) from None


class GrpcMethod:
    """Answers the requests of one call.

    Args:
        call: the call.
        caller: runs it.
        bodies: reads requests.
        gate: whether calls are served.
        strangers: receives requests of calls that are open to everybody.
    """

    def __init__(self, call: Call, caller: Caller, bodies: BodyReader, gate: Gate, strangers: StrangerRequests) -> None:
        self._call = call
        self._caller = caller
        self._bodies = bodies
        self._gate = gate
        self._strangers = strangers
        self._asks = caller.access.asks
        self._policy = policy_of(call.service, call.name) if self._asks else None
        self._trace_parent = _trace_parent if caller.wants_trace_parents else _no_trace_parent
        self._known: Any = grpc.unary_unary_rpc_method_handler(self._answer_known)
        self._stranger: Any = grpc.stream_unary_rpc_method_handler(self._answer_stranger)
        self._certified: Any = grpc.stream_unary_rpc_method_handler(self._answer_certified)

    def handler(self, metadata: Metadata) -> Any:
        """Return what answers a request that came with this metadata."""
        if self._policy is None:
            return self._known
        if self._policy.is_open:
            return self._stranger
        authorization = _authorization(metadata)
        if not authorization:
            return self._certified
        try:
            _principal.set(self._caller.access.principal(self._policy, Credentials(authorization)))
        except TurnedAwayError as error:
            return grpc.stream_unary_rpc_method_handler(self._refusing(error))
        return self._known

    async def _answer_known(self, body: bytes, context: Any) -> bytes:
        arrival = self._arrival(context, _principal.get())
        refusal = self._refusal(arrival)
        if refusal is not None:
            await turn_away(context, refusal)
        return await self._serve(body, context, arrival)

    async def _answer_stranger(self, _requests: Any, context: Any) -> bytes:
        arrival = self._arrival(context, STRANGER)
        refusal = self._refusal(arrival)
        if refusal is not None:
            await turn_away(context, refusal)
        try:
            body = await self._strangers.receive(context)
        except TurnedAwayError as error:
            await self._turn_away(arrival, context, error)
        return await self._serve(body, context, arrival)

    async def _answer_certified(self, _requests: Any, context: Any) -> bytes:
        """Answer who showed no key: its certificate may say who it is."""
        arrival = self._arrival(context, STRANGER)
        refusal = self._refusal(arrival)
        if refusal is not None:
            await turn_away(context, refusal)
        names = context.auth_context().get("x509_subject_alternative_name", ())
        shown = Credentials("", tuple(name.decode("utf-8", "replace") for name in names))
        assert self._policy is not None
        try:
            principal = self._caller.access.principal(self._policy, shown)
        except TurnedAwayError as error:
            await self._turn_away(arrival, context, error)
        return await self._serve(await _received(context), context, arrival._replace(principal=principal))

    def _refusing(self, error: TurnedAwayError) -> Callable[[Any, Any], Awaitable[bytes]]:
        async def refuse(_requests: Any, context: Any) -> bytes:
            await self._turn_away(self._arrival(context, STRANGER), context, error)

        return refuse

    def _refusal(self, arrival: Arrival) -> TurnedAwayError | None:
        """Return why nothing is served just now, None where it is; observers are told."""
        refusal = self._gate.refusal()
        if refusal is None:
            return self._caller.refusal(self._call, arrival)
        self._caller.tell_turned_away(self._call, arrival, refusal)
        return refusal

    async def _turn_away(self, arrival: Arrival, context: Any, error: TurnedAwayError) -> NoReturn:
        self._caller.tell_turned_away(self._call, arrival, error)
        await turn_away(context, error)

    async def _serve(self, body: bytes, context: Any, arrival: Arrival) -> bytes:
        self._gate.enter()
        try:
            return await self._answer(body, context, arrival)
        finally:
            self._gate.leave()

    async def _answer(self, body: bytes, context: Any, arrival: Arrival) -> bytes:
        try:
            request = await self._bodies.proto(self._call, body, arrival.deadline)
        except DecodeError:
            name = self._call.request_type.__name__
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"the request is not a {name}")
        except TurnedAwayError as error:
            await self._turn_away(arrival, context, error)
        try:
            reply = await self._caller.answer(self._call, request, arrival)
        except TurnedAwayError as error:
            await turn_away(context, error)
        return reply.encoded()

    def _arrival(self, context: Any, principal: Principal) -> Arrival:
        remaining = context.time_remaining()
        deadline = None if remaining is None else time.monotonic() + remaining
        return Arrival("grpc", _host(context.peer()), deadline, self._trace_parent(context), None, principal)


async def turn_away(context: Any, error: TurnedAwayError) -> NoReturn:
    """End a request that is not served."""
    trailers: tuple[tuple[str, str], ...] = ()
    if error.retry_after_seconds is not None:  # gRFC A6: clients wait so long before they retry
        trailers = (("grpc-retry-pushback-ms", str(round(error.retry_after_seconds * 1000))),)
    await context.abort(_TURNED_AWAY[error.http_status], str(error), trailers)
    raise AssertionError  # abort raises


async def _received(context: Any) -> bytes:
    body = await context.read()
    if body is grpc.aio.EOF:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "there is no request")
    return bytes(body)


def _no_trace_parent(_context: Any) -> str:
    return ""


def _trace_parent(context: Any) -> str:
    parents = (value for key, value in context.invocation_metadata() or () if key == "traceparent")
    parent = next(parents, "")
    return parent if isinstance(parent, str) else ""


def _authorization(metadata: Metadata) -> str:
    found = ""
    for key, value in metadata:
        if key == "authorization":
            found = value if isinstance(value, str) and not found else "twice"  # whose of two is meant?
    return found


def _host(peer: str) -> str:
    """Return the address in `ipv4:1.2.3.4:567` or `ipv6:[::1]:567`, percent-encoded brackets or not."""
    return peer.partition(":")[2].rpartition(":")[0]
