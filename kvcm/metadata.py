"""Where a deployment's metadata is kept, opened as the settings say.

`kvcm.registry_storage.uri` decides (design.md decision 6): a redis uri for a store that managers share, `local:///path`
for a RocksDB there, nothing for a RocksDB in the data directory, and for the process's memory when there is none.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from kvcm.cache.shared_usage import SharedLedger
from kvcm.cache.usage import Ledger, UsageLedger
from kvcm.config import ConfigError, Settings
from kvcm.index.backends.backend import IndexBackend
from kvcm.index.backends.memory import MemoryBackend
from kvcm.index.backends.redis import RedisBackend
from kvcm.index.backends.rocks import load_index
from kvcm.model.clock import Clock
from kvcm.model.instances import Placement
from kvcm.store.file_lease import FileLease
from kvcm.store.memory import MemoryLease, MemoryStore
from kvcm.store.redis.client import RedisClient
from kvcm.store.redis.lease import RedisLease
from kvcm.store.redis.quota import QuotaCounters
from kvcm.store.redis.store import RedisStore
from kvcm.store.redis.uri import RedisSettings, parse_redis_uri
from kvcm.store.rocks.progress import LoadProgress
from kvcm.store.rocks.store import RocksStore
from kvcm.store.store import Lease, Store
from kvcm.telemetry.metrics_values import Histogram

__all__ = ["Metadata", "local_directory", "open_metadata"]


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
