"""Reports of bytes that are not those of their checksum: believed by whoever names the checksum that is recorded."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from cache_rig import Rig, group, instance, opened

from kvcm.cache.checksums import ToldLocation
from kvcm.cache.match import MatchMode, MatchQuery
from kvcm.cache.missing import MissingPart, MissingReport
from kvcm.model.errors import StorageIOError
from kvcm.model.locations import decode_chunk
from kvcm.model.masks import BlockMask
from kvcm.storage.dummy import DummyStorage

FIRST, SECOND = 2**64 - 1, 7


async def store(rig: Rig, keys: Sequence[int], **fields: object) -> None:
    """Write blocks of two parts, each with a checksum."""
    started = await rig.start(keys, **fields)
    told = [ToldLocation([("tp0", FIRST), ("tp1", SECOND)])] * len(started.chunks)
    await rig.manager.finish_write("i", started.session.id, BlockMask(offset=len(started.chunks)), told=told)


async def parts_of(rig: Rig, key: int) -> list[MissingPart]:
    """The parts of a block with their checksums, those of older locations first."""
    record = await rig.record(key)
    assert record is not None
    specs = [spec for place in record.locations for spec in decode_chunk(place.chunk).specs]
    return [MissingPart(key, spec.uri, spec.checksum) for spec in specs]


async def report(rig: Rig, *parts: MissingPart) -> MissingReport:
    return await rig.manager.report_missing("i", parts)


async def test_a_location_with_a_corrupt_part_goes_as_a_whole_though_its_bytes_are_there() -> None:
    with opened(group(delay_ms=2000)) as rig:
        await store(rig, [1, 2])
        first, second = await parts_of(rig, 1)
        assert (first.mismatched_checksum, second.mismatched_checksum) == (FIRST, SECOND)
        assert await report(rig, second) == MissingReport(1, 0)
        assert await rig.statuses([1, 2]) == [["DELETING"], ["SERVING"]]
        found = await rig.manager.match("i", MatchQuery(MatchMode.BATCH_GET, [1, 2]))
        assert list(found.keys) == [2]
        assert await rig.executor.run_due() == 0  # another reader may still be reading it (invariant 6)
        rig.wait(2)
        await rig.executor.run_due()
        assert await rig.statuses([1, 2]) == [[], ["SERVING"]]
        assert rig.manager.missing.mismatches == {("group", "slow"): 1}


async def test_the_block_is_written_anew_at_once() -> None:
    with opened() as rig:
        await store(rig, [1])
        await report(rig, *await parts_of(rig, 1))
        assert len((await rig.start([1])).chunks) == 1


@pytest.mark.parametrize("told", [1, SECOND, 2**63])
async def test_another_checksum_than_the_recorded_one_is_not_believed(told: int) -> None:
    """Somebody wrote anew since, or made it up."""
    with opened() as rig:
        await store(rig, [1])
        first, _ = await parts_of(rig, 1)
        assert await report(rig, first._replace(mismatched_checksum=told)) == MissingReport(0, 1)
        assert await rig.statuses([1]) == [["SERVING"]]
        assert rig.manager.missing.mismatches == {}


async def test_without_a_recorded_checksum_nobody_can_tell() -> None:
    with opened() as rig:
        await rig.store([1])
        first, _ = await parts_of(rig, 1)
        assert first.mismatched_checksum == 0
        assert await report(rig, first._replace(mismatched_checksum=FIRST)) == MissingReport(0, 1)
        assert await rig.statuses([1]) == [["SERVING"]]


async def test_parts_of_other_blocks_and_of_what_does_not_serve_are_unconfirmed() -> None:
    with opened() as rig:
        await store(rig, [1, 2, 3])
        await rig.manager.remove("i", [3], BlockMask(offset=0))
        (of_two, *_), (deleted, *_) = await parts_of(rig, 2), await parts_of(rig, 3)
        await rig.start([4])
        assert await report(rig, of_two._replace(key=1), deleted, MissingPart(4, "", FIRST)) == MissingReport(0, 3)
        assert await rig.statuses([1, 2, 3, 4]) == [["SERVING"], ["SERVING"], ["DELETING"], ["WRITING"]]


async def test_reporting_again_changes_nothing_and_counts_once() -> None:
    with opened() as rig:
        await store(rig, [1])
        first, second = await parts_of(rig, 1)
        assert await report(rig, first, first) == MissingReport(1, 0)
        assert await report(rig, first) == MissingReport(0, 1)
        assert await report(rig, second) == MissingReport(0, 1)
        assert rig.manager.missing.mismatches == {("group", "slow"): 1}


async def test_a_replica_stays() -> None:
    with opened() as rig:
        await store(rig, [1])
        (corrupt, *_) = await parts_of(rig, 1)
        await store(rig, [1], min_replica_count=2)
        assert await report(rig, corrupt) == MissingReport(1, 0)
        assert await rig.statuses([1]) == [["DELETING", "SERVING"]]


async def test_the_rest_of_a_block_goes_when_it_is_of_no_use() -> None:
    with opened(registered=instance(groups={"both": ("tp0", "tp1"), "first": ("tp0",)})) as rig:
        for groups in (["first"], []):
            started = await rig.start([1], spec_groups=groups)
            told = [ToldLocation([], FIRST)]
            await rig.manager.finish_write("i", started.session.id, BlockMask(offset=1), told=told)
        (first, _) = await parts_of(rig, 1)
        assert await report(rig, first) == MissingReport(2, 0)
        assert await rig.statuses([1]) == [["DELETING", "DELETING"]]  # tp1 alone is no spec group


async def test_missing_and_corrupt_parts_come_in_one_report() -> None:
    with opened() as rig:
        await store(rig, [1, 2, 3])
        (missing, *_), (corrupt, *_), (there, *_) = [await parts_of(rig, key) for key in (1, 2, 3)]
        backend = rig.storages.backend("slow")
        assert backend is not None
        await backend.delete([missing.uri])
        parts = [missing._replace(mismatched_checksum=0), corrupt, there._replace(mismatched_checksum=0)]
        assert await report(rig, *parts) == MissingReport(2, 1)
        assert await rig.statuses([1, 2, 3]) == [["DELETING"], ["DELETING"], ["SERVING"]]


class Mute(DummyStorage):
    """A storage that must not be asked what is there."""

    async def exists(self, uris: Sequence[str]) -> list[bool]:
        raise StorageIOError("not mounted")


async def test_the_storage_is_not_asked_of_corrupt_parts() -> None:
    with opened(group(storages=("pool",))) as rig:
        config = next(each for each in rig.registry.storages.all() if each.global_unique_name == "pool")
        rig.storages.install(config, Mute("pool", "/p/", 1))
        await store(rig, [1, 2])
        (corrupt, *_), (missing, *_) = await parts_of(rig, 1), await parts_of(rig, 2)
        with pytest.raises(StorageIOError, match="cannot be asked"):
            await report(rig, corrupt, missing._replace(mismatched_checksum=0))
        assert await rig.statuses([1, 2]) == [["SERVING"], ["SERVING"]]
        assert await report(rig, corrupt) == MissingReport(1, 0)
        assert await rig.statuses([1, 2]) == [["DELETING"], ["SERVING"]]
