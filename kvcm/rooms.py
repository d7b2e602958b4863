"""The rooms of a running manager, and what they do in the background.

Duties of the leader: ending what is overdue, deletions, removals of instances, recounts of usage. Every manager follows
the registry and the invalidations of its search caches, probes its storages, and writes down what was read.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial

from kvcm.cache.drains import StorageDrains
from kvcm.cache.garbage_custody import GarbageCustody
from kvcm.cache.manager import CacheManager
from kvcm.cache.pool_purges import PoolPurges
from kvcm.cache.recount import UsageRecount
from kvcm.cache.removal import Remover
from kvcm.cache.shared_usage import SharedLedger
from kvcm.config import Settings
from kvcm.index.backends.redis_keys import BlockKeys
from kvcm.index.change_events import ChangeEvents
from kvcm.index.search_cache import CacheBudget
from kvcm.metadata import Metadata
from kvcm.model.clock import Clock
from kvcm.model.errors import KvcmError, UnknownInstanceError
from kvcm.reclaim.evicted import Evicted
from kvcm.reclaim.executor import DeletionExecutor
from kvcm.reclaim.garbage import GarbageCollector
from kvcm.reclaim.needs import Limits
from kvcm.reclaim.pool_leaks import PoolLeaks
from kvcm.reclaim.pressure import Pressure
from kvcm.reclaim.reclaimer import Reclaimer
from kvcm.reclaim.scrub import StorageScrubber
from kvcm.reclaim.turns import Turns
from kvcm.reclaim.wakes import SharedWakes
from kvcm.registry.audit_trail import AuditTrail
from kvcm.registry.leadership import Leadership
from kvcm.registry.registry import Registry
from kvcm.service.alerts.watch import AlertSources, AlertWatch
from kvcm.service.calls import Plane
from kvcm.service.capacity_view import CapacityView
from kvcm.service.drain_view import DrainView
from kvcm.service.node import refuse_unless_leading
from kvcm.service.prometheus_counts import Counts
from kvcm.service.prometheus_evictions import EvictionMetrics
from kvcm.storage.directory import StorageDirectory
from kvcm.storage.prober import Prober
from kvcm.store.redis.tracking import Invalidations
from kvcm.telemetry.audit_log import AuditLog
from kvcm.telemetry.events import EventLog

__all__ = ["Duty", "Rooms"]

Duty = tuple[str, Callable[[], Awaitable[None]]]
"""Name and endless coroutine."""

_ACCESSES_SECONDS = 1.0  # what a crash may lose
_KEYS_SECONDS = 60.0
_REGISTRY_SECONDS = 0.25  # other managers' changes are in force within a second
_SHARED_DUTY_SECONDS = 0.5  # a round asks every shard of every instance
_RECOUNT_SECONDS = 1.0
_POOLS_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Sharing:
    """What there is to do because other managers work on the same store.

    Attributes:
        invalidations: hears of their changes.
        ledger: tells them of ours.
        recount: puts right what managers that died did not tell.
        wakes: wakes the reclaimer of whoever leads.
    """

    invalidations: Invalidations
    ledger: SharedLedger
    recount: UsageRecount
    wakes: SharedWakes

    @classmethod
    def of(
        cls, metadata: Metadata, registry: Registry, cache: CacheManager, wakes: SharedWakes, clock: Clock
    ) -> Sharing | None:
        """Return what a shared store needs, None for a store of this manager alone."""
        if metadata.client is None or not isinstance(metadata.usage, SharedLedger):
            return None
        keys, caches = BlockKeys(metadata.client.prefix), cache.open_caches
        invalidations = Invalidations(
            metadata.client,
            keys.prefix,
            lambda names: caches.invalidate(filter(None, map(keys.parse, names))),
            caches.invalidate_all,
        )
        return cls(invalidations, metadata.usage, UsageRecount(registry, caches, metadata.usage, clock), wakes)


@dataclass(frozen=True, slots=True)
class _Ground:
    """What rooms are built on, and how each one is built. Attributes are those of `Rooms`, and the time source."""

    metadata: Metadata
    registry: Registry
    storages: StorageDirectory
    leadership: Leadership
    clock: Clock
    settings: Settings

    def cache(self, budget: CacheBudget, events: EventLog, on_pressure: Callable[[str], None]) -> CacheManager:
        """Build the cache, whose writes tell when they leave their group above a mark."""
        cache: CacheManager  # is what its writes are compared with
        pressure = Pressure(
            self.registry, lambda: cache.usage, lambda group_name: cache.open_caches.key_counts(group_name)
        )
        cache = CacheManager(
            self.registry,
            self.storages,
            self.clock,
            new_backend=self.metadata.new_backend,
            store=self.metadata.store,
            usage=self.metadata.usage,
            budget=budget,
            events=events,
            crossed=pressure.is_above_a_mark,
            on_pressure=on_pressure,
        )
        return cache

    def deletions(self, cache: CacheManager, events: EventLog, turns: Turns) -> DeletionExecutor:
        """Build what deletes the bytes and the metadata of the cache's blocks."""
        workers, is_configured = self.settings.deletion_workers, self.registry.storages.is_configured
        deletions = DeletionExecutor(self.storages, self.clock, workers, events, is_configured, turns)
        deletions.serve(cache)
        return deletions

    def reclaimer(self, cache: CacheManager, on_evicted: Callable[[Evicted], None], turns: Turns) -> Reclaimer:
        """Build what keeps usage below the marks."""
        find_group, limits = self.registry.groups.find, partial(_limits, self.registry)
        return Reclaimer(cache.indexes, find_group, limits, self.clock, on_evicted, turns=turns)

    def wakes(self, reclaimer: Reclaimer) -> SharedWakes:
        """Build what wakes the reclaimer of whoever leads: the only one there is, over a store of its own."""
        store, leadership = self.metadata.store, self.leadership
        return SharedWakes(store.table("wakes"), reclaimer.wake, lambda: leadership.is_leader or not store.is_shared)

    def let_slots_be_reused(self) -> None:
        """Say from when on, and in whose term, slots of packed files are handed out again."""
        reuse, leadership = self.storages.slot_reuse, self.leadership
        reuse.grace_seconds = self.settings.slot_reuse_grace_ms / 1000
        reuse.now = self.clock.now
        reuse.term = lambda: leadership.token if leadership.is_leader else None

    def garbage(self, custody: GarbageCustody, told: ChangeEvents) -> GarbageCollector:
        """Build what looks for blocks that nobody can read."""
        rate = self.settings.garbage_blocks_per_second
        return GarbageCollector(custody, self.storages, self.clock, blocks_per_second=rate, on_marked=told.removed)

    def scrubber(self, custody: GarbageCustody) -> StorageScrubber:
        """Build what looks for bytes that no metadata knows."""
        return StorageScrubber(custody, self.storages, self.clock, self.storages.cluster_id)

    def drains(self, cache: CacheManager, remover: Remover, turns: Turns) -> StorageDrains:
        """Build what empties storages, and forgets what lay on removed ones."""
        return StorageDrains(
            self.registry,
            cache.open_caches,
            remover,
            self.clock,
            is_shared=self.metadata.store.is_shared,
            forget_medium=self.storages.forget,
            give_way=turns.give_way,
        )

    def purges(self, cache: CacheManager, remover: Remover, turns: Turns) -> PoolPurges:
        """Build what forgets what lay in memory of pools that is gone."""
        return PoolPurges(self.storages.pools, cache.open_caches, remover, self.clock, turns.give_way)

    def leaks(self, cache: CacheManager, scrubber: StorageScrubber) -> PoolLeaks:
        """Build what frees memory of pools that nobody owns."""
        return PoolLeaks(
            self.storages.pools, lambda name: sum(cache.usage.held_on(name).values()), scrubber, self.clock
        )

    def prober(self) -> Prober:
        """Build what looks after the health of storages."""
        interval_ms, timeout_ms = self.settings.probe_interval_ms, self.settings.probe_timeout_ms
        return Prober(self.storages, self.clock, interval_ms / 1000, timeout_ms / 1000)


@dataclass(frozen=True, slots=True)
class Rooms:
    """What `app` wires.

    Attributes:
        settings: intervals.
        metadata: the store.
        registry: what is configured.
        storages: the open storages.
        leadership: who leads.
        events: what happens to blocks, for whoever listens.
        cache: blocks.
        reclaimer: keeps usage below the marks.
        deletions: deletes bytes and metadata.
        garbage: looks for blocks that nobody can read.
        scrubber: looks for bytes that no metadata knows.
        drains: empties storages, and forgets what lay on removed ones.
        purges: forgets what lay in memory of pools that is gone.
        leaks: frees memory of pools that nobody owns.
        prober: looks after the health of storages.
        sharing: what there is to do while other managers work on the store; None while there are none.
        counts: what is counted all the time.
        audit: makes entries of the audit log.
        audit_log: what was changed, and by whom.
        clock: time source.
        view: what is used.
        alerts: tells what is wrong.
    """

    settings: Settings
    metadata: Metadata
    registry: Registry
    storages: StorageDirectory
    leadership: Leadership
    events: EventLog
    cache: CacheManager
    reclaimer: Reclaimer
    deletions: DeletionExecutor
    garbage: GarbageCollector
    scrubber: StorageScrubber
    drains: StorageDrains
    purges: PoolPurges
    leaks: PoolLeaks
    prober: Prober
    sharing: Sharing | None
    counts: Counts
    audit: AuditTrail
    audit_log: AuditLog
    clock: Clock
    view: CapacityView
    alerts: AlertWatch

    @classmethod
    def build(
        cls,
        metadata: Metadata,
        registry: Registry,
        storages: StorageDirectory,
        leadership: Leadership,
        clock: Clock,
        settings: Settings,
        audit: AuditTrail,
        audit_log: AuditLog,
    ) -> Rooms:
        """Build the rooms over an opened store and a loaded registry."""
        ground = _Ground(metadata, registry, storages, leadership, clock, settings)
        events = EventLog(settings.event_log_file, settings.event_max_bytes, clock.now)
        told = ChangeEvents(events)
        budget = CacheBudget(settings.search_cache_bytes)
        turns = Turns()  # eviction and deletion take theirs by turns, with room for requests between them
        wakes: SharedWakes  # of the reclaimer, which is built over the cache that wakes it
        cache = ground.cache(budget, events, lambda group_name: wakes.press(group_name))
        deletions = ground.deletions(cache, events, turns)
        counts = Counts()
        on_evicted = partial(_tell_evicted, told, counts.evictions, deletions.wake)
        reclaimer = ground.reclaimer(cache, on_evicted, turns)
        wakes = ground.wakes(reclaimer)
        sharing = Sharing.of(metadata, registry, cache, wakes, clock)
        if sharing is not None:
            budget.is_coherent = lambda: sharing.invalidations.is_live and settings.search_cache_bytes > 0
        ground.let_slots_be_reused()
        custody, remover = GarbageCustody(cache, registry, metadata.store), Remover(clock, registry.groups.find, events)
        garbage, scrubber = ground.garbage(custody, told), ground.scrubber(custody)
        drains, purges = ground.drains(cache, remover, turns), ground.purges(cache, remover, turns)
        leaks, prober = ground.leaks(cache, scrubber), ground.prober()
        view = CapacityView(cache, registry, deletions)
        drain_view = DrainView(drains, storages, deletions, leadership)
        lag, rooms = counts.lag.standing_seconds, (cache, registry, view, storages, deletions, drain_view, leadership)
        return cls(
            *(settings, metadata, registry, storages, leadership, events),
            *(cache, reclaimer, deletions, garbage, scrubber, drains),
            *(purges, leaks, prober, sharing),
            *(counts, audit, audit_log),
            *(clock, view, AlertWatch(AlertSources(*rooms, lag, metadata.store.is_shared), clock.now)),
        )

    def duties(self) -> list[Duty]:
        """Return what has to run while the manager serves."""
        tick_seconds = self.settings.loop_interval_ms / 1000
        duty_seconds = _SHARED_DUTY_SECONDS if self.metadata.store.is_shared else tick_seconds
        duties: list[Duty] = [
            ("election", partial(_every, tick_seconds, self.leadership.tick)),
            (
                "registry",
                partial(_every, _REGISTRY_SECONDS, self._refresh),
            ),  # and storages that did not open yet
            ("accesses", partial(_every, _ACCESSES_SECONDS, self.cache.accesses.drain)),
            ("expiry", partial(_every, duty_seconds, self._leading(self.cache.expire))),
            ("removals", partial(_every, duty_seconds, self._leading(self.cache.purge_removed))),
            ("pools", partial(_every, _POOLS_SECONDS, self._leading(self._purge_pools))),
            ("leaks", partial(_every, _POOLS_SECONDS, self._leading(self.leaks.look))),  # reads everything at times
            ("drains", partial(_every, duty_seconds, self._leading(self._drain))),
            ("reclaim", partial(self.reclaimer.run, lambda: self.leadership.is_leader)),
            ("deletions", partial(self.deletions.run, duty_seconds, lambda: self.leadership.is_leader)),
            ("garbage", partial(self.garbage.run, lambda: self.leadership.is_leader)),
            ("events", self.events.run),
            ("loop_lag", self.counts.lag.run),
            ("alerts", self.alerts.run),
            ("audit", self.audit_log.run),
            ("keys", partial(_every, _KEYS_SECONDS, self.registry.keys.tidy)),
        ]
        if self.settings.probe_interval_ms:
            duties.append(("probes", self.prober.run))
        if self.sharing is not None:
            duties += [
                ("invalidations", self.sharing.invalidations.run),
                ("usage", self.sharing.ledger.run),
                ("wakes", self.sharing.wakes.run),
                ("recount", partial(_every, _RECOUNT_SECONDS, self._leading(self.sharing.recount.look))),
            ]
        return duties

    def _leading(self, duty: Callable[[], Awaitable[None]]) -> Callable[[], Awaitable[None]]:
        async def run() -> None:
            if self.leadership.is_leader:
                await duty()

        return run

    async def _purge_pools(self) -> None:
        await self.purges.go_on(lambda: self.leadership.is_leader)

    async def _drain(self) -> None:
        await self.drains.go_on(lambda: self.leadership.is_leader)

    async def _refresh(self) -> None:
        await self.registry.refresh()
        self.reclaimer.note_settings(self.registry.generation)

    async def settle(self) -> None:
        """Write down what is still to be written down, before the manager ends."""
        with contextlib.suppress(KvcmError):  # what the store does not take now, a recount puts right
            await self.cache.accesses.drain()
            if self.sharing is not None:
                await self.sharing.ledger.flush()

    def labels(self, instance_id: str) -> Mapping[str, str]:
        """Return the labels of an instance's metrics; none when it is not registered."""
        try:
            instance = self.registry.instances.get(instance_id)
        except UnknownInstanceError:
            return {}
        return {"instance_group": instance.instance_group_name, "instance_id": instance_id}

    def refuse_unless_leading(self, plane: Plane) -> None:
        """Refuse a call while another manager has to answer it.

        Only `kvcm.service.require_leader` asks for that, or a store of this manager's own together with a lock among
        managers: then only the lock's holder serves (design.md decision 7).

        Raises:
            NotLeaderError: naming the leader's address where it is known.
        """
        own_store = not self.metadata.store.is_shared and bool(self.settings.distributed_lock_uri)
        if self.settings.require_leader or own_store:
            refuse_unless_leading(self.leadership, plane)


async def _every(seconds: float, duty: Callable[[], Awaitable[None]]) -> None:
    while True:
        await duty()
        await asyncio.sleep(seconds)


def _limits(registry: Registry) -> Limits:
    return Limits(registry.storages.all(), registry.quotas.all(), registry.groups.all())


def _tell_evicted(
    events: ChangeEvents, counted: EvictionMetrics, wake_deletions: Callable[[], None], evicted: Evicted
) -> None:
    counted.evicted(evicted)
    reason = evicted.need.reason.value
    events.evicted(evicted.instance, evicted.changes, reason, evicted.policy, evicted.delay_seconds)
    if not evicted.delay_seconds:
        wake_deletions()
