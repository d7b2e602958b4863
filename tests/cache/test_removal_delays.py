"""What happens between a removal and the end of the bytes (decision 15, invariant 6)."""

import asyncio

import pytest
from cache_rig import group, opened

from kvcm.cache.match import MatchMode, MatchQuery
from kvcm.model.errors import InvalidArgumentError, UnknownInstanceError
from kvcm.model.masks import NO_MASK, BlockMask


async def test_a_removed_key_vanishes_at_once_and_is_freed_after_the_delay() -> None:
    with opened(group(delay_ms=2500)) as rig:
        await rig.store([1, 2])
        assert await rig.manager.remove("i", [1, 77], NO_MASK) == 1
        found = await rig.manager.match("i", MatchQuery(MatchMode.BATCH_GET, [1, 2]))
        assert list(found.keys) == [2]
        assert (rig.used_bytes, await rig.statuses([1])) == (40, [["DELETING"]])
        rig.wait(2.499)
        await rig.executor.run_due()
        assert rig.used_bytes == 40
        rig.wait(0.001)
        await rig.executor.run_due()
        assert (rig.used_bytes, await rig.statuses([1, 2])) == (20, [[], ["SERVING"]])


async def test_a_block_can_be_rewritten_while_its_old_bytes_wait() -> None:
    with opened() as rig:
        old = await rig.store([1])
        await rig.manager.remove("i", [1], NO_MASK)
        new = await rig.store([1])
        assert new.chunks != old.chunks
        assert await rig.statuses([1]) == [["DELETING", "SERVING"]]
        rig.wait(2)
        await rig.executor.run_due()
        found = await rig.manager.match("i", MatchQuery(MatchMode.PREFIX_MATCH, [1]))
        assert list(found.chunks) == list(new.chunks)
        assert await rig.statuses([1]) == [["SERVING"]]


async def test_removing_twice_counts_once() -> None:
    with opened() as rig:
        await rig.store([1])
        assert await rig.manager.remove("i", [1, 1], NO_MASK) == 1
        assert await rig.manager.remove("i", [1], NO_MASK) == 0
        rig.wait(2)
        assert await rig.executor.run_due() == 1


async def test_masked_keys_are_not_removed() -> None:
    with opened() as rig:
        await rig.store([1, 2, 3])
        assert await rig.manager.remove("i", [1, 2, 3], BlockMask(flags=(True, False, True))) == 1
        assert await rig.statuses([1, 2, 3]) == [["SERVING"], ["DELETING"], ["SERVING"]]


async def test_what_is_being_written_is_deleted_when_its_session_is_over() -> None:
    """Before that its writer could put the bytes back."""
    with opened(group(delay_ms=0)) as rig:
        await rig.start([1], timeout_seconds=20)
        await rig.manager.remove("i", [1], NO_MASK)
        rig.wait(19)
        await rig.executor.run_due()
        assert await rig.statuses([1]) == [["DELETING"]]
        rig.wait(1)
        await rig.executor.run_due()
        assert await rig.statuses([1]) == [[]]


async def test_what_is_being_written_waits_for_a_renewed_session_too() -> None:
    """The writer renews because it still writes: bytes that it puts down later must not stay for ever."""
    with opened(group(delay_ms=0)) as rig:
        started = await rig.start([1], timeout_seconds=20)
        await rig.manager.remove("i", [1], NO_MASK)
        await rig.manager.renew_write("i", started.session.id, 100)
        rig.wait(20)
        await rig.executor.run_due()
        assert await rig.statuses([1]) == [["DELETING"]]
        rig.wait(80)
        await rig.executor.run_due()
        assert await rig.statuses([1]) == [[]]


@pytest.mark.parametrize("delay_ms", [0, 5000])
async def test_what_was_never_served_is_deleted_at_once(delay_ms: int) -> None:
    with opened(group(delay_ms=delay_ms)) as rig:
        started = await rig.start([1, 2], timeout_seconds=10)
        await rig.manager.finish_write("i", started.session.id, BlockMask(offset=1))
        await rig.executor.run_due()
        assert await rig.statuses([1, 2]) == [["SERVING"], []]


async def test_trim_removes_everything_with_the_same_protection() -> None:
    with opened(group(delay_ms=1000)) as rig:
        await rig.store(range(3000))
        assert await rig.manager.trim("i") == 3000
        assert await rig.manager.trim("i") == 0
        await rig.executor.run_due()
        assert rig.manager.cache("i").index.key_count == 3000
        rig.wait(1)
        await rig.executor.run_due()
        assert (rig.manager.cache("i").index.key_count, rig.used_bytes) == (0, 0)


async def test_trim_of_metadata_leaves_the_bytes() -> None:
    with opened() as rig:
        await rig.store([1, 2])
        started = await rig.start([3])
        assert await rig.manager.trim_meta("i") == 3
        assert (rig.used_bytes, await rig.executor.run_due()) == (0, 0)
        finished = await rig.manager.finish_write("i", started.session.id, BlockMask(offset=1))
        assert (finished.served, finished.vanished) == (0, 1)


async def test_trim_by_write_time_is_half_open() -> None:
    with opened() as rig:
        begin = rig.clock.now()
        for key in range(4):
            await rig.store([key])
            rig.wait(10)
        assert await rig.manager.trim_written_between("i", begin + 10, begin + 30) == 2
        assert await rig.statuses(range(4)) == [["SERVING"], ["DELETING"], ["DELETING"], ["SERVING"]]


@pytest.mark.parametrize(("begin", "end"), [(10.0, 10.0), (11.0, 10.0)])
async def test_an_empty_range_is_refused(begin: float, end: float) -> None:
    with opened() as rig:
        with pytest.raises(InvalidArgumentError, match="begin_timestamp"):
            await rig.manager.trim_written_between("i", begin, end)


async def test_without_its_group_an_instance_still_has_a_delay() -> None:
    with opened(group(delay_ms=0)) as rig:
        await rig.store([1])
        await rig.registry.groups.remove("group")
        await rig.manager.remove("i", [1], NO_MASK)
        await rig.executor.run_due()
        assert await rig.statuses([1]) == [["DELETING"]]
        rig.wait(1)
        await rig.executor.run_due()
        assert await rig.statuses([1]) == [[]]


async def test_a_removed_instance_is_unknown_at_once_and_freed_later() -> None:
    with opened() as rig:
        registered = rig.manager.cache("i").instance
        await rig.store([1])
        started = await rig.start([2])
        uid = rig.manager.cache("i").placement.uid
        await rig.manager.remove_instance("i")
        with pytest.raises(UnknownInstanceError):
            rig.manager.cache("i")
        assert rig.used_bytes == 40
        await rig.manager.register_instance(registered)
        assert rig.manager.cache("i").placement.uid > uid
        assert rig.manager.cache("i").index.key_count == 0
        with pytest.raises(InvalidArgumentError, match="write_session_id"):
            await rig.manager.finish_write("i", started.session.id, BlockMask(offset=1))
        rig.wait(3600)
        await rig.manager.expire()
        await rig.executor.run_due()
        assert (rig.used_bytes, rig.manager.endings.open_count) == (0, 0)


async def test_a_removed_instance_is_remembered_until_its_last_block_is_gone() -> None:
    with opened() as rig:
        await rig.store([1])
        await rig.manager.remove_instance("i")
        for seconds, left in ((1, 1), (0.999, 1), (0.001, 0)):
            rig.wait(seconds)
            await rig.executor.run_due()
            await rig.manager.purge_removed()
            assert len(rig.registry.instances.removals()) == left
        assert [custody.uid for custody in rig.manager.indexes()] == []


@pytest.mark.parametrize("finished", [0, 1])
async def test_a_removed_block_goes_as_soon_as_its_writer_is_done(finished: int) -> None:
    """The session's own deadline holds it no longer: nobody writes there any more, and nobody was given it to read."""
    with opened(group(delay_ms=5000)) as rig:
        started = await rig.start([1], timeout_seconds=20)
        await rig.manager.remove("i", [1], NO_MASK)
        await rig.executor.run_due()
        assert await rig.statuses([1]) == [["DELETING"]]
        await rig.manager.finish_write("i", started.session.id, BlockMask(offset=finished))
        await rig.executor.run_due()
        assert (await rig.statuses([1]), rig.used_bytes) == ([[]], 0)


async def test_removing_a_large_instance_goes_through_when_the_caller_hangs_up() -> None:
    """The instance is unknown from the first moment: nobody could ask again for what is left of it."""
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
async def test_metas_show_what_is_visible_best_first(storage: str) -> None:
    """Readable ones by speed, then those being written; what is being deleted is not shown."""
    with opened(group(storages=("slow", "pool"))) as rig:
        await rig.store([1])
        rig.enable("slow", enabled=False)
        await rig.store([1])
        rig.enable("slow", enabled=True)
        await rig.start([1], min_replica_count=3)
        metas = await rig.manager.metas("i", [1, 5], BlockMask(offset=0))
        shown = [(location.storage, location.status.name) for location in metas[0].locations]
        assert shown == [("pool", "SERVING"), ("slow", "SERVING"), ("slow", "WRITING")]
        assert (metas[1].key, metas[1].locations) == (5, ())
        rig.enable(storage, enabled=False)
        (meta,) = await rig.manager.metas("i", [1], NO_MASK)
        assert [location.storage for location in meta.locations if location.status.name == "SERVING"][1] == storage
        await rig.manager.remove("i", [1], NO_MASK)
        (meta,) = await rig.manager.metas("i", [1, 5], BlockMask(flags=(False, True)))
        assert meta.locations == ()
