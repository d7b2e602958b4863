"""Memory that is gone is forgotten, resumably; memory that nobody owns is found and freed (invariants 4 and 5)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
from cache_rig import STAND_INS, group, instance
from fake_clock import FakeClock

from kvcm.cache.garbage_custody import GarbageCustody
from kvcm.cache.manager import CacheManager
from kvcm.cache.pool_purges import PoolPurges
from kvcm.cache.removal import Remover
from kvcm.cache.sessions import StartedWrite, WriteRequest
from kvcm.model.errors import CapacityError
from kvcm.model.locations import LocationStatus, decode_chunk
from kvcm.model.masks import BlockMask
from kvcm.model.storages import DummyStorageSpec, StorageConfig, StorageType, TairMemPoolStorageSpec
from kvcm.reclaim.executor import DeletionExecutor
from kvcm.reclaim.pool_leaks import PoolLeaks
from kvcm.reclaim.scrub import StorageScrubber
from kvcm.registry.registry import Registry
from kvcm.storage.backend import Allocation, Part
from kvcm.storage.directory import OPENERS, StorageDirectory
from kvcm.storage.mempool import MempoolStorage, PoolOpener
from kvcm.storage.pool_state import PoolReport
from kvcm.store.memory import MemoryStore

MIB = 1 << 20
PAGE = 4096


class Rig:
    """A manager with a pool on node `n` and a storage for everybody."""

    def __init__(self) -> None:
        self.clock, self.store = FakeClock(), MemoryStore()
        pools = PoolOpener(self.store.table("pools"), self.clock, Random(0), is_shared=False)
        openers = {**OPENERS, **STAND_INS, StorageType.ST_TAIRMEMPOOL: pools}
        self.storages = StorageDirectory("cluster", openers=openers)
        self.registry = Registry(self.storages)
        ids = iter(range(1, 1 << 30))
        self.pressed: list[str] = []
        self.manager = CacheManager(
            self.registry,
            self.storages,
            self.clock,
            lambda length: f"{next(ids):0{length}x}",
            store=self.store,
            on_pressure=self.pressed.append,
        )
        self.executor = DeletionExecutor(self.storages, self.clock)
        self.executor.serve(self.manager)
        remover = Remover(self.clock, self.registry.groups.find)
        self.purges = PoolPurges(self.storages.pools, self.manager.open_caches, remover, self.clock)
        custody = GarbageCustody(self.manager, self.registry, self.store)
        scrubber = StorageScrubber(custody, self.storages, self.clock, "cluster")
        self.leaks = PoolLeaks(self.storages.pools, self.used, scrubber, self.clock)

    def used(self, storage: str) -> int:
        return sum(self.manager.usage.held_on(storage).values())

    @property
    def pool(self) -> MempoolStorage:
        return self.storages.pools()["p"]

    async def start(self, keys: Sequence[int], instance_id: str = "i") -> StartedWrite:
        return await self.manager.start_write(instance_id, WriteRequest(keys, node_id="n"))

    async def store_blocks(self, keys: Sequence[int], instance_id: str = "i") -> None:
        started = await self.start(keys, instance_id)
        await self.manager.finish_write(instance_id, started.session.id, BlockMask(offset=len(started.chunks)))

    async def statuses(self, keys: Sequence[int]) -> list[list[LocationStatus]]:
        records = await self.manager.cache("i").index.get(keys)
        return [[place.status for place in record.locations] if record else [] for record in records]


@pytest.fixture
async def rig() -> Rig:
    made = Rig()
    pool = TairMemPoolStorageSpec(node_id="n", capacity_bytes=MIB)
    await made.registry.storages.add(StorageConfig("p", pool))
    await made.registry.storages.add(StorageConfig("d", DummyStorageSpec()))
    await made.registry.groups.create(group(storages=("p", "d")))
    await made.manager.register_instance(instance({"tp0": PAGE}))
    await made.pool.report(PoolReport("n", 1, MIB))
    return made


async def test_a_write_that_was_under_way_is_found_by_the_second_look(rig: Rig) -> None:
    await rig.store_blocks([1, 2])
    late = await rig.start([3])
    (record,) = await rig.manager.cache("i").index.get([3])
    await rig.manager.cache("i").index.delete([3])
    await rig.pool.report(PoolReport("n", 2, MIB))
    await rig.purges.go_on()
    assert await rig.statuses([1, 2]) == [[LocationStatus.DELETING]] * 2
    assert record is not None
    await rig.manager.cache("i").index.put({3: record})
    rig.clock.time += 59
    await rig.purges.go_on()
    assert await rig.pool.lost()
    assert await rig.statuses([3]) == [[LocationStatus.WRITING]]
    rig.clock.time += 2
    await rig.purges.go_on()
    assert await rig.pool.lost() == 0
    assert await rig.statuses([3]) == [[LocationStatus.DELETING]]
    await rig.manager.endings.expire()
    rig.clock.time += 60
    await rig.executor.run_due()
    assert rig.used("p") == 0
    assert decode_chunk(late.chunks[0]).storage_type is StorageType.ST_TAIRMEMPOOL


async def test_a_manager_that_no_longer_leads_does_not_say_that_it_is_done(rig: Rig) -> None:
    await rig.store_blocks([1])
    await rig.pool.report(PoolReport("n", 2, MIB))
    for _ in range(3):
        await rig.purges.go_on(lambda: False)
        rig.clock.time += 100
    assert await rig.pool.lost()
    assert await rig.statuses([1]) == [[LocationStatus.SERVING]]


async def test_the_second_generation_while_the_first_is_being_purged_is_purged_too(rig: Rig) -> None:
    await rig.store_blocks([1])
    await rig.pool.report(PoolReport("n", 2, MIB))
    await rig.purges.go_on()
    await rig.store_blocks([2])
    rig.clock.time += 61
    await rig.pool.report(PoolReport("n", 3, MIB))
    await rig.purges.go_on()
    assert await rig.statuses([2]) == [[LocationStatus.DELETING]]
    assert await rig.pool.lost(), "the newer floor has had its first look only"
    rig.clock.time += 61
    await rig.purges.go_on()
    assert await rig.pool.lost() == 0


async def test_memory_of_a_manager_that_died_is_found_and_freed_once_it_is_old(rig: Rig) -> None:
    await rig.store_blocks([1, 2])
    await rig.pool.allocate(Allocation("i", "x", [Part("tp0", key, PAGE) for key in range(5)]))
    assert rig.pool.taken_bytes == 7 * PAGE
    for _ in range(3):
        await rig.leaks.look()
        rig.clock.time += 61
    assert rig.pool.taken_bytes == 7 * PAGE, "a writer may be at it"
    rig.clock.time += 3600
    await rig.leaks.look()
    assert rig.pool.taken_bytes == rig.used("p") == 2 * PAGE
    assert await rig.statuses([1, 2]) == [[LocationStatus.SERVING]] * 2


async def test_a_pool_without_leaks_is_not_scrubbed(rig: Rig, capsys: pytest.CaptureFixture[str]) -> None:
    await rig.store_blocks([1, 2])
    for _ in range(5):
        await rig.leaks.look()
        rig.clock.time += 3601
    assert "storage_scrubbed" not in capsys.readouterr().out


async def test_parts_that_are_not_whole_pages_are_no_leak_and_hide_none(
    rig: Rig, capsys: pytest.CaptureFixture[str]
) -> None:
    """One scrub finds out how much more of the pool is taken than blocks use; a leak is more than that."""

    async def scrubs_within(hours: int) -> int:
        for _ in range(hours):
            rig.clock.time += 3601
            await rig.leaks.look()
        return capsys.readouterr().out.count("storage_scrubbed")

    await rig.manager.register_instance(replace(instance({"tp0": 100}), instance_id="small"))
    await rig.store_blocks(range(3), "small")
    await rig.leaks.look()
    assert await scrubs_within(10) == 1
    await rig.store_blocks(range(3, 50), "small")
    assert await scrubs_within(10) == 0
    await rig.pool.allocate(Allocation("i", "x", [Part("tp0", 0, PAGE)]))
    assert rig.pool.taken_bytes == 51 * PAGE
    assert await scrubs_within(3) == 1
    assert rig.pool.taken_bytes == 50 * PAGE
    assert await scrubs_within(20) == 0
    assert await scrubs_within(10) == 1, "once a day it looks whether that is still so"


async def test_a_write_for_which_there_is_no_memory_after_all_presses_and_goes_elsewhere(rig: Rig) -> None:
    await rig.pool.allocate(Allocation("i", "x", [Part("tp0", key, PAGE) for key in range(MIB // PAGE - 1)]))
    started = await rig.start([1, 2])
    assert [decode_chunk(chunk).storage_type for chunk in started.chunks] == [StorageType.ST_DUMMY] * 2
    assert rig.pressed == ["group"]
    assert rig.pool.taken_bytes == MIB - PAGE, "all or nothing"
    assert rig.used("p") == 0
    rig.storages.set_enabled("d", enabled=False)
    with pytest.raises(CapacityError, match="no room for 4096 bytes: retry shortly"):
        await rig.start([3, 4])


async def test_the_pool_itself_limits_what_groups_may_use(rig: Rig) -> None:
    config = next(each for each in rig.registry.storages.all() if each.global_unique_name == "p")
    assert (config.capacity_bytes, config.limit_bytes) == (0, MIB)
