"""The chunks of a memory pool in the metadata store: read, and changed by compare-and-set, as all documents are.

Every manager remembers the documents that it saw last. One that is out of date is found out by the store, which refuses
the change; then it is read anew. Where no other manager works on the store, what is remembered is the truth: a pool is
opened again with the same `PoolDocuments`.

Leases on chunks would spare managers that race for one a try. They were rejected: a lease has to expire, and while it
does, the memory of a manager that died is nobody's. Here nothing expires and nothing is lost with a manager; managers
rarely meet since each takes its chunks at random, and they change a chunk once for a whole page of blocks.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterable
from random import Random
from typing import NamedTuple

from kvcm.model.errors import StorageIOError
from kvcm.model.memory_pool import chunk_bytes, pool_bytes
from kvcm.storage.pool_chunks import PoolChunk
from kvcm.store.store import Table

__all__ = ["PoolDocuments"]

_MOST_REMEMBERED = 1024  # documents: eight kilobytes each for extents of 64 KiB
_MOST_ATTEMPTS = 64
_LOCKS = 64
_AT_ONCE = 32  # chunks that are read or changed at a time
_UNCUT = 0

Modify = Callable[[PoolChunk], PoolChunk]
"""From a chunk to what it becomes: the same object for no change. Called again when another manager was faster."""


class _Summary(NamedTuple):
    extent_bytes: int
    taken_bytes: int


class PoolDocuments:
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
        self._with_room: defaultdict[int, dict[int, None]] = defaultdict(dict)  # by size of extents
        self._taken_bytes = 0
        self._current: dict[int, int] = {}  # chunk that extents of a size were taken of last
        self._left: dict[int, int] = {}  # chunk that was used up before that
        self._unseen: deque[int] = deque()
        self._forget()

    def size_of(self, number: int) -> int:
        """Return the bytes of a chunk; those of the last one may be fewer."""
        return min(self.chunk_bytes, self.capacity_bytes - number * self.chunk_bytes)

    @property
    def taken_bytes(self) -> int:
        """What is taken of all chunks that were seen, as seen last."""
        return self._taken_bytes

    def raise_floor(self, floor: int) -> None:
        """Hear that the memory of everything up to a stamp is gone."""
        if floor > self.floor:
            self.floor = floor
            self._forget()

    def _forget(self) -> None:
        self._remembered.clear()
        self._summaries.clear()
        self._with_room.clear()
        self._taken_bytes = 0
        first = self._random.randrange(self.count)
        self._unseen = deque((*range(first, self.count), *range(first)))

    async def read(self, number: int) -> PoolChunk:
        """Return a chunk as it is stored now.

        Raises:
            StorageIOError: the store cannot be asked.
        """
        return self._saw(number, await self._table.get(self._document_name(number)))

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
        return document, self._saw(number, document), True

    async def _replace(self, number: int, old: bytes | None, chunk: PoolChunk) -> bool:
        document = chunk.encoded()
        try:
            is_done = await self._table.replace(self._document_name(number), old, document)
        except BaseException:
            self._remembered.pop(number, None)  # who knows what was stored
            raise
        if is_done:
            self._note(number, document, chunk)
        return is_done

    def _saw(self, number: int, document: bytes | None) -> PoolChunk:
        chunk = PoolChunk.decoded(document, self.size_of(number), self.floor)
        self._note(number, document, chunk)
        return chunk

    def _note(self, number: int, document: bytes | None, chunk: PoolChunk) -> None:
        self._remembered.pop(number, None)
        self._remembered[number] = document
        if len(self._remembered) > _MOST_REMEMBERED:
            del self._remembered[next(iter(self._remembered))]
        before = self._summaries.get(number, _Summary(_UNCUT, 0))
        self._with_room[before.extent_bytes].pop(number, None)
        if chunk.room or not chunk.extent_bytes:
            self._with_room[chunk.extent_bytes][number] = None
        self._summaries[number] = summary = _Summary(chunk.extent_bytes, chunk.taken_bytes)
        self._taken_bytes += summary.taken_bytes - before.taken_bytes

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
        if document is not None and _was_left(document, last_stamp):
            await self._table.replace(name, document, None)  # refused: somebody takes extents of it again

    def _document_name(self, number: int) -> str:
        return f"{self._name}/{number}"

    async def with_room(self, extent_bytes: int) -> int | None:
        """Return a chunk in which an extent is free, as far as is known; None when none is.

        Raises:
            StorageIOError: the store cannot be asked.
        """
        while True:
            if (number := self._known_room(extent_bytes)) is not None:
                self._current[extent_bytes] = number
                return number
            while self._unseen and self._unseen[0] in self._summaries:
                self._unseen.popleft()
            if not self._unseen:
                left = self._left.get(extent_bytes, 0)
                return left if any(left in self._fitting(cut, extent_bytes) for cut in (extent_bytes, _UNCUT)) else None
            await self.read(self._unseen[0])

    def leave(self, number: int, extent_bytes: int) -> None:
        """Take the next extents of a size elsewhere if there are any: all that were free in a chunk were handed out by
        now. What is free again there may be what a writer that is stopped has locked."""
        self._current.pop(extent_bytes, None)
        self._left[extent_bytes] = number

    def _known_room(self, extent_bytes: int) -> int | None:
        """One that is cut so already, else one that is all free; at random, so that managers rarely meet."""
        current = self._current.get(extent_bytes)
        if current in self._with_room[extent_bytes]:
            return current
        for cut in (extent_bytes, _UNCUT):
            others = [each for each in self._fitting(cut, extent_bytes) if each != self._left.get(extent_bytes)]
            if others:
                return self._random.choice(others)
        return None

    def _fitting(self, cut: int, extent_bytes: int) -> list[int]:
        """Return chunks with room that are cut into extents of some size, and large enough for one of another."""
        return [number for number in self._with_room[cut] if self.size_of(number) >= extent_bytes]


def _was_left(document: bytes, last_stamp: int) -> bool:
    """Return whether nothing was taken of a chunk since a stamp."""
    try:
        return PoolChunk.decoded(document, 0, 0).last_stamp <= last_stamp
    except StorageIOError:
        return False
