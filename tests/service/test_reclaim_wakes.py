"""What wakes the reclaimer before its time: writes that cross a mark or are refused, and changed settings.

All groups here ask for a look once per hour, so whatever is evicted within seconds was woken for.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from redis_servers import Standalone
from test_several_managers import Node, eventually, finish, node, settings_of, start

from kvcm.protocol import admin_service_pb2 as admin
from kvcm.protocol import meta_service_pb2 as meta
from kvcm.protocol.kvcm.v1 import capacity_service_pb2 as capacity
from kvcm.protocol.kvcm.v1.capacity_service_pb2_grpc import CapacityServiceStub

BLOCK = 100
HOURLY = 3600  # what does not wake is not done while a test waits

Change = Callable[[Node], Awaitable[Any]]


def storage(capacity_bytes: int = 0) -> admin.StorageConfig:
    config = admin.StorageConfig(global_unique_name="d", capacity_bytes=capacity_bytes, used_percentage=0.8)
    config.dummy.SetInParent()
    return config


def group(blocks: int, mark: float, version: int = 1, **policy: Any) -> admin.InstanceGroup:
    made = admin.InstanceGroup(name="g", storage_candidates=["d"], global_quota_group_name="shared", version=version)
    made.quota.capacity = blocks * BLOCK
    config = made.cache_config
    config.data_storage_strategy = admin.CPS_PREFER_3FS
    strategy = config.reclaim_strategy
    strategy.storage_unique_name = "d"
    strategy.trigger_period_seconds = HOURLY
    strategy.trigger_strategy.used_percentage = mark
    strategy.trigger_strategy.hysteresis = 0.0
    strategy.policy.CopyFrom(admin.EvictionPolicy(**policy))
    config.meta_indexer_config.meta_storage_backend_config.storage_type = "local"
    config.meta_indexer_config.meta_cache_policy_config.type = "LRU"
    return made


async def prepare(on: Node, blocks: int, mark: float) -> None:
    """A storage, a group and an instance `i`."""
    answers = [
        await on.admin.AddStorage(admin.AddStorageRequest(storage=storage())),
        await on.admin.CreateInstanceGroup(admin.CreateInstanceGroupRequest(instance_group=group(blocks, mark))),
    ]
    request = meta.RegisterInstanceRequest(instance_group="g", instance_id="i", block_size=16)
    request.location_spec_infos.add(name="kv", size=BLOCK)
    request.model_deployment.model_name, request.model_deployment.dtype = "m", "bf16"
    answers.append(await on.meta.RegisterInstance(request))
    assert {answer.header.status.code for answer in answers} == {meta.OK}, answers


async def written(on: Node, keys: Sequence[int]) -> int:
    """Write one block after the other; return how many were refused."""
    refused = 0
    for key in keys:
        started = await start(on, [key])
        if started.header.status.code == meta.REACH_MAX_ENTITY_CAPACITY:
            refused += 1
        else:
            assert (await finish(on, started, 1)).header.status.code == meta.OK
    return refused


async def count(on: Node, keys: Sequence[int]) -> int:
    """How many of the blocks can be read."""
    request = meta.GetCacheLocationRequest(instance_id="i", block_keys=keys, query_type=meta.QT_BATCH_GET)
    answer = await on.meta.GetCacheLocation(request)
    assert answer.header.status.code == meta.OK, answer.header
    return sum(any(spec.uri for spec in each.location_specs) for each in answer.locations)


async def soon(on: Node, keys: Sequence[int], left: int) -> None:
    async def holds() -> bool:
        return await count(on, keys) == left

    await eventually(holds)


@pytest.fixture
async def alone(tmp_path: Path) -> AsyncIterator[Node]:
    """A manager with a store of its own."""
    async with node(replace(settings_of("", tmp_path), data_dir=str(tmp_path / "data"))) as running:
        yield running


@pytest.fixture
async def pair(redis_standalone: Standalone, tmp_path: Path) -> AsyncIterator[list[Node]]:
    """Two managers; the first one leads."""
    settings = settings_of(redis_standalone.uri(f"t{secrets.token_hex(6)}"), tmp_path)
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(node(settings)) for _ in range(2)]


# Writes.


async def test_a_write_that_crosses_a_mark_wakes_at_once(alone: Node) -> None:
    await prepare(alone, 100, 0.5)
    assert await written(alone, range(50)) == 0
    assert await count(alone, range(51)) == 50
    await written(alone, [50])
    await soon(alone, range(51), 50)


async def test_a_refused_write_wakes_at_once(alone: Node) -> None:
    """While one session wrote everything there was nothing to evict, and its end crosses nothing."""
    await prepare(alone, 10, 1.0)
    everything = await start(alone, list(range(10)))
    await finish(alone, everything, 10)

    async def granted() -> bool:
        return await written(alone, [100]) == 0

    await eventually(granted)


async def test_a_write_at_a_manager_that_does_not_lead_wakes_the_one_that_does(pair: list[Node]) -> None:
    await prepare(pair[0], 100, 0.5)

    async def known() -> bool:
        return (await start(pair[1], [1000])).header.status.code == meta.OK

    await eventually(known)
    await written(pair[1], range(60))
    await soon(pair[1], range(60), 49)  # and one block that is still being written


# Settings.


async def lower_group(on: Node) -> Any:
    changed = group(50, 0.8, version=2)
    return await on.admin.UpdateInstanceGroup(
        admin.UpdateInstanceGroupRequest(instance_group=changed, current_version=1)
    )


async def limit_globally(on: Node) -> Any:
    quota = capacity.GlobalQuota(name="shared", capacity_bytes=50 * BLOCK, used_percentage=0.8)
    return await on_capacity(on, capacity.SetGlobalQuotaRequest(global_quota=quota))


async def on_capacity(on: Node, request: capacity.SetGlobalQuotaRequest) -> Any:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{on.endpoint.admin_rpc_port}") as channel:
        return await CapacityServiceStub(channel).SetGlobalQuota(request)


async def limit_storage(on: Node) -> Any:
    return await on.admin.UpdateStorage(admin.UpdateStorageRequest(storage=storage(50 * BLOCK)))


async def give_an_age(on: Node) -> Any:
    changed = group(1000, 0.9, version=2, name="fifo", ttl_seconds=1)
    return await on.admin.UpdateInstanceGroup(
        admin.UpdateInstanceGroupRequest(instance_group=changed, current_version=1)
    )


CHANGES = pytest.mark.parametrize(
    ("change", "left"), [(lower_group, 40), (limit_globally, range(38, 41)), (limit_storage, range(38, 41))]
)


async def changed_soon(at: Node, seen: Node, change: Change, left: int | range) -> None:
    assert (await change(at)).header.status.code == meta.OK

    async def holds() -> bool:
        found = await count(seen, range(60))
        return found in left if isinstance(left, range) else found == left

    await eventually(holds)


@CHANGES
async def test_a_changed_setting_does_not_wait_for_the_period(alone: Node, change: Change, left: int | range) -> None:
    await prepare(alone, 1000, 0.9)
    await written(alone, range(60))
    await changed_soon(alone, alone, change, left)


@CHANGES
@pytest.mark.parametrize("at", [0, 1])
async def test_a_setting_changed_at_any_manager_does_not_wait_for_the_period(
    pair: list[Node], at: int, change: Change, left: int | range
) -> None:
    await prepare(pair[0], 1000, 0.9)
    await written(pair[0], range(60))
    await changed_soon(pair[at], pair[1 - at], change, left)


async def test_blocks_leave_at_their_age_whatever_the_period(alone: Node) -> None:
    await prepare(alone, 1000, 0.9)
    await give_an_age(alone)
    await written(alone, range(10))

    async def gone() -> bool:
        return await count(alone, range(10)) == 0

    await eventually(gone)
