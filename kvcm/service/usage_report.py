"""Usage and limits of groups, storages and global quotas, summed up from plain values.

Bytes come from the indexes, which change them together with the records; marks are those that reclaiming works with.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple, TypeVar

from kvcm.cache.instance_cache import batches
from kvcm.cache.manager import CacheManager
from kvcm.index.meta_index import IndexHandle
from kvcm.model.errors import KvcmError
from kvcm.model.groups import GlobalQuota, InstanceGroup
from kvcm.model.instances import Instance
from kvcm.model.locations import StorageKey
from kvcm.model.principals import call_context
from kvcm.model.storages import StorageConfig
from kvcm.reclaim.deletion_executor import Backlog, DeletionExecutor
from kvcm.reclaim.watermarks import (
    Watermark,
    global_watermark,
    group_watermark,
    size_watermark,
    storage_watermark,
    type_watermark,
)
from kvcm.registry.registry import Registry
from kvcm.service.usage_values import (
    NOT_LIMITED,
    GlobalQuotaUsage,
    GroupStorageUsage,
    GroupUsage,
    InstanceUsage,
    StorageUsage,
    TypeUsage,
    Usage,
    UsageReport,
)

__all__ = ["IndexUsage", "UsageSources", "UsageView", "usage_report"]

_UNLIMITED_KEYS = 1 << 62
Key = TypeVar("Key")


class IndexUsage(NamedTuple):
    """What the index of one registration holds at one moment."""

    instance: Instance
    key_count: int
    max_key_count: int
    used: Mapping[StorageKey, int]
    deleting: Mapping[StorageKey, int]

    @property
    def block_bytes(self) -> int:
        """Bytes of a whole block."""
        return sum(info.size for info in self.instance.location_spec_infos)


@dataclass(frozen=True, slots=True)
class UsageSources:
    """What a report is made from.

    Attributes:
        groups: as configured.
        storages: as configured.
        quotas: the global quotas.
        indexes: of all registrations, removals included.
        pinned: bytes that pins hold, by group.
        refused: writes rejected for lack of space, by group.
        backlogs: by storage.
    """

    groups: Sequence[InstanceGroup]
    storages: Sequence[StorageConfig]
    quotas: Sequence[GlobalQuota]
    indexes: Sequence[IndexUsage]
    pinned: Mapping[str, int] = field(default_factory=dict)
    refused: Mapping[str, int] = field(default_factory=dict)
    backlogs: Mapping[str, Backlog] = field(default_factory=dict)

    def of_groups(self, names: Set[str]) -> UsageSources:
        """Return the sources of some groups alone, as if there were no others: sums would reveal the others."""
        return replace(
            self,
            groups=[group for group in self.groups if group.name in names],
            indexes=[index for index in self.indexes if index.instance.instance_group_name in names],
            backlogs={},
        )


@dataclass(slots=True)
class _Sums:
    """Bytes in use and bytes being deleted, and the largest block of the groups whose bytes these are: eviction leaves
    space for one."""

    used: Counter[StorageKey] = field(default_factory=Counter)
    deleting: Counter[StorageKey] = field(default_factory=Counter)
    largest_block: int = 0

    @classmethod
    def of(cls, indexes: Iterable[IndexUsage]) -> _Sums:
        sums = cls()
        for index in indexes:
            sums.used.update(index.used)
            sums.deleting.update(index.deleting)
            sums.largest_block = max(sums.largest_block, index.block_bytes)
        return sums

    def add(self, other: _Sums) -> None:
        self.used.update(other.used)
        self.deleting.update(other.deleting)
        if other.used_bytes:
            self.largest_block = max(self.largest_block, other.largest_block)

    def split(self, key: Callable[[StorageKey], Key]) -> dict[Key, _Sums]:
        """Return the sums by a key of the places, only of those where something is."""
        parts: defaultdict[Key, _Sums] = defaultdict(lambda: _Sums(largest_block=self.largest_block))
        for place, size in self.used.items():
            if size:
                part = parts[key(place)]
                part.used[place], part.deleting[place] = size, self.deleting[place]
        return parts

    @property
    def used_bytes(self) -> int:
        return sum(self.used.values())

    def usage(self, capacity: int | None = None, mark: Watermark | None = None) -> Usage:
        limit = NOT_LIMITED if capacity is None else capacity
        high, low = (NOT_LIMITED, NOT_LIMITED) if mark is None else (mark.high, mark.low)
        return Usage(self.used_bytes, sum(self.deleting.values()), limit, high, low)


def usage_report(sources: UsageSources, group: str = "") -> UsageReport:
    """Return the usage of everything, or of one group and what it draws from.

    Args:
        sources: what it is made from.
        group: the only group to report; empty for all.
    """
    configured = {each.name: each for each in sources.groups}
    indexes: dict[str, list[IndexUsage]] = {name: [] for name in configured}
    for index in sources.indexes:
        indexes.setdefault(index.instance.instance_group_name, []).append(index)
    sums = {name: _Sums.of(members) for name, members in indexes.items()}
    names = sorted(indexes.keys() & {group} if group else indexes)
    groups = tuple(_group_usage(sources, name, configured.get(name), indexes[name], sums[name]) for name in names)
    storages, quotas = _storage_usages(sources, sums.values()), _quota_usages(sources, sums)
    if not group:
        return UsageReport(groups, tuple(storages), tuple(quotas))
    drawn = {storage.storage_unique_name for each in groups for storage in each.storages}
    return UsageReport(
        groups,
        tuple(storage for storage in storages if storage.storage_unique_name in drawn),
        tuple(quota for quota in quotas if group in quota.groups),
    )


def _group_usage(
    sources: UsageSources, name: str, group: InstanceGroup | None, indexes: Iterable[IndexUsage], sums: _Sums
) -> GroupUsage:
    return GroupUsage(
        name=name,
        total=sums.usage(0) if group is None else sums.usage(group.quota.capacity, _total_mark(group, sums)),
        types=tuple(_type_usages(group, sums)),
        storages=tuple(_group_storages(sources, group, sums)),
        instances=tuple(sorted(_instance_usages(group, indexes), key=lambda each: each.instance_id)),
        pinned_bytes=sources.pinned.get(name, 0),
        pin_budget_bytes=group.pin_budget_bytes if group is not None else 0,
        refused_writes=sources.refused.get(name, 0),
    )


def _total_mark(group: InstanceGroup, sums: _Sums) -> Watermark | None:
    marks = [mark for mark in (group_watermark(group, sums.largest_block), size_watermark(group)) if mark is not None]
    return min(marks, key=lambda mark: mark.high, default=None)


def _type_usages(group: InstanceGroup | None, sums: _Sums) -> Iterator[TypeUsage]:
    parts = sums.split(lambda place: place.storage_type)
    quotas = group.quota.quota_config if group is not None else ()
    for kind in sorted(parts.keys() | {quota.storage_type for quota in quotas}):
        part = parts.get(kind, _Sums())
        if group is None:
            yield TypeUsage(kind, part.usage())
        else:
            mark = type_watermark(group, kind, sums.largest_block)
            yield TypeUsage(kind, part.usage(group.quota.capacity_of(kind), mark))


def _group_storages(sources: UsageSources, group: InstanceGroup | None, sums: _Sums) -> Iterator[GroupStorageUsage]:
    configured = {storage.global_unique_name: storage for storage in sources.storages}
    parts = sums.split(lambda place: place.storage)
    named = group.storage_candidates if group is not None else ()
    for name in sorted(parts.keys() | set(named)):
        used_bytes = parts[name].used_bytes if name in parts else 0
        storage = configured.get(name)
        guaranteed = group.guaranteed_on(storage) if group is not None and storage is not None else 0
        yield GroupStorageUsage(name, used_bytes, guaranteed)


def _instance_usages(group: InstanceGroup | None, indexes: Iterable[IndexUsage]) -> Iterator[InstanceUsage]:
    """Yield the usage of each instance: of one that is registered again, with what its removal has left."""
    by_id: defaultdict[str, list[IndexUsage]] = defaultdict(list)
    for index in indexes:
        by_id[index.instance.instance_id].append(index)
    for instance_id, of_one in by_id.items():
        max_key_count = max(index.max_key_count for index in of_one)
        yield InstanceUsage(
            instance_id,
            sum(index.key_count for index in of_one),
            max_key_count if max_key_count < _UNLIMITED_KEYS else NOT_LIMITED,
            sum(sum(index.used.values()) for index in of_one),
            group.policy_of(instance_id).name if group is not None else "",
        )


def _storage_usages(sources: UsageSources, groups: Iterable[_Sums]) -> Iterator[StorageUsage]:
    """Yield every storage that is configured, and every one that is gone while bytes on it still count."""
    parts: defaultdict[str, _Sums] = defaultdict(_Sums)
    for sums in groups:
        for name, part in sums.split(lambda place: place.storage).items():
            parts[name].add(part)
    configured = {storage.global_unique_name: storage for storage in sources.storages}
    for name in sorted(configured.keys() | parts.keys()):
        storage, part = configured.get(name), parts[name]
        capacity = storage.limit_bytes if storage is not None else 0
        mark = storage_watermark(storage, part.largest_block) if storage is not None else None
        backlog = sources.backlogs.get(name, Backlog())
        yield StorageUsage(
            storage_unique_name=name,
            usage=part.usage(capacity or None, mark),
            guaranteed_bytes=sum(group.guaranteed_on(storage) for group in sources.groups)
            if storage is not None
            else 0,
            oversubscription=_quotas_on(sources.groups, name) / capacity if capacity else 0.0,
            deletion_backlog=backlog.waiting + backlog.executing,
            deletion_failures=backlog.failures,
        )


def _quotas_on(groups: Iterable[InstanceGroup], storage: str) -> int:
    return sum(max(0, group.quota.capacity) for group in groups if storage in group.storage_candidates)


def _quota_usages(sources: UsageSources, sums: Mapping[str, _Sums]) -> Iterator[GlobalQuotaUsage]:
    drawing: defaultdict[str, list[str]] = defaultdict(list)
    for group in sources.groups:
        drawing[group.global_quota_group_name].append(group.name)
    for quota in sorted(sources.quotas, key=lambda each: each.name):
        names = sorted(drawing[quota.name])
        whole = _Sums()
        for name in names:
            whole.add(sums[name])
        usage = whole.usage(quota.capacity_bytes, global_watermark(quota, whole.largest_block))
        yield GlobalQuotaUsage(quota.name, usage, tuple(names))


# The present usage, for the capacity calls and the metrics.

_SLICE: Final = 50


class UsageView:
    """The truth about usage, as the indexes have it.

    Args:
        cache: blocks and instances.
        registry: the limits.
        deletions: the pending ones.

    Attributes:
        pinned: bytes that pins hold, by group, as last read.
    """

    def __init__(self, cache: CacheManager, registry: Registry, deletions: DeletionExecutor) -> None:
        self._cache = cache
        self._registry = registry
        self._deletions = deletions
        self.pinned: dict[str, int] = {}

    async def current(self, group: str = "") -> UsageReport:
        """Return the usage of everything, or of one group and what it draws from. A principal that is limited to
        groups sees the usage of those.

        Raises:
            InvalidArgumentError: there is no such group.
            StorageIOError: the store cannot be asked.
        """
        if group:
            self._registry.groups.get(group)
        await self.refresh()
        return await self.last(group)

    async def refresh(self) -> None:
        """Read the usage of indexes and pins from the store.

        Raises:
            StorageIOError: the store cannot be asked.
        """
        for number, handle in enumerate(list(self._cache.indexes())):
            await handle.meta_index.refresh(is_exact=False)
            if number % _SLICE == 0:  # a store of this process answers without giving way
                await asyncio.sleep(0)
        pinned: dict[str, int] = {}
        for number, group in enumerate(self._registry.groups.all()):
            pinned[group.name] = await self._cache.pins.pinned_bytes(group.name)
            if number % _SLICE == 0:
                await asyncio.sleep(0)
        self.pinned = pinned

    async def refreshed_or_last(self) -> UsageReport:
        """Return the usage of everything as the store has it now, or as last read while it does not answer."""
        with suppress(KvcmError):
            return await self.current()
        return await self.last()

    async def last(self, group: str = "") -> UsageReport:
        """Return the same as last read, without asking the store. Of many instances that is much to sum up: a thread
        does it, while lookups are answered."""
        sources = UsageSources(
            groups=self._registry.groups.all(),
            storages=[each for each in self._registry.storages.all() if not each.is_event_report],
            quotas=self._registry.quotas.all(),
            indexes=await self._index_usages(),
            pinned=self.pinned,
            refused=dict(self._cache.usage.rejections),
            backlogs=self._deletions.backlogs(),
        )
        principal = call_context.get().principal
        seen = sources if principal.has_all_groups else sources.of_groups(principal.groups)
        return await asyncio.to_thread(usage_report, seen, group)

    async def _index_usages(self) -> list[IndexUsage]:
        held: list[IndexUsage] = []
        for page in batches(list(self._cache.indexes()), _SLICE):
            held += map(_usage_of, page)
            await asyncio.sleep(0)
        return held


def _usage_of(handle: IndexHandle) -> IndexUsage:
    index = handle.meta_index
    used, deleting = dict(index.usage_bytes), dict(index.deleting_bytes)  # which change while a thread reads them
    return IndexUsage(handle.instance, index.key_count, index.max_key_count, used, deleting)
