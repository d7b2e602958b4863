"""Instance groups as JSON documents."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from kvcm.service.rest.documents import MOST_ENTRIES, Document, FreeText, Int32, Int64, Name, Ratio, Text

__all__ = ["GroupDocument", "StorageTypeName"]

StorageTypeName = Literal[
    "ST_UNSPECIFIED", "ST_3FS", "ST_MOONCAKE", "ST_TAIRMEMPOOL", "ST_NFS", "ST_VCNS_3FS", "ST_DUMMY"
]
_Policy = Literal["POLICY_UNSPECIFIED", "POLICY_LRU", "POLICY_LFU", "POLICY_TTL"]
_Strategy = Literal[
    "CPS_UNSPECIFIED", "CPS_ALWAYS_3FS", "CPS_PREFER_3FS", "CPS_ALWAYS_MOONCAKE", "CPS_PREFER_MOONCAKE",
    "CPS_ALWAYS_TAIR_MEMPOOL", "CPS_PREFER_TAIR_MEMPOOL", "CPS_ALWAYS_VCNS_3FS", "CPS_PREFER_VCNS_3FS",
]  # fmt: skip


class TriggerStrategyDocument(Document):
    """When reclaiming begins."""

    used_size: Int64 = 0
    """Bytes in use above which reclaiming begins; 0 = not used."""
    used_percentage: Ratio = 0.0
    """Share of a limit above which reclaiming begins, as a ratio; above 1 is never; 0 = not used."""
    hysteresis: Ratio | None = None
    """How far below the mark reclaiming goes, as a ratio of the same limit; unset = 0.02."""


class EvictionPolicyDocument(Document):
    """Order and age of eviction."""

    name: Text = ""
    """lru, lfu, ttl, fifo, sieve, s3fifo or leaf_lru; empty = as the level above says."""
    ttl_seconds: Int64 = 0
    """Blocks leave at this age although there is room; 0 = never."""
    ttl_sliding: bool = False
    """Whether age counts from the last read; from the write otherwise."""


class PrefixClassDocument(Document):
    """A class of blocks: those that fit every condition set here."""

    name: Text
    """Name in metrics and messages, unique in the group."""
    min_depth: Int32 = 0
    """Least depth in the prefix chain, counted from 0."""
    end_depth: Int32 = 0
    """Depth from which on blocks are not of this class; 0 = no limit."""
    min_reads: Int32 = 0
    """Least number of reads since the block was stored."""
    instance_ids: list[Text] = Field(default_factory=list, max_length=MOST_ENTRIES)
    """Instances whose blocks it takes; empty = all of the group."""
    priority: Int32 = 0
    """Blocks of a lower priority leave first; others have 0."""
    policy: EvictionPolicyDocument | None = None
    """Order and age of these blocks."""
    budget: Ratio = 0.0
    """Share of the group's quota, as a ratio: above it the class gives up blocks before any other; 0 = no limit."""


class InstanceOverrideDocument(Document):
    """What one instance does differently from its group."""

    instance_id: Text
    """The instance; it need not be registered yet."""
    policy: EvictionPolicyDocument | None = None
    """Order and age of its blocks."""
    weight: Ratio = 0.0
    """How much of the group's capacity it deserves beside others, which have 1; 0 = 1."""


class ReclaimStrategyDocument(Document):
    """How a group gives space back."""

    storage_unique_name: Text = "any"
    """Has no effect; the original requires it."""
    reclaim_policy: _Policy = "POLICY_UNSPECIFIED"
    """Which blocks leave first; `policy.name` wins where it is set."""
    trigger_strategy: TriggerStrategyDocument = TriggerStrategyDocument(used_percentage=0.8)
    """When reclaiming begins; left out: above 0.8 of any limit."""
    trigger_period_seconds: Int32 = 0
    """Seconds between checks."""
    reclaim_step_size: Int32 = 0
    """Bytes to reclaim in one step."""
    reclaim_step_percentage: Int32 = 0
    """Share of the quota to reclaim in one step, in percent."""
    delay_before_delete_ms: Int32 = 0
    """How long a location stays readable for those who hold it after it vanished from answers."""
    policy: EvictionPolicyDocument | None = None
    """Which blocks leave first, by name, and after what time they leave anyway."""
    share: Text = ""
    """Which instance of the group gives up blocks: `group_lru` (or empty), `proportional` or `fixed`."""
    prefix_classes: list[PrefixClassDocument] = Field(default_factory=list, max_length=MOST_ENTRIES)
    """Blocks that are treated apart; of several rules that fit a block the first one counts."""
    instance_overrides: Annotated[list[InstanceOverrideDocument], Field(max_length=MOST_ENTRIES)] = Field(
        default_factory=list
    )
    """What single instances do differently."""


class MetaStorageDocument(Document):
    """Where metadata is stored: there is one store per deployment, which this has to agree with."""

    storage_type: Text = "local"
    """`local` or `redis`."""
    storage_uri: Text = ""
    """Address of the store; of type `local` it is ignored."""


class MetaCachePolicyDocument(Document):
    """Cache in front of the metadata store."""

    capacity: Int64 = 0
    """Size in MB; 0 = no cache."""
    type: Text = "LRU"
    """Name of the policy."""
    cache_shard_bits: Int32 = 0
    """Binary logarithm of the number of shards."""
    high_pri_pool_ratio: Ratio = 0.0
    """Share of the cache kept for entries of high priority."""


class MetaIndexerDocument(Document):
    """Metadata index of each instance of a group."""

    max_key_count: Int64 = 0
    """Most keys that one instance may have; 0 = not limited."""
    mutex_shard_num: Int64 = 0
    """Number of lock shards: a power of two, at most max_key_count; 0 = the manager's choice."""
    batch_key_size: Int64 = 0
    """Keys handled under one lock."""
    meta_storage_backend_config: MetaStorageDocument = MetaStorageDocument()
    """Where metadata is stored."""
    meta_cache_policy_config: MetaCachePolicyDocument = MetaCachePolicyDocument()
    """Cache in front of it."""


class CacheConfigDocument(Document):
    """How a group caches."""

    reclaim_strategy: ReclaimStrategyDocument = ReclaimStrategyDocument()
    """How space is given back."""
    data_storage_strategy: _Strategy = "CPS_PREFER_3FS"
    """Which storage gets new blocks. ALWAYS fails without that kind, PREFER falls back to the first candidate."""
    meta_indexer_config: MetaIndexerDocument = MetaIndexerDocument()
    """Metadata index."""


class TypeQuotaDocument(Document):
    """Quota of one kind of storage."""

    storage_type: StorageTypeName
    """The kind."""
    capacity: Int64 = 0
    """Bytes allowed on it."""


class GroupQuotaDocument(Document):
    """Quota of a group."""

    capacity: Int64 = 0
    """Bytes allowed in all."""
    quota_config: list[TypeQuotaDocument] = Field(default_factory=list, max_length=MOST_ENTRIES)
    """Limits of single kinds of storage."""


class StorageGuaranteeDocument(Document):
    """A minimum of bytes that a group can always have on a storage that it shares."""

    storage_unique_name: Text
    """The storage."""
    guaranteed_bytes: Int64 = 0
    """Bytes."""


class GroupDocument(Document):
    """Instances that share one quota."""

    name: Text = ""
    """Its name; that of the path where it is left out."""
    storage_candidates: Annotated[list[Name], Field(min_length=1, max_length=MOST_ENTRIES)]
    """Names of the storages that the group may use, in order of preference."""
    global_quota_group_name: Name
    """Name of the quota that the group draws from, together with the others that name it."""
    max_instance_count: Int64 = 0
    """Most instances that the group may have."""
    quota: GroupQuotaDocument | None = None
    """Bytes that the group may use; unset = nothing may be written."""
    cache_config: CacheConfigDocument = CacheConfigDocument()
    """How the group caches."""
    user_data: FreeText = ""
    """Free text."""
    version: Annotated[Int64, Field(json_schema_extra={"readOnly": True})] = 0
    """Grows with every change. The manager counts: what is sent is ignored."""
    storage_guarantees: Annotated[list[StorageGuaranteeDocument], Field(max_length=MOST_ENTRIES)] = Field(
        default_factory=list
    )
    """Bytes on storages that no other group may take."""
    pin_budget_bytes: Int64 = 0
    """Bytes that pins of the group may hold at most; 0 = nothing can be pinned."""
