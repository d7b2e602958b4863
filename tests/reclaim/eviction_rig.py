"""A reclaimer over real indexes, with blocks written straight into them and time injected."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from random import Random

from fake_clock import FakeClock

from kvcm.index.backends.backend import IndexBackend
from kvcm.index.backends.memory import MemoryBackend
from kvcm.index.meta_index import IndexHandle, MetaIndex
from kvcm.model.groups import (
    CacheConfig,
    CacheReclaimStrategy,
    EvictionPolicy,
    InstanceGroup,
    InstanceGroupQuota,
    MetaIndexerConfig,
    QuotaConfig,
    StorageGuarantee,
    TriggerStrategy,
)
from kvcm.model.instances import Instance, LocationSpecInfo, ModelDeployment
from kvcm.model.locations import BlockRecord, DeletionItem, Location, LocationStatus, SpecUri, encode_chunk
from kvcm.model.storages import DummyStorageSpec, StorageConfig, StorageType
from kvcm.reclaim.deletion_executor import DeletionExecutor
from kvcm.reclaim.needs import Limits
from kvcm.reclaim.reclaimer import EvictionRecord, Reclaimer
from kvcm.storage.directory import StorageDirectory

__all__ = ["BLOCK", "STUCK", "EvictionRig", "group_of", "policy_named"]

BLOCK = 10
"""Bytes of a block."""

STUCK = LocationStatus.WRITING, LocationStatus.DELETING
"""Statuses of what cannot be evicted."""


def policy_named(name: str) -> EvictionPolicy:
    """A policy; an age that nothing reaches where it has to have one."""
    return EvictionPolicy(name, ttl_seconds=1 << 30 if name == "ttl" else 0)


def group_of(
    name: str = "g",
    *,
    policy: str = "leaf_lru",
    capacity: int = 1 << 50,
    ratio: float = 0.0,
    hysteresis: float | None = None,
    used_size: int = 0,
    delay_ms: int = 0,
    quotas: Mapping[StorageType, int] | None = None,
    max_key_count: int = 0,
    storages: Sequence[str] = ("d",),
    global_quota: str = "",
    guarantees: Sequence[StorageGuarantee] = (),
) -> InstanceGroup:
    strategy = CacheReclaimStrategy(
        trigger_strategy=TriggerStrategy(used_size, ratio, hysteresis),
        delay_before_delete_ms=delay_ms,
        policy=policy_named(policy),
    )
    return InstanceGroup(
        name,
        tuple(storages),
        global_quota,
        quota=InstanceGroupQuota(capacity, tuple(QuotaConfig(kind, size) for kind, size in (quotas or {}).items())),
        cache_config=CacheConfig(strategy, meta_indexer_config=MetaIndexerConfig(max_key_count)),
        storage_guarantees=tuple(guarantees),
    )


@dataclass
class EvictionRig:
    """Indexes of some instances, their reclaimer and their executor.

    Attributes:
        groups: by name.
        limits: above the groups.
        kept: the indexes.
        evicted: the evictions that the reclaimer reported.
    """

    groups: dict[str, InstanceGroup]
    limits: Limits = field(default_factory=lambda: Limits((), ()))
    clock: FakeClock = field(default_factory=FakeClock)
    kept: list[IndexHandle] = field(default_factory=list)
    evicted: list[EvictionRecord] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.storages = StorageDirectory("cluster")
        self.storages.open(StorageConfig("d", DummyStorageSpec()))
        self.executor = DeletionExecutor(self.storages, self.clock)
        self.executor.serve(self)
        self.reclaimer = Reclaimer(
            self.indexes, self.groups.get, lambda: self.limits, self.clock, self.evicted.append, Random(7)
        )

    def add(self, instance_id: str = "i", group: str = "g", backend: IndexBackend | None = None) -> MetaIndex:
        """Register an instance of blocks of one spec."""
        spec = LocationSpecInfo("kv", BLOCK)
        instance = Instance("", group, instance_id, 16, (spec,), ModelDeployment("m", "bf16"))
        limit = self.groups[group].cache_config.meta_indexer_config.max_key_count or 1 << 62
        index = MetaIndex(backend if backend is not None else MemoryBackend(), self.storages, max_key_count=limit)
        self.kept.append(IndexHandle(instance, len(self.kept) + 1, index))
        return index

    def indexes(self) -> Iterator[IndexHandle]:
        return iter(self.kept)

    def delay_seconds(self, instance: Instance) -> float:
        strategy = self.groups[instance.instance_group_name].cache_config.reclaim_strategy
        return strategy.delay_before_delete_ms / 1000

    async def abort_overdue_writers(self, uid: int, overdue: Mapping[str, Sequence[int]]) -> None:
        raise AssertionError(f"no session is overdue here, but the executor ends {overdue} in {uid}")

    async def pinned_until(self, items: Sequence[DeletionItem]) -> list[float]:
        return [0.0] * len(items)

    def place(
        self,
        location_id: str = "l",
        status: LocationStatus = LocationStatus.SERVING,
        *,
        storage: str = "d",
        kind: StorageType = StorageType.ST_DUMMY,
        pinned_until: float = 0.0,
    ) -> Location:
        """A location that is written now."""
        uri = f"dummy://{storage}/{location_id}?size={BLOCK}"
        chunk = encode_chunk(kind, 1, [SpecUri("kv", uri)])
        deadline = self.clock.time + 60.0 if status in STUCK else 0.0
        session = "s" if status is LocationStatus.WRITING else ""
        return Location(
            id=location_id,
            storage=storage,
            storage_type=kind,
            status=status,
            spec_names=("kv",),
            chunk=chunk,
            size_bytes=BLOCK,
            written_at=self.clock.time,
            session_id=session,
            deadline=deadline,
            pinned_until=pinned_until,
        )

    async def write(self, index: MetaIndex, chain: Sequence[int], depth: int = 0, parent: int | None = None) -> None:
        """Write the blocks of a chain that cannot be read, as FinishWriteCache does: the head first."""
        await self._write(index, zip(chain, (parent, *chain), count(depth), strict=False))

    async def write_chains(self, index: MetaIndex, chains: Iterable[Sequence[int]]) -> None:
        """Write whole chains at once."""
        await self._write(
            index, [each for chain in chains for each in zip(chain, (None, *chain), count(), strict=False)]
        )

    async def _write(self, index: MetaIndex, blocks: Iterable[tuple[int, int | None, int]]) -> None:
        chained = {key: (parent, depth) for key, parent, depth in blocks}
        place = self.place(f"l{self.clock.time:.0f}")

        def add(key: int, old: BlockRecord | None) -> BlockRecord | None:
            before = old.locations if old is not None else ()
            if any(each.status is LocationStatus.SERVING for each in before):
                return old
            return BlockRecord(*chained[key], (*before, place))

        await index.read_modify_write(chained, add)

    async def read(self, index: MetaIndex, chain: Sequence[int], times: int = 1) -> None:
        """Read the blocks of a chain, as the access recorder drains it: the tail first."""
        await self.touch(index, dict.fromkeys(reversed(chain), times))

    async def touch(self, index: MetaIndex, counts: Mapping[int, int]) -> None:
        name = next(kept.instance.instance_group_name for kept in self.kept if kept.meta_index is index)
        moves = not self.groups[name].policy_of("").orders_by_write
        await index.touch(counts, self.clock.time, moves=moves)

    async def remove(self, index: MetaIndex, keys: Iterable[int]) -> None:
        """Remove blocks, as RemoveCache does."""
        due = self.clock.time + self.delay_seconds(self.kept[0].instance)

        def mark(_key: int, old: BlockRecord | None) -> BlockRecord | None:
            if old is None:
                return None
            return old._replace(
                locations=tuple(
                    each._replace(status=LocationStatus.DELETING, deadline=due)
                    if each.status is LocationStatus.SERVING
                    else each
                    for each in old.locations
                )
            )

        await index.read_modify_write(keys, mark)

    async def settle(self) -> list[int]:
        """Reclaim until nothing is left to do; return the keys of the evicted blocks, in order."""
        before = len(self.evicted)
        while await self.reclaimer.reclaim():
            pass
        return [key for evicted in self.evicted[before:] for key in evicted.keys]

    async def resident(self, index: MetaIndex) -> dict[int, BlockRecord]:
        """The blocks that can be read."""
        keys = [key async for page in index.scan() for key in page]
        records = zip(keys, await index.get(keys), strict=True)
        return {
            key: record
            for key, record in records
            if record is not None and any(each.status is LocationStatus.SERVING for each in record.locations)
        }
