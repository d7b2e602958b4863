"""A real memory backend behind a slow store, and lock shards that log acquire and release."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import iscoroutinefunction
from random import Random
from typing import Any

from kvcm.index.backends.backend import Change, FinishRun, Written
from kvcm.index.backends.memory import MemoryBackend
from kvcm.index.locking import ShardLocks
from kvcm.index.meta_index import MetaIndex
from kvcm.model.locations import BlockRecord, BlockRun


@dataclass
class Version:
    """A record as the store has it.

    Attributes:
        record: None once removed.
        since: step at which the store took it over.
        settled: step at which its writer got the result; from then on no reader may see an older version.
    """

    record: BlockRecord | None
    since: int
    settled: int | None = None


@dataclass
class Steps:
    """A logical clock."""

    now: int = 0

    def next(self) -> int:
        self.now += 1
        return self.now


@dataclass
class SuspendingBackend:
    """Suspends a few times before and after each call of the backend inside it.

    Attributes:
        random: decides how often.
        most: suspensions before and after a call, at most.
        on_write: sees every change right after the store took it over.
        history: versions of every key ever written, oldest first.
    """

    random: Random
    most: int = 2
    steps: Steps = field(default_factory=Steps)
    on_write: Callable[[Change], None] = lambda _change: None
    history: dict[int, list[Version]] = field(default_factory=dict)
    inner: MemoryBackend = field(default_factory=MemoryBackend)
    awaits: bool = True
    is_shared: bool = False

    def __getattr__(self, name: str) -> Any:
        """Delegate all other attributes to the backend inside; its coroutine functions suspend first."""
        found = getattr(self.inner, name)
        if not iscoroutinefunction(found):
            return found

        async def call(*arguments: Any, **named: Any) -> Any:
            await self._suspend()
            return await found(*arguments, **named)

        return call

    async def _suspend(self) -> None:
        for _ in range(self.random.randint(0, self.most)):
            await asyncio.sleep(0)

    async def get_many(self, keys: Sequence[int]) -> list[BlockRecord | None]:
        await self._suspend()
        records = await self.inner.get_many(keys)
        await self._suspend()
        return records

    async def write_many(self, changes: Sequence[Change]) -> Written:
        await self._suspend()
        written = await self.inner.write_many(changes)
        changes = [change for change in changes if change.key not in written.lost]
        versions = [Version(change.new, self.steps.next()) for change in changes]
        for change, version in zip(changes, versions, strict=True):
            self.history.setdefault(change.key, [Version(None, 0, 0)]).append(version)
            self.on_write(change)
        await self._suspend()
        for version in versions:
            version.settled = self.steps.next()
        return written

    def begin(self, run: BlockRun) -> None:
        """As a backend that asks a store: left to `write_many`."""

    def serve(self, keys: Sequence[int], ending: FinishRun) -> None:
        """As a backend that asks a store: left to `write_many`."""

    def retire(self, keys: Sequence[int], ending: FinishRun) -> None:
        """As a backend that asks a store: left to `write_many`."""

    def versions_between(self, key: int, begin: int, end: int) -> list[BlockRecord | None]:
        """Return every version of a key that a read from step `begin` to step `end` may see."""
        versions = self.history.get(key, [Version(None, 0, 0)])
        seen = []
        for version, after in zip(versions, [*versions[1:], None], strict=True):
            replaced = after is not None and after.settled is not None and after.settled <= begin
            if version.since <= end and not replaced:
                seen.append(version.record)
        return seen

    async def touch(self, counts: Mapping[int, int], at: float, *, moves: bool = True) -> None:
        await self._suspend()
        await self.inner.touch(counts, at, moves=moves)
        await self._suspend()

    async def scan(self, batch_size: int) -> AsyncIterator[list[int]]:
        async for page in self.inner.scan(batch_size):
            await self._suspend()
            yield page


@dataclass
class LockLog:
    """Which task took and gave back which shard, in order."""

    entries: list[tuple[asyncio.Task[object] | None, str, int]] = field(default_factory=list)

    def of(self, task: asyncio.Task[object]) -> list[tuple[str, int]]:
        return [(what, shard) for owner, what, shard in self.entries if owner is task]


class SpiedLock(asyncio.Lock):
    """A real lock that logs the tasks that acquire and release it."""

    def __init__(self, shard: int, log: LockLog) -> None:
        super().__init__()
        self._shard, self._log = shard, log

    async def acquire(self) -> bool:
        self._log.entries.append((asyncio.current_task(), "want", self._shard))
        await super().acquire()
        self._log.entries.append((asyncio.current_task(), "take", self._shard))
        return True

    def release(self) -> None:
        self._log.entries.append((asyncio.current_task(), "allocate", self._shard))
        super().release()


class SpiedShardLocks(ShardLocks):
    """The real lock shards, of spied locks."""

    def __init__(self, shard_count: int) -> None:
        super().__init__(shard_count)
        self.log = LockLog()
        self._locks = [SpiedLock(shard, self.log) for shard in range(shard_count)]

    @property
    def held(self) -> list[int]:
        return [shard for shard, lock in enumerate(self._locks) if lock.locked()]


def spy_on_locks(index: MetaIndex, shard_count: int) -> SpiedShardLocks:
    """Give an index spied locks in place of its own, which must be free."""
    spied = SpiedShardLocks(shard_count)
    index._locks = spied
    return spied


def check_lock_order(events: Sequence[tuple[str, int]]) -> None:
    """Invariant 8 for one read-modify-write: ascending within a batch, disjoint shards between its batches."""
    held: list[int] = []
    finished: set[int] = set()
    for what, shard in events:
        if what == "want":
            assert not held or shard > max(held), events
            assert shard not in finished, events
        elif what == "take":
            held.append(shard)
        else:
            held.remove(shard)
            finished.add(shard)
    assert not held, events
