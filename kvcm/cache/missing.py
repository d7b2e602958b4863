"""Reports of missing and of corrupt bytes: locations that readers could not use are given up.

A reader can be wrong: its mount may be gone, or it reads by an old answer. So where it found no bytes the storage is
asked first, and a report removes nothing that the manager can see. Bytes that are not those of the recorded checksum
are there, so the storage cannot tell, and a reader is believed that names this very checksum: then it read by the
answer that holds now. When bytes are missing or corrupt the whole location goes, since its other parts are worth
nothing without them; and so do the block's other locations when what is left of it is of no use by itself.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
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
    """A part of a block that somebody could not use.

    Attributes:
        key: of the block.
        uri: as it was answered.
        mismatched_checksum: 0 when its bytes are not there; otherwise they are not those of this checksum.
    """

    key: int
    uri: str
    mismatched_checksum: int = 0


class MissingReport(NamedTuple):
    """What became of a report.

    Attributes:
        removed_locations: locations that went.
        unconfirmed_parts: parts whose bytes are there after all, that no location names any more, or that have another
            checksum now, or none.
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

    Attributes:
        mismatches: parts that were found corrupt, by instance group and storage.
    """

    def __init__(self, storages: Storages, remover: Remover) -> None:
        self._storages = storages
        self._remover = remover
        self.mismatches: Counter[tuple[str, str]] = Counter()

    async def report(self, cache: InstanceCache, parts: Sequence[MissingPart]) -> MissingReport:
        """Check parts, and remove the locations whose bytes are missing or corrupt.

        Raises:
            StorageIOError: a storage cannot be asked; nothing is removed.
        """
        holders = await self._holders(cache, set(parts))
        corrupt = [holder for holder in holders if holder.part.mismatched_checksum]
        lost = await self._without_bytes([holder for holder in holders if not holder.part.mismatched_checksum])
        removed = await self._remove(cache, lost, "missing") + await self._remove(cache, corrupt, "corrupt")
        self.mismatches.update((cache.instance.instance_group_name, holder.storage) for holder in corrupt)
        confirmed = {holder.part for holder in (*lost, *corrupt)}
        return MissingReport(removed, sum(part not in confirmed for part in parts))

    async def _remove(self, cache: InstanceCache, useless: Sequence[_Holder], reason: str) -> int:
        ids: defaultdict[int, set[str]] = defaultdict(set)
        for holder in useless:
            ids[holder.part.key].add(holder.location_id)
        removed = await self._remover.remove_chosen(
            cache, ids, lambda key, record: _worthless(cache, record, ids[key]), reason=reason
        )
        if removed:
            storages = sorted({holder.storage for holder in useless})
            _log.warning(f"bytes_{reason}", instance=cache.instance.instance_id, storages=storages, locations=removed)
        return removed

    async def _holders(self, cache: InstanceCache, parts: Collection[MissingPart]) -> list[_Holder]:
        """Return the reported parts that serving locations have, those that are corrupt with the same checksum."""
        reported: defaultdict[int, set[MissingPart]] = defaultdict(set)
        for part in parts:
            reported[part.key].add(part)
        holders: list[_Holder] = []
        for page in pages(list(reported), cache.page_keys):
            for key, record in zip(page, await cache.index.get(page), strict=True):
                for location in record.locations if record is not None else ():
                    if location.status is LocationStatus.SERVING:
                        named = reported[key].intersection(_possible_parts(key, location))
                        holders += [_Holder(part, location.id, location.storage) for part in named]
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


def _possible_parts(key: int, location: Location) -> set[MissingPart]:
    """Return what can be told of a location: of each part that its bytes are gone, or are not of its checksum."""
    specs = decode_chunk(location.chunk).specs
    return {MissingPart(key, spec.uri, checksum) for spec in specs for checksum in (0, spec.checksum)}


def _worthless(cache: InstanceCache, record: BlockRecord, lost_ids: Collection[str]) -> Which:
    """Return which locations of a block are worth nothing once those of `lost_ids` are gone."""

    def is_lost(location: Location) -> bool:
        return location.status is LocationStatus.SERVING and location.id in lost_ids

    # What is still being written is its writer's, and may complete the block.
    kept = [location for location in record.locations if location.status is not LocationStatus.DELETING]
    left = {name for location in kept if not is_lost(location) for name in location.spec_names}
    all_go = any(map(is_lost, kept)) and not cache.instance.is_readable_with(left)
    return lambda location: is_lost(location) or (all_go and location.status is LocationStatus.SERVING)
