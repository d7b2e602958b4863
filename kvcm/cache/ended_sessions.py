"""How write sessions ended, remembered for a while: a finish that is repeated is answered as the first one was.

A client whose manager does not answer in time asks the next one, and cannot know how far the first one came. While a
session is stored with its decision, whoever is asked carries that out; after that only what is kept here knows of it.

* It is written in the step that removes the session, so of two managers that carry out one decision one tells what
  counts, and it outlives managers.
* It is bounded: by `REPEAT_SECONDS`, and in number for each manager. It has no keys, and a bit per block at most.
* Sessions that nobody finished are not remembered: to their writers they are unknown.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress, count
from operator import ne
from typing import Final

import msgspec
import numpy as np

from kvcm.cache.write_values import FinishedWrite, WriteSession
from kvcm.model.clock import Clock
from kvcm.model.errors import InvalidArgumentError, StorageIOError
from kvcm.store.store import Table

__all__ = ["REPEAT_SECONDS", "EndedSession", "EndedSessions", "check_same"]

REPEAT_SECONDS: Final = 60.0
"""For so long after a session ended its finish may be repeated: longer than clients try a call, pauses included."""

_FORMAT: Final = 1
_MOST: Final = 100_000


class _Document(msgspec.Struct, array_like=True, frozen=True):
    version: int
    uid: int
    starter: str
    served: int
    dropped: int
    vanished: int
    succeeded: bytes | None  # a bit per block; None where those that succeeded come first


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Document)


@dataclass(frozen=True, slots=True)
class EndedSession:
    """A session that its writer ended.

    Attributes:
        uid: number of the instance that it belonged to.
        starter: name of the principal who may ask, "" for whoever knows its id.
        decision: per block whether it succeeded.
        finished: what the writer was told.
    """

    uid: int
    starter: str
    decision: tuple[bool, ...]
    finished: FinishedWrite

    def encoded(self) -> bytes:
        """Return it as it is stored."""
        served, dropped, vanished = self.finished.served, self.finished.dropped, self.finished.vanished
        # The blocks of a chain are written from its head, so this is nearly every session.
        is_prefix = all(self.decision[: served + vanished])
        succeeded = None if is_prefix else np.packbits(np.frombuffer(bytes(self.decision), np.uint8)).tobytes()
        return _encoder.encode(_Document(_FORMAT, self.uid, self.starter, served, dropped, vanished, succeeded))

    @classmethod
    def decoded(cls, stored: bytes) -> EndedSession:
        """Read what `encoded` wrote.

        Raises:
            StorageIOError: a newer release wrote it, or it is damaged.
        """
        try:
            found = _decoder.decode(stored)
        except ValueError as error:  # msgspec's errors are such
            raise StorageIOError(f"the stored end of a write session cannot be read: {error}") from error
        if found.version != _FORMAT:
            raise StorageIOError(
                f"the stored end of a write session has format {found.version}, this release knows {_FORMAT}: "
                "upgrade it first"
            )
        wanted = found.served + found.vanished
        if found.succeeded is None:
            decision = (True,) * wanted + (False,) * found.dropped
        else:
            bits = np.unpackbits(np.frombuffer(found.succeeded, np.uint8), count=wanted + found.dropped)
            decision = tuple(bits.astype(bool).tolist())
        return cls(found.uid, found.starter, decision, FinishedWrite(found.served, found.dropped, found.vanished))


class EndedSessions:
    """Remembers sessions that were finished.

    Args:
        table: of the sessions.
        clock: time source.
    """

    def __init__(self, table: Table, clock: Clock) -> None:
        self._table = table
        self._clock = clock
        self._until: deque[float] = deque()  # of those that this manager put there

    async def put(self, decided: WriteSession, finished: FinishedWrite) -> FinishedWrite:
        """Take a session that was carried out from the store; return what its writer is to be told: what another
        manager has told where that was faster."""
        assert decided.decision is not None
        now = self._clock.now()
        while self._until and self._until[0] <= now:
            self._until.popleft()
        if len(self._until) >= _MOST:
            await self._table.replace(decided.id, decided.encoded(), None)
            return finished
        ended = EndedSession(decided.uid, decided.starter, decided.decision, finished)
        if await self._table.conclude(decided.id, decided.encoded(), ended.encoded(), now, REPEAT_SECONDS):
            self._until.append(now + REPEAT_SECONDS)
            return finished
        told = await self.get(decided.id)
        return told.finished if told is not None else finished

    async def get(self, session_id: str) -> EndedSession | None:
        """Return how a session ended, None where it is not remembered."""
        stored = await self._table.outcome(session_id, self._clock.now())
        return EndedSession.decoded(stored) if stored is not None else None


def check_same(said: Sequence[bool], says: Sequence[bool]) -> None:
    """Return if a finish says of each block what an earlier finish of its session has said.

    Raises:
        InvalidArgumentError: it does not; the message tells what was said.
    """
    position = next(compress(count(), map(ne, said, says)), None)
    if position is not None:
        blocks = f"{sum(said)} of {len(said)} succeeded, position {position} {'did' if said[position] else 'did not'}"
        raise InvalidArgumentError(f"write_session_id was finished before, with other success_blocks: {blocks}")
