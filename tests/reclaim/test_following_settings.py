"""The reclaimer follows what is configured and registered, also while it works."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from levels_rig import BLOCK, Levels, group, instance, levels

from kvcm.model.groups import CacheConfig, EvictionPolicy, GlobalQuota, InstanceGroup, InstanceGroupQuota
from kvcm.model.masks import NO_MASK
from kvcm.reclaim import live_order
from kvcm.reclaim.evicted import Evicted


def ordered(policy: str, mark: float = 0.8, blocks: float = 10, **fields: Any) -> InstanceGroup:
    return group(blocks=blocks, mark=mark, hysteresis=0.0, reclaim={"policy": EvictionPolicy(policy)}, **fields)


@pytest.mark.parametrize(
    ("before", "after", "first"),
    [
        ("fifo", "lfu", [2, 3]),
        ("lru", "fifo", [0, 1]),
        ("leaf_lru", "fifo", [0, 1]),
        ("sieve", "leaf_lru", [0, 1]),
        ("lru", "lfu", [2, 3]),
        ("lfu", "sieve", [2, 3]),
        ("sieve", "s3fifo", [2, 3]),
    ],
)
async def test_another_policy_orders_the_blocks_that_are_there(before: str, after: str, first: list[int]) -> None:
    """What the old policy asked to be remembered counts under the new one: times of reads, or their number alone."""
    with levels(ordered(before)) as rig:
        await rig.write_each(range(8))
        assert await rig.reclaim() == 0
        rig.wait(5)
        for _ in range(3):
            await rig.read([0])
            await rig.read([1])
        await rig.update(ordered(after, mark=0.6))
        assert await rig.reclaim() == 2
        assert rig.order() == first
        assert {each.policy for each in rig.evicted} == {after}


async def test_a_policy_of_the_same_name_with_another_age_is_in_force_at_once() -> None:
    with levels(ordered("lru")) as rig:
        await rig.write([1])
        await rig.reclaim()
        rig.wait(50)
        strategy = {"policy": EvictionPolicy("lru", 40)}
        await rig.update(group(blocks=10, reclaim=strategy))
        assert await rig.reclaim() == 1


async def test_marks_that_are_switched_on_find_the_blocks_that_were_there() -> None:
    with levels(ordered("lru", mark=0)) as rig:
        await rig.write_each(range(9))
        await rig.read([0])
        assert await rig.reclaim() == 0
        await rig.update(ordered("lru"))
        assert await rig.reclaim() == 1
        assert rig.order() == [1]


async def test_marks_that_are_switched_off_and_on_again() -> None:
    """Meanwhile nobody listens to the index: what was written and removed then is known all the same."""
    with levels(ordered("lru")) as rig:
        await rig.write_each(range(8))
        await rig.reclaim()
        await rig.update(ordered("lru", mark=2.0))
        await rig.reclaim()
        await rig.manager.remove("i", [0, 1, 2], NO_MASK)
        await rig.delete()
        await rig.write_each(range(10, 14))
        await rig.update(ordered("lru"))
        assert await rig.reclaim() == 1
        assert rig.order() == [3]


async def test_a_lower_quota_evicts_at_the_next_look() -> None:
    with levels(ordered("lru")) as rig:
        await rig.write_each(range(8))
        assert await rig.reclaim() == 0
        await rig.update(ordered("lru", blocks=5))
        assert await rig.reclaim() == 4


async def test_a_global_quota_that_comes_goes_and_is_lowered() -> None:
    with levels(group(blocks=100, mark=0, quota="q")) as rig:
        await rig.write_each(range(50))
        assert await rig.reclaim() == 0
        await rig.registry.quotas.set(GlobalQuota("q", 50 * BLOCK, 0.8))
        assert await rig.reclaim() == 11
        await rig.registry.quotas.remove("q")
        assert await rig.reclaim() == 0
        await rig.registry.quotas.set(GlobalQuota("q", 10 * BLOCK, 0.8))
        await rig.reclaim()
        assert rig.remaining() == 7 * BLOCK


async def test_a_storage_that_is_limited_later() -> None:
    with levels(group(blocks=100, mark=0)) as rig:
        await rig.write_each(range(50))
        assert await rig.reclaim() == 0
        await rig.limit_storage("a", 50 * BLOCK, 0.8)
        assert await rig.reclaim() == 11


@pytest.mark.parametrize("level", ["storage", "global"])
async def test_a_limit_above_the_groups_is_lowered_while_nothing_is_written(level: str) -> None:
    async def allow(blocks: int) -> None:
        if level == "storage":
            await rig.limit_storage("a", blocks * BLOCK, 0.8)
        else:
            await rig.registry.quotas.set(GlobalQuota("q", blocks * BLOCK, 0.8))

    with levels(group(blocks=100, quota="q")) as rig:
        await allow(100)
        await rig.write_each(range(50))
        assert await rig.reclaim() == 0
        await allow(50)
        assert await rig.reclaim() == 11
        await allow(100)
        assert await rig.reclaim() == 0


# Instances come and go.


async def test_an_instance_that_is_registered_later_is_followed() -> None:
    with levels(ordered("lru")) as rig:
        await rig.reclaim()
        await rig.manager.register_instance(instance("later"))
        await rig.write_each(range(9), "later")
        await rig.read([0], "later")
        assert await rig.reclaim() == 1
        assert rig.order() == [1]


async def test_an_instance_that_was_removed_leaves_its_room_to_the_others() -> None:
    with levels(ordered("lru", blocks=20), [instance("i"), instance("j")]) as rig:
        await rig.write_each(range(10), "i")
        await rig.write_each(range(6), "j")
        await rig.manager.remove_instance("i")
        assert await rig.reclaim() == 0
        await rig.delete()
        await rig.manager.purge_removed()
        await rig.write_each(range(10, 20), "j")
        assert await rig.reclaim() == 0
        await rig.write([20], "j")
        assert await rig.reclaim() == 1
        assert rig.order() == [0]


async def test_an_instance_of_the_same_name_is_another_one() -> None:
    with levels(ordered("lru")) as rig:
        await rig.write_each(range(8))
        await rig.reclaim()
        await rig.manager.remove_instance("i")
        await rig.delete()
        await rig.manager.purge_removed()
        await rig.manager.register_instance(instance("i"))
        await rig.write_each(range(100, 109))
        assert await rig.reclaim() == 1
        assert rig.order() == [100]


def removing(rig: Levels, removed: str) -> list[asyncio.Task[None]]:
    """From the first eviction on, an instance is removed in the middle of the look, as another request would."""
    tasks: list[asyncio.Task[None]] = []

    async def remove() -> None:
        await rig.manager.remove_instance(removed)
        while rig.registry.instances.removals():
            rig.wait(60)
            await rig.executor.run_due()
            await rig.manager.purge_removed()

    def told(evicted: Evicted) -> None:
        rig.evicted.append(evicted)
        if not tasks:
            tasks.append(asyncio.get_running_loop().create_task(remove()))

    rig.reclaimer = rig.new_reclaimer(told)
    return tasks


@pytest.mark.parametrize("age", [0, 100])
@pytest.mark.parametrize("removed", ["i", "j"])
async def test_an_instance_may_be_removed_while_another_one_is_being_reclaimed(removed: str, age: int) -> None:
    """For want of room as for its age: looks end in good order, whichever of them they look at first."""
    strategy = {"policy": EvictionPolicy("fifo", age)}
    configured = group(blocks=8000, mark=0.01, hysteresis=0.0, reclaim=strategy)
    with levels(configured, [instance("i"), instance("j")]) as rig:
        kept = "j" if removed == "i" else "i"
        await rig.write(list(range(10)), removed)
        await rig.write(list(range(5000)), kept)
        if age:
            rig.wait(101)
        tasks = removing(rig, removed)
        await rig.reclaim()
        assert [task.done() for task in tasks] == [True]
        await tasks[0]
        assert rig.remaining(kept) == (0 if age else 80 * BLOCK)
        await rig.delete()
        assert rig.used() == rig.remaining(kept)


async def test_a_group_that_is_gone_is_left_alone() -> None:
    with levels(ordered("lru")) as rig:
        await rig.write_each(range(10))
        found = rig.registry.groups.find
        rig.reclaimer._find_group = lambda name: None
        assert await rig.reclaim() == 0
        rig.reclaimer._find_group = found
        assert await rig.reclaim() == 2


async def test_what_was_crossed_counts_until_its_low_end_was_reached() -> None:
    """Also when the step ends in between; but not after a setting that needs nothing any more."""
    configured = group(blocks=100, mark=0.8, hysteresis=0.4, reclaim={"reclaim_step_size": 10 * BLOCK})
    with levels(configured) as rig:
        await rig.write_each(range(81))
        assert await rig.reclaimer.look() == 10
        assert await rig.reclaimer.look() == 10
        await rig.update(replace(configured, quota=InstanceGroupQuota(200 * BLOCK), cache_config=CacheConfig(
            configured.cache_config.reclaim_strategy)))  # fmt: skip
        assert await rig.reclaimer.look() == 0


async def test_an_order_that_is_begun_in_steps_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_order, "_STEP_ROWS", 3)
    orders: list[list[int]] = []
    for in_steps in (False, True):
        with levels(ordered("lfu", mark=0)) as rig:
            await rig.write_each(range(9))
            for key in (4, 4, 2, 7):
                rig.wait(1)
                await rig.read([key])
            await rig.update(ordered("lfu", mark=0.1))
            if in_steps:
                turns = asyncio.create_task(_turns())
                await rig.reclaimer.begin()
                turns.cancel()
                assert await turns > 3
            await rig.reclaim()
            orders.append(rig.order())
    assert orders[0] == orders[1]
    assert len(orders[0]) == 8


async def _turns() -> int:
    """Count turns of the event loop until cancelled."""
    count = 0
    try:
        while True:
            await asyncio.sleep(0)
            count += 1
    except asyncio.CancelledError:
        return count


async def test_ages_of_evicted_blocks_are_counted() -> None:
    with levels(ordered("lru", mark=0)) as rig:
        await rig.write_each(range(8))
        rig.wait(30)
        await rig.read([7])
        rig.wait(10)
        await rig.update(ordered("lru", mark=0.5))
        evicted = await rig.reclaim()
        ages = rig.reclaimer.stats.ages.read()
        # They were written a second after each other, and the one that was read stays.
        assert (evicted, ages.counts[-1], ages.total) == (3, 3, 48.0 + 47.0 + 46.0)
