"""What a flood of one-time writes does to a prefix that is read every second, and to groups that share a storage."""

from __future__ import annotations

from collections.abc import AsyncIterator
from itertools import count

import pytest
from eviction_rig import group_of
from index_backends import Rig, opened
from manager_rig import ManagerRig

from kvcm.model.groups import StorageGuarantee
from kvcm.model.locations import LocationStatus
from kvcm.model.storages import DummyStorageSpec, StorageConfig

BLOCK = 10
CACHE = 100  # blocks
HOT = range(1, 9)
CHAIN = 10
GROUPS = [f"g{number}" for number in range(8)]
SHARE = 40  # blocks of a storage per group


@pytest.fixture(params=["memory", "redis"])
async def backends(request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    async with opened(request.param, request) as made:
        yield made


async def hot_blocks_after_a_flood(policy: str, backends: Rig) -> int:
    """Write twenty times what fits while a prefix is read once a second; return how much of that can still be read."""
    group = group_of("g", policy=policy, capacity=CACHE * BLOCK, ratio=0.9, delay_ms=100)
    rig = ManagerRig([StorageConfig("d", DummyStorageSpec())], [group], {"g-i": BLOCK}, backends.fresh)
    keys = count(1000)
    await rig.store("g-i", HOT)
    written = 0
    while written < 20 * CACHE:
        for _ in range(2):
            written += await rig.store("g-i", [next(keys) for _ in range(CHAIN)])
            await rig.settle()
            rig.clock.time += 0.5
            await rig.executor.run_due()
        await rig.read("g-i", HOT)
        await rig.manager.accesses.drain()
    return len((await rig.manager.match("g-i", rig.prefix(HOT), peek=True)).keys)


@pytest.mark.parametrize("backends", ["memory"], indirect=True)
@pytest.mark.parametrize("policy", ["leaf_lru", "lfu", "lru", "s3fifo", "sieve"])
async def test_a_hot_prefix_survives_a_flood(policy: str, backends: Rig) -> None:
    assert await hot_blocks_after_a_flood(policy, backends) == len(HOT)


@pytest.mark.parametrize("backends", ["redis"], indirect=True)
@pytest.mark.parametrize("policy", ["leaf_lru", "s3fifo"])
async def test_a_hot_prefix_survives_over_a_shared_store(policy: str, backends: Rig) -> None:
    assert await hot_blocks_after_a_flood(policy, backends) == len(HOT)


@pytest.mark.parametrize("backends", ["memory"], indirect=True)
async def test_first_in_first_out_loses_it(backends: Rig) -> None:
    """So the flood is one."""
    assert await hot_blocks_after_a_flood("fifo", backends) == 0


@pytest.mark.parametrize("guaranteed", [0, SHARE * 3 // 4])
async def test_a_flooding_group_takes_nothing_from_its_neighbours(guaranteed: int, backends: Rig) -> None:
    """Eight groups on one storage with a capacity: by their guarantees, and by fair shares where there are none."""
    guarantees = [StorageGuarantee("d", guaranteed * BLOCK)] if guaranteed else []
    storage = StorageConfig("d", DummyStorageSpec(), capacity_bytes=len(GROUPS) * SHARE * BLOCK)
    groups = [group_of(name, delay_ms=100, guarantees=guarantees) for name in GROUPS]
    rig = ManagerRig([storage], groups, {f"{name}-i": BLOCK for name in GROUPS}, backends.fresh)
    neighbours, flooding = [f"{name}-i" for name in GROUPS[1:]], f"{GROUPS[0]}-i"
    keys = count(1)
    for neighbour in neighbours:
        for _ in range(SHARE * 3 // 4 // 5):
            assert await rig.store(neighbour, [next(keys) for _ in range(5)]) == 5
    before = {each: await resident(rig, each) for each in neighbours}
    rig.clock.time += 60
    written = 0
    for _ in range(5 * len(GROUPS) * SHARE // CHAIN // 2):
        for _ in range(2):
            written += await rig.store(flooding, [next(keys) for _ in range(CHAIN)])
        await rig.settle()
        rig.clock.time += 0.2
        await rig.executor.run_due()
    assert written > 3 * len(GROUPS) * SHARE
    for neighbour in neighbours:
        assert len(await resident(rig, neighbour)) >= 0.99 * len(before[neighbour])


async def resident(rig: ManagerRig, instance_id: str) -> set[int]:
    """Blocks that can be read."""
    index = rig.index(instance_id)
    found = [key async for page in index.scan() for key in page]
    records = zip(found, await index.get(found), strict=True)
    return {
        key
        for key, record in records
        if record is not None and any(each.status is LocationStatus.SERVING for each in record.locations)
    }
