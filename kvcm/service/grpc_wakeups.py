"""How gRPC's own thread wakes the event loop.

For every event of a call (there are three or four) that thread queues it and writes a byte into a pair of sockets. The
loop then takes all events that are queued, but only one byte per turn. In a loop whose turns take milliseconds more
bytes come than are taken, until the pair is full after some 280; then the thread stands still until three quarters of
them were taken one by one, and for half a second gRPC neither hears nor says anything. So the loop is given a socket
that is read to its end: a byte is written behind its event, hence nothing that was queued is missed.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Any

__all__ = ["WholeReads", "whole_wakeups"]

_ALL = 1 << 16


class WholeReads(socket.socket):
    """A socket that returns everything that there is, however little is asked for."""

    def recv(self, _size: int, _flags: int = 0, /) -> bytes:
        """Return all bytes that have come."""
        return super().recv(_ALL)


@contextlib.contextmanager
def whole_wakeups() -> Iterator[None]:
    """Have what gRPC starts inside the block wake its loop so; the first server or channel of a process does. Other
    pairs of sockets that are made meanwhile are for wakeups, too, and work as before."""
    made = socket.socketpair

    def pair(*arguments: Any, **named: Any) -> tuple[socket.socket, socket.socket]:
        reads, writes = made(*arguments, **named)
        return WholeReads(reads.family, reads.type, reads.proto, reads.detach()), writes

    socket.socketpair = pair
    try:
        yield
    finally:
        socket.socketpair = made
