"""Requests that mean harm, of strangers and of those with a key, against a manager that asks for keys: giant, nested,
cut, slow, or with credentials of every odd kind. The manager refuses a request without a key by its head."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import ssl
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import grpc
import pytest
from probe_clients import rest
from secured import Secured, secured_over
from test_transport_drivers import eventually
from test_transport_sites import Site

_MATCH = "/kv_cache_manager.proto.meta.MetaService/GetCacheLocation"
_INFO, _TWO_BYTES = "/api/getClusterInfo", b"content-length: 2"
_CREATE_KEY = "/kvcm.v1.AccessService/CreateKey"
_GRPC_CALLS = (("rpc", _MATCH), ("admin_rpc", _CREATE_KEY))
_HTTP_CALLS = (("http", "/api/getCacheLocation"), ("admin_http", "/api/createKey"), ("admin_http", "/v1/keys"))
_OK, _INVALID_ARGUMENT, _RESOURCE_EXHAUSTED, _UNAUTHENTICATED = 0, 3, 8, 16

_GIANT = b"content-length: %d" % (1 << 40)
_LARGE = b"content-length: %d" % (20 << 20)
_IN_CHUNKS = b"transfer-encoding: chunked"
_WRONG_KEY = b"Bearer kvcm_" + b"a" * 16 + b"_" + b"b" * 43
_STRANGERS = {"no key": (), "wrong key": (_WRONG_KEY,)}
_ODD = {
    "no key at all": (b"Bearer ",),
    "another scheme": (b"Basic YWRtaW46YWRtaW4=",),
    "the wrong one twice": (_WRONG_KEY, _WRONG_KEY),
    "very long": (b"Bearer kvcm_" + b"a" * 6000,),
    "many": (_WRONG_KEY,) * 60,
}
_NESTED_JSON = (b"[" * 60_000, b"[" * 1_000_000, b'{"a":' * 12_000, b'{"block_mask":' * 4_000)
_NESTED_PROTO = (b"\x0b" * 16_000, b"\x0a\x7f" * 8_000, b"\x2a" * 16_000)
_ENDLESS_BYTES = 192 << 20


SECONDS = 30.0
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _CONTINUATION = 0, 1, 3, 4, 6, 9
_ACK, _END_STREAM, _END_HEADERS = 1, 1, 4
_FRAME_HEAD, _MOST_FRAME = 9, 16_384


@contextlib.contextmanager
def connected(address: str, context: ssl.SSLContext | None = None, alpn: str = "http/1.1") -> Iterator[socket.socket]:
    """Connect inside the block."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), SECONDS) as plain:
        if context is None:
            yield plain
            return
        context.set_alpn_protocols([alpn])
        with context.wrap_socket(plain, server_hostname="localhost") as encrypted:
            yield encrypted


# ── HTTP/1.1 ──


class HttpAnswer(NamedTuple):
    """Status and headers of an answer; header names in lower case."""

    status: int
    headers: dict[str, str]


def http_head(path: str, *headers: bytes) -> bytes:
    """Return the head of a POST with a body of JSON."""
    lines = [b"POST " + path.encode() + b" HTTP/1.1", b"host: x", b"content-type: application/json", *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n"


def read_answer(connection: socket.socket) -> HttpAnswer:
    """Read one answer with its body."""
    said = b""
    while b"\r\n\r\n" not in said:
        part = connection.recv(1 << 16)
        assert part, said
        said += part
    head, _, body = said.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): text.strip() for name, _, text in (line.partition(":") for line in lines)}
    while len(body) < int(headers["content-length"]):
        part = connection.recv(1 << 16)
        assert part, said
        body += part
    return HttpAnswer(int(first.split()[1]), headers)


# ── gRPC ──


class _Frame(NamedTuple):
    kind: int
    flags: int
    stream: int
    payload: bytes


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def _text(text: bytes) -> bytes:
    """A string of HPACK (RFC 7541 section 5), as it is."""
    if len(text) < 127:
        return bytes((len(text),)) + text
    sized, left = bytearray((127,)), len(text) - 127
    while left > 127:
        sized.append(left & 127 | 128)
        left >>= 7
    return bytes((*sized, left)) + text


class GrpcCall:
    """One request on a connection of gRPC, of which any part may be left out.

    Args:
        connection: that nothing was sent on yet, but the handshake of TLS.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        connection.sendall(_PREFACE + _frame(_SETTINGS, 0, 0, b""))

    def head(self, path: str, *metadata: tuple[bytes, bytes]) -> None:
        """Send the head, in as many frames as it needs."""
        fields = [
            (b":method", b"POST"), (b":scheme", b"http"), (b":path", path.encode()), (b":authority", b"localhost"),
            (b"content-type", b"application/grpc"), (b"te", b"trailers"), *metadata,
        ]  # fmt: skip
        packed = b"".join(b"\x10" + _text(name) + _text(value) for name, value in fields)
        parts = [packed[at : at + _MOST_FRAME] for at in range(0, len(packed), _MOST_FRAME)]
        for number, part in enumerate(parts):
            flags = _END_HEADERS if number == len(parts) - 1 else 0
            self._connection.sendall(_frame(_CONTINUATION if number else _HEADERS, flags, 1, part))

    def body(self, body: bytes, *, promised: int | None = None, is_last: bool = False) -> None:
        """Send a body of at most a frame; the length before it may promise more."""
        length = struct.pack(">I", len(body) if promised is None else promised)
        self.data(b"\0" + length + body, is_last=is_last)

    def data(self, data: bytes, *, is_last: bool = False) -> None:
        """Send a frame of data."""
        self._connection.sendall(_frame(_DATA, _END_STREAM if is_last else 0, 1, data))

    def status(self) -> int | None:
        """Return how the server ended the request: its status, None where it ended it or the connection without one."""
        said = b""
        for frame in self._frames():
            said += frame.payload if frame.kind in {_HEADERS, _CONTINUATION} else b""
            if frame.kind == _RST_STREAM or (frame.kind == _HEADERS and frame.flags & _END_STREAM):
                break
        found = re.search(rb"grpc-status[\x01\x02](\d+)", said)
        return None if found is None else int(found[1])

    def _frames(self) -> Iterator[_Frame]:
        """Yield the frames from the server until it ends the connection; answer pings, as a living client does."""
        unread = b""
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            while part := self._connection.recv(1 << 16):
                unread += part
                while len(unread) >= _FRAME_HEAD and len(unread) >= (end := _FRAME_HEAD + _number(unread[:3])):
                    frame = _Frame(unread[3], unread[4], _number(unread[5:9]), unread[_FRAME_HEAD:end])
                    unread = unread[end:]
                    if frame.kind == _PING and not frame.flags & _ACK:
                        self._connection.sendall(_frame(_PING, _ACK, 0, frame.payload))
                    yield frame


def _number(data: bytes) -> int:
    return int.from_bytes(data, "big")


_MOST_GROWTH_BYTES = 64 << 20
_KEYS = [1, 2, 3]


@dataclass(frozen=True)
class Guarded:
    """A running manager.

    Attributes:
        server: it.
        instance: of which blocks are stored.
        begin_bytes: memory that it had when that was done.
    """

    server: Secured
    instance: str
    begin_bytes: int

    @property
    def context(self) -> ssl.SSLContext | None:
        """How clients speak TLS, where they do."""
        return None if self.server.tls is None else self.server.tls.context()

    def http(self, port: str = "http") -> contextlib.AbstractContextManager:  # type: ignore[type-arg]
        """Connect to a port of HTTP."""
        return connected(getattr(self.server.process.address, port), self.context)

    def grpc(self, port: str = "rpc") -> contextlib.AbstractContextManager:  # type: ignore[type-arg]
        """Connect to a port of gRPC."""
        return connected(getattr(self.server.process.address, port), self.context, "h2")

    def counted(self, metric: str) -> int:
        """Return the sum of the series of a metric whose names begin so."""
        _, text = self.server.page("/metrics", self.server.admin_key)
        return sum(int(float(value)) for value in re.findall(rf"^{re.escape(metric)}.* (\S+)$", text, re.MULTILINE))

    @contextlib.contextmanager
    def all_turned_away(self, count: int) -> Iterator[None]:
        """Inside the block so many requests come of which each is refused for its credentials, and none is read."""
        refused, read = 'kvcm_rpc_rejected_total{reason="unauthenticated"}', "kvcm_rpc_requests_total"
        before = self.counted(refused), self.counted(read)
        yield
        assert (self.counted(refused), self.counted(read)) == (before[0] + count, before[1])

    @contextlib.contextmanager
    def unharmed(self) -> Iterator[None]:
        """Whatever happens inside the block, the manager is afterwards as it was before."""
        changes = len(self.server.process.events("audit"))
        yield
        assert self.server.process.process.poll() is None
        for transport in ("grpc", "http"):
            assert eventually(lambda transport=transport: self._is_served(transport))
        log = self.server.process.log_text()
        assert "Traceback" not in log
        assert not self.server.process.events("failed")
        assert self.server.admin_key not in log
        assert len(self.server.process.events("audit")) == changes
        assert _memory_bytes(self.server) - self.begin_bytes < _MOST_GROWTH_BYTES

    def _is_served(self, transport: str) -> bool:
        with self.server.api(transport) as api:
            return Site(api).hits(self.instance, _KEYS) == _KEYS


def _memory_bytes(server: Secured) -> int:
    pages = Path(f"/proc/{server.process.process.pid}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def guarded_over(mode: str, directory: Path, *settings: str) -> Iterator[Guarded]:
    """Run one, `plain` or over `tls`."""
    with secured_over(mode, directory, *settings) as server:
        with server.api() as api:
            site = Site(api)
            instance = site.instance(site.group())
            site.write(instance, _KEYS)
            assert site.hits(instance, _KEYS) == _KEYS
        yield Guarded(server, instance, _memory_bytes(server))


@pytest.fixture(scope="module", params=["plain", pytest.param("tls", marks=pytest.mark.ci)])
def guarded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    """A manager with little patience."""
    directory = tmp_path_factory.mktemp("guarded")
    with guarded_over(request.param, directory, "kvcm.limits.receive_timeout_ms=1000") as made:
        yield made


@pytest.fixture(autouse=True)
def unharmed(guarded: Guarded) -> Iterator[None]:
    """After every test the manager is as it was before."""
    with guarded.unharmed():
        yield


def _bearer(guarded: Guarded) -> bytes:
    return f"Bearer {guarded.server.admin_key}".encode()


def _headers(*shown: bytes) -> list[bytes]:
    return [b"authorization: " + each for each in shown]


def _metadata(*shown: bytes) -> list[tuple[bytes, bytes]]:
    return [(b"authorization", each) for each in shown]


def _http(guarded: Guarded, port: str, path: str, *headers: bytes, body: bytes = b"") -> HttpAnswer:
    """Return the answer to a request over HTTP whose body may never end."""
    with guarded.http(port) as connection:
        connection.sendall(http_head(path, *headers) + body)
        return read_answer(connection)


def _grpc(
    guarded: Guarded, port: str, path: str, *shown: bytes, body: bytes = b"", promised: int | None = None
) -> int | None:
    """Return the status of a request over gRPC: without a body, with a whole one, or with less than was promised."""
    with guarded.grpc(port) as connection:
        call = GrpcCall(connection)
        call.head(path, *_metadata(*shown))
        if body:
            call.body(body, promised=promised, is_last=promised is None)
        return call.status()


# ── giant: the body is never sent ──


@pytest.mark.parametrize("length", [_GIANT, _LARGE, _IN_CHUNKS], ids=["giant", "large", "chunks"])
@pytest.mark.parametrize("client", _STRANGERS)
def test_http_refuses_a_stranger_before_the_body(guarded: Guarded, client: str, length: bytes) -> None:
    asked = [(), (b"expect: 100-continue",)]
    with guarded.all_turned_away(2 * len(asked)):  # this counter leaves out those of /v1
        for port, path in _HTTP_CALLS:
            for expectation in asked:
                answer = _http(guarded, port, path, length, *expectation, *_headers(*_STRANGERS[client]))
                assert (answer.status, answer.headers["www-authenticate"]) == (401, 'Bearer realm="kvcm"')


@pytest.mark.parametrize("client", _STRANGERS)
def test_grpc_refuses_a_stranger_before_the_body(guarded: Guarded, client: str) -> None:
    with guarded.all_turned_away(3 * len(_GRPC_CALLS)):
        for port, path in _GRPC_CALLS:
            for promised in (None, 20 << 20, (1 << 32) - 1):
                body = b"" if promised is None else b"x" * 100
                status = _grpc(guarded, port, path, *_STRANGERS[client], body=body, promised=promised)
                assert status == _UNAUTHENTICATED


def test_grpc_refuses_a_giant_body_of_a_key_before_it_comes(guarded: Guarded) -> None:
    for port, path in _GRPC_CALLS:
        status = _grpc(guarded, port, path, _bearer(guarded), body=b"x" * 100, promised=1 << 30)
        assert status == _RESOURCE_EXHAUSTED


def test_a_large_request_is_refused_even_where_no_key_is_needed(guarded: Guarded) -> None:
    for port, path in (("admin_http", "/api/login"), ("admin_http", "/v1/login"), ("admin_http", "/api/checkHealth")):
        for length, body in ((b"content-length: 65537", b""), (_IN_CHUNKS, b"10001\r\n" + b" " * 65_537)):
            assert _http(guarded, port, path, length, body=body).status == 413
    with guarded.server.api() as api:
        login = api.driver.channels["AccessService"].unary_unary("/kvcm.v1.AccessService/Login")  # type: ignore[attr-defined]
        with pytest.raises(grpc.RpcError) as refused:
            login(b"\xff" * 65_537, timeout=SECONDS)  # which is no message
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


# ── nested ──


def test_http_refuses_nested_bodies_and_those_of_strangers_unread(guarded: Guarded) -> None:
    for port, path in _HTTP_CALLS:
        for body in _NESTED_JSON:
            length = b"content-length: %d" % len(body)
            answer = _http(guarded, port, path, length, *_headers(_bearer(guarded)), body=body)
            assert answer.status in {400, 422}
            assert _http(guarded, port, path, length, body=body[:1000]).status == 401


def test_grpc_refuses_nested_bodies_and_those_of_strangers_unread(guarded: Guarded) -> None:
    for shown, expected in (((_bearer(guarded),), _INVALID_ARGUMENT), ((), _UNAUTHENTICATED)):
        for port, path in _GRPC_CALLS:
            for body in _NESTED_PROTO:
                assert _grpc(guarded, port, path, *shown, body=body) == expected


# ── cut ──


def test_http_forgets_a_request_whose_body_ends_early(guarded: Guarded) -> None:
    read = guarded.counted("kvcm_rpc_requests_total")
    for port, path in _HTTP_CALLS:
        for shown in ((_bearer(guarded),), ()):
            with guarded.http(port) as connection:
                connection.sendall(http_head(path, b"content-length: 1000", *_headers(*shown)) + b'{"trace_id":"x"}')
                connection.shutdown(socket.SHUT_WR)
                assert b" 200 " not in rest(connection)
    assert guarded.counted("kvcm_rpc_requests_total") == read


@pytest.mark.parametrize("sent", [None, b"", b"\x0a\x01"], ids=["no body", "no byte", "a part"])
def test_grpc_refuses_a_request_whose_body_ends_early(guarded: Guarded, sent: bytes | None) -> None:
    for shown, expected in (((_bearer(guarded),), _INVALID_ARGUMENT), ((), _UNAUTHENTICATED)):
        with guarded.grpc() as connection:
            call = GrpcCall(connection)
            call.head(_MATCH, *_metadata(*shown))
            if sent is None:
                call.data(b"", is_last=True)
            else:
                call.body(sent, promised=1000, is_last=True)
            assert call.status() == expected


# ── odd credentials ──


@pytest.mark.parametrize("odd", _ODD)
def test_odd_credentials_belong_to_no_principal(guarded: Guarded, odd: str) -> None:
    with guarded.all_turned_away(2):
        for port, path in _HTTP_CALLS[:2]:
            assert _http(guarded, port, path, _LARGE, *_headers(*_ODD[odd])).status == 401
    for port, path in _GRPC_CALLS:
        assert _grpc(guarded, port, path, *_ODD[odd]) == _UNAUTHENTICATED


def test_a_right_key_that_is_shown_twice_is_refused(guarded: Guarded) -> None:
    key = _bearer(guarded)
    for shown in ((key, key), (key, _WRONG_KEY), (_WRONG_KEY, key), (b"", key)):
        assert _http(guarded, "http", _INFO, _TWO_BYTES, *_headers(*shown), body=b"{}").status == 401
        assert _grpc(guarded, "rpc", _MATCH, *shown) == _UNAUTHENTICATED


@pytest.mark.parametrize("byte", [b"\0", b"\n", b"\x7f", b"\x80", b"\xff", "ü".encode()])
def test_a_key_with_bytes_that_no_key_has_is_refused(guarded: Guarded, byte: bytes) -> None:
    key = _bearer(guarded)
    for shown in (key + byte, b"Bearer " + byte + key[7:], byte + key):
        assert _http(guarded, "http", _INFO, _TWO_BYTES, *_headers(shown), body=b"{}").status in {400, 401}
        assert _grpc(guarded, "rpc", _MATCH, shown) not in {_OK, _INVALID_ARGUMENT}


@pytest.mark.parametrize("count", [1, 3000], ids=["one", "many"])
def test_credentials_without_end_are_refused(guarded: Guarded, count: int) -> None:
    shown = [b"Bearer " + b"x" * (200_000 // count)] * count
    with guarded.http() as connection:
        with contextlib.suppress(OSError):
            connection.sendall(http_head(_INFO, _TWO_BYTES, *_headers(*shown)))
        assert rest(connection).startswith(b"HTTP/1.1 431 ")
    with guarded.grpc() as connection:
        call = GrpcCall(connection)
        with contextlib.suppress(OSError):
            call.head(_MATCH, *_metadata(*shown))
        assert call.status() in {None, _RESOURCE_EXHAUSTED, _UNAUTHENTICATED}


# ── requests after a body in chunks ──


def test_a_key_behind_the_body_is_none(guarded: Guarded) -> None:
    """A proxy that looks after keys looks at the head of a request."""
    body = b"2\r\n{}\r\n0\r\n" + b"authorization: " + _bearer(guarded) + b"\r\n\r\n"
    for port, path in (("http", _INFO), ("admin_http", "/v1/keys")):
        assert _http(guarded, port, path, _IN_CHUNKS, body=body).status == 401


@pytest.mark.parametrize("piece", [b"x: " + b"y" * 1000 + b"\r\n", b"y" * 1000], ids=["trailers", "one trailer"])
@pytest.mark.parametrize("has_key", [False, True])
def test_trailers_without_end_are_not_kept(guarded: Guarded, has_key: bool, piece: bytes) -> None:
    shown = _headers(_bearer(guarded)) if has_key else []
    many = piece * 1000
    with guarded.http() as connection, contextlib.suppress(OSError):
        connection.sendall(http_head("/api/getCacheLocation", _IN_CHUNKS, *shown) + b"0\r\nx: ")
        for _ in range(_ENDLESS_BYTES // len(many)):
            connection.sendall(many)
