"""Moves the blocks of an instance from one metadata store to another, while engines read and write them.

::

    begin     the move gets a number and a document in the registry
    copy      the target takes the records; then again what changed meanwhile, until that is little
    fence     the source refuses changes, which wait; what is left is copied, and both are compared
    place     the registration names the target, in one change with the document: calls go on there
    clear     the source refuses reads too, and forgets the blocks

Write sessions, usage, pins and leases are in the store of the registry and stay there, so a move changes no session and
no quota. Invariants:

1. Acknowledged changes are in the store that the registration names. The fence is set before the last copy, and scripts
   of the source check it in the same step in which they change something.
2. A move that another attempt has followed changes nothing any more, however late it comes. Numbers of attempts grow;
   the fence of each tag keeps the highest that it saw, and refuses what comes with a lower one; the registration
   changes only together with the document of the attempt. An attempt whose document is stored reads the registration
   once more: what its manager knew may be older than the last move.
3. A fence whose attempt has ended stops no write: the manager that meets it removes it (`CacheManager`).
4. Bytes stay until every manager reads from the target (`READ_SECONDS`, decision 7).

A leader that dies leaves the document: its successor begins again with a copy, or clears. Rejected: to write to both
stores meanwhile (two stores never change together, so a crash between them would need a repair of its own), and to read
from both (each lookup would cost twice).
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import structlog

from kvcm.index.backends.backend import Access, Change
from kvcm.index.backends.redis_runs import Fence, RunsBackend
from kvcm.index.locking import uninterrupted
from kvcm.model.clock import Clock
from kvcm.model.errors import KvcmError, StorageIOError
from kvcm.model.instances import Registration, StoreMove
from kvcm.model.keys import split_keys
from kvcm.registry.registry import Registry
from kvcm.store.store import BlocksMovedError

__all__ = ["READ_SECONDS", "MoveProgress", "OpenRuns", "StoreMoves"]

READ_SECONDS: Final = 3.0
"""After a placement; every manager reads the registry several times in it."""
_RUNS_PER_LIST: Final = 256
_BLOCKS_PER_COPY: Final = 256
_FEW_BLOCKS: Final = 2_000  # are copied in some 50 ms, in which writes wait
_LONGEST_PAUSE_SECONDS: Final = 60.0
_log = structlog.get_logger("kvcm.store")

OpenRuns = Callable[[str, int, int, int], RunsBackend]
"""Opens the records of an instance: name of the store, uid, tags, number of the move or 0."""


@dataclass(slots=True)
class MoveProgress:
    """How far the move of an instance is.

    Attributes:
        instance_id: of the instance.
        source: store that its blocks leave.
        target: store that they come to.
        blocks: copied so far, of this attempt.
        trouble: why the last attempt ended, "" where none did.
        retry_at: unix seconds of the next attempt.
        failures: attempts that ended.
    """

    instance_id: str
    source: str
    target: str
    blocks: int = 0
    trouble: str = ""
    retry_at: float = 0.0
    failures: int = 0


class StoreMoves:
    """Moves instances to the store of their group.

    Args:
        registry: registrations and moves.
        open_runs: opens the records of an instance.
        clock: time source.
        give_way: waits while requests need the event loop.

    Attributes:
        progress: of the moves that this manager carries out, by uid.
    """

    def __init__(
        self,
        registry: Registry,
        open_runs: OpenRuns,
        clock: Clock,
        give_way: Callable[[], Awaitable[None]] = lambda: asyncio.sleep(0),
    ) -> None:
        self._registry = registry
        self._stores = registry.group_stores
        self._open = open_runs
        self._clock = clock
        self._give_way = give_way
        self.progress: dict[int, MoveProgress] = {}

    async def resume(self, is_leader: Callable[[], bool]) -> None:
        """Carry out what is to be moved, one instance after the other, while this manager leads. What fails is logged
        and tried again later.

        Args:
            is_leader: whether it does.
        """
        for registration in self._stores.misplaced():
            if is_leader():
                await self._try(registration.placement.uid, registration, is_leader)
        wanted = {each.placement.uid for each in self._stores.misplaced()}
        for move in self._stores.moves():
            # One that is not placed and not wanted: the instance was removed, or is to stay after all.
            if is_leader() and (move.is_placed or move.uid not in wanted):
                await self._end(move)
        self.progress = {uid: each for uid, each in self.progress.items() if uid in wanted}

    async def _try(self, uid: int, registration: Registration, is_leader: Callable[[], bool]) -> None:
        instance, source = registration.instance, registration.placement.store
        target = self._stores.store_of(instance.instance_group_name)
        known = self.progress.get(uid)
        if known is None or known.target != target:
            known = self.progress[uid] = MoveProgress(instance.instance_id, source, target)
        if self._clock.now() < known.retry_at:
            return
        try:
            await self._move(registration, known, is_leader)
        except KvcmError as error:
            known.failures += 1
            pause = min(2.0**known.failures / 2, _LONGEST_PAUSE_SECONDS)
            known.trouble, known.retry_at = str(error), self._clock.now() + pause
            _log.warning("store_move_failed", instance=instance.instance_id, store=target, reason=str(error))

    async def _move(self, registration: Registration, known: MoveProgress, is_leader: Callable[[], bool]) -> None:
        """Move an instance; where that fails, its blocks stay where they are.

        Raises:
            KvcmError: it failed.
        """
        move = await self._stores.begin(registration)
        if move is None:
            return
        source, target = self._source(move), self._target(move)
        await source.set_fence(Fence.LIVE)  # the attempt before may have ended behind its fence
        await target.set_fence(Fence.COPYING)
        await target.drop()
        copy = _Copy(source, target, self._give_way, known)
        changed, before = await copy.run(), math.inf
        while _FEW_BLOCKS < changed < before / 2:  # else writes are as fast as the copy: only the fence ends that
            changed, before = await copy.run(), changed
        await uninterrupted(self._switch(copy, move, registration, is_leader))
        _log.info("instance_moved", instance=known.instance_id, store=move.target, blocks=copy.blocks)

    async def _switch(
        self, copy: _Copy, move: StoreMove, registration: Registration, is_leader: Callable[[], bool]
    ) -> None:
        """Let calls go on in the target. The writes that come meanwhile wait.

        Raises:
            StorageIOError: a store failed, or the copy differs. Where that of the registry did, the registration may
                name the target all the same: the fence stays, until the next attempt has made sure of it.
            BlocksMovedError: this is not the last attempt, or the instance was removed.
        """
        try:
            await copy.source.set_fence(Fence.LEAVING)
            await copy.run()
            await copy.compare()
            if not is_leader():
                raise BlocksMovedError("this manager does not lead any more")
        except KvcmError:
            with suppress(KvcmError):
                await copy.source.set_fence(Fence.LIVE)
            raise
        if await self._stores.place(move, registration, self._clock.now()):
            await copy.target.set_fence(Fence.LIVE)
            return
        await copy.source.set_fence(Fence.LIVE)
        raise BlocksMovedError("the instance was removed, or another manager moves it")

    async def _end(self, move: StoreMove) -> None:
        """Clear the source of a move that is placed, or the target of one that is not wanted any more."""
        try:
            if not move.is_placed:
                await self._undo(move)
            elif self._clock.now() < move.placed_at + READ_SECONDS:
                await self._target(move).set_fence(Fence.LIVE)
            else:
                await _clear(self._source(move), Fence.LEFT)
                await self._stores.end(move)
        except KvcmError as error:
            _log.warning("store_not_cleared", source=move.source, target=move.target, reason=str(error))

    async def _undo(self, move: StoreMove) -> None:
        """Clear the target of a move, unless it was placed after all: this manager may not know that yet."""
        taken = await self._stores.take_over(move)
        if taken is not None:
            await self._source(taken).set_fence(Fence.LIVE)
            await _clear(self._target(taken), Fence.COPYING)
            await self._stores.end(taken)

    def _source(self, move: StoreMove) -> RunsBackend:
        self._stores.tags_in(move.source)  # raises where this manager lacks the store
        return self._open(move.source, move.uid, move.source_tags, move.number)

    def _target(self, move: StoreMove) -> RunsBackend:
        return self._open(move.target, move.uid, self._stores.tags_in(move.target), move.number)


async def _clear(runs: RunsBackend, fence: Fence) -> None:
    """Forget the blocks of a store that an instance left, or did not come to."""
    await runs.set_fence(fence)
    await runs.drop()


class _Copy:
    """Makes the records of a target those of a source, again and again.

    Runs say with their stamp whether anything changed in them: so a round after the first one reads what changed, and
    the list of all runs.

    Args:
        source: read only.
        target: changed by nothing else.
        give_way: waits while requests need the event loop.
        progress: says what was copied.

    Attributes:
        source: as given.
        target: as given.
        blocks: copied so far.
    """

    def __init__(
        self,
        source: RunsBackend,
        target: RunsBackend,
        give_way: Callable[[], Awaitable[None]],
        progress: MoveProgress,
    ) -> None:
        self.source = source
        self.target = target
        self._give_way = give_way
        self._progress = progress
        self._known: Mapping[bytes, bytes] = {}
        self.blocks = 0

    async def run(self) -> int:
        """Copy what changed since the last round, and return how many blocks that were."""
        listed: dict[bytes, bytes] = {}
        async for runs in self.source.listing(_RUNS_PER_LIST):
            for stamp, keys in runs:
                listed[stamp] = listed.get(stamp, b"") + keys
            await self._give_way()
        known, every = self._known, listed.keys() | self._known.keys()
        differing = [stamp for stamp in every if listed.get(stamp) != known.get(stamp)]
        texts = [text.get(stamp, b"") for stamp in differing for text in (listed, known)]
        changed = list(dict.fromkeys(split_keys(b"".join(texts))))
        for page in _pages(changed):
            await self._copy(page)
            await self._give_way()
        self._known = listed
        return len(changed)

    async def _copy(self, keys: Sequence[int]) -> None:
        there, wanted = await asyncio.gather(self.target.get_many(keys), self.source.get_many(keys))
        found = zip(keys, there, wanted, strict=True)
        changes = [Change(key, old, new) for key, old, new in found if old != new]
        written = await self.target.write_many(changes)
        if written.lost:
            raise BlocksMovedError("the copy is being changed by another manager")
        await self._copy_accesses([change.key for change in changes if change.new is not None])
        self.blocks += len(changes)
        self._progress.blocks = self.blocks

    async def _copy_accesses(self, keys: Sequence[int]) -> None:
        by_time: dict[int, dict[int, int]] = {}
        for key, access in zip(keys, await self.source.accesses(keys), strict=True):
            if isinstance(access, Access):
                by_time.setdefault(access.at, {})[key] = access.reads
        for at, counts in by_time.items():
            await self.target.requeue(counts, at)

    async def compare(self) -> None:
        """Compare the sums of both.

        Raises:
            StorageIOError: they differ.
        """
        for each in (self.source, self.target):
            await each.refresh()
        counts = [
            (each.key_count, Counter(each.usage_bytes), each.deleting_keys) for each in (self.source, self.target)
        ]
        if counts[0] != counts[1]:
            raise StorageIOError(f"the copy differs: {counts[0]} in the source, {counts[1]} in the target")


def _pages(keys: Sequence[int]) -> Iterator[Sequence[int]]:
    return (keys[start : start + _BLOCKS_PER_COPY] for start in range(0, len(keys), _BLOCKS_PER_COPY))
