"""The last accesses of engines, kept in memory so that whoever tunes a manager can replay them.

A ring: what is new pushes out what is old, by the keys that are held. An access costs its request one copy of its keys
into an array, 8 bytes per key, and an append; nothing is encoded before somebody asks. While the ring is off nothing is
kept and nothing is built.

Rejected: a listener of the event log, which encodes every event whether anybody asks for it or not; the lists of keys
as they came, at 40 bytes per key.

Told in the format of events (wire.md 10.3), behind one line that says what is there: of type `recent`, with `from_us`
and `until_us` between which nothing is missing, `kept_events` and `kept_keys` that follow, and `dropped_events` and
`dropped_keys` that were pushed out since `started_us`.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from kvcm.telemetry.events import CACHE_MANAGER

__all__ = ["EVENT_KEYS", "RecentAccesses"]

EVENT_KEYS = 80
"""What an event takes beside its keys, in keys: some 600 bytes."""

_SLICE_KEYS = 4096  # some 100 µs of encoding

_encode = msgspec.json.Encoder().encode


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
    """

    def __init__(
        self,
        most_keys: int,
        now: Callable[[], float] = time.time,
        new_id: Callable[[], str] = lambda: secrets.token_hex(16),
    ) -> None:
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
            fields: what the type has beside its keys; JSON values that nobody changes afterwards.
            keys: of its blocks.
            flags: how many there are in the fields, such as those of a mask; each counts as a key.
        """
        weight = EVENT_KEYS + len(keys) + flags
        self._accesses.append(_Access(self._now(), source, event_type, fields, np.array(keys, np.int64), weight))
        self._weight += weight
        while self._weight > self._most_keys:
            self._drop()

    def _drop(self) -> None:
        oldest = self._accesses.popleft()
        self._weight -= oldest.weight
        self._dropped_events += 1
        self._dropped_keys += len(oldest.keys)
        self._from = oldest.at  # what follows is complete from then on

    async def lines(self) -> AsyncIterator[bytes]:
        """Yield what is there at the moment, oldest first, giving way to requests in between."""
        accesses = list(self._accesses)
        yield self._summary(accesses)
        page: list[bytes] = []
        weight = 0
        for access in accesses:
            page.append(self._line(access.at, access.source, CACHE_MANAGER, access.type, _told(access)))
            weight += access.weight
            if weight >= _SLICE_KEYS:
                yield b"".join(page)
                await asyncio.sleep(0)
                page, weight = [], 0
        yield b"".join(page)

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
        return self._line(now, "", "event_log", "recent", fields)

    def _line(self, at: float, source: str, component: str, event_type: str, fields: Mapping[str, Any]) -> bytes:
        envelope = {"id": self._new_id(), "source": source, "component": component, "type": event_type}
        return _encode({**envelope, "trigger_time_us": int(at * 1e6), **fields}) + b"\n"


def _told(access: _Access) -> Mapping[str, Any]:
    if not len(access.keys):
        return access.fields
    return {**access.fields, "keys": access.keys.tolist(), "tokens": []}
