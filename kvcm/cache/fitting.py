"""What of an exported group depends on the store that it came from, and how it is stored in another one."""

from __future__ import annotations

from dataclasses import replace

from kvcm.model.groups import InstanceGroup, MetaIndexerConfig, MetaStorageBackendConfig
from kvcm.registry.validation import most_shards

__all__ = ["fitted", "with_store_of"]


def fitted(group: InstanceGroup, store_kind: str) -> tuple[InstanceGroup, list[str]]:
    """Return the group as a store of that kind takes it, and a sentence per change."""
    indexer, changes = group.cache_config.meta_indexer_config, []
    if indexer.meta_storage_backend_config.storage_type == "redis" and store_kind != "redis":
        # With the uri: it leads to the store that the group comes from.
        indexer = replace(indexer, meta_storage_backend_config=MetaStorageBackendConfig())
        changes.append(f"group {group.name!r} names the store 'redis', this one is {store_kind}: stored as 'local'")
    most = most_shards(store_kind)
    if indexer.mutex_shard_num > most:
        changes.append(f"group {group.name!r} has {indexer.mutex_shard_num} lock shards, {store_kind} takes {most}")
        indexer = replace(indexer, mutex_shard_num=most)
    return _with_indexer(group, indexer), changes


def with_store_of(group: InstanceGroup, other: InstanceGroup) -> InstanceGroup:
    """Return the group with what `other` says of the store: there is one per deployment, whatever groups say."""
    backend = other.cache_config.meta_indexer_config.meta_storage_backend_config
    return _with_indexer(group, replace(group.cache_config.meta_indexer_config, meta_storage_backend_config=backend))


def _with_indexer(group: InstanceGroup, indexer: MetaIndexerConfig) -> InstanceGroup:
    return replace(group, cache_config=replace(group.cache_config, meta_indexer_config=indexer))
