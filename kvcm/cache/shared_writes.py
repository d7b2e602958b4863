"""Writes on a store that several managers share: all that a start or a finish changes there, in one round trip.

::

    begin    reserve in every account → store the session → begin its fresh blocks
    finish   decide → let the blocks serve → the outcome replaces the document

Each is a row of stages, of which a later one runs only where the earlier ones succeeded: so the order of
`write_sessions.py` holds wherever a manager or a server dies. On one server the stages are one script; on a cluster,
and where the blocks are in a store of their own, a round trip each. What does not go like this is left to the caller,
who does it block by block: blocks that are there already, blocks that failed, sessions that another manager began.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from kvcm.cache.quotas import Reservation, SharedLedger
from kvcm.index.backends.backend import UniformRun
from kvcm.index.locking import uninterrupted
from kvcm.index.meta_index import MetaIndex, StagedWrite
from kvcm.model.errors import BlocksMovedError, KvcmError
from kvcm.model.locations import BlockRun
from kvcm.store.redis.client import RedisClient, ScriptCall, Stages, fits_in_one, run_across
from kvcm.store.redis.store import RedisTable

__all__ = ["Begun", "Decided", "Document", "Finished", "SharedWrites"]


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
        outcome: that replaces this in turn, for so many seconds, if all blocks serve; empty for none.
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


class SharedWrites:
    """Begins and finishes writes.

    Args:
        client: the store.
        sessions: table of the write sessions.
        ledger: usage and reservations.
    """

    def __init__(self, client: RedisClient, sessions: RedisTable, ledger: SharedLedger) -> None:
        self._client = client
        self._sessions = sessions
        self._ledger = ledger

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
        has_trips = self._client.is_cluster or blocks.client is not self._client
        first = [[*reserving, opening]] if has_trips or not reserving else [reserving, [opening]]
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
        if decided.outcome and fits_in_one(blocks.calls):
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
