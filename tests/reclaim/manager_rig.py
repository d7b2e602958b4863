"""A CacheManager with its reclaimer and its deletion executor, over any index backend; time and ids are injected."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from random import Random

from at_once import now
from fake_clock import FakeClock

from kvcm.cache.manager import CacheManager
from kvcm.cache.match import MatchMode, MatchQuery
from kvcm.cache.sessions import WriteRequest
from kvcm.index.backends.backend import IndexBackend
from kvcm.index.backends.memory import MemoryBackend
from kvcm.index.meta_index import MetaIndex
from kvcm.model.errors import CapacityError
from kvcm.model.groups import GlobalQuota, InstanceGroup
from kvcm.model.instances import Instance, LocationSpecInfo, ModelDeployment
from kvcm.model.masks import BlockMask
from kvcm.model.storages import StorageConfig, StorageType
from kvcm.reclaim.evicted import Evicted
from kvcm.reclaim.executor import DeletionExecutor
from kvcm.reclaim.needs import Limits
from kvcm.reclaim.reclaimer import Reclaimer
from kvcm.registry.registry import Registry
from kvcm.storage.directory import OPENERS, StorageDirectory
from kvcm.storage.dummy import DummyStorage

__all__ = ["ManagerRig"]

_STAND_INS = {StorageType.ST_TAIRMEMPOOL: lambda config, _: DummyStorage(config.global_unique_name, "/p/", 1)}


class ManagerRig:
    """A manager's core on storages that move no bytes; memory pools stand in with dummy addresses.

    Args:
        storages: with their limits.
        groups: of instances.
        block_bytes: of a block, by instance; an instance's id begins with the name of its group and `-`.
        new_backend: makes index backends.
        quotas: of several groups together.

    Attributes:
        evicted: what the reclaimer told.
    """

    def __init__(
        self,
        storages: Sequence[StorageConfig],
        groups: Sequence[InstanceGroup],
        block_bytes: dict[str, int],
        new_backend: Callable[[], IndexBackend] = MemoryBackend,
        quotas: Sequence[GlobalQuota] = (),
    ) -> None:
        self.clock = FakeClock()
        self.evicted: list[Evicted] = []
        self.storages = StorageDirectory("cluster", openers={**OPENERS, **_STAND_INS})
        self.registry = Registry(self.storages)
        self.executor = DeletionExecutor(self.storages, self.clock)
        ids = count(1)
        self.manager = CacheManager(
            self.registry,
            self.storages,
            self.clock,
            lambda length: f"{next(ids):0{length}x}",
            lambda _placement: new_backend(),
        )
        self.executor.serve(self.manager)
        self.reclaimer = Reclaimer(
            self.manager.indexes,
            self.registry.groups.find,
            lambda: Limits(self.registry.storages.all(), self.registry.quotas.all()),
            self.clock,
            self.evicted.append,
            Random(7),
        )
        for config in storages:
            now(self.registry.storages.add(config))
        for quota in quotas:
            now(self.registry.quotas.set(quota))
        for group in groups:
            now(self.registry.groups.create(group))
        for instance_id, size in block_bytes.items():
            spec, group_name = LocationSpecInfo("kv", size), instance_id.split("-")[0]
            now(
                self.manager.register_instance(
                    Instance("", group_name, instance_id, 16, (spec,), ModelDeployment("m", "bf16"))
                )
            )
        self.reclaimer.follow()

    def index(self, instance_id: str) -> MetaIndex:
        return self.manager.cache(instance_id).index

    async def store(self, instance_id: str, keys: Sequence[int]) -> int:
        """Write a chain as far as there is room; return the number of blocks that were stored now."""
        try:
            started = await self.manager.start_write(instance_id, WriteRequest(keys))
        except CapacityError:
            return 0
        mask = BlockMask(offset=len(started.chunks))
        await self.manager.finish_write(instance_id, started.session.id, mask)
        return len(started.chunks)

    async def read(self, instance_id: str, keys: Sequence[int]) -> int:
        """Match a prefix; return how many blocks of it can be read."""
        return len((await self.manager.match(instance_id, self.prefix(keys))).keys)

    @staticmethod
    def prefix(keys: Sequence[int]) -> MatchQuery:
        """The query for a prefix."""
        return MatchQuery(MatchMode.PREFIX_MATCH, keys)

    async def settle(self) -> int:
        """Reclaim until nothing is left to do."""
        total = 0
        while blocks := await self.reclaimer.look():
            total += blocks
        return total
