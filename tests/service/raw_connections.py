"""Connections of clients that keep to no rules, byte by byte: HTTP/1.1 and gRPC, in plain text and over TLS."""

from __future__ import annotations

import contextlib
import re
import socket
import ssl
import struct
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["SECONDS", "GrpcCall", "HttpAnswer", "connected", "half_closed", "http_head", "read_answer", "rest"]

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


def rest(connection: socket.socket) -> bytes:
    """Return everything until the server ends the connection; fails where it never does."""
    parts = []
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        while part := connection.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


def half_closed(connection: socket.socket) -> None:
    """Say that nothing more is sent; what is answered may still be read, but over TLS."""
    connection.shutdown(socket.SHUT_WR)


# ── HTTP/1.1 ──


class HttpAnswer(NamedTuple):
    """What was answered; header names in lower case."""

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
        """Yield what the server sends until it ends the connection; pings are answered, as a living client does."""
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
