"""Instance groups: one quota, an ordered list of candidate storages, cache and reclaim settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

from kvcm.model.storages import StorageConfig, StorageType

__all__ = [
    "DEFAULT_HYSTERESIS",
    "DEFAULT_WATERMARK",
    "CacheConfig",
    "CachePreferStrategy",
    "CacheReclaimStrategy",
    "EvictionPolicy",
    "GlobalQuota",
    "InstanceGroup",
    "InstanceGroupQuota",
    "InstanceOverride",
    "MetaCachePolicyConfig",
    "MetaIndexerConfig",
    "MetaStorageBackendConfig",
    "PrefixClass",
    "QuotaConfig",
    "ReclaimPolicy",
    "StorageGuarantee",
    "TriggerStrategy",
]

DEFAULT_HYSTERESIS = 0.02
DEFAULT_WATERMARK = 0.9
"""Soft mark of storages and global quotas that name none."""


class ReclaimPolicy(IntEnum):
    """Order of eviction; numbers are those of the wire protocol. Policies without a number have a name only."""

    POLICY_UNSPECIFIED = 0
    POLICY_LRU = 1
    POLICY_LFU = 2
    POLICY_TTL = 3


_NAMES = {
    ReclaimPolicy.POLICY_UNSPECIFIED: "leaf_lru",
    ReclaimPolicy.POLICY_LRU: "lru",
    ReclaimPolicy.POLICY_LFU: "lfu",
    ReclaimPolicy.POLICY_TTL: "ttl",
}


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
    """Soft marks; 0 is not used.

    Attributes:
        used_size: bytes of the group in total.
        used_percentage: ratio of every limit: the group's capacity, that of a type, a key count. Above 1 = off.
        hysteresis: how far below a mark eviction goes, as a ratio of the same limit; None = `DEFAULT_HYSTERESIS`.
    """

    used_size: int = 0
    used_percentage: float = 0.0
    hysteresis: float | None = None


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
class EvictionPolicy:
    """Order and age of eviction; unset fields are those of the level above.

    Attributes:
        name: a key of `kvcm.reclaim.policies.POLICIES`, "" for unset.
        ttl_seconds: age at which blocks leave although there is space, 0 for never.
        ttl_sliding: whether age counts from the last read instead of the write.
    """

    name: str = ""
    ttl_seconds: int = 0
    ttl_sliding: bool = False

    @property
    def orders_by_write(self) -> bool:
        """Whether a read leaves a block's place in the order as it is."""
        return self.name in {"fifo", "sieve", "s3fifo"} or (self.name == "ttl" and not self.ttl_sliding)

    def with_defaults(self, above: EvictionPolicy) -> EvictionPolicy:
        """Return this policy, with unset fields taken from the level above."""
        if self.name:
            return self
        if self.ttl_seconds:
            return EvictionPolicy(above.name, self.ttl_seconds, self.ttl_sliding)
        return above


@dataclass(frozen=True, slots=True)
class PrefixClass:
    """A class of blocks: those that fit every condition.

    Attributes:
        name: unique in the group.
        min_depth: least depth in the prefix chain.
        end_depth: first depth that is beyond the class, 0 for none.
        min_reads: least number of reads since the block was stored.
        instance_ids: instances whose blocks it takes, all if empty.
        priority: blocks of a lower priority leave first; those of no class have 0.
        policy: order and age of its blocks.
        budget: ratio of the group's capacity above which the class gives up blocks before any other, 0 for none.
    """

    name: str
    min_depth: int = 0
    end_depth: int = 0
    min_reads: int = 0
    instance_ids: tuple[str, ...] = ()
    priority: int = 0
    policy: EvictionPolicy = field(default_factory=EvictionPolicy)
    budget: float = 0.0


@dataclass(frozen=True, slots=True)
class InstanceOverride:
    """What one instance does differently from its group; a weight of 0 is 1."""

    instance_id: str
    policy: EvictionPolicy = field(default_factory=EvictionPolicy)
    weight: float = 0.0


@dataclass(frozen=True, slots=True)
class CacheReclaimStrategy:
    """When and how the group's blocks are evicted.

    Attributes:
        storage_unique_name: has no effect.
        reclaim_policy: order of eviction, unless `policy` names one.
        trigger_strategy: the marks.
        trigger_period_seconds: between looks at the marks; 0 is the default.
        reclaim_step_size: most bytes evicted in one step, 0 for no limit.
        reclaim_step_percentage: the same in per cent of the group's capacity.
        delay_before_delete_ms: how long an evicted location stays readable for readers that have it.
        policy: order and age of eviction.
        share: which instance gives up blocks: `group_lru` (or ""), `proportional` or `fixed`.
        prefix_classes: blocks that are treated apart; the first class that fits counts.
        instance_overrides: what single instances do differently.
    """

    storage_unique_name: str = ""
    reclaim_policy: ReclaimPolicy = ReclaimPolicy.POLICY_UNSPECIFIED
    trigger_strategy: TriggerStrategy = field(default_factory=TriggerStrategy)
    trigger_period_seconds: int = 0
    reclaim_step_size: int = 0
    reclaim_step_percentage: int = 0
    delay_before_delete_ms: int = 0
    policy: EvictionPolicy = field(default_factory=EvictionPolicy)
    share: str = ""
    prefix_classes: tuple[PrefixClass, ...] = ()
    instance_overrides: tuple[InstanceOverride, ...] = ()


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
    persist_metadata_interval_time_ms: int | None = None


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Cache settings of a group."""

    reclaim_strategy: CacheReclaimStrategy = field(default_factory=CacheReclaimStrategy)
    data_storage_strategy: CachePreferStrategy = CachePreferStrategy.CPS_UNSPECIFIED
    meta_indexer_config: MetaIndexerConfig = field(default_factory=MetaIndexerConfig)


@dataclass(frozen=True, slots=True)
class StorageGuarantee:
    """Bytes of a group on a shared storage that no other group may take."""

    storage_unique_name: str
    guaranteed_bytes: int


@dataclass(frozen=True, slots=True)
class GlobalQuota:
    """Bytes that all groups of one `global_quota_group_name` may use together.

    Attributes:
        name: that name.
        capacity_bytes: the limit.
        used_percentage: ratio of it above which reclaiming begins; 0 is `DEFAULT_MARK`, above 1 is never.
    """

    name: str
    capacity_bytes: int
    used_percentage: float = 0.0


@dataclass(frozen=True, slots=True)
class InstanceGroup:
    """A group as the operator configured it; `version` is chosen by the caller and grows with each update.

    `event_report_storage_candidates` are the storages whose reporters its instances have; of several of one type the
    first counts. `extra_info` is a text for clients.
    """

    name: str
    storage_candidates: tuple[str, ...] = ()
    global_quota_group_name: str = ""
    max_instance_count: int = 0
    quota: InstanceGroupQuota = field(default_factory=InstanceGroupQuota)
    cache_config: CacheConfig = field(default_factory=CacheConfig)
    user_data: str = ""
    version: int = 0
    storage_guarantees: tuple[StorageGuarantee, ...] = ()
    pin_budget_bytes: int = 0
    extra_info: str = ""
    event_report_storage_candidates: tuple[str, ...] = ()
    revisit_interval_buckets: str = ""

    def policy_of(self, instance_id: str) -> EvictionPolicy:
        """Return the policy in force for an instance, its name always set (design.md decision 18)."""
        strategy = self.cache_config.reclaim_strategy
        by_number = EvictionPolicy(_NAMES[strategy.reclaim_policy])
        override = self.override_of(instance_id)
        return override.policy.with_defaults(strategy.policy.with_defaults(by_number))

    @property
    def policy_names(self) -> frozenset[str]:
        """The names of all policies that order blocks of the group."""
        strategy = self.cache_config.reclaim_strategy
        own = [each.policy for each in strategy.prefix_classes] + [each.policy for each in strategy.instance_overrides]
        return frozenset({self.policy_of("").name, *(policy.name for policy in own if policy.name)})

    def override_of(self, instance_id: str) -> InstanceOverride:
        """Return what an instance does differently."""
        overrides = self.cache_config.reclaim_strategy.instance_overrides
        return next((each for each in overrides if each.instance_id == instance_id), InstanceOverride(instance_id))

    def guaranteed_on(self, storage: StorageConfig) -> int:
        """Return the bytes on a storage that no other group may take: what the group's quota forbids it to use there
        needs no keeping."""
        named = (each for each in self.storage_guarantees if each.storage_unique_name == storage.global_unique_name)
        wanted = sum(each.guaranteed_bytes for each in named)
        on_type = self.quota.capacity_of(storage.storage_type)
        allowed = self.quota.capacity if on_type is None else min(self.quota.capacity, on_type)
        return max(0, min(wanted, allowed))
