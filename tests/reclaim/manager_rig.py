"""A cache with its reclaimer and its deletions on storages, groups and backends of the test's choice."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from levels_rig import Levels

from kvcm.cache.prefix_match import MatchMode, MatchQuery
from kvcm.index.backends.backend import IndexBackend
from kvcm.index.backends.memory import MemoryBackend
from kvcm.index.meta_index import MetaIndex
from kvcm.model.errors import CapacityError
from kvcm.model.groups import GlobalQuota, InstanceGroup
from kvcm.model.instances import Instance, LocationSpecInfo, ModelDeployment
from kvcm.model.locations import BlockRecord
from kvcm.model.storages import StorageConfig

__all__ = ["ManagerRig"]


class ManagerRig(Levels):
    """A manager's core on storages that move no bytes; memory pools stand in with dummy addresses.

    Args:
        storages: with their limits.
        groups: of instances.
        block_bytes: of a block, by instance; an instance's id begins with the name of its group and `-`.
        new_backend: makes index backends.
        quotas: of several groups together.
    """

    def __init__(
        self,
        storages: Sequence[StorageConfig],
        groups: Sequence[InstanceGroup],
        block_bytes: dict[str, int],
        new_backend: Callable[[], IndexBackend] = MemoryBackend,
        quotas: Sequence[GlobalQuota] = (),
    ) -> None:
        self.new_backend = lambda _placement: new_backend()
        deployment = ModelDeployment("m", "bf16")
        instances = [
            Instance("", name.split("-")[0], name, 16, (LocationSpecInfo("kv", size),), deployment)
            for name, size in block_bytes.items()
        ]
        super().__init__(groups, instances, storages, quotas)
        self.reclaimer.update_orders()

    def index(self, instance_id: str) -> MetaIndex:
        return self.manager.cache(instance_id).index

    async def records(self, instance_id: str) -> dict[int, BlockRecord]:
        index = self.index(instance_id)
        keys = [key async for page in index.scan() for key in page]
        records = zip(keys, await index.get(keys), strict=True)
        return {key: record for key, record in records if record is not None}

    async def store(self, instance_id: str, keys: Sequence[int]) -> int:
        """Write the part of a chain that fits; return the number of blocks that were stored now."""
        try:
            return len(await self.write(keys, instance_id))
        except CapacityError:
            return 0

    async def read(self, instance_id: str, keys: Sequence[int]) -> int:  # type: ignore[override]
        """Match a prefix; return how many blocks of it can be read. The manager records the reads later."""
        return len((await self.manager.match(self.manager.cache(instance_id), self.prefix(keys))).keys)

    async def settle(self) -> int:
        """Reclaim until nothing is left to do."""
        return await self.reclaim()

    @staticmethod
    def prefix(keys: Sequence[int]) -> MatchQuery:
        """The query for a prefix."""
        return MatchQuery(MatchMode.PREFIX_MATCH, keys)
