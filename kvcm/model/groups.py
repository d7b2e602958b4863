"""Instance groups: one quota, an ordered list of candidate storages, cache and reclaim settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

from kvcm.model.storages import StorageType

__all__ = [
    "CacheConfig",
    "CachePreferStrategy",
    "CacheReclaimStrategy",
    "InstanceGroup",
    "InstanceGroupQuota",
    "MetaCachePolicyConfig",
    "MetaIndexerConfig",
    "MetaStorageBackendConfig",
    "QuotaConfig",
    "ReclaimPolicy",
    "TriggerStrategy",
]


class ReclaimPolicy(IntEnum):
    """Order of eviction; numbers are those of the wire protocol."""

    POLICY_UNSPECIFIED = 0
    POLICY_LRU = 1
    POLICY_LFU = 2
    POLICY_TTL = 3


class CachePreferStrategy(IntEnum):
    """Which kind of storage writes go to; numbers are those of the wire protocol."""

    CPS_UNSPECIFIED = 0
    CPS_ALWAYS_3FS = 1
    CPS_PREFER_3FS = 2
    CPS_ALWAYS_MOONCAKE = 3
    CPS_PREFER_MOONCAKE = 4
    CPS_ALWAYS_TAIR_MEMPOOL = 5
    CPS_PREFER_TAIR_MEMPOOL = 6
    CPS_ALWAYS_VCNS_3FS = 7
    CPS_PREFER_VCNS_3FS = 8

    @property
    def preferred_type(self) -> StorageType | None:
        """The storage type that the strategy names, None when it names none."""
        return _PREFERRED[(self - 1) // 2] if self else None

    @property
    def is_exclusive(self) -> bool:
        """Whether only the named type may be used."""
        return self % 2 == 1


_PREFERRED = (StorageType.ST_3FS, StorageType.ST_MOONCAKE, StorageType.ST_TAIRMEMPOOL, StorageType.ST_VCNS_3FS)


@dataclass(frozen=True, slots=True)
class TriggerStrategy:
    """Soft marks: bytes, and a ratio of the capacity (above 1 = off)."""

    used_size: int = 0
    used_percentage: float = 0.0


@dataclass(frozen=True, slots=True)
class QuotaConfig:
    """Bytes allowed on one storage type."""

    storage_type: StorageType
    capacity: int


@dataclass(frozen=True, slots=True)
class InstanceGroupQuota:
    """Bytes allowed for the group, in total and per storage type; a type that is not listed has no limit of its own."""

    capacity: int = 0
    quota_config: tuple[QuotaConfig, ...] = ()

    def capacity_of(self, storage_type: StorageType) -> int | None:
        """Bytes allowed on `storage_type`, None when only the group's total limits it."""
        for quota in self.quota_config:
            if quota.storage_type is storage_type:
                return quota.capacity
        return None


@dataclass(frozen=True, slots=True)
class CacheReclaimStrategy:
    """When and how the group's blocks are evicted."""

    storage_unique_name: str = ""
    reclaim_policy: ReclaimPolicy = ReclaimPolicy.POLICY_UNSPECIFIED
    trigger_strategy: TriggerStrategy = field(default_factory=TriggerStrategy)
    trigger_period_seconds: int = 0
    reclaim_step_size: int = 0
    reclaim_step_percentage: int = 0
    delay_before_delete_ms: int = 0


@dataclass(frozen=True, slots=True)
class MetaStorageBackendConfig:
    """Accepted for the original's clients; the store is one per deployment (design.md decision 6)."""

    storage_type: str = "local"
    storage_uri: str = ""


@dataclass(frozen=True, slots=True)
class MetaCachePolicyConfig:
    """Read cache of the metadata: capacity in MB."""

    capacity: int = 1024
    type: str = "lru"
    cache_shard_bits: int = 6
    high_pri_pool_ratio: float = 0.0


@dataclass(frozen=True, slots=True)
class MetaIndexerConfig:
    """Limits and sharding of each instance's index; 0 means the default."""

    max_key_count: int = 0
    mutex_shard_num: int = 0
    batch_key_size: int = 0
    meta_storage_backend_config: MetaStorageBackendConfig = field(default_factory=MetaStorageBackendConfig)
    meta_cache_policy_config: MetaCachePolicyConfig = field(default_factory=MetaCachePolicyConfig)


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Cache settings of a group."""

    reclaim_strategy: CacheReclaimStrategy = field(default_factory=CacheReclaimStrategy)
    data_storage_strategy: CachePreferStrategy = CachePreferStrategy.CPS_UNSPECIFIED
    meta_indexer_config: MetaIndexerConfig = field(default_factory=MetaIndexerConfig)


@dataclass(frozen=True, slots=True)
class InstanceGroup:
    """A group as the operator configured it; `version` is chosen by the caller and grows with each update."""

    name: str
    storage_candidates: tuple[str, ...] = ()
    global_quota_group_name: str = ""
    max_instance_count: int = 0
    quota: InstanceGroupQuota = field(default_factory=InstanceGroupQuota)
    cache_config: CacheConfig = field(default_factory=CacheConfig)
    user_data: str = ""
    version: int = 0
