"""The calls on gRPC. Bytes in, bytes out: messages are parsed and joined by hand, since answers are mostly encoded
already. Who asks is known before the body of a request is taken."""

from __future__ import annotations

import asyncio
import math
import socket
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from kvcm.model.errors import StorageIOError
from kvcm.model.tasks import end_tasks
from kvcm.service.access import Credentials
from kvcm.service.bodies import BodyReader
from kvcm.service.calls import Arrival, Call, Caller
from kvcm.service.gate import Gate, Phase
from kvcm.service.grpc_bodies import BodyWatch
from kvcm.service.grpc_health import GrpcHealth, reflection_of
from kvcm.service.grpc_wakeups import whole_wakeups
from kvcm.service.http_connection import ConnectionLimits
from kvcm.service.tls import ServerTls
from kvcm.service.turned_away import TurnedAwayError

__all__ = ["GrpcServer"]

# Clients of the original ping every 10 s on idle channels (wire.md 2.3): without these they are thrown out. A peer that
# does not answer a ping of ours is dead, or takes nothing of what it is sent.
_KEEPALIVE = (
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 5000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_ping_strikes", 0),
)

# A server of gRPC takes one request in two or three turns of the event loop, whose turns may take milliseconds. Several
# on one port take as many at a time, of several connections: the system spreads those over them, not quite evenly.
_ACCEPTORS = 8
_MANY_CONNECTIONS = 64 * _ACCEPTORS
_UNEVEN = 1.25

_CLOSE_SECONDS = 1.0  # for answers that are being sent
_TURNED_AWAY = {
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
}


@dataclass(frozen=True, slots=True)
class GrpcLimits:
    """What gRPC itself refuses.

    Attributes:
        max_body_bytes: largest request; answers have no limit.
        max_connections: that are open at a time; more are closed at once.
        max_streams: requests of one connection at a time; clients keep further ones back.
        handshake_ms: time in which a connection has to become one of HTTP/2.
    """

    max_body_bytes: int
    max_connections: int
    max_streams: int
    handshake_ms: int


class GrpcServer:
    """One gRPC listener, bound at once. To be made inside the event loop.

    Args:
        host: address to bind.
        port: port to bind; 0 takes a free one.
        limits: of requests and connections.
        gate: whether calls are served.
        tls: what connections use; None for plain text.
        patience: with requests that are slow to arrive; may change.

    Raises:
        StorageIOError: the address cannot be bound.
    """

    def __init__(
        self,
        host: str,
        port: int,
        limits: GrpcLimits,
        gate: Gate,
        tls: ServerTls | None = None,
        patience: ConnectionLimits | None = None,
    ) -> None:
        _check_free(host, port)
        acceptors = _ACCEPTORS if limits.max_connections >= _MANY_CONNECTIONS else 1
        most = limits.max_connections if acceptors == 1 else math.ceil(limits.max_connections / acceptors * _UNEVEN)
        options = (
            *_KEEPALIVE,
            ("grpc.max_receive_message_length", limits.max_body_bytes),
            ("grpc.max_allowed_incoming_connections", most),
            ("grpc.max_concurrent_streams", limits.max_streams),
            ("grpc.server_handshake_timeout_ms", limits.handshake_ms),
            ("grpc.max_send_message_length", -1),
            ("grpc.so_reuseport", int(acceptors > 1)),
        )
        with whole_wakeups():
            self._acceptors = [grpc.aio.server(options=options) for _ in range(acceptors)]
        self.port = port
        for server in self._acceptors:
            self.port = _bound(server, host, self.port, tls)
        self._gate = gate
        self._methods = _Methods(gate)
        self._arriving = BodyWatch(patience if patience is not None else ConnectionLimits())
        self._watch: asyncio.Task[None] | None = None
        self.health = GrpcHealth(self._acceptors)
        self._add(self._methods)
        self._end: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to answer: health at once, calls when it is told of them."""
        self._watch = asyncio.create_task(self._arriving.run())
        await self.health.note(is_serving=False)
        for server in self._acceptors:
            await server.start()

    async def serve(self, calls: Iterable[Call], caller: Caller, bodies: BodyReader, *, has_reflection: bool) -> None:
        """Answer calls from now on, as far as the gate is open.

        Args:
            calls: what to serve.
            caller: runs them.
            bodies: reads requests.
            has_reflection: whether clients may ask for services and messages.
        """
        known = list(calls)
        for call in known:
            self._methods.add(call, _method(call, caller, self._arriving, bodies, self._gate))
        services = list(dict.fromkeys(call.service for call in known))
        if has_reflection:
            self._add(reflection_of(services))
        await self.health.cover(services)

    def _add(self, handler: grpc.GenericRpcHandler) -> None:
        for server in self._acceptors:
            server.add_generic_rpc_handlers((handler,))

    def stop_accepting(self, drain_seconds: float) -> None:
        """Take no new connections and requests; those in flight may go on for so long."""
        if self._end is None:
            self._end = asyncio.create_task(self._stop(drain_seconds))

    async def stop(self, seconds: float = 0.0) -> None:
        """Close everything; answers that are on their way have so long to arrive."""
        self.health.end()
        await self._stop(max(seconds, _CLOSE_SECONDS))
        if self._end is not None:
            await self._end
        if self._watch is not None:
            await end_tasks([self._watch])

    async def _stop(self, seconds: float) -> None:
        await asyncio.gather(*(server.stop(seconds) for server in self._acceptors))


_Metadata = Sequence[tuple[str, str | bytes]]
_metadata: ContextVar[_Metadata] = ContextVar("metadata")
"""Of the request that the present task answers. gRPC decodes it to look the method up, in the task that then answers,
and once more whenever the context is asked, which takes longer than all else that is done with it."""


class _Methods(grpc.GenericRpcHandler):
    """Finds what answers a request. Until it is known what there is to call, everything is refused."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._by_path: dict[str, Any] = {}
        self._refusing: Any = grpc.stream_unary_rpc_method_handler(self._refuse)

    def add(self, call: Call, answer: Callable[[Any, Any], Awaitable[bytes]]) -> None:
        """Have a call answered."""
        method: Any = grpc.stream_unary_rpc_method_handler(answer)
        self._by_path[f"/{call.service}/{call.name}"] = method

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        if self._gate.phase is Phase.STARTING:
            return self._refusing
        method = self._by_path.get(details.method)
        if method is not None:
            _metadata.set(details.invocation_metadata or ())
        return method

    async def _refuse(self, _bodies: Any, context: Any) -> bytes:
        refusal = self._gate.refusal()
        if refusal is None:  # the manager began to serve a moment ago
            refusal = TurnedAwayError("the manager has just started; retry", Phase.STARTING.value, 0.05)
        return await _turn_away(context, refusal)


def _bound(server: grpc.aio.Server, host: str, port: int, tls: ServerTls | None) -> int:
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        if tls is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, tls.grpc_credentials())
    except RuntimeError as error:
        raise StorageIOError(f"gRPC address {host}:{port} cannot be bound") from error


def _check_free(host: str, port: int) -> None:
    """Find out ourselves that an address is taken: a second manager has to fail, not to share its requests; and gRPC
    would write lines of its own to stderr."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise StorageIOError(f"gRPC address {host}:{port} cannot be bound: {error.strerror}") from error


def _method(
    call: Call, caller: Caller, arriving: BodyWatch, bodies: BodyReader, gate: Gate
) -> Callable[[Any, Any], Awaitable[bytes]]:
    arrived = _traced_arrival if caller.wants_trace_parents else _arrival
    asks = caller.access.asks

    async def serve(_bodies: Any, context: Any) -> bytes:
        arrival = arrived(context)
        refusal = gate.refusal()
        if refusal is not None:
            caller.tell_turned_away(call, arrival, refusal)
        else:
            refusal = caller.refusal(call, arrival)
        if refusal is not None:
            await _turn_away(context, refusal)
        if asks:
            try:
                arrival = caller.recognised(call, arrival, _credentials(context))
            except TurnedAwayError as error:
                await _turn_away(context, error)
        gate.enter()
        try:
            return await answer(await arriving.read(context, arrival.principal), context, arrival)
        finally:
            gate.leave()

    async def answer(body: bytes, context: Any, arrival: Arrival) -> bytes:
        try:
            request = await bodies.proto(call, body, arrival.deadline)
        except DecodeError:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"the request is not a {call.request_type.__name__}")
        except TurnedAwayError as error:
            caller.tell_turned_away(call, arrival, error)
            await _turn_away(context, error)
        try:
            reply = await caller.answer(call, request, arrival)
        except TurnedAwayError as error:
            await _turn_away(context, error)
        return reply.encoded()

    return serve


def _arrival(context: Any) -> Arrival:
    remaining = context.time_remaining()
    return Arrival("grpc", _host(context.peer()), None if remaining is None else time.monotonic() + remaining)


def _traced_arrival(context: Any) -> Arrival:
    parents = (value for key, value in _metadata.get() if key == "traceparent")
    parent = next(parents, "")
    return _arrival(context)._replace(trace_parent=parent if isinstance(parent, str) else "")


def _credentials(context: Any) -> Credentials:
    given = [value for key, value in _metadata.get() if key == "authorization"]
    if len(given) > 1:  # whose of two is meant?
        return Credentials("twice")
    if given and isinstance(given[0], str) and given[0]:
        return Credentials(given[0])
    names = context.auth_context().get("x509_subject_alternative_name", ())
    return Credentials("", tuple(name.decode("utf-8", "replace") for name in names))


def _host(peer: str) -> str:
    """Return the address in `ipv4:1.2.3.4:567` or `ipv6:[::1]:567`, percent-encoded brackets or not."""
    return peer.partition(":")[2].rpartition(":")[0]


async def _turn_away(context: Any, error: TurnedAwayError) -> NoReturn:
    trailers: tuple[tuple[str, str], ...] = ()
    if error.retry_after_seconds is not None:  # gRFC A6: clients wait so long before they retry
        trailers = (("grpc-retry-pushback-ms", str(round(error.retry_after_seconds * 1000))),)
    await context.abort(_TURNED_AWAY[error.http_status], str(error), trailers)
    raise AssertionError  # abort raises
