"""How write sessions end: finished, aborted or expired, by any manager, exactly once (invariant 3).

A session is a document. It ends in three steps, each of which may be the last that a manager lives to make:

1. The decision (which blocks succeeded) takes the place of the open session by compare-and-set: of a finish, an expiry
   and another finish exactly one wins.
2. The blocks follow it (settling.py). Doing this twice changes nothing.
3. The document goes; how a finish ended is remembered for a while (ended_sessions.py).

Whoever finds a document with a decision carries it out, so a finish that was decided is never lost, and a client that
asks again gets its answer, at whatever manager. What is still open past its deadline is decided as failed.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import structlog

from kvcm.cache.checksums import checksums_of
from kvcm.cache.deadlines import DeadlineTable
from kvcm.cache.ended_sessions import EndedSession, EndedSessions, check_same
from kvcm.cache.instance_cache import InstanceCache
from kvcm.cache.observer import UNOBSERVED, CacheObserver, WriteEnd
from kvcm.cache.pages import pages
from kvcm.cache.settling import changed, settle
from kvcm.cache.write_values import NO_HINT, FinishedWrite, Retention, Told, WriteSession
from kvcm.index.backends.backend import Change
from kvcm.index.change_events import ChangeEvents
from kvcm.model.clock import Clock
from kvcm.model.errors import InvalidArgumentError, KvcmError, NotReadyError, StorageIOError
from kvcm.model.locations import BlockRecord, LocationStatus
from kvcm.model.masks import BlockMask
from kvcm.model.principals import EVERYBODY, errand
from kvcm.store.store import Table
from kvcm.telemetry.events import EventLog

__all__ = ["SessionEndings", "timeout_seconds"]

_DEFAULT_TIMEOUT_SECONDS = 30
_MAX_TIMEOUT_SECONDS = 3600
_CARRY_OUT_SECONDS = 5.0  # then whoever looks for due sessions takes a decision over
_MOST_ATTEMPTS = 16
_MOST_DUE = 1024
_MOST_COUNTED = 1 << 20

_log = structlog.get_logger("kvcm.cache")


@dataclass(frozen=True, slots=True)
class _Opened:
    """A session that this manager opened or renewed; times in unix seconds, `at` of the opening if that was here."""

    id: str
    deadline: float
    at: float | None


class SessionEndings:
    """The stored write sessions of all instances.

    Args:
        table: where they are stored.
        find: from the number of an instance to what is kept for it; None when it is gone for good, which the store
            was asked about.
        clock: time source.
        events: told of what expired.

    Attributes:
        observer: counts how sessions end.
    """

    def __init__(
        self,
        table: Table,
        find: Callable[[int], Awaitable[InstanceCache | None]],
        clock: Clock,
        events: EventLog | None = None,
    ) -> None:
        self._table = table
        self._ended = EndedSessions(table, clock)
        self._find_cache = find
        self._clock = clock
        self._events = ChangeEvents(events if events is not None else EventLog())
        self.observer: CacheObserver = UNOBSERVED
        self._opened: DeadlineTable[_Opened] = DeadlineTable()

    @property
    def open_count(self) -> int:
        """Sessions that this manager opened and whose deadline has not passed, less those that it ended."""
        self._opened.pop_due(self._clock.now())
        return len(self._opened)

    async def open(self, session: WriteSession) -> None:
        """Store a new session."""
        if not await self._table.replace(session.id, None, session.encoded(), session.deadline):
            raise NotReadyError("the id of the new write session is taken: start the write again")
        self._opened.put(_Opened(session.id, session.deadline, self._clock.now()))

    async def change(self, old: WriteSession, new: WriteSession) -> None:
        """Replace an open session.

        Raises:
            NotReadyError: it has ended or changed meanwhile.
        """
        if not await self._table.replace(old.id, old.encoded(), new.encoded(), new.deadline):
            raise NotReadyError("the write session ended while it was being started: start the write again")

    async def is_open(self, session: WriteSession) -> bool:
        """Return whether nobody ended a session; before its deadline only its client can."""
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
            if not await self._decide(document, failed, WriteEnd.ABORTED):
                return
        await self._settle(cache, replace(session, decision=(False,) * len(session.keys)))
        if document is not None:
            await self._forget(failed)

    async def finish(
        self,
        cache: InstanceCache,
        session_id: str,
        success: BlockMask,
        retention: Retention = NO_HINT,
        told: Told = (),
    ) -> FinishedWrite:
        """End a session: successful blocks become serving, the others are dropped.

        Args:
            cache: the instance of the caller, which must be the session's.
            session_id: the session.
            success: masked positions succeeded; positions index the locations that the start returned.
            retention: how long the blocks are worth keeping; of several finishes the one that decided counts.
            told: checksums of the locations, in the order of the start; the same holds for them.

        Raises:
            InvalidArgumentError: no such session is open for the instance, or was finished lately with this mask; the
                mask or the checksums do not fit it, or the retention is out of range; the session stays open then.
            StorageIOError: the store failed; the same finish may be asked again and goes on where this one stopped.
        """
        retention.check()
        for _ in range(_MOST_ATTEMPTS):
            found = await self._find(cache, session_id)
            if found is None:
                return await self._told_before(cache, session_id, success)
            session, document = found
            decision = tuple(_success_flags(success, len(session.keys)))
            if session.decision is not None:
                check_same(session.decision, decision)
                return await self._carry_out(cache, session)
            decided = replace(
                session,
                decision=decision,
                priority=retention.priority,
                keep_until=retention.keep_until(self._clock.now()),
                checksums=await checksums_of(told, decision, cache.instance.spec_names),
            )
            if await self._decide(document, decided, WriteEnd.of(decision)):
                return await self._carry_out(cache, decided)
        raise NotReadyError("the write session keeps changing: finish it again")

    async def _told_before(self, cache: InstanceCache, session_id: str, success: BlockMask) -> FinishedWrite:
        """Return what was told of a session that was finished lately."""
        ended = await self._ended.get(session_id)
        if ended is None or not _may_end(ended, cache):
            raise _unknown()
        check_same(ended.decision, _success_flags(success, len(ended.decision)))
        return ended.finished

    async def renew(self, cache: InstanceCache, session_id: str, seconds: int) -> WriteSession:
        """Move a session's deadline to so many seconds from now.

        Raises:
            InvalidArgumentError: no such session is open for the instance.
        """
        if (found := await self._find(cache, session_id)) is None:
            raise _unknown()
        session, document = found
        renewed = replace(session, deadline=self._clock.now() + timeout_seconds(seconds))
        if session.decision is not None or not await self._table.replace(
            session_id, document, renewed.encoded(), renewed.deadline
        ):
            raise InvalidArgumentError("write_session_id is being finished: it cannot be renewed any more")
        opened = self._opened.get(session_id)
        self._opened.put(_Opened(session_id, renewed.deadline, opened.at if opened is not None else None))
        await self._move_deadlines(cache, renewed, renewed.keys)
        return renewed

    async def expire(self, most: int = _MOST_DUE) -> int:
        """End sessions that are due: overdue ones are rolled back, decisions carried out. Returns how many were."""
        ended = 0
        for session_id in await self._table.due(self._clock.now(), most):
            try:
                ended += await self._end_due(session_id)
            except KvcmError as error:
                _log.warning("session_not_ended", session=session_id[:8], reason=str(error))
                await self._put_off(session_id)
        return ended

    async def due_count(self, overdue_seconds: float = 0.0) -> int:
        """Return how many sessions `expire` would look at now, all in all; those alone that are due for so long."""
        return len(await self._table.due(self._clock.now() - overdue_seconds, _MOST_COUNTED))

    async def _put_off(self, session_id: str) -> None:
        """Come back to a session later, so that what cannot be ended now does not hide what is due behind it."""
        with suppress(StorageIOError):
            document = await self._table.get(session_id)
            if document is not None:
                await self._table.replace(session_id, document, document, self._clock.now() + _CARRY_OUT_SECONDS)

    def overdue(self, records: Iterable[tuple[int, BlockRecord | None]]) -> dict[str, list[int]]:
        """Return by session the blocks that are still writing for it though its deadline has passed."""
        now = self._clock.now()
        found: defaultdict[str, list[int]] = defaultdict(list)
        for key, record in records:
            for location in record[2] if record is not None else ():
                if location.status is LocationStatus.WRITING and location.deadline <= now:
                    found[location.session_id].append(key)
        return found

    async def end_writers(self, cache: InstanceCache, overdue: Mapping[str, Sequence[int]]) -> None:
        """Repair blocks from their records: end their session, or follow it if it was renewed, or roll them back if
        its document is gone."""
        for session_id, keys in overdue.items():
            try:
                await self._end_writer(cache, session_id, keys)
            except StorageIOError as error:  # its document cannot be read: it must not hold up the others
                _log.warning("session_not_ended", session=session_id[:8], reason=str(error))
                later = self._clock.now() + _CARRY_OUT_SECONDS
                await self._move_deadlines(cache, WriteSession(session_id, cache.placement.uid, later, "", ()), keys)

    async def _end_writer(self, cache: InstanceCache, session_id: str, keys: Sequence[int]) -> None:
        await self._end_due(session_id)
        document = await self._table.get(session_id)
        if document is None:
            orphaned = WriteSession(session_id, cache.placement.uid, 0.0, "", tuple(keys))
            await self._settle(cache, orphaned.lapsed())
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
        session = WriteSession.decoded(session_id, document)
        if not _may_end(session, cache):
            raise _unknown()
        is_overdue = session.decision is None and session.deadline <= self._clock.now()
        if is_overdue or session.has_lapsed:
            await self._end_due(session_id)
            return None
        return session, document

    async def _decide(self, document: bytes, decided: WriteSession, end: WriteEnd) -> bool:
        now, opened = self._clock.now(), self._opened.get(decided.id)
        is_ours = await self._table.replace(decided.id, document, decided.encoded(), now + _CARRY_OUT_SECONDS)
        if is_ours:
            at = opened.at if opened is not None else None
            self.observer.write_ended(end, now - at if at is not None else None)
        return is_ours

    async def _end_due(self, session_id: str) -> bool:
        document = await self._table.get(session_id)
        if document is None:
            return False
        session = WriteSession.decoded(session_id, document)
        if session.decision is None:
            if session.deadline > self._clock.now():
                return False  # renewed
            session = session.lapsed()
            # Who has nothing to write need not finish.
            if not await self._decide(document, session, WriteEnd.EXPIRED if session.keys else WriteEnd.COMMITTED):
                return False  # another manager was faster
        cache = await self._find_cache(session.uid)
        if cache is None:  # its instance is gone, and all its blocks with it
            await self._forget(session)
        else:
            await self._carry_out(cache, session)
        return True

    async def _carry_out(self, cache: InstanceCache, decided: WriteSession) -> FinishedWrite:
        finished = await self._settle(cache, decided)
        if decided.has_lapsed:
            await self._forget(decided)
            return finished
        told = await self._ended.put(decided, finished)
        self._opened.take(decided.id)
        return told

    async def _forget(self, decided: WriteSession) -> None:
        await self._table.replace(decided.id, decided.encoded(), None)
        self._opened.take(decided.id)

    async def _settle(self, cache: InstanceCache, session: WriteSession) -> FinishedWrite:
        def note(changes: Sequence[Change]) -> None:
            if session.has_lapsed:
                self._events.expired(cache.instance, changes, "session")

        return await settle(cache, session, self._clock.now(), note)

    async def _move_deadlines(self, cache: InstanceCache, session: WriteSession, keys: Sequence[int]) -> None:
        def move(_key: int, old: BlockRecord | None) -> BlockRecord | None:
            return changed(
                old,
                lambda location: (
                    location._replace(deadline=session.deadline)
                    if location.session_id == session.id and location.deadline < session.deadline
                    else location
                ),
            )

        for page in pages(keys, cache.page_keys):
            await cache.index.read_modify_write(page, move)
            await asyncio.sleep(0)


def timeout_seconds(requested: int) -> int:
    """Return the life of a session for what the client asked for: unset is 30 s, an hour at most (decision 17)."""
    return min(requested, _MAX_TIMEOUT_SECONDS) if requested > 0 else _DEFAULT_TIMEOUT_SECONDS


def _success_flags(success: BlockMask, count: int) -> Sequence[bool]:
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


def _may_end(session: WriteSession | EndedSession, cache: InstanceCache) -> bool:
    """Return whether it is of the instance, and whoever asks now has started it; while nobody is asked who he is, all
    have."""
    asking = errand.get().principal
    has_started = not session.starter or asking is EVERYBODY or asking.name == session.starter
    return has_started and session.uid == cache.placement.uid


def _unknown() -> InvalidArgumentError:
    return InvalidArgumentError("write_session_id is unknown, finished or expired: start the write again")
