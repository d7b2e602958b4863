"""Garbage collection: metadata that is of no use to anybody any more.

* Blocks whose prefix is gone (dead_chains.py), when it has been for `GRACE_SECONDS` since this collector first saw it,
  and only in instances that are read by prefix match alone: to others every block is of use by itself (invariant 7).
* Locations whose bytes are missing (missing_bytes.py), only when somebody asks for it: storages are slow.
* Write sessions that are overdue.

The leader goes through all indexes slowly and for ever, a few blocks at a time; what it found is judged when its grace
is over, not when the next lap comes by. What is asked for on demand goes through everything at once.
What was first seen when is known to this process only: a new leader counts from its own first look.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Final, Protocol

import structlog

from kvcm.index.meta_index import Change
from kvcm.model.clock import Clock
from kvcm.model.errors import KvcmError, UnknownInstanceError
from kvcm.model.instances import Instance
from kvcm.reclaim.custody import IndexInCustody, StorageFinder
from kvcm.reclaim.dead_chains import Chain, orphans
from kvcm.reclaim.marking import went
from kvcm.reclaim.missing_bytes import Lost, locations_without_bytes, without_lost

__all__ = ["GRACE_SECONDS", "GarbageCollector", "GarbageCustodian", "GarbageReport"]

GRACE_SECONDS: Final = 600.0
WITHOUT_PREFIX: Final = "without_prefix"
WITHOUT_BYTES: Final = "without_bytes"

_SLICE: Final = 128  # blocks looked at without a pause
_CHECKED_PER_SECOND: Final = 20_000  # blocks whose bytes are asked for
_LAP_SECONDS: Final = 30.0  # from one background lap to the next, at least
_IDLE_SECONDS: Final = 1.0
_MOST_SUSPECTS: Final = 1_000_000  # of all indexes; the rest is found in a later lap

_log = structlog.get_logger("kvcm.reclaim")

OnMarked = Callable[[Instance, Sequence[Change], str], None]
"""Told of blocks that were marked, and of the kind of garbage that they are."""


class GarbageCustodian(Protocol):
    """Knows the indexes, how they are read, and the writers."""

    def indexes(self) -> Iterable[IndexInCustody]:
        """Return the index of every instance, also of those that are being removed."""

    def delay_seconds(self, instance: Instance) -> float:
        """Return how long what served stays readable for those who were given it."""

    async def is_read_in_order(self, uid: int) -> bool:
        """Return whether an instance was read by prefix match alone, through whatever manager."""

    async def overdue_sessions(self) -> int:
        """Return how many write sessions have to be ended."""

    async def expire_sessions(self) -> int:
        """End the write sessions that are overdue, and return how many there were."""

    async def flush(self) -> None:
        """Return when what was changed is as durable as configured."""


@dataclass(frozen=True, slots=True)
class GarbageReport:
    """What was found, and marked unless it was a dry run.

    Attributes:
        blocks: blocks that were looked at.
        without_bytes: locations that went because their bytes, or those of what they belong with, are missing.
        without_prefix: blocks whose prefix is gone for longer than the grace.
        expired_sessions: write sessions that were overdue, of all instances.
        freed_bytes: of these locations; they are free when the deletions are done.
    """

    blocks: int = 0
    without_bytes: int = 0
    without_prefix: int = 0
    expired_sessions: int = 0
    freed_bytes: int = 0


class GarbageCollector:
    """Collects garbage.

    Args:
        custodian: knows the indexes.
        storages: the open storages.
        clock: time source.
        blocks_per_second: looked at in the background; 0 for none.
        on_marked: told of everything that is marked.
        pause: waits some seconds, for what goes through everything at once.
    """

    def __init__(
        self,
        custodian: GarbageCustodian,
        storages: StorageFinder,
        clock: Clock,
        *,
        blocks_per_second: int = 2000,
        on_marked: OnMarked = lambda _instance, _changes, _kind: None,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._custodian = custodian
        self._storages = storages
        self._clock = clock
        self._blocks_per_second = blocks_per_second
        self._on_marked = on_marked
        self._pause = pause
        self._suspects: defaultdict[int, dict[int, float]] = defaultdict(dict)  # by uid: blocks, and when to judge them
        self._lap: AsyncIterator[int] | None = None
        self._next_lap = 0.0
        self.found: Counter[str] = Counter({WITHOUT_PREFIX: 0, WITHOUT_BYTES: 0})
        """What was marked since the manager started: blocks without prefix, locations without bytes."""

    # ── in the background ──

    async def run(self, is_leader: Callable[[], bool] = lambda: True) -> None:
        """Collect blocks whose prefix is gone while this manager leads, until cancelled."""
        led = False
        while True:
            leads = is_leader() and self._blocks_per_second > 0
            if led and not leads:  # what it saw so far is out of date when it leads again
                self._suspects.clear()
                self._lap = None
            led = leads
            await self._pause(await self._round() if leads else _IDLE_SECONDS)

    async def _round(self) -> float:
        """Look at some blocks, and return how long to pause."""
        try:
            looked_at = await self.step()
        except KvcmError as error:  # the store cannot be asked: the next lap begins anew
            _log.warning("garbage_interrupted", reason=str(error))
            looked_at, self._lap = 0, None
        except Exception:
            _log.exception("garbage_failed")
            looked_at, self._lap = 0, None
        return looked_at / self._blocks_per_second if looked_at else _IDLE_SECONDS

    async def step(self) -> int:
        """Judge what is due and look at the next few blocks; return how many, 0 between two laps.

        Raises:
            KvcmError: the store failed.
        """
        for custody in self._current():
            if self._suspects.get(custody.uid):  # of most there are none
                await self._judge(custody, _SLICE, dry_run=False)
        now = self._clock.now()
        if self._lap is None:
            if now < self._next_lap:
                return 0
            self._lap, self._next_lap = self._whole_lap(), now + _LAP_SECONDS
        looked_at = await anext(self._lap, 0)
        if not looked_at:
            self._lap = None
        return looked_at

    async def _whole_lap(self) -> AsyncIterator[int]:
        for custody in self._current():
            async for page in custody.meta_index.scan(min(_SLICE, max(1, self._blocks_per_second // 4))):
                await self._look(custody, page)
                yield len(page)

    def _current(self) -> list[IndexInCustody]:
        current = list(self._custodian.indexes())
        for uid in self._suspects.keys() - {custody.uid for custody in current}:
            del self._suspects[uid]
        return current

    # ── on demand ──

    async def collect(self, instance_id: str = "", *, dry_run: bool, check_bytes: bool) -> GarbageReport:
        """Look at everything once.

        Args:
            instance_id: only the blocks of this instance, "" for all.
            dry_run: whether to count only.
            check_bytes: whether to ask the storages for the bytes, too.

        Raises:
            UnknownInstanceError: there is no such instance.
            StorageIOError: the store or a storage cannot be asked; what was marked by then stays marked.
        """
        counts: Counter[str] = Counter()
        current = [custody for custody in self._current() if instance_id in {"", custody.instance_id}]
        if instance_id and not current:
            raise UnknownInstanceError(f"instance {instance_id!r} is not registered")
        for custody in current:
            async for page in custody.meta_index.scan(_SLICE):
                counts["blocks"] += len(page)
                await self._look(custody, page)
                if check_bytes:
                    counts += await self._check_bytes(custody, page, dry_run=dry_run)
                    await self._pause(len(page) / _CHECKED_PER_SECOND)
                await asyncio.sleep(0)
            counts += await self._judge(custody, None, dry_run=dry_run)
        ended = self._custodian.overdue_sessions() if dry_run else self._custodian.expire_sessions()
        counts["expired_sessions"] += await ended
        if not dry_run:
            await self._custodian.flush()
        return GarbageReport(**counts)

    # ── blocks whose prefix is gone ──

    async def _look(self, custody: IndexInCustody, keys: Sequence[int]) -> None:
        """Note which blocks have no prefix, and from when on that is garbage."""
        found = await orphans(custody.meta_index, keys)
        suspects, due = self._suspects[custody.uid], self._clock.now() + GRACE_SECONDS
        is_full = sum(map(len, self._suspects.values())) >= _MOST_SUSPECTS
        for key in keys:
            if not found.get(key, False):
                suspects.pop(key, None)
            elif not is_full:
                suspects.setdefault(key, due)

    async def _judge(self, custody: IndexInCustody, most: int | None, *, dry_run: bool) -> Counter[str]:
        """Collect what is due in an index, the first `most` suspects at most."""
        suspects, now = self._suspects[custody.uid], self._clock.now()
        due = list(islice(takewhile(lambda key: suspects[key] <= now, suspects), most))  # first seen, first judged
        counts: Counter[str] = Counter()
        if not due:
            return counts
        if not await self._custodian.is_read_in_order(custody.uid):
            suspects.clear()
            return counts
        for start in range(0, len(due), _SLICE):
            some = due[start : start + _SLICE]
            still = await orphans(custody.meta_index, some)
            for key in some:
                if still.get(key, False):
                    counts += await self._collect_chain(custody, key, dry_run=dry_run)
                else:
                    suspects.pop(key, None)
            await asyncio.sleep(0)
        return counts

    async def _collect_chain(self, custody: IndexInCustody, top: int, *, dry_run: bool) -> Counter[str]:
        chain = Chain(custody.meta_index, top, self._clock, self._custodian.delay_seconds(custody.instance))
        if dry_run:
            blocks, size_bytes = await chain.count()
            return Counter(without_prefix=blocks, freed_bytes=size_bytes)
        counts: Counter[str] = Counter()
        async for changes in chain.mark():
            counts[WITHOUT_PREFIX] += sum(bool(went(change.old, change.new)) for change in changes)
            counts["freed_bytes"] += self._told(custody.instance, changes, WITHOUT_PREFIX)
        # If it stays, a writer or a pin holds it or something behind it: looked at again after another grace.
        suspects = self._suspects[custody.uid]
        suspects.pop(top, None)
        suspects[top] = self._clock.now() + GRACE_SECONDS
        self.found[WITHOUT_PREFIX] += counts[WITHOUT_PREFIX]
        return counts

    # ── locations whose bytes are missing ──

    async def _check_bytes(self, custody: IndexInCustody, keys: Sequence[int], *, dry_run: bool) -> Counter[str]:
        lost = await locations_without_bytes(custody.meta_index, keys, self._storages)
        if not lost:
            return Counter()
        changes = await self._without(custody, lost, dry_run=dry_run)
        marked = [location for change in changes for location in went(change.old, change.new)]
        if not dry_run:
            self.found[WITHOUT_BYTES] += len(marked)
            self._told(custody.instance, changes, WITHOUT_BYTES)
        return Counter(without_bytes=len(marked), freed_bytes=sum(each.size_bytes for each in marked))

    async def _without(self, custody: IndexInCustody, lost: Sequence[Lost], *, dry_run: bool) -> list[Change]:
        instance, ids = custody.instance, {each.key: each.location_ids for each in lost}
        due = self._clock.now() + self._custodian.delay_seconds(instance)
        if dry_run:
            records = zip(ids, await custody.meta_index.get(list(ids)), strict=True)
            return [Change(key, old, without_lost(old, ids[key], instance, due)) for key, old in records]
        return await custody.meta_index.read_modify_write(
            ids, lambda key, old: without_lost(old, ids[key], instance, due)
        )

    def _told(self, instance: Instance, changes: Sequence[Change], kind: str) -> int:
        """Tell who listens, and return the bytes of what was marked."""
        self._on_marked(instance, changes, kind)
        return sum(location.size_bytes for change in changes for location in went(change.old, change.new))
