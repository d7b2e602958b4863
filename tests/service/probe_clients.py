"""Asking a manager for its health as load balancers do, also one that does not serve yet."""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from test_transport_drivers import Address, HttpAnswer, eventually, post
from test_transport_process import ManagerProcess

_SECONDS = 30.0


class _StartingProcess(ManagerProcess):
    """A manager of which it is enough that it listens."""

    def _wait_until_serving(self) -> Address:
        (found,) = eventually(lambda: self.events("listening") or self._ended(), 60)
        return Address(*(found[name] for name in ("grpc", "http", "admin_grpc", "admin_http")))

    def _ended(self) -> None:
        assert self.process.poll() is None, self.log_text()


@contextlib.contextmanager
def starting_manager(directory: Path, *settings: str) -> Iterator[ManagerProcess]:
    """Run a manager inside the block, which begins as soon as it listens."""
    options = [part for setting in settings for part in ("-e", setting)]
    process = _StartingProcess(directory, tuple(options), {})
    try:
        yield process
    finally:
        process.kill()


def ask(address: str, path: str, method: str = "GET", headers: Mapping[str, str] | None = None) -> HttpAnswer:
    """Send one request on a connection of its own."""
    connection = http.client.HTTPConnection(address, timeout=_SECONDS)
    try:
        return post(connection, path, b"{}" if method == "POST" else b"", method, headers)
    finally:
        connection.close()


def rest(connection: socket.socket) -> bytes:
    """Return everything until the server ends the connection; fails where it never does."""
    parts = []
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        while part := connection.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


def health(address: str, service: str = "") -> str:
    """Return the name of the gRPC health status of a service."""
    with grpc.insecure_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=_SECONDS)
    return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)


class HealthWatch(NamedTuple):
    """A stream of health, as far as it came.

    Attributes:
        seen: names of the statuses, in order.
        ended: code of gRPC with which the stream ended, empty while it goes on.
    """

    seen: list[str]
    ended: list[grpc.StatusCode]


@contextlib.contextmanager
def watched(address: str, service: str = "") -> Iterator[HealthWatch]:
    """Watch the health of a service inside the block."""
    watch = HealthWatch([], [])
    with grpc.insecure_channel(address) as channel:
        stream = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=service))

        def read() -> None:
            try:
                for answer in stream:
                    watch.seen.append(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))
            except grpc.RpcError as error:
                watch.ended.append(error.code())

        reader = threading.Thread(target=read)
        reader.start()
        try:
            eventually(lambda: watch.seen)
            yield watch
        finally:
            stream.cancel()
            reader.join(_SECONDS)
