"""Ports for the servers that tests start.

All lie below the range that the system gives to outgoing connections: one of those could take a port before it is
bound. Workers of a parallel run choose at the same moment, so each has ports that no other is given.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import socket
from collections.abc import Iterator

__all__ = ["BUS_OFFSET", "free_port", "ports_of"]

BUS_OFFSET = 10_000
"""A node of a Redis cluster listens so far above its port, too."""

_PORTS = range(10_240, 32_768)
_WORKERS = 40  # at most; it divides BUS_OFFSET, so that the bus of a worker's node is on a port of the same worker


def ports_of(worker: str) -> range:
    """Return the ports of a worker of pytest-xdist, by its name (`gw0`, `gw1`…); "" is a run without workers.

    Raises:
        ValueError: there are not as many.
    """
    if not worker:
        return _PORTS
    number = int(worker.removeprefix("gw"))
    if number >= _WORKERS:
        raise ValueError(f"there are ports for {_WORKERS} workers")
    return _PORTS[number::_WORKERS]


def _in_turn() -> Iterator[int]:
    """Yield every port of this process before one comes again: a test may not have bound its port yet."""
    own = ports_of(os.environ.get("PYTEST_XDIST_WORKER", ""))
    return itertools.cycle(random.sample(own, len(own)))


_next_ports = _in_turn()


def free_port(offset: int = 0) -> int:
    """Return a port that no process uses; the port `offset` above it is unused, too, for servers that need both.

    Args:
        offset: a multiple of `_WORKERS`, so that both are of the same worker.
    """
    assert offset % _WORKERS == 0
    for port in itertools.islice(_next_ports, len(_PORTS)):
        if port + offset in _PORTS and all(map(_is_free, {port, port + offset})):
            return port
    raise AssertionError("no free port")


def _is_free(port: int) -> bool:
    with socket.socket() as probe, contextlib.suppress(OSError):
        probe.bind(("0.0.0.0", port))
        return True
    return False
