"""Whether a write has left its group above a mark: what wakes the reclaimer before its time.

It goes by what the ledger knows, which counts what is being deleted and, over a shared store, what is only reserved
yet: it may wake the reclaimer once too often, never too seldom. Every write asks, so what follows from the settings is
worked out when they change.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from kvcm.model.groups import GlobalQuota, InstanceGroup
from kvcm.model.locations import Place
from kvcm.model.storages import StorageConfig, StorageType
from kvcm.reclaim.watermarks import Mark, global_mark, group_mark, key_mark, size_mark, storage_mark, type_mark
from kvcm.registry.registry import Registry

__all__ = ["Held", "Pressure"]

_NO_MARK = 1 << 63  # more bytes than there are


class Held(Protocol):
    """Knows what groups hold: at least what they use."""

    def held(self, group_name: str) -> Mapping[Place, int]:
        """Return the bytes that a group holds, by place."""

    def held_on(self, storage: str) -> Mapping[str, int]:
        """Return the bytes on a storage, by group."""

    def held_by_group(self) -> Mapping[str, int]:
        """Return the bytes of every group that shares a global quota."""


class _OnStorage(NamedTuple):
    """The mark of a storage with a capacity, and what groups are guaranteed on it."""

    mark: Mark
    guaranteed: Mapping[str, int]


class _Drawn(NamedTuple):
    """The mark of a global quota, and the groups that draw from it."""

    mark: Mark
    group_names: Sequence[str]


class _Watch(NamedTuple):
    """What the holdings of a group are compared with.

    Attributes:
        group: as configured when this was worked out.
        total: most bytes.
        by_type: most bytes on storage types that have a mark.
        keys: most blocks of an instance, None without a mark.
        storages: with a mark; the most bytes on each, and what groups are guaranteed there.
        drawn: the global quota, None without a mark.
    """

    group: InstanceGroup
    total: int
    by_type: Sequence[tuple[StorageType, int]]
    keys: int | None
    storages: Sequence[tuple[str, int, Mapping[str, int]]]
    drawn: _Drawn | None


class Pressure:
    """Compares what groups hold with the marks that concern them.

    Args:
        registry: groups, storages, global quotas, instances.
        held: returns who knows what groups hold.
        key_counts: returns the blocks of each instance of a group.
    """

    def __init__(
        self, registry: Registry, held: Callable[[], Held], key_counts: Callable[[str], Iterable[int]]
    ) -> None:
        self._registry = registry
        self._held = held
        self._key_counts = key_counts
        self._generation = -1
        self._blocks: Mapping[str, int] = {}
        self._storages: Mapping[str, _OnStorage] = {}
        self._quotas: Mapping[str, _Drawn] = {}
        self._watches: dict[str, _Watch] = {}

    def is_above_a_mark(self, group: InstanceGroup) -> bool:
        """Return whether what is held is above a mark that concerns a group, which has just written."""
        if self._generation != self._registry.generation:
            self._generation = self._registry.generation
            self._read()
        watch = self._watches.get(group.name)
        if watch is None or watch.group is not group:
            watch = self._watches[group.name] = self._watch(group)
        held = self._held()
        by_place = held.held(group.name)
        if sum(by_place.values()) > watch.total:
            return True
        for kind, most in watch.by_type:  # every write passes here: generators would take longer than what they look at
            if _on_type(by_place, kind) > most:
                return True
        for name, most, kept in watch.storages:
            if _taken(group.name, held.held_on(name), kept) > most:
                return True
        if watch.keys is not None and max(self._key_counts(group.name), default=0) > watch.keys:
            return True
        return watch.drawn is not None and _drawn_by(watch.drawn, held.held_by_group()) > watch.drawn.mark.high

    def _watch(self, group: InstanceGroup) -> _Watch:
        block, drawn = self._blocks.get(group.name, 0), self._quotas.get(group.global_quota_group_name)
        totals = [mark.high for mark in (group_mark(group, block), size_mark(group)) if mark is not None]
        kinds = [quota.storage_type for quota in group.quota.quota_config]
        marks = [(kind, mark.high) for kind in kinds if (mark := type_mark(group, kind, block)) is not None]
        keys = key_mark(group, group.cache_config.meta_indexer_config.max_key_count)
        shared = [(name, self._storages[name]) for name in group.storage_candidates if name in self._storages]
        return _Watch(
            group,
            min(totals, default=_NO_MARK),
            marks,
            keys.high if keys is not None else None,
            [(name, mark.high, kept) for name, (mark, kept) in shared],
            drawn,
        )

    def _read(self) -> None:
        groups = self._registry.groups.all()
        blocks: defaultdict[str, int] = defaultdict(int)
        for instance in self._registry.instances.all():
            name = instance.instance_group_name
            blocks[name] = max(blocks[name], instance.block_bytes)
        self._blocks = blocks
        on_storages = ((each, _on_storage(each, groups, blocks)) for each in self._registry.storages.all())
        self._storages = {each.global_unique_name: found for each, found in on_storages if found is not None}
        drawn = ((quota, _drawn(quota, groups, blocks)) for quota in self._registry.quotas.all())
        self._quotas = {quota.name: found for quota, found in drawn if found is not None}
        self._watches = {}


def _on_type(by_place: Mapping[Place, int], kind: StorageType) -> int:
    return sum([size for place, size in by_place.items() if place.storage_type is kind])


def _drawn_by(drawn: _Drawn, by_group: Mapping[str, int]) -> int:
    return sum([by_group.get(name, 0) for name in drawn.group_names])


def _taken(writer: str, by_group: Mapping[str, int], guaranteed: Mapping[str, int]) -> int:
    """Return the bytes on a storage that a writer has to reckon with: what is used, and what is kept for others. Within
    its own guarantee it takes nothing that is kept for anybody."""
    total = sum(by_group.values())
    if by_group.get(writer, 0) <= guaranteed.get(writer, 0):
        return total
    return total + sum(max(0, size - by_group.get(name, 0)) for name, size in guaranteed.items())


def _on_storage(
    storage: StorageConfig, groups: Sequence[InstanceGroup], blocks: Mapping[str, int]
) -> _OnStorage | None:
    users = [group.name for group in groups if storage.global_unique_name in group.storage_candidates]
    guarantors = (group for group in groups if group.storage_guarantees)  # few of many
    guaranteed = {group.name: size for group in guarantors if (size := group.guaranteed_on(storage))}
    mark = storage_mark(storage, _largest(blocks, users))
    return _OnStorage(mark, guaranteed) if mark is not None else None


def _drawn(quota: GlobalQuota, groups: Sequence[InstanceGroup], blocks: Mapping[str, int]) -> _Drawn | None:
    names = [group.name for group in groups if group.global_quota_group_name == quota.name]
    mark = global_mark(quota, _largest(blocks, names))
    return _Drawn(mark, names) if mark is not None else None


def _largest(blocks: Mapping[str, int], names: Iterable[str]) -> int:
    return max((blocks.get(name, 0) for name in names), default=0)
