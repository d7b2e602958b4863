"""Write sessions: the lease between StartWriteCache and FinishWriteCache, from start to end.

A session is a document of the store, so any manager can finish a session that another manager started.

::

    start    plan → reserve → allocate addresses → store the session → store its blocks (writing)
    finish   decide (compare-and-set of the document) → the blocks follow → the outcome replaces the document, of which
             the last may come after the answer (`shared_writes.py`)
    expire   as finish, decided as failed at the deadline
    abort    as finish, decided as failed by the start that could not complete

Invariants:

* 2: two writers never hold a writing location of the same block and spec. The location is added in the same
  compare-and-set that checks for another one (`_add_locations`).
* 3: a session ends exactly once. Of a finish, an expiry and another finish exactly one replaces the open document by a
  decision (`_decide`). Every manager that finds a decision carries it out; doing so twice changes nothing, and a
  removed block is never revived (`apply_decision`). So a decided finish is never lost. On a store of this manager
  alone, a few blocks that all succeeded follow, and the outcome is stored, before any other call runs: then there is no
  decision in between (`_ends_in_one_step`). Of a crash in the middle the blocks that serve stay, and the session is
  open: a repeated finish has the same answer.
* The session is stored before its blocks (design.md decision 3): its end rolls back all of them. A block that came too
  late carries session and deadline itself, and is repaired from its record alone (`expire_writers`).
* Addresses come before both, all or none: a storage that rejects them leaves nothing to undo, and the write is planned
  again without that storage in the same call.
* A repeated finish gets the first answer for `REPEAT_SECONDS`: the outcome is written in the step that removes the
  document, so of two managers that carry out one decision one answer counts. Outcomes are bounded in time and number;
  expired sessions leave none.

Checksums are part of the decision, so every manager that carries it out writes the same ones. They are kept by name,
since blocks of one session need not have the same parts: a row per key, 8 bytes for every name, 0 for none. The manager
never sees the bytes and trusts its writers.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import compress, count, groupby
from operator import ne, not_
from typing import Final, NamedTuple, cast

import msgspec
import numpy as np
import structlog

from kvcm.cache.instance_cache import BATCH_KEYS, InstanceCache, OpenCaches, batches, yield_to_others
from kvcm.cache.prefix_match import NO_OBSERVER, CacheObserver, WriteEnd
from kvcm.cache.quotas import Ledger, Limits, MetadataDisk, Reservation
from kvcm.cache.shared_writes import Conclusion, Decided, Document, SharedWrites
from kvcm.cache.write_plan import (
    NodeStorages,
    PlannedRun,
    Specs,
    WritePlan,
    WritePlanner,
    candidates,
    missing_specs,
    plan_write,
)
from kvcm.index.backends.backend import Change, UniformRun
from kvcm.index.change_events import ChangeEvents
from kvcm.index.locking import uninterrupted
from kvcm.model.clock import Clock
from kvcm.model.errors import CapacityError, InvalidArgumentError, KvcmError, NotReadyError, StorageIOError
from kvcm.model.groups import InstanceGroup
from kvcm.model.instances import Instance, LocationSpecInfo
from kvcm.model.keys import BlockMask, encode_keys, mixed, unmixed_key
from kvcm.model.locations import (
    BlockRecord,
    BlockRun,
    Location,
    LocationStatus,
    encode_chunks,
    uris_of,
    with_checksums,
    with_event_hashes,
)
from kvcm.model.principals import UNRESTRICTED, call_context
from kvcm.storage.backend import Allocation, Parts, StorageBackend, is_full
from kvcm.store.memory import DueQueue
from kvcm.store.store import Table
from kvcm.telemetry.events import EventLog
from kvcm.telemetry.metrics import measure, timed
from kvcm.telemetry.tracing import staged

__all__ = [
    "NO_CHECKSUMS",
    "NO_HINT",
    "REPEAT_SECONDS",
    "Checksums",
    "Creations",
    "EndedSession",
    "EndedSessions",
    "FinishedWrite",
    "LocationChecksums",
    "OpenSession",
    "OpenSessions",
    "PlacedRun",
    "ReportedChecksums",
    "Retention",
    "SessionStore",
    "StartedWrite",
    "WriteRequest",
    "WriteSession",
    "WriteSessions",
    "apply_decision",
    "checksums_of",
    "timeout_seconds",
]

_CHECKSUM_BYTES = 8
_BATCH_LOCATIONS = 16  # with a thousand parts each some ten milliseconds of the event loop
_BATCH_ROWS = 256
_NO_ROW: dict[str, int] = {}
_ONLY_PART = ""  # stands for the part of a location that has one only; no spec has this name


class LocationChecksums(NamedTuple):
    """Checksums that a writer reports of one location.

    Attributes:
        specs: names and checksums of its parts; 0 is none.
        checksum: of its only part, when it has only one and `specs` has none for it; 0 is none.
    """

    specs: Sequence[tuple[str, int]]
    checksum: int = 0


ReportedChecksums = Sequence[LocationChecksums]
"""Nothing, or one entry per location of the session."""


class Checksums(NamedTuple):
    """The checksums of a session.

    Attributes:
        names: of parts.
        values: a row per key of the session, in each one per name: 64 bits, 0 for none. Empty without names.
    """

    names: tuple[str, ...] = ()
    values: bytes = b""

    def by_key(self, keys: Sequence[int], begin: int, end: int) -> dict[int, dict[str, int]]:
        """Return the checksums of the keys from `begin` to before `end`, by name, 0 for none; keys without any are left
        out."""
        if not self.names:
            return {}
        row_bytes = len(self.names) * _CHECKSUM_BYTES
        values = iter(array("Q", self.values[begin * row_bytes : end * row_bytes]))
        rows = {key: dict(zip(self.names, values, strict=False)) for key in keys[begin:end]}
        return {key: row for key, row in rows.items() if any(row.values())}


NO_CHECKSUMS = Checksums()


async def checksums_of(reported: ReportedChecksums, decision: Sequence[bool], spec_names: Collection[str]) -> Checksums:
    """Return the checksums of the written locations, yielding to other requests meanwhile.

    Args:
        reported: one entry per location of the session; any number where none has a checksum, as other clients send.
        decision: which of them were written; checksums of the others do not count.
        spec_names: of the instance.

    Raises:
        InvalidArgumentError: another number of entries, or a spec that is unknown or named twice.
    """
    if not reported:
        return NO_CHECKSUMS
    rows: dict[int, dict[str, int]] = {}
    for position, location in enumerate(reported):
        if position % _BATCH_LOCATIONS == 0:
            await asyncio.sleep(0)
        if not location.checksum and not any(checksum for _, checksum in location.specs):
            continue
        if len(reported) != len(decision):
            raise InvalidArgumentError(
                f"locations has {len(reported)} entries, must have none, or one per location that the start returned: "
                f"{len(decision)}"
            )
        if decision[position]:
            rows[position] = _checksum_row(position, location, spec_names)
    names = tuple(dict.fromkeys(name for row in rows.values() for name in row))
    if not names:
        return NO_CHECKSUMS
    values = array("Q")
    for position in range(len(decision)):
        if position % _BATCH_ROWS == 0:
            await asyncio.sleep(0)
        row = rows.get(position, _NO_ROW)
        values.extend([row.get(name, 0) for name in names])
    return Checksums(names, values.tobytes())


def _add_checksums(chunk: bytes, spec_names: Sequence[str], checksums: Mapping[str, int]) -> bytes:
    """Return the chunk of a written location with the checksums of its parts; those of other parts have no effect."""
    if checksums.get(_ONLY_PART) and len(spec_names) == 1:
        checksums = {spec_names[0]: checksums[_ONLY_PART]}
    return with_checksums(chunk, checksums) if checksums else chunk


def _checksum_row(position: int, location: LocationChecksums, spec_names: Collection[str]) -> dict[str, int]:
    row: dict[str, int] = {}
    for name, checksum in location.specs:
        if name not in spec_names:
            raise InvalidArgumentError(
                f"locations[{position}] names the spec {name!r}, the instance has {sorted(spec_names)}"
            )
        if name in row:
            raise InvalidArgumentError(f"locations[{position}] names the spec {name!r} twice, must name each once")
        row[name] = checksum
    row = {name: checksum for name, checksum in row.items() if checksum}
    return row or ({_ONLY_PART: location.checksum} if location.checksum else {})


# Requests, stored sessions, answers.

_SESSION_FORMAT = 1
_PRIORITIES = range(-100, 101)
_LAPSED = 1.0  # a deadline that no open session has; to releases that do not know it, one that is over like any other
_LONGEST_SECONDS = 1_000_000_000  # of a stored time; some thirty years, so that it fits wherever it is shown


@dataclass(frozen=True, slots=True)
class Retention:
    """A writer's hint how long blocks are worth keeping.

    Attributes:
        priority: blocks with a lower one are evicted first; the default is 0.
        ttl_seconds: the blocks are evicted after this time, even when there is space; 0 is no limit.
    """

    priority: int = 0
    ttl_seconds: int = 0

    def check(self) -> None:
        """Check the ranges.

        Raises:
            InvalidArgumentError: naming the field and the allowed values.
        """
        if self.priority not in _PRIORITIES:
            raise InvalidArgumentError(f"retention.priority is {self.priority}, must be from -100 to 100")
        if self.ttl_seconds < 0:
            raise InvalidArgumentError(f"retention.ttl_seconds is {self.ttl_seconds}, must be >= 0 (0 is no limit)")

    def keep_until(self, now: float) -> float:
        """Return the unix time at which blocks of a session that ends now have to go, 0 for never."""
        return now + min(self.ttl_seconds, _LONGEST_SECONDS) if self.ttl_seconds else 0.0


NO_HINT = Retention()


@dataclass(frozen=True, slots=True)
class WriteRequest:
    """A request to write blocks.

    Attributes:
        keys: block keys of one prefix chain, in order.
        spec_groups: empty for all specs, or one spec group per key.
        timeout_seconds: life of the session; 0 and less is the default, more than an hour is an hour.
        min_replica_count: a block is skipped only when it has so many available replicas; 0 is 1.
        parent_key: key before `keys[0]`, None at the head of a chain.
        node_id: the writer's node, whose memory pools it can write; "" for none.
        event_hashes: empty for none, or one int64 per key by which the engine's events name the block, 0 for none.
    """

    keys: Sequence[int]
    spec_groups: Sequence[str] = ()
    timeout_seconds: int = 0
    min_replica_count: int = 0
    parent_key: int | None = None
    node_id: str = ""
    event_hashes: Sequence[int] = ()

    @property
    def replicas(self) -> int:
        """Available replicas that make a block complete, 1 at least."""
        return max(1, self.min_replica_count)


class _SessionDocument(msgspec.Struct, array_like=True, frozen=True):
    version: int
    uid: int
    deadline: float
    location_id: str
    keys: bytes
    decision: bytes | None


class _HintedDocument(_SessionDocument, array_like=True, frozen=True):
    """With a writer's hint. A session without one is stored as ever: its document is compared byte by byte."""

    priority: int = 0
    keep_until: float = 0.0


class _CheckedDocument(_HintedDocument, array_like=True, frozen=True):
    """With the checksums of the parts, too, as `Checksums` has them."""

    checksum_names: tuple[str, ...] = ()
    checksums: bytes = b""


class _OwnedDocument(_CheckedDocument, array_like=True, frozen=True):
    """With the name of an authenticated principal."""

    starter: str = ""


_session_encoder = msgspec.msgpack.Encoder()
_session_decoder = msgspec.msgpack.Decoder(_OwnedDocument)


@dataclass(frozen=True, slots=True)
class WriteSession:
    """A session as it is stored.

    Attributes:
        id: 128 random bits, the capability to finish it.
        uid: number of the instance it belongs to.
        deadline: unix seconds.
        location_id: id of every location that it writes.
        keys: blocks to be written, in the order of the answer.
        decision: None while it is open; then per key whether it succeeded. Any manager that finds a decision carries it
            out, since the manager that made it may have died.
        priority: what its blocks have once they serve.
        keep_until: unix seconds when its blocks have to go, 0 for never.
        checksums: of its parts; these three are part of the decision.
        starter: name of the principal that may finish it; "" where the id is enough.
    """

    id: str
    uid: int
    deadline: float
    location_id: str
    keys: tuple[int, ...]
    decision: tuple[bool, ...] | None = None
    priority: int = 0
    keep_until: float = 0.0
    checksums: Checksums = NO_CHECKSUMS
    starter: str = ""

    @property
    def has_lapsed(self) -> bool:
        """Whether its deadline decided, and not its writer."""
        return self.decision is not None and self.deadline == _LAPSED

    def lapsed(self) -> WriteSession:
        """Return the session as its deadline decides it: nothing succeeded."""
        return replace(self, deadline=_LAPSED, decision=(False,) * len(self.keys))

    def encoded(self, before: bytes = b"") -> bytes:
        """Return the session's document; its id is the document's name.

        Args:
            before: a document of the session with the same keys, which are then not encoded again.
        """
        decision = bytes(self.decision) if self.decision is not None else None
        keys = _session_decoder.decode(before).keys if before else encode_keys(self.keys)
        fields = (_SESSION_FORMAT, self.uid, self.deadline, self.location_id, keys, decision)
        hint = (self.priority, self.keep_until)
        if self.starter:
            return _session_encoder.encode(_OwnedDocument(*fields, *hint, *self.checksums, self.starter))
        if self.checksums.names:
            return _session_encoder.encode(_CheckedDocument(*fields, *hint, *self.checksums))
        if any(hint):
            return _session_encoder.encode(_HintedDocument(*fields, *hint))
        return _session_encoder.encode(_SessionDocument(*fields))

    @classmethod
    def decoded(cls, session_id: str, document: bytes) -> WriteSession:
        """Read what `encoded` wrote.

        Raises:
            StorageIOError: a newer release wrote it, or it is damaged.
        """
        try:
            stored = _session_decoder.decode(document)
            keys = mixed(array("q", stored.keys))
        except ValueError as error:  # msgspec's errors are such, too
            raise StorageIOError(f"a stored write session cannot be read: {error}") from error
        if stored.version != _SESSION_FORMAT:
            raise StorageIOError(
                f"a stored write session has format {stored.version}, this release knows {_SESSION_FORMAT}: "
                "upgrade it first"
            )
        decision = tuple(map(bool, stored.decision)) if stored.decision is not None else None
        checksums = Checksums(stored.checksum_names, stored.checksums)
        if len(checksums.values) != len(keys) * len(checksums.names) * _CHECKSUM_BYTES:
            raise StorageIOError("a stored write session cannot be read: it has not one checksum per key and name")
        hint = (stored.priority, stored.keep_until)
        end = (decision, *hint, checksums, stored.starter)
        return cls(session_id, stored.uid, stored.deadline, stored.location_id, tuple(keys), *end)


@dataclass(frozen=True, slots=True)
class StartedWrite:
    """Answer to a start.

    Attributes:
        session: the open session.
        mask: which of the request's keys need not be written.
        chunks: locations of the others, encoded as field 2 of an answer, in request order.
        rejected: number of blocks that were masked because they do not fit.
        rejection: the limit that they exceed; "" when all fit.
    """

    session: WriteSession
    mask: BlockMask
    chunks: Sequence[bytes]
    rejected: int = 0
    rejection: str = ""


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


# Outcomes of finished sessions.

REPEAT_SECONDS: Final = 60.0
"""For so long after a session ended its finish may be repeated: longer than clients try a call, pauses included."""
_ENDED_FORMAT: Final = 1
_MOST: Final = 100_000


class _EndedDocument(msgspec.Struct, array_like=True, frozen=True):
    version: int
    uid: int
    starter: str
    served: int
    dropped: int
    vanished: int
    succeeded: bytes | None  # a bit per block; None where those that succeeded come first


_ended_encoder = msgspec.msgpack.Encoder()
_ended_decoder = msgspec.msgpack.Decoder(_EndedDocument)


@dataclass(frozen=True, slots=True)
class EndedSession:
    """A session that its writer ended.

    Attributes:
        uid: number of the instance that it belonged to.
        starter: name of the principal that may repeat the finish; "" where the id is enough.
        decision: per block whether it succeeded.
        finished: the answer to the writer.
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
        return _ended_encoder.encode(
            _EndedDocument(
                version=_ENDED_FORMAT,
                uid=self.uid,
                starter=self.starter,
                served=served,
                dropped=dropped,
                vanished=vanished,
                succeeded=succeeded,
            )
        )

    @classmethod
    def decoded(cls, stored: bytes) -> EndedSession:
        """Read what `encoded` wrote.

        Raises:
            StorageIOError: a newer release wrote it, or it is damaged.
        """
        try:
            found = _ended_decoder.decode(stored)
        except ValueError as error:  # msgspec's errors are such
            raise StorageIOError(f"the stored end of a write session cannot be read: {error}") from error
        if found.version != _ENDED_FORMAT:
            raise StorageIOError(
                f"the stored end of a write session has format {found.version}, this release knows {_ENDED_FORMAT}: "
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

    async def put(self, decided: WriteSession, document: bytes, finished: FinishedWrite) -> FinishedWrite:
        """Replace the document of a session that was carried out by its outcome; return the outcome, which is another
        manager's where that one was faster."""
        outcome = self.outcome_of(decided, finished)
        if not outcome:
            await self._table.replace(decided.id, document, None)
            return finished
        if await self._table.finish(decided.id, document, outcome, self._clock.now(), REPEAT_SECONDS):
            self.note_put()
            return finished
        first = await self.get(decided.id)
        return first.finished if first is not None else finished

    def outcome_of(self, decided: WriteSession, finished: FinishedWrite) -> bytes:
        """Return the outcome to be stored, nothing where this manager has put too many there."""
        assert decided.decision is not None
        now = self._clock.now()
        while self._until and self._until[0] <= now:
            self._until.popleft()
        if len(self._until) >= _MOST:
            return b""
        return EndedSession(decided.uid, decided.starter, decided.decision, finished).encoded()

    def note_put(self) -> None:
        """Count an outcome that this manager put there."""
        self._until.append(self._clock.now() + REPEAT_SECONDS)

    async def get(self, session_id: str) -> EndedSession | None:
        """Return how a session ended, None where it is not remembered."""
        stored = await self._table.outcome(session_id, self._clock.now())
        return EndedSession.decoded(stored) if stored is not None else None


def _check_same(said: Sequence[bool], says: Sequence[bool]) -> None:
    """Check that a repeated finish has the decision of the first one.

    Raises:
        InvalidArgumentError: it differs; the message has the first decision.
    """
    position = next(compress(count(), map(ne, said, says)), None)
    if position is not None:
        blocks = f"{sum(said)} of {len(said)} succeeded, position {position} {'did' if said[position] else 'did not'}"
        raise InvalidArgumentError(f"write_session_id was finished before, with other success_blocks: {blocks}")


# The blocks follow the decision.

# A named tuple's own constructor binds its arguments in Python; from a ready tuple it takes a third of the time.
_new_record = cast("Callable[[type[BlockRecord], tuple[object, ...]], BlockRecord]", tuple.__new__)
_new_location = cast("Callable[[type[Location], tuple[object, ...]], Location]", tuple.__new__)
_ChecksumsByKey = Mapping[int, Mapping[str, int]]
"""Checksums by name of the part, by key."""


@staged("store", "settling.py:settle")
async def apply_decision(
    cache: InstanceCache, session: WriteSession, now: float, note: Callable[[Sequence[Change]], None]
) -> FinishedWrite:
    """Let the blocks of a session follow its decision.

    Args:
        cache: the instance.
        session: with its decision.
        now: unix time.
        note: called with changes as they are stored, except with blocks that serve from then on.
    """
    assert session.decision is not None
    ends = _LocationEnds(session, now)
    served = 0
    most = _page_keys(cache, session)
    # The tail first: an order of eviction that goes by time then finds the tail of a chain before its head.
    # Pages as the start had them: what began together is stored together.
    for begin in reversed(range(0, len(session.keys), most)):
        end = min(begin + most, len(session.keys))
        ends.checksums = session.checksums.by_key(session.keys, begin, end)
        keys, decision = session.keys[begin:end][::-1], session.decision[begin:end][::-1]
        succeeded = keys if all(decision) else tuple(compress(keys, decision))
        if succeeded and cache.index.serve(succeeded, ends.of_run):
            served += len(succeeded)
            keys = () if succeeded is keys else tuple(compress(keys, map(not_, decision)))
        if keys:
            ends.succeeded = frozenset(succeeded)
            changes = await cache.index.read_modify_write(keys, ends.of_record)
            served += sum([key in ends.succeeded and _has_served(record, session) for key, _, record, _ in changes])
            note(changes)
        if len(session.keys) > most:
            await asyncio.sleep(0)
    wanted = sum(session.decision)
    return FinishedWrite(served, len(session.keys) - wanted, wanted - served)


def _page_keys(cache: InstanceCache, session: WriteSession) -> int:
    """Return how many blocks of a session end without a pause."""
    return min(cache.batch_keys, max(1, BATCH_KEYS // max(1, len(session.checksums.names))))


class _LocationEnds:
    """How the locations of one session end, for the blocks of a page.

    Attributes:
        checksums: checksums of blocks that have some.
        succeeded: blocks that are to serve.
    """

    def __init__(self, session: WriteSession, now: float) -> None:
        self._session = session
        self._now = now
        self.checksums: _ChecksumsByKey = {}
        self.succeeded: Set[int] = frozenset()

    def of_run(self, blocks: UniformRun) -> UniformRun | None:
        """Return the blocks as they serve; None where they are not the session's."""
        keys, location, chunks = blocks
        if location.session_id != self._session.id:
            return None
        if self.checksums:
            pairs = zip(keys, chunks, strict=True)
            chunks = [_add_checksums(chunk, location.spec_names, self.checksums.get(key, {})) for key, chunk in pairs]
        return UniformRun(keys, self._serving(location, location.chunk), chunks)

    def of_record(self, key: int, old: BlockRecord | None) -> BlockRecord | None:
        """Return what becomes of any record."""
        to_serving = key in self.succeeded
        if to_serving and old is not None and len(old[2]) == 1:  # nearly every block
            location = old[2][0]
            if location[8] == self._session.id and location[3] is LocationStatus.WRITING:
                return _new_record(BlockRecord, (old[0], old[1], (self._served(key, location),)))
        return _change_locations(old, lambda location: self._of_location(key, location, to_serving=to_serving))

    def _of_location(self, key: int, location: Location, *, to_serving: bool) -> Location:
        if location.session_id != self._session.id or location.status is LocationStatus.SERVING:
            return location
        if to_serving and location.status is LocationStatus.WRITING:
            return self._served(key, location)
        if location.status is LocationStatus.DELETING and location.deadline <= self._now:
            return location  # settled before, or about to go
        # It never served, so no reader has it and its bytes can go at once. Its writer may still come back, so it keeps
        # the session's id to the end (`Location.has_served`).
        return location._replace(status=LocationStatus.DELETING, deadline=self._now)

    def _served(self, key: int, location: Location) -> Location:
        own = self.checksums.get(key)
        return self._serving(location, _add_checksums(location[5], location[4], own) if own else location[5])

    def _serving(self, location: Location, chunk: bytes) -> Location:
        ends = (*location[6:8], "", self._session.keep_until, self._session.priority, location[11])
        # `_replace` would take five times as long.
        return _new_location(Location, (*location[:3], LocationStatus.SERVING, location[4], chunk, *ends))


def _change_locations(old: BlockRecord | None, change: Callable[[Location], Location]) -> BlockRecord | None:
    """Return a record whose locations were changed, the same object where none was."""
    if old is None:
        return None
    locations = tuple([change(location) for location in old[2]])
    return old if locations == old[2] else _new_record(BlockRecord, (old[0], old[1], locations))


def _has_served(record: BlockRecord | None, session: WriteSession) -> bool:
    """Return whether the session's location serves; an interrupted finish may have done that before."""
    for location in record[2] if record is not None else ():
        if location[0] == session.location_id and location[3] is LocationStatus.SERVING:
            return True
    return False


# The stored sessions: open, decide, carry out, remove.

_DEFAULT_TIMEOUT_SECONDS = 30
_MAX_TIMEOUT_SECONDS = 3600
_RETRY_SECONDS = 5.0  # then the search for due sessions takes over a decision
_MOST_ATTEMPTS = 16
_MOST_DUE = 1024
_MOST_COUNTED = 1 << 20
_MOST_BEGUN_BLOCKS = 1 << 16  # some 200 bytes each
_MOST_FINISHED_AT_ONCE = 4 * BATCH_KEYS  # blocks, or checksums of them
_log = structlog.get_logger("kvcm.cache")


class _SpaceTakenError(Exception):
    """Another manager took the space of a plan before it was reserved; nothing is taken or stored."""


class _BegunSession(NamedTuple):
    """A session as this manager began it, every block of it.

    Attributes:
        session: open.
        document: as it was stored.
        runs: its blocks; none on a store of this manager alone, whose finish reads the document.
    """

    session: WriteSession
    document: bytes
    runs: Sequence[BlockRun]


class _BegunSessions:
    """What this manager remembers of sessions that it began: their finish need not read anything, or not decode what it
    read. The oldest are forgotten first."""

    def __init__(self) -> None:
        self._sessions: dict[str, _BegunSession] = {}
        self._blocks = 0

    def get(self, session_id: str) -> _BegunSession | None:
        """Return a session, None where it is not remembered."""
        return self._sessions.get(session_id)

    def put(self, begun: _BegunSession) -> None:
        """Remember a session."""
        self._sessions[begun.session.id] = begun
        self._blocks += len(begun.session.keys)
        while self._blocks > _MOST_BEGUN_BLOCKS:
            self.discard(next(iter(self._sessions)))

    def discard(self, session_id: str) -> None:
        """Forget a session."""
        begun = self._sessions.pop(session_id, None)
        self._blocks -= len(begun.session.keys) if begun is not None else 0


class SessionStore:
    """The stored write sessions of all instances.

    Args:
        table: where they are stored.
        find: from the number of an instance to its cache; None when the store, too, has no such instance.
        clock: time source.
        events: receives expired blocks.
        shared: begins and finishes on a store that other managers share, too; None on a store of this manager alone.

    Attributes:
        observer: counts how sessions end.
        on_failed_writes: receives by storage the bytes of blocks that a client reports as not written, or for which
            there was no room.
        on_ended: receives the id of every session that ended, or whose deadline has passed.
        on_finished: receives the blocks of every session that its client ended.
    """

    def __init__(
        self,
        table: Table,
        find: Callable[[int], Awaitable[InstanceCache | None]],
        clock: Clock,
        events: EventLog | None = None,
        shared: SharedWrites | None = None,
    ) -> None:
        self._table = table
        self._shared = shared
        self._begun = _BegunSessions()
        self._ended = EndedSessions(table, clock)
        self._concluding: dict[str, EndedSession] = {}
        self._find_cache = find
        self._clock = clock
        self._events = ChangeEvents(events if events is not None else EventLog())
        self.observer: CacheObserver = NO_OBSERVER
        self.on_failed_writes: Callable[[Mapping[str, int]], None] = lambda _failed: None
        self.on_ended: Callable[[str], None] = lambda _session_id: None
        self.on_finished: Callable[[InstanceCache, Sequence[int]], None] | None = None
        # Of the sessions that this manager opened or renewed: deadline, and time of the start where that was here.
        self._deadlines: DueQueue[str] = DueQueue()
        self._started_at: dict[str, float | None] = {}

    @property
    def open_count(self) -> int:
        """Sessions that this manager opened and whose deadline has not passed, less those that it ended."""
        for session_id in self._deadlines.until(self._clock.now(), len(self._deadlines)):
            self._untrack(session_id)
        return len(self._deadlines)

    async def open(self, session: WriteSession) -> None:
        """Store a new session."""
        document = session.encoded()
        if not await self._table.replace(name=session.id, old=None, new=document, due=session.deadline):
            raise _taken_id()
        self._track(session, self._clock.now())
        self._begun.put(_BegunSession(session, document, ()))

    @property
    def is_shared(self) -> bool:
        """Whether `begin` is to be used, and not `open`."""
        return self._shared is not None

    async def begin(
        self, cache: InstanceCache, session: WriteSession, reservation: Reservation | None, runs: Sequence[BlockRun]
    ) -> Collection[int]:
        """Reserve, store a new session, and begin its fresh blocks, on a shared store in one round trip.

        Returns:
            The blocks of the runs that were not begun, since there are records of them by now.

        Raises:
            _SpaceTakenError: the reservation does not fit, and nothing is stored.
        """
        assert self._shared is not None
        document = Document(session.id, session.encoded(), session.deadline)
        begun = await self._shared.begin(cache.index, reservation, document, runs)
        if not begun.fits:
            raise _SpaceTakenError
        if not begun.is_open:
            raise _taken_id()
        self._track(session, self._clock.now())
        if not begun.lost and sum(len(run.keys) for run in runs) == len(session.keys):
            self._begun.put(_BegunSession(session, document.content, runs))
        return begun.lost

    def _track(self, session: WriteSession, started_at: float | None) -> None:
        self._deadlines.put(session.id, session.deadline)
        self._started_at[session.id] = started_at

    def _untrack(self, session_id: str) -> None:
        self._deadlines.discard(session_id)
        self._started_at.pop(session_id, None)
        self._begun.discard(session_id)
        self.on_ended(session_id)

    async def replace(self, old: WriteSession, new: WriteSession) -> None:
        """Replace an open session.

        Raises:
            NotReadyError: it has ended or changed meanwhile.
        """
        if not await self._table.replace(old.id, old.encoded(), new.encoded(), new.deadline):
            raise NotReadyError("the write session ended while it was being started: start the write again")

    async def is_open(self, session: WriteSession) -> bool:
        """Return whether a session is open; before its deadline only its client can end it."""
        if self._clock.now() < session.deadline:
            return True
        document = await self._table.get(session.id)
        return document is not None and WriteSession.decoded(session.id, document).decision is None

    async def abort(self, cache: InstanceCache, session: WriteSession) -> None:
        """Roll a session back, also one whose document is gone already."""
        document = await self._table.get(session.id)
        if document is not None:
            stored = WriteSession.decoded(session.id, document)
            failed = replace(stored, decision=(False,) * len(stored.keys))
            document = await self._decide(document, failed, WriteEnd.ABORTED)
            if document is None:
                return
        await self._apply_to_blocks(cache, replace(session, decision=(False,) * len(session.keys)))
        if document is not None:
            await self._forget(session.id, document)

    async def finish(
        self,
        cache: InstanceCache,
        session_id: str,
        success: BlockMask,
        retention: Retention = NO_HINT,
        reported: ReportedChecksums = (),
    ) -> FinishedWrite:
        """End a session: successful blocks become serving, the others are dropped.

        Args:
            cache: the instance of the caller, which must be the session's.
            session_id: the session.
            success: masked positions succeeded; positions index the locations that the start returned.
            retention: how long the blocks are worth keeping; of several finishes the one that decided counts.
            reported: checksums of the locations, in the order of the start; the same holds for them.

        Raises:
            InvalidArgumentError: no such session is open for the instance, or was finished lately with this mask; the
                mask or the checksums do not fit it, or the retention is out of range; the session stays open then.
            StorageIOError: the store failed; the same finish may be asked again and goes on where this one stopped.
        """
        retention.check()
        if self._shared is not None and (begun := self._begun.get(session_id)) is not None:
            finished = await self._finish_begun(cache, begun, success, retention, reported)
            if finished is not None:
                return finished
        for _ in range(_MOST_ATTEMPTS):
            found = await self._find(cache, session_id) if session_id not in self._concluding else None
            if found is None:
                return await self._repeated_answer(cache, session_id, success)
            session, document = found
            decision = tuple(_decision_of(success, len(session.keys)))
            if session.decision is not None:
                _check_same(session.decision, decision)
                return await self._apply(cache, session, document)
            decided = await self._decided(cache, session, decision, retention, reported)
            if self._ends_in_one_step(cache, decided):
                if await self._table.get(session_id) != document:
                    continue
                started_at = self._started_at.get(session_id)
                finished = await self._apply(cache, decided, document)
                self._note_end(WriteEnd.COMMITTED, started_at)
                return finished
            if (stored := await self._decide(document, decided, _end_of(decision))) is not None:
                return await self._apply(cache, decided, stored)
        raise NotReadyError("the write session keeps changing: finish it again")

    def _ends_in_one_step(self, cache: InstanceCache, decided: WriteSession) -> bool:
        """Return whether nothing suspends until all blocks of a session serve and its outcome is stored: then no other
        call can find the decision, and it is not stored."""
        assert decided.decision is not None
        is_alone = self._shared is None and not cache.index.awaits
        return is_alone and len(decided.keys) <= _page_keys(cache, decided) and all(decided.decision)

    async def _decided(
        self,
        cache: InstanceCache,
        session: WriteSession,
        decision: tuple[bool, ...],
        retention: Retention,
        reported: ReportedChecksums,
    ) -> WriteSession:
        """Return a session as its client decides it."""
        return WriteSession(  # `replace` would take twice as long
            session.id,
            session.uid,
            session.deadline,
            session.location_id,
            session.keys,
            decision=decision,
            priority=retention.priority,
            keep_until=retention.keep_until(self._clock.now()),
            checksums=await checksums_of(reported, decision, cache.spec_names),
            starter=session.starter,
        )

    async def _finish_begun(
        self,
        cache: InstanceCache,
        begun: _BegunSession,
        success: BlockMask,
        retention: Retention,
        reported: ReportedChecksums,
    ) -> FinishedWrite | None:
        """Finish a session that this manager began, as far as it is still as it was then: nothing is read. None where
        nothing was changed, since it has to be read first."""
        assert self._shared is not None
        session, now = begun.session, self._clock.now()
        decision = tuple(_decision_of(success, len(session.keys)))
        if not _is_owner(session, cache) or session.deadline <= now or not all(decision):
            return None
        decided = await self._decided(cache, session, decision, retention, reported)
        if len(session.keys) * max(1, len(decided.checksums.names)) > _MOST_FINISHED_AT_ONCE:
            return None
        ends = _LocationEnds(decided, now)
        ends.checksums = decided.checksums.by_key(session.keys, 0, len(session.keys))
        before = [UniformRun(run.keys, run.location, run.chunks) for run in begun.runs]
        after = [each for run in before if (each := ends.of_run(run)) is not None]
        finished = FinishedWrite(len(session.keys), 0, 0)
        self._begun.discard(session.id)  # where the store fails, it has to be read
        document = Document(session.id, decided.encoded(), now + _RETRY_SECONDS)
        outcome = self._ended.outcome_of(decided, finished)
        with timed(_IO_COST, "manager.batch_update_location_time_us"):
            done = await self._shared.finish(
                cache.index,
                Decided(begun.document, document, outcome, REPEAT_SECONDS),
                list(zip(before, after, strict=True)),
            )
        if not done.is_decided:
            return None
        self._note_decision(session.id, WriteEnd.COMMITTED)
        if done.lost:
            return await self._apply(cache, decided, document.content)
        if self.on_finished is not None:
            self.on_finished(cache, decided.keys)
        if done.is_ended:
            self._ended.note_put()
        else:
            self._conclude_soon(decided, document.content, outcome, finished)
        self._untrack(session.id)
        return finished

    def _conclude_soon(self, decided: WriteSession, document: bytes, outcome: bytes, finished: FinishedWrite) -> None:
        """Let the outcome replace a decision that was carried out, without waiting for that. Until then a repeated
        finish is answered from here, since of its blocks some may be gone again."""
        assert self._shared is not None
        assert decided.decision is not None
        self._concluding[decided.id] = EndedSession(decided.uid, decided.starter, decided.decision, finished)

        def end(is_stored: bool) -> None:
            del self._concluding[decided.id]
            if is_stored and outcome:
                self._ended.note_put()

        self._shared.conclusions.add(Conclusion(decided.id, document, outcome, REPEAT_SECONDS, end))

    async def concluded(self) -> None:
        """Return when the outcome of every finish that was answered is stored, or left to the expiry."""
        if self._shared is not None:
            await self._shared.conclusions.stored()

    async def _repeated_answer(self, cache: InstanceCache, session_id: str, success: BlockMask) -> FinishedWrite:
        """Return the first answer to a session that was finished lately."""
        ended = self._concluding.get(session_id) or await self._ended.get(session_id)
        if ended is None or not _is_owner(ended, cache):
            raise _unknown_session()
        _check_same(ended.decision, _decision_of(success, len(ended.decision)))
        return ended.finished

    async def renew(self, cache: InstanceCache, session_id: str, seconds: int) -> WriteSession:
        """Move a session's deadline to so many seconds from now.

        Raises:
            InvalidArgumentError: no such session is open for the instance.
        """
        if (found := await self._find(cache, session_id)) is None:
            raise _unknown_session()
        session, document = found
        self._begun.discard(session_id)
        renewed = replace(session, deadline=self._clock.now() + timeout_seconds(seconds))
        if session.decision is not None or not await self._table.replace(
            session_id, document, renewed.encoded(), renewed.deadline
        ):
            raise InvalidArgumentError("write_session_id is being finished: it cannot be renewed any more")
        self._track(renewed, self._started_at.get(session_id))
        await self._move_deadlines(cache, renewed, renewed.keys)
        return renewed

    async def expire(self, most: int = _MOST_DUE) -> int:
        """End sessions that are due: overdue ones are rolled back, decisions carried out. Returns how many were."""
        ended, now = 0, self._clock.now()
        for session_id in await self._table.due(now, most) if self._table.due_from <= now else ():
            try:
                ended += await self._expire_if_due(session_id)
            except KvcmError as error:
                _log.warning("session_not_ended", session=session_id[:8], reason=str(error))
                await self._postpone(session_id)
        return ended

    async def due_count(self, overdue_seconds: float = 0.0) -> int:
        """Return how many sessions `expire` would end now; with an argument, those due for longer than that."""
        return len(await self._table.due(self._clock.now() - overdue_seconds, _MOST_COUNTED))

    async def _postpone(self, session_id: str) -> None:
        """Retry a session later, so that one that cannot be ended now does not hide those due behind it."""
        with suppress(StorageIOError):
            document = await self._table.get(session_id)
            if document is not None:
                await self._table.replace(session_id, document, document, self._clock.now() + _RETRY_SECONDS)

    def overdue(self, records: Iterable[tuple[int, BlockRecord | None]]) -> dict[str, list[int]]:
        """Return by session the blocks that are still writing for it though its deadline has passed."""
        now = self._clock.now()
        found: defaultdict[str, list[int]] = defaultdict(list)
        for key, record in records:
            for location in record[2] if record is not None else ():
                if location.status is LocationStatus.WRITING and location.deadline <= now:
                    found[location.session_id].append(key)
        return found

    async def expire_writers(self, cache: InstanceCache, overdue: Mapping[str, Sequence[int]]) -> None:
        """Repair blocks from their records: end their session, or follow it if it was renewed, or roll them back if
        its document is gone."""
        for session_id, keys in overdue.items():
            try:
                await self._expire_writer(cache, session_id, keys)
            except StorageIOError as error:  # its document cannot be read: it must not hold up the others
                _log.warning("session_not_ended", session=session_id[:8], reason=str(error))
                later = self._clock.now() + _RETRY_SECONDS
                await self._move_deadlines(
                    cache,
                    WriteSession(id=session_id, uid=cache.placement.uid, deadline=later, location_id="", keys=()),
                    keys,
                )

    async def _expire_writer(self, cache: InstanceCache, session_id: str, keys: Sequence[int]) -> None:
        await self._expire_if_due(session_id)
        document = await self._table.get(session_id)
        if document is None:
            orphaned = WriteSession(
                id=session_id, uid=cache.placement.uid, deadline=0.0, location_id="", keys=tuple(keys)
            )
            await self._apply_to_blocks(cache, orphaned.lapsed())
            return
        session = WriteSession.decoded(session_id, document)
        if session.decision is None:
            await self._move_deadlines(cache, session, keys)

    async def deadlines_of(self, session_ids: Iterable[str]) -> dict[str, float]:
        """Return the deadlines of those sessions that are open."""
        deadlines: dict[str, float] = {}
        for session_id in set(session_ids):
            document = await self._table.get(session_id)
            session = WriteSession.decoded(session_id, document) if document is not None else None
            if session is not None and session.decision is None:
                deadlines[session_id] = session.deadline
        return deadlines

    async def _find(self, cache: InstanceCache, session_id: str) -> tuple[WriteSession, bytes] | None:
        """Return a session that its writer can end, or has begun to, and its document; None where it has ended."""
        document = await self._table.get(session_id)
        if document is None:
            return None
        begun = self._begun.get(session_id)
        if begun is not None and begun.document == document:
            session = begun.session
        else:
            session = WriteSession.decoded(session_id, document)
        if not _is_owner(session, cache):
            raise _unknown_session()
        is_overdue = session.decision is None and session.deadline <= self._clock.now()
        if is_overdue or session.has_lapsed:
            await self._expire_if_due(session_id)
            return None
        return session, document

    async def _decide(self, document: bytes, decided: WriteSession, end: WriteEnd) -> bytes | None:
        """Replace the document of an open session by that of the decided one, and return that; None: it had changed."""
        assert decided.decision is not None
        new = decided.encoded(document)
        if not await self._table.replace(decided.id, document, new, self._clock.now() + _RETRY_SECONDS):
            return None
        self._note_decision(decided.id, end)
        return new

    def _note_decision(self, session_id: str, end: WriteEnd) -> None:
        self._note_end(end, self._started_at.get(session_id))

    def _note_end(self, end: WriteEnd, started_at: float | None) -> None:
        self.observer.on_write_ended(end, self._clock.now() - started_at if started_at is not None else None)

    async def _expire_if_due(self, session_id: str) -> bool:
        document = await self._table.get(session_id)
        if document is None:
            return False
        session = WriteSession.decoded(session_id, document)
        if session.decision is None:
            if session.deadline > self._clock.now():
                return False  # renewed
            session = session.lapsed()
            # A client without blocks to write need not finish.
            end = WriteEnd.EXPIRED if session.keys else WriteEnd.COMMITTED
            document = await self._decide(document, session, end)
            if document is None:
                return False  # another manager was faster
        cache = await self._find_cache(session.uid)
        if cache is None:  # its instance is gone, and all its blocks with it
            await self._forget(session_id, document)
        else:
            await self._apply(cache, session, document)
        return True

    async def _apply(self, cache: InstanceCache, decided: WriteSession, document: bytes) -> FinishedWrite:
        with timed(_IO_COST, "manager.batch_update_location_time_us"):
            finished = await self._apply_to_blocks(cache, decided)
        if decided.has_lapsed:
            await self._forget(decided.id, document)
            return finished
        if self.on_finished is not None:
            self.on_finished(cache, decided.keys)
        first = await self._ended.put(decided, document, finished)
        self._untrack(decided.id)
        return first

    async def _forget(self, session_id: str, document: bytes) -> None:
        await self._table.replace(session_id, document, None)
        self._untrack(session_id)

    async def _apply_to_blocks(self, cache: InstanceCache, session: WriteSession) -> FinishedWrite:
        failed: Counter[str] = Counter()

        def note(changes: Sequence[Change]) -> None:
            if session.has_lapsed:
                self._events.expired(cache.instance, changes, "session")
            else:
                failed.update(_failed_bytes(session, changes))

        finished = await apply_decision(cache, session, self._clock.now(), note)
        if failed:
            self.on_failed_writes(failed)
        return finished

    async def _move_deadlines(self, cache: InstanceCache, session: WriteSession, keys: Sequence[int]) -> None:
        def move(_key: int, old: BlockRecord | None) -> BlockRecord | None:
            return _change_locations(
                old,
                lambda location: (
                    location._replace(deadline=session.deadline)
                    if location.session_id == session.id and location.deadline < session.deadline
                    else location
                ),
            )

        for page in batches(keys, cache.batch_keys):
            await cache.index.read_modify_write(page, move)
            await asyncio.sleep(0)


def _failed_bytes(session: WriteSession, changes: Sequence[Change]) -> Counter[str]:
    """Return by storage the bytes of a session's blocks that were being written and will not serve."""
    failed: Counter[str] = Counter()
    for change in changes:
        for location in change.old.locations if change.old is not None and change.new is not change.old else ():
            if location.session_id == session.id and not _has_served(change.new, session):
                failed[location.storage] += location.size_bytes
    return failed


def timeout_seconds(requested: int) -> int:
    """Return the life of a session for what the client asked for: unset is 30 s, an hour at most (decision 17)."""
    return min(requested, _MAX_TIMEOUT_SECONDS) if requested > 0 else _DEFAULT_TIMEOUT_SECONDS


def _decision_of(success: BlockMask, count: int) -> Sequence[bool]:
    if success.offset is not None:
        if not 0 <= success.offset <= count:
            raise InvalidArgumentError(f"success_blocks.offset is {success.offset}, must be from 0 to {count}")
        return [True] * success.offset + [False] * (count - success.offset)
    flags = success.flags or ()
    if len(flags) != count:
        raise InvalidArgumentError(
            f"success_blocks has {len(flags)} entries, must have one per location that the start returned: {count}"
        )
    return flags


def _end_of(decision: Sequence[bool]) -> WriteEnd:
    """Return how a session ended whose client decided; one without blocks is committed."""
    if all(decision):
        return WriteEnd.COMMITTED
    return WriteEnd.PARTIAL if any(decision) else WriteEnd.ABORTED


def _is_owner(session: WriteSession | EndedSession, cache: InstanceCache) -> bool:
    """Return whether a session is of the instance and of the calling principal; without authentication every principal
    qualifies."""
    asking = call_context.get().principal
    has_started = not session.starter or asking is UNRESTRICTED or asking.name == session.starter
    return has_started and session.uid == cache.placement.uid


def _taken_id() -> NotReadyError:
    return NotReadyError("the id of the new write session is taken: start the write again")


def _unknown_session() -> InvalidArgumentError:
    return InvalidArgumentError("write_session_id is unknown, finished or expired: start the write again")


# Addresses for blocks that are about to be written.
#
# A storage that is full, unusable or failing rejects an allocation. That does not end the write: its blocks may go to
# the next candidate, and later writes try the others first.

_MAKE_TIMEOUT_SECONDS = 5.0  # for one page; what a storage makes later than that is left to the scrub
_DISCARD_TIMEOUT_SECONDS = 2.0  # a storage that hangs may keep some space, it must not keep writers


class PlacedRun(NamedTuple):
    """A run of a plan whose blocks have addresses."""

    planned: PlannedRun
    blocks: BlockRun

    def split(self, keys: Container[int]) -> Iterator[tuple[bool, PlacedRun]]:
        """Cut the run where blocks among `keys` and others alternate; yield each part, and whether it is among them."""
        begin = 0
        for is_one, group in groupby(self.blocks.keys, keys.__contains__):
            end = begin + len(list(group))
            yield is_one, PlacedRun(self.planned.cut(begin, end), self.blocks.cut(begin, end))
            begin = end


class _AllocationRejectedError(Exception):
    """A storage rejects an allocation; another one may accept it.

    Args:
        storage: its name.
        reason: the error of the call when there is no other candidate.
    """

    def __init__(self, storage: str, reason: KvcmError) -> None:
        super().__init__(str(reason))
        self.storage = storage
        self.reason = reason


_IO_COST = "manager.write_cache_io_cost_us"  # of storages and stores, for which a write waits


class Creations:
    """Addresses that a storage handed out since the start.

    Attributes:
        calls: of the storage.
        addresses: in all.
        last_addresses, last_us: of the last call.
    """

    __slots__ = ("addresses", "calls", "last_addresses", "last_us")

    def __init__(self) -> None:
        self.calls = self.addresses = self.last_addresses = 0
        self.last_us = 0.0

    def record(self, addresses: int, microseconds: float) -> None:
        """Count a call."""
        self.calls += 1
        self.addresses += addresses
        self.last_addresses, self.last_us = addresses, microseconds

    @property
    def per_second(self) -> float:
        """Return the rate of the last call."""
        return 1e6 * self.last_addresses / self.last_us if self.last_us else 0.0


class _AddressAllocator:
    """Asks storages for addresses.

    Args:
        storages: the open storages.
        clock: time source.
    """

    def __init__(self, storages: NodeStorages, clock: Clock) -> None:
        self._storages = storages
        self._clock = clock
        self.creations: dict[str, Creations] = {}

    async def allocate(
        self, cache: InstanceCache, session: WriteSession, plan: WritePlan, event_hashes: Sequence[int]
    ) -> list[list[PlacedRun]]:
        """Return the runs of a plan in pages, with a writing location for every block, allocated in one batch per page
        and storage.

        All or none: a failed attempt leaves nothing behind.

        Args:
            cache: of the instance that the blocks belong to.
            session: writes them.
            plan: the blocks to write.
            event_hashes: of the blocks of the request, if any.

        Raises:
            _AllocationRejectedError: a storage hands out none.
        """
        placed: list[list[PlacedRun]] = []
        try:
            for page in plan.batches(cache.batch_keys):
                if placed:
                    await asyncio.sleep(0)
                placed.append([])
                for storage, runs in _by_storage(page).items():
                    parts = _parts_of(cache.spec_names, runs)
                    uris = await self._uris(cache.instance, session, storage, parts)
                    of_runs = _uris_by_spec(cache.spec_names, runs, uris)
                    placed[-1] += _place_runs(session, runs, of_runs, event_hashes, now=self._clock.now())
                placed[-1].sort(key=lambda run: run.planned.position)
        except BaseException:
            await uninterrupted(self.discard(run.blocks for page in placed for run in page))
            raise
        return placed

    async def _uris(self, instance: Instance, session: WriteSession, storage: str, parts: Parts) -> list[str]:
        with self._rejections(storage):
            backend = self._storages.backend(storage)
            if backend is None:
                raise NotReadyError(f"storage {storage!r} was removed while the write was being started: start again")
            begin_ns = time.perf_counter_ns()
            uris = await backend.allocate(Allocation(instance.instance_id, session.location_id, parts))
        creations = self.creations.setdefault(storage, Creations())
        creations.record(len(uris), (time.perf_counter_ns() - begin_ns) / 1000)
        return uris

    async def make(self, runs: Sequence[BlockRun]) -> None:
        """Create the objects of fresh addresses on storages that do that themselves.

        Raises:
            _AllocationRejectedError: a storage cannot; the caller discards the addresses.
        """
        for storage in dict.fromkeys(run.location.storage for run in runs):
            backend = self._storages.backend(storage)
            if backend is None or not backend.makes_objects:
                continue
            uris = [uri for run in runs if run.location.storage == storage for uri in _uris_in(run)]
            for page in batches(uris):
                with self._rejections(storage):
                    try:
                        async with asyncio.timeout(_MAKE_TIMEOUT_SECONDS):
                            await backend.make_objects(page)
                    except TimeoutError:
                        raise StorageIOError(f"storage {storage!r} does not answer: start the write again") from None

    @contextmanager
    def _rejections(self, storage: str) -> Iterator[None]:
        try:
            yield
        except (StorageIOError, NotReadyError) as error:
            self._storages.report_unwritable(storage, is_full=is_full(error))
            raise _AllocationRejectedError(storage, CapacityError(str(error)) if is_full(error) else error) from error

    async def discard(self, unused: Iterable[BlockRun]) -> None:
        """Free addresses that are not handed out, before others of their session are: the deletion of a packed file
        relies on their slots staying unwritten, even if this manager dies at once."""
        by_storage: defaultdict[str, list[str]] = defaultdict(list)
        for run in unused:
            by_storage[run.location.storage] += _uris_in(run)
        for storage, uris in by_storage.items():
            await self._discard_on(storage, uris)

    async def _discard_on(self, storage: str, uris: Sequence[str]) -> None:
        backend = self._storages.backend(storage)
        try:
            async with asyncio.timeout(_DISCARD_TIMEOUT_SECONDS):
                reasons = await backend.discard(uris) if backend is not None else ()
        except TimeoutError:
            reasons = ["no answer"]
        for reason in filter(None, reasons):
            _log.warning("addresses_not_discarded", storage=storage, reason=reason)


def _all_candidates_rejected(reasons: Sequence[KvcmError]) -> KvcmError:
    """Return the error of a call when every candidate rejected: capacity where any is full, since eviction follows;
    else not ready; else the failure."""
    text = "; ".join(map(str, reasons))
    if any(isinstance(reason, CapacityError) for reason in reasons):
        return CapacityError(f"{text}: retry shortly, eviction frees space")
    if any(isinstance(reason, NotReadyError) for reason in reasons):
        return NotReadyError(text)
    return StorageIOError(text)


def _uris_in(run: BlockRun) -> list[str]:
    return [uri for chunk in run.chunks for uri in uris_of(chunk)]


def _by_storage(runs: Sequence[PlannedRun]) -> Mapping[str, Sequence[PlannedRun]]:
    by_storage: defaultdict[str, list[PlannedRun]] = defaultdict(list)
    for run in runs:
        by_storage[run.place.storage].append(run)
    return by_storage


def _with_spec(runs: Sequence[PlannedRun], name: str) -> Iterator[tuple[int, PlannedRun, LocationSpecInfo]]:
    """Yield the runs that lack a spec, with their number and what the spec is."""
    for number, run in enumerate(runs):
        for info in run.specs:
            if info.name == name:
                yield number, run, info


def _parts_of(spec_names: Sequence[str], runs: Sequence[PlannedRun]) -> Parts:
    """Return the parts of blocks, ordered by spec, then by key: a packed file holds one spec of neighbouring blocks."""
    names: list[str] = []
    keys: list[int] = []
    sizes: list[int] = []
    depths: list[int] = []
    for name in spec_names:
        for _, run, info in _with_spec(runs, name):
            count = len(run.keys)
            names += [name] * count
            keys += run.keys
            sizes += [info.size] * count
            depths += range(run.depth, run.depth + count)
    return Parts(names, keys, sizes, depths)


def _uris_by_spec(
    spec_names: Sequence[str], runs: Sequence[PlannedRun], uris: Sequence[str]
) -> list[dict[str, Sequence[str]]]:
    """Return for every run the uris of its blocks by spec, from those of all parts."""
    found: list[dict[str, Sequence[str]]] = [{} for _ in runs]
    start = 0
    for name in spec_names:
        for number, run, _ in _with_spec(runs, name):
            found[number][name] = uris[start : start + len(run.keys)]
            start += len(run.keys)
    return found


def _place_runs(
    session: WriteSession,
    runs: Sequence[PlannedRun],
    uris: Sequence[Mapping[str, Sequence[str]]],
    event_hashes: Sequence[int],
    *,
    now: float,
) -> Iterator[PlacedRun]:
    for run, of_run in zip(runs, uris, strict=True):
        names = tuple([info.name for info in run.specs])
        location = Location(
            id=session.location_id,
            storage=run.place.storage,
            storage_type=run.place.storage_type,
            status=LocationStatus.WRITING,
            spec_names=names,
            chunk=b"",
            size_bytes=run.size_bytes,
            written_at=now,
            session_id=session.id,
            deadline=session.deadline,
        )
        chunks = encode_chunks(run.place.storage_type, names, [of_run[name] for name in names])
        if event_hashes:
            chunks = with_event_hashes(chunks, event_hashes[run.position : run.position + len(run.keys)])
        yield PlacedRun(run, BlockRun(run.keys, run.parent, run.depth, location, chunks))


# Where chains go on.

_MOST_DEPTHS = 1 << 14  # some 200 bytes each


class _KnownDepths:
    """Depths of the first and the last block of the latest writes of this manager, on a shared store.

    A write that goes on behind such a last block need not read it, and one that begins with such a first block reads it
    together with what is behind it. The depth of a block stays the same whatever becomes of it, since its key stands
    for all of its prefix. The oldest are forgotten first.
    """

    def __init__(self) -> None:
        self._depths: dict[tuple[int, int], int] = {}

    def get(self, uid: int, key: int) -> int | None:
        """Return the depth of a block of an instance, None where it is not remembered."""
        return self._depths.get((uid, key))

    def put_ends(self, uid: int, runs: Sequence[PlannedRun]) -> None:
        """Remember the first and the last of the blocks that a write begins."""
        first, last = runs[0], runs[-1]
        ends = {first.keys[0]: first.depth, last.keys[-1]: last.depth + len(last.keys) - 1}
        for key, depth in ends.items():
            self._depths.pop((uid, key), None)
            self._depths[uid, key] = depth
        while len(self._depths) > _MOST_DEPTHS:
            del self._depths[next(iter(self._depths))]


# The start of a write.

_EMPTY_SESSION_SECONDS = 10
_MAX_SESSIONS = 100_000
_MOST_PLANS = 8
_RESERVATION_SECONDS = 10.0  # then the space is free again, should this manager have died
_STORE_SECONDS = 4.0  # more than the store needs for one batch, or it fails


class _PlacedPlan(NamedTuple):
    """A plan whose blocks have addresses.

    Attributes:
        plan: the blocks.
        reservation: of their space; None when nothing has to be written.
        backends: of their storages, as open before the first allocation.
        batches: the runs with their addresses.
    """

    plan: WritePlan
    reservation: Reservation | None
    backends: Mapping[str, StorageBackend | None]
    batches: Sequence[Sequence[PlacedRun]]


class WriteSessions:
    """Starts write sessions.

    Args:
        endings: the stored sessions.
        storages: the open storages.
        usage: counts the bytes of groups.
        clock: time source.
        new_id: makes a random id of so many hex digits.
        limits_of: looks up the hard limits of a group.
        disk: the file system of the metadata, of which KV must leave something.
        on_pressure: called with the name of a group whose write was rejected for lack of space, wholly or partly, or
            by one storage of several, or left the group above a watermark.

    Attributes:
        is_above_watermark: whether a group is above one of its watermarks.
        creations: addresses that storages handed out, by storage.
        on_full: called with a storage that refused an allocation for lack of space.
    """

    def __init__(
        self,
        endings: SessionStore,
        storages: NodeStorages,
        usage: Ledger,
        clock: Clock,
        new_id: Callable[[int], str],
        limits_of: Callable[[InstanceGroup], Limits] = Limits,
        *,
        disk: MetadataDisk,
        on_pressure: Callable[[str], None] = lambda _group_name: None,
    ) -> None:
        self._endings = endings
        self._storages = storages
        self._addresses = _AddressAllocator(storages, clock)
        self._usage = usage
        self._clock = clock
        self._new_id = new_id
        self._limits_of = limits_of
        self._disk = disk
        self._depths = _KnownDepths()
        endings.on_ended = disk.end
        self.is_above_watermark: Callable[[InstanceGroup], bool] = lambda _group: False
        self.on_full: Callable[[str], None] = lambda _storage: None
        self._on_pressure = on_pressure
        self.creations: Mapping[str, Creations] = self._addresses.creations

    async def start(self, cache: InstanceCache, group: InstanceGroup, request: WriteRequest) -> StartedWrite:
        """Open a session and hand out addresses for the blocks that have to be written.

        Raises:
            InvalidArgumentError: spec groups or event hashes do not fit the keys, or a block would follow itself.
            NotReadyError: blocks have to be written and no storage of the group is available, or other managers are
                faster.
            CapacityError: not even the first block that has to be written fits, or every storage is full after all.
            StorageIOError: the store failed, or every storage; what was begun is rolled back now or at the session's
                deadline.
        """
        if request.parent_key is not None and request.parent_key in request.keys:
            # Such a chain has no leaf, so it could never be evicted.
            parent = unmixed_key(request.parent_key)
            raise InvalidArgumentError(f"parent_block_key is {parent}, must not be one of block_keys")
        if request.event_hashes and len(request.event_hashes) != len(request.keys):
            raise InvalidArgumentError(
                f"event_hashes has {len(request.event_hashes)} entries for {len(request.keys)} block keys, must have "
                "none or one per key"
            )
        if self._endings.open_count >= _MAX_SESSIONS:
            raise CapacityError(f"{_MAX_SESSIONS} write sessions are open: finish some or let them expire")
        refusals: dict[str, KvcmError] = {}
        for _ in range(_MOST_PLANS):
            try:
                while (started := await self._try_start(cache, group, request, refusals)) is None:
                    pass  # with the next candidate; there is one less each time
            except _SpaceTakenError:
                measure("manager.lock_write_location_retry_times", 1)
                continue
            if started.rejection:
                self._record_rejection(group)
            return started
        self._record_rejection(group)
        raise NotReadyError(f"other managers keep taking the last space of group {group.name!r}: retry shortly")

    async def _try_start(
        self, cache: InstanceCache, group: InstanceGroup, request: WriteRequest, refusals: dict[str, KvcmError]
    ) -> StartedWrite | None:
        """Start the write without the storages that rejected it so far; None when one more of them does."""
        plan, reservation = await self._reserved_plan(cache, group, request, refusals)
        session = self._new_session(cache, request, plan, reservation)
        opened = self._backends_of(reservation)
        try:
            await yield_to_others(len(request.keys), cache.batch_keys)
            with timed(_IO_COST, "manager.gen_write_location_us"):
                placed = await self._allocate(cache, session, plan, reservation, request.event_hashes)
            return await self._store_or_abort(cache, session, request, _PlacedPlan(plan, reservation, opened, placed))
        except _AllocationRejectedError as refused:
            refusals[refused.storage] = refused.reason
            self._disk.end(session.id)
            if isinstance(refused.reason, CapacityError):
                self.on_full(refused.storage)
                self._on_pressure(group.name)  # that storage needs eviction, wherever these blocks go
            return None
        finally:
            if reservation is not None:
                self._usage.settle(reservation, cache.index)
                self.check_watermarks(group)

    @staged("allocate", "sessions.py:_allocate")
    async def _allocate(
        self,
        cache: InstanceCache,
        session: WriteSession,
        plan: WritePlan,
        reservation: Reservation | None,
        event_hashes: Sequence[int],
    ) -> list[list[PlacedRun]]:
        try:
            return await self._addresses.allocate(cache, session, plan, event_hashes)
        except _AllocationRejectedError:
            if reservation is not None and not self._endings.is_shared:
                await self._usage.release(reservation, cache.index)  # the next candidate may need that space
            raise

    def check_watermarks(self, group: InstanceGroup) -> None:
        """Call `on_pressure` if a group is above a watermark, after blocks were begun or became evictable."""
        if self.is_above_watermark(group):
            self._on_pressure(group.name)

    def _record_rejection(self, group: InstanceGroup) -> None:
        self._usage.rejections[group.name] += 1
        self._on_pressure(group.name)

    @staged("plan", "sessions.py:_reserved_plan")
    async def _reserved_plan(
        self, cache: InstanceCache, group: InstanceGroup, request: WriteRequest, refusals: Mapping[str, KvcmError]
    ) -> tuple[WritePlan, Reservation | None]:
        """Plan, and reserve the plan. On a shared store the plan takes the counters as last read, and is reserved in
        the round trip that stores it."""
        limits = self._limits_of(group)
        with timed("manager.filter_write_cache_time_us"):
            plan = await self._plan(cache, limits, request, refusals)
        if plan.rejection and not plan.runs:
            self._record_rejection(group)
            raise CapacityError("; ".join([plan.rejection, *map(str, refusals.values())]))
        if not plan.runs:
            return plan, None
        reservation = Reservation(
            owner=self._new_id(32),
            limits=limits,
            uid=cache.placement.uid,
            wanted_bytes=plan.wanted_bytes,
            new_keys=plan.new_keys,
            deadline=(now := self._clock.now()) + _RESERVATION_SECONDS,
        )
        if not self._endings.is_shared and not await self._usage.reserve(reservation, cache.index):
            raise _SpaceTakenError
        self._disk.begin(reservation.owner, now + timeout_seconds(request.timeout_seconds), plan.wanted_bytes)
        return plan, reservation

    async def _plan(
        self, cache: InstanceCache, limits: Limits, request: WriteRequest, refusals: Mapping[str, KvcmError]
    ) -> WritePlan:
        keys, group = request.keys, limits.group
        wanted = cache.specs_per_key(request.spec_groups, len(keys))
        head, records = await self._chain(cache, request)
        view = self._storages.for_node(request.node_id)
        usable = [place for place in candidates(group, view) if place.storage not in refusals]
        # Blocks on a draining storage are written again, where there is another one to write them to.
        is_leaving = (self._storages.is_draining,) if usable else ()
        missing = await _missing_specs_of(
            lambda record, specs: missing_specs(record, specs, view, request.replicas, *is_leaving),
            records,
            wanted,
            page_keys=cache.batch_keys,
        )
        if not usable and any(missing):
            raise self._no_candidate(group, refusals)
        cache.index.limit_keys(limits.max_key_count)  # as configured now
        if not any(missing):
            return plan_write(WritePlanner(usable, None, 0), keys, missing, records=records, head=head)
        # While no other manager works on the store, nothing suspends from here until the space is reserved.
        on_disk = self._disk.space([place.storage for place in usable])
        space = await self._usage.free_space(limits, cache.placement.uid, cache.index, asks=not self._endings.is_shared)
        space.disk = on_disk
        plan = plan_write(
            WritePlanner(usable, space, cache.index.max_key_count), keys, missing, records=records, head=head
        )
        if plan.rejection and self._endings.is_shared:  # others may have freed space
            space = await self._usage.free_space(limits, cache.placement.uid, cache.index)
            plan = plan_write(
                WritePlanner(usable, space, cache.index.max_key_count), keys, missing, records=records, head=head
            )
        if plan.rejection and on_disk.has_refused:
            block_bytes = cache.instance.block_bytes
            self._endings.on_failed_writes(dict.fromkeys(on_disk.storages, plan.rejected * block_bytes))
        return plan

    async def _chain(
        self, cache: InstanceCache, request: WriteRequest
    ) -> tuple[tuple[int | None, int], Sequence[BlockRecord | None]]:
        """Return parent and depth of the first block, and the records of all."""
        parent_key, keys = request.parent_key, request.keys
        if parent_key is None:
            return (None, 0), await self._records(cache, keys)
        if cache.index.is_shared:  # one round trip
            if (depth := self._depths.get(cache.placement.uid, parent_key)) is not None:
                return (parent_key, depth + 1), await self._records(cache, keys)
            parent, *records = await self._records(cache, (parent_key, *keys), has_parent=True)
        else:
            (parent,) = await cache.index.get([parent_key])
            records = await self._records(cache, keys)
        return (parent_key, parent.depth + 1 if parent is not None else 0), records

    def _no_candidate(self, group: InstanceGroup, refusals: Mapping[str, KvcmError]) -> KvcmError:
        if refusals:
            error = _all_candidates_rejected(list(refusals.values()))
            if isinstance(error, CapacityError):
                self._record_rejection(group)
            return error
        message = f"no storage of group {group.name!r} is available: {list(group.storage_candidates)}"
        draining = [name for name in group.storage_candidates if self._storages.is_draining(name)]
        return NotReadyError(f"{message}, of which {draining} are being drained" if draining else message)

    async def _records(
        self, cache: InstanceCache, keys: Sequence[int], *, has_parent: bool = False
    ) -> list[BlockRecord | None]:
        """Read the records, after expiring overdue writers: their blocks can be written again.

        Args:
            cache: of the instance.
            keys: of the blocks.
            has_parent: whether the first one is the parent of the others.
        """
        with timed("manager.batch_get_location_time_us"):
            records = await self._get(cache, keys, has_parent=has_parent)
        if not any(records):
            return records
        overdue = self._endings.overdue(zip(keys, records, strict=True))
        if not overdue:
            return records
        await self._endings.expire_writers(cache, overdue)
        return await self._get(cache, keys, has_parent=has_parent)

    async def _get(self, cache: InstanceCache, keys: Sequence[int], *, has_parent: bool) -> list[BlockRecord | None]:
        if cache.index.is_shared:  # its store suspends by itself, and is asked in few calls
            is_known = has_parent or (len(keys) > 0 and self._depths.get(cache.placement.uid, keys[0]) is not None)
            return await cache.index.get_fresh(keys, is_head_known=is_known)
        records: list[BlockRecord | None] = []
        for page in batches(keys, cache.batch_keys):
            records += await cache.index.get(page)
            if len(page) < len(keys):
                await asyncio.sleep(0)
        return records

    def _new_session(
        self, cache: InstanceCache, request: WriteRequest, plan: WritePlan, reservation: Reservation | None
    ) -> WriteSession:
        seconds = timeout_seconds(request.timeout_seconds)
        if not plan.runs:
            seconds = min(seconds, _EMPTY_SESSION_SECONDS)
        session_id = reservation.owner if reservation is not None else self._new_id(32)
        deadline, starter = self._clock.now() + seconds, call_context.get().principal.name
        return WriteSession(session_id, cache.placement.uid, deadline, self._new_id(12), plan.keys, starter=starter)

    async def _store_or_abort(
        self, cache: InstanceCache, session: WriteSession, request: WriteRequest, placed: _PlacedPlan
    ) -> StartedWrite:
        """Store the session and its blocks, or nothing of them."""
        try:
            with timed(_IO_COST):
                lost = await self._store(cache, session, request, placed)
            return await self._answer(cache, session, request, placed, lost)
        except _SpaceTakenError:  # nothing is stored
            raise
        except BaseException:
            # The client did not get the session's id, so it cannot end the session.
            with suppress(KvcmError):
                await uninterrupted(self._endings.abort(cache, session))
            raise

    @staged("store", "sessions.py:_store")
    async def _store(
        self, cache: InstanceCache, session: WriteSession, request: WriteRequest, placed: _PlacedPlan
    ) -> set[int]:
        """Store the session, then its blocks; return those that another writer began in the meantime."""
        if self._endings.is_shared:
            return await self._store_together(cache, session, request, placed)
        lost: set[int] = set()
        stored = 0
        try:
            with timed("manager.put_write_location_manager_us"):
                await self._endings.open(session)
            await yield_to_others(len(request.keys), cache.batch_keys)
            for page in placed.batches:
                self._check_in_time(placed.reservation)
                with timed("manager.batch_add_location_time_us"):
                    lost |= await self._add_locations(cache, session, request, page)
                stored += 1
                await yield_to_others(len(request.keys), cache.batch_keys)
        except BaseException:
            unstored = [run.blocks for page in placed.batches[stored:] for run in page]
            await uninterrupted(self._addresses.discard(unstored))
            raise
        return lost

    async def _store_together(
        self, cache: InstanceCache, session: WriteSession, request: WriteRequest, placed: _PlacedPlan
    ) -> set[int]:
        """Do `_store` on a shared store: reservation, session and fresh blocks in one round trip.

        Raises:
            _SpaceTakenError: the plan does not fit any more, and nothing is stored.
        """
        unstored = runs = [run for page in placed.batches for run in page]
        fresh = [run.blocks for run in runs if run.planned.is_fresh]
        try:
            with timed("manager.put_write_location_manager_us"):
                left = await self._endings.begin(cache, session, placed.reservation, fresh)
            if runs:
                self._depths.put_ends(cache.placement.uid, placed.plan.runs)
            unstored = [run for run in runs if not run.planned.is_fresh]
            if left:
                parts = (part for run in runs if run.planned.is_fresh for part in run.split(left))
                unstored += [run for is_left, run in parts if is_left]
            if unstored:
                self._check_in_time(placed.reservation)
            with timed("manager.batch_add_location_time_us"):
                return await self._add_locations(cache, session, request, unstored)
        except BaseException:
            await uninterrupted(self._addresses.discard([run.blocks for run in unstored]))
            raise

    def _check_in_time(self, reservation: Reservation | None) -> None:
        if reservation is not None and self._clock.now() >= reservation.deadline - _STORE_SECONDS:
            raise NotReadyError("the store took too long for the write to begin: start it again")

    async def _answer(
        self, cache: InstanceCache, session: WriteSession, request: WriteRequest, placed: _PlacedPlan, lost: set[int]
    ) -> StartedWrite:
        plan, opened = placed.plan, placed.backends
        session = await self._remove_lost_blocks(session, placed, lost)
        self._check_storages_unchanged(opened)
        if not await self._endings.is_open(session):
            # It expired while the store was busy: blocks stored later are orphans.
            raise NotReadyError("the write session ended before its blocks were stored: start the write again")
        won, _ = _split_by_winner(placed, lost)
        flags = [True] * len(request.keys)
        for (position, keys, *_), _blocks in won:
            flags[position : position + len(keys)] = [False] * len(keys)
        await self._addresses.make([blocks for _, blocks in won])
        chunks = won[0].blocks.chunks if len(won) == 1 else [chunk for _, blocks in won for chunk in blocks.chunks]
        return StartedWrite(session, BlockMask.of(flags), chunks, plan.rejected, plan.rejection)

    async def _remove_lost_blocks(self, session: WriteSession, placed: _PlacedPlan, lost: set[int]) -> WriteSession:
        """Drop the blocks that another writer began in the meantime from the session."""
        if not lost:
            return session
        await self._addresses.discard(run.blocks for run in _split_by_winner(placed, lost)[1])
        kept = replace(session, keys=tuple(key for key in session.keys if key not in lost))
        await self._endings.replace(session, kept)
        return kept

    def _backends_of(self, reservation: Reservation | None) -> dict[str, StorageBackend | None]:
        """Return the open backends of the storages that a write goes to."""
        places = reservation.wanted_bytes if reservation is not None else ()
        return {place.storage: self._storages.backend(place.storage) for place in places}

    def _check_storages_unchanged(self, opened: Mapping[str, StorageBackend | None]) -> None:
        """Reject addresses on a storage that was removed meanwhile: its name may be that of another medium by now."""
        for storage, backend in opened.items():
            if self._storages.backend(storage) is not backend:
                raise NotReadyError(
                    f"storage {storage!r} was removed or changed while the write was being started: start it again"
                )

    async def _add_locations(
        self, cache: InstanceCache, session: WriteSession, request: WriteRequest, page: Sequence[PlacedRun]
    ) -> set[int]:
        """Add the locations to the records; return the blocks that another writer began in the meantime."""
        is_shared = cache.index.is_shared  # then `begin` was tried already
        rest = [run for run in page if is_shared or not (run.planned.is_fresh and cache.index.begin(run.blocks))]
        planned = {
            key: (run.planned.specs, record)
            for run in rest
            for key, record in zip(run.blocks.keys, run.blocks.records(), strict=True)
        }
        is_leaving, view = self._storages.is_draining, self._storages.for_node(request.node_id)

        def add_location(key: int, old: BlockRecord | None) -> BlockRecord | None:
            specs, fresh = planned[key]
            if old is None:
                return fresh
            if any(location.id == session.location_id for location in old.locations):
                return old  # the store answered too late, and this is a retry
            if missing_specs(old, specs, view, request.replicas, is_leaving) != specs:
                return old
            return old._replace(locations=(*old.locations, *fresh.locations))

        if not planned:
            return set()
        changes = await cache.index.read_modify_write(planned, add_location, reserved=True)
        return {key for key, _, record, _ in changes if not _holds(record, session.location_id)}


async def _missing_specs_of(
    lacks: Callable[[BlockRecord, Specs], Specs],
    records: Sequence[BlockRecord | None],
    wanted: Sequence[Specs],
    *,
    page_keys: int,
) -> Sequence[Specs]:
    """Return the wanted specs that each block lacks; all of them where there is no record."""
    if not any(records):
        return wanted
    missing: list[Specs] = []
    for page in batches(list(zip(records, wanted, strict=True)), page_keys):
        missing += [specs if record is None else lacks(record, specs) for record, specs in page]
        if len(page) < len(records):
            await asyncio.sleep(0)
    return missing


def _split_by_winner(placed: _PlacedPlan, lost: Collection[int]) -> tuple[list[PlacedRun], list[PlacedRun]]:
    """Return the runs that a write begins, and those it lost to other writers, in the order of the request."""
    runs = [run for page in placed.batches for run in page]
    if not lost:
        return runs, []
    parts = [part for run in runs for part in run.split(lost)]
    return [run for is_lost, run in parts if not is_lost], [run for is_lost, run in parts if is_lost]


def _holds(record: BlockRecord | None, location_id: str) -> bool:
    for location in record[2] if record is not None else ():  # noqa: SIM110 - a generator would take twice the time
        if location[0] == location_id:
            return True
    return False


# The open write sessions of all managers, as operators list them.

_SHORT = 8
_READ_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class OpenSession:
    """A session; field names are those of the wire.

    Attributes:
        short_id: the first characters of its id: the whole id is the right to finish it.
        bytes: that its blocks take when each is written with all of its specs.
        begun_at_ms: 0 where that is not known.
        starter: name of the principal that began it, "" while authentication is disabled.
        is_overdue: it is open past its deadline.
        is_ending: it was finished and is being carried out.
    """

    short_id: str
    instance_id: str
    instance_group: str
    blocks: int
    bytes: int
    begun_at_ms: int
    deadline_ms: int
    starter: str
    is_overdue: bool
    is_ending: bool


class OpenSessions:
    """Reads the stored sessions.

    Args:
        table: where they are stored.
        caches: of every instance.
        now: unix seconds.
    """

    def __init__(self, table: Table, caches: OpenCaches, now: Callable[[], float]) -> None:
        self._table = table
        self._caches = caches
        self._now = now

    async def find_all(self, wants: Callable[[InstanceCache], bool] = lambda _cache: True) -> list[OpenSession]:
        """Return the sessions that have blocks to write, ordered by deadline.

        Args:
            wants: of which instances.

        Raises:
            StorageIOError: the store cannot be asked, or a session cannot be read.
        """
        found: dict[int, list[WriteSession]] = defaultdict(list)
        documents = list((await self._table.all()).items())
        for page in batches(documents, _READ_AT_ONCE):
            for name, document in page:
                session = WriteSession.decoded(name, document)
                if session.keys:  # others have nothing to write
                    found[session.uid].append(session)
            await asyncio.sleep(0)
        listed: list[OpenSession] = []
        for uid, sessions in found.items():
            cache = self._caches.by_uid(uid)
            if cache is not None and wants(cache):
                listed += await self._load(cache, sessions)
        return sorted(listed, key=lambda each: (each.deadline_ms, each.short_id))

    async def _load(self, cache: InstanceCache, sessions: Sequence[WriteSession]) -> list[OpenSession]:
        listed: list[OpenSession] = []
        for page in batches(sessions, BATCH_KEYS):
            records = await cache.index.get([session.keys[0] for session in page])
            listed += [
                replace(self._describe(cache, session), begun_at_ms=_begun_at_ms(session, record))
                for session, record in zip(page, records, strict=True)
            ]
            await asyncio.sleep(0)
        return listed

    def _describe(self, cache: InstanceCache, session: WriteSession) -> OpenSession:
        is_ending = session.decision is not None
        return OpenSession(
            short_id=session.id[:_SHORT],
            instance_id=cache.instance.instance_id,
            instance_group=cache.instance.instance_group_name,
            blocks=len(session.keys),
            bytes=len(session.keys) * cache.instance.block_bytes,
            begun_at_ms=0,
            deadline_ms=int(session.deadline * 1000),
            starter=session.starter,
            is_overdue=not is_ending and session.deadline <= self._now(),
            is_ending=is_ending,
        )


def _begun_at_ms(session: WriteSession, first: BlockRecord | None) -> int:
    """Return when a session began, from the record of its first block."""
    locations = first.locations if first is not None else ()
    return next((int(each.written_at * 1000) for each in locations if each.id == session.location_id), 0)
