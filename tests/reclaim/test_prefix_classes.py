"""Prefix classes, retention priorities and pins: what goes before what."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from levels_rig import BLOCK, Levels, group, instance, levels

from kvcm.cache.write_values import Retention
from kvcm.model.groups import EvictionPolicy, InstanceGroup, InstanceGroupQuota, PrefixClass


def classed(*classes: PrefixClass, mark: float = 0.5, blocks: float = 100, **fields: Any) -> InstanceGroup:
    """A group that evicts down to exactly its mark."""
    strategy = {"prefix_classes": classes, "policy": EvictionPolicy("lru")}
    return group(blocks=blocks, mark=mark, hysteresis=0.0, reclaim=strategy, **fields)


async def chains(rig: Levels, count: int, length: int, to: str = "i") -> None:
    """Chains 100, 101, …; 200, 201, …; one second apart."""
    for number in range(1, count + 1):
        await rig.write([100 * number + depth for depth in range(length)], to)
        rig.wait(1)


# Classes.


async def test_a_class_by_depth_goes_last_with_a_higher_priority() -> None:
    with levels(classed(PrefixClass("heads", end_depth=2, priority=5), mark=0.2)) as rig:
        await chains(rig, 10, 5)
        await rig.reclaim()
        left = [100 * number + depth for number in range(1, 11) for depth in range(2)]
        assert await rig.left([100 * number + depth for number in range(1, 11) for depth in range(5)]) == left


async def test_a_class_by_depth_goes_first_with_a_lower_priority() -> None:
    with levels(classed(PrefixClass("tails", min_depth=3, priority=-5), mark=0.3)) as rig:
        await chains(rig, 10, 5)
        await rig.reclaim()
        assert sorted(rig.order()) == [100 * number + depth for number in range(1, 11) for depth in (3, 4)]


async def test_a_class_by_reads_takes_a_block_when_it_was_read_often_enough() -> None:
    with levels(classed(PrefixClass("hot", min_reads=3, priority=1), mark=0.1)) as rig:
        await rig.write_each(range(20))
        for key in range(5):
            for _ in range(3):
                await rig.read([key])
        for key in range(5, 10):
            await rig.read([key])
        rig.wait(1)
        await rig.write_each(range(20, 40))
        await rig.reclaim()
        assert await rig.left(range(40)) == [*range(5), *range(35, 40)]


async def test_a_class_by_reads_holds_for_a_new_leader() -> None:
    with levels(classed(PrefixClass("hot", min_reads=2, priority=1), mark=0.1)) as rig:
        await rig.write_each(range(30))
        for key in range(10):
            await rig.read([key])
            await rig.read([key])
        rig.wait(1)
        await rig.write_each(range(30, 40))
        rig.reclaimer = rig.new_reclaimer()
        await rig.reclaim()
        assert await rig.left(range(40)) == list(range(10))


async def test_a_class_of_one_instance_leaves_the_others_alone() -> None:
    only = PrefixClass("only", instance_ids=("i",), priority=1)
    with levels(classed(only, mark=0.3), [instance("i"), instance("j")]) as rig:
        await rig.write_each(range(30), "i")
        await rig.write_each(range(30), "j")
        await rig.reclaim()
        assert (rig.remaining("i"), rig.remaining("j")) == (30 * BLOCK, 0)


async def test_the_first_class_that_fits_counts() -> None:
    first, second = PrefixClass("first", end_depth=1, priority=1), PrefixClass("second", priority=-1)
    with levels(classed(first, second, mark=0.1)) as rig:
        await chains(rig, 10, 3)
        await rig.reclaim()
        heads = [100 * number for number in range(1, 11)]
        assert await rig.left(heads) == heads


async def test_a_class_has_an_order_of_its_own() -> None:
    fifo = PrefixClass("heads", end_depth=1, policy=EvictionPolicy("fifo"))
    with levels(classed(fifo, mark=0.5)) as rig:
        await rig.write_each(range(50))
        rig.wait(100)
        for key in range(10):
            await rig.read([key])
        await rig.write_each(range(50, 55))
        await rig.reclaim()
        assert rig.order() == [0, 1, 2, 3, 4]
        assert {each.policy for each in rig.evicted} == {"fifo"}


# Budgets.


async def test_a_class_above_its_budget_gives_up_blocks_before_any_other() -> None:
    """And below it no more than its turn: then the oldest goes, whatever its class."""
    with levels(classed(PrefixClass("deep", min_depth=1, budget=0.1), mark=0.45)) as rig:
        await rig.write_each(range(30))
        await chains(rig, 4, 6)  # 4 heads and 20 of the class, all younger
        await rig.reclaim()
        assert len(rig.order()) == 9
        assert all(key >= 100 and key % 100 for key in rig.order())
        await rig.update(classed(PrefixClass("deep", min_depth=1, budget=0.1), mark=0.30))
        rig.evicted.clear()
        await rig.reclaim()
        deep = [key for key in rig.order() if key >= 100]
        assert len(deep) == 1
        assert len(rig.order()) == 15
        assert sorted(set(rig.order()) - set(deep)) == list(range(14))


async def test_a_budget_is_one_of_the_group() -> None:
    """Two instances that use half of it each leave none of it unused, and are over it together with one block more."""
    deep = PrefixClass("deep", min_depth=1, budget=0.1)
    with levels(classed(deep, mark=0.4), [instance("i"), instance("j")]) as rig:
        await rig.write_each(range(30), "i")
        await chains(rig, 1, 9, "i")
        await chains(rig, 1, 9, "j")  # 16 of the class in all, none of them above 10 alone
        await rig.reclaim()
        assert len(rig.order()) == 8
        young = [key for key in rig.order() if key > 100]
        assert 6 <= len(young) <= 7  # each instance had named its next block before the last one went
        assert sorted(set(rig.order()) - set(young)) == list(range(8 - len(young)))


# What writers say.


async def test_a_lower_retention_priority_goes_first_and_a_higher_one_last() -> None:
    with levels(classed(mark=0.2)) as rig:
        await rig.write_each(range(10), retention=Retention(priority=10))
        await rig.write_each(range(10, 20))
        await rig.write_each(range(20, 30), retention=Retention(priority=-10))
        await rig.reclaim()
        assert rig.order() == list(range(20, 30))
        await rig.update(classed(mark=0.1))
        rig.evicted.clear()
        await rig.reclaim()
        assert rig.order() == list(range(10, 20))


async def test_priorities_of_writer_and_class_add_up() -> None:
    with levels(classed(PrefixClass("deep", min_depth=1, priority=-5), mark=0.2)) as rig:
        await rig.write([100, 101], retention=Retention(priority=10))
        await rig.write_each(range(20))
        await rig.reclaim()
        assert await rig.left([100, 101]) == [100, 101]


async def test_a_priority_does_not_outlive_the_room() -> None:
    """A priority is an order, no pin: with nothing else left it goes."""
    with levels(classed(mark=0.1)) as rig:
        await rig.write_each(range(20), retention=Retention(priority=100))
        await rig.reclaim()
        assert rig.order() == list(range(10))


# Pins.


@pytest.mark.parametrize("policy", ["leaf_lru", "lru", "lfu", "fifo", "sieve", "s3fifo"])
async def test_what_is_pinned_stays_whatever_the_pressure_and_goes_afterwards(policy: str) -> None:
    """Invariant 7 holds around it: the head of what is pinned is not taken from under it."""
    strategy = {"policy": EvictionPolicy(policy)}
    configured = group(blocks=20, mark=0.5, hysteresis=0.0, reclaim=strategy, pin_budget_bytes=1000)
    with levels(configured) as rig:
        await rig.write([1, 2, 3, 4])
        await rig.pin([1, 2, 3], 10_000)
        rig.wait(1)
        for key in range(100, 200):
            await rig.write([key])
            await rig.reclaim()
            await rig.delete()
        assert await rig.left([1, 2, 3, 4]) == [1, 2, 3]
        rig.wait(10_000)
        await rig.update(replace(configured, quota=InstanceGroupQuota(BLOCK // 2)))
        await rig.reclaim()
        assert await rig.left([1, 2, 3, *range(100, 200)]) == []


async def test_what_was_unpinned_goes_at_once() -> None:
    configured = group(blocks=20, mark=0.5, hysteresis=0.0, pin_budget_bytes=1000)
    with levels(configured) as rig:
        await rig.write_each(range(10))
        pins = [await rig.pin([key], 10_000) for key in range(10)]
        await rig.write_each(range(10, 14))
        await rig.reclaim()
        assert await rig.left(range(14)) == list(range(10))
        await rig.write([20])
        for pin in pins[:5]:
            await rig.manager.unpin("i", pin)
        await rig.reclaim()
        assert await rig.left([*range(14), 20]) == [*range(1, 10), 20]


async def test_all_pinned_leaves_the_mark_crossed_and_says_so() -> None:
    with levels(group(blocks=20, mark=0.5, hysteresis=0.0, pin_budget_bytes=1000)) as rig:
        await rig.write(list(range(15)))
        await rig.pin(list(range(15)), 100)
        assert await rig.reclaim() == 0
        assert rig.reclaimer.stats.unmet == {"group": 5 * BLOCK}
        rig.wait(101)
        assert await rig.reclaim() == 5
        assert rig.reclaimer.stats.unmet == {}
