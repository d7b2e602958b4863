"""Garbage: blocks whose prefix is gone (invariant 7), metadata without bytes, sessions that are overdue."""

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from garbage_rig import SIZE, Deployment, Disk, deployed

from kvcm.cache.match import MatchMode, MatchQuery
from kvcm.model.errors import UnknownInstanceError
from kvcm.model.locations import LocationStatus
from kvcm.reclaim.garbage import GRACE_SECONDS, GarbageReport

CHAIN = list(range(1, 11))


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Deployment]:
    with deployed(Disk(tmp_path)) as made:
        yield made


async def collect(site: Deployment, *, dry_run: bool = False, check_bytes: bool = False) -> GarbageReport:
    return await site.collector.collect(dry_run=dry_run, check_bytes=check_bytes)


async def after_grace(site: Deployment) -> GarbageReport:
    """See what there is, and collect it when its grace is over."""
    await collect(site)
    site.clock.time += GRACE_SECONDS
    return await collect(site)


async def read(site: Deployment, mode: MatchMode, keys: Sequence[int] = CHAIN, window: int = 1) -> None:
    await site.manager.match("i", MatchQuery(mode, keys, window=window))


# ── blocks whose prefix is gone ──


async def test_what_is_behind_a_gap_goes_from_the_tail_when_its_grace_is_over(site: Deployment) -> None:
    await site.store(CHAIN)
    await site.remove([4])
    assert (await collect(site)).without_prefix == 0
    site.clock.time += GRACE_SECONDS - 0.001
    assert (await collect(site)).without_prefix == 0
    assert await site.serving() == {1, 2, 3, 5, 6, 7, 8, 9, 10}
    site.clock.time += 0.001
    report = await collect(site)
    assert (report.blocks, report.without_prefix, report.freed_bytes) == (9, 6, 6 * SIZE)
    assert await site.serving() == {1, 2, 3}
    assert [key for key, _ in site.marked] == [10, 9, 8, 7, 6, 5]
    assert site.collector.found == {"without_prefix": 6, "without_bytes": 0}
    assert (await collect(site)).without_prefix == 0


async def test_what_is_collected_stays_readable_for_the_delay(site: Deployment) -> None:
    """Invariant 6; then bytes and metadata go as in any deletion."""
    await site.store(CHAIN)
    await site.remove([1])
    await after_grace(site)
    (location,) = await site.locations(2)
    assert (location.status, location.deadline) == (LocationStatus.DELETING, site.clock.time + 2)
    site.clock.time += 2
    await site.executor.run_due()
    assert (await collect(site)).blocks == 0


async def test_a_parent_that_is_only_being_deleted_is_gone(site: Deployment) -> None:
    await site.store(CHAIN)
    await site.change(4, status=LocationStatus.DELETING, deadline=site.clock.time + 1e6)
    assert (await after_grace(site)).without_prefix == 6


async def test_a_prefix_that_came_back_in_time_saves_what_is_behind(site: Deployment) -> None:
    await site.store(CHAIN)
    await site.remove([4])
    await collect(site)
    site.clock.time += GRACE_SECONDS
    await site.start(CHAIN)  # being written is enough
    assert (await collect(site)).without_prefix == 0
    assert await site.serving() == {1, 2, 3, 5, 6, 7, 8, 9, 10}


async def test_a_prefix_that_was_back_gives_a_new_grace(site: Deployment) -> None:
    await site.store(CHAIN)
    await site.remove([4])
    await collect(site)
    site.clock.time += GRACE_SECONDS / 2
    await site.store(CHAIN)
    await collect(site)
    await site.remove([4])
    await collect(site)
    site.clock.time += GRACE_SECONDS - 1
    assert (await collect(site)).without_prefix == 0
    site.clock.time += 1
    assert (await collect(site)).without_prefix == 6


async def test_heads_of_chains_are_never_garbage(site: Deployment) -> None:
    for key in range(5):
        await site.store([key])
    assert (await after_grace(site)).without_prefix == 0


async def test_every_branch_behind_a_gap_goes(site: Deployment) -> None:
    await site.store([1, 2, 3, 4])
    await site.store([1, 2, 13, 14])
    await site.store([1, 22])
    await site.remove([2])
    assert (await after_grace(site)).without_prefix == 4
    assert await site.serving() == {1, 22}
    order = [key for key, _ in site.marked]
    assert order.index(4) < order.index(3)
    assert order.index(14) < order.index(13)


async def test_several_gaps_in_one_chain(site: Deployment) -> None:
    await site.store(CHAIN)
    await site.remove([3, 6, 9])
    assert (await after_grace(site)).without_prefix == 5
    assert await site.serving() == {1, 2}


async def test_more_than_a_step_of_blocks(site: Deployment) -> None:
    await site.store(range(1000))
    await site.remove([1])
    assert (await after_grace(site)).without_prefix == 998
    assert [key for key, _ in site.marked] == list(range(999, 1, -1))


async def test_a_pin_holds_its_block_and_what_is_before_it(site: Deployment) -> None:
    await site.store(CHAIN)
    await site.remove([4])
    until = site.clock.time + 5000
    await site.change(7, pinned_until=until)
    assert (await after_grace(site)).without_prefix == 3
    assert await site.serving() == {1, 2, 3, 5, 6, 7}
    site.clock.time = until
    assert (await collect(site)).without_prefix == 3
    assert await site.serving() == {1, 2, 3}


async def test_a_writer_holds_its_block_and_what_is_before_it(tmp_path: Path) -> None:
    """It stores another spec of a block behind the gap."""
    with deployed(Disk(tmp_path), specs=("a", "b"), groups={"a": ("a",), "ab": ("a", "b")}) as site:
        await site.store(CHAIN, spec_groups=["a"] * 10)
        await site.remove([4])
        await site.start([7], spec_groups=["ab"], timeout_seconds=3600, parent_key=6)
        assert [each.status for each in await site.locations(7)] == [LocationStatus.SERVING, LocationStatus.WRITING]
        assert (await after_grace(site)).without_prefix == 3
        assert await site.serving() == {1, 2, 3, 5, 6, 7}
        site.clock.time += 3600
        await site.manager.expire()
        assert (await collect(site)).without_prefix == 3


async def test_keys_in_a_ring_are_worked_through(site: Deployment) -> None:
    """Clients may send keys that depend on no prefix."""
    await site.store([1, 2, 3])
    await site.change(1, status=LocationStatus.DELETING, deadline=site.clock.time + 1e6)
    await site.index().read_modify_write([1], lambda _key, old: old and old._replace(parent=3))
    assert (await after_grace(site)).without_prefix == 2


async def test_a_dry_run_counts_and_changes_nothing(site: Deployment) -> None:
    await site.store([1, 2, 3, 4, 5])
    await site.store([1, 2, 13, 14])
    await site.remove([2])
    await site.change(14, pinned_until=site.clock.time + 1e6)
    await collect(site, dry_run=True)
    site.clock.time += GRACE_SECONDS
    before = await site.index().get(list(range(20)))
    found = await collect(site, dry_run=True)
    assert await site.index().get(list(range(20))) == before
    assert (site.marked, site.collector.found["without_prefix"]) == ([], 0)
    assert await collect(site) == found
    assert found.without_prefix == 3


@pytest.mark.parametrize("mode", [MatchMode.BATCH_GET, MatchMode.REVERSE_ROLL_SW_MATCH])
async def test_instances_that_are_read_out_of_order_are_left_alone(site: Deployment, mode: MatchMode) -> None:
    """Even if that was long ago, by another manager's life, and they are read by prefix ever since."""
    await site.store(CHAIN)
    await read(site, mode)
    await read(site, MatchMode.PREFIX_MATCH)
    await site.remove([4])
    assert (await after_grace(site)).without_prefix == 0
    again = await Deployment.restarted(site)
    assert (await after_grace(again)).without_prefix == 0
    assert len(await again.serving()) == 9
    again.close()


async def test_a_first_batch_read_during_the_grace_is_in_time(site: Deployment) -> None:
    await site.store(CHAIN)
    await site.remove([4])
    await collect(site)
    site.clock.time += GRACE_SECONDS
    await read(site, MatchMode.BATCH_GET)
    assert (await collect(site)).without_prefix == 0


@pytest.mark.parametrize("mode", [MatchMode.PREFIX_MATCH, MatchMode.PREFIX_MATCH_WITH_MAMBA])
async def test_reads_by_prefix_change_nothing(site: Deployment, mode: MatchMode) -> None:
    await site.store(CHAIN)
    await read(site, mode)
    await site.remove([4])
    assert (await after_grace(site)).without_prefix == 6


async def test_how_an_instance_is_read_is_its_own(tmp_path: Path) -> None:
    with deployed(Disk(tmp_path), instance_ids=("i", "j")) as site:
        for instance_id in ("i", "j"):
            await site.store(CHAIN, instance_id)
            await site.remove([4], instance_id)
        await read(site, MatchMode.BATCH_GET)
        assert (await after_grace(site)).without_prefix == 6
        assert (len(await site.serving("i")), len(await site.serving("j"))) == (9, 3)


async def test_an_instance_registered_again_begins_anew(site: Deployment) -> None:
    await read(site, MatchMode.BATCH_GET)
    instance = site.manager.cache("i").instance
    await site.manager.remove_instance("i")
    await site.manager.purge_removed()
    await site.manager.register_instance(instance)
    assert await site.disk.store.table("modes").all() == {}
    await site.store(CHAIN)
    await site.remove([4])
    assert (await after_grace(site)).without_prefix == 6


async def test_one_instance_can_be_asked_for(tmp_path: Path) -> None:
    with deployed(Disk(tmp_path), instance_ids=("i", "j")) as site:
        for instance_id in ("i", "j"):
            await site.store(CHAIN, instance_id)
            await site.remove([4], instance_id)
        await collect(site)
        site.clock.time += GRACE_SECONDS
        report = await site.collector.collect("j", dry_run=False, check_bytes=False)
        assert (report.blocks, report.without_prefix) == (9, 6)
        assert len(await site.serving("i")) == 9
        with pytest.raises(UnknownInstanceError, match="'k' is not registered"):
            await site.collector.collect("k", dry_run=True, check_bytes=False)


# ── in the background ──


async def lap(site: Deployment) -> int:
    """Look at everything once, as slowly as in the background; return the number of steps."""
    steps = 0
    while await site.collector.step():
        steps += 1
    return steps


async def test_the_background_collects_when_the_grace_is_over(site: Deployment) -> None:
    await site.store(range(1000))
    await site.remove([500])
    assert await lap(site) == 8, "a few blocks per step"
    site.clock.time += GRACE_SECONDS - 1
    await lap(site)
    assert site.marked == []
    site.clock.time += 1
    assert await site.collector.step() == 0, "between two laps: what is due does not wait for the next one"
    assert len(site.marked) == 499


async def test_laps_are_not_run_one_after_the_other(site: Deployment) -> None:
    await site.store(CHAIN)
    assert await lap(site) == 1
    site.clock.time += 29
    assert await lap(site) == 0
    site.clock.time += 1
    assert await lap(site) == 1


async def run_for(site: Deployment, rounds: int, rate: int) -> None:
    """Run the duty until it paused so often."""
    site.collector = site.new_collector(rate)
    duty = asyncio.ensure_future(site.collector.run())
    await site.paused(rounds)
    duty.cancel()


async def test_the_pace_is_the_one_that_is_set(site: Deployment) -> None:
    await site.store(range(1280))
    await run_for(site, 10, rate=1000)
    assert sum(site.pauses[:10]) == pytest.approx(1.28)
    site.pauses.clear()
    await run_for(site, 10, rate=8)
    assert sum(site.pauses[:10]) == pytest.approx(2.5), "two at a time"


async def test_nothing_runs_in_the_background_when_it_is_off(site: Deployment) -> None:
    await site.store(CHAIN)
    await site.remove([4])
    await run_for(site, 3, rate=0)
    site.clock.time += GRACE_SECONDS
    await run_for(site, 3, rate=0)
    assert set(site.pauses) == {1.0}
    assert site.marked == []


async def test_a_manager_that_lost_the_lead_counts_anew(site: Deployment) -> None:
    await site.store(CHAIN)
    await site.remove([4])
    site.collector = site.new_collector()
    leads = True
    duty = asyncio.ensure_future(site.collector.run(lambda: leads))

    await site.paused(3)
    leads = False
    await site.paused(3)
    site.clock.time += GRACE_SECONDS
    leads = True
    await site.paused(3)
    assert site.marked == []
    site.clock.time += GRACE_SECONDS
    await site.paused(3)
    assert len(site.marked) == 6
    duty.cancel()


# ── sessions ──


async def test_overdue_sessions_are_ended_and_counted(site: Deployment) -> None:
    await site.start([1], timeout_seconds=10)
    await site.start([2], timeout_seconds=10)
    open_one = await site.start([3], timeout_seconds=1000)
    site.clock.time += 10
    assert (await collect(site, dry_run=True)).expired_sessions == 2
    assert (await collect(site)).expired_sessions == 2
    assert (await collect(site)).expired_sessions == 0
    assert await site.disk.store.table("sessions").get(open_one.session.id) is not None
