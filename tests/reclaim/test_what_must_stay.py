"""What nothing is gained by stays, and what cannot go does not keep others from going."""

from __future__ import annotations

from dataclasses import replace

import pytest
from eviction_rig import BLOCK, EvictionRig, group_of

from kvcm.model.groups import EvictionPolicy
from kvcm.model.locations import BlockRecord, LocationStatus
from kvcm.model.storages import DummyStorageSpec, StorageConfig, StorageType
from kvcm.reclaim.needs import Limits

FOR_EVER = 1e12


@pytest.mark.parametrize("policy", ["leaf_lru", "lru", "sieve"])
@pytest.mark.parametrize("is_pinned", [True, False], ids=["pinned", "writing"])
async def test_a_type_that_can_give_nothing_costs_no_other_type(policy: str, is_pinned: bool) -> None:
    """What is above its mark is pinned, or just being written: nothing elsewhere would help."""
    group = group_of(policy=policy, ratio=0.5, quotas={StorageType.ST_DUMMY: 10 * BLOCK})
    rig = EvictionRig({"g": group})
    index = rig.add()
    status = LocationStatus.SERVING if is_pinned else LocationStatus.WRITING
    full = BlockRecord(None, 0, (rig.place(status=status, pinned_until=FOR_EVER if is_pinned else 0.0),))
    other = BlockRecord(None, 0, (rig.place(storage="n", kind=StorageType.ST_NFS),))
    await index.put(dict.fromkeys(range(1, 9), full) | dict.fromkeys(range(100, 140), other))
    assert await rig.settle() == []
    assert rig.reclaimer.stats.unmet == {"type": 8 * BLOCK - 48}


async def test_the_next_group_pays_where_the_first_has_nothing_to_give() -> None:
    """Of a shared storage: the group that is furthest above its share is pinned."""
    storage = StorageConfig("d", DummyStorageSpec(), capacity_bytes=1000, used_percentage=0.87)
    rig = EvictionRig({name: group_of(name) for name in "abc"}, Limits((storage,), ()))
    for name, count, pinned_until in (("a", 49, FOR_EVER), ("b", 39, 0.0), ("c", 2, 0.0)):
        record = BlockRecord(None, 0, (rig.place(pinned_until=pinned_until),))
        await rig.add(name, name).put(dict.fromkeys(range(1, count + 1), record))
    assert len(await rig.settle()) == 5  # of 900 bytes 850 may stay
    assert [evicted.instance.instance_id for evicted in rig.evicted] == ["b"]
    assert not rig.reclaimer.stats.unmet


def expiring(seconds: int, delay_ms: int = 0) -> EvictionRig:
    group = group_of(delay_ms=delay_ms)
    strategy = replace(group.cache_config.reclaim_strategy, policy=EvictionPolicy("ttl", seconds))
    return EvictionRig({"g": replace(group, cache_config=replace(group.cache_config, reclaim_strategy=strategy))})


async def test_a_block_that_is_written_anew_while_its_bytes_are_deleted_is_young() -> None:
    rig = expiring(100, delay_ms=60_000)
    index = rig.add()
    await rig.write(index, [1])
    rig.clock.time += 101
    assert await rig.settle() == [1]
    rig.clock.time += 10
    await rig.write(index, [1])
    assert await rig.settle() == []
    rig.clock.time += 101
    assert await rig.settle() == [1]


async def test_pinned_blocks_do_not_keep_those_behind_them_from_expiring() -> None:
    rig = expiring(100)
    index = rig.add()
    await index.put(dict.fromkeys(range(1, 101), BlockRecord(None, 0, (rig.place(pinned_until=FOR_EVER),))))
    await rig.write(index, [1000])
    rig.clock.time += 101
    assert await rig.settle() == [1000]


@pytest.mark.parametrize("policy", ["leaf_lru", "lru"])
async def test_blocks_that_follow_each_other_in_a_circle_end_no_look(policy: str) -> None:
    """Writers can say so: whoever climbs a chain comes to an end nevertheless."""
    group = group_of(policy=policy, ratio=0.5, quotas={StorageType.ST_DUMMY: 10 * BLOCK})
    rig = EvictionRig({"g": group})
    index = rig.add()
    elsewhere = (rig.place(storage="n", kind=StorageType.ST_NFS),)
    chained = {1: BlockRecord(2, 1, elsewhere), 2: BlockRecord(1, 1, elsewhere), 3: BlockRecord(1, 2, elsewhere)}
    stuck = BlockRecord(None, 0, (rig.place(pinned_until=FOR_EVER),))
    await index.put(chained | dict.fromkeys(range(10, 18), stuck))
    assert await rig.settle() == []
