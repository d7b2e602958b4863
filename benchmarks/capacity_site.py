"""A manager process that benchmarks of capacity work on, and what they ask of it.

Every group has one instance of its own name, whose blocks are one part of `BLOCK_BYTES` each. Victims are read off the
manager's own events, in the order in which they were chosen.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import grpc.aio

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "store"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "e2e"))
from manager_site import Manager, code_of, running
from redis_servers import standalone

from kvcm.protocol import admin_service_pb2 as admin_pb
from kvcm.protocol import meta_service_pb2 as pb
from kvcm.protocol.kvcm.v1 import capacity_service_pb2 as capacity_pb
from kvcm.protocol.kvcm.v1.capacity_service_pb2_grpc import CapacityServiceStub

__all__ = ["BLOCK_BYTES", "STORES", "CapacitySite", "GroupShape", "Written", "dummy_storage", "fresh_chains", "sites"]

BLOCK_BYTES = 16384
STORES = ("rocksdb", "redis")
_TRIGGER_SECONDS = 1.0  # a manager looks that often at least
_SETTLE_SECONDS = 60.0
_OFF = 2.0


@dataclass(frozen=True, slots=True)
class GroupShape:
    """A group and its instance.

    Attributes:
        name: of both.
        capacity_blocks: its quota.
        mark: ratio of that at which eviction begins; 2 is never.
        hysteresis: how far eviction goes below that; None is the default.
        policy: of eviction.
        delay_ms: until bytes of evicted blocks are deleted.
        storage: where its blocks lie.
        guaranteed_blocks: of that storage, to this group alone.
    """

    name: str
    capacity_blocks: int
    mark: float = _OFF
    hysteresis: float | None = None
    policy: str = "leaf_lru"
    delay_ms: int = 0
    storage: str = "dummy"
    guaranteed_blocks: int = 0

    def message(self, version: int) -> admin_pb.InstanceGroup:
        """Return it as the wire has it."""
        group = admin_pb.InstanceGroup(name=self.name, storage_candidates=[self.storage], version=version)
        group.max_instance_count, group.quota.capacity = 1, self.capacity_blocks * BLOCK_BYTES
        group.global_quota_group_name = self.name
        reclaim = group.cache_config.reclaim_strategy
        reclaim.storage_unique_name, reclaim.delay_before_delete_ms = self.storage, self.delay_ms
        reclaim.policy.name, reclaim.trigger_strategy.used_percentage = self.policy, self.mark
        if self.hysteresis is not None:
            reclaim.trigger_strategy.hysteresis = self.hysteresis
        if self.guaranteed_blocks:
            kept = self.guaranteed_blocks * BLOCK_BYTES
            group.storage_guarantees.add(storage_unique_name=self.storage, guaranteed_bytes=kept)
        group.cache_config.data_storage_strategy = admin_pb.CPS_PREFER_3FS
        indexer = group.cache_config.meta_indexer_config
        indexer.mutex_shard_num, indexer.meta_storage_backend_config.storage_type = 16, "local"
        indexer.meta_cache_policy_config.type = "LRU"
        return group


class Written(NamedTuple):
    """The outcome of a write.

    Attributes:
        blocks: how many were taken, from the first one on.
        is_refused: whether all or some were refused for lack of capacity.
    """

    blocks: int
    is_refused: bool


def dummy_storage(name: str, capacity_blocks: int = 0) -> admin_pb.StorageConfig:
    """Return a storage that moves no bytes; 0 is no limit of its own."""
    spec = admin_pb.DummyStorageSpec(root_path=name, key_count_per_file=1)
    return admin_pb.StorageConfig(global_unique_name=name, dummy=spec, capacity_bytes=capacity_blocks * BLOCK_BYTES)


def fresh_chains(blocks: int, length: int, seed: int) -> Iterator[list[int]]:
    """Yield chains of new keys, so many blocks in all."""
    source = random.Random(seed)
    for start in range(0, blocks, length):
        yield [source.getrandbits(62) for _ in range(min(length, blocks - start))]


class CapacitySite:
    """The calls to one manager.

    Args:
        store: where its metadata lies.
        manager: the process.
        channel: to its administration.
        events: file of its events.
    """

    def __init__(self, store: str, manager: Manager, channel: grpc.aio.Channel, events: Path) -> None:
        wire = manager.connect()
        self.store = store
        self._meta, self._admin, self._wire = wire.meta, wire.admin, wire
        self._capacity: Any = CapacityServiceStub(channel)  # type: ignore[no-untyped-call]
        self._events = events
        self._versions: dict[str, int] = {}

    async def close(self) -> None:
        """Close the connections."""
        await self._wire.close()

    async def add_storage(self, storage: admin_pb.StorageConfig) -> None:
        """Add a storage."""
        _check(await self._admin.AddStorage(admin_pb.AddStorageRequest(storage=storage)))

    async def create(self, shape: GroupShape) -> None:
        """Create a group and its instance."""
        self._versions[shape.name] = 1
        group = admin_pb.CreateInstanceGroupRequest(instance_group=shape.message(1))
        _check(await self._admin.CreateInstanceGroup(group))
        instance = pb.RegisterInstanceRequest(instance_group=shape.name, instance_id=shape.name, block_size=64)
        instance.model_deployment.model_name, instance.model_deployment.dtype = "model", "bf16"
        instance.location_spec_infos.add(name="kv", size=BLOCK_BYTES)
        _check(await self._meta.RegisterInstance(instance))

    async def change(self, shape: GroupShape) -> None:
        """Change a group."""
        version = self._versions[shape.name]
        self._versions[shape.name] = version + 1
        update = admin_pb.UpdateInstanceGroupRequest(instance_group=shape.message(version + 1), current_version=version)
        _check(await self._admin.UpdateInstanceGroup(update))

    async def write(
        self,
        instance: str,
        keys: Sequence[int],
        parent: int | None = None,
        put: Callable[[Sequence[str]], object] = len,
    ) -> Written:
        """Write new blocks that follow one another.

        Args:
            instance: the instance.
            keys: of the blocks.
            parent: the block before them.
            put: writes the bytes to the uris that it is given.
        """
        request = pb.StartWriteCacheRequest(
            instance_id=instance, block_keys=keys, write_timeout_seconds=60, parent_block_key=parent
        )
        started = await self._meta.StartWriteCache(request)
        if code_of(started) == pb.REACH_MAX_ENTITY_CAPACITY:
            return Written(0, is_refused=True)
        _check(started)
        put([spec.uri for location in started.locations for spec in location.location_specs])
        finish = pb.FinishWriteCacheRequest(instance_id=instance, write_session_id=started.write_session_id)
        finish.success_blocks.offset = len(started.locations)
        _check(await self._meta.FinishWriteCache(finish))
        return Written(len(started.locations), is_refused=len(started.locations) < len(keys))

    async def fill(self, instance: str, blocks: int, seed: int, length: int = 500) -> None:
        """Write so many new blocks; nothing may be refused."""
        for keys in fresh_chains(blocks, length, seed):
            written = await self.write(instance, keys)
            assert not written.is_refused, f"{instance}: refused while it is filled"

    async def read(self, instance: str, keys: Sequence[int], *, peek: bool = False) -> int:
        """Match a prefix; return how many blocks were found. A peek does not count as a read."""
        request = pb.GetCacheLocationRequest(
            instance_id=instance, block_keys=keys, query_type=pb.QT_PREFIX_MATCH, peek=peek
        )
        found = await self._meta.GetCacheLocation(request)
        _check(found)
        return len(found.locations)

    async def blocks(self) -> dict[str, int]:
        """Return the blocks of every instance, those that are being deleted included."""
        usage = await self.usage()
        return {each.instance_id: each.key_count for group in usage.groups for each in group.instances}

    async def usage(self) -> capacity_pb.GetUsageResponse:
        """Return the usage."""
        usage: capacity_pb.GetUsageResponse = await self._capacity.GetUsage(capacity_pb.GetUsageRequest())
        _check(usage)
        return usage

    async def settle(self, seconds: float = 0.0) -> capacity_pb.GetUsageResponse:
        """Wait until nothing was evicted or deleted for some looks of the manager; return the usage then.

        Args:
            seconds: that evicted blocks are kept, beside.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _SETTLE_SECONDS
        quiet = 2 * _TRIGGER_SECONDS + seconds
        usage, since, polls = await self.usage(), loop.time(), 0
        while loop.time() - since < quiet or polls < 5 * quiet:  # time in which the manager stood still does not count
            assert loop.time() < deadline, f"{self.store}: eviction does not come to an end"
            await asyncio.sleep(0.1)
            latest, polls = await self.usage(), polls + 1
            if latest.groups != usage.groups or any(each.total.deleting_bytes for each in latest.groups):
                usage, since, polls = latest, loop.time(), 0
        return usage

    def evicted(self) -> dict[str, list[int]]:
        """Return by instance which blocks were evicted so far, in that order."""
        found: dict[str, list[int]] = {}
        for line in self._events.read_text().splitlines():
            event = json.loads(line)
            if event["type"] == "CacheReclaimSubmit":
                found.setdefault(event["source"], []).extend(event["block_keys"])
        return found


def _check(answer: Any) -> None:
    assert code_of(answer) == pb.OK, answer.header.status


@contextlib.asynccontextmanager
async def sites(*stores: str) -> AsyncIterator[list[CapacitySite]]:
    """Run one manager per store inside the block; each has a storage `dummy`."""
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(_site(store)) for store in stores]


@contextlib.asynccontextmanager
async def _site(store: str) -> AsyncIterator[CapacitySite]:
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvcm-capacity-")))
        if store == "redis":
            uri = stack.enter_context(standalone(directory / "redis")).uri("capacity")
            place = {"kvcm.registry_storage.uri": uri}
        else:
            place = {"kvcm.data_dir": str(directory / "data")}
        events = directory / "events"
        reported = {"kvcm.event.log_file": str(events), "kvcm.event.max_bytes": str(1 << 34)}
        manager = Manager(directory / "manager", {**place, **reported})
        stack.enter_context(running(manager))
        address = f"127.0.0.1:{manager.settings['kvcm.service.admin_rpc_port']}"
        async with grpc.aio.insecure_channel(address) as channel:
            site = CapacitySite(store, manager, channel, events)
            await site.add_storage(dummy_storage("dummy"))
            try:
                yield site
            finally:
                await site.close()
        assert not manager.failures(), f"{store}: the manager logged defects: {manager.failures()[:3]}"
