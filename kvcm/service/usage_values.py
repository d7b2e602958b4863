"""Usage, limits and health as reported. Field names are those of the wire messages, so that one generic
translation serves both directions: the manager fills answers from these values, commands read them back.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from kvcm.model.storages import StorageConfig, StorageSpace, StorageType
from kvcm.storage.health import HealthState, StorageHealth

__all__ = [
    "NOT_LIMITED",
    "UNKNOWN",
    "BlockMove",
    "BlockMoveState",
    "BlockStoreStatus",
    "DrainState",
    "DrainStatus",
    "GlobalQuotaUsage",
    "GroupStorageUsage",
    "GroupStoreStatus",
    "GroupUsage",
    "InstanceUsage",
    "StorageStatus",
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

    @property
    def is_full(self) -> bool:
        """Whether nothing more fits."""
        return 0 <= self.capacity_bytes <= self.used_bytes and self.used_bytes > 0

    @property
    def is_above_mark(self) -> bool:
        """Whether eviction has something to do; blocks that are being deleted do not count."""
        return 0 <= self.high_mark_bytes < self.used_bytes - self.deleting_bytes


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
class StorageStatus:
    """How a storage is for one manager; -1 where the bytes of its medium are not known."""

    storage_unique_name: str
    is_enabled: bool
    health: HealthState
    reason: str = ""
    since_ms: int = 0
    probe_seconds: float = 0.0
    failed_probes: int = 0
    medium_bytes: int = -1
    medium_free_bytes: int = -1
    is_draining: bool = False
    is_full: bool = False

    @classmethod
    def of(cls, config: StorageConfig, health: StorageHealth | None) -> StorageStatus:
        """Return the status of a storage with the health of its backend, None while none is open."""
        name, is_enabled = config.global_unique_name, config.is_available
        if config.is_event_report:  # there is nothing that could fail
            return cls(name, is_enabled, HealthState.SH_UP)
        if health is None:
            reason = "it could not be opened on this manager, whose log says why"
            return cls(name, is_enabled, HealthState.SH_DOWN, reason, is_draining=config.is_draining)
        space = health.space or StorageSpace(-1, -1)
        return cls(
            storage_unique_name=name,
            is_enabled=is_enabled,
            health=health.state,
            reason=health.reason,
            since_ms=int(health.since * 1000),
            probe_seconds=health.probe_seconds,
            failed_probes=health.failed_probes,
            medium_bytes=space.capacity_bytes,
            medium_free_bytes=space.free_bytes,
            is_draining=config.is_draining,
            is_full=health.is_full,
        )


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


class DrainState(IntEnum):
    """How far a drain is; numbers are those of the wire protocol."""

    DRAIN_UNSPECIFIED = 0
    DRAIN_RUNNING = 1
    DRAIN_DONE = 2

    @property
    def label(self) -> str:
        """As operators read it."""
        return self.name.removeprefix("DRAIN_").lower()


@dataclass(frozen=True, slots=True)
class DrainStatus:
    """One drain, or one removal that is not over; the reason is empty while it goes on."""

    storage_unique_name: str
    is_removal: bool
    state: DrainState
    started_ms: int
    left_bytes: int
    reason: str = ""


UNKNOWN = -1


class BlockMoveState(IntEnum):
    """How far the move of an instance's blocks is; numbers are those of the wire protocol."""

    BLOCK_MOVE_UNSPECIFIED = 0
    BLOCK_MOVE_WAITING = 1
    BLOCK_MOVE_COPYING = 2
    BLOCK_MOVE_CLEARING = 3

    @property
    def label(self) -> str:
        """As operators read it."""
        return self.name.removeprefix("BLOCK_MOVE_").lower()


@dataclass(frozen=True, slots=True)
class BlockMove:
    """The move of an instance's blocks to another metadata store; -1 where this manager does not carry it out."""

    instance_id: str
    source: str
    target: str
    state: BlockMoveState
    copied_blocks: int = UNKNOWN
    failures: int = UNKNOWN
    reason: str = ""


@dataclass(frozen=True, slots=True)
class GroupStoreStatus:
    """The metadata store that a group's blocks are to be kept in, and where they are."""

    name: str
    store: str
    instance_count: int
    placed_instance_count: int
    fixed_instance_count: int
    moves: tuple[BlockMove, ...] = ()


@dataclass(frozen=True, slots=True)
class BlockStoreStatus:
    """A metadata store, as one manager sees it."""

    name: str
    is_usable: bool
    reason: str = ""
    instance_count: int = 0
