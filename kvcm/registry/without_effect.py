"""Values of a configuration that have no effect: accepted since the original has the fields, or since others outweigh
them.

The one list of them: answers of the calls that set them name them in their header, the manager logs them at each start,
`kvcm doctor` reports them. `tests/registry/test_without_effect.py` names the effect of every other field.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvcm.model.groups import EvictionPolicy, InstanceGroup, MetaCachePolicyConfig
from kvcm.model.storages import (
    MooncakeStorageSpec,
    StorageConfig,
    TairMemPoolStorageSpec,
    ThreeFSStorageSpec,
    VcnsThreeFSStorageSpec,
)

__all__ = ["group_values_without_effect", "storage_values_without_effect", "warning_of"]

# Of a field that the original requires: what our own tools send, for want of something to say.
_FILLERS = ("", "any", "unused")
_UNSET_CAPACITIES_MB = (0, 1024, 10_000)
_UNSET_SHARD_BITS = (0, 6)
_MOST_SHOWN = 64


def group_values_without_effect(group: InstanceGroup) -> Iterator[str]:
    """Yield a sentence for each value of a group that has no effect, beginning with the field."""
    strategy, indexer = group.cache_config.reclaim_strategy, group.cache_config.meta_indexer_config
    named = strategy.storage_unique_name
    if named not in _FILLERS and group.storage_candidates != (named,):
        yield (
            f"cache_config.reclaim_strategy.storage_unique_name {_shown(named)} has no effect: the blocks of all "
            "storages of the group are evicted; to evict one of them give it a capacity and a watermark"
        )
    yield from _of_read_cache(indexer.meta_cache_policy_config)
    if indexer.meta_storage_backend_config.storage_uri:
        yield (
            "cache_config.meta_indexer_config.meta_storage_backend_config.storage_uri has no effect: a deployment has "
            "one metadata store, kvcm.registry_storage.uri"
        )
    if indexer.persist_metadata_interval_time_ms is not None:
        yield (
            f"cache_config.meta_indexer_config.persist_metadata_interval_time_ms "
            f"{indexer.persist_metadata_interval_time_ms} has no effect: every change is stored when it is made"
        )
    if group.revisit_interval_buckets:
        yield (
            f"revisit_interval_buckets {_shown(group.revisit_interval_buckets)} has no effect: no histogram has times "
            "between reads"
        )
    path = "cache_config.reclaim_strategy"
    yield from _of_policy(f"{path}.policy", strategy.policy, group.policy_of(""))
    for override in strategy.instance_overrides:
        where = f"{path}.instance_overrides[{_shown(override.instance_id)}].policy"
        yield from _of_policy(where, override.policy, group.policy_of(override.instance_id))
    for each in strategy.prefix_classes:
        where = f"{path}.prefix_classes[{_shown(each.name)}].policy"
        yield from _of_policy(where, each.policy, each.policy.with_defaults(group.policy_of("")))


def _of_read_cache(config: MetaCachePolicyConfig) -> Iterator[str]:
    odd = {
        "capacity": config.capacity if config.capacity not in _UNSET_CAPACITIES_MB else None,
        "type": config.type if config.type.lower() not in ("", "lru") else None,
        "cache_shard_bits": config.cache_shard_bits if config.cache_shard_bits not in _UNSET_SHARD_BITS else None,
        "high_pri_pool_ratio": config.high_pri_pool_ratio or None,
    }
    for field, value in odd.items():
        if value is not None:
            yield (
                f"cache_config.meta_indexer_config.meta_cache_policy_config.{field} {_shown(value)} has no effect: all "
                "groups share one search cache, kvcm.store.search_cache_bytes"
            )


def _of_policy(path: str, policy: EvictionPolicy, in_force: EvictionPolicy) -> Iterator[str]:
    if policy.ttl_sliding and not policy.ttl_seconds:
        yield f"{path}.ttl_sliding has no effect without ttl_seconds"
    elif policy.ttl_sliding and in_force.name == "fifo":
        yield f"{path}.ttl_sliding has no effect with policy 'fifo', whose age counts from the write"


def storage_values_without_effect(config: StorageConfig) -> Iterator[str]:
    """Yield a sentence for each value of a storage that has no effect, beginning with the field."""
    spec = config.spec
    if isinstance(spec, VcnsThreeFSStorageSpec):
        yield (
            "vcnsthreefs.remote_host, remote_port and meta_storage_uri have no effect: files are read and written "
            "below the mount point, and the metadata service is not asked"
        )
    if isinstance(spec, TairMemPoolStorageSpec):
        for field in ("timeout", "enable_vipserver", "service_discovery_url", "media_type"):
            if value := getattr(spec, field):
                yield (
                    f"tair_mem_pool.{field} {_shown(value)} has no effect: pools are reached over the node's shared "
                    "memory"
                )
    if isinstance(spec, MooncakeStorageSpec) and spec.rdma_device and spec.protocol != "rdma":
        yield f"mooncake.rdma_device {_shown(spec.rdma_device)} has no effect with protocol {_shown(spec.protocol)}"
    if config.check_storage_available_when_open and not isinstance(spec, (ThreeFSStorageSpec, VcnsThreeFSStorageSpec)):
        yield "check_storage_available_when_open has no effect on this type: only directories of 3FS are checked"
    if config.used_percentage and not config.capacity_bytes:
        yield f"used_percentage {config.used_percentage:g} has no effect without capacity_bytes"


def warning_of(sentences: Iterable[str]) -> str:
    """Return the remark on a success, "" where there is none to make."""
    return "; ".join(f"warning: {sentence}" for sentence in sentences)


def _shown(value: object) -> str:
    """Return a value as a text of bounded length."""
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
