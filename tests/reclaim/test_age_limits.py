"""Ages at which blocks leave although there is room."""

from __future__ import annotations

from typing import Any

import pytest
from levels_rig import BLOCK, Levels, group, instance, levels

from kvcm.model.groups import EvictionPolicy, InstanceGroup, PrefixClass
from kvcm.model.locations import LocationStatus

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
        rig.wait(39)
        assert await rig.reclaim() == 0
        rig.wait(2)
        assert await rig.reclaim() == 3
        assert await rig.left([1, 2, 3, 9]) == [9]
        assert rig.reasons() == {"ttl": 3}


@pytest.mark.parametrize("policy", SLIDING, ids=named)
async def test_a_sliding_age_counts_from_the_last_read(policy: EvictionPolicy) -> None:
    with levels(aged(policy)) as rig:
        await rig.write([1, 2, 3])
        await rig.write([9])
        rig.wait(60)
        assert await rig.read([1, 2]) == 2
        rig.wait(41)
        assert await rig.reclaim() == 2
        assert await rig.left([1, 2, 3, 9]) == [1, 2]
        rig.wait(58)
        assert await rig.reclaim() == 0
        rig.wait(2)
        assert await rig.reclaim() == 2
        assert rig.order()[-2:] == [2, 1]


@pytest.mark.parametrize("policy", FIXED, ids=named)
async def test_a_block_that_has_expired_stays_for_what_follows_it(policy: EvictionPolicy) -> None:
    """Invariant 7: the tail first, and not before its time."""
    with levels(aged(policy)) as rig:
        await rig.write([1, 2])
        rig.wait(90)
        await rig.write([3, 4], parent_key=2)
        rig.wait(11)
        assert await rig.reclaim() == 0
        rig.wait(90)
        await rig.reclaim()
        assert rig.order() == [4, 3, 2, 1]


@pytest.mark.parametrize("policy", [*FIXED, *SLIDING], ids=named)
async def test_a_pin_holds_what_has_expired_and_its_end_lets_it_go(policy: EvictionPolicy) -> None:
    with levels(aged(policy, pin_budget_bytes=1000)) as rig:
        await rig.write([1, 2, 3])
        await rig.write([7])
        await rig.pin([1, 2], 500)
        rig.wait(101)
        assert await rig.reclaim() == 2
        assert await rig.left([1, 2, 3, 7]) == [1, 2]
        assert await rig.reclaim() == 0
        rig.wait(398)
        assert await rig.reclaim() == 0
        rig.wait(2)
        assert await rig.reclaim() == 2
        assert await rig.left([1, 2]) == []


@pytest.mark.parametrize("policy", [*FIXED, *SLIDING], ids=named)
async def test_a_block_that_was_written_anew_has_a_new_age(policy: EvictionPolicy) -> None:
    """Also while its old bytes wait for their deletion."""
    with levels(aged(policy, delay_ms=60_000)) as rig:
        await rig.write([1])
        rig.wait(101)
        assert await rig.reclaim() == 1
        await rig.write([1])
        record = await rig.record(1)
        assert record is not None
        assert [each.status for each in record.locations] == [LocationStatus.DELETING, LocationStatus.SERVING]
        assert await rig.reclaim() == 0
        assert await rig.left([1]) == [1]
        rig.wait(99)
        assert await rig.reclaim() == 0
        rig.wait(2)
        assert await rig.reclaim() == 1


@pytest.mark.parametrize("policy", [*FIXED, *SLIDING], ids=named)
async def test_for_want_of_room_the_oldest_goes_before_its_time(policy: EvictionPolicy) -> None:
    with levels(aged(policy, mark=0.1, hysteresis=0.0)) as rig:
        await rig.write_each(range(12))
        assert await rig.reclaim() == 2
        assert rig.order() == [0, 1]
        assert rig.reasons() == {"group": 2}


@pytest.mark.parametrize("policy", [*FIXED, *SLIDING], ids=named)
async def test_ages_survive_a_new_leader(policy: EvictionPolicy) -> None:
    """Whoever leads next reads the blocks and knows when they have to go."""
    with levels(aged(policy)) as rig:
        await rig.write_each(range(5), seconds=10)
        await rig.reclaim()
        rig.wait(71)
        rig.reclaimer = rig.new_reclaimer()
        assert await rig.reclaim() == 3
        assert await rig.left(range(5)) == [3, 4]


async def test_many_expired_blocks_go_in_one_look() -> None:
    with levels(aged(EvictionPolicy("ttl", 100))) as rig:
        await rig.write(list(range(100)))
        rig.wait(101)
        assert await rig.reclaimer.look() == 100
        assert rig.order() == list(range(99, -1, -1))


async def only_expired(rig: Levels, expected: list[int]) -> None:
    rig.wait(101)
    await rig.reclaim()
    assert rig.order() == expected


async def test_a_class_may_have_an_age_of_its_own() -> None:
    deep = PrefixClass("deep", min_depth=2, policy=EvictionPolicy("fifo", 100))
    with levels(group(blocks=100, mark=0, reclaim={"prefix_classes": (deep,)})) as rig:
        await rig.write([1, 2, 3, 4])
        await only_expired(rig, [4, 3])


async def test_an_age_in_a_class_of_one_instance_holds_without_any_mark() -> None:
    deep = PrefixClass("deep", min_depth=2, instance_ids=("i",), policy=EvictionPolicy("fifo", 100))
    with levels(group(blocks=100, mark=0, reclaim={"prefix_classes": (deep,)}), [instance("i"), instance("j")]) as rig:
        await rig.write([1, 2, 3, 4], "i")
        await rig.write([1, 2, 3, 4], "j")
        await only_expired(rig, [4, 3])
        assert await rig.left([1, 2, 3, 4], "j") == [1, 2, 3, 4]


async def test_an_age_without_a_name_goes_with_the_policy_above() -> None:
    strategy = {"policy": EvictionPolicy("", 100)}
    with levels(group(blocks=100, mark=0, reclaim=strategy)) as rig:
        await rig.write([1, 2])
        rig.wait(60)
        await rig.read([1])
        rig.wait(41)
        assert await rig.reclaim() == 1
        assert rig.evicted[0].policy == "leaf_lru"
        assert await rig.left([1, 2]) == [1]
        assert rig.remaining() == BLOCK
