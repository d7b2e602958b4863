"""The state of the manager at the moment of a scrape: usage, limits, deletions, storages, leadership.

What managers share is heard from the store in the background, one hearing at a time. A scrape waits for it a moment and
then tells what was heard last, so that it is answered while the store is away. Sums over instances are made in slices.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

import structlog

from kvcm.cache.manager import CacheManager
from kvcm.model.errors import KvcmError
from kvcm.model.groups import InstanceGroup
from kvcm.model.locations import Place
from kvcm.model.storages import StorageConfig
from kvcm.reclaim.executor import DeletionExecutor
from kvcm.reclaim.garbage import GarbageCollector
from kvcm.reclaim.needs import Reason
from kvcm.reclaim.reclaimer import Reclaimer
from kvcm.reclaim.scrub import StorageScrubber
from kvcm.reclaim.workers import Backlog
from kvcm.registry.leadership import Leadership
from kvcm.registry.registry import Registry
from kvcm.service.capacity_view import CapacityView
from kvcm.storage.directory import StorageDirectory
from kvcm.storage.prober import Prober
from kvcm.telemetry import metrics_catalog as catalog
from kvcm.telemetry.metrics_catalog import Metric
from kvcm.telemetry.metrics_values import OTHER, BoundedNames, Histogram, Reading

__all__ = ["ManagerState", "StateMetrics"]

_HEAR_SECONDS: Final = 1.0  # scrapers give up after ten
_SLICE_INSTANCES: Final = 50
_TOTAL: Final = "total"
_PINS: Final = "pin"
_MODIFY: Final = "modify"  # nothing else takes locks

_log = structlog.get_logger("kvcm.service")


@dataclass(frozen=True, slots=True)
class ManagerState:
    """What is looked at."""

    cache: CacheManager
    registry: Registry
    view: CapacityView
    reclaimer: Reclaimer
    deletions: DeletionExecutor
    garbage: GarbageCollector
    scrubber: StorageScrubber
    storages: StorageDirectory
    prober: Prober
    leadership: Leadership
    store_kind: str
    store_times: Mapping[str, Histogram]


@dataclass(slots=True)
class _Sums:
    """Over all instances, by group."""

    keys: Counter[str] = field(default_factory=Counter)
    used: defaultdict[str, Counter[Place]] = field(default_factory=lambda: defaultdict(Counter))


class StateMetrics:
    """Reads the state for scrapes.

    Args:
        state: of what.
        groups: bounds the names of groups that become labels.
    """

    def __init__(self, state: ManagerState, groups: BoundedNames) -> None:
        self._state = state
        self._names = groups
        self._sums = _Sums()
        self._hearing: asyncio.Task[None] | None = None

    async def look(self) -> None:
        """Hear from the store, for a moment at most, and sum up what the instances use."""
        if self._hearing is None or self._hearing.done():
            self._hearing = asyncio.create_task(self._hear())
        await asyncio.wait([self._hearing], timeout=_HEAR_SECONDS)
        sums = _Sums()
        for number, custody in enumerate(list(self._state.cache.indexes())):
            if number % _SLICE_INSTANCES == 0:
                await asyncio.sleep(0)
            group_name, index = custody.instance.instance_group_name, custody.meta_index
            sums.keys[group_name] += index.key_count
            sums.used[group_name].update(index.usage_bytes)
        self._sums = sums

    async def _hear(self) -> None:
        try:
            await self._state.view.hear()
        except KvcmError as error:
            _log.info("usage_not_heard", reason=str(error))

    def readings(self) -> Iterator[Reading]:
        """Yield the state as of the last look."""
        yield from self._bounded(self._of_groups())
        yield from self._bounded(self._of_evictions())
        yield from self._bounded(self._of_mismatches())
        yield from self._of_index()
        yield from self._of_storages()
        yield from self._of_leadership()
        for kind, count in sorted({**self._state.garbage.found, **self._state.scrubber.found}.items()):
            yield Reading(catalog.ORPHANS, count, (kind,))

    def _bounded(self, readings: Iterable[tuple[Metric, float, tuple[str, ...]]]) -> Iterator[Reading]:
        """Bound the first label, which is a group; what is beyond the bound is summed up."""
        sums: dict[tuple[Metric, tuple[str, ...]], float] = {}
        for metric, value, (group_name, *others) in readings:
            labels = (self._names.of(group_name), *others)
            if labels[0] != OTHER:
                yield Reading(metric, value, labels)
            else:
                sums[metric, labels] = sums.get((metric, labels), 0) + value
        for (metric, labels), value in sums.items():
            yield Reading(metric, value, labels)

    def _of_groups(self) -> Iterator[tuple[Metric, float, tuple[str, ...]]]:
        configured = {group.name: group for group in self._state.registry.groups.all()}
        pinned, refused = self._state.view.pinned, self._state.cache.usage.refusals
        for name in sorted(configured.keys() | self._sums.keys.keys()):
            group, used = configured.get(name), self._sums.used.get(name, Counter())
            yield catalog.INDEX_KEYS, self._sums.keys[name], (name,)
            for tier, size in self._by_tier(group, used).items():
                yield catalog.GROUP_USED, size, (name, tier)
            for tier, size in _quotas(group).items():
                yield catalog.GROUP_QUOTA, size, (name, tier)
            yield catalog.PINNED, pinned.get(name, 0), (name, _PINS)
            yield catalog.WRITES_REFUSED, refused.get(name, 0), (name,)

    def _by_tier(self, group: InstanceGroup | None, used: Mapping[Place, int]) -> dict[str, int]:
        """Return what a group uses by kind of storage, also of kinds that it may use and does not yet."""
        candidates = self._state.registry.storages.existing(group.storage_candidates) if group is not None else ()
        sizes: Counter[str] = Counter({config.storage_type.kind: 0 for config in candidates})
        for place, size in used.items():
            sizes[place.storage_type.kind] += size
        return {_TOTAL: sum(used.values()), **sizes}

    def _of_evictions(self) -> Iterator[tuple[Metric, float, tuple[str, ...]]]:
        stats, policies = self._state.reclaimer.stats, {}
        for group in self._state.registry.groups.all():
            policy = policies[group.name] = group.policy_of("").name
            for reason in Reason:
                labels = (group.name, policy, reason.value)
                yield catalog.EVICTED_KEYS, stats.evicted_keys[labels], labels
                yield catalog.EVICTED_BYTES, stats.evicted_bytes[labels], labels
        for labels in list(stats.evicted_keys):
            if policies.get(labels[0]) != labels[1]:  # of another policy, or a group that is gone
                yield catalog.EVICTED_KEYS, stats.evicted_keys[labels], labels
                yield catalog.EVICTED_BYTES, stats.evicted_bytes[labels], labels

    def _of_mismatches(self) -> Iterator[tuple[Metric, float, tuple[str, ...]]]:
        groups = self._state.registry.groups.all()
        known = {(group.name, storage): 0 for group in groups for storage in group.storage_candidates}
        for labels, count in {**known, **self._state.cache.missing.mismatches}.items():
            yield catalog.CHECKSUM_MISMATCH, count, labels

    def _of_index(self) -> Iterator[Reading]:
        cache = self._state.cache
        yield Reading(catalog.INDEX_BYTES, sum(sum(used.values()) for used in self._sums.used.values()))
        yield Reading(catalog.WRITE_SESSIONS_OPEN, cache.endings.open_count)
        yield Reading(catalog.INDEX_LOCK_WAIT, cache.open_caches.lock_waits.read(), (_MODIFY,))
        for op, times in self._state.store_times.items():
            yield Reading(catalog.STORE_OP, times.read(), (self._state.store_kind, op))
        yield Reading(catalog.STORE_BACKLOG, cache.accesses.waiting_count)
        yield Reading(catalog.STORE_DROPPED, cache.accesses.dropped)
        yield Reading(catalog.EVICTION_AGE, self._state.reclaimer.stats.ages.read())
        yield Reading(catalog.RECLAIM_ROUND, self._state.reclaimer.stats.rounds.read())
        for reason in Reason:
            yield Reading(catalog.RECLAIM_UNMET, self._state.reclaimer.stats.unmet[reason.value], (reason.value,))

    def _of_storages(self) -> Iterator[Reading]:
        used: Counter[str] = Counter()
        for places in self._sums.used.values():
            for place, size in places.items():
                used[place.storage] += size
        backlogs = self._state.deletions.backlogs()
        configured = {config.global_unique_name: config for config in self._state.registry.storages.all()}
        for name in sorted(configured.keys() | used.keys()):
            backlog = backlogs.get(name, Backlog())
            yield Reading(catalog.BACKEND_USED, used[name], (name,))
            yield Reading(catalog.RECLAIM_PENDING, backlog.waiting + backlog.executing, (name,))
            yield Reading(catalog.DELETE_FAILURES, backlog.failures, (name,))
            if name in configured:
                yield from self._of_storage(name, configured[name])

    def _of_storage(self, name: str, config: StorageConfig) -> Iterator[Reading]:
        health = self._state.storages.health(name)
        yield Reading(catalog.BACKEND_UP, health is not None and health.is_usable, (name,))
        yield Reading(catalog.BACKEND_PROBE, self._state.prober.durations(name), (name,))
        space = health.space if health is not None else None
        if capacity := config.limit_bytes or (space.capacity_bytes if space is not None else 0):
            yield Reading(catalog.BACKEND_CAPACITY, capacity, (name,))

    def _of_leadership(self) -> Iterator[Reading]:
        leadership = self._state.leadership
        yield Reading(catalog.LEADER, leadership.is_leader)
        yield Reading(catalog.LEADER_TRANSITIONS, leadership.terms)
        yield Reading(catalog.LEASE_REMAINING, leadership.remaining_seconds)


def _quotas(group: InstanceGroup | None) -> dict[str, int]:
    """Return the limits of a group; one that was removed may use nothing."""
    if group is None:
        return {_TOTAL: 0}
    kinds = {quota.storage_type.kind: quota.capacity for quota in group.quota.quota_config}
    return {_TOTAL: group.quota.capacity, **kinds}
