"""Series of GetMetrics: capacity, health of storages, state of the manager; under the original's names where it has
them (wire.md 10.1), else under ours.

Every series exists from the start, with 0 where its labels are known. `type` is a kind of storage, or `total`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress

from kvcm.cache.manager import CacheManager
from kvcm.cache.write_sessions import Creations
from kvcm.model.errors import KvcmError
from kvcm.reclaim.deletion_executor import DeletionExecutor
from kvcm.reclaim.garbage import GarbageCollector
from kvcm.reclaim.needs import Reason
from kvcm.reclaim.reclaimer import Reclaimer
from kvcm.reclaim.scrub import StorageScrubber
from kvcm.registry.registry import Registry
from kvcm.service.usage_report import UsageView
from kvcm.service.usage_values import GroupUsage, StorageUsage, Usage, UsageReport
from kvcm.storage.directory import StorageDirectory
from kvcm.storage.health import HealthState, StorageHealth
from kvcm.telemetry.metrics import Series

__all__ = ["CapacitySeries", "state_series"]

_GAUGE_OF_HEALTH = {HealthState.SH_UP: 1.0, HealthState.SH_DEGRADED: 0.5, HealthState.SH_DOWN: 0.0}
_NO_CREATIONS = Creations()
_NOT_OPEN = StorageHealth(HealthState.SH_DOWN)


class CapacitySeries:
    """Gauges and counters of quotas, eviction, deletion and health.

    Args:
        view: of the usage.
        registry: which groups and storages there are.
        reclaimer: counts what it evicts.
        deletions: counts what it deletes.
        garbage: counts what it finds.
        scrubber: counts what it finds.
        storages: the open storages, where their health is known.
    """

    def __init__(
        self,
        view: UsageView,
        registry: Registry,
        reclaimer: Reclaimer,
        deletions: DeletionExecutor,
        garbage: GarbageCollector,
        scrubber: StorageScrubber,
        storages: StorageDirectory | None = None,
    ) -> None:
        self._view = view
        self._registry = registry
        self._reclaimer = reclaimer
        self._deletions = deletions
        self._garbage = garbage
        self._scrubber = scrubber
        self._storages = storages

    async def series(self, deleting_blocks: Callable[[], int] = lambda: 0) -> list[Series]:
        """Return all of them as they are now. Every index reads its usage from the store for that.

        Args:
            deleting_blocks: counts those that are marked, in all indexes, once these were read.
        """
        report = await self._view.refreshed_or_last()
        return [
            *self._of_groups(report),
            *self._of_storages(report),
            *self._of_health(),
            *self._of_evictions(),
            *self._of_deletions(deleting_blocks()),
            *self._of_orphans(),
        ]

    def _of_groups(self, report: UsageReport) -> Iterator[Series]:
        for group in report.groups:
            tags = (("group", group.name),)
            for kind, usage in self._by_type(group).items():
                yield Series("kvcm_group_used_bytes", (*tags, ("type", kind)), float(usage.used_bytes))
                if usage.capacity_bytes >= 0:
                    yield Series("kvcm_group_quota_bytes", (*tags, ("type", kind)), float(usage.capacity_bytes))
            yield Series("kvcm_pinned_bytes", tags, float(group.pinned_bytes))
            yield Series("kvcm_writes_refused_total", tags, group.refused_writes)

    def _by_type(self, group: GroupUsage) -> dict[str, Usage]:
        names = [storage.storage_unique_name for storage in group.storages]
        may_use = {config.storage_type.kind: Usage(0, 0) for config in self._registry.storages.existing(names)}
        return {"total": group.total, **may_use, **{each.storage_type.kind: each.usage for each in group.types}}

    def _of_storages(self, report: UsageReport) -> Iterator[Series]:
        kinds = {config.global_unique_name: config.storage_type.kind for config in self._registry.storages.all()}
        for storage in report.storages:
            name = storage.storage_unique_name
            yield Series("kvcm_reclaim_pending_deletes", (("storage", name),), float(storage.deletion_backlog))
            yield Series("kvcm_delete_failures_total", (("storage", name),), storage.deletion_failures)
            if name in kinds:
                tags = (("type", kinds[name]), ("unique_name", name))
                yield Series("data_storage.storage_usage_ratio", tags, _ratio(storage))

    def _of_health(self) -> Iterator[Series]:
        if self._storages is None:
            return
        for config in self._registry.storages.all():
            if config.is_event_report:  # it has no medium that is probed
                continue
            name = config.global_unique_name
            health = self._storages.health(name) or _NOT_OPEN
            tags = (("storage", name), ("type", config.storage_type.kind))
            is_healthy = health.state is not HealthState.SH_DOWN
            own = (("type", config.storage_type.kind), ("unique_name", name))
            yield Series("data_storage.healthy_status", own, float(is_healthy))
            yield Series("kvcm_storage_draining", tags, float(config.is_draining))
            yield Series("kvcm_storage_full", tags, float(health.is_full))
            yield Series("kvcm_storage_health", tags, _GAUGE_OF_HEALTH[health.state])
            yield Series("kvcm_storage_probe_seconds", tags, health.probe_seconds)
            yield Series("kvcm_storage_probe_failures_total", tags, health.failed_probes)

    def _of_evictions(self) -> Iterator[Series]:
        stats = self._reclaimer.stats
        known = {
            (group.name, group.policy_of("").name, reason.value): 0
            for group in self._registry.groups.all()
            for reason in Reason
        }
        for name, counts in (
            ("kvcm_evicted_keys_total", stats.evicted_keys),
            ("kvcm_evicted_bytes_total", stats.evicted_bytes),
        ):
            for (group, policy, reason), count in {**known, **counts}.items():
                yield Series(name, (("group", group), ("policy", policy), ("reason", reason)), count)
        for mark in Reason:  # bytes; blocks for reason keys
            yield Series("kvcm_reclaim_unmet_need", (("reason", mark.value),), float(stats.unmet[mark.value]))
        yield Series("cache_reclaimer.block_submit_count", (), stats.submitted_blocks)
        yield Series("cache_reclaimer.location_submit_count", (), stats.submitted_locations)

    def _of_deletions(self, deleting_blocks: int) -> Iterator[Series]:
        backlogs = self._deletions.backlogs().values()
        executing = sum(each.executing for each in backlogs)
        # A deletion waits from its mark on, as in the original: for its delay, then for its turn.
        waiting = max(sum(each.waiting for each in backlogs), deleting_blocks - executing)
        yield Series("cache_reclaimer.block_del_count", (), self._deletions.deleted.blocks)
        yield Series("cache_reclaimer.location_del_count", (), self._deletions.deleted.locations)
        yield Series("schedule_plan_executor.waiting_task_count", (), waiting)
        yield Series("schedule_plan_executor.executing_task_count", (), executing)

    def _of_orphans(self) -> Iterator[Series]:
        for kind, count in sorted({**self._garbage.found, **self._scrubber.found}.items()):
            yield Series("kvcm_orphans_total", (("kind", kind),), count)


def _ratio(storage: StorageUsage) -> float:
    usage = storage.usage
    return usage.used_bytes / usage.capacity_bytes if usage.capacity_bytes > 0 else 0.0


# The state of the manager.


async def state_series(cache: CacheManager, registry: Registry, capacity: CapacitySeries | None) -> list[Series]:
    """Return gauges and counters of the index, the groups and the instances, of quotas and evictions: as the store has
    them now, or as last read while it does not answer."""
    with suppress(KvcmError):
        for group in registry.groups.all():
            await cache.usage.refresh_group(group.name)

    def deleting_blocks() -> int:
        return sum(kept.index.deleting_keys for kept in cache.open_caches.all())

    of_capacity = await capacity.series(deleting_blocks) if capacity is not None else []  # refreshes the indexes, too
    return [
        *_search_cache(cache),
        *_groups(cache, registry),
        *_instances(cache),
        *_mismatches(cache, registry),
        *_creations(cache, registry),
        *of_capacity,
    ]


def _search_cache(cache: CacheManager) -> Iterator[Series]:
    budget = cache.budget
    asked = budget.hits + budget.misses
    yield Series("meta_indexer.search_cache_hit_count", (), budget.hits)
    yield Series("meta_indexer.search_cache_miss_count", (), budget.misses)
    yield Series("meta_indexer.search_cache_hit_ratio", (), 100.0 * budget.hits / asked if asked else 0.0)
    yield Series("meta_indexer.total_cache_usage", (), float(budget.used_bytes))
    yield Series("cache_manager.write_location_expire_size", (), float(cache.endings.open_count))
    yield Series("cache_manager.access_waiting_count", (), float(cache.accesses.pending_count))
    yield Series("cache_manager.access_dropped_count", (), cache.accesses.dropped)


def _creations(cache: CacheManager, registry: Registry) -> Iterator[Series]:
    """Yield the addresses that storages handed out; the tag is named like the kind, as the original has it."""
    for config in registry.storages.all():
        made = cache.creations.get(config.global_unique_name, _NO_CREATIONS)
        tags = ((config.storage_type.kind, config.global_unique_name),)
        yield Series("data_storage.create_counter", tags, made.calls)
        yield Series("data_storage.create_keys_counter", tags, made.addresses)
        yield Series("data_storage.create_keys_qps", tags, made.per_second)
        yield Series("data_storage.create_time_us", tags, made.last_us)


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
    """Yield the keys and bytes of instances: of one that is registered again, with those that its removal has left."""
    keys: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    for kept in cache.open_caches.all():
        place = kept.instance.instance_group_name, kept.instance.instance_id
        keys[place] += kept.index.key_count
        sizes[place] += sum(kept.index.usage_bytes.values())
    for group, instance in keys:
        tags = ("instance_group", group), ("instance_id", instance)
        yield Series("cache_manager_instance.key_count", tags, float(keys[group, instance]))
        yield Series("cache_manager_instance.byte_size", tags, float(sizes[group, instance]))
    yield Series("meta_indexer.total_key_count", (), float(keys.total()))
