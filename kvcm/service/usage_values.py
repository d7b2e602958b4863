"""Usage and limits as reports tell them. Field names are those of the wire messages, so that one generic translation
serves both directions: the manager fills answers from these values, commands read them back."""

from __future__ import annotations

from dataclasses import dataclass

from kvcm.model.storages import StorageType

__all__ = [
    "NOT_LIMITED",
    "GlobalQuotaUsage",
    "GroupStorageUsage",
    "GroupUsage",
    "InstanceUsage",
    "StorageUsage",
    "TypeUsage",
    "Usage",
    "UsageReport",
]

NOT_LIMITED = -1


@dataclass(frozen=True, slots=True)
class Usage:
    """One limit and how far it is used; -1 where there is no limit, or no mark."""

    used_bytes: int
    deleting_bytes: int
    capacity_bytes: int = NOT_LIMITED
    high_mark_bytes: int = NOT_LIMITED
    low_mark_bytes: int = NOT_LIMITED


@dataclass(frozen=True, slots=True)
class TypeUsage:
    """A storage type of a group."""

    storage_type: StorageType
    usage: Usage


@dataclass(frozen=True, slots=True)
class GroupStorageUsage:
    """A storage of a group."""

    storage_unique_name: str
    used_bytes: int
    guaranteed_bytes: int


@dataclass(frozen=True, slots=True)
class InstanceUsage:
    """An instance of a group; the policy is the one in force, empty when the group is gone."""

    instance_id: str
    key_count: int
    max_key_count: int
    used_bytes: int
    policy: str


@dataclass(frozen=True, slots=True)
class GroupUsage:
    """A group; one that is gone while its instances are still there may use nothing."""

    name: str
    total: Usage
    types: tuple[TypeUsage, ...]
    storages: tuple[GroupStorageUsage, ...]
    instances: tuple[InstanceUsage, ...]
    pinned_bytes: int
    pin_budget_bytes: int
    refused_writes: int


@dataclass(frozen=True, slots=True)
class StorageUsage:
    """A storage, over all groups."""

    storage_unique_name: str
    usage: Usage
    guaranteed_bytes: int
    oversubscription: float
    deletion_backlog: int
    deletion_failures: int


@dataclass(frozen=True, slots=True)
class GlobalQuotaUsage:
    """A global quota, over the groups that name it."""

    name: str
    usage: Usage
    groups: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class UsageReport:
    """Everything, each part ordered by name."""

    groups: tuple[GroupUsage, ...]
    storages: tuple[StorageUsage, ...]
    global_quotas: tuple[GlobalQuotaUsage, ...]
