"""Reports of missing bytes: what a reader did not find is looked for by the manager, and given up only if it agrees.

A reader can be wrong: its mount may be gone, or it reads by an old answer. So the storage is asked first, and a report
removes nothing that the manager can see. When bytes are missing the whole location goes, since its other parts are
worth nothing without them; and so do the block's other locations when what is left of it is of no use by itself.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import NamedTuple

import structlog

from kvcm.cache.instance_cache import InstanceCache
from kvcm.cache.pages import pages
from kvcm.cache.removal import Remover, Which
from kvcm.cache.selection import Storages
from kvcm.model.errors import StorageIOError
from kvcm.model.locations import BlockRecord, Location, LocationStatus, decode_chunk

__all__ = ["MissingPart", "MissingParts", "MissingReport"]

_ASK_SECONDS = 10.0  # for one page of parts; a storage that hangs must not keep the caller

_log = structlog.get_logger("kvcm.cache")


class MissingPart(NamedTuple):
    """A part of a block that somebody could not read."""

    key: int
    uri: str


class MissingReport(NamedTuple):
    """What became of a report.

    Attributes:
        removed_locations: locations that went.
        unconfirmed_parts: parts whose bytes are there after all, or that no location names any more.
    """

    removed_locations: int
    unconfirmed_parts: int


class _Holder(NamedTuple):
    """The serving location that a reported part belongs to."""

    part: MissingPart
    location_id: str
    storage: str


class MissingParts:
    """Takes reports.

    Args:
        storages: the open storages.
        remover: takes locations out of indexes.
    """

    def __init__(self, storages: Storages, remover: Remover) -> None:
        self._storages = storages
        self._remover = remover

    async def report(self, cache: InstanceCache, parts: Sequence[MissingPart]) -> MissingReport:
        """Check parts, and remove the locations whose bytes are missing.

        Raises:
            StorageIOError: a storage cannot be asked; nothing is removed.
        """
        lost = await self._without_bytes(await self._holders(cache, set(parts)))
        ids: defaultdict[int, set[str]] = defaultdict(set)
        for holder in lost:
            ids[holder.part.key].add(holder.location_id)
        removed = await self._remover.remove_chosen(
            cache, ids, lambda key, record: _worthless(cache, record, ids[key]), reason="missing"
        )
        if removed:
            _log.warning("bytes_missing", instance=cache.instance.instance_id, locations=removed)
        confirmed = {holder.part for holder in lost}
        return MissingReport(removed, sum(part not in confirmed for part in parts))

    async def _holders(self, cache: InstanceCache, parts: Collection[MissingPart]) -> list[_Holder]:
        uris: defaultdict[int, set[str]] = defaultdict(set)
        for part in parts:
            uris[part.key].add(part.uri)
        holders: list[_Holder] = []
        for page in pages(list(uris)):
            for key, record in zip(page, await cache.index.get(page), strict=True):
                for location in record.locations if record is not None else ():
                    if location.status is LocationStatus.SERVING:
                        named = uris[key].intersection(spec.uri for spec in decode_chunk(location.chunk).specs)
                        holders += [_Holder(MissingPart(key, uri), location.id, location.storage) for uri in named]
            await asyncio.sleep(0)
        return holders

    async def _without_bytes(self, holders: Sequence[_Holder]) -> list[_Holder]:
        by_storage: defaultdict[str, list[_Holder]] = defaultdict(list)
        for holder in holders:
            by_storage[holder.storage].append(holder)
        lost: list[_Holder] = []
        for storage, there in by_storage.items():
            for page in pages(there):
                exist = await self._ask(storage, [holder.part.uri for holder in page])
                lost += [holder for holder, exists in zip(page, exist, strict=True) if not exists]
        return lost

    async def _ask(self, storage: str, uris: Sequence[str]) -> list[bool]:
        backend = self._storages.backend(storage)
        if backend is None:
            raise StorageIOError(f"storage {storage!r} is not open: whether the bytes are missing cannot be asked")
        if self._storages.rank(storage) is None:
            raise StorageIOError(f"storage {storage!r} is not available: whether the bytes are missing cannot be asked")
        try:
            async with asyncio.timeout(_ASK_SECONDS):
                return await backend.exists(uris)
        except TimeoutError:
            raise StorageIOError(f"storage {storage!r} did not answer within {_ASK_SECONDS:g} s: try again") from None
        except Exception as error:  # whatever it raises, it did not say that the bytes are missing
            raise StorageIOError(f"storage {storage!r} cannot be asked: {error}") from error


def _worthless(cache: InstanceCache, record: BlockRecord, lost_ids: Collection[str]) -> Which:
    """Return which locations of a block are worth nothing once those of `lost_ids` are gone."""

    def is_lost(location: Location) -> bool:
        return location.status is LocationStatus.SERVING and location.id in lost_ids

    # What is still being written is its writer's, and may complete the block.
    kept = [location for location in record.locations if location.status is not LocationStatus.DELETING]
    left = {name for location in kept if not is_lost(location) for name in location.spec_names}
    all_go = any(map(is_lost, kept)) and not cache.instance.is_readable_with(left)
    return lambda location: is_lost(location) or (all_go and location.status is LocationStatus.SERVING)
