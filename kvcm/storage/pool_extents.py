"""Extents of a memory pool: taken all or none, freed by whoever they were given to.

A stamp is the number of microseconds since 1970 at which an extent was handed out, or more where that was given before;
so it grows even if the documents of a pool are lost, and tells its age.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence

from kvcm.model.clock import Clock
from kvcm.model.errors import KvcmError, StorageIOError
from kvcm.storage.pool_chunks import Extent, PoolChunk
from kvcm.storage.pool_documents import PoolDocuments

__all__ = ["MICROSECONDS", "PoolExtents", "no_space"]

MICROSECONDS = 1_000_000
_LOOK_AGAIN_SECONDS = 1.0  # into all chunks, for room that other managers made


def no_space(reason: str) -> StorageIOError:
    """Return the error of a pool that is full, as a file system's would look."""
    error = StorageIOError(reason)
    error.__cause__ = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return error


class PoolExtents:
    """Extents of one pool; their offsets are those in the pool.

    Args:
        name: of the storage.
        chunks: what they are taken of.
        clock: time source.
        is_shared: whether other managers take extents, too.
    """

    def __init__(self, name: str, chunks: PoolDocuments, clock: Clock, *, is_shared: bool) -> None:
        self._name = name
        self._chunks = chunks
        self._clock = clock
        self._is_shared = is_shared
        self._looked_at_all = float("-inf")
        self._unwanted: set[asyncio.Future[list[str | None]]] = set()

    async def take(self, wanted: Mapping[int, int]) -> dict[int, list[Extent]]:
        """Take so many extents of each size, all or none; also if the caller is cancelled meanwhile.

        Args:
            wanted: number of extents by bytes of one.

        Raises:
            StorageIOError: there is no room, or the store cannot be asked.
        """
        taking = asyncio.ensure_future(self._take_all(wanted))
        try:
            return await asyncio.shield(taking)
        except asyncio.CancelledError:
            taking.add_done_callback(self._give_back)
            raise

    def _give_back(self, taking: asyncio.Future[dict[int, list[Extent]]]) -> None:
        """Free what was taken for a caller that is gone."""
        if taking.cancelled() or taking.exception() is not None:
            return
        freeing = asyncio.ensure_future(self.free(_all(taking.result())))
        self._unwanted.add(freeing)
        freeing.add_done_callback(self._unwanted.discard)

    async def _take_all(self, wanted: Mapping[int, int]) -> dict[int, list[Extent]]:
        taken: dict[int, list[Extent]] = {size: [] for size in wanted}
        try:
            for size, count in wanted.items():
                while len(taken[size]) < count:
                    taken[size] += await self._take_some(size, count - len(taken[size]))
        except BaseException:
            await self.free(_all(taken))
            raise
        return taken

    async def _take_some(self, size: int, most: int) -> list[Extent]:
        """Take extents of one chunk. None, when another manager has taken its last one: then it is known to be full."""
        number = await self._with_room(size)
        if number is None:
            raise no_space(f"storage {self._name}: the pool has no room for {size} bytes")
        taken: list[Extent] = []
        comes_round = False

        def take(chunk: PoolChunk) -> PoolChunk:
            least = max(int(self._clock.now() * MICROSECONDS), self._chunks.floor + 1)
            nonlocal comes_round
            changed, taken[:] = chunk.take(size, most, least)
            comes_round = changed.next_offset <= chunk.next_offset or not changed.room
            return changed

        await self._chunks.change(number, take)
        if comes_round:
            self._chunks.leave(number, size)
        start = number * self._chunks.chunk_bytes
        return [Extent(start + offset, stamp) for offset, stamp in taken]

    async def _with_room(self, size: int) -> int | None:
        number = await self._chunks.with_room(size)
        if number is not None or not self._is_shared:
            return number
        now = self._clock.now()
        if now < self._looked_at_all + _LOOK_AGAIN_SECONDS:
            return None
        async for _ in self._chunks.read_many(range(self._chunks.count)):
            pass
        self._looked_at_all = now
        return await self._chunks.with_room(size)

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
        nobody's."""
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
            found |= {Extent(start + offset, stamp) for offset, stamp in filter(chunk.holds, by_chunk[number])}
        return [extent in found for extent in extents]

    async def taken(self) -> AsyncIterator[tuple[int, list[Extent]]]:
        """Yield what is taken, with its size: chunk by chunk.

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
