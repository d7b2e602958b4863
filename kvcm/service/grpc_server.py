"""The calls on gRPC. Bytes in, bytes out: messages are parsed and joined by hand, since answers are mostly encoded
already."""

from __future__ import annotations

import socket
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from kvcm.model.errors import StorageIOError
from kvcm.service.calls import Arrival, Call, Caller
from kvcm.service.turned_away import TurnedAwayError

__all__ = ["GrpcServer"]

# Clients of the original ping every 10 s on idle channels (wire.md 2.3): without these they are thrown out.
_KEEPALIVE = (
    ("grpc.http2.min_ping_interval_without_data_ms", 5000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_ping_strikes", 0),
)

_TURNED_AWAY = {429: grpc.StatusCode.RESOURCE_EXHAUSTED, 503: grpc.StatusCode.UNAVAILABLE}


class GrpcServer:
    """One gRPC listener, bound at once. To be made inside the event loop.

    Args:
        host: address to bind.
        port: port to bind; 0 takes a free one.
        max_body_bytes: largest request; answers have no limit.

    Raises:
        StorageIOError: the address cannot be bound.
    """

    def __init__(self, host: str, port: int, max_body_bytes: int) -> None:
        _check_free(host, port)
        options = (
            *_KEEPALIVE,
            ("grpc.max_receive_message_length", max_body_bytes),
            ("grpc.max_send_message_length", -1),
            ("grpc.so_reuseport", 0),  # a second manager on the same port has to fail, not to share its requests
        )
        self._server = grpc.aio.server(options=options)
        try:
            self.port = self._server.add_insecure_port(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
        except RuntimeError as error:
            raise StorageIOError(f"gRPC address {host}:{port} cannot be bound") from error

    async def start(self, calls: Iterable[Call], caller: Caller) -> None:
        """Begin to serve."""
        by_service: defaultdict[str, dict[str, Any]] = defaultdict(dict)
        for call in calls:
            by_service[call.service][call.name] = grpc.unary_unary_rpc_method_handler(_method(call, caller))
        self._server.add_generic_rpc_handlers(
            tuple(grpc.method_handlers_generic_handler(service, methods) for service, methods in by_service.items())
        )
        await self._server.start()

    async def stop(self, drain_seconds: float) -> None:
        """Stop accepting, let requests in flight finish for so long, close."""
        await self._server.stop(drain_seconds)


def _check_free(host: str, port: int) -> None:
    """Find out ourselves that an address is taken: gRPC would write lines of its own to stderr."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise StorageIOError(f"gRPC address {host}:{port} cannot be bound: {error.strerror}") from error


def _method(call: Call, caller: Caller) -> Callable[[bytes, Any], Awaitable[bytes]]:
    parse = call.request_type.FromString

    async def serve(body: bytes, context: Any) -> bytes:
        try:
            request = parse(body)
        except DecodeError:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"the request is not a {call.request_type.__name__}")
        try:
            reply = await caller.answer(call, request, _arrival(context))
        except TurnedAwayError as error:
            await _turn_away(context, error)
        return reply.encoded()

    return serve


def _arrival(context: Any) -> Arrival:
    remaining = context.time_remaining()
    return Arrival("grpc", _host(context.peer()), None if remaining is None else time.monotonic() + remaining)


def _host(peer: str) -> str:
    """Return the address in `ipv4:1.2.3.4:567` or `ipv6:[::1]:567`, percent-encoded brackets or not."""
    return peer.partition(":")[2].rpartition(":")[0]


async def _turn_away(context: Any, error: TurnedAwayError) -> NoReturn:
    code = _TURNED_AWAY[error.http_status]
    pushback = str(round(error.retry_after_seconds * 1000))  # gRFC A6: clients wait so long before they retry
    await context.abort(code, str(error), (("grpc-retry-pushback-ms", pushback),))
    raise AssertionError  # abort raises
