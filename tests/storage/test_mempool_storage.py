"""A memory pool as the manager knows it: handed out by documents, reported by its host."""

from __future__ import annotations

import asyncio
import errno
from random import Random

import pytest
from fake_clock import FakeClock
from pool_rig import MIB, NODE, SlowTable, allocation, open_pool, pool_config, report, stamp_of, taken_bytes

from kvcm.model.errors import InvalidArgumentError, NotReadyError, StorageIOError, UnsupportedError
from kvcm.model.memory_pool import PAGE_BYTES, pool_bytes
from kvcm.model.storages import StorageConfig, TairMemPoolStorageSpec
from kvcm.model.uri import LocationUri
from kvcm.storage.backend import is_full
from kvcm.storage.mempool import MempoolStorage, PoolOpener
from kvcm.store.memory import MemoryTable
from kvcm.store.redis.client import RedisClient
from kvcm.store.redis.store import RedisStore
from kvcm.store.redis.uri import parse_redis_uri

PAGES = MIB // PAGE_BYTES


async def told(pool: MempoolStorage, generation: int = 1, valid_ms: int = 0) -> MempoolStorage:
    await pool.report(report(generation, valid_ms))
    return pool


async def test_a_pool_that_nobody_told_of_hands_nothing_out_and_says_why(table: MemoryTable, clock: FakeClock) -> None:
    pool = open_pool(table, clock)
    for kind, call in ((StorageIOError, pool.probe()), (NotReadyError, pool.allocate(allocation([1])))):
        with pytest.raises(kind, match=r"storage p: no host agent has told of the pool on node 'node-1' yet"):
            await call


async def test_a_report_is_in_force_as_long_as_it_says_for_every_manager(table: MemoryTable, clock: FakeClock) -> None:
    first, second = await told(open_pool(table, clock), valid_ms=3000), open_pool(table, clock)
    clock.time += 3
    await second.probe()
    assert len(await second.allocate(allocation([1]))) == 1
    clock.time += 1
    for pool in (first, second):
        with pytest.raises(StorageIOError, match="no host agent has told of the pool on node 'node-1' for 4 s"):
            await pool.probe()
        with pytest.raises(NotReadyError, match="for 4 s"):
            await pool.allocate(allocation([1]))
    await told(second, valid_ms=3000)
    await first.probe()


async def test_a_report_without_an_end_stays(table: MemoryTable, clock: FakeClock) -> None:
    pool = await told(open_pool(table, clock))
    clock.time += 1e9
    await pool.probe()


async def test_a_report_without_an_end_leaves_that_of_another_one_in_force(
    table: MemoryTable, clock: FakeClock
) -> None:
    pool = await told(open_pool(table, clock), valid_ms=3000)
    clock.time += 1
    await told(pool)
    clock.time += 3
    with pytest.raises(StorageIOError, match="for 4 s"):
        await pool.probe()
    await told(pool, generation=2)
    clock.time += 1e9
    await pool.probe()


async def test_the_documents_are_the_truth_after_a_restart(table: MemoryTable, clock: FakeClock) -> None:
    pool = await told(open_pool(table, clock))
    uris = await pool.allocate(allocation([PAGE_BYTES] * 5))
    again = open_pool(table, clock, is_shared=False, seed=3)
    assert await again.exists(uris) == [True] * 5
    others = await again.allocate(allocation([PAGE_BYTES] * (PAGES - 5)))
    assert len({LocationUri.parse(uri).offset for uri in [*uris, *others]}) == PAGES
    with pytest.raises(StorageIOError):
        await again.allocate(allocation([1]))


async def test_a_full_pool_says_so_as_a_file_system_would_and_takes_nothing(
    table: MemoryTable, clock: FakeClock
) -> None:
    pool = await told(open_pool(table, clock))
    await pool.allocate(allocation([PAGE_BYTES] * (PAGES - 3)))
    with pytest.raises(StorageIOError, match="the pool has no room for 4096 bytes") as caught:
        await pool.allocate(allocation([PAGE_BYTES] * 4))
    assert is_full(caught.value)
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == errno.ENOSPC
    assert await taken_bytes(pool) == (PAGES - 3) * PAGE_BYTES
    await pool.probe()
    await pool.allocate(allocation([PAGE_BYTES] * 3))
    with pytest.raises(StorageIOError) as full:
        await pool.probe()
    assert is_full(full.value)


@pytest.mark.parametrize("is_shared", [True, False])
async def test_room_that_another_manager_made_is_found(clock: FakeClock, is_shared: bool) -> None:
    table = SlowTable()
    first = await told(open_pool(table, clock, is_shared=is_shared))
    uris = await first.allocate(allocation([PAGE_BYTES] * PAGES))
    second = open_pool(table, clock, seed=1) if is_shared else first
    with pytest.raises(StorageIOError):
        await second.allocate(allocation([1]))
    assert await first.delete(uris[:7]) == [None] * 7
    clock.time += 2
    assert len(await second.allocate(allocation([1] * 7))) == 7


async def test_a_chunk_that_is_all_free_serves_another_size(table: MemoryTable, clock: FakeClock) -> None:
    pool = await told(open_pool(table, clock))
    small = await pool.allocate(allocation([PAGE_BYTES] * PAGES))
    await pool.delete(small)
    large = await pool.allocate(allocation([4 * PAGE_BYTES] * (PAGES // 4)))
    assert min(map(stamp_of, large)) > max(map(stamp_of, small))
    assert await pool.delete(small) == [None] * PAGES
    assert await pool.exists(large) == [True] * (PAGES // 4)


async def test_a_part_that_no_chunk_can_hold_is_refused(table: MemoryTable, clock: FakeClock) -> None:
    pool = await told(open_pool(table, clock))
    with pytest.raises(StorageIOError, match="no room for 20480 bytes"):
        await pool.allocate(allocation([4 * PAGE_BYTES + 1]))


async def test_stamps_grow_when_the_clock_stands_still_or_runs_backwards(table: MemoryTable, clock: FakeClock) -> None:
    pool = await told(open_pool(table, clock))
    seen: dict[int, int] = {}
    for seconds in (0, 0, -1000, 5):
        clock.time += seconds
        uris = await pool.allocate(allocation([PAGE_BYTES] * PAGES))
        for uri in uris:
            offset = LocationUri.parse(uri).offset
            assert stamp_of(uri) > seen.get(offset, 0)
            seen[offset] = stamp_of(uri)
        await pool.delete(uris)


async def test_another_generation_empties_the_pool_and_is_to_be_purged(table: MemoryTable, clock: FakeClock) -> None:
    first, second = await told(open_pool(table, clock)), open_pool(table, clock)
    uris = await second.allocate(allocation([PAGE_BYTES] * PAGES))
    assert not await first.report(report(1))
    assert await first.lost() == 0
    assert await first.report(report(2))
    assert not await second.report(report(2)), "it was told already"
    assert await first.lost() == await second.lost() >= max(map(stamp_of, uris))
    assert await second.exists(uris) == [False] * PAGES
    fresh = await second.allocate(allocation([PAGE_BYTES] * PAGES))
    assert min(map(stamp_of, fresh)) > await first.lost()
    assert await second.delete(uris) == [None] * PAGES
    assert await first.exists(fresh) == [True] * PAGES
    await first.purged(await first.lost())
    assert await second.lost() == 0


async def test_a_new_generation_takes_what_a_fast_clock_gave_out_too(table: MemoryTable, clock: FakeClock) -> None:
    fast = await told(open_pool(table, FakeClock(clock.time + 500), seed=1))
    uris = await fast.allocate(allocation([1]))
    slow = open_pool(table, clock)
    assert await slow.report(report(2))
    assert await slow.exists(uris) == [False]
    assert stamp_of((await slow.allocate(allocation([1])))[0]) > stamp_of(uris[0])


@pytest.mark.parametrize(
    ("wrong", "texts"),
    [
        (report(node_id="other"), ["node_id", "'other'", "'node-1'"]),
        (report(0), ["generation is 0"]),
        (report(capacity_bytes=MIB - 1), ["capacity_bytes", str(MIB - 1), str(MIB)]),
        (report(valid_ms=-1), ["valid_ms is -1", ">= 0", "0 is as the last report said"]),
    ],
)
async def test_a_report_of_another_pool_is_refused(
    table: MemoryTable, clock: FakeClock, wrong: object, texts: list[str]
) -> None:
    pool = open_pool(table, clock)
    with pytest.raises(InvalidArgumentError) as refused:
        await pool.report(wrong)  # type: ignore[arg-type]
    assert [text for text in texts if text not in str(refused.value)] == []
    assert await table.all() == {}


def test_a_pool_without_a_node_cannot_be_opened(table: MemoryTable, clock: FakeClock) -> None:
    config = StorageConfig("p", TairMemPoolStorageSpec(domain="d"))
    with pytest.raises(UnsupportedError, match="needs node_id and capacity_bytes; across hosts use mooncake"):
        PoolOpener(table, clock, Random(0), is_shared=False)(config, "cluster")


async def test_a_pool_of_another_size_begins_empty_with_larger_stamps(table: MemoryTable, clock: FakeClock) -> None:
    """It was removed and added again, as another one."""
    uris = await (await told(open_pool(table, clock))).allocate(allocation([1]))
    other = open_pool(table, clock, pool_config(capacity_bytes=2 * MIB))
    assert await other.exists(uris) == [False]
    assert await taken_bytes(other) == 0
    fresh = await other.allocate(allocation([PAGE_BYTES] * (2 * PAGES)))
    by_offset = {LocationUri.parse(uri).offset: stamp_of(uri) for uri in fresh}
    assert len(by_offset) == 2 * PAGES


async def test_only_its_own_deployment_lists_what_is_taken(table: MemoryTable, clock: FakeClock) -> None:
    pool = await told(open_pool(table, clock))
    await pool.allocate(allocation([1, 2]))
    (page,) = [page async for page in pool.objects("cluster")]
    assert [(each.size_bytes, each.modified_at) for each in page.objects] == [(PAGE_BYTES, clock.time)] * 2
    assert [page async for page in pool.objects("another")] == []
    assert await pool.remove_objects("another", page.objects) == [None, None]
    assert await taken_bytes(pool) == 2 * PAGE_BYTES


async def test_two_managers_over_redis_never_share_a_page(redis_standalone: object, clock: FakeClock) -> None:
    uri = redis_standalone.uri("mempool")  # type: ignore[attr-defined]
    stores = [RedisStore(RedisClient.of(parse_redis_uri(uri))) for _ in range(2)]
    try:
        pools = [open_pool(store.table("pools", 16), clock, seed=seed) for seed, store in enumerate(stores)]
        await told(pools[0])
        answers = await asyncio.gather(*(pool.allocate(allocation([1] * 8)) for pool in pools * 8))
        uris = [uri for answer in answers for uri in answer]
        assert len({LocationUri.parse(uri).offset for uri in uris}) == len(uris) == 128
        await asyncio.gather(pools[0].delete(uris[:100]), pools[1].delete(uris[:100]))
        assert await pools[1].exists(uris) == [False] * 100 + [True] * 28
        assert await taken_bytes(pools[0]) == 28 * PAGE_BYTES
    finally:
        for store in stores:
            await store.close()


def test_a_pool_of_no_whole_pages_is_as_large_as_its_pages() -> None:
    spec = TairMemPoolStorageSpec(node_id=NODE, capacity_bytes=10_000_001)
    report(capacity_bytes=pool_bytes(10_000_001)).check("p", spec)
    with pytest.raises(InvalidArgumentError, match="capacity_bytes is"):
        report(capacity_bytes=pool_bytes(10_000_001) - PAGE_BYTES).check("p", spec)
