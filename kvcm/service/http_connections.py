"""One HTTP connection whose client may be slow, silent or endless: each of them is bounded.

uvicorn's connection waits for ever for the rest of a request, reads any number of bytes of headers and waits for ever
for its answer to be taken. This one keeps the times at which something began, and `ConnectionWatch` looks over all of
them now and then: a timer for each request would cost more than the rest of this file.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import socket
import ssl
import struct
import sys
import termios
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Final

import structlog
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kvcm.model.tasks import end_tasks
from kvcm.service.access import CERTIFICATE_NAMES
from kvcm.service.tls import ServerTls, names_of_peer

__all__ = ["BODY_BYTES", "RECEIVED_AT", "ConnectionLimits", "ConnectionWatch", "TlsListener", "WatchedConnection"]

BODY_BYTES: Final = "kvcm.body_bytes"
"""Key of a scope: bytes of the body of a request that its head admitted."""
RECEIVED_AT: Final = "kvcm.came"
"""Key of a scope: when the head of the request was read, on the event loop's clock, which is `time.monotonic`'s."""
_log = structlog.get_logger("kvcm.service")
_MAX_HEAD_BYTES: Final = 1 << 16
_LINGER_ZERO: Final = struct.pack("ii", 1, 0)
_MAX_UNSENT_BYTES: Final = 1 << 16
_MIN_CHECK_SECONDS: Final = 0.05
_MAX_CHECK_SECONDS: Final = 1.0
_BUSY: Final = (
    b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\nconnection: close\r\ncontent-length: 2\r\n"
    b"x-kvcm-error: too many connections\r\n\r\n{}"
)
_TOO_SLOW: Final = (
    b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 2\r\n"
    b"x-kvcm-error: the request did not arrive in time\r\n\r\n{}"
)
_TOO_LONG: Final = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 2\r\n"
    b"x-kvcm-error: the head of the request, or what follows its body, is larger than 65536 bytes\r\n\r\n{}"
)


@dataclass(slots=True)
class ConnectionLimits:
    """Of every connection of a server, and looked at all the time: they may change.

    Attributes:
        receive_seconds: from the first byte of a request, or the connection, to the last of its body; > 0.
        send_seconds: for the client to take an answer; > 0.
        idle_seconds: between requests; > 0.
        most: connections of one port that are open at a time.
    """

    receive_seconds: float = 30.0
    send_seconds: float = 60.0
    idle_seconds: float = 75.0
    most: int = 4096

    @property
    def check_seconds(self) -> float:
        """How often to look, so that a limit is exceeded by a quarter at most."""
        shortest = min(self.receive_seconds, self.send_seconds, self.idle_seconds)
        return min(_MAX_CHECK_SECONDS, max(_MIN_CHECK_SECONDS, shortest / 4))


class _Answered:
    """In the place of uvicorn's request and answer, where there never were any: the rest of the request is ignored."""

    response_started = response_complete = disconnected = True
    message_event = asyncio.Event()


_ANSWERED: Final[Any] = _Answered()


class WatchedConnection(HttpToolsProtocol):
    """A connection that knows since when its client has been doing what it does.

    Args:
        limits: of the connections of its server.
        check_head: from the scope of a request whose head has come to the whole answer if it is rejected; None if it
            is admitted.
        uvicorn: what uvicorn makes connections of.

    Attributes:
        receiving_since: when the request began that is not complete yet, None while none is; on the loop's clock.
        sending_since: when the client began to take its answer too slowly, None while it does not.
        idle_since: when the last request ended, None while there is one.
    """

    def __init__(self, limits: ConnectionLimits, check_head: Callable[[Any], bytes | None], **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self._limits = limits
        self._check_head = check_head
        self.receiving_since: float | None = None
        self.sending_since: float | None = None
        self.idle_since: float | None = None
        self._head_bytes = 0
        self._in_head = True
        self._running: Any = None
        self._is_secure = False
        self._is_parting = False
        self._names: Sequence[str] = ()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin; a connection too many gets an answer and is closed."""
        self.receiving_since = self.loop.time()
        super().connection_made(transport)
        if transport.get_extra_info("ssl_object") is not None:
            self._is_secure = True
            transport.set_write_buffer_limits(high=_MAX_UNSENT_BYTES)  # as without TLS: slow clients are to be seen
            self._names = names_of_peer(transport.get_extra_info("peercert"))
        if len(self.connections) > self._limits.most:
            transport.write(_BUSY)
            transport.close()

    def data_received(self, data: bytes) -> None:
        """Note when a request begins."""
        if self.transport.is_closing():
            return
        if self.receiving_since is None:
            self.receiving_since, self.idle_since = self.loop.time(), None
        self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes > _MAX_HEAD_BYTES:
            self.refuse(_TOO_LONG)

    def on_headers_complete(self) -> None:
        """Note when a request waits to be answered."""
        self._in_head, self._head_bytes = False, 0
        self.scope[RECEIVED_AT] = self.loop.time()  # type: ignore[typeddict-unknown-key]
        if self._names:
            self.scope[CERTIFICATE_NAMES] = self._names  # type: ignore[typeddict-unknown-key]
        refusal = self._check_head(self._head()) if self._is_alone() else None
        if refusal is None:
            super().on_headers_complete()
        else:
            self.cycle = _ANSWERED
            self.transport.write(refusal)
        self.headers = []  # the request keeps its own: what follows its body is no header of it

    def _is_alone(self) -> bool:
        """Return whether the answer to this request can be written at once, and the connection kept. A client
        that does not read its answers must get no more of them; on the ordinary path its requests wait, too."""
        is_free = (self.cycle is None or self.cycle.response_complete) and self.sending_since is None
        return is_free and not self.expect_100_continue and self.parser.should_keep_alive()

    def _head(self) -> Any:
        """Return the scope with what uvicorn puts there a moment later."""
        self.scope["method"] = self.parser.get_method().decode("ascii")
        self.scope["path"] = self.url.partition(b"?")[0].decode("ascii", "replace")
        return self.scope

    def on_body(self, body: bytes) -> None:
        """Note that what came is no part of a head, nor of what may follow a body that is sent in chunks: trailers,
        which uvicorn keeps, and extensions."""
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Note when a request is complete."""
        self.receiving_since, self._in_head, self._head_bytes = None, True, 0
        if self.cycle.response_complete:  # it was refused before it was complete
            self.idle_since = self.loop.time()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Note when nothing is to be done."""
        if self.receiving_since is None and not self.pipeline:
            self.idle_since = self.loop.time()
        super().on_response_complete()
        self._unset_keepalive_if_required()  # idle connections are looked for, too

    def pause_writing(self) -> None:
        """Note when the client does not take what it is sent."""
        self.sending_since = self.loop.time()
        super().pause_writing()

    def resume_writing(self) -> None:
        """It does again."""
        self.sending_since = None
        super().resume_writing()

    def check(self, now: float) -> None:
        """End the connection where its client is too slow or has been silent for too long."""
        limits = self._limits
        if _is_over(self.sending_since, limits.send_seconds, now):
            self._cancel_cycles()
            # The client will not read the rest: the system is to drop it, too, in place of trying on.
            with contextlib.suppress(OSError):
                if (connection := self.transport.get_extra_info("socket")) is not None:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_ZERO)
            self.transport.abort()
        elif _is_over(self.receiving_since, limits.receive_seconds, now):
            self.refuse(_TOO_SLOW)
        elif _is_over(self.idle_since, limits.idle_seconds, now):
            self.transport.close()
        if self._is_secure and self.transport.is_closing():
            self._part()

    def _part(self) -> None:
        """End a closed connection, whether or not the client ends it: at the second check at which all has arrived."""
        has_arrived = not self.transport.get_write_buffer_size() and not _unacknowledged_bytes(self.transport)
        if has_arrived and self._is_parting:
            self.transport.abort()
        self._is_parting = has_arrived

    def refuse(self, answer: bytes) -> None:
        """End the connection; with an answer, if its client asked for something that is not answered yet."""
        is_answered = not self._in_head and self._running is not None and self._running.response_started
        if not is_answered and (self._head_bytes or not self._in_head):
            self.transport.write(answer)
        self._cancel_cycles()
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the requests of a closed connection."""
        self._cancel_cycles()
        super().connection_lost(exc)

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._running = cycle  # uvicorn knows only the latest: of requests that are sent before answers, the last
        super()._start_asgi_task(cycle, app)

    def _cancel_cycles(self) -> None:
        """Let no request wait for the client or write to it."""
        for cycle in (self._running, self.cycle):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()


def _unacknowledged_bytes(transport: asyncio.Transport) -> int:
    """Return what the system holds for the client. While that is nothing, no proxy holds anything."""
    connection = transport.get_extra_info("socket")
    if connection is None:  # TLS has lost it, and its protocol learns that in the loop's next turn
        return 0
    try:
        found = fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4))
    except (OSError, ValueError):  # it is closed already
        return 0
    return int.from_bytes(found, sys.byteorder)


def _is_over(since: float | None, seconds: float, now: float) -> bool:
    return since is not None and now - since > seconds


class ConnectionWatch:
    """Looks over the connections of one server for good.

    Args:
        connections: those that are open.
        limits: of them.
    """

    def __init__(self, connections: set[Any], limits: ConnectionLimits) -> None:
        self._connections = connections
        self._limits = limits

    async def run(self) -> None:
        """Look now and then."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._limits.check_seconds)
            now = loop.time()
            for connection in list(self._connections):
                if isinstance(connection, WatchedConnection):
                    self._check(connection, now)

    @staticmethod
    def _check(connection: WatchedConnection, now: float) -> None:
        try:
            connection.check(now)
        except Exception:  # one connection must not end the watch over all others
            _log.exception("connection_not_looked_at")


# Accepts the TLS connections of one HTTP server.
#
# uvicorn learns of a connection when its handshake is over, and has one context for good. So connections are accepted
# here: those that are not there yet count as connections, have their time, and take the context of the moment.
#
# Rejected: a plain listener whose connections turn to TLS by `start_tls`. With uvloop the first bytes may come before
# it.

_BACKLOG: Final = 2048
_MAX_CONCURRENT_HANDSHAKES: Final = 64
_PAUSE_SECONDS: Final = 1.0


class TlsListener:
    """Listens on one socket, in the place of a server of asyncio. Begins at once, on the running loop.

    Args:
        listener: bound; its owner closes it.
        tls: what new connections use.
        limits: of connections.
        make: makes what a connection is handled by.
        inside: connections that are there.
    """

    def __init__(
        self,
        listener: socket.socket,
        tls: ServerTls,
        limits: ConnectionLimits,
        make: Callable[[], asyncio.Protocol],
        inside: Sized,
    ) -> None:
        self._listener = listener
        self._tls = tls
        self._limits = limits
        self._make = make
        self._inside = inside
        self._greeting: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._is_closed = False
        listener.setblocking(False)
        listener.listen(_BACKLOG)
        self._listen()

    @property
    def is_handshaking(self) -> bool:
        """Whether a handshake is going on."""
        return bool(self._greeting)

    def handshake(self, connection: socket.socket) -> None:
        """Do the handshake of a connection; one too many is closed: before the handshake there is no answer."""
        if len(self._greeting) + len(self._inside) >= self._limits.most:
            connection.close()
            return
        connection.setblocking(False)
        task = self._loop.create_task(self._handshake(connection))
        self._greeting.add(task)
        task.add_done_callback(self._greeting.discard)

    def close(self) -> None:
        """Accept no more connections; handshakes go on."""
        if not self._is_closed:
            self._is_closed = True
            self._loop.remove_reader(self._listener)

    async def wait_closed(self) -> None:
        """Return at once."""

    async def stop(self) -> None:
        """Accept no more connections and end handshakes."""
        self.close()
        await end_tasks(list(self._greeting))

    def _listen(self) -> None:
        if not self._is_closed:
            self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        try:
            for _ in range(_MAX_CONCURRENT_HANDSHAKES):
                connection, _ = self._listener.accept()
                self.handshake(connection)
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:  # no descriptors are left, and the listener stays readable
            _log.warning("connection_not_accepted", reason=error.strerror)
            self._loop.remove_reader(self._listener)
            self._loop.call_later(_PAUSE_SECONDS, self._listen)

    async def _handshake(self, connection: socket.socket) -> None:
        limits = self._limits
        with contextlib.ExitStack() as until:
            until.callback(connection.close)
            try:
                await self._loop.connect_accepted_socket(
                    self._make,
                    connection,
                    ssl=self._tls.context,
                    ssl_handshake_timeout=limits.receive_seconds,
                    ssl_shutdown_timeout=limits.send_seconds,  # the last answer is still being read then
                )
            except OSError as error:  # what TLS refuses and what took too long are such errors
                _log.debug("handshake_failed", reason=_reason(error))
            else:
                until.pop_all()


def _reason(error: OSError) -> str:
    return (error.reason if isinstance(error, ssl.SSLError) else None) or str(error) or type(error).__name__
