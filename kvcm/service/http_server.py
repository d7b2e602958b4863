"""uvicorn beside gRPC in one event loop: it must not touch signals (design.md decision 21)."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import uvicorn

from kvcm.model.errors import StorageIOError
from kvcm.model.tasks import end_tasks
from kvcm.service.http_app import HttpApp
from kvcm.service.http_connection import ConnectionLimits, ConnectionWatch, WatchedConnection
from kvcm.service.tls import ServerTls
from kvcm.service.tls_listener import TlsListener

__all__ = ["HttpServer"]


_CLOSE_SECONDS = 1
_HEAR_LOOKS = 30  # for the first request of connections that have just come
_LOOK_SECONDS = 0.01


class _QuietServer(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """One HTTP listener, bound at once.

    Args:
        host: address to bind.
        port: port to bind; 0 takes a free one.
        limits: of its connections.
        tls: what they use; None for plain text.

    Raises:
        StorageIOError: the address cannot be bound.
    """

    def __init__(
        self, host: str, port: int, limits: ConnectionLimits | None = None, tls: ServerTls | None = None
    ) -> None:
        self._limits = limits if limits is not None else ConnectionLimits()
        self._tls = tls
        self._secure: TlsListener | None = None
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, port))
        except OSError as error:
            self._socket.close()
            raise StorageIOError(f"HTTP address {host}:{port} cannot be bound: {error.strerror}") from error
        self.port: int = self._socket.getsockname()[1]
        self._server: _QuietServer | None = None
        self._task: asyncio.Task[None] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._late: list[asyncio.Task[Any]] = []

    async def start(self, app: HttpApp) -> None:
        """Begin to serve; returns when requests are accepted."""
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            proxy_headers=False,  # a client's address is what it connects from, not what it says
            http=partial(WatchedConnection, self._limits, app.knock),  # type: ignore[arg-type]
        )
        self._server = _QuietServer(config)
        # uvicorn listens to none where connections are accepted for it.
        sockets = [self._socket] if self._tls is None else []
        self._task = asyncio.create_task(self._server.serve(sockets=sockets))
        while not self._server.started:
            if self._task.done():
                return await self._task
            await asyncio.sleep(0.005)
        if self._tls is not None:
            inside = self._server.server_state.connections
            self._secure = TlsListener(self._socket, self._tls, self._limits, _maker(self._server), inside)
        watch = ConnectionWatch(self._server.server_state.connections, self._limits)
        self._watch = asyncio.create_task(watch.run())
        return None

    def stop_accepting(self) -> None:
        """Take no new connections; those that are open go on, also those that the system has accepted already."""
        if self._socket.fileno() < 0:
            return
        if self._server is not None and self._server.started:
            self._take_waiting(self._server)
            for listener in self._server.servers:
                listener.close()
            if self._secure is not None:
                self._secure.close()
        self._socket.close()

    def _take_waiting(self, server: _QuietServer) -> None:
        """Accept whoever has connected and perhaps sent a request: closing the socket would cut them off."""
        loop, protocol = asyncio.get_running_loop(), _maker(server)
        with contextlib.suppress(OSError):  # nobody waits
            while True:
                connection, _ = self._socket.accept()
                if self._secure is not None:
                    self._secure.take(connection)
                else:
                    self._late.append(loop.create_task(loop.connect_accepted_socket(protocol, connection)))
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RD)  # now, and not in the loop's next turn: more are refused

    async def stop(self, seconds: float = 0.0) -> None:
        """Close everything; what is in flight has so long to end."""
        self.stop_accepting()
        if self._server is not None and self._task is not None:
            await asyncio.gather(*self._late, return_exceptions=True)
            await self._heard(self._server)
            if self._secure is not None:
                await self._secure.end()
            self._server.config.timeout_graceful_shutdown = max(_CLOSE_SECONDS, round(seconds))
            self._server.should_exit = True
            await self._task
        if self._watch is not None:
            await end_tasks([self._watch])

    async def _heard(self, server: _QuietServer) -> None:
        """Wait a moment for the requests of connections that have just come: uvicorn closes those that sent none."""
        connections: set[Any] = server.server_state.connections
        for _ in range(_HEAR_LOOKS):
            is_greeting = self._secure is not None and self._secure.is_greeting
            if not is_greeting and all(connection.cycle is not None for connection in connections):
                return
            await asyncio.sleep(_LOOK_SECONDS)


def _maker(server: _QuietServer) -> Callable[[], asyncio.Protocol]:
    """Return what makes connections as uvicorn does."""
    config, state = server.config, server.server_state
    kind: Any = config.http_protocol_class

    def make() -> asyncio.Protocol:
        made: asyncio.Protocol = kind(config=config, server_state=state, app_state={})
        return made

    return make
