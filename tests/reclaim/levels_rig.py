"""A cache of several groups with its reclaimer and its deletions, wired as the product does it, with time injected."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from at_once import now

sys.path.insert(0, str(Path(__file__).parents[1] / "cache"))
from cache_rig import ManagerCore, uris

from kvcm.cache.pins import PinRequest
from kvcm.cache.prefix_match import MatchMode, MatchQuery
from kvcm.cache.write_sessions import NO_HINT, Retention, WriteRequest
from kvcm.model.groups import (
    CacheConfig,
    CachePreferStrategy,
    CacheReclaimStrategy,
    GlobalQuota,
    InstanceGroup,
    InstanceGroupQuota,
    MetaIndexerConfig,
    QuotaConfig,
    TriggerStrategy,
)
from kvcm.model.instances import Instance, LocationSpecGroup, LocationSpecInfo, LocationSpecKind, ModelDeployment
from kvcm.model.keys import BlockMask
from kvcm.model.locations import LocationStatus, decode_chunk
from kvcm.model.storages import DummyStorageSpec, StorageConfig, StorageSpec, StorageType, TairMemPoolStorageSpec
from kvcm.reclaim.needs import Limits, WatermarkCheck
from kvcm.reclaim.reclaimer import EvictionRecord, Reclaimer
from kvcm.reclaim.victims import newly_deleting

__all__ = ["BLOCK", "LEVELS_POOL", "Levels", "group", "instance", "levels"]

BLOCK = 10
"""Bytes of a block of an instance that says nothing else."""

LEVELS_POOL = "pool"
"""A storage of another type than the rest."""


def group(
    name: str = "g",
    blocks: float = 10,
    mark: float = 0.8,
    *,
    hysteresis: float | None = None,
    storages: Sequence[str] = ("a",),
    types: dict[StorageType, int] | None = None,
    used_size: int = 0,
    max_keys: int = 0,
    prefers: CachePreferStrategy = CachePreferStrategy.CPS_PREFER_3FS,
    delay_ms: int = 1000,
    quota: str = "",
    reclaim: dict[str, Any] | None = None,
    **fields: Any,
) -> InstanceGroup:
    """A group that fits so many blocks; `reclaim` and `fields` hold all other settings."""
    trigger = TriggerStrategy(used_size, mark, hysteresis)
    strategy = CacheReclaimStrategy(
        trigger_strategy=trigger, delay_before_delete_ms=delay_ms, **{"trigger_period_seconds": 3600, **(reclaim or {})}
    )
    limits = InstanceGroupQuota(
        int(blocks * BLOCK), tuple(QuotaConfig(kind, size) for kind, size in (types or {}).items())
    )
    config = CacheConfig(strategy, prefers, MetaIndexerConfig(max_keys))
    return InstanceGroup(name, tuple(storages), quota, quota=limits, cache_config=config, **fields)


def instance(
    name: str = "i",
    group_name: str = "g",
    specs: dict[str, int] | None = None,
    groups: dict[str, tuple[str, ...]] | None = None,
    linear: Sequence[str] = (),
) -> Instance:
    """An instance; specs in `linear` are registered as linear-attention state."""
    kinds = dict.fromkeys(linear, LocationSpecKind.LSK_LINEAR_ATTENTION)
    infos = tuple(
        LocationSpecInfo(spec, size, kinds.get(spec, LocationSpecKind.LSK_UNSPECIFIED))
        for spec, size in (specs or {"kv": BLOCK}).items()
    )
    spec_groups = tuple(LocationSpecGroup(each, names) for each, names in (groups or {}).items())
    return Instance("", group_name, name, 16, infos, ModelDeployment("m", "bf16"), spec_groups)


class Levels(ManagerCore):
    """Groups, instances, storages `a` and `b` of one type and `pool` of another, the reclaimer, the deletions.

    Attributes:
        evicted: everything that the reclaimer reported.
    """

    def __init__(
        self,
        groups: Sequence[InstanceGroup],
        instances: Sequence[Instance],
        storages: Sequence[StorageConfig] = (),
        quotas: Sequence[GlobalQuota] = (),
    ) -> None:
        super().__init__()
        self.evicted: list[EvictionRecord] = []
        self.pressure = WatermarkCheck(self.registry, self.manager.usage, self.manager.open_caches.key_counts)
        self.manager.set_watermark_check(self.pressure.is_above_watermark)
        self.reclaimer = self.new_reclaimer()
        specs: dict[str, StorageSpec] = {name: DummyStorageSpec() for name in ("a", "b")}
        specs[LEVELS_POOL] = TairMemPoolStorageSpec(domain="d")
        for config in storages or [StorageConfig(name, spec) for name, spec in specs.items()]:
            now(self.registry.storages.add(config))
        for quota in quotas:
            now(self.registry.quotas.set(quota))
        for each in groups:
            now(self.registry.groups.create(each))
        for registered in instances:
            now(self.manager.register_instance(registered))

    def new_reclaimer(self, reported: Callable[[EvictionRecord], None] | None = None) -> Reclaimer:
        """A reclaimer that knows nothing yet."""
        return Reclaimer(
            self.manager.indexes,
            self.registry.groups.find,
            self._limits,
            self.clock,
            reported or self.evicted.append,
            Random(0),
        )

    def _limits(self) -> Limits:
        return Limits(self.registry.storages.all(), self.registry.quotas.all(), self.registry.groups.all())

    # What clients and operators do.

    async def write(
        self, keys: Sequence[int], to: str = "i", *, retention: Retention = NO_HINT, **fields: Any
    ) -> list[dict[str, str]]:
        """Write a chain; return the uris of the written blocks, by spec. Refusals are raised."""
        started = await self.manager.start_write(self.manager.cache(to), WriteRequest(keys, **fields))
        count = len(started.chunks)
        await self.manager.finish_write(self.manager.cache(to), started.session.id, BlockMask(offset=count), retention)
        return uris(started.chunks)

    async def write_each(self, keys: Sequence[int], to: str = "i", seconds: float = 1.0, **fields: Any) -> None:
        """Write blocks that are no chain, one after the other."""
        for key in keys:
            await self.write([key], to, **fields)
            self.wait(seconds)

    async def fill(self, **blocks: int) -> None:
        """Write so many blocks of each instance, a second after each other."""
        for to, count in blocks.items():
            await self.write_each(range(count), to)

    async def read(self, keys: Sequence[int], to: str = "i") -> int:
        """Match a prefix and write down that it was read; return how many blocks were found."""
        found = await self.manager.match(self.manager.cache(to), MatchQuery(MatchMode.PREFIX_MATCH, keys))
        await self.manager.accesses.drain()
        return len(found.keys)

    async def pin(self, keys: Sequence[int], seconds: int, to: str = "i") -> str:
        """Pin a prefix; return the id of the pin."""
        pin = await self.manager.pin(self.manager.cache(to), PinRequest(keys, "owner", seconds))
        assert pin is not None
        return pin.id

    async def update(self, changed: InstanceGroup) -> None:
        """Replace a group's configuration."""
        current = self.registry.groups.find(changed.name)
        assert current is not None
        await self.registry.groups.update(replace(changed, version=current.version + 1), current.version)

    async def limit_storage(self, name: str, capacity_bytes: int, used_percentage: float = 0.0) -> None:
        """Give a storage a capacity of its own."""
        spec: StorageSpec = TairMemPoolStorageSpec(domain="d") if name == LEVELS_POOL else DummyStorageSpec()
        config = StorageConfig(name, spec, capacity_bytes=capacity_bytes, used_percentage=used_percentage)
        await self.registry.storages.update(config)

    async def without(self, storage: str, write: Callable[[], Any]) -> None:
        """Write while a storage is out of use, so that blocks get a copy elsewhere."""
        await self.registry.storages.set_enabled(storage, enabled=False)
        await write()
        await self.registry.storages.set_enabled(storage, enabled=True)

    # What the leader does.

    async def reclaim(self, after: float = 0.0) -> int:
        """Look some seconds from now until there is nothing to do; return how many blocks were marked."""
        self.wait(after)
        total = 0
        while blocks := await self.reclaimer.reclaim():
            total += blocks
        await self.receive()
        return total

    async def receive(self) -> None:
        """Refresh every index from its store; an index in this process's memory is current anyway."""
        for each in self.manager.indexes():
            await each.meta_index.refresh()

    async def delete(self) -> None:
        """Delete everything that is marked."""
        self.wait(60)
        while await self.executor.run_due():
            pass
        await self.receive()

    # What can be seen.

    async def left(self, keys: Sequence[int], to: str = "i") -> list[int]:
        """Return those of the blocks that can be read."""
        entries = await self.seen(keys, to)
        return [key for key, entry in zip(keys, entries, strict=True) if any(entry.values())]

    async def seen(self, keys: Sequence[int], to: str = "i") -> list[dict[str, str]]:
        """Return per entry of an answer its uris by spec; this counts as no read."""
        found = await self.manager.match(self.manager.cache(to), MatchQuery(MatchMode.BATCH_GET, keys), peek=True)
        return uris(found.chunks)

    async def places(self, key: int, to: str = "i") -> list[str]:
        """Return the storages where a block serves."""
        record = await self.record(key, to)
        locations = record.locations if record is not None else ()
        return [each.storage for each in locations if each.status is LocationStatus.SERVING]

    def used(self, group_name: str = "g") -> int:
        """Return the bytes of a group, marked ones included."""
        return sum(self.manager.group_usage_bytes(group_name).values())

    def remaining(self, to: str = "i") -> int:
        """Return the bytes of an instance without its marked blocks."""
        index = self.manager.cache(to).index
        return sum(index.usage_bytes.values()) - sum(index.deleting_bytes.values())

    def order(self) -> list[int]:
        """Return the keys of the marked blocks, in the order of marking."""
        return [key for each in self.evicted for key in each.keys]

    def reasons(self) -> Counter[str]:
        """Return how many blocks were marked for which reason."""
        counts: Counter[str] = Counter()
        for each in self.evicted:
            counts[each.need.reason.value] += len(each.keys)
        return counts

    def marked_uris(self) -> list[str]:
        """Return the uris of everything that was marked."""
        return [
            spec.uri
            for each in self.evicted
            for change in each.changes
            for place in newly_deleting(change.old, change.new)
            for spec in decode_chunk(place.chunk).specs
        ]

    async def existing(self, uris: Sequence[str], storage: str = "a") -> list[bool]:
        """Return which uris the storage still knows."""
        backend = self.storages.backend(storage)
        assert backend is not None
        return await backend.exists(uris)


@contextmanager
def levels(
    groups: Sequence[InstanceGroup] | InstanceGroup | None = None, instances: Sequence[Instance] | Instance = ()
) -> Iterator[Levels]:
    """A cache inside the block; by default one group `g` with one instance `i`."""
    chosen = [groups] if isinstance(groups, InstanceGroup) else list(groups or [group()])
    registered = [instances] if isinstance(instances, Instance) else list(instances)
    rig = Levels(chosen, registered or [instance()])
    try:
        yield rig
    finally:
        rig.storages.close_all()
