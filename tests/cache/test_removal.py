"""Removal: delays, parts that are missing or corrupt, and memory that is gone (invariants 4 and 5)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest
from cache_rig import ManagerCore, Rig, group, instance, opened, uris

from kvcm.cache.manager import GarbageSource
from kvcm.cache.pins import PinRequest
from kvcm.cache.prefix_match import MatchMode, MatchQuery
from kvcm.cache.removal import MissingPart, MissingReport, PoolPurges, Remover
from kvcm.cache.write_sessions import LocationChecksums, StartedWrite, WriteRequest
from kvcm.model.errors import InvalidArgumentError, StorageIOError, UnknownInstanceError
from kvcm.model.keys import NO_MASK, BlockMask
from kvcm.model.locations import decode_chunk
from kvcm.model.storages import DummyStorageSpec, StorageConfig, StorageType, TairMemPoolStorageSpec
from kvcm.reclaim.scrub import PoolLeaks, StorageScrubber
from kvcm.storage.backend import Allocation, Part
from kvcm.storage.dummy import DummyStorage
from kvcm.storage.mempool import MempoolStorage, PoolReport

# ── Removal delays ──


async def test_a_removed_key_vanishes_at_once_and_is_freed_after_the_delay() -> None:
    with opened(group(delay_ms=2500)) as rig:
        await rig.store([1, 2])
        assert await rig.manager.remove(rig.manager.cache("i"), [1, 77], NO_MASK) == 1
        found = await rig.manager.match(rig.manager.cache("i"), MatchQuery(MatchMode.BATCH_GET, [1, 2]))
        assert list(found.keys) == [2]
        assert (rig.used_bytes, await rig.statuses([1])) == (40, [["DELETING"]])
        rig.wait(2.499)
        await rig.executor.run_due()
        assert rig.used_bytes == 40
        rig.wait(0.001)
        await rig.executor.run_due()
        assert (rig.used_bytes, await rig.statuses([1, 2])) == (20, [[], ["SERVING"]])


@pytest.mark.parametrize("seconds", [20, 120])
async def test_a_block_in_writing_is_deleted_when_its_session_is_over(seconds: int) -> None:
    """Before that its writer, which may renew the session, could put the bytes back."""
    with opened(group(delay_ms=0)) as rig:
        started = await rig.start([1], timeout_seconds=20)
        await rig.manager.remove(rig.manager.cache("i"), [1], NO_MASK)
        if seconds > 20:
            await rig.manager.renew_write(rig.manager.cache("i"), started.session.id, seconds)
        rig.wait(seconds - 1)
        await rig.executor.run_due()
        assert await rig.statuses([1]) == [["DELETING"]]
        rig.wait(1)
        await rig.executor.run_due()
        assert await rig.statuses([1]) == [[]]


async def test_without_its_group_an_instance_still_has_a_delay() -> None:
    with opened(group(delay_ms=0)) as rig:
        await rig.store([1])
        await rig.registry.groups.remove("group")
        await rig.manager.remove(rig.manager.cache("i"), [1], NO_MASK)
        await rig.executor.run_due()
        assert await rig.statuses([1]) == [["DELETING"]]
        rig.wait(1)
        await rig.executor.run_due()
        assert await rig.statuses([1]) == [[]]


async def test_a_removed_instance_is_unknown_at_once_and_freed_later(rig: Rig) -> None:
    registered = rig.manager.cache("i").instance
    await rig.store([1])
    started = await rig.start([2])
    uid = rig.manager.cache("i").placement.uid
    await rig.manager.remove_instance("i")
    with pytest.raises(UnknownInstanceError):
        rig.manager.cache("i")
    assert rig.used_bytes == 40
    await rig.manager.register_instance(registered)
    assert rig.manager.cache("i").placement.uid != uid
    assert rig.manager.cache("i").index.key_count == 0
    with pytest.raises(InvalidArgumentError, match="write_session_id"):
        await rig.manager.finish_write(rig.manager.cache("i"), started.session.id, BlockMask(offset=1))
    rig.wait(3600)
    await rig.manager.expire()
    await rig.executor.run_due()
    assert (rig.used_bytes, rig.manager.endings.open_count) == (0, 0)


@pytest.mark.parametrize("finished", [0, 1])
async def test_a_removed_block_goes_as_soon_as_its_writer_is_done(finished: int) -> None:
    """The session's own deadline holds it no longer: the writer is done, and no client received the location."""
    with opened(group(delay_ms=5000)) as rig:
        started = await rig.start([1], timeout_seconds=20)
        await rig.manager.remove(rig.manager.cache("i"), [1], NO_MASK)
        await rig.executor.run_due()
        assert await rig.statuses([1]) == [["DELETING"]]
        await rig.manager.finish_write(rig.manager.cache("i"), started.session.id, BlockMask(offset=finished))
        await rig.executor.run_due()
        assert (await rig.statuses([1]), rig.used_bytes) == ([[]], 0)


async def test_removing_a_large_instance_goes_through_when_the_caller_hangs_up() -> None:
    """The instance is unknown from the first moment: no client could repeat the removal of the remaining blocks."""
    with opened(group(delay_ms=0)) as rig:
        await rig.store(range(3000))
        task = asyncio.create_task(rig.manager.remove_instance("i"))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        for _ in range(10):
            await asyncio.sleep(0)
        await rig.executor.run_due()
        assert rig.used_bytes == 0


@pytest.mark.parametrize("storage", ["slow", "pool"])
async def test_metas_show_visible_locations_best_first(storage: str) -> None:
    """Readable ones by speed, then those in writing; the answer omits those in deletion."""
    with opened(group(storages=("slow", "pool"))) as rig:
        await rig.store([1])
        rig.enable("slow", enabled=False)
        await rig.store([1])
        rig.enable("slow", enabled=True)
        await rig.start([1], min_replica_count=3)
        metas = await rig.manager.metas(rig.manager.cache("i"), [1, 5], BlockMask(offset=0))
        shown = [(location.storage, location.status.name) for location in metas[0].locations]
        assert shown == [("pool", "SERVING"), ("slow", "SERVING"), ("slow", "WRITING")]
        assert (metas[1].key, metas[1].locations) == (5, ())
        rig.enable(storage, enabled=False)
        (meta,) = await rig.manager.metas(rig.manager.cache("i"), [1], NO_MASK)
        assert [location.storage for location in meta.locations if location.status.name == "SERVING"][1] == storage
        await rig.manager.remove(rig.manager.cache("i"), [1], NO_MASK)
        (meta,) = await rig.manager.metas(rig.manager.cache("i"), [1, 5], BlockMask(flags=(False, True)))
        assert meta.locations == ()


# ── Missing and corrupt parts ──


FIRST, SECOND = 2**64 - 1, 7
DAMAGES = pytest.mark.parametrize("damage", ["missing", "corrupt"])


async def store(rig: Rig, keys: Sequence[int], **fields: object) -> StartedWrite:
    """Write blocks whose parts have checksums."""
    started = await rig.start(keys, **fields)
    checksums = [LocationChecksums([("tp0", FIRST), ("tp1", SECOND)])] * len(started.chunks)
    await rig.manager.finish_write(
        rig.manager.cache("i"), started.session.id, BlockMask(offset=len(checksums)), reported=checksums
    )
    return started


async def parts_of(rig: Rig, key: int) -> list[MissingPart]:
    """The parts of a block with their checksums, those of older locations first."""
    record = await rig.record(key)
    assert record is not None
    specs = [spec for place in record.locations for spec in decode_chunk(place.chunk).specs]
    return [MissingPart(key, spec.uri, spec.checksum) for spec in specs]


async def lose(rig: Rig, *parts: MissingPart) -> list[MissingPart]:
    """Let bytes vanish behind the manager's back; return what their reader reports."""
    backend = rig.storages.backend("slow")
    assert backend is not None
    await backend.delete([part.uri for part in parts])
    return [part._replace(mismatched_checksum=0) for part in parts]


async def spoil(rig: Rig, damage: str, *parts: MissingPart) -> list[MissingPart]:
    """Let bytes vanish, or be others than were written; return what their reader reports."""
    return await lose(rig, *parts) if damage == "missing" else list(parts)


async def report(rig: Rig, *parts: MissingPart) -> MissingReport:
    return await rig.manager.report_missing(rig.manager.cache("i"), parts)


@DAMAGES
async def test_a_location_with_a_part_that_is_lost_goes_as_a_whole(damage: str) -> None:
    with opened(group(delay_ms=2000)) as rig:
        await store(rig, [1, 2])
        first, second = await parts_of(rig, 1)
        assert (first.mismatched_checksum, second.mismatched_checksum) == (FIRST, SECOND)
        (lost,) = await spoil(rig, damage, first)
        assert await report(rig, lost, lost) == MissingReport(1, 0)
        assert await report(rig, lost, second) == MissingReport(0, 2), "it changes nothing, and counts once"
        assert await rig.statuses([1, 2]) == [["DELETING"], ["SERVING"]]
        assert rig.manager.missing.mismatches == ({("group", "slow"): 1} if damage == "corrupt" else {})
        found = await rig.manager.match(rig.manager.cache("i"), MatchQuery(MatchMode.BATCH_GET, [1, 2]))
        assert list(found.keys) == [2]
        assert len((await rig.start([1])).chunks) == 1, "it can be written again at once"
        assert await rig.executor.run_due() == 0  # a reader may still be reading the other part (invariant 6)
        rig.wait(2)
        await rig.executor.run_due()
        assert await rig.statuses([1, 2]) == [["WRITING"], ["SERVING"]]
        backend = rig.storages.backend("slow")
        assert backend is not None
        assert await backend.exists([second.uri]) == [False]


async def test_parts_that_are_there_are_not_believed_to_be_missing(rig: Rig) -> None:
    await rig.store([1, 2])
    there, gone = (await parts_of(rig, 1))[0], (await parts_of(rig, 2))[1]
    await lose(rig, gone)
    assert await report(rig, there, gone, there) == MissingReport(1, 2)
    assert await rig.statuses([1, 2]) == [["SERVING"], ["DELETING"]]


async def test_parts_of_no_serving_location_are_unconfirmed(rig: Rig) -> None:
    """Made-up uris, unknown blocks, the right uri with the wrong block, locations in writing or in deletion."""
    await store(rig, [1, 2])
    started = await rig.start([3])
    await store(rig, [4])
    deleted, of_two = (await parts_of(rig, 4))[0], (await parts_of(rig, 2))[0]
    await rig.manager.remove(rig.manager.cache("i"), [4], NO_MASK)
    written = MissingPart(3, next(iter(uris(started.chunks)[0].values())), FIRST)
    made_up = [MissingPart(1, "file://x/y?size=1", FIRST), MissingPart(1, "", FIRST), MissingPart(9, "", FIRST)]
    parts = [*made_up, of_two._replace(key=1), written, deleted]
    assert await report(rig, *parts) == MissingReport(0, 6)
    assert await report(rig, *await lose(rig, *parts)) == MissingReport(0, 6)
    assert await rig.statuses([1, 2, 3, 4]) == [["SERVING"], ["SERVING"], ["WRITING"], ["DELETING"]]


@DAMAGES
async def test_a_replica_stays(rig: Rig, damage: str) -> None:
    await store(rig, [1])
    (lost, *_) = await parts_of(rig, 1)
    await store(rig, [1], min_replica_count=2)
    assert await report(rig, *await spoil(rig, damage, lost)) == MissingReport(1, 0)
    assert await rig.statuses([1]) == [["DELETING", "SERVING"]]


GROUPS = {"both": ("tp0", "tp1"), "first": ("tp0",)}


async def test_spec_groups_that_have_nothing_in_common_live_apart() -> None:
    with opened(registered=instance(groups={"half0": ("tp0",), "half1": ("tp1",)})) as rig:
        await rig.store([1], spec_groups=["half0"])
        await rig.store([1], spec_groups=["half1"])
        part, _ = await parts_of(rig, 1)
        await lose(rig, part)
        assert await report(rig, part) == MissingReport(1, 0)
        assert await rig.statuses([1]) == [["DELETING", "SERVING"]]


@DAMAGES
async def test_the_rest_that_makes_up_a_spec_group_stays(damage: str) -> None:
    with opened(registered=instance(groups=GROUPS)) as rig:
        await store(rig, [1, 2], spec_groups=["first", "first"])
        await store(rig, [1, 2])
        (_, second), (other, _) = await parts_of(rig, 1), await parts_of(rig, 2)
        second, other = await spoil(rig, damage, second, other)
        assert await report(rig, second) == MissingReport(1, 0)
        assert await rig.statuses([1]) == [["SERVING", "DELETING"]]  # `first` alone is a spec group
        assert await report(rig, other) == MissingReport(2, 0)
        assert await rig.statuses([2]) == [["DELETING", "DELETING"]]  # tp1 alone is none


async def test_a_write_in_flight_may_complete_the_block() -> None:
    with opened(registered=instance(groups=GROUPS)) as rig:
        await rig.store([1], spec_groups=["first"])
        started = await rig.start([1])
        (part, *_) = await parts_of(rig, 1)
        await lose(rig, part)
        assert await report(rig, part) == MissingReport(1, 0)
        assert await rig.statuses([1]) == [["DELETING", "WRITING"]]
        await rig.manager.finish_write(rig.manager.cache("i"), started.session.id, BlockMask(offset=1))
        assert await rig.statuses([1]) == [["DELETING", "SERVING"]]


class Faulty(DummyStorage):
    """A storage that cannot say which objects exist."""

    error: Exception | None = None
    asked = 0

    async def exists(self, uris: Sequence[str]) -> list[bool]:
        self.asked += 1
        if self.error is not None:
            raise self.error
        return await super().exists(uris)


@pytest.mark.parametrize("error", [StorageIOError("not mounted"), OSError("i/o error"), RuntimeError("defect")])
async def test_a_storage_that_cannot_be_asked_loses_nothing(error: Exception) -> None:
    """Not even what another storage says is missing: the caller does not know how far the report got."""
    with opened(group(storages=("pool", "slow"))) as rig:
        faulty = Faulty("pool", "/p/", 1)
        faulty.error = error
        config = next(each for each in rig.registry.storages.all() if each.global_unique_name == "pool")
        rig.storages.install(config, faulty)
        await store(rig, [1])
        rig.enable("pool", enabled=False)
        await store(rig, [2])
        (corrupt, *_), (on_slow, *_) = await parts_of(rig, 1), await parts_of(rig, 2)
        (on_slow,), on_pool = await lose(rig, on_slow), corrupt._replace(mismatched_checksum=0)
        with pytest.raises(StorageIOError, match="storage 'pool' is not available"):
            await report(rig, on_slow, on_pool)
        assert faulty.asked == 0, "a storage that is down may hang"
        rig.enable("pool", enabled=True)
        with pytest.raises(StorageIOError, match=f"storage 'pool' cannot be asked: {error}"):
            await report(rig, on_slow, on_pool)
        assert await rig.statuses([1, 2]) == [["SERVING"], ["SERVING"]]
        assert await report(rig, corrupt) == MissingReport(1, 0)
        assert faulty.asked == 1, "of corrupt parts it is not asked"
        assert await rig.statuses([1, 2]) == [["DELETING"], ["SERVING"]]


async def test_a_storage_that_is_not_open_loses_nothing(rig: Rig) -> None:
    await rig.store([1])
    part, _ = await parts_of(rig, 1)
    await lose(rig, part)
    rig.storages.close("slow")
    with pytest.raises(StorageIOError, match="storage 'slow' is not open"):
        await report(rig, part)
    assert await rig.statuses([1]) == [["SERVING"]]


async def test_an_unknown_instance_is_refused() -> None:
    with opened() as rig, pytest.raises(UnknownInstanceError):
        await rig.manager.report_missing(rig.manager.cache("other"), [MissingPart(1, "x")])


async def test_pinned_blocks_go_too_when_their_bytes_are_gone() -> None:
    with opened(replace(group(), pin_budget_bytes=100)) as rig:
        await rig.store([1])
        assert await rig.manager.pin(rig.manager.cache("i"), PinRequest([1], "me", 100)) is not None
        part, _ = await parts_of(rig, 1)
        await lose(rig, part)
        assert await report(rig, part) == MissingReport(1, 0)


@pytest.mark.parametrize("answer", [1, SECOND, 2**63])
async def test_another_checksum_than_the_recorded_one_is_not_believed(rig: Rig, answer: int) -> None:
    """It was written again since, or is made up."""
    await store(rig, [1])
    first, _ = await parts_of(rig, 1)
    assert await report(rig, first._replace(mismatched_checksum=answer)) == MissingReport(0, 1)
    assert await rig.statuses([1]) == [["SERVING"]]
    assert rig.manager.missing.mismatches == {}


async def test_without_a_recorded_checksum_no_part_is_corrupt(rig: Rig) -> None:
    await rig.store([1])
    first, _ = await parts_of(rig, 1)
    assert first.mismatched_checksum == 0
    assert await report(rig, first._replace(mismatched_checksum=FIRST)) == MissingReport(0, 1)
    assert await rig.statuses([1]) == [["SERVING"]]


async def test_missing_and_corrupt_parts_come_in_one_report(rig: Rig) -> None:
    await store(rig, [1, 2, 3])
    (missing, *_), (corrupt, *_), (there, *_) = [await parts_of(rig, key) for key in (1, 2, 3)]
    parts = [*await lose(rig, missing), corrupt, there._replace(mismatched_checksum=0)]
    assert await report(rig, *parts) == MissingReport(2, 1)
    assert await rig.statuses([1, 2, 3]) == [["DELETING"], ["DELETING"], ["SERVING"]]


# ── Lost memory ──


MIB = 1 << 20
PAGE = 4096


class PoolRig(ManagerCore):
    """A manager with a pool on node `n` and a storage of every node."""

    def __init__(self) -> None:
        super().__init__(has_pools=True)
        remover = Remover(self.clock, self.registry.groups.find)
        self.purges = PoolPurges(self.storages.pools, self.manager.open_caches, remover, self.clock)
        source = GarbageSource(self.manager, self.registry, self.tables)
        scrubber = StorageScrubber(source, self.storages, self.clock, "cluster")
        self.leaks = PoolLeaks(self.storages.pools, self.used, scrubber, self.clock)

    def used(self, storage: str) -> int:
        return sum(self.manager.usage.bytes_on_storage(storage).values())

    @property
    def pool(self) -> MempoolStorage:
        return self.storages.pools()["p"]

    async def start(self, keys: Sequence[int], instance_id: str = "i") -> StartedWrite:
        return await self.manager.start_write(self.manager.cache(instance_id), WriteRequest(keys, node_id="n"))

    async def store_blocks(self, keys: Sequence[int], instance_id: str = "i") -> None:
        started = await self.start(keys, instance_id)
        await self.manager.finish_write(
            self.manager.cache(instance_id), started.session.id, BlockMask(offset=len(started.chunks))
        )


@pytest.fixture
async def pool_rig() -> PoolRig:
    made = PoolRig()
    pool = TairMemPoolStorageSpec(node_id="n", capacity_bytes=MIB)
    await made.registry.storages.add(StorageConfig("p", pool))
    await made.registry.storages.add(StorageConfig("d", DummyStorageSpec()))
    await made.registry.groups.create(group(storages=("p", "d")))
    await made.manager.register_instance(instance({"tp0": PAGE}))
    await made.pool.report(PoolReport("n", 1, MIB))
    return made


async def test_a_write_that_was_under_way_is_found_by_the_second_scan(pool_rig: PoolRig) -> None:
    await pool_rig.store_blocks([1, 2])
    late = await pool_rig.start([3])
    (record,) = await pool_rig.manager.cache("i").index.get([3])
    await pool_rig.manager.cache("i").index.delete([3])
    await pool_rig.pool.report(PoolReport("n", 2, MIB))
    await pool_rig.purges.resume()
    assert await pool_rig.statuses([1, 2]) == [["DELETING"]] * 2
    assert record is not None
    await pool_rig.manager.cache("i").index.put({3: record})
    pool_rig.clock.time += 59
    await pool_rig.purges.resume()
    assert await pool_rig.pool.lost_stamp()
    assert await pool_rig.statuses([3]) == [["WRITING"]]
    pool_rig.clock.time += 2
    await pool_rig.purges.resume()
    assert await pool_rig.pool.lost_stamp() == 0
    assert await pool_rig.statuses([3]) == [["DELETING"]]
    await pool_rig.manager.endings.expire()
    pool_rig.clock.time += 60
    await pool_rig.executor.run_due()
    assert pool_rig.used("p") == 0
    assert decode_chunk(late.chunks[0]).storage_type is StorageType.ST_TAIRMEMPOOL


async def test_a_manager_that_no_longer_leads_does_not_say_that_it_is_done(pool_rig: PoolRig) -> None:
    await pool_rig.store_blocks([1])
    await pool_rig.pool.report(PoolReport("n", 2, MIB))
    for _ in range(3):
        await pool_rig.purges.resume(lambda: False)
        pool_rig.clock.time += 100
    assert await pool_rig.pool.lost_stamp()
    assert await pool_rig.statuses([1]) == [["SERVING"]]


async def test_the_second_generation_while_the_first_is_being_purged_is_purged_too(pool_rig: PoolRig) -> None:
    await pool_rig.store_blocks([1])
    await pool_rig.pool.report(PoolReport("n", 2, MIB))
    await pool_rig.purges.resume()
    await pool_rig.store_blocks([2])
    pool_rig.clock.time += 61
    await pool_rig.pool.report(PoolReport("n", 3, MIB))
    await pool_rig.purges.resume()
    assert await pool_rig.statuses([2]) == [["DELETING"]]
    assert await pool_rig.pool.lost_stamp(), "the newer generation has been purged once only"
    pool_rig.clock.time += 61
    await pool_rig.purges.resume()
    assert await pool_rig.pool.lost_stamp() == 0


async def test_memory_of_a_manager_that_died_is_found_and_freed_once_it_is_old(pool_rig: PoolRig) -> None:
    await pool_rig.store_blocks([1, 2])
    await pool_rig.pool.allocate(Allocation("i", "x", [Part("tp0", key, PAGE) for key in range(5)]))
    assert pool_rig.pool.allocated_bytes == 7 * PAGE
    for _ in range(3):
        await pool_rig.leaks.check()
        pool_rig.clock.time += 61
    assert pool_rig.pool.allocated_bytes == 7 * PAGE, "a writer may be at it"
    pool_rig.clock.time += 3600
    await pool_rig.leaks.check()
    assert pool_rig.pool.allocated_bytes == pool_rig.used("p") == 2 * PAGE
    assert await pool_rig.statuses([1, 2]) == [["SERVING"]] * 2


async def test_a_pool_without_leaks_is_not_scrubbed(pool_rig: PoolRig, capsys: pytest.CaptureFixture[str]) -> None:
    await pool_rig.store_blocks([1, 2])
    for _ in range(5):
        await pool_rig.leaks.check()
        pool_rig.clock.time += 3601
    assert "storage_scrubbed" not in capsys.readouterr().out


async def test_parts_that_are_not_whole_pages_are_no_leak_and_hide_none(
    pool_rig: PoolRig, capsys: pytest.CaptureFixture[str]
) -> None:
    """One scrub finds out how much more of the pool is taken than blocks use; a leak is more than that."""

    async def scrubs_within(hours: int) -> int:
        for _ in range(hours):
            pool_rig.clock.time += 3601
            await pool_rig.leaks.check()
        return capsys.readouterr().out.count("storage_scrubbed")

    await pool_rig.manager.register_instance(replace(instance({"tp0": 100}), instance_id="small"))
    await pool_rig.store_blocks(range(3), "small")
    await pool_rig.leaks.check()
    assert await scrubs_within(10) == 1
    await pool_rig.store_blocks(range(3, 50), "small")
    assert await scrubs_within(10) == 0
    await pool_rig.pool.allocate(Allocation("i", "x", [Part("tp0", 0, PAGE)]))
    assert pool_rig.pool.allocated_bytes == 51 * PAGE
    assert await scrubs_within(3) == 1
    assert pool_rig.pool.allocated_bytes == 50 * PAGE
    assert await scrubs_within(20) == 0
    assert await scrubs_within(10) == 1, "once a day it looks whether that is still so"


async def test_the_pool_itself_limits_what_groups_may_use(pool_rig: PoolRig) -> None:
    config = next(each for each in pool_rig.registry.storages.all() if each.global_unique_name == "p")
    assert (config.capacity_bytes, config.limit_bytes) == (0, MIB)
