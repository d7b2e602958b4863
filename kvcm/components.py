"""Where a deployment's metadata is kept, opened as the settings say.

`kvcm.registry_storage.uri` decides (design.md decision 6): a redis uri for a store that managers share, `local:///path`
for a RocksDB there, nothing for a RocksDB in the data directory, and for the process's memory when there is none.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from kvcm.cache.drains import StorageDrains
from kvcm.cache.manager import CacheManager, GarbageSource
from kvcm.cache.quotas import Ledger, SharedLedger, UsageLedger
from kvcm.cache.removal import PoolPurges, Remover
from kvcm.cache.usage_recount import UsageRecount
from kvcm.config import ConfigError, Settings
from kvcm.index.backends.backend import IndexBackend
from kvcm.index.backends.memory import MemoryBackend
from kvcm.index.backends.redis import BlockKeys, RedisBackend
from kvcm.index.backends.rocks import load_index
from kvcm.index.change_events import ChangeEvents
from kvcm.index.search_cache import CacheBudget
from kvcm.model.clock import Clock
from kvcm.model.errors import KvcmError
from kvcm.model.instances import Placement
from kvcm.reclaim.background import Pacer
from kvcm.reclaim.deletion_executor import DeletionExecutor
from kvcm.reclaim.garbage import GarbageCollector
from kvcm.reclaim.needs import Limits, WatermarkCheck
from kvcm.reclaim.reclaimer import EvictionRecord, Reclaimer, WakeBroadcast
from kvcm.reclaim.scrub import PoolLeaks, StorageScrubber
from kvcm.registry.audit_trail import AuditTrail
from kvcm.registry.leadership import Leadership
from kvcm.registry.registry import Registry
from kvcm.service.admission import refuse_unless_leading
from kvcm.service.alert_watch import AlertSources, AlertWatch
from kvcm.service.calls import Plane
from kvcm.service.metrics import Counts, EvictionMetrics
from kvcm.service.storage_api import DrainView
from kvcm.service.usage_report import UsageView
from kvcm.storage.directory import StorageDirectory
from kvcm.storage.prober import Prober
from kvcm.store.file_lease import FileLease
from kvcm.store.load_progress import LoadProgress
from kvcm.store.memory import MemoryLease, MemoryStore
from kvcm.store.redis.client import RedisClient
from kvcm.store.redis.quota import QuotaCounters
from kvcm.store.redis.store import RedisLease, RedisStore
from kvcm.store.redis.tracking import Invalidations
from kvcm.store.redis.uri import RedisSettings, parse_redis_uri
from kvcm.store.rocks import RocksStore
from kvcm.store.store import Lease, Store
from kvcm.telemetry.events import EventLog
from kvcm.telemetry.logs import AuditLog
from kvcm.telemetry.metrics import Histogram

__all__ = ["BackgroundTask", "Components", "Metadata", "local_directory", "open_metadata"]


@dataclass(frozen=True, slots=True)
class Metadata:
    """An opened store and what is built on it.

    Attributes:
        kind: memory, rocksdb or redis.
        store: documents.
        new_backend: makes or finds the backend of an index.
        lease: the right to run the background duties.
        usage: keeps count of groups.
        client: of the shared store, None when there is none.
        closers: what else has to be closed.
    """

    kind: str
    store: Store
    new_backend: Callable[[Placement], IndexBackend]
    lease: Lease
    usage: Ledger
    client: RedisClient | None = None
    closers: list[Callable[[], Awaitable[None]]] = field(default_factory=list)

    @property
    def times(self) -> Mapping[str, Histogram]:
        """How long operations of the store took, by kind; none in memory."""
        if isinstance(self.store, RocksStore):
            return self.store.log.times
        return self.client.times if self.client is not None else {}

    async def close(self) -> None:
        """Make everything durable and let go of files and connections."""
        await self.store.close()
        for close in self.closers:
            await close()


async def open_metadata(
    settings: Settings,
    clock: Clock,
    node_id: str,
    progress: LoadProgress = lambda _done, _total: None,
    on_failure: Callable[[str], None] = lambda _reason: None,
    least_timeout_seconds: float = 0.0,
) -> Metadata:
    """Open what the settings name.

    Args:
        settings: `kvcm.registry_storage.uri`, `kvcm.distributed_lock.uri`, `kvcm.data_dir`, `kvcm.store.*`.
        clock: time source.
        node_id: id of this manager.
        progress: told while a RocksDB is read.
        least_timeout_seconds: how long to wait for an answer of redis at least; a command has time, a request has not.
        on_failure: told when the disk failed and memory is ahead of it: the process has to end.

    Raises:
        ConfigError: a uri is malformed.
        StorageIOError: the store cannot be opened.
    """
    uri = settings.registry_storage_uri
    if uri.startswith("redis"):
        redis = _redis_settings("kvcm.registry_storage.uri", uri)
        patient = max(redis.timeout_seconds, least_timeout_seconds)
        metadata = await _in_redis(replace(redis, timeout_seconds=patient))
    elif (directory := local_directory(settings)) is not None:
        metadata = await asyncio.to_thread(_in_rocksdb, settings, directory, clock, progress, on_failure)
    else:
        metadata = _in_memory(clock)
    return _with_lease(metadata, settings, clock)


def _in_memory(clock: Clock) -> Metadata:
    return Metadata("memory", MemoryStore(), lambda _placement: MemoryBackend(), MemoryLease(clock), UsageLedger())


def _in_rocksdb(
    settings: Settings, directory: Path, clock: Clock, progress: LoadProgress, on_failure: Callable[[str], None]
) -> Metadata:
    store = RocksStore(directory, settings.fsync, clock, on_failure)
    try:
        index = load_index(store, progress)
    except BaseException:
        store.log.close_at_once()  # or the directory stays in use
        raise
    return Metadata("rocksdb", store, lambda placement: index.backend(placement.uid), MemoryLease(clock), UsageLedger())


async def _in_redis(redis: RedisSettings) -> Metadata:
    client = RedisClient.of(redis)
    try:
        await client.check()
    except BaseException:
        await client.close()
        raise

    def new_backend(placement: Placement) -> IndexBackend:
        return RedisBackend(client, placement.uid, placement.shard_count)

    # Not the node's id: that may be configured, and numbers of reports begin anew with every start.
    usage = SharedLedger(QuotaCounters(client), secrets.token_hex(8))
    return Metadata("redis", RedisStore(client), new_backend, RedisLease(client), usage, client)


def _with_lease(metadata: Metadata, settings: Settings, clock: Clock) -> Metadata:
    """Return the metadata with the lease that the settings name; without one it is kept where the metadata is."""
    uri = settings.distributed_lock_uri
    if not uri:
        return metadata
    closers = list(metadata.closers)
    if uri.startswith("redis"):
        name = metadata.client.prefix if metadata.client is not None else settings.cluster_id
        client = RedisClient.of(_redis_settings("kvcm.distributed_lock.uri", uri, name or "kvcm"))
        closers.append(client.close)
        lease: Lease = RedisLease(client)
    elif uri.startswith("file://"):
        lease = FileLease(Path(uri.removeprefix("file://")))
    else:
        lease = MemoryLease(clock)
    return Metadata(
        metadata.kind, metadata.store, metadata.new_backend, lease, metadata.usage, metadata.client, closers
    )


def _redis_settings(key: str, uri: str, cluster_name: str = "") -> RedisSettings:
    try:
        return parse_redis_uri(uri, cluster_name)
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from None


def local_directory(settings: Settings) -> Path | None:
    """Return where the settings have a RocksDB, None when they have none."""
    uri = settings.registry_storage_uri
    if uri.startswith("local://"):
        return Path(uri.removeprefix("local://"))
    return Path(settings.data_dir) / "metadata" if settings.data_dir and not uri else None


# The rooms of a running manager, and what they do in the background.
#
# Duties of the leader: ending what is overdue, deletions, removals of instances, recounts of usage. Every manager
# follows the registry and the invalidations of its search caches, probes its storages, and writes down what was read.

BackgroundTask = tuple[str, Callable[[], Awaitable[None]]]
"""Name and endless coroutine."""
_ACCESS_FLUSH_SECONDS = 1.0  # what a crash may lose
_KEYS_SECONDS = 60.0
_REGISTRY_SECONDS = 0.25  # other managers' changes are in force within a second
_SHARED_TASK_SECONDS = 0.5  # a round asks every shard of every instance
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
    wakes: WakeBroadcast

    @classmethod
    def of(
        cls, metadata: Metadata, registry: Registry, cache: CacheManager, wakes: WakeBroadcast, clock: Clock
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
class _ComponentFactory:
    """What rooms are built on, and how each one is built. Attributes are those of `Rooms`, and the time source."""

    metadata: Metadata
    registry: Registry
    storages: StorageDirectory
    leadership: Leadership
    clock: Clock
    settings: Settings

    def cache(self, budget: CacheBudget, events: EventLog, on_pressure: Callable[[str], None]) -> CacheManager:
        """Build the cache, whose writes report when they leave their group above a watermark."""
        cache = CacheManager(
            self.registry,
            self.storages,
            self.clock,
            new_backend=self.metadata.new_backend,
            store=self.metadata.store,
            usage=self.metadata.usage,
            budget=budget,
            events=events,
            on_pressure=on_pressure,
        )
        cache.set_watermark_check(
            WatermarkCheck(self.registry, cache.usage, cache.open_caches.key_counts).is_above_a_mark
        )
        return cache

    def deletions(self, cache: CacheManager, events: EventLog, turns: Pacer) -> DeletionExecutor:
        """Build what deletes the bytes and the metadata of the cache's blocks."""
        workers, is_configured = self.settings.deletion_workers, self.registry.storages.is_configured
        deletions = DeletionExecutor(self.storages, self.clock, workers, events, is_configured, turns)
        deletions.serve(cache)
        return deletions

    def reclaimer(self, cache: CacheManager, on_evicted: Callable[[EvictionRecord], None], turns: Pacer) -> Reclaimer:
        """Build what keeps usage below the marks."""
        find_group, limits = self.registry.groups.find, partial(_limits, self.registry)
        return Reclaimer(cache.indexes, find_group, limits, self.clock, on_evicted, turns=turns)

    def wakes(self, reclaimer: Reclaimer) -> WakeBroadcast:
        """Build what wakes the reclaimer of whoever leads: the only one there is, over a store of its own."""
        store, leadership = self.metadata.store, self.leadership
        return WakeBroadcast(store.table("wakes"), reclaimer.wake, lambda: leadership.is_leader or not store.is_shared)

    def configure_slot_reuse(self) -> None:
        """Say from when on, and in whose term, slots of packed files are handed out again."""
        reuse, leadership = self.storages.slot_reuse, self.leadership
        reuse.grace_seconds = self.settings.slot_reuse_grace_ms / 1000
        reuse.now = self.clock.now
        reuse.term = lambda: leadership.token if leadership.is_leader else None

    def garbage(self, custody: GarbageSource, told: ChangeEvents) -> GarbageCollector:
        """Build what looks for blocks that nobody can read."""
        rate = self.settings.garbage_blocks_per_second
        return GarbageCollector(custody, self.storages, self.clock, blocks_per_second=rate, on_marked=told.removed)

    def scrubber(self, custody: GarbageSource) -> StorageScrubber:
        """Build what looks for bytes that no metadata knows."""
        return StorageScrubber(custody, self.storages, self.clock, self.storages.cluster_id)

    def drains(self, cache: CacheManager, remover: Remover, turns: Pacer) -> StorageDrains:
        """Build what empties storages, and forgets what lay on removed ones."""
        return StorageDrains(
            self.registry,
            cache.open_caches,
            remover,
            self.clock,
            is_shared=self.metadata.store.is_shared,
            forget_medium=self.storages.forget,
            give_way=turns.pause,
        )

    def purges(self, cache: CacheManager, remover: Remover, turns: Pacer) -> PoolPurges:
        """Build what forgets what lay in memory of pools that is gone."""
        return PoolPurges(self.storages.pools, cache.open_caches, remover, self.clock, turns.pause)

    def leaks(self, cache: CacheManager, scrubber: StorageScrubber) -> PoolLeaks:
        """Build what frees memory of pools that nobody owns."""
        return PoolLeaks(
            self.storages.pools, lambda name: sum(cache.usage.bytes_on_storage(name).values()), scrubber, self.clock
        )

    def prober(self) -> Prober:
        """Build what looks after the health of storages."""
        interval_ms, timeout_ms = self.settings.probe_interval_ms, self.settings.probe_timeout_ms
        return Prober(self.storages, self.clock, interval_ms / 1000, timeout_ms / 1000)


@dataclass(frozen=True, slots=True)
class Components:
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
    view: UsageView
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
    ) -> Components:
        """Build the rooms over an opened store and a loaded registry."""
        ground = _ComponentFactory(metadata, registry, storages, leadership, clock, settings)
        events = EventLog(settings.event_log_file, settings.event_max_bytes, clock.now)
        told = ChangeEvents(events)
        budget = CacheBudget(settings.search_cache_bytes)
        turns = Pacer()  # eviction and deletion take theirs by turns, with room for requests between them
        wakes: WakeBroadcast  # of the reclaimer, which is built over the cache that wakes it
        cache = ground.cache(budget, events, lambda group_name: wakes.request(group_name))
        deletions = ground.deletions(cache, events, turns)
        counts = Counts()
        on_evicted = partial(_record_eviction, told, counts.evictions, deletions.wake)
        reclaimer = ground.reclaimer(cache, on_evicted, turns)
        wakes = ground.wakes(reclaimer)
        sharing = Sharing.of(metadata, registry, cache, wakes, clock)
        if sharing is not None:
            budget.is_coherent = lambda: sharing.invalidations.is_live and settings.search_cache_bytes > 0
        ground.configure_slot_reuse()
        custody, remover = GarbageSource(cache, registry, metadata.store), Remover(clock, registry.groups.find, events)
        garbage, scrubber = ground.garbage(custody, told), ground.scrubber(custody)
        drains, purges = ground.drains(cache, remover, turns), ground.purges(cache, remover, turns)
        leaks, prober = ground.leaks(cache, scrubber), ground.prober()
        view = UsageView(cache, registry, deletions)
        drain_view = DrainView(drains, storages, deletions, leadership)
        lag, rooms = counts.lag.blocked_seconds, (cache, registry, view, storages, deletions, drain_view, leadership)
        return cls(
            *(settings, metadata, registry, storages, leadership, events),
            *(cache, reclaimer, deletions, garbage, scrubber, drains),
            *(purges, leaks, prober, sharing),
            *(counts, audit, audit_log),
            *(clock, view, AlertWatch(AlertSources(*rooms, lag, metadata.store.is_shared), clock.now)),
        )

    def background_tasks(self) -> list[BackgroundTask]:
        """Return what has to run while the manager serves."""
        tick_seconds = self.settings.loop_interval_ms / 1000
        duty_seconds = _SHARED_TASK_SECONDS if self.metadata.store.is_shared else tick_seconds
        duties: list[BackgroundTask] = [
            ("election", partial(_every, tick_seconds, self.leadership.tick)),
            (
                "registry",
                partial(_every, _REGISTRY_SECONDS, self._refresh),
            ),  # and storages that did not open yet
            ("accesses", partial(_every, _ACCESS_FLUSH_SECONDS, self.cache.accesses.drain)),
            ("expiry", partial(_every, duty_seconds, self._if_leader(self.cache.expire))),
            ("removals", partial(_every, duty_seconds, self._if_leader(self.cache.purge_removed))),
            ("pools", partial(_every, _POOLS_SECONDS, self._if_leader(self._purge_pools))),
            ("leaks", partial(_every, _POOLS_SECONDS, self._if_leader(self.leaks.check))),  # reads everything at times
            ("drains", partial(_every, duty_seconds, self._if_leader(self._drain))),
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
                ("recount", partial(_every, _RECOUNT_SECONDS, self._if_leader(self.sharing.recount.check))),
            ]
        return duties

    def _if_leader(self, duty: Callable[[], Awaitable[None]]) -> Callable[[], Awaitable[None]]:
        async def run() -> None:
            if self.leadership.is_leader:
                await duty()

        return run

    async def _purge_pools(self) -> None:
        await self.purges.resume(lambda: self.leadership.is_leader)

    async def _drain(self) -> None:
        await self.drains.resume(lambda: self.leadership.is_leader)

    async def _refresh(self) -> None:
        await self.registry.refresh()
        self.reclaimer.on_settings_changed(self.registry.generation)

    async def flush(self) -> None:
        """Write down what is still to be written down, before the manager ends."""
        with contextlib.suppress(KvcmError):  # what the store does not take now, a recount puts right
            await self.cache.accesses.drain()
            if self.sharing is not None:
                await self.sharing.ledger.flush()

    def labels(self, instance_id: str) -> Mapping[str, str]:
        """Return the labels of an instance's metrics; none when it is not registered."""
        registration = self.registry.instances.by_id.get(instance_id)
        if registration is None:
            return {}
        return {"instance_group": registration.instance.instance_group_name, "instance_id": instance_id}

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


def _record_eviction(
    events: ChangeEvents, counted: EvictionMetrics, wake_deletions: Callable[[], None], evicted: EvictionRecord
) -> None:
    counted.on_evicted(evicted)
    reason = evicted.need.reason.value
    events.evicted(evicted.instance, evicted.changes, reason, evicted.policy, evicted.delay_seconds)
    if not evicted.delay_seconds:
        wake_deletions()
