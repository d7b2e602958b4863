"""Writes on a store that several managers share: all that a start or a finish changes there, in one round trip.

::

    begin    reserve in every account → store the session → begin its fresh blocks
    finish   decide → let the blocks serve → the outcome replaces the document (the conclusion)

Each is a row of stages, of which a later one runs only where the earlier ones succeeded: so the order of
`write_sessions.py` holds wherever a manager or a server dies. On one server the stages are one script; on a cluster,
and where the blocks are in a store of their own, a round trip each. Where the conclusion would be one, the writer does
not wait for it: once the decision is stored and its blocks serve it has its answer, and any manager that finds a
decision without a conclusion carries it out. What does not go like this is left to the caller, who does it block by
block: blocks that are there already, blocks that failed, sessions that another manager began.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from contextvars import Context
from typing import Any, Final, NamedTuple

import structlog

from kvcm.cache.quotas import Reservation, SharedLedger
from kvcm.index.backends.backend import UniformRun
from kvcm.index.locking import uninterrupted
from kvcm.index.meta_index import MetaIndex, StagedWrite
from kvcm.model.errors import KvcmError
from kvcm.model.locations import BlockRun
from kvcm.store.redis.client import RedisClient, ScriptCall, Stages, fits_in_one, run_across
from kvcm.store.redis.store import RedisTable
from kvcm.store.store import BlocksMovedError

__all__ = ["Begun", "Conclusion", "Conclusions", "Decided", "Document", "Finished", "SharedWrites"]

_MOST_TOGETHER: Final = 64
_log = structlog.get_logger("kvcm.cache")


class Document(NamedTuple):
    """A session's document.

    Attributes:
        name: id of the session.
        content: as it is stored.
        due: unix seconds when something has to be done about it.
    """

    name: str
    content: bytes
    due: float


class Begun(NamedTuple):
    """What became of a begin.

    Attributes:
        fits: whether what it reserves fits; if not, nothing is stored.
        is_open: whether its session is stored; if not, no block is.
        lost: blocks that are there already, or were not begun.
    """

    fits: bool
    is_open: bool = False
    lost: Collection[int] = ()


class Decided(NamedTuple):
    """A decision about an open session.

    Attributes:
        before: document of the open session.
        document: that replaces it.
        outcome: that replaces this in turn, for so many seconds, if all blocks serve and that takes no round trip more;
            empty for none.
        seconds: of the outcome.
    """

    before: bytes
    document: Document
    outcome: bytes
    seconds: float


class Finished(NamedTuple):
    """What became of a finish.

    Attributes:
        is_decided: whether the session was as expected; if not, nothing is changed.
        lost: blocks that were not as their writer left them; the others serve.
        is_ended: whether the outcome has replaced the decision.
    """

    is_decided: bool
    lost: Collection[int] = ()
    is_ended: bool = False


class Conclusion(NamedTuple):
    """What replaces a decision that was carried out.

    Attributes:
        name: id of the session.
        decision: its document.
        outcome: that replaces it, for so many seconds; empty for none.
        seconds: of the outcome.
        on_end: called once, with whether it was stored.
    """

    name: str
    decision: bytes
    outcome: bytes
    seconds: float
    on_end: Callable[[bool], None]


class Conclusions:
    """Conclusions in the background, those that are waiting together.

    Args:
        client: the store.
        sessions: table of the write sessions.
    """

    def __init__(self, client: RedisClient, sessions: RedisTable) -> None:
        self._client = client
        self._sessions = sessions
        self._waiting: list[Conclusion] = []
        self._task: asyncio.Task[None] | None = None

    def add(self, conclusion: Conclusion) -> None:
        """Store a conclusion soon, or leave the session to its expiry where that fails."""
        self._waiting.append(conclusion)
        if self._task is None or self._task.done():
            # In a context of its own: what the first writer's call measures and traces ends with its answer.
            self._task = asyncio.create_task(self._store(), name="conclusions", context=Context())

    async def stored(self) -> None:
        """Return when none is outstanding."""
        while self._task is not None and not self._task.done():
            await asyncio.wait([self._task])

    async def _store(self) -> None:
        while some := self._waiting[:_MOST_TOGETHER]:
            del self._waiting[:_MOST_TOGETHER]
            answers: Sequence[int] = ()
            try:
                answers = await self._client.run([self._storing(each) for each in some])
            except KvcmError as error:
                _log.warning("sessions_not_concluded", count=len(some), reason=str(error))
            finally:
                for at, each in enumerate(some):
                    each.on_end(at < len(answers) and answers[at] == 1)

    def _storing(self, each: Conclusion) -> ScriptCall:
        if each.outcome:
            return self._sessions.finishing(each.name, each.decision, each.outcome, each.seconds)
        return self._sessions.replacing(each.name, each.decision, None)


class SharedWrites:
    """Begins and finishes writes.

    Args:
        client: the store.
        sessions: table of the write sessions.
        ledger: usage and reservations.

    Attributes:
        conclusions: those that come after the answer.
    """

    def __init__(self, client: RedisClient, sessions: RedisTable, ledger: SharedLedger) -> None:
        self._client = client
        self._sessions = sessions
        self._ledger = ledger
        self.conclusions = Conclusions(client, sessions)

    async def begin(
        self, index: MetaIndex, reservation: Reservation | None, session: Document, runs: Sequence[BlockRun]
    ) -> Begun:
        """Reserve, store a new session, and begin its fresh blocks. The caller settles the reservation.

        Raises:
            StorageIOError: the store failed; all of it may have happened, or the session alone.
        """
        return await uninterrupted(self._begin(index, reservation, session, runs))

    async def _begin(
        self, index: MetaIndex, reservation: Reservation | None, session: Document, runs: Sequence[BlockRun]
    ) -> Begun:
        reserving = self._ledger.reserving(reservation, index) if reservation is not None else []
        opening = self._sessions.replacing(session.name, None, session.content, session.due)
        blocks = index.stage_begin(runs)
        # Where a stage is a round trip the session does not wait for what is reserved, and goes where that fails.
        at_once = self._has_trips(blocks) or not reserving
        first = [[*reserving, opening]] if at_once else [reserving, [opening]]
        try:
            found = await self._run(first, blocks, recheck=self._sessions.holding(session.name, session.content))
        except BlocksMovedError:
            if len(blocks.calls) > 1:  # else the only one was refused
                blocks.fail()
            raise
        except BaseException:
            blocks.fail()
            raise
        answers = [answer for stage in found for answer in stage]
        reserved, opened, begun = (
            answers[: len(reserving)],
            answers[len(reserving) :][:1],
            answers[len(reserving) + 1 :],
        )
        is_open = opened == [1]
        if reservation is not None and not await self._ledger.reserved(reservation, index, reserved):
            if is_open:
                with suppress(KvcmError):  # else it ends by itself, without blocks
                    await self._sessions.replace(session.name, session.content, None)
            return Begun(fits=False)
        if not is_open or not runs:
            return Begun(fits=True, is_open=is_open)
        return Begun(fits=True, is_open=True, lost=blocks.settle(begun))

    async def finish(
        self, index: MetaIndex, decided: Decided, runs: Sequence[tuple[UniformRun, UniformRun]]
    ) -> Finished:
        """Decide an open session, and let its blocks serve.

        Args:
            index: of the instance.
            decided: the decision.
            runs: blocks as they were begun, and as they serve.

        Raises:
            StorageIOError: the store failed; all of it may have happened, or the first part. A decision that is stored
                is carried out by whoever finds it.
        """
        return await uninterrupted(self._finish(index, decided, runs))

    async def _finish(
        self, index: MetaIndex, decided: Decided, runs: Sequence[tuple[UniformRun, UniformRun]]
    ) -> Finished:
        name, content, due = decided.document
        blocks = index.stage_serve(runs)
        deciding, concluding = [self._sessions.replacing(name, decided.before, content, due)], []
        # What lets the blocks serve says whether all do: a stage that is cut cannot be followed by one that needs it.
        if decided.outcome and not self._has_trips(blocks) and fits_in_one(blocks.calls):
            concluding = [self._sessions.finishing(name, content, decided.outcome, decided.seconds)]
        try:
            answers = await self._run([deciding], blocks, concluding, recheck=self._sessions.holding(name, content))
        except BaseException:
            blocks.fail()
            raise
        if answers[0][0] != 1:
            return Finished(is_decided=False)
        lost = blocks.settle(answers[1])
        return Finished(is_decided=True, lost=lost, is_ended=len(answers) == 3 and answers[2][0] == 1)

    def _has_trips(self, blocks: StagedWrite) -> bool:
        """Return whether each stage of a change with these blocks is a round trip."""
        return self._client.is_cluster or blocks.client is not self._client

    async def _run(
        self, before: Stages, blocks: StagedWrite, after: Sequence[ScriptCall] = (), *, recheck: ScriptCall
    ) -> list[list[Any]]:
        """Run stages around that of the blocks, which may lie in another store."""
        stages = [*((self._client, stage) for stage in before), (blocks.client, blocks.calls)]
        if after:
            stages.append((self._client, after))
        if blocks.client is not self._client:
            return await run_across(stages)
        return await self._client.run_in_turn([stage for _, stage in stages], recheck)
