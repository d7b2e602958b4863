"""Whether a write has left its group above a mark: what wakes the reclaimer before its time.

It goes by what the ledger knows, which counts what is being deleted and, over a shared store, what is only reserved
yet: it may wake the reclaimer once too often, never too seldom. Every write asks, so what follows from the settings is
worked out when they change.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from kvcm.model.groups import GlobalQuota, InstanceGroup
from kvcm.model.locations import Place
from kvcm.model.storages import StorageConfig
from kvcm.reclaim.watermarks import Mark, global_mark, group_mark, key_mark, size_mark, storage_mark, type_mark
from kvcm.registry.registry import Registry

__all__ = ["Held", "Pressure"]


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

    mark: Mark | None
    guaranteed: Mapping[str, int]


class _Drawn(NamedTuple):
    """The mark of a global quota, and the groups that draw from it."""

    mark: Mark | None
    group_names: Sequence[str]


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

    def is_above_a_mark(self, group: InstanceGroup) -> bool:
        """Return whether what is held is above a mark that concerns a group, which has just written."""
        if self._generation != self._registry.generation:
            self._generation = self._registry.generation
            self._read()
        return any(amount > mark.high for mark, amount in self._marks(group, self._held()) if mark is not None)

    def _marks(self, group: InstanceGroup, held: Held) -> Iterator[tuple[Mark | None, int]]:
        block, by_place = self._blocks.get(group.name, 0), held.held(group.name)
        total = sum(by_place.values())
        yield group_mark(group, block), total
        yield size_mark(group), total
        for kind in {place.storage_type for place in by_place}:
            on_type = sum(size for place, size in by_place.items() if place.storage_type is kind)
            yield type_mark(group, kind, block), on_type
        keys = key_mark(group, group.cache_config.meta_indexer_config.max_key_count)
        if keys is not None:
            for count in self._key_counts(group.name):
                yield keys, count
        for name in group.storage_candidates:
            storage = self._storages.get(name)
            if storage is not None:
                yield storage.mark, _taken(group.name, held.held_on(name), storage.guaranteed)
        quota = self._quotas.get(group.global_quota_group_name)
        if quota is not None:
            by_group = held.held_by_group()
            yield quota.mark, sum(by_group.get(name, 0) for name in quota.group_names)

    def _read(self) -> None:
        groups = self._registry.groups.all()
        blocks: defaultdict[str, int] = defaultdict(int)
        for instance in self._registry.instances.all():
            name = instance.instance_group_name
            blocks[name] = max(blocks[name], instance.block_bytes)
        self._blocks = blocks
        self._storages = {
            storage.global_unique_name: _on_storage(storage, groups, blocks)
            for storage in self._registry.storages.all()
            if storage.limit_bytes
        }
        self._quotas = {quota.name: _drawn(quota, groups, blocks) for quota in self._registry.quotas.all()}


def _taken(writer: str, by_group: Mapping[str, int], guaranteed: Mapping[str, int]) -> int:
    """Return the bytes on a storage that a writer has to reckon with: what is used, and what is kept for others. Within
    its own guarantee it takes nothing that is kept for anybody."""
    total = sum(by_group.values())
    if by_group.get(writer, 0) <= guaranteed.get(writer, 0):
        return total
    return total + sum(max(0, size - by_group.get(name, 0)) for name, size in guaranteed.items())


def _on_storage(storage: StorageConfig, groups: Sequence[InstanceGroup], blocks: Mapping[str, int]) -> _OnStorage:
    users = [group.name for group in groups if storage.global_unique_name in group.storage_candidates]
    guarantors = (group for group in groups if group.storage_guarantees)  # few of many
    guaranteed = {group.name: size for group in guarantors if (size := group.guaranteed_on(storage))}
    return _OnStorage(storage_mark(storage, _largest(blocks, users)), guaranteed)


def _drawn(quota: GlobalQuota, groups: Sequence[InstanceGroup], blocks: Mapping[str, int]) -> _Drawn:
    names = [group.name for group in groups if group.global_quota_group_name == quota.name]
    return _Drawn(global_mark(quota, _largest(blocks, names)), names)


def _largest(blocks: Mapping[str, int], names: Iterable[str]) -> int:
    return max((blocks.get(name, 0) for name in names), default=0)
