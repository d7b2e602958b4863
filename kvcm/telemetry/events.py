"""Events of blocks as JSON lines: one queue, written to a file and streamed to subscribers; and recent accesses.

Publishing costs a request one append; it never waits and cannot fail. Without subscribers no event is built. A slow
subscriber loses events, never memory or time of the manager, and gets a line with their number. The file is a
subscriber like any other, so a disk that hangs delays no other one.

The format is that of the original (wire.md 10.3): an envelope of `id`, `source`, `component`, `type` and
`trigger_time_us`, and the event's own fields beside it. Keys are JSON numbers, as there.

Rejected: to call each subscriber at every event, which would put its cost and its failures into requests; a queue
bounded by the number of events alone, since one may hold 65,536 keys.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from io import BufferedWriter
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import structlog

__all__ = ["CACHE_MANAGER", "CACHE_RECLAIMER", "EVENT_KEYS", "Event", "EventLog", "RecentAccesses", "Subscription"]

CACHE_MANAGER = "cache_manager"
CACHE_RECLAIMER = "cache_reclaimer"
_MAX_QUEUED_WEIGHT = 1 << 20  # waiting keys: some 32 MiB
_EVENT_WEIGHT = 16
_HEAVY = 4096  # some 100 µs of encoding: done beside the loop
_MAX_LINE_BYTES = 16 << 20  # per subscriber
_BATCH = 4096  # weight that is dispatched before other tasks have a turn
_MIN_BATCH = 64  # least weight of an event in a batch
_CLOSE_SECONDS = 5.0
_encode = msgspec.json.Encoder().encode
_log = structlog.get_logger("kvcm.telemetry")


class Event(NamedTuple):
    """An event.

    Attributes:
        at: unix seconds.
        source: the instance.
        component: that publishes it.
        type: of the event.
        fields: of the type, beside the envelope; JSON values.
    """

    at: float
    source: str
    component: str
    type: str
    fields: Mapping[str, Any]

    @property
    def weight(self) -> int:
        """Its size, in keys."""
        return _EVENT_WEIGHT + sum(len(value) for value in self.fields.values() if isinstance(value, Sequence))


class Subscription:
    """Lines for one subscriber, from its start on. Closed by its owner, or by the log when that stops."""

    def __init__(self, forget: Callable[[Subscription], None]) -> None:
        self._forget = forget
        self._lines: deque[bytes] = deque()
        self._bytes = 0
        self._missed = 0
        self._changed = asyncio.Event()
        self._is_over = False
        self.lost = 0

    def put(self, line: bytes, lost_line: Callable[[int], bytes]) -> None:
        """Add a line if it fits; before the first line after a loss, add one with the number of lost lines."""
        if self._lines and self._bytes + len(line) > _MAX_LINE_BYTES:
            self._missed += 1
            self.lost += 1
            return
        if self._missed:
            self._add(lost_line(self._missed))
            self._missed = 0
        self._add(line)

    def _add(self, line: bytes) -> None:
        self._lines.append(line)
        self._bytes += len(line)
        self._changed.set()

    def close(self) -> None:
        """Receive no more lines; pending lines can still be read."""
        self._is_over = True
        self._changed.set()
        self._forget(self)

    def pop_pending(self) -> list[bytes]:
        """Remove and return the pending lines."""
        lines = list(self._lines)
        self._lines.clear()
        self._bytes = 0
        return lines

    def __aiter__(self) -> Subscription:
        return self

    async def __anext__(self) -> bytes:
        """Return the pending lines, at least one; waits for it."""
        lines = await self.pop_all()
        if not lines:
            raise StopAsyncIteration
        return b"".join(lines)

    async def pop_all(self) -> list[bytes]:
        """Remove and return the pending lines; waits for one, and returns none at the end."""
        while not self._lines and not self._is_over:
            self._changed.clear()
            await self._changed.wait()
        return self.pop_pending()


class EventLog:
    """Events of this manager.

    Args:
        path: file for events, one JSON object per line; "" for none.
        max_bytes: size at which the file becomes `<path>.1`, in place of an earlier one.
        now: time in unix seconds.
        new_id: makes ids of 32 characters.

    Attributes:
        is_active: whether there is a listener or a file; nothing needs to be built otherwise.
    """

    def __init__(
        self,
        path: str = "",
        max_bytes: int = 64 << 20,
        now: Callable[[], float] = time.time,
        new_id: Callable[[], str] = lambda: secrets.token_hex(16),
    ) -> None:
        self._now = now
        self._new_id = new_id
        self._queue: deque[tuple[Event, int]] = deque()
        self._weight = 0
        self._arrived = asyncio.Event()
        self._listeners: list[Subscription] = []
        self.is_active = False
        self._is_over = False
        self._file = _EventFile(Path(path), max_bytes) if path else None
        self._for_file = self.subscribe() if path else None
        self.published = 0
        self.dropped = 0

    @property
    def unwritten(self) -> int:
        """Events that the file lacks: it was too slow, or could not be written."""
        lost = self._for_file.lost if self._for_file is not None else 0
        return lost + (self._file.lost if self._file is not None else 0)

    def publish(self, source: str, component: str, event_type: str, fields: Mapping[str, Any]) -> None:
        """Publish an event. Never waits and never fails: an event that does not fit is dropped.

        Args:
            source: the instance.
            component: that publishes it.
            event_type: type of the event.
            fields: JSON values that do not change afterwards.
        """
        if not self._listeners:
            return
        event = Event(self._now(), source, component, event_type, fields)
        weight = event.weight
        if self._queue and self._weight + weight > _MAX_QUEUED_WEIGHT:
            self.dropped += 1
            return
        self.published += 1
        self._weight += weight
        self._queue.append((event, weight))
        self._arrived.set()

    def subscribe(self) -> Subscription:
        """Return the lines of later events, until the manager stops.

        A slow subscriber loses some, and finds a line of type `dropped` with their `count` instead.
        """
        subscription = Subscription(self._unsubscribe)
        if self._is_over:
            subscription.close()
        else:
            self._listeners.append(subscription)
            self.is_active = True
        return subscription

    def _unsubscribe(self, subscription: Subscription) -> None:
        with suppress(ValueError):  # closed twice
            self._listeners.remove(subscription)
        self.is_active = bool(self._listeners)

    async def run(self) -> None:
        """Dispatch events until cancelled; then subscriptions end."""
        writing = asyncio.create_task(self._write_file())
        try:
            while True:
                await self._arrived.wait()
                self._arrived.clear()
                await self._dispatch()
        except asyncio.CancelledError:
            self._stop()
            raise
        finally:
            writing.cancel()

    async def close(self) -> None:
        """Write the remaining events, for some seconds at most, after `run` has ended."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_SECONDS):
                await self._dispatch()
                if self._file is not None and self._for_file is not None:
                    await asyncio.to_thread(self._file.append, self._for_file.pop_pending())
        self._stop()

    def _stop(self) -> None:
        """End all subscriptions but that of the file, which gets the events of the shutdown; accept no new ones."""
        self._is_over = True
        for listener in list(self._listeners):
            if listener is not self._for_file:
                listener.close()

    async def _dispatch(self) -> None:
        encoded = 0
        while self._queue:
            event, weight = self._queue.popleft()
            self._weight -= weight
            if weight < _HEAVY:
                line = self._line(event)
                encoded += max(weight, _MIN_BATCH)
            else:
                line = await asyncio.to_thread(self._line, event)
            for listener in self._listeners:
                listener.put(line, self._lost_line)
            if encoded >= _BATCH:
                encoded = 0
                await asyncio.sleep(0)

    def _line(self, event: Event) -> bytes:
        envelope = {
            "id": self._new_id(),
            "source": event.source,
            "component": event.component,
            "type": event.type,
            "trigger_time_us": int(event.at * 1e6),
        }
        return _encode(envelope | dict(event.fields)) + b"\n"

    def _lost_line(self, count: int) -> bytes:
        return self._line(
            Event(at=self._now(), source="", component="event_log", type="dropped", fields={"count": count})
        )

    async def _write_file(self) -> None:
        if self._file is not None and self._for_file is not None:
            while lines := await self._for_file.pop_all():
                await asyncio.to_thread(self._file.append, lines)


class _EventFile:
    """A file of lines that is rotated when it is full."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._lock = Lock()
        self._is_failing = False
        self._is_stuck = False
        self.lost = 0

    def append(self, lines: Sequence[bytes]) -> None:
        """Write lines. Lines that cannot be written are lost; that is logged once."""
        with self._lock:
            left = deque(lines)
            try:
                self._append(left)
            except OSError as error:
                self.lost += len(left)
                if not self._is_failing:
                    _log.warning("events_not_written", file=str(self._path), reason=str(error))
                self._is_failing = True
            else:
                self._is_failing = False

    def _append(self, left: deque[bytes]) -> None:
        """Write lines, and remove the written ones from `left`."""
        is_stuck = False
        while left:
            with self._open() as file:
                size = file.tell()
                batch = list(left) if is_stuck else self._fitting(left, size)
                file.write(b"".join(batch))
            for _ in batch:
                left.popleft()
            if left:
                is_stuck = not self._rotate()

    def _fitting(self, lines: Iterable[bytes], size: int) -> list[bytes]:
        """Return the first lines that fit into a file of that size: at least one if it is empty."""
        batch: list[bytes] = []
        for line in lines:
            if size and size + len(line) > self._max_bytes:
                break
            batch.append(line)
            size += len(line)
        return batch

    def _rotate(self) -> bool:
        """Rename the full file. If its directory is not writable, the file grows beyond its limit."""
        try:
            self._path.replace(f"{self._path}.1")
        except OSError as error:
            if not self._is_stuck:
                _log.warning("event_file_not_put_aside", file=str(self._path), reason=str(error))
            self._is_stuck = True
        else:
            self._is_stuck = False
        return not self._is_stuck

    def _open(self) -> BufferedWriter:
        # The id of a write session is the right to finish it: only the owner may read the file.
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        return os.fdopen(descriptor, "ab")


# Recent accesses of engines, kept in memory so that `kvcm optimize --from` can replay them.
#
# A ring buffer, bounded by the number of keys. An access costs its request one copy of its keys into an array, 8 bytes
# per key, and an append; lines are encoded when they are read. While the ring is off it keeps nothing.
#
# Rejected: a subscriber of the event log, for which every event would be encoded whether it is read or not; the lists
# of keys as they came, at 40 bytes per key.
#
# Lines have the format of events (wire.md 10.3). The first one is a summary of type `recent`, with `from_us` and
# `until_us` between which no access is missing, `kept_events` and `kept_keys` that follow, and `dropped_events` and
# `dropped_keys` since `started_us`.

EVENT_KEYS = 80
"""Size of an event beside its keys, in keys: some 600 bytes."""
_SLICE_KEYS = 4096  # some 100 µs of encoding


class _Access(NamedTuple):
    at: float
    source: str
    type: str
    fields: Mapping[str, Any]
    keys: npt.NDArray[np.int64]
    weight: int


class RecentAccesses:
    """The ring of one manager.

    Args:
        most_keys: how many keys it holds, an event counting as `EVENT_KEYS` more; 0 is off. It takes up to 8 bytes for
            each.
        now: time in unix seconds.
        new_id: makes ids of 32 characters.
        original: returns the keys of an event for those that were kept.
    """

    def __init__(
        self,
        most_keys: int,
        now: Callable[[], float] = time.time,
        new_id: Callable[[], str] = lambda: secrets.token_hex(16),
        original: Callable[[Sequence[int]], Sequence[int]] = list,
    ) -> None:
        self._original = original
        self._most_keys = most_keys
        self._now = now
        self._new_id = new_id
        self._accesses: deque[_Access] = deque()
        self._weight = 0
        self._started = now()
        self._from = self._started
        self._dropped_events = self._dropped_keys = 0
        self.is_active = most_keys > 0

    def add(
        self, source: str, event_type: str, fields: Mapping[str, Any], keys: Sequence[int] = (), *, flags: int = 0
    ) -> None:
        """Keep an access. Never waits and never fails.

        Args:
            source: the instance.
            event_type: as in events.
            fields: of the type, beside its keys; JSON values that do not change afterwards.
            keys: of its blocks.
            flags: number of flags in the fields, such as those of a mask; each counts as a key.
        """
        weight = EVENT_KEYS + len(keys) + flags
        access = _Access(
            at=self._now(), source=source, type=event_type, fields=fields, keys=np.array(keys, np.int64), weight=weight
        )
        self._accesses.append(access)
        self._weight += weight
        while self._weight > self._most_keys:
            self._drop()

    def _drop(self) -> None:
        oldest = self._accesses.popleft()
        self._weight -= oldest.weight
        self._dropped_events += 1
        self._dropped_keys += len(oldest.keys)
        self._from = oldest.at  # the ring is complete from then on

    async def lines(self) -> AsyncIterator[bytes]:
        """Yield the summary and the present accesses, oldest first, with turns for requests in between."""
        accesses = list(self._accesses)
        yield self._summary(accesses)
        batch: list[bytes] = []
        weight = 0
        for access in accesses:
            batch.append(self._line(access.at, access.source, CACHE_MANAGER, access.type, self._format(access)))
            weight += access.weight
            if weight >= _SLICE_KEYS:
                yield b"".join(batch)
                await asyncio.sleep(0)
                batch, weight = [], 0
        yield b"".join(batch)

    def _format(self, access: _Access) -> Mapping[str, Any]:
        if not len(access.keys):
            return access.fields
        return {**access.fields, "keys": self._original(access.keys.tolist()), "tokens": []}

    def _summary(self, accesses: Sequence[_Access]) -> bytes:
        now = self._now()
        fields = {
            "started_us": int(self._started * 1e6),
            "from_us": int(self._from * 1e6),
            "until_us": int(now * 1e6),
            "most_keys": self._most_keys,
            "kept_events": len(accesses),
            "kept_keys": sum(len(access.keys) for access in accesses),
            "dropped_events": self._dropped_events,
            "dropped_keys": self._dropped_keys,
        }
        return self._line(at=now, source="", component="event_log", event_type="recent", fields=fields)

    def _line(self, at: float, source: str, component: str, event_type: str, fields: Mapping[str, Any]) -> bytes:
        envelope = {"id": self._new_id(), "source": source, "component": component, "type": event_type}
        return _encode({**envelope, "trigger_time_us": int(at * 1e6), **fields}) + b"\n"
