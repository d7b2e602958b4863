"""The calls on gRPC. Bytes in, bytes out: messages are parsed and joined by hand, since answers are mostly encoded
already. The client is authenticated before the body of its request is read.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from kvcm.model.errors import StorageIOError
from kvcm.model.principals import ANONYMOUS
from kvcm.model.tasks import end_tasks
from kvcm.service.access import Credentials
from kvcm.service.admission import Phase, ServingGate
from kvcm.service.calls import Arrival, Call, Caller
from kvcm.service.http_connections import ConnectionLimits
from kvcm.service.rejections import RejectedError
from kvcm.service.request_limits import BodyReader, max_body_bytes
from kvcm.service.tls import ServerTls

__all__ = ["GrpcServer", "WakeupSocket", "check_free", "coalesced_wakeups"]

# Bodies of requests: read after authentication, and given up where they do not come in time.
#
# gRPC reads the body of a plain call, whatever its size, before it calls any of our code, and waits for its rest for
# ever. So every call is served as one whose client streams requests, of which one is read.
#
# Rejected: cancelling the wait for a body. gRPC goes on to write to its memory; a request that is answered ends its own
# wait.

_MAX_UNAUTHENTICATED: Final = 8  # requests whose bodies are read at a time
_TOO_SLOW: Final = "the request did not arrive in time"
_TOO_LARGE: Final = "the body is larger than one of a request without a key may be"
_INCOMPLETE: Final = "the request ended before its body did"


class _BodyWatch:
    """Reads bodies, and ends requests whose body is too slow. A timer for each of them would cost more than this.

    Args:
        limits: may change at any time.
    """

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits
        self._since: dict[Any, float] = {}
        self._unauthenticated = asyncio.Semaphore(_MAX_UNAUTHENTICATED)
        self._ending: set[asyncio.Task[None]] = set()

    async def read(self, context: Any) -> bytes:
        """Return the body of a request; abort the request where there is none."""
        self._since[context] = time.monotonic()
        try:
            body = await context.read()
        finally:
            self._since.pop(context, None)
        if body is grpc.aio.EOF:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, _INCOMPLETE)
        return bytes(body)

    async def read_unauthenticated(self, context: Any) -> bytes:
        """Return the body of a request without a key; abort the request where its body is larger than it may be."""
        async with self._unauthenticated:  # any number may come, with bodies as large as those of engines
            body = await self.read(context)
        if len(body) > max_body_bytes(ANONYMOUS, len(body)):
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, _TOO_LARGE)
        return body

    async def run(self) -> None:
        """End slow requests now and then, for good."""
        while True:
            await asyncio.sleep(self._limits.check_seconds)
            latest = time.monotonic() - self._limits.receive_seconds
            for context in [context for context, since in self._since.items() if since < latest]:
                del self._since[context]
                task = asyncio.create_task(_end(context))  # its client may not even take the answer
                self._ending.add(task)
                task.add_done_callback(self._ending.discard)


async def _end(context: Any) -> None:
    with contextlib.suppress(grpc.aio.AbortError, grpc.aio.UsageError):  # of which the second says that it has ended
        await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, _TOO_SLOW)


# How gRPC's own thread wakes the event loop.
#
# For every event of a call (there are three or four) that thread queues it and writes a byte into a pair of sockets.
# The loop then takes all events that are queued, but only one byte per turn. In a loop whose turns take milliseconds
# more bytes come than are taken, until the pair is full after some 280; then the thread stands still until three
# quarters of them were taken one by one, and for half a second gRPC neither reads nor writes. So the loop is
# given a socket that is read to its end: a byte is written behind its event, hence nothing that was queued is missed.

_ALL = 1 << 16


class WakeupSocket(socket.socket):
    """A socket that returns everything that there is, however little is asked for."""

    def recv(self, _size: int, _flags: int = 0, /) -> bytes:
        """Return all bytes that have come."""
        return super().recv(_ALL)


@contextlib.contextmanager
def coalesced_wakeups() -> Iterator[None]:
    """Have what gRPC starts inside the block wake its loop so; the first server or channel of a process does. Other
    pairs of sockets that are made meanwhile are for wakeups, too, and work as before."""
    made = socket.socketpair

    def pair(*arguments: Any, **named: Any) -> tuple[socket.socket, socket.socket]:
        reads, writes = made(*arguments, **named)
        return WakeupSocket(reads.family, reads.type, reads.proto, reads.detach()), writes

    socket.socketpair = pair
    try:
        yield
    finally:
        socket.socketpair = made


# gRPC's own services of a listener: health (grpc.health.v1) and reflection.

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class _GrpcHealth(health.aio.HealthServicer):
    """Health of the listener as a whole ("") and of each service, which is always the same. To be set once before the
    server is started.

    Args:
        servers: where it is served, before they are started.
    """

    def __init__(self, servers: Iterable[grpc.aio.Server]) -> None:
        super().__init__()
        self._services = [""]
        self._is_serving = False
        self._is_over = asyncio.Event()
        for server in servers:
            health_pb2_grpc.add_HealthServicer_to_server(self, server)

    async def add_services(self, services: Sequence[str]) -> None:
        """Serve the health of these services, too."""
        self._services += services
        await self.set_serving(self._is_serving)

    async def set_serving(self, is_serving: bool) -> None:
        """Publish to all watchers."""
        self._is_serving = is_serving
        for service in self._services:
            await self.set(service, _SERVING if is_serving else _NOT_SERVING)

    def close(self) -> None:
        """End the streams of watchers: they would hold up the end of the server."""
        self._is_over.set()

    async def Watch(self, request: Any, context: Any) -> None:  # noqa: N802 - the name of the rpc
        """Stream the status of a service, until the server ends."""
        watch = asyncio.create_task(super().Watch(request, context))
        end = asyncio.create_task(self._is_over.wait())
        try:
            await asyncio.wait({watch, end}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await end_tasks([watch, end])
        if self._is_over.is_set():
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the manager is stopping")


def _reflection_of(services: Sequence[str]) -> grpc.GenericRpcHandler:
    """Return the handler of reflection: the services and messages of a listener (`grpcurl`). It may be added after the
    server was started, unlike grpc_reflection's own one."""
    servicer = reflection.aio.ReflectionServicer([*services, health.SERVICE_NAME, reflection.SERVICE_NAME])
    method: Any = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        reflection_pb2.ServerReflectionRequest.FromString,
        reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    return grpc.method_handlers_generic_handler(reflection.SERVICE_NAME, {"ServerReflectionInfo": method})


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
_IMBALANCE_FACTOR = 1.25
_CLOSE_SECONDS = 1.0  # for answers that are being sent
_REJECTED_STATUS = {
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
}


@dataclass(frozen=True, slots=True)
class GrpcLimits:
    """Limits that gRPC itself enforces.

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
        gate: ServingGate,
        tls: ServerTls | None = None,
        patience: ConnectionLimits | None = None,
    ) -> None:
        check_free(host, port)
        acceptors = _ACCEPTORS if limits.max_connections >= _MANY_CONNECTIONS else 1
        most = (
            limits.max_connections
            if acceptors == 1
            else math.ceil(limits.max_connections / acceptors * _IMBALANCE_FACTOR)
        )
        options = (
            *_KEEPALIVE,
            ("grpc.max_receive_message_length", limits.max_body_bytes),
            ("grpc.max_allowed_incoming_connections", most),
            ("grpc.max_concurrent_streams", limits.max_streams),
            ("grpc.server_handshake_timeout_ms", limits.handshake_ms),
            ("grpc.max_send_message_length", -1),
            ("grpc.so_reuseport", int(acceptors > 1)),
        )
        with coalesced_wakeups():
            self._acceptors = [grpc.aio.server(options=options) for _ in range(acceptors)]
        self.port = port
        for server in self._acceptors:
            self.port = _bound(server, host, self.port, tls)
        self._gate = gate
        self._methods = _Methods(gate)
        self._arriving = _BodyWatch(patience if patience is not None else ConnectionLimits())
        self._watch: asyncio.Task[None] | None = None
        self.health = _GrpcHealth(self._acceptors)
        self._add(self._methods)
        self._end: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to answer: health at once, calls after `serve`."""
        self._watch = asyncio.create_task(self._arriving.run())
        await self.health.set_serving(is_serving=False)
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
            self._add(_reflection_of(services))
        await self.health.add_services(services)

    def _add(self, handler: grpc.GenericRpcHandler) -> None:
        for server in self._acceptors:
            server.add_generic_rpc_handlers((handler,))

    def stop_accepting(self, drain_seconds: float) -> None:
        """Take no new connections and requests; those in flight may go on for so long."""
        if self._end is None:
            self._end = asyncio.create_task(self._stop(drain_seconds))

    async def stop(self, seconds: float = 0.0) -> None:
        """Close everything; answers that are on their way have so long to arrive."""
        self.health.close()
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
    """Finds the handler of a request. Before `add`, every request is rejected."""

    def __init__(self, gate: ServingGate) -> None:
        self._gate = gate
        self._by_path: dict[str, Any] = {}
        self._refusing: Any = grpc.stream_unary_rpc_method_handler(self._refuse)

    def add(self, call: Call, answer: Callable[[Any, Any], Awaitable[bytes]]) -> None:
        """Serve a call."""
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
        refusal = self._gate.rejection()
        if refusal is None:  # the manager began to serve a moment ago
            refusal = RejectedError("the manager has just started; retry", Phase.STARTING.value, 0.05)
        return await _abort_rejected(context, refusal)


def _bound(server: grpc.aio.Server, host: str, port: int, tls: ServerTls | None) -> int:
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        if tls is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, tls.grpc_credentials())
    except RuntimeError as error:
        raise StorageIOError(f"gRPC address {host}:{port} cannot be bound") from error


def check_free(host: str, port: int) -> None:
    """Check ourselves whether an address is taken: a second manager has to fail, not to share its requests; and gRPC
    would write lines of its own to stderr.

    Raises:
        StorageIOError: it is taken, or cannot be bound.
    """
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise StorageIOError(f"gRPC address {host}:{port} cannot be bound: {error.strerror}") from error


def _method(
    call: Call, caller: Caller, arriving: _BodyWatch, bodies: BodyReader, gate: ServingGate
) -> Callable[[Any, Any], Awaitable[bytes]]:
    is_traced = caller.wants_trace_parents
    requires_credentials = caller.access.requires_credentials

    async def serve(_bodies: Any, context: Any) -> bytes:
        remaining = context.time_remaining()
        arrival = Arrival(
            "grpc",
            context.peer().partition(":")[2].rpartition(":")[0],  # of ipv4:1.2.3.4:567 or ipv6:[::1]:567
            None if remaining is None else time.monotonic() + remaining,
            _trace_parent() if is_traced else "",
        )
        rejection = caller.admission.rejection(call, arrival) if gate.is_open else gate.rejection()
        if rejection is not None:
            caller.report_rejection(call, arrival, rejection)
            await _abort_rejected(context, rejection)
        if requires_credentials:
            try:
                arrival = caller.authenticate(call, arrival, _credentials(context))
            except RejectedError as error:
                await _abort_rejected(context, error)
        gate.enter()
        try:
            has_key = arrival.principal is not ANONYMOUS
            body = await (arriving.read(context) if has_key else arriving.read_unauthenticated(context))
            try:
                request = await bodies.proto(call, body, arrival.deadline)
            except DecodeError:
                text = f"the request is not a {call.request_type.__name__}"
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, text)
            except RejectedError as error:
                caller.report_rejection(call, arrival, error)
                await _abort_rejected(context, error)
            try:
                reply = await caller.answer(call, request, arrival)
            except RejectedError as error:
                await _abort_rejected(context, error)
            return reply.encoded()
        finally:
            gate.leave()

    return serve


def _trace_parent() -> str:
    parents = (value for key, value in _metadata.get() if key == "traceparent")
    parent = next(parents, "")
    return parent if isinstance(parent, str) else ""


def _credentials(context: Any) -> Credentials:
    given = [value for key, value in _metadata.get() if key == "authorization"]
    if len(given) > 1:  # whose of two is meant?
        return Credentials("twice")
    if given and isinstance(given[0], str) and given[0]:
        return Credentials(given[0])
    names = context.auth_context().get("x509_subject_alternative_name", ())
    return Credentials("", tuple(name.decode("utf-8", "replace") for name in names))


async def _abort_rejected(context: Any, error: RejectedError) -> NoReturn:
    trailers: tuple[tuple[str, str], ...] = ()
    if error.retry_after_seconds is not None:  # gRFC A6: clients wait so long before they retry
        trailers = (("grpc-retry-pushback-ms", str(round(error.retry_after_seconds * 1000))),)
    await context.abort(_REJECTED_STATUS[error.http_status], str(error), trailers)
    raise AssertionError  # abort raises
