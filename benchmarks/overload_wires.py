"""Connections that cost a client little: raw bytes of prepared requests, and no more of HTTP and HTTP/2 than it takes
to know how a request ended. A client that shares a machine with the server it overloads cannot be one that does more.
"""

from __future__ import annotations

import asyncio
import re
import struct
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

__all__ = ["WIRES", "Ended", "GrpcWire", "HttpWire"]

Ended = Callable[[str, bytes], None]
"""Takes how a request ended ("200", "503", "grpc 14", "reset 8", "closed") and, where wanted, its answer."""

_LENGTH = re.compile(rb"\r\ncontent-length: *([0-9]+)", re.IGNORECASE)


class HttpWire(asyncio.Protocol):
    """A connection that is kept alive, with one request at a time."""

    def __init__(self) -> None:
        self._ended: Ended | None = None
        self._parts: list[bytes] = []
        self._left = -1
        self._wants_answer = False
        self._status = ""
        self.is_open = False

    @property
    def space(self) -> int:
        """Requests that can be sent now."""
        return int(self.is_open and self._ended is None)

    @staticmethod
    def prepared(target: str, body: bytes) -> bytes:
        """Return the bytes of a request."""
        head = f"POST {target} HTTP/1.1\r\nhost: kvcm\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        return head.encode() + b"\r\n\r\n" + body

    def connection_made(self, transport: Any) -> None:
        self._transport, self.is_open = transport, True

    def send(self, prepared: bytes, ended: Ended, wants_answer: bool) -> None:
        """Send a request on a free connection."""
        self._ended, self._wants_answer, self._left = ended, wants_answer, -1
        self._parts.clear()
        self._transport.write(prepared)

    def data_received(self, data: bytes) -> None:
        if self._left < 0:
            if self._parts:
                data = b"".join((*self._parts, data))
                self._parts.clear()
            end = data.find(b"\r\n\r\n")
            if end < 0:
                self._parts.append(data)
                return
            length = _LENGTH.search(data, 0, end + 2)
            assert length is not None, data[:200]
            self._status, self._left = data[9:12].decode(), int(length[1])
            data = data[end + 4 :]
        self._left -= len(data)
        if self._wants_answer:
            self._parts.append(data)
        if not self._left:
            ended, self._ended = self._ended, None
            assert ended is not None
            ended(self._status, b"".join(self._parts))

    def connection_lost(self, _error: Exception | None) -> None:
        self.is_open = False
        if self._ended is not None:
            ended, self._ended = self._ended, None
            ended("closed", b"")

    def close(self) -> None:
        """Close it."""
        self._transport.close()


class _Stream(NamedTuple):
    ended: Ended
    answer: list[bytes] | None


_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _GOAWAY, _WINDOW = 0, 1, 3, 4, 6, 7, 8
_END_STREAM = 1
_MOST_WINDOW = (1 << 31) - 1
_WINDOW_STEP = 1 << 30  # a connection may last for more bytes than a window can have
_FRAME_BYTES = 16_384
_STATUS = re.compile(rb"grpc-status[\x01\x02]([0-9]+)")


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


class GrpcWire(asyncio.Protocol):
    """A connection of HTTP/2 that keeps to what the server allows: streams at a time, bytes on their way."""

    def __init__(self) -> None:
        self._buffer = b""
        self._next_stream = 1
        self._streams: dict[int, _Stream] = {}
        self._most_streams = 0  # until the server says
        self._window = 65_535
        self._first_window = 65_535
        self._windows: dict[int, int] = {}
        self._taken = 0  # bytes of answers that the server was not yet given back
        self._outbox: deque[tuple[int, memoryview]] = deque()
        self._blocked: dict[int, memoryview] = {}
        self.is_open = False

    @property
    def space(self) -> int:
        """Requests that can be sent now."""
        return self._most_streams - len(self._streams) if self.is_open and not self._outbox else 0

    @staticmethod
    def prepared(target: str, body: bytes) -> bytes:
        """Return the header block of a request, its length before it, and its message."""

        def text(value: str) -> bytes:
            return bytes([len(value)]) + value.encode()

        block = b"\x83\x86\x04" + text(target) + b"\x01" + text("kvcm") + b"\x0f\x10" + text("application/grpc")
        block += b"\x00" + text("te") + text("trailers")
        return struct.pack(">H", len(block)) + block + b"\x00" + struct.pack(">I", len(body)) + body

    def connection_made(self, transport: Any) -> None:
        self._transport, self.is_open = transport, True
        settings = struct.pack(">HIHI", 1, 0, 4, _MOST_WINDOW)  # no table of headers; answers of any size
        transport.write(
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
            + _frame(_SETTINGS, 0, 0, settings)
            + _frame(_WINDOW, 0, 0, struct.pack(">I", _MOST_WINDOW - 65_535))
        )

    def send(self, prepared: bytes, ended: Ended, wants_answer: bool) -> None:
        """Send a request on a free connection."""
        stream, self._next_stream = self._next_stream, self._next_stream + 2
        self._streams[stream] = _Stream(ended, [] if wants_answer else None)
        self._windows[stream] = self._first_window
        length = struct.unpack_from(">H", prepared)[0]
        self._transport.write(_frame(_HEADERS, 4, stream, prepared[2 : 2 + length]))
        self._outbox.append((stream, memoryview(prepared)[2 + length :]))
        self._flush()

    def _flush(self) -> None:
        while self._outbox and self._window > 0:
            stream, left = self._outbox.popleft()
            if stream not in self._streams:  # it has ended already
                continue
            size = min(len(left), self._window, self._windows[stream], _FRAME_BYTES)
            if size <= 0:
                self._blocked[stream] = left
                continue
            self._window -= size
            self._windows[stream] -= size
            is_last = size == len(left)
            self._transport.write(_frame(_DATA, _END_STREAM if is_last else 0, stream, bytes(left[:size])))
            if not is_last:
                self._outbox.appendleft((stream, left[size:]))

    def data_received(self, data: bytes) -> None:
        data = self._buffer + data
        position = 0
        while len(data) - position >= 9:
            size = int.from_bytes(data[position : position + 3], "big")
            if len(data) - position - 9 < size:
                break
            kind, flags = data[position + 3], data[position + 4]
            stream = int.from_bytes(data[position + 5 : position + 9], "big")
            self._frame_received(kind, flags, stream, data[position + 9 : position + 9 + size])
            position += 9 + size
        self._buffer = data[position:]

    def _frame_received(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == _DATA:
            self._take(len(payload))
            found = self._streams.get(stream)
            if found is not None and found.answer is not None:
                found.answer.append(payload)
        elif kind == _HEADERS and flags & _END_STREAM:
            status = _STATUS.search(payload)
            self._end(stream, f"grpc {status[1].decode()}" if status else "no status")
        elif kind == _RESET:
            self._end(stream, f"reset {int.from_bytes(payload, 'big')}")
        elif kind == _WINDOW:
            self._widen(stream, int.from_bytes(payload, "big"))
        elif kind == _SETTINGS and not flags:
            self._settle(payload)
        elif kind == _PING and not flags:
            self._transport.write(_frame(_PING, 1, 0, payload))
        elif kind == _GOAWAY:
            self._transport.close()

    def _take(self, size: int) -> None:
        self._taken += size
        if self._taken >= _WINDOW_STEP:
            self._transport.write(_frame(_WINDOW, 0, 0, struct.pack(">I", self._taken)))
            self._taken = 0

    def _settle(self, payload: bytes) -> None:
        if not self._most_streams:
            self._most_streams = 1 << 20
        for name, value in struct.iter_unpack(">HI", payload):
            if name == 3:
                self._most_streams = value
            elif name == 4:
                for stream in self._windows:
                    self._windows[stream] += value - self._first_window
                self._first_window = value
        self._transport.write(_frame(_SETTINGS, 1, 0, b""))
        self._flush()

    def _widen(self, stream: int, size: int) -> None:
        if not stream:
            self._window += size
        elif stream in self._windows:
            self._windows[stream] += size
            if (left := self._blocked.pop(stream, None)) is not None:
                self._outbox.append((stream, left))
        self._flush()

    def _end(self, stream: int, status: str) -> None:
        self._windows.pop(stream, None)
        self._blocked.pop(stream, None)
        found = self._streams.pop(stream, None)
        if found is not None:
            found.ended(status, b"".join(found.answer)[5:] if found.answer else b"")

    def connection_lost(self, _error: Exception | None) -> None:
        self.is_open = False
        for stream in list(self._streams):
            self._end(stream, "closed")

    def close(self) -> None:
        """Close it."""
        self._transport.close()


WIRES: dict[str, type[HttpWire | GrpcWire]] = {"http": HttpWire, "grpc": GrpcWire}
