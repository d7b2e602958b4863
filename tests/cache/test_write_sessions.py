"""Write sessions through the manager: deadlines, masks, spec groups, limits, and who may end them."""

import pytest
from cache_rig import group, instance, location, opened, uris

from kvcm.cache.sessions import FinishedWrite
from kvcm.model.errors import CapacityError, InvalidArgumentError, NotReadyError, UnknownInstanceError
from kvcm.model.locations import BlockRecord, LocationStatus
from kvcm.model.masks import NO_MASK, BlockMask
from kvcm.model.storages import StorageType


@pytest.mark.parametrize(
    ("requested", "seconds"), [(0, 30), (-5, 30), (1, 1), (3600, 3600), (3601, 3600), (2**31 - 1, 3600)]
)
async def test_a_session_lives_as_long_as_asked_within_bounds(requested: int, seconds: int) -> None:
    with opened() as rig:
        started = await rig.start([1], timeout_seconds=requested)
        assert started.session.deadline == rig.clock.now() + seconds
        rig.wait(seconds - 0.001)
        await rig.manager.expire()
        assert rig.manager.endings.open_count == 1
        rig.wait(0.001)
        await rig.manager.expire()
        assert rig.manager.endings.open_count == 0
        assert await rig.statuses([1]) == [["DELETING"]]


@pytest.mark.parametrize(("requested", "seconds"), [(0, 10), (3600, 10), (4, 4)])
async def test_a_session_without_blocks_lives_ten_seconds(requested: int, seconds: int) -> None:
    with opened() as rig:
        started = await rig.start([], timeout_seconds=requested)
        assert (started.mask, started.chunks) == (BlockMask(offset=0), [])
        assert started.session.deadline == rig.clock.now() + seconds


async def test_ids_of_sessions_and_locations_are_long() -> None:
    """128 random bits are the only right to finish a session."""
    with opened() as rig:
        session = (await rig.start([1])).session
        assert (len(session.id), len(session.location_id)) == (32, 12)


async def test_an_expired_session_cannot_be_finished_even_if_nobody_swept() -> None:
    with opened() as rig:
        started = await rig.start([1], timeout_seconds=5)
        rig.wait(5)
        with pytest.raises(InvalidArgumentError, match="write_session_id"):
            await rig.manager.finish_write("i", started.session.id, BlockMask(offset=1))
        assert await rig.statuses([1]) == [["DELETING"]]


async def test_a_session_is_finished_once() -> None:
    with opened() as rig:
        started = await rig.start([1, 2])
        finished = await rig.manager.finish_write("i", started.session.id, BlockMask(flags=(True, False)))
        assert finished == FinishedWrite(served=1, dropped=1, vanished=0)
        with pytest.raises(InvalidArgumentError):
            await rig.manager.finish_write("i", started.session.id, BlockMask(offset=2))
        assert await rig.statuses([1, 2]) == [["SERVING"], ["DELETING"]]


@pytest.mark.parametrize(
    ("mask", "named"),
    [
        (BlockMask(offset=3), "offset is 3, must be from 0 to 2"),
        (BlockMask(offset=-1), "offset is -1, must be from 0 to 2"),
        (BlockMask(flags=(True,)), "has 1 entries.* 2"),
        (BlockMask(flags=(True, True, True)), "has 3 entries.* 2"),
        (NO_MASK, "has 0 entries.* 2"),
    ],
)
async def test_a_wrong_mask_leaves_the_session_open(mask: BlockMask, named: str) -> None:
    with opened() as rig:
        started = await rig.start([1, 2])
        with pytest.raises(InvalidArgumentError, match=named):
            await rig.manager.finish_write("i", started.session.id, mask)
        assert await rig.manager.finish_write("i", started.session.id, BlockMask(offset=2)) == FinishedWrite(2, 0, 0)


@pytest.mark.parametrize("mask", [NO_MASK, BlockMask(offset=0), BlockMask(flags=())])
async def test_a_session_without_blocks_takes_any_empty_mask(mask: BlockMask) -> None:
    with opened() as rig:
        started = await rig.start([])
        assert await rig.manager.finish_write("i", started.session.id, mask) == FinishedWrite(0, 0, 0)


async def test_positions_of_the_mask_are_those_of_the_returned_locations() -> None:
    """Blocks 1 and 3 exist: position 0 is block 2, position 1 is block 4."""
    with opened() as rig:
        await rig.store([1])
        await rig.store([3])
        started = await rig.start([1, 2, 3, 4])
        assert started.mask == BlockMask(flags=(True, False, True, False))
        await rig.manager.finish_write("i", started.session.id, BlockMask(flags=(False, True)))
        assert await rig.statuses([2, 4]) == [["DELETING"], ["SERVING"]]


async def test_a_finish_never_revives_a_removed_block() -> None:
    with opened() as rig:
        started = await rig.start([1, 2])
        await rig.manager.remove("i", [1], NO_MASK)
        finished = await rig.manager.finish_write("i", started.session.id, BlockMask(offset=2))
        assert finished == FinishedWrite(served=1, dropped=0, vanished=1)
        assert await rig.statuses([1, 2]) == [["DELETING"], ["SERVING"]]


async def test_a_writer_is_masked_by_another_and_not_by_one_who_gave_up() -> None:
    with opened() as rig:
        first = await rig.start([1, 2])
        assert (await rig.start([1, 2, 3])).mask == BlockMask(offset=2)
        await rig.manager.finish_write("i", first.session.id, BlockMask(offset=1))
        assert (await rig.start([1, 2])).mask == BlockMask(offset=1)


async def test_spec_groups_store_parts_of_blocks_and_later_the_rest() -> None:
    registered = instance({"kv": 10, "state": 30}, {"light": ("kv",), "full": ("kv", "state")})
    with opened(registered=registered) as rig:
        first = await rig.store([1, 2], spec_groups=("light", "full"))
        assert [list(specs) for specs in uris(first.chunks)] == [["kv"], ["kv", "state"]]
        assert rig.used_bytes == 10 + 40
        rest = await rig.start([1, 2], spec_groups=("full", "full"))
        assert (rest.mask, [list(specs) for specs in uris(rest.chunks)]) == (
            BlockMask(flags=(False, True)),
            [["state"]],
        )
        again = await rig.start([1, 2], spec_groups=("light", "light"))
        assert again.mask == BlockMask(offset=2)


@pytest.mark.parametrize("groups", [("light",), ("light", "light", "light"), ("light", "unknown")])
async def test_spec_groups_that_do_not_fit_are_refused(groups: tuple[str, ...]) -> None:
    registered = instance({"kv": 10, "state": 30}, {"light": ("kv",)})
    with opened(registered=registered) as rig:
        with pytest.raises(InvalidArgumentError, match="location_spec_group_names"):
            await rig.start([1, 2], spec_groups=groups)
        assert rig.manager.endings.open_count == 0


async def test_parents_and_depths_are_recorded() -> None:
    with opened() as rig:
        await rig.start([1, 2])
        await rig.start([3], parent_key=2)
        await rig.start([4], parent_key=99)
        records = [await rig.record(key) for key in (1, 2, 3, 4)]
        assert [(r.parent, r.depth) for r in records if r] == [(None, 0), (1, 1), (2, 2), (99, 0)]
        assert await rig.manager.cache("i").index.children(2) == [3]


async def test_replicas_go_to_whoever_asks_for_them() -> None:
    with opened() as rig:
        await rig.store([1])
        assert (await rig.start([1], min_replica_count=1)).mask == BlockMask(offset=1)
        await rig.store([1], min_replica_count=2)
        assert await rig.statuses([1]) == [["SERVING", "SERVING"]]
        assert (await rig.start([1], min_replica_count=2)).mask == BlockMask(offset=1)


async def test_quotas_are_exact_and_refuse_the_suffix() -> None:
    with opened(group(capacity=50)) as rig:
        started = await rig.start([1, 2, 3, 4])
        assert (started.mask, started.refused) == (BlockMask(flags=(False, False, True, True)), 2)
        assert "50 bytes" in started.refusal
        assert rig.used_bytes == 40
        with pytest.raises(CapacityError, match=r"quota\.capacity"):
            await rig.start([5])
        assert rig.manager.endings.open_count == 1
        await rig.manager.finish_write("i", started.session.id, BlockMask(offset=1))
        with pytest.raises(CapacityError):
            await rig.start([5])
        await rig.executor.run_due()
        assert rig.used_bytes == 20
        assert (await rig.start([5])).mask == BlockMask(offset=0)


async def test_a_request_that_needs_nothing_new_succeeds_at_the_limit() -> None:
    with opened(group(capacity=20)) as rig:
        await rig.store([1])
        assert (await rig.start([1])).mask == BlockMask(offset=1)


async def test_the_key_limit_counts_blocks() -> None:
    with opened(group(max_key_count=2)) as rig:
        started = await rig.start([1, 2, 3])
        assert (started.refused, started.mask) == (1, BlockMask(flags=(False, False, True)))
        with pytest.raises(CapacityError, match="max_key_count of 2"):
            await rig.start([3])


async def test_a_full_type_makes_way_for_the_next_one() -> None:
    limits = {StorageType.ST_DUMMY: 20}
    with opened(group(storages=("slow", "pool"), quotas=limits)) as rig:
        started = await rig.start([1, 2])
        assert [specs["tp0"].split("/")[2] for specs in uris(started.chunks)] == ["slow", "pool"]


async def test_no_available_storage_refuses_only_what_has_to_be_written() -> None:
    with opened(group(storages=("slow",))) as rig:
        await rig.store([1])
        rig.enable("slow", enabled=False)
        with pytest.raises(NotReadyError, match="slow"):
            await rig.start([1])
        assert rig.manager.endings.open_count == 0
        assert (await rig.start([])).chunks == []


async def test_a_removed_group_refuses_writes() -> None:
    with opened() as rig:
        await rig.registry.groups.remove("group")
        with pytest.raises(UnknownInstanceError, match="'group'"):
            await rig.start([1])


async def test_sessions_are_bounded_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcm.cache.sessions._MAX_SESSIONS", 3)
    with opened() as rig:
        for key in range(3):
            await rig.start([key], timeout_seconds=5)
        with pytest.raises(CapacityError, match="3 write sessions"):
            await rig.start([9])
        rig.wait(5)
        await rig.start([9])
        assert rig.manager.endings.open_count == 1


async def test_renewing_moves_the_deadline_of_session_and_records() -> None:
    with opened() as rig:
        started = await rig.start([1], timeout_seconds=5)
        rig.wait(4)
        renewed = await rig.manager.renew_write("i", started.session.id, 10)
        record = await rig.record(1)
        assert record is not None
        assert record.locations[0].deadline == renewed.deadline == rig.clock.now() + 10
        rig.wait(9.5)
        assert await rig.manager.finish_write("i", started.session.id, BlockMask(offset=1)) == FinishedWrite(1, 0, 0)
        with pytest.raises(InvalidArgumentError):
            await rig.manager.renew_write("i", started.session.id, 10)


async def test_a_block_whose_session_is_unknown_is_repaired_from_its_record() -> None:
    """It was stored after the end of its session, by a manager that was slow or died."""
    with opened() as rig:
        orphan = location("slow", status=LocationStatus.WRITING)._replace(
            session_id="f" * 32, deadline=rig.clock.now() + 5
        )
        await rig.manager.cache("i").index.put({1: BlockRecord(None, 0, (orphan,))})
        rig.wait(4.9)
        await rig.executor.run_due()
        assert await rig.statuses([1]) == [["WRITING"]]
        rig.wait(0.1)
        await rig.executor.run_due()
        assert (await rig.statuses([1]), rig.used_bytes) == ([[]], 0)


async def test_sessions_that_cannot_be_ended_do_not_hide_those_behind_them() -> None:
    """A newer release wrote some: they are looked at again later, and the others end."""
    with opened() as rig:
        table = rig.tables.table("sessions")
        for number in range(40):
            assert await table.replace(f"unreadable-{number}", None, b"newer", rig.clock.now() + 1)
        await rig.start([1], timeout_seconds=5)
        rig.wait(5)
        await rig.manager.expire()
        await rig.manager.expire()
        await rig.manager.expire()
        assert await rig.statuses([1]) == [["DELETING"]]


async def test_a_chain_that_would_follow_itself_is_refused() -> None:
    """It would have no end, and nothing of it could be evicted (invariant 7)."""
    with opened() as rig:
        with pytest.raises(InvalidArgumentError, match="parent_block_key is 3"):
            await rig.start([1, 2, 3], parent_key=3)
        assert rig.used_bytes == 0
