"""Blocks of storages that an engine published as stored, until the manager's events say that they are gone.

An engine knows which blocks it wrote, and not which of them the manager evicts. The manager publishes that
(`kvcm.storage_events.sockets`), by the hashes of the engine's own events: so the engine can publish the removals, too.

Invariants:

1. A block is published as stored once, and again only after its removal was.
2. A removal is published when the manager's events say that the block is gone; or when they were interrupted, and the
   block is not among those that they name within `doubt_seconds` after that.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeGuard

from kvcm.connectors.events.decoding import AllBlocksCleared, BlockRemoved, BlockStored, Event, EventHash
from kvcm.connectors.events.engine_source import EngineSource, RankEndpoints
from kvcm.connectors.events.packages import zmq
from kvcm.connectors.events.stream import EventStream, StreamSettings

__all__ = ["PublishedBlocks", "StorageWatch"]

_DOUBT_SECONDS: Final = 30.0  # in which a manager that started has compared all blocks
_MOST_BLOCKS: Final = 1_000_000  # some 200 MB; beyond, the oldest are published as removed
_JOIN_SECONDS: Final = 2.0


class PublishedBlocks:
    """The published blocks of one engine. Not safe to use from several threads.

    Args:
        on_gone: gets the name of each block whose removal is to be published now.
        clock: seconds of a clock that never runs backwards.
        doubt_seconds: that blocks have to be named again in.
        most_blocks: that are remembered.
    """

    def __init__(
        self,
        on_gone: Callable[[EventHash], None],
        clock: Callable[[], float] = time.monotonic,
        doubt_seconds: float = _DOUBT_SECONDS,
        most_blocks: int = _MOST_BLOCKS,
    ) -> None:
        self._on_gone = on_gone
        self._clock = clock
        self._doubt_seconds = doubt_seconds
        self._most_blocks = most_blocks
        self._names: dict[int, EventHash] = {}  # by the 64 bits that the manager has, the oldest first
        self._doubtful: dict[int, None] = {}
        self._doubt_until = 0.0

    def publish(self, bits: int, name: EventHash) -> bool:
        """Remember a block that is stored now; return whether that is to be published.

        Args:
            bits: 64 bits of its hash without sign, as the manager's events have them.
            name: as the engine's events have it.
        """
        if bits in self._names:
            return False
        if len(self._names) >= self._most_blocks:
            self._drop(next(iter(self._names)))
        self._names[bits] = name
        return True

    def apply(self, events: Iterable[Event]) -> None:
        """Take events of the manager."""
        for event in events:
            if isinstance(event, BlockStored):
                for bits in filter(_is_number, event.hashes):
                    self._doubtful.pop(bits, None)
            elif isinstance(event, BlockRemoved):
                for bits in filter(_is_number, event.hashes):
                    self._drop(bits)
            else:
                assert isinstance(event, AllBlocksCleared), event
                self.doubt()

    def doubt(self) -> None:
        """Take that events may be missing: blocks that are not named again are gone."""
        self._doubtful = dict.fromkeys(self._names)
        self._doubt_until = self._clock() + self._doubt_seconds

    def expire(self) -> None:
        """Take blocks for gone that were not named again in time; to be called now and then."""
        if self._doubtful and self._clock() >= self._doubt_until:
            for bits in list(self._doubtful):
                self._drop(bits)

    def _drop(self, bits: int) -> None:
        name = self._names.pop(bits, None)
        self._doubtful.pop(bits, None)
        if name is not None:
            self._on_gone(name)


def _is_number(name: EventHash) -> TypeGuard[int]:
    return isinstance(name, int)


class StorageWatch:
    """Follows the events of a manager in a thread of its own. Safe to use from several threads.

    Args:
        endpoint: of the manager's PUB socket.
        replay_endpoint: of its ROUTER socket, "" for none.
        on_gone: gets the name of each block that is gone, in the order of `publish`; must not call back.

    Raises:
        UnsupportedError: a package is not installed.
    """

    def __init__(self, endpoint: str, replay_endpoint: str, on_gone: Callable[[EventHash], None]) -> None:
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._blocks = PublishedBlocks(on_gone)
        settings = StreamSettings(has_replay=bool(replay_endpoint))
        stream = EventStream(settings, self._blocks.apply, self._blocks.doubt, time.monotonic)
        self._context: Any = zmq().Context()
        endpoints = RankEndpoints(endpoint, replay_endpoint)
        source = EngineSource(self._context, endpoints, stream, self._changed, lambda _is_back: None)
        name = "kvcm-storage-events"
        self._reading = threading.Thread(target=source.run, args=(self._stop,), name=name, daemon=True)
        self._reading.start()

    def publish(self, digest: bytes, name: EventHash, emit: Callable[[], None]) -> None:
        """Publish that a block is stored, unless that was published and it is not gone since.

        Args:
            digest: the full hash of the block.
            name: as the engine's events have it.
            emit: publishes it.
        """
        with self._changed:
            if self._blocks.publish(int.from_bytes(digest[-8:], "big"), name):
                emit()

    def expire(self) -> None:
        """See `PublishedBlocks.expire`."""
        with self._changed:
            self._blocks.expire()

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        self._reading.join(_JOIN_SECONDS)
        self._context.destroy(linger=0)
