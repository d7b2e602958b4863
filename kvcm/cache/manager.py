"""CacheManager: the one object that the service asks about blocks."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from kvcm.cache.instance_cache import InstanceCache, OpenCaches
from kvcm.cache.pins import Pin, PinBudgets, PinRequest, Pins
from kvcm.cache.prefix_match import (
    NO_OBSERVER,
    PREFIX_MODES,
    AccessRecorder,
    BlockMeta,
    CacheObserver,
    Match,
    MatchQuery,
    ReadModes,
    block_metas,
    match,
)
from kvcm.cache.quotas import Ledger, LimitCache, MetadataDisk, SharedLedger, UsageLedger
from kvcm.cache.read_leases import ReadLease, ReadLeases
from kvcm.cache.removal import InstanceRemovals, MissingPart, MissingParts, MissingReport, Remover, Reporter
from kvcm.cache.shared_writes import SharedWrites
from kvcm.cache.store_moves import READ_SECONDS
from kvcm.cache.write_plan import NodeStorages, Storages
from kvcm.cache.write_sessions import (
    NO_HINT,
    Creations,
    FinishedWrite,
    OpenSessions,
    ReportedChecksums,
    Retention,
    SessionStore,
    StartedWrite,
    WriteRequest,
    WriteSession,
    WriteSessions,
)
from kvcm.index.backends.backend import IndexBackend
from kvcm.index.backends.memory import MemoryBackend
from kvcm.index.locking import uninterrupted
from kvcm.index.meta_index import IndexHandle
from kvcm.index.search_cache import CacheBudget, StorageView
from kvcm.model.clock import Clock
from kvcm.model.errors import InvalidArgumentError, KvcmError, NotReadyError, UnknownInstanceError
from kvcm.model.groups import EvictionPolicy, InstanceGroup
from kvcm.model.instances import Instance, Placement
from kvcm.model.keys import BlockMask
from kvcm.model.locations import DeletionItem, StorageKey
from kvcm.model.storages import StorageType
from kvcm.registry.registry import Registry
from kvcm.store.memory import MemoryStore
from kvcm.store.redis.store import RedisTable
from kvcm.store.store import BlocksMovedError, Store, Table
from kvcm.telemetry.events import EventLog
from kvcm.telemetry.metrics import current_measures

__all__ = ["CacheManager", "GarbageSource"]

_SESSION_SHARDS = 16
_MOVE_SECONDS = 20.0  # a leader that dies meanwhile has a successor by then
_LEAST_MOVE_PAUSE = 0.005
_MOST_MOVE_PAUSE = 0.1
Result = TypeVar("Result")


def _random_id(length: int) -> str:
    """Return an unguessable id of so many hex digits."""
    return os.urandom(length // 2).hex()  # what `secrets.token_hex` returns, in a third of its time


def _shared_writes(sessions: Table, usage: Ledger) -> SharedWrites | None:
    """Return how writes begin and finish on a shared store, None on a store of this manager alone."""
    if not isinstance(usage, SharedLedger) or not isinstance(sessions, RedisTable):
        return None
    return SharedWrites(sessions.client, sessions, usage)


class _OfType:
    """Those storages of a view that are of one type."""

    def __init__(self, storages: Storages, storage_type: StorageType) -> None:
        self._storages = storages
        self._type = storage_type

    @property
    def generation(self) -> int:
        return self._storages.generation

    def rank(self, storage: str) -> int | None:
        return self._storages.rank(storage) if self._storages.type_of(storage) is self._type else None


class CacheManager:
    """Blocks of all instances.

    A call on blocks takes the cache of its instance, which its handler has resolved, once, with `cache`.

    Args:
        registry: instances and groups.
        storages: the open storages.
        clock: time source.
        new_id: makes a random id of so many hex digits.
        new_backend: makes or finds the backend of an instance's index.
        store: where sessions and leases are kept; in memory by default.
        usage: keeps count of groups; for this process alone by default.
        budget: bytes of the search caches.
        events: receives the removals and expiries of blocks.
        disk: the file system of the metadata; by default they are on none.
        on_pressure: as of `WriteSessions`.

    Attributes:
        open_caches: the cache of every instance, also of those that are being removed.
        cache: from an instance id to its cache; raises UnknownInstanceError.
    """

    def __init__(
        self,
        registry: Registry,
        storages: NodeStorages,
        clock: Clock,
        new_id: Callable[[int], str] = _random_id,
        new_backend: Callable[[Placement], IndexBackend] = lambda _placement: MemoryBackend(),
        *,
        store: Store | None = None,
        usage: Ledger | None = None,
        budget: CacheBudget | None = None,
        events: EventLog | None = None,
        disk: MetadataDisk | None = None,
        on_pressure: Callable[[str], None] = lambda _group_name: None,
    ) -> None:
        self._observer = NO_OBSERVER
        self._registry = registry
        self._groups = registry.groups.by_name
        self._storages = storages
        self._store = store if store is not None else MemoryStore()
        self.usage: Ledger = usage if usage is not None else UsageLedger()
        self.budget = budget if budget is not None else CacheBudget()
        self.open_caches = OpenCaches(registry, storages, new_backend, self.usage, self.budget)
        self.cache = self.open_caches.resolve
        is_shared, leases = self._store.is_shared, self._store.table("leases", _SESSION_SHARDS)
        self.leases = ReadLeases(leases, clock, lambda: new_id(32), is_shared=is_shared)
        self._remover = Remover(clock, registry.groups.find, events)
        sessions = self._store.table("sessions", _SESSION_SHARDS)
        self.endings = SessionStore(sessions, self._find, clock, events, _shared_writes(sessions, self.usage))
        self.open_sessions = OpenSessions(sessions, self.open_caches, clock.now)
        self._sessions = WriteSessions(
            self.endings,
            storages,
            self.usage,
            clock,
            new_id=new_id,
            limits_of=LimitCache(registry).of,
            disk=disk if disk is not None else MetadataDisk(None, storages, clock),
            on_pressure=on_pressure,
        )
        self.pins = Pins(
            table=self._store.table("pins", _SESSION_SHARDS),
            budgets=PinBudgets(self._store.table("pinbudgets", _SESSION_SHARDS), clock),
            find=self._find,
            view=storages.everywhere,
            clock=clock,
            new_id=lambda: new_id(16),
        )
        self.accesses = AccessRecorder(clock, self._policy_of)
        self.missing = MissingParts(storages.everywhere, self._remover, clock)
        self.read_modes = ReadModes(self._store.table("modes"))
        self._removals = InstanceRemovals(
            registry=registry,
            caches=self.open_caches,
            remover=self._remover,
            pins=self.pins,
            read_modes=self.read_modes,
            clock=clock,
            is_shared=is_shared,
        )

    @property
    def creations(self) -> Mapping[str, Creations]:
        """Addresses that storages handed out, by storage."""
        return self._sessions.creations

    def set_watermark_check(self, is_above_watermark: Callable[[InstanceGroup], bool]) -> None:
        """Call `on_pressure` from now on for a group that a write left above a watermark."""
        self._sessions.is_above_watermark = is_above_watermark

    def set_full_listener(self, on_full: Callable[[str], None]) -> None:
        """Call `on_full` from now on with a storage that refused an allocation for lack of space."""
        self._sessions.on_full = on_full

    def set_observer(self, observer: CacheObserver) -> None:
        """Report lookups and write sessions to an observer from now on."""
        self._observer = self.endings.observer = self.accesses.observer = observer

    async def load(self) -> None:
        """Open every index and read the open read leases, before the manager serves."""
        await self.leases.load()
        for _ in self.open_caches.all():
            pass

    async def register_instance(self, instance: Instance) -> Instance:
        """Register an instance and open its index with the settings that its group has now.

        Raises:
            KvcmError: as `InstanceRegistry.register`.
        """
        instance = await self._registry.instances.register(instance)
        self.cache(instance.instance_id)
        return instance

    async def remove_instance(self, instance_id: str) -> None:
        """Forget an instance and begin to delete its blocks; a later registration of the id starts empty.

        What is not marked at once is marked in the background, also after a restart.

        Raises:
            UnknownInstanceError: it is not registered.
        """
        cache = self.cache(instance_id)
        await self._registry.instances.remove(instance_id, cache.placement.uid)  # not a later registration
        # No caller can retry this, so it is not left half done when the caller hangs up.
        with suppress(BlocksMovedError):  # then it goes on in the background
            await uninterrupted(self._removals.begin(cache))
        await self._store.flush()

    async def purge_removed(self) -> None:
        """Go on with the removal of instances: mark the rest, and forget those that have no blocks any more."""
        await self._removals.resume()

    async def match(self, cache: InstanceCache, query: MatchQuery, *, peek: bool = False) -> Match:
        """Return which blocks can be read, and where.

        Args:
            cache: the cache of the instance, from `cache`.
            query: the request.
            peek: whether this does not count as an access.

        Raises:
            NotReadyError: no storage of its group is available.
            InvalidArgumentError: the query does not make sense.
        """
        try:
            view = self._storages.for_node(query.node_id)
            self._check_readable(cache, view)
            if query.mode not in PREFIX_MODES:
                await self.read_modes.record(cache.placement.uid)
            measures = current_measures()
            begin_ns = time.perf_counter_ns() if measures is not None else 0
            try:
                found = await match(cache, query, view)
            except BlocksMovedError:
                found = await self._where_they_lie(cache, lambda cache: match(cache, query, view))
            if measures is not None:
                measures["manager.prefix_match_time_us"] = (time.perf_counter_ns() - begin_ns) / 1000
                measures["manager.prefix_match_len"] = len(found.keys)
        except KvcmError:
            if not peek:
                self._observer.on_lookup_failed(cache.instance, query)
            raise
        if not peek:
            self.accesses.record(cache, found.keys)
            self._observer.on_lookup(cache.instance, query, found)
        return found

    async def answers(
        self,
        cache: InstanceCache,
        keys: Sequence[int],
        *,
        stop_at_miss: bool,
        of_type: StorageType | None = None,
    ) -> Sequence[bytes | None]:
        """Return the encoded locations of every key, None where nothing can be read. This is no access, and no mode in
        which the instance is read.

        Args:
            cache: the cache of the instance, from `cache`.
            keys: block keys.
            stop_at_miss: return only the answers before the first miss.
            of_type: only storages of this type count, with the memory pools of all nodes; None for all storages but
                these pools.

        Raises:
            NotReadyError: no storage of its group is available.
        """
        storages = self._storages.for_node("") if of_type is None else self._storages.everywhere
        self._check_readable(cache, storages)
        view: StorageView = storages if of_type is None else _OfType(storages, of_type)

        def read(cache: InstanceCache) -> Coroutine[Any, Any, list[bytes | None]]:
            return cache.index.answers(keys, stop_at_miss=stop_at_miss, view=view)

        return await self._where_they_lie(cache, read)

    def _check_readable(self, cache: InstanceCache, view: Storages) -> None:
        group = self._groups.get(cache.instance.instance_group_name)
        if group is None:  # it was removed; its blocks are readable as long as they are there
            return
        for name in group.storage_candidates:
            if view.rank(name) is not None or view.is_available(name):  # the first nearly always, without a frame
                return
        raise NotReadyError(f"no storage of group {group.name!r} is available: {list(group.storage_candidates)}")

    async def lease(self, cache: InstanceCache, found: Match, lease_ms: int) -> ReadLease:
        """Pin what a match found, for a bounded time.

        Raises:
            InvalidArgumentError: the duration is out of range.
        """
        lease = await self.leases.acquire(cache, found, lease_ms)
        await self._store.flush()
        return lease

    async def renew_lease(self, cache: InstanceCache, lease_id: str, lease_ms: int) -> ReadLease:
        """Move a read lease's deadline.

        Raises:
            KvcmError: as `ReadLeases.renew`.
        """
        lease = await self.leases.renew(cache, lease_id, lease_ms)
        await self._store.flush()
        return lease

    async def release_lease(self, cache: InstanceCache, lease_id: str) -> None:
        """End a read lease.

        Raises:
            KvcmError: as `ReadLeases.release`.
        """
        await self.leases.release(cache, lease_id)

    async def metas(self, cache: InstanceCache, keys: Sequence[int], mask: BlockMask) -> list[BlockMeta]:
        """Return everything known of the unmasked keys. Never counts as an access."""
        everywhere = self._storages.everywhere
        return await self._where_they_lie(cache, lambda cache: block_metas(cache, keys, mask, everywhere))

    async def start_write(self, cache: InstanceCache, request: WriteRequest) -> StartedWrite:
        """Open a write session.

        Raises:
            UnknownInstanceError: the instance's group was removed.
            KvcmError: as `WriteSessions.start`.
        """
        group = self._group_of(cache)
        await self._expire_if_alone()
        started = await self._where_they_lie(cache, lambda cache: self._sessions.start(cache, group, request))
        self._observer.on_write_started(len(request.keys) - len(started.session.keys) - started.rejected)
        await self._store.flush()
        return started

    async def finish_write(
        self,
        cache: InstanceCache,
        session_id: str,
        success: BlockMask,
        retention: Retention = NO_HINT,
        reported: ReportedChecksums = (),
    ) -> FinishedWrite:
        """End a write session.

        Raises:
            KvcmError: as `SessionStore.finish`.
        """
        await self._expire_if_alone()
        finished = await self._where_they_lie(
            cache, lambda cache: self.endings.finish(cache, session_id, success, retention, reported)
        )
        if (group := self._groups.get(cache.instance.instance_group_name)) is not None:
            self._sessions.check_watermarks(group)
        await self._store.flush()
        return finished

    async def renew_write(self, cache: InstanceCache, session_id: str, timeout_seconds: int) -> WriteSession:
        """Move a write session's deadline.

        Raises:
            KvcmError: as `SessionStore.renew`.
        """
        await self._expire_if_alone()
        session = await self._where_they_lie(
            cache, lambda cache: self.endings.renew(cache, session_id, timeout_seconds)
        )
        await self._store.flush()
        return session

    async def pin(self, cache: InstanceCache, request: PinRequest) -> Pin | None:
        """Keep the longest readable prefix of some keys from eviction; None when nothing can be read.

        Raises:
            UnknownInstanceError: the instance's group was removed.
            KvcmError: as `Pins.pin`.
        """
        group = self._group_of(cache)
        pin = await self._where_they_lie(cache, lambda cache: self.pins.pin(cache, group, request))
        await self._store.flush()
        return pin

    async def unpin(self, cache: InstanceCache, pin_id: str) -> None:
        """End a pin.

        Raises:
            KvcmError: as `Pins.unpin`.
        """
        await self._where_they_lie(cache, lambda cache: self.pins.unpin(cache, pin_id))
        await self._store.flush()

    async def report_missing(self, cache: InstanceCache, parts: Sequence[MissingPart]) -> MissingReport:
        """Check parts that a reader could not read, and remove the locations whose bytes are missing.

        Raises:
            StorageIOError: a storage cannot be asked; nothing is removed.
        """
        reporter = Reporter.of_call()
        report = await self._where_they_lie(cache, lambda cache: self.missing.report(cache, parts, reporter))
        await self._store.flush()
        return report

    async def remove(self, cache: InstanceCache, keys: Sequence[int], mask: BlockMask) -> int:
        """Remove the unmasked keys; unknown ones are fine. Returns the number of locations removed."""
        unmasked = [keys[i] for i in mask.unmasked(len(keys))]
        return await self._durably(cache, lambda cache: self._remover.remove(cache, unmasked))

    async def trim(self, cache: InstanceCache) -> int:
        """Remove every block of an instance."""
        return await self._durably(cache, self._remover.remove_all)

    async def trim_meta(self, cache: InstanceCache) -> int:
        """Drop the metadata of every block and leave the bytes to the scrub."""
        return await self._durably(cache, self._remover.forget_all)

    async def trim_written_between(self, cache: InstanceCache, begin: float, end: float) -> int:
        """Remove what was written at unix times begin ≤ t < end.

        Raises:
            InvalidArgumentError: the range is empty.
        """
        if begin >= end:
            raise InvalidArgumentError(f"begin_timestamp is {begin}, must be below end_timestamp, {end}")
        return await self._durably(
            cache, lambda cache: self._remover.remove_all(cache, lambda each: begin <= each.written_at < end)
        )

    def group_usage_bytes(self, group_name: str) -> Mapping[StorageKey, int]:
        """Return the bytes that a group uses, by place; of a shared store as last read."""
        return self.usage.used(group_name)

    async def expire(self) -> None:
        """End write sessions, read leases and pins that are due, giving way to other requests in between."""
        while await self.endings.expire(most=16):
            pass
        await self.leases.expire()
        await self.pins.expire()

    def _group_of(self, cache: InstanceCache) -> InstanceGroup:
        name = cache.instance.instance_group_name
        group = self._groups.get(name)
        if group is None:
            raise UnknownInstanceError(
                f"instance group {name!r} of instance {cache.instance.instance_id!r} was removed"
            )
        return group

    def _policy_of(self, cache: InstanceCache) -> EvictionPolicy:
        group = self._groups.get(cache.instance.instance_group_name)
        return group.policy_of(cache.instance.instance_id) if group is not None else EvictionPolicy()

    async def _find(self, uid: int) -> InstanceCache | None:
        cache = self.open_caches.by_uid(uid)
        if cache is None and await self._registry.refresh():  # another manager may have registered it a moment ago
            cache = self.open_caches.by_uid(uid)
        return cache

    async def _expire_if_alone(self) -> None:
        """Alone this is exact and costs nothing; with others the leader does it, and records tell what is overdue."""
        if not self._store.is_shared:
            await self.endings.expire()

    async def _durably(self, cache: InstanceCache, remove: Callable[[InstanceCache], Coroutine[Any, Any, int]]) -> int:
        removed = await self._where_they_lie(cache, remove)
        await self._store.flush()
        return removed

    async def _where_they_lie(
        self, cache: InstanceCache, work: Callable[[InstanceCache], Coroutine[Any, Any, Result]]
    ) -> Result:
        """Do something with the blocks of an instance; where they are on their way to another metadata store, wait for
        the end of that, which is short, and do it there.

        Raises:
            BlocksMovedError: it takes too long.
            UnknownInstanceError: the instance was removed meanwhile.
        """
        until = time.monotonic() + _MOVE_SECONDS
        pause = _LEAST_MOVE_PAUSE
        while True:
            try:
                return await work(cache)
            except BlocksMovedError as error:
                if time.monotonic() >= until:
                    raise
                move = error.move
            await asyncio.sleep(pause)
            pause = min(2 * pause, _MOST_MOVE_PAUSE)
            await self._registry.refresh()
            cache = self.cache(cache.instance.instance_id)
            if move and not self._registry.group_stores.is_current(cache.placement.uid, move):
                await cache.index.lift_fence(move)  # its attempt has ended, and so it cannot place the blocks any more

    def indexes(self) -> Iterator[IndexHandle]:
        """Return the index of every instance, also of those that are being removed."""
        return iter(self.open_caches.handles())

    def delay_seconds(self, instance: Instance) -> float:
        """Return how long evicted locations stay readable for readers that have them."""
        return self._remover.delay_seconds(instance)

    async def abort_overdue_writers(self, uid: int, overdue: Mapping[str, Sequence[int]]) -> None:
        """End write sessions that left these blocks writing past their deadline."""
        cache = self.open_caches.by_uid(uid)
        if cache is not None:
            await self.endings.expire_writers(cache, overdue)

    async def pinned_until(self, items: Sequence[DeletionItem]) -> list[float]:
        """Return per item the unix time until which its bytes must stay: a reader or its writer may still use them.

        That the items are deleted is on the disk when this returns: not even after a power cut are they serving again.
        """
        await self._store.sync()
        writers = await self.endings.deadlines_of(item.session_id for item in items if item.session_id)
        moved = max((move.placed_at for move in self._registry.group_stores.moves()), default=0.0)
        readers = [max(moved + READ_SECONDS, until) for until in await self.leases.leased_until(items)]
        if not writers:
            return readers
        return [max(reader, writers.get(item.session_id, 0.0)) for item, reader in zip(items, readers, strict=True)]


# The view of the cache that garbage collection and scrubs have.

_EXPIRE_AT_ONCE = 16


class GarbageSource:
    """Answers garbage collection and scrubs from the cache and the registry.

    Args:
        cache: blocks.
        registry: instances.
        store: where all of it is kept.
    """

    def __init__(self, cache: CacheManager, registry: Registry, store: Store) -> None:
        self._cache = cache
        self._registry = registry
        self._store = store

    def indexes(self) -> Iterator[IndexHandle]:
        """Return the index of every instance, also of those that are being removed."""
        return self._cache.indexes()

    def delay_seconds(self, instance: Instance) -> float:
        """Return how long evicted locations stay readable for readers that have them."""
        return self._cache.delay_seconds(instance)

    async def is_prefix_match_only(self, uid: int) -> bool:
        """Return whether an instance was read by prefix match alone, through whatever manager."""
        return await self._cache.read_modes.is_prefix_match_only(uid)

    async def unreadable_instances(self) -> Sequence[str]:
        """Look for changes of other managers, and return what is stored of instances that cannot be read."""
        await self._registry.refresh()
        return self._registry.unreadable_instances()

    async def overdue_sessions(self) -> int:
        """Return how many write sessions have to be ended."""
        return await self._cache.endings.due_count()

    async def expire_sessions(self) -> int:
        """End the write sessions that are overdue, and return how many there were."""
        ended = 0
        while some := await self._cache.endings.expire(most=_EXPIRE_AT_ONCE):
            ended += some
        return ended

    async def flush(self) -> None:
        """Return when what was changed is as durable as configured."""
        await self._store.flush()
