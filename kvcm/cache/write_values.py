"""Values of the two-phase write, and the table of open write sessions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvcm.cache.deadlines import DeadlineTable
from kvcm.cache.instance_cache import InstanceCache
from kvcm.model.masks import BlockMask

__all__ = ["FinishedWrite", "OpenSessions", "StartedWrite", "WriteRequest", "WriteSession"]


@dataclass(frozen=True, slots=True)
class WriteRequest:
    """What a writer wants to store.

    Attributes:
        keys: block keys of one prefix chain, in order.
        spec_groups: empty for all specs, or one spec group per key.
        timeout_seconds: life of the session; 0 and less is the default, more than an hour is an hour.
        min_replica_count: a block is skipped only when it has so many available replicas; 0 is 1.
        parent_key: key before `keys[0]`, None at the head of a chain.
    """

    keys: Sequence[int]
    spec_groups: Sequence[str] = ()
    timeout_seconds: int = 0
    min_replica_count: int = 0
    parent_key: int | None = None

    @property
    def replicas(self) -> int:
        """Available replicas that make a block complete, 1 at least."""
        return max(1, self.min_replica_count)


@dataclass(frozen=True, slots=True)
class WriteSession:
    """An open session.

    Attributes:
        id: 128 random bits, the only right to finish it.
        cache: the instance it belongs to.
        deadline: unix seconds.
        location_id: id of every location that it writes.
        keys: blocks to be written, in the order of the answer.
    """

    id: str
    cache: InstanceCache
    deadline: float
    location_id: str
    keys: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StartedWrite:
    """Answer to a start.

    Attributes:
        session: the open session.
        mask: which of the request's keys need not be written.
        chunks: where to write the others, encoded as field 2 of an answer, in request order.
        refused: number of blocks that were masked because they do not fit.
        refusal: why not; "" when all do.
    """

    session: WriteSession
    mask: BlockMask
    chunks: Sequence[bytes]
    refused: int = 0
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class FinishedWrite:
    """Outcome of a session.

    Attributes:
        served: blocks that became serving.
        dropped: blocks that were reported as failed.
        vanished: blocks reported as successful that were removed meanwhile.
    """

    served: int
    dropped: int
    vanished: int


class OpenSessions:
    """Open write sessions, found by their id and by the id of the locations that they write."""

    def __init__(self) -> None:
        self._table: DeadlineTable[WriteSession] = DeadlineTable()
        self._by_location: dict[str, WriteSession] = {}

    def __len__(self) -> int:
        return len(self._table)

    def put(self, session: WriteSession) -> None:
        """Add a session, or replace it by a changed one."""
        self._table.put(session)
        self._by_location[session.location_id] = session

    def get(self, session_id: str) -> WriteSession | None:
        """Return an open session, None when there is none of that id."""
        return self._table.get(session_id)

    def take(self, session_id: str) -> WriteSession | None:
        """Remove and return an open session, None when there is none of that id."""
        session = self._table.take(session_id)
        if session is not None:
            self._by_location.pop(session.location_id, None)
        return session

    def pop_due(self, now: float, most: int | None) -> list[WriteSession]:
        """Remove and return the sessions that are overdue, earliest first, at most so many."""
        due = self._table.pop_due(now, most)
        for session in due:
            self._by_location.pop(session.location_id, None)
        return due

    def of(self, cache: InstanceCache) -> list[WriteSession]:
        """Return the open sessions of an instance."""
        return [session for session in self._table.values() if session.cache is cache]

    def deadline_of_writer(self, location_id: str) -> float:
        """Return the deadline of the session that writes a location, 0 when that has ended."""
        session = self._by_location.get(location_id)
        return session.deadline if session is not None else 0.0
