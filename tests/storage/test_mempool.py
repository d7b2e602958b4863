"""Memory pools: extents in documents of the store, reported by the host, shared by managers (invariant 5)."""

from __future__ import annotations

import asyncio
import errno
import struct
from collections.abc import Coroutine, Sequence
from random import Random
from typing import Any

import pytest
from fake_clock import FakeClock
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from pool_rig import (
    MIB,
    NODE,
    SlowTable,
    allocation,
    check_address,
    open_pool,
    pages_of,
    pool_config,
    report,
    stamp_of,
    taken_bytes,
)
from thoroughness import examples

from kvcm.model.errors import InvalidArgumentError, NotReadyError, StorageIOError, UnsupportedError
from kvcm.model.storages import PAGE_BYTES, StorageConfig, StorageType, TairMemPoolStorageSpec, pool_bytes
from kvcm.model.uri import LocationUri
from kvcm.storage.backend import StoredObject, is_full, object_name
from kvcm.storage.directory import OPENERS, StorageDirectory
from kvcm.storage.mempool import Extent, MempoolStorage, PoolChunk, PoolOpener, PoolReport
from kvcm.store.memory import MemoryTable
from kvcm.store.redis.client import RedisClient
from kvcm.store.redis.store import RedisStore
from kvcm.store.redis.uri import parse_redis_uri

PAGES = MIB // PAGE_BYTES


async def reported(pool: MempoolStorage, generation: int = 1, valid_ms: int = 0) -> MempoolStorage:
    await pool.report(report(generation, valid_ms))
    return pool


@pytest.fixture
async def pool(table: MemoryTable, clock: FakeClock) -> MempoolStorage:
    return await reported(open_pool(table, clock))


async def test_a_pool_without_a_report_hands_nothing_out(table: MemoryTable, clock: FakeClock) -> None:
    pool = open_pool(table, clock)
    for kind, call in ((StorageIOError, pool.probe()), (NotReadyError, pool.allocate(allocation([1])))):
        with pytest.raises(kind, match=r"storage p: no host agent has reported the pool on node 'node-1' yet"):
            await call


async def test_a_report_is_in_force_as_long_as_it_says_for_every_manager(table: MemoryTable, clock: FakeClock) -> None:
    first, second = await reported(open_pool(table, clock), valid_ms=3000), open_pool(table, clock)
    clock.time += 3
    await second.probe()
    assert len(await second.allocate(allocation([1]))) == 1
    clock.time += 1
    for pool in (first, second):
        with pytest.raises(StorageIOError, match="no host agent has reported the pool on node 'node-1' for 4 s"):
            await pool.probe()
        with pytest.raises(NotReadyError, match="for 4 s"):
            await pool.allocate(allocation([1]))
    await reported(second, valid_ms=3000)
    await first.probe()


async def test_a_report_without_an_end_leaves_another_in_force(table: MemoryTable, clock: FakeClock) -> None:
    pool = await reported(open_pool(table, clock), valid_ms=3000)
    clock.time += 1
    await reported(pool)
    clock.time += 3
    with pytest.raises(StorageIOError, match="for 4 s"):
        await pool.probe()
    await reported(pool, generation=2)
    clock.time += 1e9
    await pool.probe()


async def test_a_restart_reads_the_documents(pool: MempoolStorage, table: MemoryTable, clock: FakeClock) -> None:
    uris = await pool.allocate(allocation([PAGE_BYTES] * 5))
    again = open_pool(table, clock, is_shared=False, seed=3)
    assert await again.exists(uris) == [True] * 5
    others = await again.allocate(allocation([PAGE_BYTES] * (PAGES - 5)))
    assert len({LocationUri.parse(uri).offset for uri in [*uris, *others]}) == PAGES
    with pytest.raises(StorageIOError):
        await again.allocate(allocation([1]))


async def test_a_full_pool_says_so_as_a_file_system_would_and_takes_nothing(pool: MempoolStorage) -> None:
    await pool.allocate(allocation([PAGE_BYTES] * (PAGES - 3)))
    with pytest.raises(StorageIOError, match="the pool has no space for 4096 bytes") as caught:
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
async def test_space_that_another_manager_made_is_found(clock: FakeClock, is_shared: bool) -> None:
    table = SlowTable()
    first = await reported(open_pool(table, clock, is_shared=is_shared))
    uris = await first.allocate(allocation([PAGE_BYTES] * PAGES))
    second = open_pool(table, clock, seed=1) if is_shared else first
    with pytest.raises(StorageIOError):
        await second.allocate(allocation([1]))
    assert await first.delete(uris[:7]) == [None] * 7
    clock.time += 2
    assert len(await second.allocate(allocation([1] * 7))) == 7


async def test_a_chunk_that_is_all_free_serves_another_size(pool: MempoolStorage) -> None:
    small = await pool.allocate(allocation([PAGE_BYTES] * PAGES))
    await pool.delete(small)
    large = await pool.allocate(allocation([4 * PAGE_BYTES] * (PAGES // 4)))
    assert min(map(stamp_of, large)) > max(map(stamp_of, small))
    assert await pool.delete(small) == [None] * PAGES
    assert await pool.exists(large) == [True] * (PAGES // 4)


async def test_a_part_that_no_chunk_can_hold_is_refused(pool: MempoolStorage) -> None:
    with pytest.raises(StorageIOError, match="no space for 20480 bytes"):
        await pool.allocate(allocation([4 * PAGE_BYTES + 1]))


async def test_stamps_grow_when_the_clock_stops_or_runs_backwards(pool: MempoolStorage, clock: FakeClock) -> None:
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
    first, second = await reported(open_pool(table, clock)), open_pool(table, clock)
    uris = await second.allocate(allocation([PAGE_BYTES] * PAGES))
    assert not await first.report(report(1))
    assert await first.lost_stamp() == 0
    assert await first.report(report(2))
    assert not await second.report(report(2)), "the first instance reported it already"
    assert await first.lost_stamp() == await second.lost_stamp() >= max(map(stamp_of, uris))
    assert await second.exists(uris) == [False] * PAGES
    fresh = await second.allocate(allocation([PAGE_BYTES] * PAGES))
    assert min(map(stamp_of, fresh)) > await first.lost_stamp()
    assert await second.delete(uris) == [None] * PAGES
    assert await first.exists(fresh) == [True] * PAGES
    await first.purged(await first.lost_stamp())
    assert await second.lost_stamp() == 0


async def test_a_new_generation_takes_what_a_fast_clock_gave_out_too(table: MemoryTable, clock: FakeClock) -> None:
    fast = await reported(open_pool(table, FakeClock(clock.time + 500), seed=1))
    uris = await fast.allocate(allocation([1]))
    slow = open_pool(table, clock)
    assert await slow.report(report(2))
    assert await slow.exists(uris) == [False]
    assert stamp_of((await slow.allocate(allocation([1])))[0]) > stamp_of(uris[0])


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (report(node_id="other"), "node_id.*'other'.*'node-1'"),
        (report(0), "generation is 0"),
        (report(capacity_bytes=MIB - 1), f"capacity_bytes.*{MIB - 1}.*{MIB}"),
        (report(valid_ms=-1), "valid_ms is -1.*>= 0.*0 is as the last report said"),
    ],
)
async def test_foreign_reports_are_refused(table: MemoryTable, clock: FakeClock, wrong: PoolReport, text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        await open_pool(table, clock).report(wrong)
    assert await table.all() == {}


def test_a_pool_without_a_node_cannot_be_opened(table: MemoryTable, clock: FakeClock) -> None:
    config = StorageConfig("p", TairMemPoolStorageSpec(domain="d"))
    with pytest.raises(UnsupportedError, match="needs node_id and capacity_bytes; across hosts use mooncake"):
        PoolOpener(table, clock, Random(0), is_shared=False)(config, "cluster")


async def test_a_pool_of_another_size_begins_empty_with_larger_stamps(table: MemoryTable, clock: FakeClock) -> None:
    """It was removed and added again, as another one."""
    uris = await (await reported(open_pool(table, clock))).allocate(allocation([1]))
    other = open_pool(table, clock, pool_config(capacity_bytes=2 * MIB))
    assert await other.exists(uris) == [False]
    assert await taken_bytes(other) == 0
    fresh = await other.allocate(allocation([PAGE_BYTES] * (2 * PAGES)))
    by_offset = {LocationUri.parse(uri).offset: stamp_of(uri) for uri in fresh}
    assert len(by_offset) == 2 * PAGES


async def test_only_its_own_deployment_lists_allocated_pages(pool: MempoolStorage, clock: FakeClock) -> None:
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
        await reported(pools[0])
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


# ── Documents of a removed pool are deleted ──


async def test_other_managers_find_out_and_stamps_go_on_growing(table: MemoryTable, clock: FakeClock) -> None:
    pool, other = open_pool(table, clock), open_pool(table, clock)
    await pool.report(report(7))
    before = [stamp_of(uri) for uri in await other.allocate(allocation([PAGE_BYTES] * 8))]
    clock.time += 1
    await pool.forget(clock.time)
    assert await table.all() == {}
    assert not (await other.refresh()).generation
    await other.report(report(8))
    uris = await other.allocate(allocation([PAGE_BYTES] * 8))
    assert min(map(stamp_of, uris)) > max(before)
    assert await open_pool(table, clock).exists(uris) == [True] * 8  # invariant 5


async def test_a_pool_that_was_added_again_stays(pool: MempoolStorage, table: MemoryTable, clock: FakeClock) -> None:
    uris = await pool.allocate(allocation([PAGE_BYTES] * 8))
    await pool.forget(clock.time - 1)
    assert await open_pool(table, clock).exists(uris) == [True] * 8
    assert (await pool.refresh()).why_not_usable(NODE, clock.time) == ""


@pytest.mark.parametrize("name", ["p", "p/0"])
async def test_unreadable_documents_stay(pool: MempoolStorage, table: MemoryTable, clock: FakeClock, name: str) -> None:
    await pool.allocate(allocation([PAGE_BYTES] * 1))
    await table.replace(name, await table.get(name), b"of a later release")
    clock.time += 1
    await pool.forget(clock.time)
    assert await table.all() == {name: b"of a later release"}


async def test_a_directory_forgets_removed_pools(table: MemoryTable, clock: FakeClock) -> None:
    opener = PoolOpener(table, clock, Random(0), is_shared=False)
    storages = StorageDirectory("cluster", openers={**OPENERS, StorageType.ST_TAIRMEMPOOL: opener})
    config = pool_config(capacity_bytes=MIB)
    storages.open(config)
    removed = storages.pools()["p"]
    await (await reported(removed)).allocate(allocation([PAGE_BYTES] * 8))
    storages.close("p")
    clock.time += 1
    await storages.forget(config, clock.time)
    assert await table.all() == {}
    storages.open(config)
    assert storages.pools()["p"].allocated_bytes == 0
    assert storages.pools()["p"]._chunks is not removed._chunks
    storages.close_all()


# ── The order in which memory of a pool is handed out ──


CHUNK_PAGES = 16
CHUNK = PoolChunk(CHUNK_PAGES * PAGE_BYTES)
LARGE = 64 * MIB  # capacity: 64 chunks of 256 pages


def pages(extents: list[Extent]) -> list[int]:
    return [extent.offset // PAGE_BYTES for extent in extents]


def stored(chunk: PoolChunk) -> PoolChunk:
    return PoolChunk.decoded(chunk.encoded(), chunk.size_bytes, 0)


def test_a_chunk_knows_its_last_allocation_when_all_is_free() -> None:
    chunk, taken = CHUNK.allocate(PAGE_BYTES, 3, 1)
    chunk, taken = stored(chunk.free(taken)).allocate(2 * PAGE_BYTES, 2, 1)
    assert pages(taken) == [4, 6]  # extents of another size, the first whole one behind
    chunk, taken = stored(chunk.free(taken)).allocate(CHUNK_PAGES * PAGE_BYTES, 1, 1)
    assert pages(taken) == [0]


def test_documents_of_before_begin_at_the_beginning() -> None:
    header = struct.pack("<B7xQQQ", 1, CHUNK_PAGES * PAGE_BYTES, PAGE_BYTES, 5)
    stamps = struct.pack(f"<{CHUNK_PAGES}Q", 5, *(CHUNK_PAGES - 1) * [0])
    chunk = PoolChunk.decoded(header + stamps, CHUNK_PAGES * PAGE_BYTES, 0)
    assert pages(chunk.allocate(PAGE_BYTES, 2, 1)[1]) == [1, 2]


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), max_size=40), st.randoms(use_true_random=False))
def test_invariant_5_no_page_is_handed_out_twice_nor_lost(steps: list[tuple[int, int]], random: Random) -> None:
    chunk, live, since = CHUNK, {}, 0
    for wanted, freed in steps:
        chunk, taken = stored(chunk).allocate(PAGE_BYTES, wanted, 1)
        assert len(taken) == min(wanted, CHUNK_PAGES - len(live))
        assert not {extent.offset for extent in taken} & live.keys()
        free = [page for page in range(since, since + CHUNK_PAGES) if page % CHUNK_PAGES * PAGE_BYTES not in live]
        assert pages(taken) == [page % CHUNK_PAGES for page in free[:wanted]]
        since = (pages(taken)[-1] + 1) if taken else since
        live.update({extent.offset: extent for extent in taken})
        gone = random.sample(sorted(live), min(freed, len(live)))
        chunk = chunk.free([live.pop(offset) for offset in gone])


@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize("batch", [1, 7, 64])
async def test_a_stopped_writer_does_not_keep_a_pool_from_taking_blocks(is_shared: bool, batch: int) -> None:
    """Its pages are free and locked: a client that gets them fails and frees them. Another client gets others in the
    end, also where its chunk has nothing else free."""
    pool = open_pool(MemoryTable(), FakeClock(), pool_config(capacity_bytes=LARGE), is_shared=is_shared, seed=batch)
    await pool.report(report(capacity_bytes=LARGE))
    stopped = await pool.allocate(allocation([PAGE_BYTES] * 100))
    locked = {LocationUri.parse(uri).offset for uri in stopped}
    await pool.allocate(allocation([PAGE_BYTES] * 156))  # the rest of that chunk
    await pool.delete(stopped)
    failed = saved = 0
    for _ in range(40):
        uris = await pool.allocate(allocation([PAGE_BYTES] * batch))
        if locked.isdisjoint(LocationUri.parse(uri).offset for uri in uris):
            saved += 1
        else:
            failed += 1
            await pool.delete(uris)
    assert saved >= 3 * failed, (saved, failed)  # the chunk is tried again after every other one


# ── A pool that is configured again while calls with its old configuration go on ──


@pytest.fixture
async def old(table: MemoryTable, clock: FakeClock) -> MempoolStorage:
    return await reported(open_pool(table, clock, is_shared=False))


@pytest.mark.parametrize("seconds", [0, 5], ids=["as it was", "another field"])
async def test_invariant_5_both_see_each_other(
    old: MempoolStorage, table: MemoryTable, clock: FakeClock, seconds: int
) -> None:
    """Freed pages are free, also where the other manager read the chunk before their allocation."""
    config = StorageConfig("p", TairMemPoolStorageSpec(timeout=seconds, node_id=NODE, capacity_bytes=MIB))
    new = open_pool(table, clock, config, is_shared=False, seed=1)
    new.take_over(old)
    old.close()
    await new.probe()  # looks at every chunk
    uris = await old.allocate(allocation([PAGE_BYTES] * 4))
    assert new.allocated_bytes == 4 * PAGE_BYTES
    assert await new.delete(uris) == [None] * 4
    assert await new.exists(uris) == await old.exists(uris) == [False] * 4
    assert new.allocated_bytes == old.allocated_bytes == 0


async def test_a_pool_of_another_size_takes_nothing(old: MempoolStorage, table: MemoryTable, clock: FakeClock) -> None:
    await old.allocate(allocation([1]))
    new = open_pool(table, clock, pool_config(capacity_bytes=2 * MIB), is_shared=False)
    new.take_over(old)
    assert await new.space() == (2 * MIB, 2 * MIB)


# ── Invariant 5 for memory pools ──


SIZES = st.lists(st.sampled_from([0, 1, 4096, 4097, 9000, 16384]), max_size=40)
MANAGERS = st.integers(0, 1)


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.table = SlowTable()
        self.clock = FakeClock()
        self.pools = [self.open(0), self.open(1)]
        self.generation = 1
        self.live: set[str] = set()
        self.dead: list[str] = []
        self.leaked: list[str] = []
        self.stamps: dict[int, int] = {}  # largest ever given, by page
        self.may_leak = False
        self.run(self.pools[0].report(report(self.generation)))

    def open(self, seed: int) -> MempoolStorage:
        return open_pool(self.table, self.clock, seed=seed)

    def run(self, *work: Coroutine[Any, Any, Any]) -> list[Any]:
        async def together() -> list[Any]:
            return await asyncio.gather(*work, return_exceptions=True)

        results = self.loop.run_until_complete(together())
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, StorageIOError):
                raise result
        return results

    def note(self, uris: Sequence[str]) -> None:
        for uri in uris:
            check_address(uri)
            for page in pages_of(uri):
                assert stamp_of(uri) > self.stamps.get(page, 0), "stamps grow with every allocation of a page"
                self.stamps[page] = stamp_of(uri)
        self.live.update(uris)

    @rule(sizes=st.lists(st.tuples(MANAGERS, SIZES), min_size=1, max_size=4), seconds=st.sampled_from([0.0, 1.5]))
    def allocate(self, sizes: list[tuple[int, list[int]]], seconds: float) -> None:
        """Several at once, on both managers."""
        self.clock.time += seconds
        results = self.run(*(self.pools[each].allocate(allocation(wanted)) for each, wanted in sizes))
        for (_, wanted), result in zip(sizes, results, strict=True):
            if not isinstance(result, StorageIOError):
                assert [LocationUri.parse(uri).size for uri in result] == wanted
                self.note(result)

    @rule(manager=MANAGERS, data=st.data())
    def delete(self, manager: int, data: st.DataObject) -> None:
        """Delete live parts and deleted ones: repeated and late deletions free no pages of another block."""
        gone = data.draw(st.lists(st.sampled_from(sorted(self.live)), unique=True)) if self.live else []
        late = data.draw(st.lists(st.sampled_from(self.dead), max_size=8)) if self.dead else []
        (reasons,) = self.run(self.pools[manager].delete([*gone, *late, *gone]))
        assert reasons == [None] * (2 * len(gone) + len(late))
        self.live.difference_update(gone)
        self.dead += gone

    @rule(manager=MANAGERS, sizes=SIZES, other=SIZES)
    def abandon(self, manager: int, sizes: list[int], other: list[int]) -> None:
        """A caller that hangs up while others allocate: it leaves nothing behind."""

        async def cancelled() -> None:
            task = asyncio.ensure_future(self.pools[manager].allocate(allocation(sizes)))
            for _ in range(3):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            if not task.cancelled() and task.exception() is None:
                self.note(task.result())

        _, result = self.run(cancelled(), self.pools[1 - manager].allocate(allocation(other)))
        if not isinstance(result, StorageIOError):
            self.note(result)
        for _ in range(400):  # the pool frees its pages in the background
            self.run(asyncio.sleep(0))

    @rule(manager=MANAGERS, sizes=SIZES, failures=st.integers(1, 3))
    def fail(self, manager: int, sizes: list[int], failures: int) -> None:
        """The store carries out the call, and reports a failure."""
        self.table.failures = failures
        (result,) = self.run(self.pools[manager].allocate(allocation(sizes)))
        self.table.failures = 0
        if isinstance(result, StorageIOError):
            self.may_leak = True
        else:
            self.note(result)

    @rule(manager=MANAGERS, data=st.data())
    def crash(self, manager: int, data: st.DataObject) -> None:
        """A manager dies between taking memory and storing the blocks; the next one knows nothing."""
        lost = data.draw(st.lists(st.sampled_from(sorted(self.live)), unique=True)) if self.live else []
        self.live.difference_update(lost)
        self.leaked += lost
        self.may_leak |= bool(lost)
        self.pools[manager] = self.open(len(self.dead))

    @rule(manager=MANAGERS)
    def scrub(self, manager: int) -> None:
        """What no block names is freed, and nothing else."""
        (listed,) = self.run(self.list_objects(manager))
        known = {object_name(uri) for uri in self.live}
        orphans = [each for each in listed if each.name not in known]
        self.run(self.pools[manager].remove_objects("cluster", orphans))
        self.end_leaks()

    def end_leaks(self) -> None:
        self.dead += self.leaked
        self.leaked.clear()
        self.may_leak = False

    async def list_objects(self, manager: int) -> list[StoredObject]:
        return [each async for page in self.pools[manager].objects("cluster") for each in page.objects]

    @rule(manager=MANAGERS, skew=st.sampled_from([-3600.0, 0.0, 0.1]))
    def reboot(self, manager: int, skew: float) -> None:
        """Another generation: everything that was given out is gone, whatever the clock says."""
        self.clock.time += skew
        self.generation += 1
        assert self.run(self.pools[manager].report(report(self.generation))) == [True]
        self.clock.time -= skew
        self.dead += sorted(self.live)
        self.live.clear()
        self.end_leaks()

    @invariant()
    def no_page_belongs_to_two(self) -> None:
        pages = [page for uri in self.live for page in pages_of(uri)]
        assert len(pages) == len(set(pages))

    @invariant()
    def allocated_pages_are_those_of_live_parts(self) -> None:
        live_bytes = PAGE_BYTES * sum(len(pages_of(uri)) for uri in self.live)
        (taken,) = self.run(taken_bytes(self.pools[0]))
        assert taken >= live_bytes if self.may_leak else taken == live_bytes
        (exist,) = self.run(self.pools[1].exists([*sorted(self.live), *self.dead[-20:]]))
        assert exist == [True] * len(self.live) + [False] * len(self.dead[-20:])
        assert taken <= MIB

    def teardown(self) -> None:
        self.loop.close()


_REPRODUCIBLE = settings(phases=[Phase.explicit, Phase.generate], deadline=None, derandomize=True)
PoolMachine.TestCase.settings = settings(_REPRODUCIBLE, max_examples=examples(40), stateful_step_count=15)
TestPools = PoolMachine.TestCase
