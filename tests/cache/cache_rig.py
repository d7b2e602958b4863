"""A CacheManager on memory and dummy storages, with time and ids injected."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from random import Random

from at_once import now
from fake_clock import FakeClock

from kvcm.cache.manager import CacheManager
from kvcm.cache.quotas import Ledger
from kvcm.cache.write_sessions import StartedWrite, WriteRequest
from kvcm.index.backends.backend import IndexBackend
from kvcm.index.backends.memory import MemoryBackend
from kvcm.model.groups import (
    CacheConfig,
    CachePreferStrategy,
    CacheReclaimStrategy,
    InstanceGroup,
    InstanceGroupQuota,
    MetaIndexerConfig,
    QuotaConfig,
)
from kvcm.model.instances import Instance, LocationSpecGroup, LocationSpecInfo, ModelDeployment, Placement
from kvcm.model.keys import BlockMask
from kvcm.model.locations import BlockRecord, Location, LocationStatus, SpecUri, encode_chunk
from kvcm.model.storages import DummyStorageSpec, StorageConfig, StorageType, TairMemPoolStorageSpec
from kvcm.protocol import meta_service_pb2
from kvcm.reclaim.deletion_executor import DeletionExecutor
from kvcm.registry.registry import Registry
from kvcm.storage.directory import OPENERS, Opener, StorageDirectory
from kvcm.storage.dummy import DummyStorage
from kvcm.storage.mempool import PoolOpener
from kvcm.store.memory import MemoryStore
from kvcm.store.store import Store

SPECS = {"tp0": 10, "tp1": 10}


@dataclass
class TableView:
    """Storages as a table of speed ranks; a storage without a rank is unavailable."""

    ranks: dict[str, int] = field(default_factory=dict)
    types: dict[str, StorageType] = field(default_factory=dict)
    generation: int = 0
    full: set[str] = field(default_factory=set)
    draining: set[str] = field(default_factory=set)

    def rank(self, storage: str) -> int | None:
        return self.ranks.get(storage)

    def type_of(self, storage: str) -> StorageType | None:
        return self.types.get(storage)

    def is_available(self, storage: str) -> bool:
        return storage in self.ranks

    def is_writable(self, storage: str) -> bool:
        return storage not in self.full

    def is_draining(self, storage: str) -> bool:
        return storage in self.draining

    def backend(self, storage: str) -> None:
        raise AssertionError(f"nothing is opened here, not even {storage}")


def group(
    *,
    storages: Sequence[str] = ("slow", "slow2"),
    capacity: int = 1 << 40,
    quotas: dict[StorageType, int] | None = None,
    strategy: CachePreferStrategy = CachePreferStrategy.CPS_PREFER_3FS,
    delay_ms: int = 2000,
    max_key_count: int = 0,
) -> InstanceGroup:
    return InstanceGroup(
        "group",
        tuple(storages),
        quota=InstanceGroupQuota(capacity, tuple(QuotaConfig(t, limit) for t, limit in (quotas or {}).items())),
        cache_config=CacheConfig(
            CacheReclaimStrategy(delay_before_delete_ms=delay_ms), strategy, MetaIndexerConfig(max_key_count)
        ),
    )


def instance(specs: dict[str, int] | None = None, groups: dict[str, tuple[str, ...]] | None = None) -> Instance:
    return Instance(
        "",
        "group",
        "i",
        16,
        tuple(LocationSpecInfo(name, size) for name, size in (specs or SPECS).items()),
        ModelDeployment("m", "bf16"),
        tuple(LocationSpecGroup(name, names) for name, names in (groups or {}).items()),
    )


def location(
    storage: str,
    specs: Sequence[str] = ("tp0", "tp1"),
    status: LocationStatus = LocationStatus.SERVING,
    storage_type: StorageType = StorageType.ST_DUMMY,
    location_id: str = "l",
) -> Location:
    chunk = encode_chunk(
        storage_type, len(specs), [SpecUri(n, f"dummy://{storage}/{location_id}?size=1") for n in specs]
    )
    return Location(location_id, storage, storage_type, status, tuple(specs), chunk, 10 * len(specs), 0.0)


def _dummy_pool(config: StorageConfig, _cluster_id: str) -> DummyStorage:
    return DummyStorage(config.global_unique_name, "/p/", 1)


class ManagerCore:
    """A manager and everything around it, without storages, groups and instances.

    Args:
        has_pools: whether memory pools are real; else they stand in with dummy addresses.
        usage: what the manager counts with.
        store: of sessions and the like; a memory of its own by default.
        first_id: of those that it makes; the others follow.

    Attributes:
        new_backend: makes the backends of indexes; in memory by default.
        pressed: groups whose writes pressed.
    """

    new_backend: Callable[[Placement], IndexBackend] = staticmethod(lambda _placement: MemoryBackend())

    def __init__(
        self,
        *,
        has_pools: bool = False,
        usage: Ledger | None = None,
        store: Store | None = None,
        first_id: int = 1,
    ) -> None:
        self.clock, self.tables = FakeClock(), store if store is not None else MemoryStore()
        pools = PoolOpener(self.tables.table("pools"), self.clock, Random(0), is_shared=False)
        opener: Opener = pools if has_pools else _dummy_pool
        self.storages = StorageDirectory("cluster", openers={**OPENERS, StorageType.ST_TAIRMEMPOOL: opener})
        uids = count()
        self.registry = Registry(self.storages, draw=lambda _below: next(uids))
        self.executor = DeletionExecutor(self.storages, self.clock)
        self.pressed: list[str] = []
        ids = count(first_id)
        self.manager = CacheManager(
            self.registry,
            self.storages,
            self.clock,
            lambda length: f"{next(ids):0{length}x}",
            self.new_backend,
            store=self.tables,
            usage=usage,
            on_pressure=self.pressed.append,
        )
        self.executor.serve(self.manager)

    def wait(self, seconds: float) -> None:
        self.clock.time += seconds

    async def record(self, key: int, instance_id: str = "i") -> BlockRecord | None:
        (record,) = await self.manager.cache(instance_id).index.get([key])
        return record

    async def statuses(self, keys: Sequence[int]) -> list[list[str]]:
        records = await self.manager.cache("i").index.get(keys)
        return [[place.status.name for place in record.locations] if record else [] for record in records]


class Rig(ManagerCore):
    """A manager with two storages of one type and one of another, a group and an instance."""

    def __init__(
        self,
        configured: InstanceGroup,
        registered: Instance,
        usage: Ledger | None = None,
        store: Store | None = None,
        first_id: int = 1,
    ) -> None:
        super().__init__(usage=usage, store=store, first_id=first_id)
        for name in ("slow", "slow2"):
            now(self.registry.storages.add(StorageConfig(name, DummyStorageSpec())))
        now(self.registry.storages.add(StorageConfig("pool", TairMemPoolStorageSpec(domain="d"))))
        now(self.registry.groups.create(configured))
        now(self.manager.register_instance(registered))

    def enable(self, storage: str, enabled: bool) -> None:
        now(self.registry.storages.set_enabled(storage, enabled=enabled))

    async def start(self, keys: Sequence[int], **fields: object) -> StartedWrite:
        request = WriteRequest(keys, **fields)  # type: ignore[arg-type]
        return await self.manager.start_write(self.manager.cache("i"), request)

    async def store(self, keys: Sequence[int], **fields: object) -> StartedWrite:
        """Write blocks and finish them."""
        started = await self.start(keys, **fields)
        await self.manager.finish_write(
            self.manager.cache("i"), started.session.id, BlockMask(offset=len(started.chunks))
        )
        return started

    @property
    def used_bytes(self) -> int:
        return sum(self.manager.group_usage_bytes("group").values())


@contextmanager
def opened(configured: InstanceGroup | None = None, registered: Instance | None = None) -> Iterator[Rig]:
    """A rig, closed afterwards."""
    rig = Rig(configured or group(), registered or instance())
    try:
        yield rig
    finally:
        rig.storages.close_all()


def uris(chunks: Sequence[bytes]) -> list[dict[str, str]]:
    """Per location its uris by spec, read as a client does."""
    answer = meta_service_pb2.GetCacheLocationResponse.FromString(b"".join(chunks))
    return [{spec.name: spec.uri for spec in each.location_specs} for each in answer.locations]
