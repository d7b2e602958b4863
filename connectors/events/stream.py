"""The messages of one rank in order: gaps, replays, and engines that start again. Without sockets or clock.

An engine numbers its messages from 0 and keeps the last ones for a replay. The number says nothing of which run of the
engine it belongs to, so a replay always begins with the last message that was applied: only if it comes back as it was,
the engine is the same and nothing is missing. Invariants:

1. The blocks are what the messages 0 … `last` of one run of the engine come to; or, where the first ones could not be
   read (`is_complete` is false), what a number of consecutive messages up to `last` come to. The engine then holds more
   than is known, and never less.
2. When it is not certain that no message is missing, the stream waits for a replay; when that does not bring certainty,
   everything is dropped (`on_lost`), and the stream begins from the next message.
3. Messages that come while a replay is awaited are kept, at most `most_waiting` of at most `most_waiting_bytes`, and
   applied behind it. Those that came before it was asked for are in it: engines publish a message before they answer a
   later request.
4. An engine that was not reached yet is like one whose connection broke: after a moment it counts as gone.
5. Another run is noticed by the break of the connection, and by a number 0 or one that does not go on.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from hashlib import blake2b

from kvcm.connectors.events.decoding import Event, EventBatch, decode_batch
from kvcm.model.errors import CapacityError

__all__ = ["EventStream", "StreamCounters", "StreamSettings"]

_log = logging.getLogger("kvcm.subscriber")
_FRUITLESS_REPLAYS = 3


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """How patient a stream is.

    Attributes:
        has_replay: whether the engine replays messages.
        replay_seconds: for a replay that says nothing.
        engine_seconds: for an engine whose connection broke; then its blocks count as gone.
        most_waiting: messages that are kept during a replay.
        most_waiting_bytes: of these; infinite for an engine that is trusted.
    """

    has_replay: bool = True
    replay_seconds: float = 10.0
    engine_seconds: float = 5.0
    most_waiting: int = 100_000
    most_waiting_bytes: float = math.inf


@dataclass(slots=True)
class StreamCounters:
    """Counts since the start of the process."""

    messages: int = 0
    events: dict[str, int] = field(default_factory=dict)
    unknown_events: int = 0
    malformed: int = 0
    gaps: int = 0
    replays: int = 0
    replayed_messages: int = 0
    replay_timeouts: int = 0
    engine_restarts: int = 0
    losses: int = 0
    """Times that everything was dropped since messages were missing."""


class _Mode(Enum):
    LIVE = auto()
    REPLAY = auto()


class EventStream:
    """One rank of an engine. Not safe to use from several threads.

    Args:
        settings: how patient to be.
        apply: applies events to the blocks; a CapacityError says that there are too many of them.
        on_lost: drops all blocks, since it is not known which of them are there.
        clock: seconds of a clock that never runs backwards.

    Attributes:
        counters: of what happened.
        is_complete: whether all that the engine holds is known.
        is_engine_gone: whether the engine is not connected, for longer than a moment.
        last: number of the last message that was applied, None before the first.
        last_timestamp: when the engine made it, in seconds since 1970.
    """

    def __init__(
        self,
        settings: StreamSettings,
        apply: Callable[[tuple[Event, ...]], None],
        on_lost: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._apply = apply
        self._on_lost = on_lost
        self._clock = clock
        self.counters = StreamCounters()
        self.is_complete = False
        self.is_engine_gone = False
        self.last: int | None = None
        self.last_timestamp = 0.0
        self._digest = b""
        self._mode = _Mode.LIVE
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._waiting_bytes = 0
        self._replay_from: int | None = None
        self._is_replay_due = False
        self._has_reply = False
        self._deadline = 0.0
        self._is_reached = False  # it was connected at least once
        self._broken_until: float | None = clock() + settings.engine_seconds
        self._has_tried_start = False  # since the connection was made
        self._fruitless = 0  # replays in a row that brought nothing new
        if settings.has_replay:
            self._begin_replay(0)

    @property
    def is_connected(self) -> bool:
        """Whether the engine was reached, and its connection is not broken for longer than a moment."""
        return self._is_reached and not self.is_engine_gone

    @property
    def is_waiting(self) -> bool:
        """Whether a replay is awaited."""
        return self._mode is _Mode.REPLAY

    def take_replay(self) -> int | None:
        """Return the number from which to ask for a replay now, None for nothing to ask. Earlier replays are void."""
        if not self._is_replay_due:
            return None
        self._is_replay_due = False
        return self._replay_from

    def on_message(self, number: int, payload: bytes) -> None:
        """A message came."""
        self.counters.messages += 1
        if self._mode is _Mode.REPLAY:
            self._waiting.append((number, payload))
            self._waiting_bytes += len(payload)
            while self._is_full():
                self._next_waiting()  # a gap behind the replay, which another one fills
        else:
            self._on_live(number, payload)

    def on_replayed(self, number: int, payload: bytes) -> None:
        """A message of a replay came."""
        if self._mode is not _Mode.REPLAY or self._is_replay_due:
            return  # of an earlier replay
        self._deadline = self._clock() + self._settings.replay_seconds
        is_first, self._has_reply = not self._has_reply, True
        if is_first and not self._accepts_first(number, payload):
            return
        self.counters.replayed_messages += 1
        if self.last is not None and number != self.last + 1:
            self._lose()
        self._take(number, payload)

    def on_replay_end(self) -> None:
        """A replay ended."""
        if self._mode is not _Mode.REPLAY or self._is_replay_due:
            return
        if not self._has_reply:
            if self.last is not None:  # the engine does not have the message that was last: it is another run
                self._restart_replay()
                return
            self.is_complete = True  # it published nothing yet
        self._end_replay()

    def on_disconnected(self) -> None:
        """The connection to the engine broke: it may have ended, and another one may take its place."""
        self._has_tried_start = False
        if not self._settings.has_replay:
            self._lose()
            self.is_engine_gone = True
            return
        if self._broken_until is None:
            self._broken_until = self._clock() + self._settings.engine_seconds
        self._mode = _Mode.REPLAY  # asked for when the connection is back
        self._replay_from, self._is_replay_due, self._has_reply = self.last or 0, False, False

    def on_connected(self) -> None:
        """The connection to the engine is there."""
        self._broken_until = None
        self._is_reached = True
        self.is_engine_gone = False
        if self._settings.has_replay:
            self._begin_replay(self.last or 0)

    def tick(self) -> None:
        """Give up what takes too long."""
        now = self._clock()
        if self._broken_until is not None:
            if now >= self._broken_until and not self.is_engine_gone:
                self.is_engine_gone = True
                self._lose()
                self._replay_from = 0
        elif self._mode is _Mode.REPLAY and now >= self._deadline:
            self._on_no_replay()

    # ---- live messages ----

    def _on_live(self, number: int, payload: bytes) -> None:
        last = self.last
        if last is None:
            is_start_missing = number > 0 and (self.is_complete or not self._has_tried_start)
            if is_start_missing and self._settings.has_replay:
                self._on_gap(number, payload)
                return
            self.is_complete = number == 0
            self._take(number, payload)
        elif number == last + 1:
            self._take(number, payload)
        elif number == 0:
            self._on_new_engine(payload)
        else:
            self._on_gap(number, payload)

    def _on_new_engine(self, payload: bytes) -> None:
        self.counters.engine_restarts += 1
        self._drop()
        self.is_complete = True
        self._take(0, payload)

    def _on_gap(self, number: int, payload: bytes) -> None:
        """A message has another number than the next one: messages are missing, or the engine is another run."""
        self.counters.gaps += 1
        if not self._settings.has_replay:
            self._lose()
            self._take(number, payload)
        elif self._fruitless < _FRUITLESS_REPLAYS:
            self._fruitless += 1
            self._begin_replay(self.last or 0)
        else:
            # Replays lack messages that were published: nothing is certain, this message included.
            self._fruitless = 0
            self._lose()

    def _take(self, number: int, payload: bytes) -> None:
        """Apply the next message."""
        self._fruitless = 0
        self.last, self._digest = number, _digest(payload)
        batch = decode_batch(payload)
        self._count(batch)
        self.last_timestamp = batch.timestamp or self.last_timestamp
        is_lossy = batch.is_lossy
        try:
            self._apply(batch.events)
        except CapacityError as error:
            _log.warning("message %d is not applied, and all blocks are dropped: %s", number, error)
            is_lossy = True
        except Exception:  # a message must not end the process, whatever is in it
            _log.exception("message %d cannot be applied: all blocks are dropped", number)
            self.counters.malformed += 1
            is_lossy = True
        if is_lossy:
            self._lose()
            self.last, self._digest = number, _digest(payload)  # the numbers go on

    def _count(self, batch: EventBatch) -> None:
        self.counters.unknown_events += batch.unknown
        self.counters.malformed += batch.malformed
        counted = self.counters.events
        for event in batch.events:
            name = type(event).__name__
            counted[name] = counted.get(name, 0) + 1

    # ---- replays ----

    def _begin_replay(self, number: int) -> None:
        self._mode = _Mode.REPLAY
        self._replay_from, self._is_replay_due, self._has_reply = number, True, False
        self._waiting_bytes = 0
        self._waiting.clear()  # a replay that is asked for now has all that was published so far
        self._deadline = self._clock() + self._settings.replay_seconds
        self._has_tried_start = self._has_tried_start or number == 0
        self.counters.replays += 1

    def _accepts_first(self, number: int, payload: bytes) -> bool:
        """Handle the first message of a replay; return whether it is to be applied."""
        last = self.last
        if last is None:
            self.is_complete = number == 0
            return True
        if number == last and _digest(payload) == self._digest:
            return False  # as it was: the same run, and nothing is missing so far
        if number > last:
            self._lose()  # the engine kept none of those between
            return True
        self._restart_replay()
        return False

    def _restart_replay(self) -> None:
        """The engine is another run: begin with its first message."""
        self.counters.engine_restarts += 1
        self._drop()
        self._begin_replay(0)

    def _on_no_replay(self) -> None:
        """A replay does not come, so the missing messages stay unknown."""
        self.counters.replay_timeouts += 1
        self._lose()
        self._end_replay()

    def _end_replay(self) -> None:
        """Apply the messages that waited; those that were replayed, too, are passed over."""
        self._mode = _Mode.LIVE
        covered = self.last
        while self._waiting and self._mode is _Mode.LIVE:
            number, payload = self._next_waiting()
            if covered is None or number > covered:
                self._on_live(number, payload)

    def _is_full(self) -> bool:
        settings = self._settings
        return len(self._waiting) > settings.most_waiting or self._waiting_bytes > settings.most_waiting_bytes

    def _next_waiting(self) -> tuple[int, bytes]:
        number, payload = self._waiting.popleft()
        self._waiting_bytes -= len(payload)
        return number, payload

    # ---- losses ----

    def _lose(self) -> None:
        """Drop everything, since messages are missing."""
        self.is_complete = False
        if self.last is not None:
            self.counters.losses += 1
            self._drop()

    def _drop(self) -> None:
        self.last, self._digest = None, b""
        self.is_complete = False
        self._on_lost()


def _digest(payload: bytes) -> bytes:
    return blake2b(payload, digest_size=16).digest()
