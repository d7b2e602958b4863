"""Storage `mempool`: shared memory of one node, mapped by every engine process there (`pace://`).

The manager never sees the memory. It hands out extents, each with a stamp that is larger than all before it, and what
is handed out stands in the metadata store, so it outlives every manager. Engines write the stamp beside the bytes and
compare it before and after they read: a writer that comes late is refused and a reader that comes late misses. So
extents can be handed out again at once, those of expired and aborted sessions, too (invariant 5).

Whoever holds the memory reports it. Another generation means that it is new, after a reboot for one: then everything
that was given out before is gone, which one number says for all chunks, the floor; the locations are forgotten in the
background (`kvcm.cache.pool_purges`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from random import Random

from kvcm.model.clock import Clock
from kvcm.model.errors import InvalidArgumentError, NotReadyError, StorageIOError, UnsupportedError
from kvcm.model.memory_pool import extent_bytes
from kvcm.model.names import path_component
from kvcm.model.storages import StorageConfig, StorageType, TairMemPoolStorageSpec
from kvcm.model.uri import LocationUri
from kvcm.storage.backend import Allocation, ObjectPage, Parts, StorageBackend, StorageSpace, StoredObject
from kvcm.storage.packing import object_name
from kvcm.storage.pool_chunks import Extent
from kvcm.storage.pool_documents import PoolDocuments
from kvcm.storage.pool_extents import MICROSECONDS, PoolExtents, no_space
from kvcm.storage.pool_state import PoolReport, PoolState
from kvcm.store.store import Table

__all__ = ["MempoolStorage", "PoolOpener"]

_SCHEME = StorageType.ST_TAIRMEMPOOL.scheme
_LOOKED_AT = 64  # chunks per probe, in turn; a small pool has as many
_MOST_ATTEMPTS = 32


class MempoolStorage:
    """A pool of one node's memory.

    Args:
        name: of the storage.
        spec: checked.
        cluster_id: of the deployment.
        table: where the allocator's state is kept.
        clock: time source; stamps are at least the microseconds that it tells.
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
        self._chunks = PoolDocuments(table, name, spec.capacity_bytes, random, is_shared=is_shared)
        self._extents = PoolExtents(name, self._chunks, clock, is_shared=is_shared)
        self._next_look = 0
        self.state = PoolState()
        """As last seen by this manager, with every probe at the latest."""

    async def allocate(self, allocation: Allocation) -> list[str]:
        if reason := await self._why_not_usable():
            raise NotReadyError(reason)
        sizes = Parts.of(allocation.parts).sizes
        taken = await self._extents.take(Counter(map(extent_bytes, sizes)))
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
        """What is handed out again has another stamp."""

    async def exists(self, uris: Sequence[str]) -> list[bool]:
        await self.refresh()
        return await self._extents.owned(list(map(_extent_of, uris)))

    async def probe(self) -> None:
        """Ask the store whether the pool is there; only its host can look at the memory itself."""
        if reason := await self._why_not_usable():
            raise StorageIOError(reason)
        if not (await self.space()).free_bytes:
            raise no_space(f"storage {self._name}: the pool is full")

    async def _why_not_usable(self) -> str:
        reason = (await self.refresh()).why_not_usable(self.spec.node_id, self._clock.now())
        return f"storage {self._name}: {reason}" if reason else ""

    async def space(self) -> StorageSpace:
        """Return the space of the pool. Of a pool of more than 4 GiB that other managers fill, too, it is what was seen
        last, with some chunks looked at anew."""
        first, count = self._next_look, self._chunks.count
        self._next_look = (first + _LOOKED_AT) % count
        numbers = {number % count for number in range(first, first + min(_LOOKED_AT, count))}
        async for _ in self._chunks.read_many(numbers):
            pass
        return StorageSpace(self._chunks.capacity_bytes, self._chunks.capacity_bytes - self._chunks.taken_bytes)

    async def objects(self, cluster_id: str) -> AsyncIterator[ObjectPage]:
        """Yield the extents that are taken; each changed last when it was handed out, which its stamp tells."""
        if path_component(cluster_id) != path_component(self._cluster_id):
            return
        await self.refresh()
        async for size, extents in self._extents.taken():
            yield ObjectPage(
                [StoredObject(object_name(self._uri(each, 0)), size, each.stamp / MICROSECONDS) for each in extents]
            )

    async def remove_objects(self, cluster_id: str, objects: Sequence[StoredObject]) -> list[str | None]:
        if path_component(cluster_id) != path_component(self._cluster_id):
            return [None] * len(objects)
        return await self._extents.free([_extent_named(each.name) for each in objects])

    async def report(self, report: PoolReport) -> bool:
        """Hear of the memory from its host.

        Returns:
            Whether it is another one than before, so that everything that was in it is gone.

        Raises:
            InvalidArgumentError: it is not the pool that is configured.
            StorageIOError: the store cannot be asked.
        """
        report.check(self._name, self.spec)
        is_new = False

        async def told(state: PoolState) -> PoolState:
            nonlocal is_new
            now, floor = self._clock.now(), state.floor
            is_new = state.generation not in {0, report.generation}
            if is_new:  # not below any stamp, of whatever clock
                floor = max(floor, int(now * MICROSECONDS), await self._extents.last_stamp())
            if report.generation == state.generation and state.valid_ms and not report.valid_ms:
                return state  # an engine that sees the memory neither keeps an agent's promise for it nor ends it
            return PoolState(report.generation, floor, now, report.valid_ms, state.purged)

        await self._change_state(told)
        return is_new

    async def lost(self) -> int:
        """Return the stamp up to which memory is gone and locations are still to be forgotten, 0 for none.

        Raises:
            StorageIOError: the store cannot be asked.
        """
        state = await self.refresh()
        return state.floor if state.purged < state.floor else 0

    @property
    def taken_bytes(self) -> int:
        """What is handed out, as this manager saw it last."""
        return self._chunks.taken_bytes

    async def forget(self, before: float) -> None:
        """Delete what the store has of the pool, which was removed, as far as it is not younger than a unix time: then
        the pool was added again. A pool of that name is a new one from now on, which its host has to tell of.

        Raises:
            StorageIOError: the store cannot be asked.
        """
        await self._chunks.delete_all(int(before * MICROSECONDS))
        document = await self._table.get(self._name)
        if document is not None and _was_told(document, before):
            await self._table.replace(self._name, document, None)

    async def purged(self, floor: int) -> None:
        """Hear that all locations up to a floor were forgotten.

        Raises:
            StorageIOError: the store cannot be asked.
        """

        async def told(state: PoolState) -> PoolState:
            return state._replace(purged=max(state.purged, floor))

        await self._change_state(told)

    async def _change_state(self, told: Callable[[PoolState], Awaitable[PoolState]]) -> None:
        for _ in range(_MOST_ATTEMPTS):
            document = await self._table.get(self._name)
            state = await told(PoolState.decoded(document))
            if await self._table.replace(self._name, document, state.encoded()):
                self._follow(state)
                return
        raise StorageIOError(f"storage {self._name}: other managers kept changing the state of the pool: try again")

    async def refresh(self) -> PoolState:
        """Return what is known of the memory now.

        Raises:
            StorageIOError: the store cannot be asked.
        """
        return self._follow(PoolState.decoded(await self._table.get(self._name)))

    def _follow(self, state: PoolState) -> PoolState:
        self.state = state
        self._chunks.raise_floor(state.floor)
        return state

    def inherit(self, previous: StorageBackend) -> None:
        """Take over what is known of the store's documents: calls that began before go on changing them, and two views
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
        """Open a pool. Its memory may not be there yet: reports tell.

        Raises:
            UnsupportedError: it is not the memory of one node.
        """
        assert isinstance(config.spec, TairMemPoolStorageSpec)
        if not config.spec.node_id:
            raise UnsupportedError("a pool needs node_id and capacity_bytes; across hosts use mooncake")
        name, spec = config.global_unique_name, config.spec
        return MempoolStorage(name, spec, cluster_id, self._table, self._clock, self._random, is_shared=self._is_shared)


def _was_told(document: bytes, before: float) -> bool:
    """Return whether a state was last told of by a unix time; not of one that cannot be read."""
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
