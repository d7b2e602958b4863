"""A pool that is configured anew while calls go on with it as it was, where no other manager works on the store."""

from __future__ import annotations

import pytest
from fake_clock import FakeClock
from pool_rig import MIB, NODE, allocation, open_pool, pool_config, report

from kvcm.model.memory_pool import PAGE_BYTES
from kvcm.model.storages import StorageConfig, TairMemPoolStorageSpec
from kvcm.storage.mempool import MempoolStorage
from kvcm.store.memory import MemoryTable


@pytest.fixture
async def old(table: MemoryTable, clock: FakeClock) -> MempoolStorage:
    pool = open_pool(table, clock, is_shared=False)
    await pool.report(report())
    return pool


@pytest.mark.parametrize("seconds", [0, 5], ids=["as it was", "another field"])
async def test_invariant_5_both_see_what_either_does(
    old: MempoolStorage, table: MemoryTable, clock: FakeClock, seconds: int
) -> None:
    """What was freed is free, also where the other one has looked before it was taken."""
    config = StorageConfig("p", TairMemPoolStorageSpec(timeout=seconds, node_id=NODE, capacity_bytes=MIB))
    new = open_pool(table, clock, config, is_shared=False, seed=1)
    new.inherit(old)
    old.close()
    await new.probe()  # looks at every chunk
    uris = await old.allocate(allocation([PAGE_BYTES] * 4))
    assert new.taken_bytes == 4 * PAGE_BYTES
    assert await new.delete(uris) == [None] * 4
    assert await new.exists(uris) == await old.exists(uris) == [False] * 4
    assert new.taken_bytes == old.taken_bytes == 0


async def test_one_of_another_size_takes_nothing_over(
    old: MempoolStorage, table: MemoryTable, clock: FakeClock
) -> None:
    await old.allocate(allocation([1]))
    new = open_pool(table, clock, pool_config(capacity_bytes=2 * MIB), is_shared=False)
    new.inherit(old)
    assert await new.space() == (2 * MIB, 2 * MIB)
