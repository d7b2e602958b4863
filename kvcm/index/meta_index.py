"""MetaIndex: the blocks of one instance. Instances never share an index.

Invariants held here:

* 1: `answers` returns a location only if it is serving and its storage is available.
* 4: usage changes in the same step as the records it counts, from their difference, and nowhere else.
* 8: read-modify-write goes by sub-batches of whole lock shards, ascending; reads take no lock.

Every change is a read-modify-write with a pure function from the old record to the new one: the backend compares and
sets, and only the keys that lost to another manager are tried again. `put`, `update` and `delete` are spelled with it.

A backend that never suspends needs no locks on one loop, and none are taken for it (design.md decision 19). In front of
a shared store the locks only spare useless retries inside this process.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import Random, uniform
from typing import Any, cast

from kvcm.index.backends.backend import (
    NOTHING_WRITTEN,
    Access,
    Change,
    FinishRun,
    IndexBackend,
    RowObserver,
    Rows,
    RunChange,
    RunStore,
    SharedBackend,
    StagedChange,
    StoredRun,
    UniformRun,
    read_fresh,
    read_records,
    usage_difference,
    write_changes,
)
from kvcm.index.locking import ShardLocks, plan_sub_batches, uninterrupted
from kvcm.index.search_cache import AnswerCache, AnswerWatch, CacheBudget, StorageView
from kvcm.model.errors import NotReadyError
from kvcm.model.instances import Instance
from kvcm.model.locations import BlockRecord, BlockRun, StorageKey
from kvcm.store.redis.client import RedisClient, ScriptCall
from kvcm.store.store import Revision
from kvcm.telemetry.metrics import Histogram, current_measures, measure, measure_all, timed

__all__ = ["Applied", "Change", "IndexHandle", "MetaIndex", "Modify", "StagedWrite", "UsageListener", "UsageNote"]

_READ_MODIFY_WRITE = "meta_searcher.indexer_read_modify_write_time_us"
_CHANGED_KEYS = {
    kind: f"meta_indexer.read_modify_write_{kind}_key_count" for kind in ("put", "update", "skip", "delete")
}
_MOST_ATTEMPTS = 32
_LONGEST_PAUSE_SECONDS = 0.05

# From a ready tuple a named tuple is made in a third of the time.
_new_change = cast("Callable[[type[Change], tuple[object, ...]], Change]", tuple.__new__)
Modify = Callable[[int, BlockRecord | None], BlockRecord | None]
"""From (key, record or None) to the record to store: the same object for no change, None to remove. It must be pure,
since a key that loses a race is tried again."""
Applied = Callable[[Sequence[Change]], None]
"""Receives stored changes."""
UsageNote = Callable[[Mapping[StorageKey, int], int], None]
"""Receives a change of usage: difference in bytes by place, difference in keys."""
UsageListener = Callable[[], UsageNote]
"""Called before a write; returns the receiver of the resulting change of usage."""


@dataclass(frozen=True, slots=True)
class StagedWrite:
    """A change of blocks that waits to be made together with others.

    Attributes:
        client: of the store.
        calls: make it, in any order (`RedisClient.run_in_turn`).
        settle: takes their answers, of which the last may be missing, and returns the keys that lost.
        fail: to be called instead where it is not known whether it was made.
    """

    client: RedisClient
    calls: Sequence[ScriptCall]
    settle: Callable[[Sequence[Any]], Collection[int]]
    fail: Callable[[], None]


def _ignore_usage() -> UsageNote:
    return lambda _bytes, _keys: None


@dataclass(frozen=True, slots=True)
class IndexHandle:
    """The index of one instance.

    Attributes:
        instance: the registration.
        uid: number of the registration.
        meta_index: records of its blocks.
    """

    instance: Instance
    uid: int
    meta_index: MetaIndex

    @property
    def instance_id(self) -> str:
        """Id of the instance."""
        return self.instance.instance_id


class MetaIndex:
    """Records of one instance.

    Args:
        backend: where the records live.
        view: which storages can be read.
        shard_count: lock shards, a power of two.
        batch_key_size: least keys per sub-batch of a read-modify-write.
        max_key_count: most keys the index accepts; for a shared store the planner of a write enforces it.
        on_usage: receives changes of usage.
        budget: bytes of the search cache, shared with other indexes.
        lock_waits: receives the waiting times for lock shards.
        store: name of the store of the records.
    """

    def __init__(
        self,
        backend: IndexBackend,
        view: StorageView,
        *,
        shard_count: int = 16,
        batch_key_size: int = 256,
        max_key_count: int = 1 << 62,
        on_usage: UsageListener = _ignore_usage,
        budget: CacheBudget | None = None,
        lock_waits: Histogram | None = None,
        store: str = "",
    ) -> None:
        if shard_count < 1 or shard_count & (shard_count - 1):
            raise ValueError(f"shard_count is {shard_count}, must be a power of two")
        self._backend = backend
        self._answers = AnswerCache(backend, view, budget if budget is not None else CacheBudget(), store)
        self._locks = ShardLocks(shard_count, lock_waits)
        self._shard_count = shard_count
        self._batch_key_size = batch_key_size
        self._max_key_count = max_key_count
        self._on_usage = on_usage
        self._incoming = self._reserved = self._generation = 0
        self.answers = self._answers.answers  # the bound method: the hot path of a match has one coroutine less

    @property
    def generation(self) -> int:
        """Grows with every change made through this object; of a shared store others change the blocks, too."""
        return self._generation

    @property
    def due_from(self) -> float:
        """Unix seconds before which `due` finds nothing; 0 where only the store knows. Of a shared store as far as this
        manager was notified of changes."""
        return self._backend.due_from

    @property
    def revision(self) -> Revision | None:
        """Another one after every change, of a shared store as far as this manager was notified of it; None where only
        the store knows."""
        return self._backend.revision if self._backend.is_shared else (self._generation,)

    @property
    def is_shared(self) -> bool:
        """Whether other managers change the blocks too."""
        return self._backend.is_shared

    @property
    def has_runs(self) -> bool:
        """Whether blocks of a shared store lie together, and not each by itself."""
        return self._backend.is_shared and cast("SharedBackend", self._backend).has_runs

    @property
    def _runs(self) -> RunStore:
        assert self.has_runs
        return cast("RunStore", self._backend)

    @property
    def awaits(self) -> bool:
        """Whether a change suspends: other calls may run meanwhile."""
        return self._backend.awaits

    @property
    def key_count(self) -> int:
        """Blocks in the index, in any status; of a shared store as last read."""
        return self._backend.key_count

    @property
    def max_key_count(self) -> int:
        """Most blocks that the index accepts."""
        return self._max_key_count

    def limit_keys(self, max_key_count: int) -> None:
        """Accept so many blocks from now on; those that are there stay."""
        self._max_key_count = max_key_count

    @property
    def free_key_count(self) -> int:
        """Blocks that still fit beside those that are there, on their way in, or reserved."""
        return max(0, self._max_key_count - self._backend.key_count - self._incoming - self._reserved)

    @property
    def usage_bytes(self) -> Mapping[StorageKey, int]:
        """Bytes of all locations by place, whatever their status (invariant 4); of a shared store as last read."""
        return self._backend.usage_bytes

    @property
    def deleting_bytes(self) -> Mapping[StorageKey, int]:
        """Bytes of the locations that are being deleted, which `usage_bytes` counts too; as last read."""
        return self._backend.deleting_bytes

    @property
    def deleting_keys(self) -> int:
        """Blocks of which everything is being deleted, which `key_count` counts too; as last read."""
        return self._backend.deleting_keys

    def leave(self) -> None:
        """Refuse every call from now on: the blocks lie in another store."""
        assert self._backend.is_shared
        cast("SharedBackend", self._backend).leave()
        self._answers.clear()

    async def lift_fence(self, move: int) -> None:
        """Let changes go on that a move to another store keeps waiting which has ended."""
        await cast("SharedBackend", self._backend).lift_fence(move)

    async def refresh(self, *, is_exact: bool = True) -> None:
        """Read the number of blocks and their usage from the store.

        Args:
            is_exact: also when no change was reported since the last time; one may be in flight for milliseconds.
        """
        await self._backend.refresh(is_exact=is_exact)

    def watch(self, watch: AnswerWatch | None) -> None:
        """Report which answers may be others to one watch, None ends that. Not reported are new answers of blocks that
        other managers wrote where blocks lie in runs: these are published on a channel of their own."""
        self._answers.watch(watch)

    @property
    def has_answers(self) -> bool:
        """Whether a change by another manager is to be reported here: an answer is kept, or about to be, or all changes
        are watched."""
        return self._answers.holds_any

    def invalidate(self, keys: Iterable[int]) -> None:
        """Another manager changed these keys."""
        self._answers.forget(list(keys))

    def invalidate_all(self) -> None:
        """Changes of other managers may have been missed."""
        self._answers.clear()

    async def get(self, keys: Sequence[int]) -> list[BlockRecord | None]:
        """Return the records of `keys`, in order."""
        measure_all({"meta_searcher.indexer_query_times": 1, "meta_indexer.query_key_count": len(keys)})
        with timed("meta_searcher.indexer_get_time_us"):
            return await read_records(self._backend, keys)

    async def get_fresh(self, keys: Sequence[int], *, is_head_known: bool) -> list[BlockRecord | None]:
        """Do `get` on a shared store, for blocks that are about to be written: few have a record.

        Args:
            keys: block keys, in order.
            is_head_known: whether the first one has a record, as far as the caller knows. So has one that this index
                answered for.
        """
        measure_all({"meta_searcher.indexer_query_times": 1, "meta_indexer.query_key_count": len(keys)})
        with timed("meta_searcher.indexer_get_time_us"):
            is_head_known = is_head_known or (len(keys) > 0 and self._answers.holds(keys[0]))
            return await read_fresh(cast("SharedBackend", self._backend), keys, is_head_known=is_head_known)

    async def exists(self, keys: Sequence[int]) -> list[bool]:
        """Return for every key whether the index holds a record of it, whatever its status."""
        return [record is not None for record in await self.get(keys)]

    async def put(self, records: Mapping[int, BlockRecord]) -> list[Change]:
        """Store records, replacing earlier ones; new keys beyond the key limit are rejected."""
        return await self.read_modify_write(records, lambda key, _old: records[key])

    async def update(self, records: Mapping[int, BlockRecord]) -> list[Change]:
        """Replace records that exist; the others are left absent."""
        return await self.read_modify_write(records, lambda key, old: old and records[key])

    async def delete(self, keys: Iterable[int]) -> list[Change]:
        """Remove records."""
        return await self.read_modify_write(keys, lambda _key, _old: None)

    def reserve_keys(self, count: int) -> None:
        """Reserve so many new keys, for calls of read-modify-write with `reserved`; negative releases them."""
        self._reserved += count
        assert self._reserved >= 0

    def begin(self, run: BlockRun) -> bool:
        """Add fresh blocks that are beginning to be written, for which the caller holds a reservation, in one step:
        what `read_modify_write` does with their records, in a tenth of the time.

        Returns:
            Whether it is done. If not, nothing is: a block is not fresh any more, or others work on the store too.

        Raises:
            StorageIOError: the store failed; nothing is done.
        """
        if self._backend.is_shared:
            return False
        note = self._on_usage()
        with timed(_READ_MODIFY_WRITE, "meta_indexer.put_io_time_us"):
            usage = self._backend.begin(run)
        if usage is None:
            return False
        _measure_run("put", len(run.keys))
        self._generation += 1  # of blocks without a record, no answer is kept
        note(usage, len(run.keys))
        return True

    def serve(self, keys: Sequence[int], ending: FinishRun) -> bool:
        """Let distinct blocks serve whose writing ends, in one step; as `begin`.

        Args:
            keys: of the blocks; the observer receives them in this order.
            ending: what becomes of them.
        """
        if self._backend.is_shared:
            return False
        with timed(_READ_MODIFY_WRITE, "meta_indexer.update_io_time_us"):
            served = self._backend.serve(keys, ending)
        if served is None:
            return False
        _measure_run("update", len(keys))
        self._generation += 1
        for blocks in served:
            self._answers.served(blocks)
        return True

    def retire(self, keys: Sequence[int], ending: FinishRun) -> Sequence[UniformRun] | None:
        """Do `serve` for blocks that serve, and are being deleted then.

        Returns:
            The blocks as they are then, in their order; None, and nothing is done, where they are not such blocks.
        """
        if self._backend.is_shared:
            return None
        with timed(_READ_MODIFY_WRITE, "meta_indexer.update_io_time_us"):
            retired = self._backend.retire(keys, ending)
        if retired is not None:
            _measure_run("update", len(keys))
            self._generation += 1
            self._answers.forget(keys)
        return retired

    def stage_begin(self, runs: Sequence[BlockRun]) -> StagedWrite:
        """Return how fresh blocks are added to a shared store, for which the caller holds a reservation."""
        keys = [key for run in runs for key in run.keys]
        growth: Counter[StorageKey] = Counter()
        for run in runs:
            growth[run.location.place] += len(run.keys) * run.location.size_bytes
        return self._staged("put", keys, cast("SharedBackend", self._backend).stage_begin(runs), growth)

    def stage_serve(self, runs: Sequence[tuple[UniformRun, UniformRun]]) -> StagedWrite:
        """Return how blocks whose writing ends are let serve in a shared store.

        Args:
            runs: blocks before and after.
        """
        keys = [key for before, _ in runs for key in before.keys]
        return self._staged("update", keys, cast("SharedBackend", self._backend).stage_serve(runs), {})

    def _staged(
        self, kind: str, keys: Sequence[int], change: StagedChange, growth: Mapping[StorageKey, int]
    ) -> StagedWrite:
        assert self._backend.is_shared
        note, begin_ns = self._on_usage(), time.perf_counter_ns()

        def settle(answers: Sequence[Any]) -> Collection[int]:
            written = change.settle(answers)
            self._answers.forget(keys)
            self._generation += 1
            _measure_run(kind, len(keys))
            measure("meta_indexer.query_batch_num", 1)
            for name in (_READ_MODIFY_WRITE, f"meta_indexer.{kind}_io_time_us"):
                measure(name, (time.perf_counter_ns() - begin_ns) / 1000)
            if growth:
                note(written.usage, len(keys) - len(written.lost))
            return written.lost

        def fail() -> None:
            self._answers.forget(keys)  # they may have been stored
            if growth:
                note(growth, len(keys))  # usage is never below the truth; a recount corrects the rest

        return StagedWrite(change.client, change.calls, settle, fail)

    async def read_modify_write(
        self,
        keys: Iterable[int],
        modify: Modify,
        applied: Applied = lambda _changes: None,
        *,
        reserved: bool = False,
    ) -> list[Change]:
        """Apply `modify` to every key, atomically per key.

        A call that fails or is cancelled may have changed some keys and not others; `applied` received those, unless
        the store failed to say so.

        Args:
            keys: block keys; a repeated one counts once.
            modify: from the old record to the new one.
            applied: receives the changes of each sub-batch once they are stored, whatever happens afterwards.
            reserved: the caller holds a reservation for all new keys, so none is refused.

        Returns:
            One change per distinct key, in the order of `keys`.

        Raises:
            StorageIOError: the store failed.
            NotReadyError: other managers kept changing the same keys.
        """
        distinct = list(dict.fromkeys(keys))
        changes: dict[int, Change] = {}
        measure_all({"meta_searcher.indexer_query_times": 1, "meta_indexer.query_key_count": len(distinct)})
        with timed(_READ_MODIFY_WRITE):
            if not self._backend.awaits:
                await self._apply(distinct, modify, applied, reserved, changes)
            else:
                for batch in plan_sub_batches(distinct, self._shard_count, self._batch_key_size):
                    async with self._locks.hold(batch.shards):
                        await self._apply(batch.keys, modify, applied, reserved, changes)
        return [changes[key] for key in distinct]

    async def _apply(
        self, keys: Sequence[int], modify: Modify, applied: Applied, reserved: bool, done: dict[int, Change]
    ) -> None:
        """Read, modify, compare and set; again for the keys that lost, with growing pauses."""
        pause = 0.0
        for _ in range(_MOST_ATTEMPTS):
            records = await read_records(self._backend, keys)
            pairs = zip(keys, records, strict=True)
            changes = [_new_change(Change, (key, old, modify(key, old), False)) for key, old in pairs]
            changes, incoming = (changes, 0) if reserved or self._backend.is_shared else self._within_limit(changes)
            self._incoming += incoming  # at once: work that runs before the store answers has to see it
            store = self._store(changes, incoming, applied, done)
            keys = await (uninterrupted(store) if self._backend.awaits else store)
            if not keys:
                return
            measure("manager.lock_write_location_retry_times", 1)
            await asyncio.sleep(uniform(0, pause))  # noqa: S311 - spreads managers in time
            pause = min(_LONGEST_PAUSE_SECONDS, 2 * pause + 0.001)
        raise NotReadyError(
            f"{len(keys)} blocks were changed by other managers in each of {_MOST_ATTEMPTS} attempts: retry shortly"
        )

    async def _store(
        self, changes: Sequence[Change], incoming: int, applied: Applied, done: dict[int, Change]
    ) -> list[int]:
        """Write, and return the keys that lost."""
        written = [change for change in changes if change[2] is not change[1]]
        note = self._on_usage()
        try:
            outcome = await write_changes(self._backend, written) if written else NOTHING_WRITTEN
        except BaseException:
            self._answers.forget([change.key for change in written])  # they may have been stored
            self._report_possible_growth(written, note)
            raise
        finally:
            self._incoming -= incoming
            self._generation += bool(written)
        lost = set(outcome.lost)
        if lost:
            changes = [change for change in changes if change.key not in lost]
            written = [change for change in written if change.key not in lost]
        if self._backend.is_shared:
            self._answers.forget([change.key for change in written])
        else:
            self._answers.stored([change[0] for change in written], [change[2] for change in written])
        _report_usage(outcome.usage, written, note)
        _measure_changes(changes)
        done.update([(change[0], change) for change in changes])
        applied(changes)
        return list(outcome.lost)

    def _report_possible_growth(self, changes: Sequence[Change], note: UsageNote) -> None:
        """Count everything that may have been stored, so that usage is never below the truth and no limit is exceeded;
        a recount corrects the rest."""
        if not self._backend.is_shared:
            return
        grown: Counter[StorageKey] = Counter()
        for change in changes:
            grown += +usage_difference([change])
        keys = sum(change.old is None and change.new is not None for change in changes)
        if keys or grown:
            note(grown, keys)

    def _within_limit(self, changes: list[Change]) -> tuple[list[Change], int]:
        free = self.free_key_count
        arriving = [i for i, change in enumerate(changes) if change.old is None and change.new is not None]
        for i in arriving[free:]:
            changes[i] = Change(changes[i].key, None, None, refused=True)
        return changes, min(len(arriving), free)

    async def random_records(self, count: int, random: Random) -> Mapping[int, tuple[BlockRecord, Access]]:
        """Return about `count` blocks of a shared store, each equally likely, and when they were read; those that lie
        together come together."""
        return await cast("SharedBackend", self._backend).random_records(count, random)

    async def get_around(self, keys: Sequence[int], most: int) -> Mapping[int, BlockRecord]:
        """Return the records of blocks of a shared store, and of those that lie together with them or with what
        follows: about `most` in all."""
        return await cast("SharedBackend", self._backend).get_around(keys, most)

    async def coldest_runs(self, count: int, offset: int) -> Sequence[tuple[StoredRun, Access]]:
        """Return the runs of a shared store in which so many of the coldest blocks lie, from about a position
        on."""
        return await self._runs.coldest_runs(count, offset)

    async def runs_around(self, keys: Sequence[int], most: int) -> Sequence[tuple[StoredRun, Access]]:
        """Return the runs in which blocks of a shared store lie, and those that follow: about `most` blocks in all."""
        return await self._runs.runs_around(keys, most)

    async def random_runs(self, count: int, random: Random) -> Sequence[tuple[StoredRun, Access]]:
        """Return runs of a shared store, each equally likely, in which about so many blocks lie."""
        return await self._runs.random_runs(count, random)

    async def outer_families(self, runs: Sequence[StoredRun], most: int) -> Sequence[Sequence[tuple[int, int]]]:
        """Return for each run parent and child of relations of its blocks with others, that do not directly follow them
        there; at most so many of each parent."""
        return await self._runs.outer_families(runs, most)

    async def change_runs(self, changes: Sequence[RunChange]) -> Collection[int]:
        """Change blocks of a shared store that lie together, or remove them; return the keys of those that changed
        meanwhile, and are left as they are.

        Raises:
            StorageIOError: the store failed.
        """
        keys = [key for run, _ in changes for key in run.keys]
        kept = sum(len(run.keys) for run, locations in changes if locations)
        kind = "update" if kept else "delete"
        measure_all({"meta_searcher.indexer_query_times": 1, "meta_indexer.query_key_count": len(keys)})
        note = self._on_usage()
        with timed(_READ_MODIFY_WRITE, f"meta_indexer.{kind}_io_time_us"):
            try:
                written = await uninterrupted(self._runs.change_runs(changes))
            finally:
                self._answers.forget(keys)
                self._generation += 1
        lost = set(written.lost)
        measure(_CHANGED_KEYS[kind], len(keys) - len(lost))
        gone = [key for run, locations in changes if not locations for key in run.keys if key not in lost]
        if gone or any(written.usage.values()):
            note(written.usage, -len(gone))
        return lost

    async def children(self, key: int) -> list[int]:
        """Return the blocks that directly follow `key` in some prefix chain."""
        return await self._backend.children(key)

    async def families(self, keys: Sequence[int]) -> list[list[int]]:
        """Return for every key the blocks that directly follow it."""
        return await self._backend.families(keys)

    async def due(self, now: float, most: int) -> list[int]:
        """Return blocks with a location whose session, delay before deletion or time to live has ended, earliest
        first."""
        return await self._backend.due(now, most)

    async def due_runs(self, now: float, most: int) -> Sequence[StoredRun]:
        """Return such blocks of a shared store by runs: about so many."""
        return await self._runs.due_runs(now, most)

    @property
    def most_touched(self) -> int:
        """Return how many blocks of a shared store are to be touched in one call."""
        return cast("SharedBackend", self._backend).most_touched

    async def touch(self, counts: Mapping[int, int], at: float, *, moves: bool = True) -> None:
        """Record reads: how often by key, the least recent first, at unix time `at`; without `moves` blocks keep their
        place in the order of accesses."""
        await self._backend.touch(counts, at, moves=moves)

    async def requeue(self, counts: Mapping[int, int], at: float) -> None:
        """Set the last access of resident blocks, with a number of reads by key: their second chance is used up."""
        await self._backend.requeue(counts, at)

    async def accesses(self, keys: Sequence[int]) -> list[Access | None]:
        """Return when each block was last read and how often, None where there is none."""
        return await self._backend.accesses(keys)

    async def coldest(self, count: int, offset: int = 0) -> list[tuple[int, Access]]:
        """Return resident blocks in the order of their accesses, coldest first, from about a position on."""
        return await self._backend.coldest(count, offset)

    def observe(self, observer: RowObserver | None) -> Rows | None:
        """Report every change of resident blocks to one observer; None ends that.

        Returns:
            The blocks by row; None, and nothing is reported, when other managers change them too.
        """
        return None if self._backend.is_shared else self._backend.observe(observer)

    def scan(self, batch_size: int = 1024) -> AsyncIterator[list[int]]:
        """Yield every key that exists during the whole scan, in batches; a shared store may repeat some."""
        return self._backend.scan(batch_size)

    async def random_sample(self, count: int, random: Random) -> list[int]:
        """Return up to `count` distinct keys, each equally likely."""
        return await self._backend.random_sample(count, random)

    async def drop(self) -> None:
        """Forget everything: the instance is gone."""
        self.invalidate_all()
        await self._backend.drop()
        self._generation += 1


def _measure_run(kind: str, keys: int) -> None:
    """Measure blocks that changed in one step."""
    measure_all(
        {
            "meta_searcher.indexer_query_times": 1,
            "meta_indexer.query_key_count": keys,
            _CHANGED_KEYS[kind]: keys,
        }
    )


def _measure_changes(changes: Sequence[Change]) -> None:
    """Measure what became of the blocks of a read-modify-write."""
    if current_measures() is None:
        return
    kinds = Counter(
        [
            "skip" if new is old else "delete" if new is None else "put" if old is None else "update"
            for _, old, new, _ in changes
        ]
    )
    measure_all({_CHANGED_KEYS[kind]: count for kind, count in kinds.items()})


def _report_usage(usage: Mapping[StorageKey, int], written: Sequence[Change], note: UsageNote) -> None:
    keys = sum([(new is not None) - (old is not None) for _, old, new, _ in written])
    if keys or any(usage.values()):
        note(usage, keys)
