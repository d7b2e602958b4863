"""The components of a manager and their wiring: the metadata store, the cache, reclaim, background tasks.

`open_metadata` opens the store that the settings name, and `Components.build` builds everything over it and over a
loaded registry; `kvcm.app` opens, serves and closes. Nothing here knows of ports or calls.

The components form no circle but one: a write reports that its group crossed a watermark, and the reclaimer, which is
built over the cache, is woken. `WritePressure` is that event; it is connected once, before the first write.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import structlog

from kvcm.cache.drains import StorageDrains
from kvcm.cache.finish_notes import FinishNotes
from kvcm.cache.instance_cache import OpenCaches
from kvcm.cache.manager import CacheManager, GarbageSource
from kvcm.cache.quotas import Ledger, MetadataDisk, SharedLedger, UsageLedger
from kvcm.cache.removal import PoolPurges, Remover
from kvcm.cache.store_moves import OpenRuns, StoreMoves
from kvcm.cache.usage_recount import UsageRecount
from kvcm.config import ConfigError, Settings
from kvcm.index.backends.backend import IndexBackend
from kvcm.index.backends.memory import MemoryBackend
from kvcm.index.backends.redis import BlockKeys, RedisBackend
from kvcm.index.backends.redis_runs import RunsBackend, channel_of, channel_of_new, noticed_blocks
from kvcm.index.backends.rocks import BlockSalvage, load_index
from kvcm.index.change_events import ChangeEvents
from kvcm.index.search_cache import CacheBudget
from kvcm.model.clock import Clock
from kvcm.model.errors import KvcmError, StorageIOError
from kvcm.model.instances import Instance, Placement
from kvcm.model.keys import unpack_keys
from kvcm.model.storages import EventReportStorageSpec, StorageType
from kvcm.reclaim.background import Pacer
from kvcm.reclaim.deletion_executor import DeletionExecutor
from kvcm.reclaim.garbage import GarbageCollector
from kvcm.reclaim.media import LargestBlocks, MediaPressure
from kvcm.reclaim.needs import Limits, WatermarkCheck
from kvcm.reclaim.reclaimer import EvictionRecord, Reclaimer, WakeBroadcast
from kvcm.reclaim.scrub import PoolLeaks, StorageScrubber
from kvcm.reclaim.storage_times import StorageTimes
from kvcm.reclaim.verification import StorageVerification
from kvcm.registry.audit_trail import AuditTrail
from kvcm.registry.block_stores import BlockStore
from kvcm.registry.leadership import Leadership
from kvcm.registry.loss_journal import LossJournal
from kvcm.registry.registry import FIRST_SCHEMA, NEWEST_SCHEMA, SCHEMA_OF_RUNS, Registry, Schema
from kvcm.registry.store_guard import StoreGuard
from kvcm.residency.event_reports import EventTimes
from kvcm.residency.residency import Residency, ResidencyLimits
from kvcm.residency.storage_events import LoggedStorageEvents, OpenIndex, StorageEvents, StorageEventSink
from kvcm.service.admission import refuse_unless_leading
from kvcm.service.alert_watch import AlertSources, AlertWatch
from kvcm.service.calls import Plane
from kvcm.service.group_store_api import GroupStoreView
from kvcm.service.metrics import Counts, EvictionMetrics
from kvcm.service.storage_api import DrainView
from kvcm.service.storage_event_socket import StorageEventSocket
from kvcm.service.usage_report import UsageView
from kvcm.storage.directory import StorageDirectory
from kvcm.storage.free_margin import FreeMargins
from kvcm.storage.prober import Prober
from kvcm.store.file_lease import FileLease
from kvcm.store.load_progress import LoadProgress
from kvcm.store.memory import MemoryLease, MemoryStore
from kvcm.store.redis.client import RedisClient
from kvcm.store.redis.eviction_watch import EvictionWatch
from kvcm.store.redis.quota import QuotaCounters
from kvcm.store.redis.store import RedisLease, RedisStore
from kvcm.store.redis.tracking import Invalidations
from kvcm.store.redis.uri import RedisSettings, parse_redis_uri
from kvcm.store.reserve import MetadataReserve
from kvcm.store.rocks import RocksStore
from kvcm.store.rocks_check import DamagedStoreError
from kvcm.store.rocks_repair import Found, read_repairs, repair_database, survey_database
from kvcm.store.store import Lease, Store, StoreGate, StoreHealth, Table
from kvcm.telemetry.events import EventLog
from kvcm.telemetry.logs import AuditLog
from kvcm.telemetry.metrics import Histogram, Reading

__all__ = [
    "BackgroundTask",
    "Components",
    "Metadata",
    "WritePressure",
    "local_directory",
    "open_metadata",
    "repair_local",
]

_log = structlog.get_logger("kvcm.store")

# The metadata store: `kvcm.registry_storage.uri` decides (design.md decision 6). A redis uri names a store that
# managers share, `local:///path` a RocksDB there, nothing a RocksDB in the data directory, or memory without one.


_TAGS_IN_CLUSTER = 4  # a few masters share an instance; each tag is a script more per call


@dataclass(frozen=True, slots=True)
class Metadata:
    """An opened store and the objects that are built on it.

    Attributes:
        kind: memory, rocksdb or redis.
        store: documents.
        new_backend: makes or finds the backend of an index.
        lease: the right to run the background tasks.
        usage: usage of the groups.
        client: of the shared store, None without one.
        guard: the registry's table of a shared store, None without one.
        eviction: whether the servers of a shared store drop keys, None without one.
        tags: of instances that are registered with a schema of runs (`Placement.tags`); 0 where a store has no runs.
        block_stores: further stores for blocks, by name.
        open_runs: opens the records of an instance for a move; None where there are no further stores.
        closers: further connections to close.
    """

    kind: str
    store: Store
    new_backend: Callable[[Placement], IndexBackend]
    lease: Lease
    usage: Ledger
    client: RedisClient | None = None
    guard: StoreGuard | None = None
    eviction: EvictionWatch | None = None
    journal: LossJournal | None = None
    tags: int = 0
    block_stores: Mapping[str, BlockStore] = field(default_factory=dict)
    open_runs: OpenRuns | None = None
    closers: list[Callable[[], Awaitable[None]]] = field(default_factory=list)

    @property
    def first_schema(self) -> int:
        """The schema of a new store: the newest only where that is of use, since the release before can read the other
        stores then."""
        return NEWEST_SCHEMA if self.tags else FIRST_SCHEMA

    def tags_with(self, schema: Schema) -> int:
        """Return the tags of instances that are registered in a store of a schema."""
        return self.tags if schema.number >= SCHEMA_OF_RUNS else 0

    @property
    def tags_in_block_stores(self) -> Mapping[str, int]:
        """Tags of instances in each further store."""
        return {name: each.tags for name, each in self.block_stores.items()}

    async def check_block_stores(self, deployment: str = "") -> None:
        """Find out which further stores can be used; the others are closed, and tried again by the next call.

        Args:
            deployment: that they have to be of; that of the opened journal where it is not given.
        """
        assert self.journal is not None
        deployment = deployment or self.journal.deployment
        await asyncio.gather(*(each.check(deployment) for each in self.block_stores.values()))

    @property
    def registry_table(self) -> Table:
        """The documents of the registry."""
        return self.guard if self.guard is not None else self.store.table("registry")

    async def check(self) -> None:
        """Return if the store answers, and is one to be used.

        Raises:
            StorageIOError: otherwise.
        """
        await self.store.table("registry").version()
        if self.client is not None and self.client.gate.full:
            raise StorageIOError(self.client.gate.full)

    def health(self) -> StoreHealth:
        """Return the faults of a shared store."""
        if self.journal is None:
            return StoreHealth()
        known = StoreHealth(
            losses=self.journal.losses,
            last_loss=self.journal.last_loss,
            lost_at=self.journal.lost_at,
            evicted_keys=self.journal.evicted_keys,
            missing_blocks=self.journal.missing_blocks,
        )
        if self.client is None or self.guard is None or self.eviction is None:
            return known
        own = self.health_of_stores()[""]
        return replace(
            known,
            closed=own.closed,
            evicts=own.evicts,
            restorations=self.guard.restored,
            new_servers=self.guard.new_servers,
        )

    def health_of_stores(self) -> Mapping[str, StoreHealth]:
        """Return whether each store is used, and whether its servers drop keys, by name."""
        own = StoreHealth()
        if self.client is not None and self.eviction is not None:
            own = StoreHealth(closed=self.client.gate.closed, evicts=self.eviction.trouble)
        others = self.block_stores.items()
        return {"": own} | {
            name: StoreHealth(closed=each.trouble, evicts=each.eviction.trouble) for name, each in others
        }

    @property
    def times(self) -> Mapping[str, Histogram]:
        """How long operations of the store took, by kind; none in memory."""
        if isinstance(self.store, RocksStore):
            return self.store.log.times
        return self.client.times if self.client is not None else {}

    @property
    def lost(self) -> Mapping[str, int]:
        """What repairs of the store found to be gone, as far as it could be counted, by kind."""
        notes = read_repairs(self.store.log.directory) if isinstance(self.store, RocksStore) else []
        return {
            "blocks": sum(note.lost_blocks or 0 for note in notes),
            "documents": sum(note.lost_documents or 0 for note in notes),
            "changes": sum(note.lost_changes for note in notes),
            "doubtful_blocks": sum(note.doubtful_blocks for note in notes),
        }

    @property
    def reserve(self) -> MetadataReserve | None:
        """The reserve of the disk that the store is on; None where it is on none of this manager."""
        return self.store.log.reserve if isinstance(self.store, RocksStore) else None

    def shortage(self) -> str:
        """Return why the store refuses changes until its disk has space again, "" while it does not."""
        return self.store.log.shortage if isinstance(self.store, RocksStore) else ""

    async def close(self) -> None:
        """Flush, then close files and connections."""
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
        progress: called while a RocksDB is read.
        on_failure: called when the disk failed and memory is ahead of it: the process has to end.
        least_timeout_seconds: least timeout of a request to redis; commands can wait longer than requests.

    Raises:
        ConfigError: a uri is malformed.
        StorageIOError: the store cannot be opened.
    """
    uri = settings.registry_storage_uri
    if uri.startswith("redis"):
        redis = _redis_settings("kvcm.registry_storage.uri", uri)
        patient = max(redis.timeout_seconds, least_timeout_seconds)
        place = sha256(f"{redis.addresses} {redis.database} {redis.cluster_name}".encode()).hexdigest()[:16]
        beside = Path(settings.data_dir) / f"redis-{place}.times" if settings.data_dir else None
        further = [(name, _redis_settings("kvcm.store.block_stores", uri)) for name, uri in settings.block_stores]
        named = {
            name: replace(each, timeout_seconds=max(each.timeout_seconds, least_timeout_seconds))
            for name, each in further
        }
        metadata = await _in_redis(replace(redis, timeout_seconds=patient), named, clock, beside)
    elif (directory := local_directory(settings)) is not None:
        metadata = await asyncio.to_thread(_in_rocksdb, settings, directory, clock, progress, on_failure)
        assert metadata.journal is not None
        await metadata.journal.load()
    else:
        metadata = _in_memory(clock)
    return _with_lease(metadata, settings, clock)


def _in_memory(clock: Clock) -> Metadata:
    return Metadata(
        kind="memory",
        store=MemoryStore(),
        new_backend=lambda _placement: MemoryBackend(),
        lease=MemoryLease(clock),
        usage=UsageLedger(),
    )


def _in_rocksdb(
    settings: Settings, directory: Path, clock: Clock, progress: LoadProgress, on_failure: Callable[[str], None]
) -> Metadata:
    """Open a RocksDB; a damaged one is repaired first if the settings say so."""
    try:
        return _opened_rocksdb(settings, directory, clock, progress, on_failure)
    except DamagedStoreError as error:
        _log.error("metadata_store_damaged", reason=str(error))
        if settings.on_damage != "repair":
            raise _counted(directory, error) from error
    repair_local(directory, clock, progress)
    return _opened_rocksdb(settings, directory, clock, progress, on_failure)


def _counted(directory: Path, error: DamagedStoreError) -> StorageIOError:
    """Return the error with the numbers of the losses."""
    try:
        found = survey_database(directory)
    except StorageIOError as failure:  # the disk is full, for example
        return StorageIOError(f"{error}. It could not be counted the losses: {failure}")
    return DamagedStoreError(directory, "; ".join(found.sentences()))


def repair_local(directory: Path, clock: Clock, progress: LoadProgress = lambda _done, _total: None) -> Found | None:
    """Put everything that can be read of a damaged RocksDB in its place. Blocks.

    Returns:
        What was found; None where a repair that was interrupted before was completed.

    Raises:
        StorageIOError: another process has the directory open, or the disk failed.
    """
    found = repair_database(directory, BlockSalvage(), clock.now(), progress)
    if found is not None:
        _log.warning(
            "metadata_store_repaired",
            lost_changes=found.lost_changes,
            lost_blocks=found.lost_blocks,
            lost_documents=found.lost_documents,
            doubtful_blocks=found.doubtful,
            moved_to=str(found.moved_to),
            found=list(found.sentences()),
        )
    return found


def _opened_rocksdb(
    settings: Settings, directory: Path, clock: Clock, progress: LoadProgress, on_failure: Callable[[str], None]
) -> Metadata:
    store = RocksStore(directory, settings.fsync, clock, on_failure, settings.reserve_bytes)
    try:
        index = load_index(store, progress)
    except BaseException:
        store.log.close_at_once()  # or the directory stays locked
        raise
    return Metadata(
        kind="rocksdb",
        store=store,
        new_backend=lambda placement: index.backend(placement.uid),
        lease=MemoryLease(clock),
        usage=UsageLedger(),
        journal=LossJournal(clock, store, directory.with_name(f"{directory.name}.times"), lambda: store.log.appended),
    )


def _tags_in(client: RedisClient) -> int:
    return _TAGS_IN_CLUSTER if client.is_cluster else 1


def _block_stores(settings: Mapping[str, RedisSettings], times: dict[str, Histogram]) -> dict[str, BlockStore]:
    stores = {}
    for name, each in settings.items():
        client = RedisClient.of(each)
        client.times = times
        stores[name] = BlockStore(name, client, _tags_in(client))
    return stores


async def _in_redis(
    redis: RedisSettings, further: Mapping[str, RedisSettings], clock: Clock, beside: Path | None
) -> Metadata:
    client = RedisClient.of(redis)
    block_stores = _block_stores(further, client.times)
    store = RedisStore(client, others={name: each.store for name, each in block_stores.items()})
    eviction = EvictionWatch(client, store.table("losses"))
    guard = StoreGuard(store.registry_table(), client.gate, clock, journal := LossJournal(clock, store, beside))
    for each in (eviction, *(each.eviction for each in block_stores.values())):
        each.listeners.append(journal.note_evicted)
    try:
        await client.check()
        await eviction.check()
    except BaseException:
        await client.close()
        raise

    def new_backend(placement: Placement) -> IndexBackend:
        if not placement.store and not placement.tags:
            return RedisBackend(client, placement.uid, placement.shard_count, store.revisions)
        of = store.others.get(placement.store) if placement.store else store
        if of is None:
            text = (
                f"the instance's blocks are in store {placement.store!r}, and kvcm.store.block_stores of this manager "
                f"names {sorted(block_stores)} only"
            )
            return RunsBackend(client.gated(StoreGate(closed=text)), placement.uid, placement.tags)
        return RunsBackend(of.client, placement.uid, placement.tags, of.flags)

    def open_runs(name: str, uid: int, tags: int, move: int) -> RunsBackend:
        return RunsBackend(store.others[name].client if name else client, uid, tags, move=move)

    # Not the node's id: that may be configured, and every start numbers its reports from 0 again.
    usage = SharedLedger(QuotaCounters(client), secrets.token_hex(8))
    return Metadata(
        kind="redis",
        store=store,
        new_backend=new_backend,
        lease=RedisLease(client, store.revisions),
        usage=usage,
        client=client,
        guard=guard,
        eviction=eviction,
        journal=journal,
        tags=_tags_in(client),
        block_stores=block_stores,
        open_runs=open_runs if block_stores else None,
    )


def _with_lease(metadata: Metadata, settings: Settings, clock: Clock) -> Metadata:
    """Return the metadata with the lease that the settings name; by default the lease is in the metadata store."""
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
    return replace(metadata, lease=lease, closers=closers)


def _redis_settings(key: str, uri: str, cluster_name: str = "") -> RedisSettings:
    try:
        return parse_redis_uri(uri, cluster_name)
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from None


def local_directory(settings: Settings) -> Path | None:
    """Return the directory of the RocksDB that the settings name, None without one."""
    uri = settings.registry_storage_uri
    if uri.startswith("local://"):
        return Path(uri.removeprefix("local://"))
    return Path(settings.data_dir) / "metadata" if settings.data_dir and not uri else None


# Wiring. Background tasks of the leader: expiry of write sessions, deletions, removals of instances, recounts of usage.
# Every manager follows the registry and the invalidations of its search caches, probes its storages, and flushes the
# accesses that it recorded.

BackgroundTask = tuple[str, Callable[[], Awaitable[None]]]
"""Name and endless coroutine."""
_ACCESS_FLUSH_SECONDS = 1.0  # a crash loses no more
_KEYS_SECONDS = 60.0
_RESIDENCY_SECONDS = 1.0
_REGISTRY_SECONDS = 0.25  # other managers' changes are in force within a second
_SHARED_TASK_SECONDS = 0.5  # a round reads every shard of every instance
_RECOUNT_SECONDS = 1.0
_POOLS_SECONDS = 2.0
_RESERVE_SECONDS = 1.0
_BEAT_SECONDS = 0.5  # what a failover may have lost is known as exactly
_TIMES_SECONDS = 1.0
_NOTES_SECONDS = 1.0
_WHOLE_NOTES_SECONDS = 60.0
_LAST_CHECK_SECONDS = 2.0  # a store that is away does not keep a manager from its end
_LAST_NOTES_SECONDS = 5.0  # nor a storage that hangs
_BLOCK_STORES_SECONDS = 1.0
_UNVERIFIED_SECONDS = 0.5  # an import waits for several of it


class WritePressure:
    """The event that a write crossed a watermark or found no space, from the cache to the reclaimer."""

    def __init__(self) -> None:
        self._wakes: WakeBroadcast | None = None

    def connect(self, wakes: WakeBroadcast) -> None:
        """Connect the writes of a cache with the reclaimer; once, before the first write."""
        assert self._wakes is None, "connected twice"
        self._wakes = wakes

    def report(self, group_name: str) -> None:
        """Wake the reclaimer of the leader. Never waits."""
        assert self._wakes is not None, "a write came before connect()"
        self._wakes.request(group_name)


@dataclass(frozen=True, slots=True)
class StoreFollower:
    """Follows one store.

    Attributes:
        name: of the store; "" for the one that has the registry.
        invalidations: changes by other managers, for the search caches.
        flags: of what may be due, for a manager that leads.
        client: of the store.
    """

    name: str
    invalidations: Invalidations
    flags: Invalidations
    client: RedisClient

    @classmethod
    def of(cls, store: RedisStore, caches: OpenCaches, *, have_flags: bool) -> StoreFollower:
        """Return what follows a store, and says to its `Revisions` whether it does.

        Args:
            store: one of several.
            caches: of all instances.
            have_flags: whether all managers set flags.
        """
        keys, revisions = BlockKeys(store.client.prefix), store.revisions

        def invalidate(names: Sequence[bytes]) -> None:
            others = [name for name in names if not name.startswith(keys.prefix)]
            heads = keys.by_head(names if not others else (name for name in names if name.startswith(keys.prefix)))
            revisions.record((*heads, *others))
            caches.invalidate(keys.by_uid(heads))

        def invalidate_all() -> None:
            revisions.reset()
            caches.invalidate_all(store.name)

        invalidations = Invalidations(
            store.client,
            (keys.prefix, *store.notified_prefixes(have_flags=have_flags)),
            invalidate,
            invalidate_all,
            channel=channel_of(store.client.prefix),
            on_notice=lambda notice: caches.invalidate(noticed_blocks(notice)),
        )
        revisions.is_live = lambda: invalidations.is_live
        flags = Invalidations(store.client, [store.flag_prefix], store.flags.record, store.flags.reset)
        store.flags.is_live = lambda: flags.is_live
        return cls(store.name, invalidations, flags, store.client)


@dataclass(frozen=True, slots=True)
class Sharing:
    """The components of a manager whose store other managers use, too.

    Attributes:
        followers: of every store, that of the registry first.
        ledger: reports usage to the other managers.
        recount: corrects usage that managers did not report before they died.
        wakes: wakes the leader's reclaimer.
    """

    followers: Sequence[StoreFollower]
    ledger: SharedLedger
    recount: UsageRecount
    wakes: WakeBroadcast

    @classmethod
    def of(
        cls, metadata: Metadata, registry: Registry, cache: CacheManager, wakes: WakeBroadcast, clock: Clock
    ) -> Sharing | None:
        """Return the components that a shared store needs, None for a store of this manager alone."""
        store, caches = metadata.store, cache.open_caches
        if not isinstance(store, RedisStore) or not isinstance(metadata.usage, SharedLedger):
            return None
        followers = [
            StoreFollower.of(each, caches, have_flags=registry.tags > 0) for each in (store, *store.others.values())
        ]
        watches = [metadata.eviction, *(each.eviction for each in metadata.block_stores.values())]
        for watch in filter(None, watches):
            watch.listeners.append(lambda _keys: caches.invalidate_all())
        return cls(followers, metadata.usage, UsageRecount(registry, caches, metadata.usage, clock), wakes)

    def is_coherent(self, store: str) -> bool:
        """Return whether changes of blocks in a store by other managers arrive right now."""
        return any(each.invalidations.is_live for each in self.followers if each.name == store)


class EventPublication(NamedTuple):
    """What publishes the blocks that can be read.

    Attributes:
        feed: follows them.
        sockets: where it publishes; they are not open yet.
    """

    feed: StorageEvents
    sockets: Sequence[StorageEventSocket]


@dataclass(frozen=True, slots=True)
class _ComponentFactory:
    """Builds each component over the store, the registry and the settings."""

    metadata: Metadata
    registry: Registry
    storages: StorageDirectory
    leadership: Leadership
    clock: Clock
    settings: Settings

    def disk(self) -> MetadataDisk:
        return MetadataDisk(self.metadata.reserve, self.storages, self.clock)

    def cache(self, budget: CacheBudget, events: EventLog, pressure: WritePressure, disk: MetadataDisk) -> CacheManager:
        cache = CacheManager(
            self.registry,
            self.storages,
            self.clock,
            new_backend=self.metadata.new_backend,
            store=self.metadata.store,
            usage=self.metadata.usage,
            budget=budget,
            events=events,
            disk=disk,
            on_pressure=pressure.report,
        )
        check = WatermarkCheck(self.registry, cache.usage, cache.open_caches.key_counts)
        cache.set_watermark_check(check.is_above_watermark)
        cache.missing.corruption.most_per_minute = self.settings.corrupt_reports_per_minute
        return cache

    def deletions(self, cache: CacheManager, events: EventLog, turns: Pacer) -> DeletionExecutor:
        workers, is_configured = self.settings.deletion_workers, self.registry.storages.is_configured
        deletions = DeletionExecutor(
            storages=self.storages,
            clock=self.clock,
            workers_per_storage=workers,
            events=events,
            is_configured=is_configured,
            turns=turns,
            doubts=lambda: self.storages.doubts,
        )
        deletions.serve(cache)
        return deletions

    def margins(self, disk: MetadataDisk) -> FreeMargins:
        return FreeMargins(LargestBlocks(self.registry).of, disk.reserved_bytes, now=self.clock.now)

    def reclaimer(
        self,
        cache: CacheManager,
        on_evicted: Callable[[EvictionRecord], None],
        turns: Pacer,
        margins: FreeMargins,
    ) -> Reclaimer:
        find_group, limits = self.registry.groups.find, partial(_limits, self.registry)
        media = MediaPressure(self.storages.health, margins, LargestBlocks(self.registry).of, self.clock)
        return Reclaimer(cache.indexes, find_group, limits, self.clock, on_evicted, turns=turns, media=media)

    def wakes(self, reclaimer: Reclaimer) -> WakeBroadcast:
        store, leadership = self.metadata.store, self.leadership
        # Without a shared store this manager's reclaimer is the only one.
        return WakeBroadcast(
            store.table("wakes"),
            reclaimer.wake,
            lambda: leadership.is_leader or not store.is_shared,
            lambda storage: self.storages.report_unwritable(storage, is_full=True),
        )

    def configure_slot_reuse(self) -> None:
        """Set when, and in which leader's term, slots of packed files are allocated again."""
        reuse, leadership = self.storages.slot_reuse, self.leadership
        reuse.grace_seconds = self.settings.slot_reuse_grace_ms / 1000
        reuse.now = self.clock.now
        # Not its token, which a store that went back in time gives again.
        reuse.term = lambda: leadership.terms if leadership.is_leader else None

    def times(self) -> StorageTimes | None:
        journal = self.metadata.journal
        return StorageTimes(self.storages, journal) if journal is not None else None

    def notes(self, cache: CacheManager) -> FinishNotes | None:
        journal = self.metadata.journal
        if not self.settings.finish_notes or journal is None:
            return None
        notes = FinishNotes(cache.open_caches, self.registry, self.storages, journal, self.clock)
        cache.endings.on_finished = notes.note
        return notes

    def garbage(self, source: GarbageSource, changes: ChangeEvents) -> GarbageCollector:
        rate = self.settings.garbage_blocks_per_second
        return GarbageCollector(source, self.storages, self.clock, blocks_per_second=rate, on_marked=changes.removed)

    def verification(self, garbage: GarbageCollector) -> StorageVerification:
        store, leadership = self.metadata.store, self.leadership
        verification = StorageVerification(self.storages, store, garbage, self.clock, lambda: leadership.is_leader)
        guard = self.metadata.guard
        if isinstance(store, RedisStore) and guard is not None:
            for each in (store, *store.others.values()):
                each.on_new_server(guard.on_new_server)
                each.on_new_server(verification.on_new_server)
            guard.on_lost = verification.doubt
        self.registry.storages.compare = verification.compare_opened
        if self.metadata.journal is not None:
            verification.on_lost = self.metadata.journal.note_blocks
        return verification

    def drains(self, cache: CacheManager, remover: Remover, turns: Pacer) -> StorageDrains:
        return StorageDrains(
            self.registry,
            cache.open_caches,
            remover,
            self.clock,
            is_shared=self.metadata.store.is_shared,
            forget_medium=self.storages.forget,
            give_way=turns.pause,
        )

    def moves(self, turns: Pacer) -> StoreMoves | None:
        open_runs = self.metadata.open_runs
        return StoreMoves(self.registry, open_runs, self.clock, turns.pause) if open_runs is not None else None

    def group_stores(self, moves: StoreMoves | None) -> GroupStoreView:
        return GroupStoreView(self.registry, self.metadata.health_of_stores, moves, self.leadership, self.clock)

    def leaks(self, cache: CacheManager, scrubber: StorageScrubber) -> PoolLeaks:
        return PoolLeaks(
            self.storages.pools, lambda name: sum(cache.usage.bytes_on_storage(name).values()), scrubber, self.clock
        )

    def prober(self, margins: FreeMargins, on_full: Callable[[str], None], cache: CacheManager) -> Prober:
        """Make the prober, which looks at storages that writes failed on, too."""
        interval, timeout = self.settings.probe_interval_ms / 1000, self.settings.probe_timeout_ms / 1000
        prober = Prober(self.storages, self.clock, interval, timeout, margin=margins.of, on_full=on_full)
        cache.set_full_listener(on_full)
        cache.endings.on_failed_writes = partial(_probe_soon, margins, prober)
        return prober

    def storage_events(self, cache: CacheManager, log: EventLog) -> EventPublication:
        instances, resolve = self.registry.instances, cache.open_caches.resolve
        sinks: defaultdict[str, list[StorageEventSink]] = defaultdict(list)
        logged = LoggedStorageEvents(log)
        for name in self.settings.event_instances:
            sinks[name].append(logged)

        def indexes() -> list[OpenIndex]:
            caches = [resolve(each.instance_id) for each in instances.all()] if self._answers_lookups else []
            return [OpenIndex(each.handle, each.placement.store) for each in caches]

        def generation() -> tuple[int, bool]:
            return self.registry.generation, self._answers_lookups

        events = StorageEvents(indexes, generation, self.storages, sinks)
        sockets = []
        for each in self.settings.event_sockets:
            sockets.append(StorageEventSocket(each, partial(events.snapshot, each.instance), self.clock.now))
            sinks[each.instance].append(sockets[-1])
        return EventPublication(events, sockets)

    @property
    def _answers_lookups(self) -> bool:
        return self.leadership.is_leader or not _serves_only_as_leader(self.metadata, self.settings)

    def residency(self) -> Residency:
        settings, registered = self.settings, self.registry.instances.by_id

        def find(instance_id: str) -> Instance | None:
            registration = registered.get(instance_id)
            return registration.instance if registration is not None else None

        limits = ResidencyLimits(settings.residency_timeout_ms / 1000, settings.residency_max_bytes)
        return Residency(self.clock, find, limits, event_times=self._event_times)

    def _event_times(self, instance: Instance, storage_type: StorageType) -> EventTimes | None:
        group = self.registry.groups.find(instance.instance_group_name)
        config = self.registry.storages.find_event_report(group, storage_type) if group is not None else None
        if config is None or not config.is_available:
            return None
        spec = config.spec
        assert isinstance(spec, EventReportStorageSpec)
        return EventTimes(
            heartbeat_timeout_seconds=spec.heartbeat_timeout_ms / 1000,
            cleanup_grace_seconds=spec.cleanup_grace_ms / 1000,
            snapshot_interval_seconds=spec.snapshot_min_interval_ms / 1000,
        )

    def alerts(
        self,
        cache: CacheManager,
        view: UsageView,
        deletions: DeletionExecutor,
        drains: StorageDrains,
        counts: Counts,
        *,
        stores: GroupStoreView,
        residency: Residency,
    ) -> AlertWatch:
        sources = AlertSources(
            cache=cache,
            registry=self.registry,
            view=view,
            storages=self.storages,
            deletions=deletions,
            drains=DrainView(drains, self.storages, deletions, self.leadership),
            leadership=self.leadership,
            lag_seconds=counts.lag.blocked_seconds,
            is_shared=self.metadata.store.is_shared,
            store_health=self.metadata.health,
            shortage=self.metadata.shortage,
            group_stores=stores,
            residency=residency,
        )
        return AlertWatch(sources, self.clock.now)


@dataclass(frozen=True, slots=True, kw_only=True)
class Components:
    """The components of a manager, without its ports.

    Attributes:
        settings: intervals.
        metadata: the store.
        registry: storages, groups, instances, accounts and keys.
        storages: the open storages.
        leadership: which manager is the leader.
        events: events of blocks.
        cache: blocks.
        reclaimer: evicts above watermarks.
        deletions: deletes bytes and metadata.
        garbage: finds blocks without their prefix or bytes.
        verification: keeps blocks from lookups whose slots may be others' after a restore, and finds those that are.
        times: keeps the store's time on storages; None in memory.
        notes: keeps on storages which blocks were finished; None without `kvcm.storage.finish_notes`, and in
            memory.
        scrubber: finds orphans: bytes without metadata.
        moves: moves blocks between metadata stores, None with one store.
        group_stores: metadata stores of groups, and moves.
        drains: empties storages, and forgets the blocks of removed ones.
        purges: forgets the blocks of memory pools that are gone.
        leaks: frees orphans in memory pools.
        prober: probes the health of storages.
        sharing: for a store that other managers use, too; else None.
        counts: metrics that are always counted.
        audit: makes entries of the audit log.
        audit_log: the audit log.
        clock: time source.
        view: usage and limits.
        alerts: alerts.
        residency: blocks in engines' own memory.
        storage_events: publishes which blocks can be read.
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
    verification: StorageVerification
    times: StorageTimes | None
    notes: FinishNotes | None
    scrubber: StorageScrubber
    moves: StoreMoves | None
    group_stores: GroupStoreView
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
    residency: Residency
    storage_events: EventPublication

    @classmethod
    def build(
        cls,
        *,
        metadata: Metadata,
        registry: Registry,
        storages: StorageDirectory,
        leadership: Leadership,
        clock: Clock,
        settings: Settings,
        audit: AuditTrail,
        audit_log: AuditLog,
    ) -> Components:
        """Build the components over an opened store and a loaded registry."""
        factory = _ComponentFactory(metadata, registry, storages, leadership, clock=clock, settings=settings)
        factory.configure_slot_reuse()
        events = EventLog(settings.event_log_file, settings.event_max_bytes, clock.now)
        changes, counts, budget = ChangeEvents(events), Counts(), CacheBudget(settings.search_cache_bytes)
        turns, pressure = Pacer(), WritePressure()  # eviction and deletion run in turns, with time for requests between
        cache = factory.cache(budget, events, pressure, disk := factory.disk())
        deletions = factory.deletions(cache, events, turns)
        on_evicted = partial(_record_eviction, changes, counts.evictions, deletions.wake)
        reclaimer = factory.reclaimer(cache, on_evicted, turns, margins := factory.margins(disk))
        pressure.connect(wakes := factory.wakes(reclaimer))
        sharing = Sharing.of(metadata, registry, cache, wakes, clock)
        if sharing is not None:
            budget.is_coherent = sharing.is_coherent if settings.search_cache_bytes else lambda _store: False
        source, remover = GarbageSource(cache, registry, metadata.store), Remover(clock, registry.groups.find, events)
        scrubber = StorageScrubber(source, storages, clock, storages.cluster_id)
        drains, view = factory.drains(cache, remover, turns), UsageView(cache, registry, deletions)
        return cls(
            settings=settings,
            metadata=metadata,
            registry=registry,
            storages=storages,
            leadership=leadership,
            events=events,
            cache=cache,
            reclaimer=reclaimer,
            deletions=deletions,
            garbage=(garbage := factory.garbage(source, changes)),
            verification=factory.verification(garbage),
            times=factory.times(),
            notes=factory.notes(cache),
            scrubber=scrubber,
            moves=(moves := factory.moves(turns)),
            group_stores=(group_stores := factory.group_stores(moves)),
            drains=drains,
            purges=PoolPurges(storages.pools, cache.open_caches, remover, clock, turns.pause),
            leaks=factory.leaks(cache, scrubber),
            prober=factory.prober(margins, wakes.request_eviction, cache),
            sharing=sharing,
            counts=counts,
            audit=audit,
            audit_log=audit_log,
            clock=clock,
            view=view,
            residency=(residency := factory.residency()),
            storage_events=factory.storage_events(cache, events),
            alerts=factory.alerts(cache, view, deletions, drains, counts, stores=group_stores, residency=residency),
        )

    def background_tasks(self) -> list[BackgroundTask]:
        """Return the tasks that run while the manager serves."""
        tick_seconds = self.settings.loop_interval_ms / 1000
        task_seconds = _SHARED_TASK_SECONDS if self.metadata.store.is_shared else tick_seconds
        tasks: list[BackgroundTask] = [
            ("election", partial(_every, tick_seconds, self.leadership.tick)),
            ("registry", partial(_every, _REGISTRY_SECONDS, self._refresh)),  # and storages that did not open yet
            ("accesses", partial(_every, _ACCESS_FLUSH_SECONDS, self.cache.accesses.drain)),
            ("expiry", partial(_every, task_seconds, self._if_leader(self.cache.expire))),
            ("removals", partial(_every, task_seconds, self._if_leader(self.cache.purge_removed))),
            ("pools", partial(_every, _POOLS_SECONDS, self._if_leader(self._purge_pools))),
            ("leaks", partial(_every, _POOLS_SECONDS, self._if_leader(self.leaks.check))),
            ("drains", partial(_every, task_seconds, self._if_leader(self._drain))),
            ("reclaim", partial(self.reclaimer.run, lambda: self.leadership.is_leader)),
            ("deletions", partial(self.deletions.run, task_seconds, lambda: self.leadership.is_leader)),
            ("garbage", partial(self.garbage.run, lambda: self.leadership.is_leader)),
            ("unverified", partial(_every, _UNVERIFIED_SECONDS, self.verification.check)),
            ("verification", partial(_every, _UNVERIFIED_SECONDS, self._if_leader(self.verification.verify))),
            ("events", self.events.run),
            ("loop_lag", self.counts.lag.run),
            ("alerts", self.alerts.run),
            ("audit", self.audit_log.run),
            ("keys", partial(_every, _KEYS_SECONDS, self.registry.keys.tidy)),
            ("residency", partial(_every, _RESIDENCY_SECONDS, self._maintain_residency)),
        ]
        if self.storage_events.feed.is_active:
            tasks.append(("storage_events", self.storage_events.feed.run))
            sockets = [each for each in self.storage_events.sockets if each.has_replay]
            tasks += [(f"event_socket_{each.endpoint}", each.run) for each in sockets]
        if self.metadata.eviction is not None:
            tasks.append(("store_policy", self.metadata.eviction.run))
        if self.times is not None:
            tasks.append(("losses", partial(_every, _BEAT_SECONDS, self.times.journal.beat)))
            tasks.append(("storage_times", partial(_every, _TIMES_SECONDS, self._keep_times)))
        if self.notes is not None:
            tasks.append(("finish_notes", partial(_every, _NOTES_SECONDS, self.notes.write)))
            tasks.append(("whole_notes", partial(_every, _WHOLE_NOTES_SECONDS, self._tidy_notes)))
        if (reserve := self.metadata.reserve) is not None:
            tasks.append(("reserve", partial(_every, _RESERVE_SECONDS, partial(asyncio.to_thread, reserve.make))))
        if self.settings.probe_interval_ms:
            tasks.append(("probes", self.prober.run))
        if self.moves is not None:
            resume = partial(self.moves.resume, lambda: self.leadership.is_leader)
            tasks.append(("store_moves", partial(_every, task_seconds, self._if_leader(resume))))
        if self.sharing is not None:
            tasks += self._followers(task_seconds)
            tasks += [
                ("usage", self.sharing.ledger.run),
                ("wakes", self.sharing.wakes.run),
                ("recount", partial(_every, _RECOUNT_SECONDS, self._if_leader(self.sharing.recount.check))),
            ]
        return tasks

    def _followers(self, seconds: float) -> Iterator[BackgroundTask]:
        assert self.sharing is not None
        for each in self.sharing.followers:
            suffix = f"_{each.name}" if each.name else ""
            yield f"invalidations{suffix}", each.invalidations.run
            yield f"flags{suffix}", partial(each.flags.run_while, lambda: self.leadership.is_leader, seconds)
            if (feed := self.storage_events.feed).is_active:
                yield f"new_blocks{suffix}", _new_blocks(each, feed).run
        for store in self.metadata.block_stores.values():
            yield f"store_policy_{store.name}", store.eviction.run
        if self.metadata.block_stores:
            yield "block_stores", partial(_every, _BLOCK_STORES_SECONDS, self.metadata.check_block_stores)

    def _if_leader(self, task: Callable[[], Awaitable[None]]) -> Callable[[], Awaitable[None]]:
        async def run() -> None:
            if self.leadership.is_leader:
                await task()

        return run

    def residency_readings(self) -> Iterator[Reading]:
        """Yield the metrics of blocks in engines' own memory, and of events of storages."""
        yield from self.residency.readings()
        yield from self.storage_events.feed.readings()

    async def _maintain_residency(self) -> None:
        self.residency.expire()
        end = time.monotonic() + _RESIDENCY_SECONDS  # blocks may be dropped faster than their memory is swept
        has_more = True
        while has_more and time.monotonic() < end:
            has_more = self.residency.maintain()
            await asyncio.sleep(0)

    async def _purge_pools(self) -> None:
        await self.purges.resume(lambda: self.leadership.is_leader)

    async def _drain(self) -> None:
        await self.drains.resume(lambda: self.leadership.is_leader)

    async def _refresh(self) -> None:
        await self.registry.refresh()
        self.reclaimer.on_settings_changed(self.registry.generation)

    async def _keep_times(self) -> None:
        if self.times is not None:
            await self.times.keep(is_leader=self.leadership.is_leader)

    async def _tidy_notes(self) -> None:
        if self.notes is not None:
            await self.notes.tidy(is_leader=self.leadership.is_leader)

    async def flush(self) -> None:
        """Flush accesses, usage, notes and the time of the store, before the manager ends."""
        with contextlib.suppress(KvcmError, TimeoutError):
            async with asyncio.timeout(_LAST_CHECK_SECONDS):
                await self._refresh()  # puts back the registry of a store that was emptied a moment ago
                if self.metadata.eviction is not None:
                    await self.metadata.eviction.check()
        with contextlib.suppress(KvcmError):  # a recount corrects usage that the store does not accept now
            await self.cache.accesses.drain()
            if self.sharing is not None:
                await self.sharing.ledger.flush()
        if self.times is not None:
            await self.times.journal.beat()
            await self._keep_times()
        if self.notes is not None:
            with contextlib.suppress(KvcmError, TimeoutError):
                async with asyncio.timeout(_LAST_NOTES_SECONDS):
                    await self.notes.write()

    def labels(self, instance_id: str) -> Mapping[str, str]:
        """Return the labels of an instance's metrics; none if it is not registered."""
        registration = self.registry.instances.by_id.get(instance_id)
        if registration is None:
            return {}
        return {"instance_group": registration.instance.instance_group_name, "instance_id": instance_id}

    def refuse_unless_leading(self, plane: Plane) -> None:
        """Reject a call that only the leader may answer.

        That is so with `kvcm.service.require_leader`, and with a store of this manager's own together with a lock among
        managers: then only the holder of the lock serves (design.md decision 7).

        Raises:
            NotLeaderError: naming the leader's address where it is known.
        """
        if self.serves_only_as_leader:
            refuse_unless_leading(self.leadership, plane)

    @property
    def serves_only_as_leader(self) -> bool:
        """Whether calls are rejected while another manager leads."""
        return _serves_only_as_leader(self.metadata, self.settings)


def _new_blocks(follower: StoreFollower, events: StorageEvents) -> Invalidations:
    """Return what follows the blocks that come to be read in a store, by whichever manager they were written."""

    def on_notice(notice: bytes) -> None:
        for uid, members in noticed_blocks(notice).items():
            events.hint(uid, partial(unpack_keys, members))

    client = follower.client
    return Invalidations(
        client,
        (),
        lambda _keys: None,
        partial(events.compare_all, follower.name),
        channel=channel_of_new(client.prefix),
        on_notice=on_notice,
    )


def _serves_only_as_leader(metadata: Metadata, settings: Settings) -> bool:
    own_store = not metadata.store.is_shared and bool(settings.distributed_lock_uri)
    return settings.require_leader or own_store


async def _every(seconds: float, task: Callable[[], Awaitable[None]]) -> None:
    while True:
        await task()
        await asyncio.sleep(seconds)


def _probe_soon(margins: FreeMargins, prober: Prober, failed: Mapping[str, int]) -> None:
    """Have the storages probed on which engines failed to write so many bytes: they may be full."""
    for storage, size_bytes in failed.items():
        margins.on_failed_write(storage, size_bytes)
        prober.expedite(storage)


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
