"""Deletion executor: finds in the records what is due, and has it deleted: bytes first, then metadata.

A location in status deleting says from when its bytes may go, and every index tells which of its blocks are due. So
nothing is forgotten when a manager dies, and whoever leads goes on. Two more things become due and are found the same
way: writers whose session is overdue are ended, and what serves past the time that its writer gave is marked as
deleting.

A read lease or an unfinished writer postpones a deletion, and so does a storage that fails, with growing pauses; both
are noted in the record. Each storage has a few workers of its own (workers.py), and nobody who looks for more waits for
them: a slow or hanging storage holds up only itself.

An index is looked into again when most of what was found there is done, not before: as long as something is in flight,
every look finds it anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress

import structlog

from kvcm.index.change_events import ChangeEvents
from kvcm.model.clock import Clock
from kvcm.model.deletion import DeletionItem
from kvcm.model.errors import KvcmError
from kvcm.model.locations import LocationStatus
from kvcm.reclaim.custody import Custodian, IndexInCustody, StorageFinder
from kvcm.reclaim.deletion_marks import expired, is_expired
from kvcm.reclaim.deletions import SLICE_BLOCKS, Deleted, Deletions, slices
from kvcm.reclaim.turns import Turns
from kvcm.reclaim.workers import Backlog
from kvcm.telemetry.events import EventLog

__all__ = ["DeletionExecutor"]

_WORKERS = 4
_MOST_BLOCKS = 512  # of one look into an index
_MOST_LOOKS = 64  # per round and index: then the others get their turn
_HELD_RECHECK_SECONDS = 1.0  # a lease that is released early gives its bytes back this soon

_log = structlog.get_logger("kvcm.reclaim")


class DeletionExecutor:
    """Deletes locations that are marked as deleting.

    Args:
        storages: the open storages.
        clock: time source.
        workers_per_storage: batches that a storage deletes at a time.
        events: told of what expires.
        is_configured: whether there is a storage of a name, open here or not. Items on one that is not configured any
            more lose their metadata only; one that is not open here is tried again. By default every storage is open.
        turns: shared with other background work; by default a slice runs every turn.
    """

    def __init__(
        self,
        storages: StorageFinder,
        clock: Clock,
        workers_per_storage: int = _WORKERS,
        events: EventLog | None = None,
        is_configured: Callable[[str], bool] = lambda _storage: False,
        turns: Turns | None = None,
    ) -> None:
        self._clock = clock
        self._custodian: Custodian | None = None
        self._deletions = Deletions(storages, clock, workers_per_storage, is_configured, turns or Turns(1))
        self._events = ChangeEvents(events if events is not None else EventLog())
        self._woken = asyncio.Event()
        self._behind: dict[int, IndexInCustody] = {}  # there is more in them, to be taken up when some is done

    def serve(self, custodian: Custodian) -> None:
        """Set whose locations are deleted."""
        self._custodian = custodian

    @property
    def deleted(self) -> Deleted:
        """What was deleted since the executor was made."""
        return self._deletions.deleted

    def backlog(self, storage: str) -> Backlog:
        """Return what waits for a storage."""
        return self.backlogs().get(storage, Backlog())

    def backlogs(self) -> dict[str, Backlog]:
        """Return what waits, by storage, for those that ever had something to delete."""
        return self._deletions.backlogs()

    async def run(self, interval_seconds: float, is_leader: Callable[[], bool] = lambda: True) -> None:
        """Delete what becomes due while this manager leads, until cancelled. Looking for it waits for no storage."""
        try:
            while True:
                if is_leader():
                    await self._round(self._look)
                await self._rest(interval_seconds, is_leader)
        finally:
            self._deletions.cancel()

    async def _rest(self, seconds: float, is_leader: Callable[[], bool]) -> None:
        """Let time pass; where more is due than was taken up, go on with that as deletions are done."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while self._behind and is_leader() and loop.time() < end:
            self._deletions.progress.clear()
            try:
                async with asyncio.timeout_at(end):
                    await self._deletions.progress.wait()
            except TimeoutError:
                return
            await self._round(self._look_behind)
        with suppress(TimeoutError):
            async with asyncio.timeout_at(end):
                await self._woken.wait()
        self._woken.clear()

    def wake(self) -> None:
        """Look at once: something is to be deleted without delay, and a write may be waiting for its space."""
        self._woken.set()

    async def _round(self, look: Callable[[], Awaitable[int]]) -> None:
        try:
            await look()
        except KvcmError as error:  # the store cannot be asked: the next round tries again
            _log.warning("deletions_interrupted", reason=str(error))
        except Exception:
            _log.exception("deletions_failed")

    async def run_due(self) -> int:
        """Delete everything that is due now, and return the number of locations that were looked at.

        Raises:
            KvcmError: the store failed; what is left is found again.
        """
        seen = 0
        while (found := await self._look()) or self._behind:
            seen += found
            await self._deletions.all_done()
        return seen

    async def _look(self) -> int:
        """Begin to delete what is due, and return the number of locations that were looked at."""
        assert self._custodian is not None
        self._deletions.fail_late()
        return await self._look_at(list(self._custodian.indexes()))

    async def _look_behind(self) -> int:
        return await self._look_at(list(self._behind.values()))

    async def _look_at(self, custodies: Iterable[IndexInCustody]) -> int:
        seen, now = 0, self._clock.now()
        self._behind.clear()
        for custody in custodies:
            if custody.meta_index.due_from > now:  # nearly always
                continue
            try:
                seen += await self._look_through(custody)
            except KvcmError as error:  # a damaged record, or a store that is away: the other indexes get their turn
                _log.warning("deletions_interrupted", instance=custody.instance_id, reason=str(error))
        return seen

    async def _look_through(self, custody: IndexInCustody) -> int:
        seen = 0
        for _ in range(_MOST_LOOKS):
            if self._deletions.is_saturated(custody.uid):
                self._behind[custody.uid] = custody
                break
            found = await self._look_into(custody)
            seen += found
            if not found:
                break
        return seen

    async def _look_into(self, custody: IndexInCustody) -> int:
        """Work on the earliest blocks of an index; 0 when nothing new is due."""
        now = self._clock.now()
        keys = await custody.meta_index.due(now, _MOST_BLOCKS + self._deletions.in_flight(custody.uid))
        found = _Found()
        try:
            for page in slices(keys, SLICE_BLOCKS):
                await self._gather(custody, page, now, found)
            await self._end_overdue(custody, found)
            held = await self._held(found.items, now)
            await self._deletions.put_off(custody, held, _HELD_RECHECK_SECONDS)
        except BaseException:
            self._deletions.give_back(found.items)
            raise
        self._deletions.give_back(held)
        self._deletions.begin(custody, _without(found.items, held))
        return found.count

    async def _gather(self, custody: IndexInCustody, keys: Sequence[int], now: float, found: _Found) -> None:
        """Find out what has to be done about some blocks, and take up their deletions."""
        await self._deletions.give_way()
        for key, record in zip(keys, await custody.meta_index.get(keys), strict=True):
            for location in record.locations if record is not None else ():
                if location.status is LocationStatus.SERVING:
                    if is_expired(location, now):
                        found.expired[key] = None
                elif location.deadline > now:
                    continue
                elif location.status is LocationStatus.WRITING:
                    found.overdue.setdefault(location.session_id, []).append(key)
                elif item := self._deletions.take(custody, key, location):
                    found.items.append(item)

    async def _end_overdue(self, custody: IndexInCustody, found: _Found) -> None:
        """End overdue writers, and mark what serves past its time."""
        assert self._custodian is not None
        if found.overdue:
            await self._custodian.end_writers(custody.uid, found.overdue)
        if not found.expired:
            return
        delay = self._custodian.delay_seconds(custody.instance)
        for page in slices(list(found.expired), SLICE_BLOCKS):
            await self._deletions.give_way()
            # Each record by the time at which it is changed: a store that takes long must not eat up the delay.
            changes = await custody.meta_index.read_modify_write(
                page, lambda _key, old: expired(old, self._clock.now(), delay)
            )
            self._events.expired(custody.instance, changes, "ttl")

    async def _held(self, items: Sequence[DeletionItem], now: float) -> list[DeletionItem]:
        """Return what readers or writers still use."""
        assert self._custodian is not None
        if not items:
            return []
        held_until = await self._custodian.held_until(items)
        return [item for item, until in zip(items, held_until, strict=True) if until > now]


class _Found:
    """What a look into an index found: deletions, blocks of overdue writers by session, blocks whose time is up."""

    def __init__(self) -> None:
        self.items: list[DeletionItem] = []
        self.overdue: dict[str, list[int]] = {}
        self.expired: dict[int, None] = {}

    @property
    def count(self) -> int:
        return len(self.items) + sum(map(len, self.overdue.values())) + len(self.expired)


def _without(items: Sequence[DeletionItem], held: Sequence[DeletionItem]) -> Sequence[DeletionItem]:
    if not held:
        return items
    names = {(item.key, item.location_id) for item in held}
    return [item for item in items if (item.key, item.location_id) not in names]
