"""The ZMQ sockets of one rank of an engine, and the thread that reads them.

SUB gets the messages; a DEALER asks the engine's ROUTER for a replay. Replays carry no mark of the request they answer,
so every request has a socket of its own, and what an older one would still bring is lost with it. A monitor of the SUB
socket shows when the connection breaks. Messages are read before the monitor: a message of a new connection is
therefore never handled before the break that preceded it.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from kvcm.connectors.events.packages import zmq
from kvcm.connectors.events.stream import EventStream

__all__ = ["EngineSource", "RankEndpoints", "SourceLimits", "rank_endpoint"]

_log = logging.getLogger("kvcm.subscriber")
_POLL_MS: Final = 50
_MOST_AT_ONCE: Final = 1000
_NUMBER_BYTES: Final = 8
_END: Final = b"\xff" * _NUMBER_BYTES
_WILDCARDS: Final = ("//*:", "//0.0.0.0:", "//[::]:", "//:::")
_RECONNECT_MS, _RECONNECT_MAX_MS = 100, 2000
_HEARTBEAT_MS: Final = 2000
_HEARTBEAT_TIMEOUT_MS: Final = 6000


@dataclass(frozen=True, slots=True)
class RankEndpoints:
    """Where a rank publishes.

    Attributes:
        endpoint: of its PUB socket.
        replay_endpoint: of its ROUTER socket, "" for none.
        topic: beginning of the topics to read.
        binds: whether the engine connects, so that the subscriber binds.
    """

    endpoint: str
    replay_endpoint: str = ""
    topic: str = ""
    binds: bool = False


@dataclass(frozen=True, slots=True)
class SourceLimits:
    """What a publisher that is not trusted may send.

    Attributes:
        frame_bytes: of a frame; with a longer one the connection is closed.
        most_messages: that wait to be read. What is beyond waits at the publisher, or is lost and replayed.
        replayed_messages: that wait of a replay: engines keep 10,000.
        step_bytes: that are read at a time.
    """

    frame_bytes: int = 64 << 20
    most_messages: int = 64
    replayed_messages: int = 10_000
    step_bytes: int = 64 << 20


def rank_endpoint(endpoint: str, rank: int, host: str) -> str:
    """Return the address of a rank by that of the first one, which engines count up from; "" for none.

    Args:
        endpoint: as the engine is configured; a wildcard stands for its host.
        rank: data-parallel rank.
        host: of the engine.
    """
    if not endpoint:
        return ""
    for wildcard in _WILDCARDS:
        if endpoint.startswith("tcp:" + wildcard):
            endpoint = f"tcp://{host}:{endpoint[len('tcp:' + wildcard) :]}"
            break
    if endpoint.startswith("tcp://"):
        base, _, port = endpoint.rpartition(":")
        return f"{base}:{int(port) + rank}"
    return f"{endpoint}_dp{rank}" if rank and endpoint.startswith("inproc://") else endpoint


class EngineSource:
    """Reads one rank until it is closed.

    Args:
        context: of ZMQ.
        endpoints: where the rank publishes.
        stream: gets the messages.
        changed: lock of the stream, notified after every change.
        on_engine: called with the lock when the engine went away (false) or is back (true).
        wall_clock: seconds since 1970, as engines write them.
        limits: of what is read; None for an engine that is trusted.

    Attributes:
        lag_seconds: from the engine's message to its arrival here, of the last one.
        malformed_frames: messages that have not the frames of one.
        has_failed: whether it cannot be read any more, through a fault of ours.
    """

    def __init__(
        self,
        context: Any,
        endpoints: RankEndpoints,
        stream: EventStream,
        changed: threading.Condition,
        on_engine: Callable[[bool], None],
        wall_clock: Callable[[], float] = time.time,
        limits: SourceLimits | None = None,
    ) -> None:
        self._zmq = zmq()
        self._context = context
        self._endpoints = endpoints
        self._stream = stream
        self._changed = changed
        self._on_engine = on_engine
        self._wall_clock = wall_clock
        self._limits = limits
        self.lag_seconds = 0.0
        self._replay: Any = None
        self._was_gone = False
        self.malformed_frames = 0
        self.has_failed = False
        self._socket = self._new_socket(self._zmq.SUB)
        # What waits here of an engine that is trusted is bounded by what engines keep anyway.
        self._socket.setsockopt(self._zmq.RCVHWM, 0 if limits is None else limits.most_messages)
        self._socket.setsockopt(self._zmq.SUBSCRIBE, endpoints.topic.encode())
        # Not CONNECTED: a proxy in front of a dead engine accepts, too, and then closes.
        events = self._zmq.EVENT_HANDSHAKE_SUCCEEDED | self._zmq.EVENT_DISCONNECTED
        self._monitor = self._socket.get_monitor_socket(events)
        if endpoints.binds:
            self._socket.bind(endpoints.endpoint)
        else:
            self._socket.connect(endpoints.endpoint)

    def run(self, stop: threading.Event) -> None:
        """Read until `stop` is set."""
        poller = self._zmq.Poller()
        poller.register(self._socket, self._zmq.POLLIN)
        poller.register(self._monitor, self._zmq.POLLIN)
        replay = None
        try:
            while not stop.is_set():
                if replay is not self._replay:
                    if replay is not None:
                        poller.unregister(replay)
                    replay = self._replay
                    poller.register(replay, self._zmq.POLLIN)
                poller.poll(_POLL_MS)
                self.step()
        except Exception:
            _log.exception("the engine at %s is not read any more", self._endpoints.endpoint)
            with self._changed:
                self.has_failed = True
                self._on_engine(False)  # else its blocks would be reported as they were, for ever
                self._changed.notify_all()
        finally:
            self.close()

    def step(self) -> None:
        """Handle everything that has come, and ask for a replay where one is due."""
        messages = self._received(self._socket)
        is_broken, is_connected = self._connection_changes()
        replayed = self._received(self._replay) if self._replay is not None else []
        with self._changed:
            if is_broken:
                while messages:  # of the old connection: a replay has them, or they are void
                    messages = self._received(self._socket)
                self._stream.on_disconnected()
            if is_connected:
                self._stream.on_connected()
            for frames in messages:
                self._on_message(frames)
            for frames in replayed:
                self._on_replayed(frames)
            if messages:
                self.lag_seconds = max(0.0, self._wall_clock() - self._stream.last_timestamp)
            self._stream.tick()
            self._report_engine()
            first = self._stream.take_replay()
            self._changed.notify_all()
        if first is not None:
            self._request_replay(first)

    def close(self) -> None:
        """Close the sockets."""
        self._socket.disable_monitor()
        for socket in (self._socket, self._replay):
            if socket is not None:
                socket.close(linger=0)

    def _on_message(self, frames: list[bytes]) -> None:
        if len(frames) == 3 and len(frames[1]) == _NUMBER_BYTES:
            self._stream.on_message(int.from_bytes(frames[1], "big"), frames[2])
        else:
            self.malformed_frames += 1

    def _on_replayed(self, frames: list[bytes]) -> None:
        if len(frames) != 4 or len(frames[2]) != _NUMBER_BYTES:
            self.malformed_frames += 1
        elif frames[2] == _END:
            self._stream.on_replay_end()
        else:
            self._stream.on_replayed(int.from_bytes(frames[2], "big"), frames[3])

    def _report_engine(self) -> None:
        is_gone = self._stream.is_engine_gone
        if is_gone != self._was_gone:
            self._was_gone = is_gone
            _log.log(
                logging.WARNING if is_gone else logging.INFO,
                "the engine at %s is %s",
                self._endpoints.endpoint,
                "not connected: its blocks are not reported" if is_gone else "connected",
            )
            self._on_engine(not is_gone)

    def _connection_changes(self) -> tuple[bool, bool]:
        """Return whether the connection broke, and whether there is one after that."""
        is_broken = is_connected = False
        for frames in self._received(self._monitor):
            event = int.from_bytes(frames[0][:2], "little")
            is_connected = event != self._zmq.EVENT_DISCONNECTED
            is_broken = is_broken or not is_connected
        return is_broken, is_connected

    def _received(self, socket: Any) -> list[list[bytes]]:
        found: list[list[bytes]] = []
        left = math.inf if self._limits is None else self._limits.step_bytes
        try:
            while len(found) < _MOST_AT_ONCE and left > 0:
                found.append(socket.recv_multipart(self._zmq.NOBLOCK))
                left -= sum(map(len, found[-1]))
        except self._zmq.Again:
            pass
        return found

    def _request_replay(self, first: int) -> None:
        if self._replay is not None:
            self._replay.close(linger=0)
        self._replay = self._new_socket(self._zmq.DEALER)
        self._replay.setsockopt(self._zmq.RCVHWM, 0 if self._limits is None else self._limits.replayed_messages)
        self._replay.connect(self._endpoints.replay_endpoint)
        self._replay.send_multipart([b"", first.to_bytes(_NUMBER_BYTES, "big")])

    def _new_socket(self, kind: int) -> Any:
        socket = self._context.socket(kind)
        socket.setsockopt(self._zmq.LINGER, 0)
        socket.setsockopt(self._zmq.RECONNECT_IVL, _RECONNECT_MS)
        socket.setsockopt(self._zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
        # A host that vanished without a word, or a connection that a firewall forgot, would look like a quiet engine.
        socket.setsockopt(self._zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        socket.setsockopt(self._zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
        if self._limits is not None:
            socket.setsockopt(self._zmq.MAXMSGSIZE, self._limits.frame_bytes)
        if "[" in self._endpoints.endpoint:
            socket.setsockopt(self._zmq.IPV6, 1)
        return socket
