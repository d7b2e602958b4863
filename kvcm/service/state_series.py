"""What GetMetrics tells of the manager's state, under the original's names (wire.md 10.1) where it has them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from kvcm.cache.manager import CacheManager
from kvcm.model.errors import KvcmError
from kvcm.registry.registry import Registry
from kvcm.service.capacity_series import CapacitySeries
from kvcm.telemetry.metrics import Series

__all__ = ["state_series"]


async def state_series(cache: CacheManager, registry: Registry, capacity: CapacitySeries | None) -> list[Series]:
    """Return gauges and counters of the index, the groups and the instances, of quotas and evictions: as the store has
    them now, or as last heard while it does not answer."""
    with suppress(KvcmError):
        for group in registry.groups.all():
            await cache.usage.hear(group.name)
    of_capacity = await capacity.series() if capacity is not None else []  # hears the indexes, too
    return [
        *_search_cache(cache),
        *_groups(cache, registry),
        *_instances(cache),
        *_mismatches(cache, registry),
        *of_capacity,
    ]


def _search_cache(cache: CacheManager) -> Iterator[Series]:
    budget = cache.budget
    asked = budget.hits + budget.misses
    yield Series("meta_indexer.search_cache_hit_count", (), budget.hits)
    yield Series("meta_indexer.search_cache_miss_count", (), budget.misses)
    yield Series("meta_indexer.search_cache_hit_ratio", (), 100.0 * budget.hits / asked if asked else 0.0)
    yield Series("cache_manager.write_location_expire_size", (), float(cache.endings.open_count))
    yield Series("cache_manager.access_waiting_count", (), float(cache.accesses.waiting_count))
    yield Series("cache_manager.access_dropped_count", (), cache.accesses.dropped)


def _groups(cache: CacheManager, registry: Registry) -> Iterator[Series]:
    for group in registry.groups.all():
        tags = (("instance_group", group.name),)
        used = sum(cache.group_usage_bytes(group.name).values())
        yield Series("cache_manager_group.byte_size", tags, float(used))
        yield Series("cache_manager_group.usage_ratio", tags, used / max(1, group.quota.capacity))


def _mismatches(cache: CacheManager, registry: Registry) -> Iterator[Series]:
    known = {(group.name, storage): 0 for group in registry.groups.all() for storage in group.storage_candidates}
    for (group_name, storage), count in {**known, **cache.missing.mismatches}.items():
        yield Series("kvcm_checksum_mismatch_total", (("group", group_name), ("storage", storage)), count)


def _instances(cache: CacheManager) -> Iterator[Series]:
    keys = 0
    for kept in cache.open_caches.all():
        tags = (
            ("instance_group", kept.instance.instance_group_name),
            ("instance_id", kept.instance.instance_id),
        )
        keys += kept.index.key_count
        yield Series("cache_manager_instance.key_count", tags, float(kept.index.key_count))
        yield Series("cache_manager_instance.byte_size", tags, float(sum(kept.index.usage_bytes.values())))
    yield Series("meta_indexer.total_key_count", (), float(keys))
