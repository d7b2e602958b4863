"""A manager's core without servers: real registry, storages, executor and CacheManager; time and ids are injected."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from at_once import now
from fake_clock import FakeClock

from kvcm.cache.manager import CacheManager
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
from kvcm.model.instances import Instance, LocationSpecGroup, LocationSpecInfo, ModelDeployment
from kvcm.model.storages import (
    DummyStorageSpec,
    NfsStorageSpec,
    StorageConfig,
    StorageType,
    TairMemPoolStorageSpec,
    ThreeFSStorageSpec,
)
from kvcm.protocol import meta_service_pb2
from kvcm.reclaim.deletion_executor import DeletionExecutor
from kvcm.registry.registry import Registry
from kvcm.storage.directory import OPENERS, StorageDirectory
from kvcm.storage.dummy import DummyStorage
from kvcm.store.store import Store
from kvcm.telemetry.events import EventLog

CLUSTER = "cluster-1"

# Kinds that this release cannot open stand in with dummy addresses, so that storages of several speeds exist.
STAND_INS = {
    storage_type: lambda config, cluster: DummyStorage(config.global_unique_name, f"/{cluster}/", 1)
    for storage_type in (StorageType.ST_TAIRMEMPOOL, StorageType.ST_3FS)
}


class CountingIds:
    """Ids in ascending order."""

    def __init__(self) -> None:
        self._last = 0

    def __call__(self, length: int) -> str:
        self._last += 1
        return f"{self._last:0{length}x}"


def mempool(name: str) -> StorageConfig:
    return StorageConfig(name, TairMemPoolStorageSpec(domain="d"))


def hf3fs(name: str) -> StorageConfig:
    return StorageConfig(name, ThreeFSStorageSpec(mountpoint="/m", root_dir="r"))


def dummy(name: str, keys_per_object: int = 1) -> StorageConfig:
    return StorageConfig(name, DummyStorageSpec("/d", keys_per_object))


def nfs(name: str, root: Path, keys_per_file: int) -> StorageConfig:
    return StorageConfig(name, NfsStorageSpec(str(root / name), keys_per_file))


def instance(
    instance_id: str, specs: dict[str, int], groups: dict[str, tuple[str, ...]] | None = None, group: str = "group"
) -> Instance:
    return Instance(
        quota_group_name="",
        instance_group_name=group,
        instance_id=instance_id,
        block_size=16,
        location_spec_infos=tuple(LocationSpecInfo(name, size) for name, size in specs.items()),
        model_deployment=ModelDeployment("model", "bf16"),
        location_spec_groups=tuple(LocationSpecGroup(name, names) for name, names in (groups or {}).items()),
    )


def group_of(
    storages: Sequence[str],
    *,
    capacity: int = 1 << 40,
    quotas: dict[StorageType, int] | None = None,
    strategy: CachePreferStrategy = CachePreferStrategy.CPS_PREFER_3FS,
    delay_ms: int = 1000,
    indexer: MetaIndexerConfig | None = None,
) -> InstanceGroup:
    reclaim = CacheReclaimStrategy(delay_before_delete_ms=delay_ms)
    quota = tuple(QuotaConfig(storage_type, limit) for storage_type, limit in (quotas or {}).items())
    return InstanceGroup(
        "group",
        tuple(storages),
        quota=InstanceGroupQuota(capacity, quota),
        cache_config=CacheConfig(reclaim, strategy, indexer or MetaIndexerConfig()),
    )


class World:
    """The manager's core as `app` wires it."""

    def __init__(
        self,
        group: InstanceGroup,
        instances: Sequence[Instance],
        storages: Sequence[StorageConfig],
        new_backend: Callable[[], IndexBackend] = MemoryBackend,
        *,
        new_events: Callable[[FakeClock], EventLog | None] = lambda _clock: None,
        new_openers: Callable[[FakeClock], Mapping[StorageType, Any]] = lambda _clock: STAND_INS,
        store: Store | None = None,
    ) -> None:
        self.clock = FakeClock()
        self.storages = StorageDirectory(CLUSTER, openers={**OPENERS, **new_openers(self.clock)})
        uids = itertools.count()
        self.registry = Registry(self.storages, draw=lambda _: next(uids))
        self.executor = DeletionExecutor(self.storages, self.clock)
        events = new_events(self.clock)
        self.manager = CacheManager(
            self.registry,
            self.storages,
            self.clock,
            CountingIds(),
            lambda _placement: new_backend(),
            store=store,
            events=events,
        )
        self.executor.serve(self.manager)
        for config in storages:
            now(self.registry.storages.add(config))
        now(self.registry.groups.create(group))
        for each in instances:
            now(self.manager.register_instance(each))

    def close(self) -> None:
        self.storages.close_all()


DecodedChunk = tuple[int, int, tuple[tuple[str, str], ...]]
"""Storage type, spec_size, (spec name, uri) in order."""


def decoded(chunks: Sequence[bytes]) -> list[DecodedChunk]:
    """Read chunks as a client does: as the `locations` of an answer, with protobuf."""
    answer = meta_service_pb2.GetCacheLocationResponse.FromString(b"".join(chunks))
    return [
        (location.type, location.spec_size, tuple((spec.name, spec.uri) for spec in location.location_specs))
        for location in answer.locations
    ]
