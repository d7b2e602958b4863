"""What groups configure: policies, ages, prefix classes, state of linear attention; and what must stay."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from levels_rig import BLOCK, LEVELS_POOL, Levels, group, instance, levels

from kvcm.cache.write_sessions import Retention
from kvcm.model.groups import (
    CacheConfig,
    CachePreferStrategy,
    EvictionPolicy,
    GlobalQuota,
    InstanceGroup,
    InstanceGroupQuota,
    PrefixClass,
)
from kvcm.model.instances import Instance
from kvcm.model.keys import NO_MASK
from kvcm.model.locations import LocationStatus, event_hash_of
from kvcm.model.storages import StorageType
from kvcm.model.uri import LocationUri
from kvcm.reclaim.reclaimer import EvictionRecord


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


async def test_marks_that_are_switched_off_and_on_again() -> None:
    """Meanwhile the reclaimer does not follow the index: it knows the blocks written and removed then all the same."""
    with levels(ordered("lru")) as rig:
        await rig.write_each(range(8))
        await rig.reclaim()
        await rig.update(ordered("lru", mark=2.0))
        await rig.reclaim()
        await rig.manager.remove(rig.manager.cache("i"), [0, 1, 2], NO_MASK)
        await rig.delete()
        await rig.write_each(range(10, 14))
        await rig.update(ordered("lru"))
        assert await rig.reclaim() == 1
        assert rig.order() == [3]


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

    def reported(evicted: EvictionRecord) -> None:
        rig.evicted.append(evicted)
        if not tasks:
            tasks.append(asyncio.get_running_loop().create_task(remove()))

    rig.reclaimer = rig.new_reclaimer(reported)
    return tasks


@pytest.mark.parametrize("age", [0, 100])
@pytest.mark.parametrize("removed", ["i", "j"])
async def test_an_instance_may_be_removed_while_another_one_is_being_reclaimed(removed: str, age: int) -> None:
    """For lack of space as for age: rounds end in good order, in either order of the instances."""
    strategy = {"policy": EvictionPolicy("fifo", age)}
    configured = group(blocks=8000, mark=0.01, hysteresis=0.0, reclaim=strategy)
    with levels(configured, [instance("i"), instance("j")]) as rig:
        kept = "j" if removed == "i" else "i"
        await rig.write(list(range(10)), removed)
        await rig.write(list(range(2000)), kept)
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


async def test_a_crossed_mark_counts_until_usage_reaches_its_low_end() -> None:
    """Also when the step ends in between; but not after a setting that needs nothing any more."""
    configured = group(blocks=100, mark=0.8, hysteresis=0.4, reclaim={"reclaim_step_size": 10 * BLOCK})
    with levels(configured) as rig:
        await rig.write_each(range(81))
        assert await rig.reclaimer.reclaim() == 10
        assert await rig.reclaimer.reclaim() == 10
        await rig.update(replace(configured, quota=InstanceGroupQuota(200 * BLOCK), cache_config=CacheConfig(
            configured.cache_config.reclaim_strategy)))  # fmt: skip
        assert await rig.reclaimer.reclaim() == 0


async def test_an_order_that_is_begun_at_the_start_is_the_same() -> None:
    orders: list[list[int]] = []
    for at_start in (False, True):
        with levels(ordered("lfu", mark=0)) as rig:
            await rig.write_each(range(9))
            for key in (4, 4, 2, 7):
                rig.wait(1)
                await rig.read([key])
            await rig.update(ordered("lfu", mark=0.1))
            if at_start:
                await rig.reclaimer.begin()
            await rig.reclaim()
            orders.append(rig.order())
    assert orders[0] == orders[1]
    assert len(orders[0]) == 8


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


# ── Ages at which blocks leave although they fit ──


FIXED = [EvictionPolicy("ttl", 100), EvictionPolicy("fifo", 100)]
SLIDING = [EvictionPolicy("ttl", 100, ttl_sliding=True), EvictionPolicy("lru", 100), EvictionPolicy("leaf_lru", 100)]


def aged(policy: EvictionPolicy, mark: float = 0.0, **fields: Any) -> InstanceGroup:
    """A group of 100 blocks, by default without any mark."""
    return group(blocks=100, mark=mark, reclaim={"policy": policy}, **fields)


def named(policy: EvictionPolicy) -> str:
    return policy.name + ("-sliding" if policy.ttl_sliding else "")


@pytest.mark.parametrize("policy", FIXED, ids=named)
async def test_a_fixed_age_counts_from_the_write(policy: EvictionPolicy) -> None:
    with levels(aged(policy)) as rig:
        await rig.write([1, 2, 3])
        rig.wait(60)
        assert await rig.read([1, 2, 3]) == 3
        await rig.write([9])
        assert await rig.reclaim(after=39) == 0
        assert await rig.reclaim(after=2) == 3
        assert await rig.left([1, 2, 3, 9]) == [9]
        assert rig.reasons() == {"ttl": 3}


@pytest.mark.parametrize("policy", SLIDING, ids=named)
async def test_a_sliding_age_counts_from_the_last_read(policy: EvictionPolicy) -> None:
    with levels(aged(policy)) as rig:
        await rig.write([1, 2, 3])
        await rig.write([9])
        rig.wait(60)
        assert await rig.read([1, 2]) == 2
        assert await rig.reclaim(after=41) == 2
        assert await rig.left([1, 2, 3, 9]) == [1, 2]
        assert await rig.reclaim(after=58) == 0
        assert await rig.reclaim(after=2) == 2
        assert rig.order()[-2:] == [2, 1]


@pytest.mark.parametrize("policy", FIXED, ids=named)
async def test_a_block_that_has_expired_stays_for_what_follows_it(policy: EvictionPolicy) -> None:
    """Invariant 7: the tail first, and not before its time."""
    with levels(aged(policy)) as rig:
        await rig.write([1, 2])
        rig.wait(90)
        await rig.write([3, 4], parent_key=2)
        assert await rig.reclaim(after=11) == 0
        await rig.reclaim(after=90)
        assert rig.order() == [4, 3, 2, 1]


@pytest.mark.parametrize("policy", [*FIXED, *SLIDING], ids=named)
async def test_a_pin_holds_what_has_expired_and_its_end_lets_it_go(policy: EvictionPolicy) -> None:
    with levels(aged(policy, pin_budget_bytes=1000)) as rig:
        await rig.write([1, 2, 3])
        await rig.write([7])
        await rig.pin([1, 2], 500)
        assert await rig.reclaim(after=101) == 2
        assert await rig.left([1, 2, 3, 7]) == [1, 2]
        assert await rig.reclaim() == 0
        assert await rig.reclaim(after=398) == 0
        assert await rig.reclaim(after=2) == 2
        assert await rig.left([1, 2]) == []


@pytest.mark.parametrize("policy", [*FIXED, *SLIDING], ids=named)
async def test_a_block_that_was_written_again_has_a_new_age(policy: EvictionPolicy) -> None:
    """Also while its old bytes wait for their deletion."""
    with levels(aged(policy, delay_ms=60_000)) as rig:
        await rig.write([1])
        assert await rig.reclaim(after=101) == 1
        await rig.write([1])
        record = await rig.record(1)
        assert record is not None
        assert [each.status for each in record.locations] == [LocationStatus.DELETING, LocationStatus.SERVING]
        assert await rig.reclaim() == 0
        assert await rig.left([1]) == [1]
        assert await rig.reclaim(after=99) == 0
        assert await rig.reclaim(after=2) == 1


@pytest.mark.parametrize("policy", [*FIXED, *SLIDING], ids=named)
async def test_ages_survive_a_new_leader(policy: EvictionPolicy) -> None:
    """The next leader reads the blocks and knows when they have to go."""
    with levels(aged(policy)) as rig:
        await rig.write_each(range(5), seconds=10)
        await rig.reclaim()
        rig.wait(71)
        rig.reclaimer = rig.new_reclaimer()
        assert await rig.reclaim() == 3
        assert await rig.left(range(5)) == [3, 4]


async def test_many_expired_blocks_go_in_one_round() -> None:
    with levels(aged(EvictionPolicy("ttl", 100))) as rig:
        await rig.write(list(range(100)))
        rig.wait(101)
        assert await rig.reclaimer.reclaim() == 100
        assert rig.order() == list(range(99, -1, -1))


async def test_an_age_in_a_class_of_one_instance_holds_without_any_mark() -> None:
    deep = PrefixClass("deep", min_depth=2, instance_ids=("i",), policy=EvictionPolicy("fifo", 100))
    with levels(group(blocks=100, mark=0, reclaim={"prefix_classes": (deep,)}), [instance("i"), instance("j")]) as rig:
        await rig.write([1, 2, 3, 4], "i")
        await rig.write([1, 2, 3, 4], "j")
        await rig.reclaim(after=101)
        assert rig.order() == [4, 3]
        assert await rig.left([1, 2, 3, 4], "j") == [1, 2, 3, 4]


async def test_an_age_without_a_name_goes_with_the_policy_above() -> None:
    strategy = {"policy": EvictionPolicy("", 100)}
    with levels(group(blocks=100, mark=0, reclaim=strategy)) as rig:
        await rig.write([1, 2])
        rig.wait(60)
        await rig.read([1])
        assert await rig.reclaim(after=41) == 1
        assert rig.evicted[0].policy == "leaf_lru"
        assert await rig.left([1, 2]) == [1]
        assert rig.remaining() == BLOCK


# ── Prefix classes, retention priorities and pins: what goes before what ──


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


@pytest.mark.parametrize(
    ("found", "mark", "goes"),
    [
        (PrefixClass("heads", end_depth=2, priority=5), 0.2, (2, 3, 4)),
        (PrefixClass("tails", min_depth=3, priority=-5), 0.3, (3, 4)),
    ],
)
async def test_a_class_by_depth_goes_by_its_priority(found: PrefixClass, mark: float, goes: tuple[int, ...]) -> None:
    with levels(classed(found, mark=mark)) as rig:
        await chains(rig, 10, 5)
        await rig.reclaim()
        assert sorted(rig.order()) == [100 * number + depth for number in range(1, 11) for depth in goes]


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
        await rig.fill(i=30, j=30)
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


# Pins.


@pytest.mark.parametrize("policy", ["leaf_lru", "lru", "lfu", "lfu_aging", "fifo", "sieve", "s3fifo"])
async def test_pinned_blocks_stay_under_any_pressure_and_go_afterwards(policy: str) -> None:
    """Invariant 7 holds around it: the reclaimer does not evict the prefix of a pinned block."""
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


async def test_unpinned_blocks_go_at_once() -> None:
    configured = group(blocks=20, mark=0.5, hysteresis=0.0, pin_budget_bytes=1000)
    with levels(configured) as rig:
        await rig.write_each(range(10))
        pins = [await rig.pin([key], 10_000) for key in range(10)]
        await rig.write_each(range(10, 14))
        await rig.reclaim()
        assert await rig.left(range(14)) == list(range(10))
        await rig.write([20])
        for pin in pins[:5]:
            await rig.manager.unpin(rig.manager.cache("i"), pin)
        await rig.reclaim()
        assert await rig.left([*range(14), 20]) == [*range(1, 10), 20]


async def test_all_pinned_leaves_the_mark_crossed_and_says_so() -> None:
    with levels(group(blocks=20, mark=0.5, hysteresis=0.0, pin_budget_bytes=1000)) as rig:
        await rig.write(list(range(15)))
        await rig.pin(list(range(15)), 100)
        assert await rig.reclaim() == 0
        assert rig.reclaimer.stats.unmet == {"group": 5 * BLOCK}
        assert await rig.reclaim(after=101) == 5
        assert rig.reclaimer.stats.unmet == {}


# ── Linear-attention state under pressure ──


KV, STATE = 10, 30
CHAIN = list(range(1, 9))
ALL_POLICIES = pytest.mark.parametrize(
    "policy", ["leaf_lru", "lru", "lfu", "lfu_aging", "fifo", "sieve", "s3fifo", "ttl"]
)


def hybrid(name: str = "i") -> Instance:
    """Blocks of 40 bytes, 30 of them state; `light` writes leave the state out."""
    return instance(
        name, specs={"kv": KV, "state": STATE}, groups={"full": ("kv", "state"), "light": ("kv",)}, linear=("state",)
    )


def bytes_for(size: int, policy: str = "", low: float = 0.0) -> InstanceGroup:
    """A group whose mark is just below `size` bytes and ends `low` bytes further down."""
    capacity = 10_000
    return group(
        blocks=capacity / 10,
        mark=(size - 1) / capacity,
        hysteresis=low / capacity,
        storages=("a", LEVELS_POOL),
        reclaim={"policy": EvictionPolicy(policy, 10**6 if policy == "ttl" else 0)},
    )


async def states(rig: Levels, keys: list[int]) -> list[int]:
    """Those of the blocks that have state."""
    entries = await rig.seen(keys)
    return [key for key, entry in zip(keys, entries, strict=True) if entry.get("state")]


async def write_apart(rig: Levels, keys: list[int]) -> None:
    """The attention part first, the state in a location of its own."""
    await rig.write(keys, spec_groups=["light"] * len(keys))
    await rig.write(keys)


@ALL_POLICIES
@pytest.mark.parametrize("apart", [False, True])
async def test_states_between_go_first(policy: str, apart: bool) -> None:
    """Only as many as are needed, and every block keeps its attention part."""
    with levels(bytes_for(8 * (KV + STATE), policy), hybrid()) as rig:
        await (write_apart(rig, CHAIN) if apart else rig.write(CHAIN))
        assert rig.used() == 8 * (KV + STATE)
        assert await rig.reclaim() == 1
        assert rig.remaining() == 8 * (KV + STATE) - STATE
        assert len(await states(rig, CHAIN)) == 7
        assert 8 in await states(rig, CHAIN)
        assert await rig.left(CHAIN) == CHAIN


async def test_then_whole_blocks_go_from_the_tail() -> None:
    with levels(bytes_for(8 * (KV + STATE), low=7 * STATE), hybrid()) as rig:
        await rig.write(CHAIN)
        await rig.reclaim()
        assert await rig.left(CHAIN) == CHAIN[:7]
        assert rig.remaining() == 7 * KV


async def test_states_stay_at_branch_points_and_ends() -> None:
    """1-2-3-4 and 1-2-5-6: a match ends at 2, 4 or 6."""
    with levels(bytes_for(6 * (KV + STATE), low=3 * STATE - 1), hybrid()) as rig:
        await rig.write([1, 2, 3, 4])
        await rig.write([1, 2, 5, 6])
        await rig.reclaim()
        assert await states(rig, [1, 2, 3, 4, 5, 6]) == [2, 4, 6]
        assert await rig.left([1, 2, 3, 4, 5, 6]) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("apart", [False, True])
async def test_only_the_bytes_of_the_states_are_deleted(apart: bool) -> None:
    """Invariants 4 and 5: marked bytes, deleted bytes and the decrease of usage are the same."""
    with levels(bytes_for(8 * (KV + STATE), low=7 * STATE - 1), hybrid()) as rig:
        if apart:
            attention = [each["kv"] for each in await rig.write(CHAIN, spec_groups=["light"] * 8)]
            state = [each["state"] for each in await rig.write(CHAIN)]
        else:
            written = await rig.write(CHAIN)
            attention, state = [each["kv"] for each in written], [each["state"] for each in written]
        await rig.reclaim()
        assert sorted(rig.marked_uris()) == sorted(state[:7])
        assert sum(LocationUri.parse(uri).size for uri in rig.marked_uris()) == 7 * STATE
        assert rig.used() == 8 * (KV + STATE)
        assert await rig.existing(state) == [True] * 8
        await rig.delete()
        assert rig.used() == rig.remaining() == 8 * KV + STATE
        assert await rig.existing(state) == [False] * 7 + [True]
        assert await rig.existing(attention) == [True] * 8
        for key in CHAIN[:7]:
            record = await rig.record(key)
            assert record is not None
            (place,) = record.locations
            assert (place.spec_names, place.size_bytes) == (("kv",), KV)


async def test_a_block_keeps_its_event_hash_without_its_state() -> None:
    with levels(bytes_for(8 * (KV + STATE), low=7 * STATE - 1), hybrid()) as rig:
        await rig.write(CHAIN, event_hashes=[-key for key in CHAIN])
        await rig.reclaim()
        for key in CHAIN:
            record = await rig.record(key)
            assert record is not None
            assert [event_hash_of(place.chunk) for place in record.locations] == [-key] * (1 if key == 8 else 2)


async def test_a_state_that_was_taken_can_be_written_again() -> None:
    """Invariant 2, also while the old one is still being deleted."""
    with levels(bytes_for(8 * (KV + STATE), low=7 * STATE - 1), hybrid()) as rig:
        await rig.write(CHAIN)
        await rig.reclaim()
        again = await rig.write(CHAIN[:3])
        assert [sorted(each) for each in again] == [["state"]] * 3
        assert await states(rig, CHAIN) == [1, 2, 3, 8]
        await rig.delete()
        assert await rig.existing([each["state"] for each in again]) == [True] * 3
        assert rig.used() == 8 * KV + 4 * STATE


async def test_a_pinned_block_keeps_its_state() -> None:
    configured = bytes_for(8 * (KV + STATE), low=8 * STATE)
    with levels(configured, hybrid()) as rig:
        await rig.update(replace(configured, pin_budget_bytes=1000))
        await rig.write(CHAIN)
        await rig.pin(CHAIN[:4], 100)
        await rig.reclaim()
        assert await rig.left(CHAIN) == CHAIN[:4]
        assert await states(rig, CHAIN) == CHAIN[:4]


async def test_a_copy_on_another_type_keeps_its_state() -> None:
    """A mark crossed on one type takes state from that type only."""
    configured = group(
        blocks=1000,
        hysteresis=0.1,
        storages=("a", LEVELS_POOL),
        types={StorageType.ST_TAIRMEMPOOL: 8 * (KV + STATE)},
        prefers=CachePreferStrategy.CPS_PREFER_TAIR_MEMPOOL,
        reclaim={"policy": EvictionPolicy("lru")},
    )
    with levels(configured, hybrid()) as rig:
        await rig.without(LEVELS_POOL, lambda: rig.write(CHAIN))
        await rig.without("a", lambda: rig.write(CHAIN))
        await rig.reclaim()
        assert rig.order()
        assert all(uri.startswith(f"dummy://{LEVELS_POOL}/") for uri in rig.marked_uris())
        for key in CHAIN:
            record = await rig.record(key)
            assert record is not None
            (copy,) = [each for each in record.locations if each.storage == "a"]
            assert (copy.status, copy.spec_names) == (LocationStatus.SERVING, ("kv", "state"))


async def test_blocks_of_an_instance_beside_it_wait_until_no_state_between_is_left() -> None:
    plain = instance("j", specs={"kv": KV + STATE})
    with levels(bytes_for(10 * (KV + STATE), low=3 * STATE - 1), [hybrid(), plain]) as rig:
        await rig.write([1, 2], "j")
        rig.wait(1)
        await rig.write(CHAIN)
        await rig.reclaim()
        assert await rig.left([1, 2], "j") == [1, 2]
        assert len(await states(rig, CHAIN)) == 5


async def test_too_many_blocks_of_an_instance_are_no_reason_to_take_state() -> None:
    """State is bytes; taking it frees no block."""
    with levels(group(blocks=1000, max_keys=10, hysteresis=0.2), hybrid()) as rig:
        await rig.write(list(range(1, 10)))
        assert await rig.reclaim() == 3
        assert await states(rig, list(range(1, 10))) == [1, 2, 3, 4, 5, 6]
