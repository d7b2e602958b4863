"""Storage `mempool`: shared memory of one node, mapped by every engine process there (`pace://`).

The manager never sees the memory. It allocates extents, each with a stamp that is larger than all before it, and keeps
the allocations in the metadata store, so they outlive every manager. Engines write the stamp beside the bytes and
compare it before and after they read: a writer that comes late is refused and a reader that comes late misses. So
extents can be handed out again at once, those of expired and aborted sessions, too (invariant 5).

The host agent that holds the memory reports it. Another generation means new memory, for example after a reboot: all
earlier allocations are gone. One number says so for all chunks, the floor; the locations are removed in the background
(`kvcm.cache.removal`).
"""

from __future__ import annotations

import asyncio
import errno
import os
import struct
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvcm.model.clock import Clock
from kvcm.model.errors import InvalidArgumentError, KvcmError, NotReadyError, StorageIOError, UnsupportedError
from kvcm.model.storages import (
    PAGE_BYTES,
    StorageConfig,
    StorageType,
    TairMemPoolStorageSpec,
    chunk_bytes,
    extent_bytes,
    pool_bytes,
)
from kvcm.model.uri import LocationUri, path_component
from kvcm.storage.backend import Allocation, ObjectBatch, Parts, StorageBackend, StorageSpace, StoredObject, object_name
from kvcm.store.store import Table

__all__ = ["Extent", "MempoolStorage", "PoolChunk", "PoolOpener", "PoolReport", "PoolState"]

# One chunk of a memory pool as the metadata store keeps it: pure values, changed by making another one.
#
# A chunk is cut into extents of one size while any of them is taken, and into those of another size afterwards. Every
# allocated extent has the stamp of its allocation; a stamp is larger than every one before it in the chunk, also when
# all extents were free in between. So late writes, reads and frees are recognized by their stamp.
#
# Extents are allocated behind the last allocation, round and round: a freed extent is reused as late as possible, since
# a writer that is stopped may still keep its pages locked. The same few extents would otherwise fail,
# be freed and be handed out for as long as it stands.
#
# Allocations up to the floor of the pool are free: their memory is gone. So are those in a chunk of another size, of a
# pool that was configured again.

_FORMAT: Final = 1
# Format, page to begin at, bytes of the chunk, bytes of an extent, last stamp. The page was padding once: 0.
_HEADER: Final = struct.Struct("<B3xIQQQ")
_STAMPS: Final = np.dtype("<u8")
_NO_STAMPS: Final[NDArray[np.uint64]] = np.zeros(0, _STAMPS)


class Extent(NamedTuple):
    """Allocated memory.

    Attributes:
        offset: of its first byte, in the chunk or in the pool.
        stamp: of the allocation.
    """

    offset: int
    stamp: int


@dataclass(frozen=True, slots=True, eq=False)
class PoolChunk:
    """The allocator's state of a chunk.

    Attributes:
        size_bytes: of the chunk.
        last_stamp: the largest that was ever given in it.
        extent_bytes: what it is cut into, 0 while all of it is free.
        stamps: of each extent, 0 for a free one; empty while all of it is free.
        next_offset: behind the extent that was taken last.
    """

    size_bytes: int
    last_stamp: int = 0
    extent_bytes: int = 0
    stamps: NDArray[np.uint64] = field(default_factory=lambda: _NO_STAMPS)
    next_offset: int = 0

    @classmethod
    def decoded(cls, document: bytes | None, size_bytes: int, floor: int) -> PoolChunk:
        """Read a document.

        Args:
            document: None for a chunk that nothing was ever taken of.
            size_bytes: of the chunk, as the pool is configured.
            floor: extents with this stamp or a smaller one are free.

        Raises:
            StorageIOError: a newer release wrote it, or it is damaged.
        """
        if document is None:
            return cls(size_bytes)
        try:
            version, next_page, stored_bytes, extent_bytes, last_stamp = _HEADER.unpack_from(document)
            stamps = np.frombuffer(document, _STAMPS, offset=_HEADER.size)
        except (struct.error, ValueError) as error:
            raise StorageIOError(f"a stored chunk of a memory pool cannot be read: {error}") from error
        if version != _FORMAT:
            raise StorageIOError(
                f"a stored chunk of a memory pool has format {version}, this release knows {_FORMAT}: upgrade it first"
            )
        if stored_bytes != size_bytes:
            return cls(size_bytes, last_stamp)
        kept = np.where(stamps > floor, stamps, 0)
        return cls(
            size_bytes,
            last_stamp=last_stamp,
            extent_bytes=extent_bytes,
            stamps=kept,
            next_offset=next_page * PAGE_BYTES,
        )._normal()

    def encoded(self) -> bytes:
        """Return the chunk's document."""
        next_page = self.next_offset // PAGE_BYTES
        header = _HEADER.pack(_FORMAT, next_page, self.size_bytes, self.extent_bytes, self.last_stamp)
        return header + self.stamps.astype(_STAMPS).tobytes()

    def _normal(self) -> PoolChunk:
        if self.stamps.any():
            return self
        return PoolChunk(self.size_bytes, self.last_stamp, next_offset=self.next_offset)

    @property
    def allocated_bytes(self) -> int:
        """What the extents that are taken take up."""
        return int(np.count_nonzero(self.stamps)) * self.extent_bytes

    @property
    def free_count(self) -> int:
        """Extents that are free; of a chunk that is not cut, 0."""
        return len(self.stamps) - int(np.count_nonzero(self.stamps))

    def allocate(self, extent_bytes: int, most: int, least_stamp: int) -> tuple[PoolChunk, list[Extent]]:
        """Allocate up to `most` extents, none when the chunk is full; all get one stamp.

        They are the free ones behind the extent that was taken last, then those from the beginning on.

        Args:
            extent_bytes: whole pages.
            most: extents that are wanted.
            least_stamp: the stamp that they get, unless a larger one was given before.
        """
        stamps = self.stamps if self.extent_bytes else np.zeros(self.size_bytes // extent_bytes, _STAMPS)
        if self.extent_bytes not in {0, extent_bytes}:
            return self, []
        free = np.flatnonzero(stamps == 0)
        behind = np.searchsorted(free, -(-self.next_offset // extent_bytes))
        free = np.concatenate((free[behind:], free[:behind]))[:most]
        if not len(free):
            return self, []
        stamp = max(self.last_stamp + 1, least_stamp)
        stamps = stamps.copy()
        stamps[free] = stamp
        end = (int(free[-1]) + 1) * extent_bytes
        chunk = replace(self, last_stamp=stamp, extent_bytes=extent_bytes, stamps=stamps, next_offset=end)
        return chunk, [Extent(index * extent_bytes, stamp) for index in free.tolist()]

    def free(self, extents: Iterable[Extent]) -> PoolChunk:
        """Free extents that still are whose they were; the chunk itself when there are none."""
        owned = [extent for extent in extents if self.is_allocated(extent)]
        if not owned:
            return self
        stamps = self.stamps.copy()
        stamps[[extent.offset // self.extent_bytes for extent in owned]] = 0
        return replace(self, stamps=stamps)._normal()

    def is_allocated(self, extent: Extent) -> bool:
        """Return whether an extent is taken, by whom its stamp says."""
        if not self.extent_bytes or extent.offset % self.extent_bytes or extent.stamp <= 0:
            return False
        index = extent.offset // self.extent_bytes
        return index < len(self.stamps) and int(self.stamps[index]) == extent.stamp

    def extents(self) -> Iterator[Extent]:
        """Return the allocated extents."""
        for index in np.flatnonzero(self.stamps).tolist():
            yield Extent(index * self.extent_bytes, int(self.stamps[index]))


# State of the memory of a pool, by the reports of its host: a document of the metadata store.

_POOL_STATE_FORMAT = 1


@dataclass(frozen=True, slots=True)
class PoolReport:
    """A report of a host agent about a pool.

    Attributes:
        node_id: the host.
        generation: made at random with the memory, never 0.
        capacity_bytes: that can be handed out.
        valid_ms: the pool counts as gone after so long without a report; 0 is the value of the last report of this
            generation, without one for ever.
    """

    node_id: str
    generation: int
    capacity_bytes: int
    valid_ms: int = 0

    def check(self, storage: str, spec: TairMemPoolStorageSpec) -> None:
        """Refuse a report that is not of the pool as it is configured.

        Raises:
            InvalidArgumentError: naming the field and the allowed values.
        """
        if self.node_id != spec.node_id:
            raise InvalidArgumentError(
                f"node_id is {self.node_id!r}, but storage {storage!r} is on node {spec.node_id!r}"
            )
        if not self.generation:
            raise InvalidArgumentError("generation is 0, must be the random number that was made with the memory")
        if self.capacity_bytes < pool_bytes(spec.capacity_bytes):
            raise InvalidArgumentError(
                f"capacity_bytes is {self.capacity_bytes}, storage {storage!r} is configured with "
                f"{spec.capacity_bytes}: make the pool at least as large, or add the storage with what it has"
            )
        if self.valid_ms < 0:
            raise InvalidArgumentError(f"valid_ms is {self.valid_ms}, must be >= 0 (0 is as the last report said)")


class _Document(msgspec.Struct, array_like=True, frozen=True):
    version: int
    generation: int
    floor: int
    reported_at: float
    valid_ms: int
    purged: int


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Document)


class PoolState(NamedTuple):
    """The memory of a pool, as last reported.

    Attributes:
        generation: of the memory; 0 before the first report.
        floor: the memory of allocations with this stamp or a smaller one is gone.
        reported_at: unix seconds of the last report.
        valid_ms: the pool counts as gone after so long without a report; 0 is never.
        purged: the floor up to which all locations were forgotten.
    """

    generation: int = 0
    floor: int = 0
    reported_at: float = 0.0
    valid_ms: int = 0
    purged: int = 0

    def encoded(self) -> bytes:
        """Return the state's document."""
        return _encoder.encode(_Document(_POOL_STATE_FORMAT, *self))

    @classmethod
    def decoded(cls, document: bytes | None) -> PoolState:
        """Decode the output of `encoded`; None is a pool without a report.

        Raises:
            StorageIOError: a newer release wrote it, or it is damaged.
        """
        if document is None:
            return cls()
        try:
            stored = _decoder.decode(document)
        except ValueError as error:
            raise StorageIOError(f"the stored state of a memory pool cannot be read: {error}") from error
        if stored.version != _POOL_STATE_FORMAT:
            raise StorageIOError(
                f"the stored state of a memory pool has format {stored.version}, "
                f"this release knows {_POOL_STATE_FORMAT}: "
                "upgrade it first"
            )
        return cls(
            stored.generation,
            floor=stored.floor,
            reported_at=stored.reported_at,
            valid_ms=stored.valid_ms,
            purged=stored.purged,
        )

    def why_not_usable(self, node_id: str, now: float) -> str:
        """Return why nothing can be written to the pool or read, "" while it can.

        Args:
            node_id: of the pool.
            now: unix seconds.
        """
        if not self.generation:
            return f"no host agent has reported the pool on node {node_id!r} yet"
        seconds = now - self.reported_at
        if self.valid_ms and seconds > self.valid_ms / 1000:
            return f"no host agent has reported the pool on node {node_id!r} for {seconds:.0f} s"
        return ""


# The chunks of a memory pool in the metadata store: read, and changed by compare-and-set, as all documents are.
#
# Every manager caches the documents. The store rejects a change that is based on a stale one; then it is read again.
# Where no other manager works on the store, the cache is the truth: a pool is opened again with the same
# `_PoolDocuments`.
#
# Leases on chunks would spare managers that race for one a try. They were rejected: a lease has to expire, and while
# it does, the memory of a dead manager is lost. Here nothing expires and nothing is lost with a manager;
# managers rarely meet since each takes its chunks at random, and they change a chunk once for a whole page of blocks.

_MOST_REMEMBERED = 1024  # documents: eight kilobytes each for extents of 64 KiB
_MOST_ATTEMPTS = 64
_LOCKS = 64
_AT_ONCE = 32  # chunks that are read or changed at a time
_UNCUT = 0
Modify = Callable[[PoolChunk], PoolChunk]
"""From a chunk to what it becomes: the same object for no change. Called again when another manager was faster."""


class _Summary(NamedTuple):
    extent_bytes: int
    allocated_bytes: int


class _PoolDocuments:
    """Chunks of one pool, by number.

    Args:
        table: where they are kept.
        name: of the storage.
        capacity_bytes: of the pool, as configured.
        is_shared: whether other managers change them, too.
        random: spreads managers over the chunks, and over time.
    """

    def __init__(self, table: Table, name: str, capacity_bytes: int, random: Random, *, is_shared: bool) -> None:
        self._table = table
        self._name = name
        self._is_shared = is_shared
        self._random = random
        self.chunk_bytes = chunk_bytes(capacity_bytes)
        self.capacity_bytes = pool_bytes(capacity_bytes)
        self.count = -(-self.capacity_bytes // self.chunk_bytes)
        self.floor = 0
        # Striped: changes of one chunk by this manager would only make each other fail.
        self._locks = [asyncio.Lock() for _ in range(min(_LOCKS, self.count))]
        self._remembered: dict[int, bytes | None] = {}
        self._summaries: dict[int, _Summary] = {}
        self._with_space: defaultdict[int, dict[int, None]] = defaultdict(dict)  # by size of extents
        self._taken_bytes = 0
        self._current: dict[int, int] = {}  # chunk that extents of a size were taken of last
        self._left: dict[int, int] = {}  # chunk that was used up before that
        self._unread: deque[int] = deque()
        self._forget()

    def size_of(self, number: int) -> int:
        """Return the bytes of a chunk; those of the last one may be fewer."""
        return min(self.chunk_bytes, self.capacity_bytes - number * self.chunk_bytes)

    @property
    def allocated_bytes(self) -> int:
        """Allocated bytes of all chunks, as last seen."""
        return self._taken_bytes

    def raise_floor(self, floor: int) -> None:
        """Note that the memory of all allocations up to a stamp is gone."""
        if floor > self.floor:
            self.floor = floor
            self._forget()

    def _forget(self) -> None:
        self._remembered.clear()
        self._summaries.clear()
        self._with_space.clear()
        self._taken_bytes = 0
        first = self._random.randrange(self.count)
        self._unread = deque((*range(first, self.count), *range(first)))

    async def read(self, number: int) -> PoolChunk:
        """Return a chunk as it is stored now.

        Raises:
            StorageIOError: the store cannot be asked.
        """
        return self._remember(number, await self._table.get(self._document_name(number)))

    async def read_many(self, numbers: Iterable[int]) -> AsyncIterator[tuple[int, PoolChunk]]:
        """Yield chunks as they are stored now, some at a time."""
        wanted = list(numbers)
        for start in range(0, len(wanted), _AT_ONCE):
            some = wanted[start : start + _AT_ONCE]
            for number, chunk in zip(some, await asyncio.gather(*map(self.read, some)), strict=True):
                yield number, chunk
            await asyncio.sleep(0)

    async def change(self, number: int, modify: Modify) -> None:
        """Change a chunk, atomically.

        Raises:
            StorageIOError: the store failed, and the change may have happened; or other managers were always faster.
        """
        async with self._locks[number % len(self._locks)]:
            is_fresh = not self._is_shared
            for attempt in range(_MOST_ATTEMPTS):
                document, chunk, is_fresh = await self._get(number, is_fresh)
                changed = modify(chunk)
                if changed is chunk and is_fresh:
                    return
                if changed is not chunk and await self._replace(number, document, changed):
                    return
                self._remembered.pop(number, None)
                is_fresh = not self._is_shared
                if attempt:
                    await asyncio.sleep(self._random.uniform(0, min(0.05, 0.001 * attempt)))
        raise StorageIOError(f"storage {self._name}: other managers kept changing chunk {number} of the pool")

    async def _get(self, number: int, is_fresh: bool) -> tuple[bytes | None, PoolChunk, bool]:
        """Return a chunk as last seen, and whether that is how it is stored now."""
        if number in self._remembered:
            document = self._remembered[number]
            return document, PoolChunk.decoded(document, self.size_of(number), self.floor), is_fresh
        document = await self._table.get(self._document_name(number))
        return document, self._remember(number, document), True

    async def _replace(self, number: int, old: bytes | None, chunk: PoolChunk) -> bool:
        document = chunk.encoded()
        try:
            is_done = await self._table.replace(self._document_name(number), old, document)
        except BaseException:
            self._remembered.pop(number, None)  # it may have been stored
            raise
        if is_done:
            self._remember_summary(number, document, chunk)
        return is_done

    def _remember(self, number: int, document: bytes | None) -> PoolChunk:
        chunk = PoolChunk.decoded(document, self.size_of(number), self.floor)
        self._remember_summary(number, document, chunk)
        return chunk

    def _remember_summary(self, number: int, document: bytes | None, chunk: PoolChunk) -> None:
        self._remembered.pop(number, None)
        self._remembered[number] = document
        if len(self._remembered) > _MOST_REMEMBERED:
            del self._remembered[next(iter(self._remembered))]
        before = self._summaries.get(number, _Summary(_UNCUT, 0))
        self._with_space[before.extent_bytes].pop(number, None)
        if chunk.free_count or not chunk.extent_bytes:
            self._with_space[chunk.extent_bytes][number] = None
        self._summaries[number] = summary = _Summary(chunk.extent_bytes, chunk.allocated_bytes)
        self._taken_bytes += summary.allocated_bytes - before.allocated_bytes

    async def delete_all(self, last_stamp: int) -> None:
        """Delete the documents of a pool that was removed, as far as no larger stamp was given: then somebody added the
        pool again. What cannot be read stays.

        Raises:
            StorageIOError: the store cannot be asked.
        """
        for start in range(0, self.count, _AT_ONCE):
            numbers = range(start, min(start + _AT_ONCE, self.count))
            await asyncio.gather(*(self._delete(number, last_stamp) for number in numbers))

    async def _delete(self, number: int, last_stamp: int) -> None:
        name = self._document_name(number)
        document = await self._table.get(name)
        if document is not None and _is_unused_since(document, last_stamp):
            await self._table.replace(name, document, None)  # refused: somebody takes extents of it again

    def _document_name(self, number: int) -> str:
        return f"{self._name}/{number}"

    async def find_chunk(self, extent_bytes: int) -> int | None:
        """Return a chunk in which an extent is free, as far as is known; None when none is.

        Raises:
            StorageIOError: the store cannot be asked.
        """
        while True:
            if (number := self._find_known_chunk(extent_bytes)) is not None:
                self._current[extent_bytes] = number
                return number
            while self._unread and self._unread[0] in self._summaries:
                self._unread.popleft()
            if not self._unread:
                left = self._left.get(extent_bytes, 0)
                return left if any(left in self._fitting(cut, extent_bytes) for cut in (extent_bytes, _UNCUT)) else None
            await self.read(self._unread[0])

    def avoid_chunk(self, number: int, extent_bytes: int) -> None:
        """Take the next extents of a size elsewhere if there are any: all free extents of a chunk were handed out by
        now. The ones that are free again may still be locked by a writer that is stopped."""
        self._current.pop(extent_bytes, None)
        self._left[extent_bytes] = number

    def _find_known_chunk(self, extent_bytes: int) -> int | None:
        """One that is cut so already, else one that is all free; at random, so that managers rarely meet."""
        current = self._current.get(extent_bytes)
        if current in self._with_space[extent_bytes]:
            return current
        for cut in (extent_bytes, _UNCUT):
            others = [each for each in self._fitting(cut, extent_bytes) if each != self._left.get(extent_bytes)]
            if others:
                return self._random.choice(others)
        return None

    def _fitting(self, cut: int, extent_bytes: int) -> list[int]:
        """Return chunks with space that are cut into extents of some size, and large enough for one of another."""
        return [number for number in self._with_space[cut] if self.size_of(number) >= extent_bytes]


def _is_unused_since(document: bytes, last_stamp: int) -> bool:
    """Return whether nothing was taken of a chunk since a stamp."""
    try:
        return PoolChunk.decoded(document, 0, 0).last_stamp <= last_stamp
    except StorageIOError:
        return False


# Extents of a memory pool: allocated all or none, freed by their stamp.
#
# A stamp is the number of microseconds since 1970 at which an extent was handed out, or more where that was given
# before; so it grows even if the documents of a pool are lost, and contains its age.

_MICROSECONDS = 1_000_000
_RETRY_SECONDS = 1.0  # between scans of all chunks for space that other managers freed


def _no_space(reason: str) -> StorageIOError:
    """Return the error of a pool that is full, as a file system's would look."""
    error = StorageIOError(reason)
    error.__cause__ = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return error


class _PoolExtents:
    """Extents of one pool; their offsets are those in the pool.

    Args:
        name: of the storage.
        chunks: what they are taken of.
        clock: time source.
        is_shared: whether other managers take extents, too.
    """

    def __init__(self, name: str, chunks: _PoolDocuments, clock: Clock, *, is_shared: bool) -> None:
        self._name = name
        self._chunks = chunks
        self._clock = clock
        self._is_shared = is_shared
        self._scanned_all_at = float("-inf")
        self._unwanted: set[asyncio.Future[list[str | None]]] = set()

    async def allocate(self, wanted: Mapping[int, int]) -> dict[int, list[Extent]]:
        """Take so many extents of each size, all or none; also if the caller is cancelled meanwhile.

        Args:
            wanted: number of extents by bytes of one.

        Raises:
            StorageIOError: the pool is full, or the store failed.
        """
        taking = asyncio.ensure_future(self._allocate_all(wanted))
        try:
            return await asyncio.shield(taking)
        except asyncio.CancelledError:
            taking.add_done_callback(self._release)
            raise

    def _release(self, taking: asyncio.Future[dict[int, list[Extent]]]) -> None:
        """Free the allocation of a caller that is gone."""
        if taking.cancelled() or taking.exception() is not None:
            return
        freeing = asyncio.ensure_future(self.free(_all(taking.result())))
        self._unwanted.add(freeing)
        freeing.add_done_callback(self._unwanted.discard)

    async def _allocate_all(self, wanted: Mapping[int, int]) -> dict[int, list[Extent]]:
        taken: dict[int, list[Extent]] = {size: [] for size in wanted}
        try:
            for size, count in wanted.items():
                while len(taken[size]) < count:
                    taken[size] += await self._allocate_some(size, count - len(taken[size]))
        except BaseException:
            await self.free(_all(taken))
            raise
        return taken

    async def _allocate_some(self, size: int, most: int) -> list[Extent]:
        """Take extents of one chunk. None, when another manager has taken its last one: then it is known to be full."""
        number = await self._find_chunk(size)
        if number is None:
            raise _no_space(f"storage {self._name}: the pool has no space for {size} bytes")
        taken: list[Extent] = []
        comes_round = False

        def take(chunk: PoolChunk) -> PoolChunk:
            least = max(int(self._clock.now() * _MICROSECONDS), self._chunks.floor + 1)
            nonlocal comes_round
            changed, taken[:] = chunk.allocate(size, most, least)
            comes_round = changed.next_offset <= chunk.next_offset or not changed.free_count
            return changed

        await self._chunks.change(number, take)
        if comes_round:
            self._chunks.avoid_chunk(number, size)
        start = number * self._chunks.chunk_bytes
        return [Extent(start + offset, stamp) for offset, stamp in taken]

    async def _find_chunk(self, size: int) -> int | None:
        number = await self._chunks.find_chunk(size)
        if number is not None or not self._is_shared:
            return number
        now = self._clock.now()
        if now < self._scanned_all_at + _RETRY_SECONDS:
            return None
        async for _ in self._chunks.read_many(range(self._chunks.count)):
            pass
        self._scanned_all_at = now
        return await self._chunks.find_chunk(size)

    async def free(self, extents: Sequence[Extent]) -> list[str | None]:
        """Free what still is whose the stamps say. Returns per extent None, or why the store did not take it."""
        by_chunk = self._by_chunk(extents)
        reasons = dict(zip(by_chunk, await asyncio.gather(*map(self._free_in, by_chunk.items())), strict=True))
        return [reasons.get(extent.offset // self._chunks.chunk_bytes) for extent in extents]

    async def _free_in(self, work: tuple[int, Sequence[Extent]]) -> str | None:
        number, extents = work
        try:
            await self._chunks.change(number, lambda chunk: chunk.free(extents))
        except KvcmError as error:
            return str(error)
        return None

    def _by_chunk(self, extents: Sequence[Extent]) -> dict[int, list[Extent]]:
        """Return the extents by the number of their chunk, with offsets in it. What lies behind the end of the pool is
        lost."""
        by_chunk: defaultdict[int, list[Extent]] = defaultdict(list)
        for offset, stamp in extents:
            number, inside = divmod(offset, self._chunks.chunk_bytes)
            if number < self._chunks.count:
                by_chunk[number].append(Extent(inside, stamp))
        return by_chunk

    async def owned(self, extents: Sequence[Extent]) -> list[bool]:
        """Return per extent whether it still is whose its stamp says.

        Raises:
            StorageIOError: the store cannot be asked.
        """
        by_chunk = self._by_chunk(extents)
        found: set[Extent] = set()
        async for number, chunk in self._chunks.read_many(by_chunk):
            start = number * self._chunks.chunk_bytes
            found |= {Extent(start + offset, stamp) for offset, stamp in filter(chunk.is_allocated, by_chunk[number])}
        return [extent in found for extent in extents]

    async def allocated(self) -> AsyncIterator[tuple[int, list[Extent]]]:
        """Yield the allocated extents, with their size, chunk by chunk.

        Raises:
            StorageIOError: the store cannot be asked.
        """
        async for number, chunk in self._chunks.read_many(range(self._chunks.count)):
            start = number * self._chunks.chunk_bytes
            if chunk.extent_bytes:
                yield chunk.extent_bytes, [Extent(start + offset, stamp) for offset, stamp in chunk.extents()]

    async def last_stamp(self) -> int:
        """Return the largest stamp that was ever given.

        Raises:
            StorageIOError: the store cannot be asked.
        """
        return max([chunk.last_stamp async for _, chunk in self._chunks.read_many(range(self._chunks.count))])


def _all(taken: Mapping[int, Sequence[Extent]]) -> list[Extent]:
    return [extent for extents in taken.values() for extent in extents]


_SCHEME = StorageType.ST_TAIRMEMPOOL.scheme
_READ_AT_ONCE = 64  # chunks per probe, in turn; a small pool has as many
_MEMPOOL_MOST_ATTEMPTS = 32


class MempoolStorage:
    """A pool of one node's memory.

    Args:
        name: of the storage.
        spec: checked.
        cluster_id: of the deployment.
        table: where the allocator's state is kept.
        clock: time source; stamps are at least its microseconds.
        random: spreads managers over the pool.
        is_shared: whether other managers hand out memory of the pool, too.
    """

    def __init__(
        self,
        name: str,
        spec: TairMemPoolStorageSpec,
        cluster_id: str,
        table: Table,
        clock: Clock,
        random: Random,
        *,
        is_shared: bool,
    ) -> None:
        self._name = name
        self.spec = spec
        self._cluster_id = cluster_id
        self._table = table
        self._clock = clock
        self._chunks = _PoolDocuments(table, name, spec.capacity_bytes, random, is_shared=is_shared)
        self._extents = _PoolExtents(name, self._chunks, clock, is_shared=is_shared)
        self._next_read = 0
        self.state = PoolState()
        """As last seen by this manager, with every probe at the latest."""

    async def allocate(self, allocation: Allocation) -> list[str]:
        if reason := await self._why_not_usable():
            raise NotReadyError(reason)
        sizes = Parts.of(allocation.parts).sizes
        taken = await self._extents.allocate(Counter(map(extent_bytes, sizes)))
        places = {size: iter(extents) for size, extents in taken.items()}
        return [self._uri(next(places[extent_bytes(size)]), size) for size in sizes]

    def _uri(self, extent: Extent, size_bytes: int) -> str:
        path = f"/{extent.offset}"
        place = LocationUri(_SCHEME, self._name, path, size_bytes, node_id=self.spec.node_id, range_id=extent.stamp)
        return str(place)

    @property
    def makes_objects(self) -> bool:
        return False

    async def make_objects(self, uris: Sequence[str]) -> None:
        """Memory is there as it is handed out."""

    async def delete(self, uris: Sequence[str]) -> list[str | None]:
        return await self._extents.free(list(map(_extent_of, uris)))

    async def discard(self, uris: Sequence[str]) -> list[str | None]:
        return await self.delete(uris)

    async def forgotten(self, uris: Sequence[str]) -> None:
        """A reused extent has another stamp."""

    async def exists(self, uris: Sequence[str]) -> list[bool]:
        await self.refresh()
        return await self._extents.owned(list(map(_extent_of, uris)))

    async def probe(self) -> None:
        """Ask the store whether the pool is there; only its host can look at the memory itself."""
        if reason := await self._why_not_usable():
            raise StorageIOError(reason)
        if not (await self.space()).free_bytes:
            raise _no_space(f"storage {self._name}: the pool is full")

    async def _why_not_usable(self) -> str:
        reason = (await self.refresh()).why_not_usable(self.spec.node_id, self._clock.now())
        return f"storage {self._name}: {reason}" if reason else ""

    async def space(self) -> StorageSpace:
        """Return the space of the pool. Of a pool of more than 4 GiB on a shared store, some chunks are read again, the
        others are as last seen."""
        first, count = self._next_read, self._chunks.count
        self._next_read = (first + _READ_AT_ONCE) % count
        numbers = {number % count for number in range(first, first + min(_READ_AT_ONCE, count))}
        async for _ in self._chunks.read_many(numbers):
            pass
        return StorageSpace(self._chunks.capacity_bytes, self._chunks.capacity_bytes - self._chunks.allocated_bytes)

    async def objects(self, cluster_id: str) -> AsyncIterator[ObjectBatch]:
        """Yield the allocated extents; the stamp is the time of the last change."""
        if path_component(cluster_id) != path_component(self._cluster_id):
            return
        await self.refresh()
        async for size, extents in self._extents.allocated():
            yield ObjectBatch(
                [StoredObject(object_name(self._uri(each, 0)), size, each.stamp / _MICROSECONDS) for each in extents]
            )

    async def remove_objects(self, cluster_id: str, objects: Sequence[StoredObject]) -> list[str | None]:
        if path_component(cluster_id) != path_component(self._cluster_id):
            return [None] * len(objects)
        return await self._extents.free([_extent_named(each.name) for each in objects])

    async def report(self, report: PoolReport) -> bool:
        """Process a report of the host agent.

        Returns:
            Whether it is another one than before, so that everything that was in it is gone.

        Raises:
            InvalidArgumentError: it is not the pool that is configured.
            StorageIOError: the store cannot be asked.
        """
        report.check(self._name, self.spec)
        is_new = False

        async def reported(state: PoolState) -> PoolState:
            nonlocal is_new
            now, floor = self._clock.now(), state.floor
            is_new = state.generation not in {0, report.generation}
            if is_new:  # not below any stamp, of whatever clock
                floor = max(floor, int(now * _MICROSECONDS), await self._extents.last_stamp())
            if report.generation == state.generation and state.valid_ms and not report.valid_ms:
                return state  # an engine that sees the memory neither keeps an agent's promise for it nor ends it
            return PoolState(
                report.generation, floor=floor, reported_at=now, valid_ms=report.valid_ms, purged=state.purged
            )

        await self._change_state(reported)
        return is_new

    async def lost_stamp(self) -> int:
        """Return the stamp up to which memory is gone and locations are still to be forgotten, 0 for none.

        Raises:
            StorageIOError: the store cannot be asked.
        """
        state = await self.refresh()
        return state.floor if state.purged < state.floor else 0

    @property
    def allocated_bytes(self) -> int:
        """Allocated bytes, as this manager saw them last."""
        return self._chunks.allocated_bytes

    async def forget(self, before: float) -> None:
        """Delete what the store has of the pool, which was removed, as far as it is not younger than a unix time: then
        the pool was added again. A pool of that name is a new one from now on, which its host has to report.

        Raises:
            StorageIOError: the store cannot be asked.
        """
        await self._chunks.delete_all(int(before * _MICROSECONDS))
        document = await self._table.get(self._name)
        if document is not None and _is_reported(document, before):
            await self._table.replace(self._name, document, None)

    async def purged(self, floor: int) -> None:
        """Note that all locations up to a floor were removed.

        Raises:
            StorageIOError: the store cannot be asked.
        """

        async def reported(state: PoolState) -> PoolState:
            return state._replace(purged=max(state.purged, floor))

        await self._change_state(reported)

    async def _change_state(self, reported: Callable[[PoolState], Awaitable[PoolState]]) -> None:
        for _ in range(_MEMPOOL_MOST_ATTEMPTS):
            document = await self._table.get(self._name)
            state = await reported(PoolState.decoded(document))
            if await self._table.replace(self._name, document, state.encoded()):
                self._apply_state(state)
                return
        raise StorageIOError(f"storage {self._name}: other managers kept changing the state of the pool: try again")

    async def refresh(self) -> PoolState:
        """Return the current state of the memory.

        Raises:
            StorageIOError: the store cannot be asked.
        """
        return self._apply_state(PoolState.decoded(await self._table.get(self._name)))

    def _apply_state(self, state: PoolState) -> PoolState:
        self.state = state
        self._chunks.raise_floor(state.floor)
        return state

    def take_over(self, previous: StorageBackend) -> None:
        """Take over the cached documents: calls that began before go on changing them, and two views
        of them, of which each takes itself for the truth, would not notice each other's changes."""
        if isinstance(previous, MempoolStorage) and previous.spec.capacity_bytes == self.spec.capacity_bytes:
            self._chunks, self._extents = previous._chunks, previous._extents
            self.state = previous.state

    def close(self) -> None:
        """Nothing is held open."""


class PoolOpener:
    """Opens pools.

    Args:
        table: where the state of all pools is kept.
        clock: time source.
        random: spreads managers over a pool.
        is_shared: whether other managers work on the table.
    """

    def __init__(self, table: Table, clock: Clock, random: Random, *, is_shared: bool) -> None:
        self._table = table
        self._clock = clock
        self._random = random
        self._is_shared = is_shared

    def __call__(self, config: StorageConfig, cluster_id: str) -> MempoolStorage:
        """Open a pool. Its memory may be missing until a report comes.

        Raises:
            UnsupportedError: it is not the memory of one node.
        """
        assert isinstance(config.spec, TairMemPoolStorageSpec)
        if not config.spec.node_id:
            raise UnsupportedError("a pool needs node_id and capacity_bytes; across hosts use mooncake")
        name, spec = config.global_unique_name, config.spec
        return MempoolStorage(
            name,
            spec=spec,
            cluster_id=cluster_id,
            table=self._table,
            clock=self._clock,
            random=self._random,
            is_shared=self._is_shared,
        )


def _is_reported(document: bytes, before: float) -> bool:
    """Return whether the last report is not after a unix time; False for a document that cannot be read."""
    try:
        return PoolState.decoded(document).reported_at <= before
    except StorageIOError:
        return False


def _extent_of(uri: str) -> Extent:
    place = LocationUri.parse(uri)
    if place.range_id is None:
        raise InvalidArgumentError(f"uri {uri[:200]!r} is not one of a memory pool: it has no range_id")
    return Extent(place.offset, place.range_id)


def _extent_named(name: str) -> Extent:
    offset, _, stamp = name.rpartition("/")[2].partition(".")
    return Extent(int(offset), int(stamp))
