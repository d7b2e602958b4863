"""The interface of an index backend, which keeps the records of one instance, and the sums that all backends share."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress
from random import Random
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvcm.model.locations import BlockRecord, BlockRun, Location, LocationStatus, StorageKey
from kvcm.model.storages import StorageType
from kvcm.store.redis.client import RedisClient, ScriptCall
from kvcm.store.store import Revision
from kvcm.telemetry.metrics import current_measures, measure, measure_all, timed

__all__ = [
    "NOTHING_WRITTEN",
    "Access",
    "Change",
    "FinishRun",
    "IndexBackend",
    "PlaceTally",
    "ResidentBlocks",
    "RowObserver",
    "Rows",
    "RunChange",
    "RunStore",
    "SharedBackend",
    "StagedChange",
    "StoredRun",
    "Sum",
    "UniformRun",
    "Written",
    "is_leaving",
    "is_resident",
    "measure_runs",
    "read_answers",
    "read_records",
    "read_runs",
    "stored_at",
    "sums_of",
    "takes_the_same",
    "usage_difference",
    "whole_seconds",
    "write_changes",
]

# When blocks were last read, and which of them are *resident*: those with a serving location, which can be evicted.

_MOST_SECONDS: Final = (1 << 32) - 1
_SERVING = LocationStatus.SERVING


class Access(NamedTuple):
    """When a block was last read, and how often.

    Attributes:
        at: unix seconds; of a block not read since it became resident, when its location was written.
        reads: since it became resident; may saturate.
    """

    at: int
    reads: int


def is_resident(record: BlockRecord) -> bool:
    """Return whether a block has a serving location."""
    for location in record[2]:  # noqa: SIM110 - a generator would take twice the time
        if location[3] is _SERVING:
            return True
    return False


def stored_at(record: BlockRecord) -> float:
    """Return the unix time that counts as the last access of an unread block: when its first serving
    location was written, or its first one if none is serving."""
    for location in record[2]:
        if location[3] is _SERVING:
            return location[7]
    return record[2][0][7]


def whole_seconds(at: float) -> int:
    """Return a time as stores keep it."""
    return int(at) if 0 <= at <= _MOST_SECONDS else (_MOST_SECONDS if at > 0 else 0)


# Blocks whose only locations differ in nothing but the chunk, and how their writing ends.


class UniformRun(NamedTuple):
    """Blocks with one location each.

    Attributes:
        keys: of the blocks.
        location: what the locations have in common; its `chunk` is empty.
        chunks: of the locations, by block.
    """

    keys: Sequence[int]
    location: Location
    chunks: Sequence[bytes]


class StoredRun(NamedTuple):
    """Blocks that lie together in a shared store: their records differ in nothing but parents, depths and chunks, and
    they were read alike.

    Attributes:
        stamp: of the records; a change replaces it.
        keys: of the blocks, by their depths.
        parent: of the first block.
        depth: of the last block.
        locations: what those of each block have in common; their `chunk` is empty.
        chunks: of each location, by block.
    """

    stamp: bytes
    keys: Sequence[int]
    parent: int | None
    depth: int
    locations: tuple[Location, ...]
    chunks: Sequence[Sequence[bytes]]

    def tail(self, count: int) -> StoredRun:
        """Return the last blocks."""
        if count == len(self.keys):
            return self
        return self._replace(keys=self.keys[-count:], chunks=[some[-count:] for some in self.chunks])

    def only(self, keys: Collection[int]) -> StoredRun:
        """Return these blocks."""
        if len(keys) == len(self.keys):
            return self
        chosen = [key in keys for key in self.keys]
        picked = [list(compress(some, chosen)) for some in self.chunks]
        return self._replace(keys=list(compress(self.keys, chosen)), chunks=picked)

    def locations_by_block(self, locations: Sequence[Location]) -> Iterator[tuple[Location, ...]]:
        """Yield for each block these locations with its chunks."""
        for chunks in zip(*self.chunks, strict=True):
            pairs = zip(locations, chunks, strict=True)
            yield tuple([tuple.__new__(Location, (*each[:5], chunk, *each[6:])) for each, chunk in pairs])


RunChange: TypeAlias = tuple[StoredRun, tuple[Location, ...]]
"""Blocks, and their locations from now on, without chunks, which stay; none to remove the blocks."""
FinishRun: TypeAlias = Callable[[UniformRun], UniformRun | None]
"""From blocks that are being written to the same blocks serving, or from those to the same being deleted; None where
these do not end like that. It is pure; where the blocks lie and what they take stays as it is."""

# Blocks by row, for eviction orders over an index in this process.
#
# Rows are dense numbers from 0. A block is *resident* while it has a serving location; only resident blocks are
# reported. Everything here is synchronous: between two calls without an await nothing changes.


class RowObserver(Protocol):
    """Receives every change of residence, in the step in which it happens."""

    def added(self, row: int) -> None:
        """The block became resident."""

    def added_together(self, rows: Sequence[int], keys: Sequence[int], priority: int) -> None:
        """The blocks of these keys became resident, one after the other; the serving location of each has this
        priority."""

    def removed(self, row: int) -> None:
        """The block is not resident any more; its row may be about to be given to another one.

        Key and depth of the row are still those of the block. A dropped index says this of each of its blocks.
        """

    def changed(self, row: int) -> None:
        """The record of a resident block changed, and it still is resident."""

    def moved(self, row: int, to: int) -> None:
        """A resident block is in row `to` from now on, which was free."""

    def touched_together(self, rows: Sequence[int], reads: Sequence[int]) -> None:
        """Blocks, not all of them resident, were read, each so many times; in the order of their last reads, the least
        recent first."""


class ResidentBlocks(NamedTuple):
    """Blocks that are resident, in columns of equal length.

    Attributes:
        rows: of the blocks, ascending.
        keys: of the blocks.
        depths: in their chains.
        written_at: unix seconds, of the first serving location.
        read_at: unix seconds, as `Access.at`.
        reads: as `Access.reads`.
        priorities: the highest of the serving locations.
        size_bytes: of all serving locations.
    """

    rows: NDArray[np.int64]
    keys: NDArray[np.int64]
    depths: NDArray[np.int64]
    written_at: NDArray[np.float64]
    read_at: NDArray[np.int64]
    reads: NDArray[np.int64]
    priorities: NDArray[np.int64]
    size_bytes: NDArray[np.int64]

    def take(self, places: NDArray[np.int64]) -> ResidentBlocks:
        """Return the blocks at these places, in their order."""
        return ResidentBlocks._make([column[places] for column in self])


class Rows(Protocol):
    """The blocks of one index by row."""

    def __len__(self) -> int:
        """Return the number of rows, also of blocks that are not resident."""

    def row(self, key: int) -> int | None:
        """Return the row of a block, None when there is no record of it."""

    def key(self, row: int) -> int:
        """Return the key of the block in a row."""

    def depth(self, row: int) -> int:
        """Return the depth of the block in its chain."""

    def locations(self, row: int) -> Sequence[Location]:
        """Return the locations of the block."""

    def priority(self, row: int) -> int:
        """Return the highest priority of the block's serving locations, 0 where none serves."""

    def access(self, row: int) -> Access:
        """Return when the block was last read and how often."""

    def is_resident(self, row: int) -> bool:
        """Return whether the block has a serving location."""

    def is_like(self, row: int, other: int) -> bool:
        """Return whether two blocks have one location each, which differ in nothing but the chunk, as far as that is
        seen at once: those of one write are."""

    def children(self, row: int) -> Iterator[int]:
        """Yield the rows of the blocks that directly follow."""

    def residents(self) -> ResidentBlocks:
        """Return all resident blocks: what the other methods say of each, in a tenth of the time."""


# Sums over records (invariant 4): bytes of locations by place, and blocks being deleted.
#
# The blocks of a page mostly lie in one place, and hashing a place costs more than all the rest of the counting. So a
# tally adds up a run of locations of one place in two numbers, and looks the place up when the next one differs;
# places are compared by identity, which at worst ends a run early.

_DELETING = LocationStatus.DELETING


class Sum(NamedTuple):
    """One of the numbers that are kept with the records.

    Attributes:
        place: whose bytes; None for the number of blocks.
        is_deleting: whether only deleting locations count, else all. No sum counts all blocks.
    """

    place: StorageKey | None
    is_deleting: bool

    @property
    def field(self) -> str:
        """Its name in a store."""
        sign = "-" if self.is_deleting else ""
        return sign if self.place is None else f"{sign}{int(self.place.storage_type)}/{self.place.storage}"

    @classmethod
    def parse(cls, field: str) -> Sum | None:
        """Return the sum of that name, None when it is no name of a sum."""
        if field == "-":
            return cls(None, is_deleting=True)
        number, slash, storage = field.removeprefix("-").partition("/")
        if not slash or not number.isdecimal():
            return None
        return cls(StorageKey(storage, StorageType(int(number))), field.startswith("-"))

    def __str__(self) -> str:
        of = "" if self.place is None else f" on storage {self.place.storage!r} (type {int(self.place.storage_type)})"
        return (
            f"{'blocks' if self.place is None else 'bytes'}{of}{' that are being deleted' if self.is_deleting else ''}"
        )


class PlaceTally:
    """Sums up what records take.

    Attributes:
        deleting_blocks: blocks all of whose locations are being deleted.
    """

    __slots__ = ("_deleting", "_run_deleting", "_run_used", "_storage", "_type", "_used", "deleting_blocks")

    def __init__(self) -> None:
        self._used: Counter[StorageKey] = Counter()
        self._deleting: Counter[StorageKey] = Counter()
        self._storage: str | None = None
        self._type = StorageType.ST_UNSPECIFIED
        self._run_used = 0
        self._run_deleting = 0
        self.deleting_blocks = 0

    @property
    def used(self) -> Counter[StorageKey]:
        """Bytes of all locations."""
        self._end_run()
        return self._used

    @property
    def deleting(self) -> Counter[StorageKey]:
        """Bytes of those that are being deleted; part of `used`."""
        self._end_run()
        return self._deleting

    def change(self, old: BlockRecord | None, new: BlockRecord | None) -> None:
        """Count what a record takes instead of another one; None takes nothing."""
        if old is not None and new is not None and self._keeps_its_bytes(old[2], new[2]):
            return
        if new is not None:
            self.deleting_blocks += is_leaving(new)
            for location in new[2]:
                self._add(location, location[6])
        if old is not None:
            self.deleting_blocks -= is_leaving(old)
            for location in old[2]:
                self._add(location, -location[6])

    def _keeps_its_bytes(self, before: tuple[Location, ...], after: tuple[Location, ...]) -> bool:
        """Count the usual change, that of the status of the only location; return whether it is one."""
        if len(before) != 1 or len(after) != 1:
            return False
        old, new = before[0], after[0]
        if old[1] is not new[1] or old[2] is not new[2] or old[6] != new[6]:
            return False
        if (old[3] is _DELETING) is not (new[3] is _DELETING):
            if new[1] is not self._storage or new[2] is not self._type:
                self._begin_run(new)
            sign = 1 if new[3] is _DELETING else -1
            self._run_deleting += sign * new[6]
            self.deleting_blocks += sign
        return True

    def add(self, place: StorageKey, size_bytes: int) -> None:
        """Count bytes that are not being deleted."""
        self._used[place] += size_bytes

    def retire(self, location: Location, count: int) -> None:
        """Count so many blocks with one location like this one each, which served before and is being deleted now."""
        self.deleting_blocks += count
        if location.size_bytes:
            self._deleting[location.place] += count * location.size_bytes

    def add_equal(self, record: BlockRecord, count: int) -> None:
        """Count what so many records take that are like this one."""
        self.deleting_blocks += count * is_leaving(record)
        for location in record[2]:
            self._add(location, count * location[6])

    def update(self, other: PlaceTally) -> None:
        """Add what another one has summed up."""
        self.used.update(other.used)
        self.deleting.update(other.deleting)
        self.deleting_blocks += other.deleting_blocks

    def clear(self) -> None:
        """Reset."""
        self._end_run()
        self._used.clear()
        self._deleting.clear()
        self.deleting_blocks = 0

    def _add(self, location: Location, size_bytes: int) -> None:
        if location[1] is not self._storage or location[2] is not self._type:
            self._begin_run(location)
        self._run_used += size_bytes
        if location[3] is _DELETING:
            self._run_deleting += size_bytes

    def _begin_run(self, location: Location) -> None:
        self._end_run()
        self._storage, self._type = location[1], location[2]

    def _end_run(self) -> None:
        if self._storage is None:
            return
        place = StorageKey(self._storage, self._type)
        if self._run_used:
            self._used[place] += self._run_used
        if self._run_deleting:
            self._deleting[place] += self._run_deleting
        self._storage, self._run_used, self._run_deleting = None, 0, 0


def takes_the_same(before: tuple[Location, ...], after: tuple[Location, ...]) -> bool:
    """Return whether two states of a block have the same share in every sum."""
    return len(before) == len(after) and all(map(_same_share, before, after))


def _same_share(old: Location, new: Location) -> bool:
    if old[1] is not new[1] or old[2] is not new[2] or old[6] != new[6]:
        return False
    return (old[3] is _DELETING) is (new[3] is _DELETING)


def is_leaving(record: BlockRecord) -> bool:
    """Return whether all that there is of a block is being deleted."""
    for location in record[2]:  # noqa: SIM110 - a generator would take twice the time
        if location[3] is not _DELETING:
            return False
    return True


def sums_of(used: Mapping[StorageKey, int], deleting: Mapping[StorageKey, int], deleting_blocks: int) -> dict[Sum, int]:
    """Return all sums in one mapping, without those that are 0."""
    kinds: Iterable[tuple[bool, Mapping[StorageKey, int]]] = ((False, used), (True, deleting))
    sums = {Sum(place, is_deleting): size for is_deleting, sizes in kinds for place, size in sizes.items() if size}
    if deleting_blocks:
        sums[Sum(None, is_deleting=True)] = deleting_blocks
    return sums


class Change(NamedTuple):
    """Outcome of a read-modify-write for one key.

    Attributes:
        key: the block.
        old: record before, None if there was none.
        new: record after, None if there is none.
        refused: the key is new and the index is full; `new` is None then.
    """

    key: int
    old: BlockRecord | None
    new: BlockRecord | None
    refused: bool = False


class Written(NamedTuple):
    """Outcome of `write_many`.

    Attributes:
        lost: keys whose record was not `old` any more; nothing is changed for them.
        usage: difference of the bytes used, by place, of the keys that were changed.
    """

    lost: Collection[int]
    usage: Mapping[StorageKey, int]


NOTHING_WRITTEN = Written((), {})


@dataclass(frozen=True, slots=True)
class StagedChange:
    """A change of blocks that a shared store makes in one round trip with other changes.

    Attributes:
        client: of the store.
        calls: make it, in any order (`RedisClient.run_in_turn`).
        settle: to be called with their answers, of which the last may be missing: those did not run.
    """

    client: RedisClient
    calls: Sequence[ScriptCall]
    settle: Callable[[Sequence[Any]], Written]


class IndexBackend(Protocol):
    """Keeps the records of one instance; knows nothing of locks, answers or limits.

    Every method that awaits raises StorageIOError when the store cannot be asked.
    """

    @property
    def awaits(self) -> bool:
        """Whether reads and writes may suspend. Those of a backend that never suspends are atomic on one loop."""

    @property
    def is_shared(self) -> bool:
        """Whether other managers change the records too."""

    @property
    def key_count(self) -> int:
        """Number of records; of a shared store as last read."""

    @property
    def usage_bytes(self) -> Mapping[StorageKey, int]:
        """Bytes of all locations by place; of a shared store as last read."""

    @property
    def deleting_bytes(self) -> Mapping[StorageKey, int]:
        """Bytes of the locations that are being deleted, which `usage_bytes` counts too; as last read."""

    @property
    def deleting_keys(self) -> int:
        """Number of records all of whose locations are being deleted; as last read."""

    @property
    def due_from(self) -> float:
        """Unix seconds before which `due` finds nothing; 0 where only the store knows. Of a shared store as far as this
        manager was notified of changes."""

    @property
    def revision(self) -> Revision | None:
        """Of a shared store: another one after every change of a record, as far as this manager was notified of it;
        None where only the store knows."""

    async def refresh(self, *, is_exact: bool = True) -> None:
        """Read the number of records and their usage from the store.

        Args:
            is_exact: also when no change was reported since the last time; one may be in flight for milliseconds.
        """

    async def get_many(self, keys: Sequence[int]) -> list[BlockRecord | None]:
        """Return the records of `keys`, in order; None where there is none."""

    def answers(
        self, keys: Sequence[int], compose: Callable[[BlockRecord], bytes | None], *, stop_at_miss: bool
    ) -> list[bytes | None] | None:
        """Return what `compose` makes of the record of each key, None where it makes nothing or there is no record.

        Args:
            keys: in order.
            compose: makes of a record with one location that location's chunk or None, whatever the chunk is, the
                parent and the depth; so it is not called for each block.
            stop_at_miss: return only the answers before the first None.

        Returns:
            The answers. None where reading may suspend.
        """

    async def write_many(self, changes: Sequence[Change]) -> Written:
        """Compare and set: where a record still is `old`, store `new`, or remove it if that is None.

        Each key by itself; keys of one lock shard become visible together. `old` is what `get_many` returned.
        Usage, children, due times and access order change in the same step.
        """

    def begin(self, run: BlockRun) -> Mapping[StorageKey, int] | None:
        """Add blocks that are beginning to be written, none of which has a record, in one step that never suspends:
        what `write_many` does with their records.

        Returns:
            By how many bytes usage grows, by place. None, and nothing is done, where a key has a record, or a store has
            to be asked.

        Raises:
            StorageIOError: the store failed.
        """

    def serve(self, keys: Sequence[int], ending: FinishRun) -> Sequence[UniformRun] | None:
        """Let distinct blocks serve whose writing is done, in one step that never suspends: what `write_many` does with
        their records. Usage stays as it is.

        Returns:
            The blocks as they serve, in their order. None, and nothing is done, where one of them is not the only
            location of a block that ends like this, or a store has to be asked.

        Raises:
            StorageIOError: the store failed.
        """

    def retire(self, keys: Sequence[int], ending: FinishRun) -> Sequence[UniformRun] | None:
        """Do `serve` for blocks that serve and are to be deleted: the chunks stay as they are."""

    async def children(self, key: int) -> list[int]:
        """Return the keys whose parent is `key`, found without a scan."""

    async def families(self, keys: Sequence[int]) -> list[list[int]]:
        """Return the children of every key, in order of the keys asked for."""

    async def due(self, now: float, most: int) -> list[int]:
        """Return keys of blocks for which something has to be done (`BlockRecord.due`) not after `now`, the earliest
        first, at most so many."""

    async def touch(self, counts: Mapping[int, int], at: float, *, moves: bool = True) -> None:
        """Record that blocks were read. Keys without a record are left.

        Args:
            counts: number of reads by key, those first whose last read was first.
            at: unix time.
            moves: whether the blocks get the time, which nevertheless never goes back, or only more reads.
        """

    async def requeue(self, counts: Mapping[int, int], at: float) -> None:
        """Set the access of blocks to unix time `at` and to a number of reads by key, as if that was all that is known
        of them: a second chance is used up. Keys that are not resident are left."""

    async def accesses(self, keys: Sequence[int]) -> list[Access | None]:
        """Return when each block was last read, None where there is no record."""

    async def coldest(self, count: int, offset: int = 0) -> list[tuple[int, Access]]:
        """Return resident blocks in the order of the seconds of their accesses, the coldest first.

        Args:
            count: at most so many.
            offset: position in the order to begin at. A shared store keeps to it about: blocks near the cut may be
                left out although they are colder, or come again.
        """

    def observe(self, observer: RowObserver | None) -> Rows | None:
        """Report changes to an observer from now on, in place of the one before; None for none.

        Returns:
            The blocks by row; None, and nothing is reported, where they are not in this process.
        """

    def scan(self, batch_size: int) -> AsyncIterator[list[int]]:
        """Yield every key that exists during the whole scan at least once, in batches.

        Only a shared store may yield a key twice, while others write.
        """

    async def random_sample(self, count: int, random: Random) -> list[int]:
        """Return up to `count` distinct keys, each equally likely, in time that does not grow with the index."""

    async def drop(self) -> None:
        """Forget everything, records included: the instance is gone."""


class SharedBackend(IndexBackend, Protocol):
    """Keeps records in a store that several managers share. It makes changes of whole runs together with changes of
    other things, in one round trip.

    Attributes:
        ends_at_miss: whether `get_runs` reads no further than to a block without a record where that is enough.
        most_touched: blocks to be touched in one call.
        has_runs: whether blocks lie together, and it is a `RunStore`.
    """

    @property
    def ends_at_miss(self) -> bool: ...

    @property
    def most_touched(self) -> int: ...

    @property
    def has_runs(self) -> bool: ...

    def leave(self) -> None:
        """Refuse every call from now on: the blocks lie in another store."""

    async def lift_fence(self, move: int) -> None:
        """Let changes go on that a move to another store keeps waiting which has ended."""

    async def get_runs(
        self, keys: Sequence[int], *, stop_at_miss: bool = False
    ) -> tuple[Sequence[UniformRun], Mapping[int, BlockRecord]]:
        """Do `get_many` for those who need no more of a block than its locations: return blocks that have one location
        each together as they are stored, more than were asked for maybe, and the records of the others. With
        `stop_at_miss` blocks after the first one that cannot be read may be missing."""

    async def get_fresh(self, keys: Sequence[int], *, is_head_known: bool) -> list[BlockRecord | None]:
        """Do `get_many` for blocks that are about to be written: few have a record, of which the first one may be the
        parent of the others.

        Args:
            keys: in order.
            is_head_known: whether the first one probably has a record: then it takes no round trip more that it has.
        """

    async def random_records(self, count: int, random: Random) -> Mapping[int, tuple[BlockRecord, Access]]:
        """Return about `count` blocks, or all there are, and when they were read: each is equally likely, but those
        that lie together come together. Some that cannot be evicted may be among them."""

    async def get_around(self, keys: Sequence[int], most: int) -> Mapping[int, BlockRecord]:
        """Return the records of blocks and of those that lie together with them or with what follows, as far as that
        takes no further round trip.

        Args:
            keys: of the blocks.
            most: read about so many in all; then some of these blocks may be missing.
        """

    def stage_begin(self, runs: Sequence[BlockRun]) -> StagedChange:
        """Return the change that adds blocks which are beginning to be written; those that have a record by then
        lose."""

    def stage_serve(self, runs: Sequence[tuple[UniformRun, UniformRun]]) -> StagedChange:
        """Return the change from blocks that are being written to the same blocks serving. Its calls are guards: they
        answer 0 where one of their blocks is not as the writer left it. That one loses.

        Args:
            runs: blocks before and after; with the same chunks object the stored chunks stay.
        """


class RunStore(SharedBackend, Protocol):
    """A store in which blocks lie together (`SharedBackend.has_runs`)."""

    async def coldest_runs(self, count: int, offset: int) -> Sequence[tuple[StoredRun, Access]]:
        """Do `coldest` by runs: return those in which so many blocks lie, the coldest run of each shard first."""

    async def runs_around(self, keys: Sequence[int], most: int) -> Sequence[tuple[StoredRun, Access]]:
        """Do `get_around` by runs: those of all keys, then what follows them."""

    async def random_runs(self, count: int, random: Random) -> Sequence[tuple[StoredRun, Access]]:
        """Do `random_records` by runs, of those that can be evicted."""

    async def outer_families(self, runs: Sequence[StoredRun], most: int) -> Sequence[Sequence[tuple[int, int]]]:
        """Return for each run parent and child of relations of its blocks with others, that do not directly follow them
        there; at most so many of each parent."""

    async def due_runs(self, now: float, most: int) -> Sequence[StoredRun]:
        """Do `due` by runs."""

    async def change_runs(self, changes: Sequence[RunChange]) -> Written:
        """Change blocks as runs; those whose stamp is another one by now lose."""


def usage_difference(changes: Iterable[Change]) -> Counter[StorageKey]:
    """Return by how many bytes changes raise usage, by place (invariant 4)."""
    tally = PlaceTally()
    for _, old, new, _ in changes:
        tally.change(old, new)
    return tally.used


# Reads and writes of a store, measured for the call that runs (`kvcm.telemetry.metrics`).


async def read_records(backend: IndexBackend, keys: Sequence[int]) -> list[BlockRecord | None]:
    """Do `get_many`, and measure it."""
    return await _measured_read(backend.get_many, keys)


async def read_fresh(backend: SharedBackend, keys: Sequence[int], *, is_head_known: bool) -> list[BlockRecord | None]:
    """Do `get_fresh`, and measure it."""
    return await _measured_read(partial(backend.get_fresh, is_head_known=is_head_known), keys)


async def _measured_read(
    read: Callable[[Sequence[int]], Awaitable[list[BlockRecord | None]]], keys: Sequence[int]
) -> list[BlockRecord | None]:
    """Measure without `timed`, since every lookup of unknown blocks and every start passes here."""
    measures = current_measures()
    begin_ns = time.perf_counter_ns()
    records = await read(keys)
    if measures is not None:
        so_far, microseconds = measures.get, (time.perf_counter_ns() - begin_ns) / 1000
        absent = records.count(None)
        measures["meta_indexer.get_io_time_us"] = so_far("meta_indexer.get_io_time_us", 0) + microseconds
        measures["meta_indexer.query_batch_num"] = so_far("meta_indexer.query_batch_num", 0) + 1
        measures["meta_indexer.get_not_exist_key_count"] = so_far("meta_indexer.get_not_exist_key_count", 0) + absent
    return records


def read_answers(
    backend: IndexBackend, keys: Sequence[int], compose: Callable[[BlockRecord], bytes | None], *, stop_at_miss: bool
) -> list[bytes | None]:
    """Do `answers` of a backend that never suspends."""
    with timed("meta_indexer.get_io_time_us"):
        answers = backend.answers(keys, compose, stop_at_miss=stop_at_miss)
    assert answers is not None
    if current_measures() is not None:
        measure("meta_indexer.query_batch_num", 1)
    return answers


async def read_runs(
    backend: SharedBackend, keys: Sequence[int], *, stop_at_miss: bool
) -> tuple[Sequence[UniformRun], Mapping[int, BlockRecord]]:
    """Do `get_runs`, and measure its time; `measure_runs` measures the rest."""
    with timed("meta_indexer.get_io_time_us"):
        return await backend.get_runs(keys, stop_at_miss=stop_at_miss)


def measure_runs(
    keys: Sequence[int], runs: Sequence[UniformRun], records: Mapping[int, BlockRecord], *, all_found: bool
) -> None:
    """Measure a read of runs, and how many blocks have no record: none where the caller found all."""
    if current_measures() is not None:
        absent = () if all_found else set(keys).difference(records, *(run.keys for run in runs))
        measure_all({"meta_indexer.query_batch_num": 1, "meta_indexer.get_not_exist_key_count": len(absent)})


async def write_changes(backend: IndexBackend, changes: Sequence[Change]) -> Written:
    """Do `write_many`."""
    with timed(_timed_as(changes)):
        return await backend.write_many(changes)


def _timed_as(changes: Sequence[Change]) -> str:
    """Return what writing is measured as: upsert where blocks come and others change or go."""
    if current_measures() is None:
        return ""
    kinds = {"delete" if new is None else "put" if old is None else "update" for _, old, new, _ in changes}
    return f"meta_indexer.{kinds.pop() if len(kinds) == 1 else 'upsert'}_io_time_us"
