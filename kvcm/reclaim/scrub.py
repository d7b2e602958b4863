"""Scrub: deletes orphan objects, bytes without metadata.

Managers that die between two steps, writers that come too late and metadata that was dropped leave objects on a storage
that no location names. A scrub lists the objects of a deployment and strikes out what some location names, in whatever
status. Names are compared below the deployment's directory, where a location's id makes each of them unique, so it does
not matter at which path, or as which storage, a directory is mounted.

A deleted object is too old for a writer, was an orphan in two checks, the second right before the deletion, and did not
change since it was listed. Any error ends the scrub before it deletes anything more.

The name of an object contains its instance and its first block, so nearly all are resolved by reading that block. A
packed object may be known by other blocks alone, also by those that got slots of it later (file_slots.py notes that
beside it first, so it changed), and the name of pool memory lacks its owner: such suspects are gathered, and resolved
together by a scan of their instances, or of all. Memory: `_MOST_SUSPECTS` names.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import structlog

from kvcm.index.meta_index import IndexHandle, MetaIndex
from kvcm.model.clock import Clock
from kvcm.model.errors import InvalidArgumentError, NotReadyError, StorageIOError
from kvcm.model.keys import unmixed_key
from kvcm.model.locations import BlockRecord, decode_chunk
from kvcm.model.uri import path_component
from kvcm.reclaim.background import StorageProvider
from kvcm.storage.backend import ObjectBatch, StorageBackend, StoredObject, object_name, owner_of, slot_count

__all__ = ["PoolLeaks", "ScrubReport", "StorageScrubber"]

_WITHOUT_METADATA: Final = "without_metadata"
_DEFAULT_AGE_SECONDS: Final = 3600
_MOST_SUSPECTS: Final = 100_000
_AT_ONCE: Final = 256  # objects between the second look and their deletion
_SLICE: Final = 32  # blocks read without a pause
_log = structlog.get_logger("kvcm.reclaim")


class _ScrubIndexProvider(Protocol):
    """Knows the indexes."""

    def indexes(self) -> Iterable[IndexHandle]:
        """Return the index of every instance, also of those that are being removed."""

    async def unreadable_instances(self) -> Sequence[str]:
        """Refresh, and return the names of instance documents that cannot be read: their
        indexes are missing in `indexes`."""


@dataclass(frozen=True, slots=True)
class ScrubReport:
    """What a scrub found.

    Attributes:
        objects: objects that were checked.
        bytes: what they take up.
        orphans: those that no metadata knows, without those that are too young.
        orphan_bytes: what they take up.
        too_young: unknown objects that changed so short a time ago that a writer may be at them.
        deleted: orphans that were deleted.
        failed: objects that could not be checked or deleted.
    """

    objects: int = 0
    bytes: int = 0
    orphans: int = 0
    orphan_bytes: int = 0
    too_young: int = 0
    deleted: int = 0
    failed: int = 0


class StorageScrubber:
    """Scrubs storages.

    Args:
        provider: knows the indexes.
        storages: the open storages.
        clock: time source.
        cluster_id: of this deployment.
    """

    def __init__(self, provider: _ScrubIndexProvider, storages: StorageProvider, clock: Clock, cluster_id: str) -> None:
        self._provider = provider
        self._storages = storages
        self._clock = clock
        self._cluster_id = cluster_id
        self._running: set[str] = set()
        self.found: Counter[str] = Counter({_WITHOUT_METADATA: 0})
        """Orphans that were deleted since the manager started."""

    async def scrub(
        self, storage: str, *, cluster_id: str = "", dry_run: bool, min_age_seconds: int = 0
    ) -> ScrubReport:
        """Find orphan objects, and delete them.

        Args:
            storage: name of an open storage.
            cluster_id: of a deployment that is gone for good: all its objects are orphans, but for those that locations
                of this deployment name; "" for this deployment.
            dry_run: whether to count only.
            min_age_seconds: objects that changed within this time are left alone; 0 is an hour.

        Raises:
            InvalidArgumentError: there is no such storage, the cluster id is this deployment's, or the age is negative.
            NotReadyError: the storage is being scrubbed already.
            StorageIOError: the storage or the store cannot be asked, or holds what cannot be read.
        """
        backend = self._checked(storage, cluster_id, min_age_seconds)
        if storage in self._running:
            raise NotReadyError(f"storage {storage!r} is being scrubbed: ask again when that has ended")
        self._running.add(storage)
        try:
            oldest = self._clock.now() - (min_age_seconds or _DEFAULT_AGE_SECONDS)
            scrub = _Scrub(self._provider, backend, cluster_id or self._cluster_id, oldest, dry_run=dry_run)
            report = await scrub.run()
        finally:
            self._running.discard(storage)
        self.found[_WITHOUT_METADATA] += report.deleted
        _log.info("storage_scrubbed", storage=storage, dry_run=dry_run, orphans=report.orphans, deleted=report.deleted)
        return report

    def _checked(self, storage: str, cluster_id: str, min_age_seconds: int) -> StorageBackend:
        if min_age_seconds < 0:
            raise InvalidArgumentError(f"min_age_seconds is {min_age_seconds}, must be 0 or more")
        if cluster_id and path_component(cluster_id) == path_component(self._cluster_id):
            raise InvalidArgumentError(
                f"cluster_id {cluster_id!r} is this deployment's own: leave it empty to scrub its own orphans"
            )
        backend = self._storages.backend(storage)
        if backend is None:
            raise InvalidArgumentError(f"storage_unique_name {storage!r} is not an open storage")
        return backend


class _Scrub:
    """One scrub.

    Args:
        provider: knows the indexes.
        backend: the storage.
        cluster_id: whose objects.
        oldest: unix seconds; what changed later is too young.
        dry_run: whether to count only.
    """

    def __init__(
        self, provider: _ScrubIndexProvider, backend: StorageBackend, cluster_id: str, oldest: float, *, dry_run: bool
    ) -> None:
        self._provider = provider
        self._backend = backend
        self._cluster_id = cluster_id
        self._oldest = oldest
        self._dry_run = dry_run
        self._suspects: list[StoredObject] = []
        self._counts: Counter[str] = Counter()

    async def run(self) -> ScrubReport:
        await self._check_instances()
        async for batch in self._backend.objects(self._cluster_id):
            await self._collect(batch)
        await self._check_suspects()
        return ScrubReport(**self._counts)

    async def _check_instances(self) -> None:
        unreadable = await self._provider.unreadable_instances()
        if unreadable:
            raise StorageIOError(
                f"{len(unreadable)} stored instances cannot be read, {unreadable[0]!r} for one, so their objects would "
                "look like orphans: run `kvcm index verify` first"
            )

    async def _collect(self, batch: ObjectBatch) -> None:
        self._counts["objects"] += len(batch.objects)
        self._counts["bytes"] += sum(each.size_bytes for each in batch.objects)
        self._counts["failed"] += batch.failed
        unknown = await self._not_by_first_block(batch.objects)
        self._suspects += [each for each in unknown if _is_suspect(each.name)]
        await self._delete_orphans([each for each in unknown if not _is_suspect(each.name)])
        if len(self._suspects) >= _MOST_SUSPECTS:
            await self._check_suspects()

    async def _check_suspects(self) -> None:
        suspects, self._suspects = self._suspects, []
        orphans = await self._not_in_any_block(suspects)
        if not self._dry_run:
            orphans = await self._not_in_any_block(orphans)
        await self._delete_orphans(orphans)

    async def _delete_orphans(self, unknown: Sequence[StoredObject]) -> None:
        old = [each for each in unknown if each.modified_at <= self._oldest]
        self._counts["too_young"] += len(unknown) - len(old)
        for start in range(0, len(old), _AT_ONCE):
            await self._delete(old[start : start + _AT_ONCE])

    async def _delete(self, orphans: Sequence[StoredObject]) -> None:
        if not self._dry_run:
            await self._check_instances()
            orphans = await self._not_by_first_block(orphans)
        self._counts["orphans"] += len(orphans)
        self._counts["orphan_bytes"] += sum(each.size_bytes for each in orphans)
        if not self._dry_run:
            reasons = await self._backend.remove_objects(self._cluster_id, orphans)
            self._counts["deleted"] += reasons.count(None)
            self._counts["failed"] += len(reasons) - reasons.count(None)

    async def _not_by_first_block(self, objects: Sequence[StoredObject]) -> list[StoredObject]:
        """Return the objects that the block in their name does not reference."""
        by_key: defaultdict[str, defaultdict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
        for each in objects:
            owner = owner_of(each.name)
            if owner is not None:
                by_key[owner[0]][owner[1]].add(each.name)
        known: set[str] = set()
        for handle in self._provider.indexes():
            wanted = by_key.get(path_component(handle.instance_id))
            if wanted:
                async for key, record in _records(handle.meta_index, list(wanted)):
                    known |= wanted[key].intersection(_objects_of(key, record))
        return [each for each in objects if each.name not in known]

    async def _not_in_any_block(self, objects: Sequence[StoredObject]) -> list[StoredObject]:
        """Return the objects that no block of their instance references; without an instance in the name, no block at
        all."""
        names: defaultdict[str, set[str]] = defaultdict(set)
        for each in objects:
            names[each.name.partition("/")[0]].add(each.name)
        for handle in list(self._provider.indexes()) if objects else ():
            unknown = [some for name in (path_component(handle.instance_id), "") if (some := names.get(name))]
            if unknown:
                await _discard_known(handle.meta_index, unknown)
        return [each for each in objects if each.name in names[each.name.partition("/")[0]]]


def _is_suspect(name: str) -> bool:
    """Return whether another block than that in its name may reference an object, or its name has none."""
    return name.startswith("/") or slot_count(name) > 1


async def _discard_known(index: MetaIndex, unknown: Sequence[set[str]]) -> None:
    async for batch in index.scan():
        async for key, record in _records(index, batch):
            known = list(_objects_of(key, record))
            for names in unknown:
                names.difference_update(known)
        if not any(unknown):
            return


async def _records(index: MetaIndex, keys: Sequence[int]) -> AsyncIterator[tuple[int, BlockRecord]]:
    """Yield the records of blocks, giving way to other requests in between."""
    for start in range(0, len(keys), _SLICE):
        batch = keys[start : start + _SLICE]
        for key, record in zip(batch, await index.get(batch), strict=True):
            if record is not None:
                yield key, record
        await asyncio.sleep(0)


def _objects_of(key: int, record: BlockRecord) -> Iterator[str]:
    for location in record.locations:
        for spec in decode_chunk(location.chunk).specs:
            if spec.uri:
                try:
                    yield object_name(spec.uri)
                except InvalidArgumentError as error:
                    block = unmixed_key(key)
                    raise StorageIOError(f"block {block} cannot be read: {error}: run `kvcm index verify`") from error


# Leaked pool memory: a manager that dies between the allocation and the storing of the blocks leaves it allocated, and
# so does a pool that is removed and added again. It is few bytes at a time, but memory is dear, and only the scrub
# frees it.
#
# Where more of a pool is allocated than blocks account for, the pool is scrubbed, as an operator would do it: only old
# allocations that no block references are freed. Rarely, since that reads every block of every index.
#
# Memory is allocated in whole pages, and blocks account for the sizes of their parts. The ratio depends on the blocks.
# A scrub without leaks measures it; for a day that ratio is expected.

_FIRST_SECONDS: Final = 60.0
_SCRUB_SECONDS: Final = 3600.0
_CHECK_SECONDS: Final = 60.0
_ROUNDING_SECONDS: Final = 86_400.0


class _PoolUsageSource(Protocol):
    """A pool, as far as this is concerned."""

    @property
    def allocated_bytes(self) -> int:
        """Allocated bytes, as this manager saw them last."""


class _Rounding(NamedTuple):
    """Allocated and used bytes of a pool without leaks."""

    taken_bytes: int
    used_bytes: int
    until: float

    def allocated_for(self, used_bytes: int) -> int:
        """Return the expected allocation for so many used bytes, rounded up."""
        return -(-used_bytes * self.taken_bytes // self.used_bytes)


class PoolLeaks:
    """Finds leaks.

    Args:
        pools: returns the open pools by name.
        used_bytes: returns what blocks use on a storage, at least.
        scrubber: frees what no block names.
        clock: time source.
    """

    def __init__(
        self,
        pools: Callable[[], Mapping[str, _PoolUsageSource]],
        used_bytes: Callable[[str], int],
        scrubber: StorageScrubber,
        clock: Clock,
    ) -> None:
        self._pools = pools
        self._used_bytes = used_bytes
        self._scrubber = scrubber
        self._clock = clock
        self._next: dict[str, float] = {}
        self._roundings: dict[str, _Rounding] = {}

    async def check(self) -> None:
        """Scrub the pools of which more is taken than blocks use.

        Raises:
            KvcmError: one cannot be scrubbed now; it is tried again later.
        """
        now, pools = self._clock.now(), dict(self._pools())
        self._next = {name: self._next.get(name, now + _FIRST_SECONDS) for name in pools}
        self._roundings = {name: each for name, each in self._roundings.items() if name in pools and now < each.until}
        for name, pool in pools.items():
            if now < self._next[name]:
                continue
            leaked_bytes = pool.allocated_bytes - self._accounted_bytes(name)
            self._next[name] = now + (_SCRUB_SECONDS if leaked_bytes > 0 else _CHECK_SECONDS)
            if leaked_bytes > 0:
                await self._scrub(name, pool, leaked_bytes)

    def _accounted_bytes(self, name: str) -> int:
        used_bytes, rounding = self._used_bytes(name), self._roundings.get(name)
        return used_bytes if rounding is None else rounding.allocated_for(used_bytes)

    async def _scrub(self, name: str, pool: _PoolUsageSource, leaked_bytes: int) -> None:
        try:
            report = await self._scrubber.scrub(name, dry_run=False)
        except NotReadyError:  # an operator does it right now
            _log.info("pool_scrubbed_already", storage=name, bytes=leaked_bytes)
            return
        used_bytes = self._used_bytes(name)
        if used_bytes and not report.too_young and not report.failed:
            until = self._clock.now() + _ROUNDING_SECONDS
            self._roundings[name] = _Rounding(max(pool.allocated_bytes, used_bytes), used_bytes, until)
