"""Every hard limit that a write of a group has to keep, as configured right now."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvcm.model.groups import GlobalQuota, InstanceGroup
from kvcm.model.storages import StorageConfig
from kvcm.registry.registry import Registry

__all__ = ["MOST_KEYS", "LimitBook", "Limits", "SharedQuota", "StorageLimit"]

MOST_KEYS = 1 << 62
"""Blocks of an instance without a limit."""


class StorageLimit(NamedTuple):
    """A storage with a capacity of its own.

    Attributes:
        capacity_bytes: what all groups may use together.
        guaranteed: by group, bytes that no other group may take.
    """

    capacity_bytes: int
    guaranteed: Mapping[str, int]

    def kept_from(self, group_name: str) -> dict[str, int]:
        """Return by other group how many bytes count as taken at least."""
        return {name: size for name, size in self.guaranteed.items() if name != group_name}


class SharedQuota(NamedTuple):
    """A global quota and the groups that draw from it."""

    quota: GlobalQuota
    group_names: Sequence[str]


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one group.

    Attributes:
        group: its quota.
        storages: by name, those that have a limit of their own.
        shared: the global quota that it draws from, None when there is none.
    """

    group: InstanceGroup
    storages: Mapping[str, StorageLimit] = field(default_factory=dict)
    shared: SharedQuota | None = None

    @property
    def max_key_count(self) -> int:
        """Most blocks of an instance."""
        return self.group.cache_config.meta_indexer_config.max_key_count or MOST_KEYS


class LimitBook:
    """Looks limits up; what is derived from the registry is derived again when that changed.

    Args:
        registry: groups, storages, global quotas.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._generation = -1
        self._storages: Mapping[str, StorageLimit] = {}
        self._group_names: Mapping[str, Sequence[str]] = {}

    def of(self, group: InstanceGroup) -> Limits:
        """Return the limits of a group."""
        if self._generation != self._registry.generation:
            self._generation = self._registry.generation
            self._read()
        quota = self._registry.quotas.find(group.global_quota_group_name)
        names = self._group_names.get(group.global_quota_group_name, (group.name,))
        return Limits(group, self._storages, SharedQuota(quota, names) if quota is not None else None)

    def _read(self) -> None:
        groups = self._registry.groups.all()
        guarantors = [group for group in groups if group.storage_guarantees]  # few of many
        self._storages = {
            config.global_unique_name: StorageLimit(config.limit_bytes, _guaranteed(config, guarantors))
            for config in self._registry.storages.all()
            if config.limit_bytes
        }
        names: defaultdict[str, list[str]] = defaultdict(list)
        for group in groups:
            names[group.global_quota_group_name].append(group.name)
        self._group_names = names


def _guaranteed(config: StorageConfig, groups: Sequence[InstanceGroup]) -> dict[str, int]:
    return {group.name: size for group in groups if (size := group.guaranteed_on(config))}
