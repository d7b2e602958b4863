"""Memory that is gone: all locations in a pool whose host made new memory, after a reboot for one, are forgotten.

The state of a pool says up to which stamp its memory is gone, the floor, and up to which one that was carried out; so
whoever leads finds it, also after a restart. Nobody waits for it: readers miss such bytes by the stamp that is not
there, and their places are given to others at once, since stamps tell them apart. But writers are told meanwhile that
the blocks are there.

Every index is gone through at once, and a second time when all managers have heard of the floor: a write that was begun
before may have stored its blocks in between.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Final, Protocol

import structlog

from kvcm.cache.instance_cache import InstanceCache
from kvcm.cache.open_caches import OpenCaches
from kvcm.cache.removal import Remover, Which
from kvcm.model.clock import Clock
from kvcm.model.locations import BlockRecord, Location, LocationStatus, uris_of
from kvcm.model.uri import LocationUri

__all__ = ["LostMemory", "PoolPurges"]

_PAGE_BLOCKS: Final = 256
_AGAIN_SECONDS: Final = 60.0

_log = structlog.get_logger("kvcm.cache")


class LostMemory(Protocol):
    """A pool, as far as this is concerned."""

    async def lost(self) -> int:
        """Return the stamp up to which memory is gone and locations are still to be forgotten, 0 for none.

        Raises:
            StorageIOError: the store cannot be asked.
        """

    async def purged(self, floor: int) -> None:
        """Hear that all locations up to a stamp were forgotten.

        Raises:
            StorageIOError: the store cannot be asked.
        """


class PoolPurges:
    """Forgets what lay in memory that is gone.

    Args:
        pools: returns the open pools by name.
        caches: the indexes.
        remover: marks blocks.
        clock: time source.
        give_way: lets requests have their turn.
    """

    def __init__(
        self,
        pools: Callable[[], Mapping[str, LostMemory]],
        caches: OpenCaches,
        remover: Remover,
        clock: Clock,
        give_way: Callable[[], Awaitable[None]] = lambda: asyncio.sleep(0),
    ) -> None:
        self._pools = pools
        self._caches = caches
        self._remover = remover
        self._clock = clock
        self._give_way = give_way
        self._again_at: dict[tuple[str, int], float] = {}  # by name and floor, after the first lap

    async def go_on(self, is_leader: Callable[[], bool] = lambda: True) -> None:
        """Forget what is to be forgotten now.

        Args:
            is_leader: whether this manager is still the one to do so.

        Raises:
            KvcmError: the store failed; the next call begins again.
        """
        now, pools = self._clock.now(), dict(self._pools())
        floors = {name: floor for name, pool in pools.items() if (floor := await pool.lost())}
        self._again_at = {key: at for key, at in self._again_at.items() if floors.get(key[0]) == key[1]}
        due = {name: floor for name, floor in floors.items() if now >= self._again_at.get((name, floor), now)}
        if not due:
            return
        removed = await self._lap(due, is_leader)
        if removed is None:
            return
        _log.warning("pool_memory_lost", storages=sorted(due), locations=removed)
        for name, floor in due.items():
            if (name, floor) in self._again_at:
                await pools[name].purged(floor)
            self._again_at.setdefault((name, floor), self._clock.now() + _AGAIN_SECONDS)

    async def _lap(self, floors: Mapping[str, int], is_leader: Callable[[], bool]) -> int | None:
        """Go through all indexes, and return how many locations were marked; None when another manager leads by now."""
        removed = 0
        for cache in list(self._caches.all()):
            async for page in cache.index.scan(_PAGE_BLOCKS):
                if not is_leader():
                    return None
                await self._give_way()
                removed += await self._take(cache, page, floors)
        return removed

    async def _take(self, cache: InstanceCache, page: Sequence[int], floors: Mapping[str, int]) -> int:
        records = zip(page, await cache.index.get(page), strict=True)
        keys = [key for key, record in records if record is not None and _lost(record.locations, floors)]
        if not keys:
            return 0
        return await self._remover.remove_chosen(
            cache, keys, lambda _key, record: _which(cache, record, floors), reason="missing"
        )


def _which(cache: InstanceCache, record: BlockRecord, floors: Mapping[str, int]) -> Which:
    """Return what goes of a block: what is lost, and what is worth nothing without that."""
    going = _lost(record.locations, floors)
    alive = [each for each in record.locations if each.status is not LocationStatus.DELETING]
    left = {name for each in alive if each.id not in going for name in each.spec_names}
    if going and left and not cache.instance.is_readable_with(left):
        going |= {each.id for each in alive if each.status is LocationStatus.SERVING}
    return lambda location: location.id in going


def _lost(locations: Iterable[Location], floors: Mapping[str, int]) -> set[str]:
    return {each.id for each in locations if (floor := floors.get(each.storage)) and _is_lost(each, floor)}


def _is_lost(location: Location, floor: int) -> bool:
    stamps = (LocationUri.parse(uri).range_id for uri in uris_of(location.chunk) if uri)
    return location.status is not LocationStatus.DELETING and any(stamp and stamp <= floor for stamp in stamps)
