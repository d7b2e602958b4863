"""A relay before a manager that a test makes slow, silent, rude or absent."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from enum import StrEnum

from ports import free_port

_LOOK_SECONDS = 0.05


class Manner(StrEnum):
    """How connections are treated."""

    PASS = "pass"  # as if the proxy were not there
    SLOW = "slow"  # answers come late
    SILENT = "silent"  # nothing is relayed
    RUBBISH = "rubbish"  # answers are random bytes
    CLOSED = "closed"  # every connection is closed at once


class TcpProxy:
    """Relays a port on the loopback.

    Args:
        target_port: of the manager.
        delay_seconds: how late answers come when it is slow.
    """

    def __init__(self, target_port: int, delay_seconds: float = 2.0) -> None:
        self._target = ("127.0.0.1", target_port)
        self._delay_seconds = delay_seconds
        self._manner = Manner.PASS
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self.port = free_port()
        self._listener = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def address(self) -> str:
        """Where it listens."""
        return f"127.0.0.1:{self.port}"

    def be(self, manner: Manner) -> None:
        """Treat connections like this from now on; those that there are end, but when answers are only slow."""
        self._manner = manner
        if manner in (Manner.RUBBISH, Manner.CLOSED, Manner.PASS):
            self._drop_all()

    def close(self) -> None:
        """End."""
        self._manner = Manner.CLOSED
        self._listener.close()
        self._drop_all()

    def _drop_all(self) -> None:
        with self._lock:
            for each in self._open:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            if self._manner is Manner.CLOSED:
                return
            with socket.create_connection(self._target) as manager:
                with self._lock:
                    self._open |= {client, manager}
                try:
                    self._relay(client, manager)
                finally:
                    with self._lock:
                        self._open -= {client, manager}

    def _relay(self, client: socket.socket, manager: socket.socket) -> None:
        waiting: list[tuple[float, bytes]] = []
        while True:
            ready, _, _ = select.select([client, manager], [], [], _LOOK_SECONDS)
            if self._manner is not Manner.SILENT:
                if client in ready and not self._forward(client, manager):
                    return
                if manager in ready:
                    answer = manager.recv(1 << 16)
                    if not answer:
                        return
                    waiting.append((time.monotonic() + self._lateness, self._told(answer)))
            elif ready:
                time.sleep(_LOOK_SECONDS)
            while waiting and (self._manner is not Manner.SLOW or waiting[0][0] <= time.monotonic()):
                client.sendall(waiting.pop(0)[1])

    @property
    def _lateness(self) -> float:
        return self._delay_seconds if self._manner is Manner.SLOW else 0.0

    def _forward(self, source: socket.socket, target: socket.socket) -> bool:
        data = source.recv(1 << 16)
        target.sendall(data)
        return bool(data)

    def _told(self, answer: bytes) -> bytes:
        return os.urandom(len(answer)) if self._manner is Manner.RUBBISH else answer
