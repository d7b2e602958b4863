"""Accepts the TLS connections of one HTTP server.

uvicorn hears of a connection when its handshake is over, and has one context for good. So connections are accepted
here: those that are not there yet count as connections, have their time, and take the context of the moment.

Rejected: a plain listener whose connections turn to TLS by `start_tls`. With uvloop the first bytes may come before it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Sized
from typing import Final

import structlog

from kvcm.model.tasks import end_tasks
from kvcm.service.http_connection import ConnectionLimits
from kvcm.service.tls import ServerTls

__all__ = ["TlsListener"]

_BACKLOG: Final = 2048
_AT_ONCE: Final = 64
_PAUSE_SECONDS: Final = 1.0
_log = structlog.get_logger("kvcm.service")


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
    def is_greeting(self) -> bool:
        """Whether a handshake is going on."""
        return bool(self._greeting)

    def take(self, connection: socket.socket) -> None:
        """Shake hands with somebody who connected; one too many is closed: there are no words for him yet."""
        if len(self._greeting) + len(self._inside) >= self._limits.most:
            connection.close()
            return
        connection.setblocking(False)
        task = self._loop.create_task(self._greet(connection))
        self._greeting.add(task)
        task.add_done_callback(self._greeting.discard)

    def close(self) -> None:
        """Accept nobody any more; handshakes go on."""
        if not self._is_closed:
            self._is_closed = True
            self._loop.remove_reader(self._listener)

    async def wait_closed(self) -> None:
        """Return at once."""

    async def end(self) -> None:
        """Accept nobody any more and end handshakes."""
        self.close()
        await end_tasks(list(self._greeting))

    def _listen(self) -> None:
        if not self._is_closed:
            self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        try:
            for _ in range(_AT_ONCE):
                connection, _ = self._listener.accept()
                self.take(connection)
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:  # no descriptors are left, and the listener stays readable
            _log.warning("connection_not_accepted", reason=error.strerror)
            self._loop.remove_reader(self._listener)
            self._loop.call_later(_PAUSE_SECONDS, self._listen)

    async def _greet(self, connection: socket.socket) -> None:
        limits = self._limits
        with contextlib.ExitStack() as until:
            until.callback(connection.close)
            try:
                await self._loop.connect_accepted_socket(
                    self._make,
                    connection,
                    ssl=self._tls.context,
                    ssl_handshake_timeout=limits.receive_seconds,
                    ssl_shutdown_timeout=limits.send_seconds,  # what was answered last is still being taken then
                )
            except OSError as error:  # what TLS refuses and what took too long are such errors
                _log.debug("handshake_failed", reason=_reason(error))
            else:
                until.pop_all()


def _reason(error: OSError) -> str:
    return (error.reason if isinstance(error, ssl.SSLError) else None) or str(error) or type(error).__name__
