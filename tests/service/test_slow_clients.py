"""Clients that dribble, keep silent, do not read, or are too many; as raw sockets against a manager."""

from __future__ import annotations

import contextlib
import gzip
import select
import socket
import time
from collections.abc import Iterator
from typing import NamedTuple

import grpc
import pytest
from probe_clients import ask, health, rest
from test_transport_drivers import eventually
from test_transport_process import ManagerProcess, manager

_PATIENCE = "kvcm.limits.receive_timeout_ms=%d\nkvcm.limits.send_timeout_ms=500\nkvcm.limits.idle_timeout_ms=500\n"
_LIMITS = ("kvcm.limits.max_connections=40", "kvcm.limits.max_body_bytes=100000", "kvcm.limits.max_queue_ms=60000")
_SECONDS = 60.0


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ManagerProcess]:
    """A manager that has little patience."""
    directory = tmp_path_factory.mktemp("hasty")
    (directory / "kvcm.conf").write_text(_PATIENCE % 500)
    with manager(directory, "-c", str(directory / "kvcm.conf"), *_LIMITS) as process:
        yield process


@contextlib.contextmanager
def _connected(address: str, receive_bytes: int = 0) -> Iterator[socket.socket]:
    host, _, port = address.rpartition(":")
    with socket.socket() as connection:
        if receive_bytes:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        connection.settimeout(_SECONDS)
        connection.connect((host, int(port)))
        yield connection


def _dribble(connection: socket.socket, data: bytes) -> bytes:
    """Send a byte now and then until the server ends the connection; return its answer."""
    begin = time.monotonic()
    for byte in data:
        assert time.monotonic() - begin < _SECONDS, "it takes everything that it is sent"
        if select.select([connection], [], [], 0.05)[0]:
            break
        with contextlib.suppress(ConnectionError):
            connection.sendall(bytes([byte]))
    return rest(connection)


@contextlib.contextmanager
def _answered(address: str, data: bytes) -> Iterator[tuple[socket.socket, bytes]]:
    """A connection on which data was sent, and what came first; again where the manager had lost its patience before
    the machine let the data be sent."""
    said = b""
    with contextlib.ExitStack() as stack:
        while not said:  # or the time of the test is over
            connection = stack.enter_context(_connected(address))
            with contextlib.suppress(ConnectionError):
                connection.sendall(data)
                said = connection.recv(1 << 16)
        yield connection, said


class Port(NamedTuple):
    """A port, and a call that it serves."""

    address: str
    call: bytes

    def head(self, size: int) -> bytes:
        return b"POST /api/%s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (self.call, size)


@pytest.fixture(params=["data", "admin"])
def port(hasty: ManagerProcess, request: pytest.FixtureRequest) -> Port:
    return _data(hasty) if request.param == "data" else Port(hasty.address.admin_http, b"checkHealth")


def _data(process: ManagerProcess) -> Port:
    return Port(process.address.http, b"getClusterInfo")


def _served(address: str) -> bool:
    """Whether an honest client is; the machine may be as slow as a client, now and then."""
    with contextlib.suppress(OSError):
        return ask(address, "/livez").status == 200
    return False


@pytest.mark.parametrize("lacks", [1040, 1000, 500])
def test_a_request_that_stops_half_way_is_ended_with_408(port: Port, lacks: int) -> None:
    with _answered(port.address, (port.head(1000) + b"{" + b" " * 999)[:-lacks]) as (connection, first):
        said = first + rest(connection)
    assert said.startswith(b"HTTP/1.1 408 ")
    assert b"x-kvcm-error: the request did not arrive in time" in said
    assert eventually(lambda: _served(port.address))


@pytest.mark.parametrize("has_head", [False, True])
def test_a_request_that_comes_byte_by_byte_is_ended_with_408(port: Port, has_head: bool) -> None:
    def said() -> bytes:
        with _connected(port.address) as connection:
            connection.sendall(port.head(100_000) if has_head else b"")
            dribbled = b"x" * 100_000 if has_head else b"GET /livez HTTP/1.1\r\nhost: " + b"x" * 100_000
            return _dribble(connection, dribbled)

    assert eventually(said, _SECONDS).startswith(b"HTTP/1.1 408 ")  # nothing where it says nothing for half a second


def test_a_connection_that_says_nothing_is_closed_without_a_word(port: Port) -> None:
    with _connected(port.address) as connection:
        assert rest(connection) == b""


def test_a_connection_that_is_idle_is_closed(port: Port) -> None:
    with _answered(port.address, b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n") as (connection, first):
        said = first + rest(connection)
    assert (said.count(b"HTTP/1.1"), said.startswith(b"HTTP/1.1 200 ")) == (1, True)


def test_a_body_that_is_refused_is_not_taken_for_ever(hasty: ManagerProcess) -> None:
    with _answered(hasty.address.http, _data(hasty).head(1 << 40)) as (connection, said):
        assert said.startswith(b"HTTP/1.1 413 ")
        begin = time.monotonic()
        with pytest.raises(OSError):  # noqa: PT012
            while time.monotonic() - begin < _SECONDS:
                connection.sendall(b" " * 1000)
                time.sleep(0.01)


def test_a_head_without_end_is_431(port: Port) -> None:
    def is_refused() -> bool:
        with _connected(port.address) as connection:
            with contextlib.suppress(OSError):
                connection.sendall(b"GET /livez HTTP/1.1\r\nx: " + b"x" * (1 << 17))
            return rest(connection).startswith(b"HTTP/1.1 431 ")

    assert eventually(is_refused)  # unless it comes too slowly


def test_a_client_that_does_not_read_is_disconnected_and_others_are_served(hasty: ManagerProcess) -> None:
    with _connected(hasty.address.admin_http, 4096) as connection:
        asked = 0
        connection.settimeout(0.2)
        with contextlib.suppress(OSError):  # until the server does not take more
            while asked < 100_000:
                connection.sendall(b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n")
                asked += 1
        poll = select.poll()
        poll.register(connection, 0)
        assert eventually(lambda: poll.poll(10), _SECONDS), "it waits for its client"
        assert eventually(lambda: _served(hasty.address.admin_http))
        connection.settimeout(_SECONDS)
        assert rest(connection).count(b"HTTP/1.1 200") < asked
    assert "Traceback" not in hasty.log_text()


def test_a_connection_too_many_is_reported_so(hasty: ManagerProcess) -> None:
    port = _data(hasty)

    def said_to_the_last() -> bytes:
        with contextlib.ExitStack() as stack:
            said = b""
            for _ in range(41):  # some may be closed already, where the machine is slow
                connection = stack.enter_context(_connected(port.address))
                connection.settimeout(0)
                time.sleep(0.001)
                with contextlib.suppress(OSError):
                    said += connection.recv(1 << 16)
            connection.settimeout(_SECONDS)
            said += rest(connection)
            assert eventually(lambda: _served(hasty.address.admin_http)), "each port has its own"
        return said

    said = eventually(said_to_the_last, _SECONDS)
    assert said.startswith(b"HTTP/1.1 503 ")
    assert b"retry-after: 1" in said
    assert eventually(lambda: _served(port.address))


def test_a_body_with_an_encoding_is_415(hasty: ManagerProcess) -> None:
    for encoding, status in ((b"gzip", b"415"), (b"identity", b"200"), (b"Identity", b"200"), (b"br", b"415")):
        body = gzip.compress(b"{}") if encoding == b"gzip" else b"{}"
        head = _data(hasty).head(len(body))[:-2] + b"content-encoding: " + encoding + b"\r\n\r\n"
        with _answered(hasty.address.http, head + body) as (_, said):
            assert said.split(b" ")[1] == status


def test_patience_is_hot(hasty: ManagerProcess) -> None:
    file = hasty.log.parent / "kvcm.conf"
    with hasty.api("grpc") as api:
        file.write_text(_PATIENCE % 3_600_000)
        api.ok("ConfigService.ReloadConfig")
        with _connected(hasty.address.http) as connection:
            connection.sendall(b"GET")
            assert not select.select([connection], [], [], 1.0)[0]
            file.write_text(_PATIENCE % 500)
            api.ok("ConfigService.ReloadConfig")
            assert rest(connection).startswith(b"HTTP/1.1 408 ")


# ── gRPC ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_connection_that_is_not_of_http_2_is_closed(hasty: ManagerProcess) -> None:
    with _connected(hasty.address.rpc) as connection:
        rest(connection)


def test_a_grpc_connection_too_many_is_closed(hasty: ManagerProcess) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(40):
            connection = stack.enter_context(_connected(hasty.address.rpc))
            connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
            assert connection.recv(9)
        assert rest(stack.enter_context(_connected(hasty.address.rpc))) == b""
        assert eventually(lambda: _served(hasty.address.http))
    eventually(lambda: _answers_grpc(hasty.address.rpc), _SECONDS)


def _answers_grpc(address: str) -> bool:
    try:
        return health(address) == "SERVING"
    except grpc.RpcError:
        return False


def test_a_small_message_that_unpacks_to_more_than_the_limit_is_refused(hasty: ManagerProcess) -> None:
    codes = []
    with grpc.insecure_channel(hasty.address.rpc) as channel:
        call = channel.unary_unary("/kv_cache_manager.proto.meta.MetaService/GetClusterInfo")
        for size in (90_000, 10_000_000):
            body = b"\x7a" + bytes([size & 127 | 128, size >> 7 & 127 | 128, size >> 14 & 127 | 128, size >> 21])
            try:
                call(body + bytes(size), compression=grpc.Compression.Gzip, timeout=_SECONDS)
                codes.append(grpc.StatusCode.OK)
            except grpc.RpcError as error:
                codes.append(error.code())
    assert codes == [grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED]
