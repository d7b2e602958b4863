"""Which instance of a group gives up blocks: by age, by part, or by fixed shares."""

from __future__ import annotations

from typing import Any

import pytest
from levels_rig import BLOCK, Levels, group, instance, levels

from kvcm.model.groups import EvictionPolicy, InstanceGroup, InstanceOverride
from kvcm.model.instances import Instance

THREE = [instance("i"), instance("j"), instance("k")]


def shared(share: str = "", mark: float = 0.8, hysteresis: float = 0.0, **reclaim: Any) -> InstanceGroup:
    """A group of 100 blocks."""
    return group(blocks=100, mark=mark, hysteresis=hysteresis, reclaim={"share": share, **reclaim})


def counts(rig: Levels) -> dict[str, int]:
    """Blocks that each instance has left."""
    return {each: rig.remaining(each) // BLOCK for each in ("i", "j", "k")}


def weights(**given: float) -> tuple[InstanceOverride, ...]:
    return tuple(InstanceOverride(name, weight=weight) for name, weight in given.items())


@pytest.mark.parametrize("share", ["", "group_lru"])
async def test_the_oldest_block_of_any_instance_goes_first(share: str) -> None:
    with levels(shared(share), THREE) as rig:
        for key in range(81):
            await rig.write([key], "ijk"[key % 3])
            rig.wait(1)
        await rig.update(shared(share, mark=0.6))
        assert await rig.reclaim() == 21
        for place, each in enumerate("ijk"):
            assert await rig.left(range(place, 81, 3), each) == list(range(21 + place, 81, 3))


async def test_a_new_model_version_takes_the_space_over_with_the_traffic() -> None:
    """100:0 becomes 0:100: nothing has to be configured for that."""
    with levels(shared(hysteresis=0.02), [instance("i"), instance("j")]) as rig:

        async def traffic(to: str, rounds: range) -> None:
            for number in rounds:
                await rig.read(list(range(20)), to)
                await rig.write(list(range(20)), to)
                await rig.reclaim()
                await rig.delete()
                await rig.write([1000 + number, 2000 + number], to)

        await traffic("i", range(60))
        assert rig.remaining("i") >= 78 * BLOCK
        await traffic("j", range(100, 160))
        assert rig.remaining("i") == 0
        assert rig.remaining("j") >= 78 * BLOCK
        assert await rig.left(range(20), "j") == list(range(20))


async def test_a_weight_multiplies_the_time_that_blocks_stay() -> None:
    """Weight 4: blocks of j are as old as 100 s when they count as old as those of i after 25 s."""
    with levels(shared(instance_overrides=weights(j=4.0)), [instance("i"), instance("j")]) as rig:
        for key in range(50):
            await rig.write([key], "i")
            await rig.write([key], "j")
            rig.wait(1)
        await rig.reclaim()
        # Ages of the oldest left: 4 : 1 as far as they reach; 20 blocks went.
        left_i, left_j = len(await rig.left(range(50), "i")), len(await rig.left(range(50), "j"))
        assert left_i + left_j == 80
        assert (left_i, left_j) == (30, 50)
        await rig.update(shared(mark=0.4, instance_overrides=weights(j=4.0)))
        await rig.reclaim()
        left_i, left_j = len(await rig.left(range(50), "i")), len(await rig.left(range(50), "j"))
        assert left_i + left_j == 40
        assert left_j == pytest.approx(4 * left_i, abs=4)


async def test_proportional_takes_the_same_part_of_each() -> None:
    with levels(shared("proportional"), THREE) as rig:
        await rig.write_each(range(50), "i")
        await rig.write_each(range(30), "j")
        await rig.write_each(range(10), "k")
        await rig.update(shared("proportional", mark=0.45))
        assert await rig.reclaim() == 45
        assert counts(rig) == {"i": 25, "j": 15, "k": 5}


async def test_proportional_takes_less_of_a_greater_weight() -> None:
    with levels(shared("proportional", instance_overrides=weights(i=3.0)), [instance("i"), instance("j")]) as rig:
        await rig.write_each(range(40), "i")
        await rig.write_each(range(40), "j")
        await rig.update(shared("proportional", mark=0.6, instance_overrides=weights(i=3.0)))
        assert await rig.reclaim() == 20
        assert (rig.remaining("i"), rig.remaining("j")) == (35 * BLOCK, 25 * BLOCK)


async def test_fixed_takes_from_whoever_is_furthest_above_its_share() -> None:
    configured = shared("fixed", mark=0.6, instance_overrides=weights(i=2.0))
    with levels(shared("fixed", instance_overrides=weights(i=2.0)), THREE) as rig:
        await rig.write_each(range(30), "i")
        await rig.write_each(range(40), "j")
        await rig.write_each(range(10), "k")
        await rig.update(configured)
        assert await rig.reclaim() == 20  # of 60: shares 30, 15, 15
        assert counts(rig) == {"i": 30, "j": 20, "k": 10}
        await rig.update(shared("fixed", mark=0.4, instance_overrides=weights(i=2.0)))
        await rig.reclaim()  # of 40: shares 20, 10, 10
        assert counts(rig) == {"i": 20, "j": 10, "k": 10}


@pytest.mark.parametrize("share", ["group_lru", "proportional", "fixed"])
async def test_an_instance_that_can_give_nothing_leaves_it_to_the_others(share: str) -> None:
    configured = group(blocks=100, mark=0.5, reclaim={"share": share}, pin_budget_bytes=1000)
    with levels(configured, [instance("i"), instance("j")]) as rig:
        await rig.write(list(range(40)), "i")
        await rig.pin(list(range(40)), 1000)
        rig.wait(1)
        await rig.write_each(range(20), "j")
        await rig.reclaim()
        assert (rig.remaining("i"), rig.remaining("j")) == (40 * BLOCK, 8 * BLOCK)


async def test_an_instance_may_have_an_order_of_its_own() -> None:
    overrides = (InstanceOverride("j", EvictionPolicy("fifo")),)
    configured = shared(instance_overrides=overrides, policy=EvictionPolicy("lru"))
    with levels(configured, [instance("i"), instance("j")]) as rig:
        for each in ("i", "j"):
            await rig.write_each(range(40), each)
        for each in ("i", "j"):
            for key in range(5):
                await rig.read([key], each)
        await rig.update(group(blocks=100, mark=0.7, hysteresis=0.0, reclaim={
            "share": "proportional", "instance_overrides": overrides, "policy": EvictionPolicy("lru"),
        }))  # fmt: skip
        assert await rig.reclaim() == 10
        assert await rig.left(range(10), "i") == [0, 1, 2, 3, 4]
        assert await rig.left(range(10), "j") == [5, 6, 7, 8, 9]
        policies = {each.instance.instance_id: each.policy for each in rig.evicted}
        assert policies == {"i": "lru", "j": "fifo"}


async def test_an_instance_may_have_an_age_of_its_own() -> None:
    overrides = (InstanceOverride("j", EvictionPolicy(ttl_seconds=50)),)
    configured = group(blocks=100, mark=0, reclaim={"instance_overrides": overrides})
    with levels(configured, [instance("i"), instance("j")]) as rig:
        await rig.write([1], "i")
        await rig.write([1], "j")
        rig.wait(51)
        assert await rig.reclaim() == 1
        assert (await rig.left([1], "i"), await rig.left([1], "j")) == ([1], [])


async def test_an_override_for_an_instance_that_comes_later_holds() -> None:
    overrides = (InstanceOverride("later", EvictionPolicy("fifo")),)
    with levels(shared(instance_overrides=overrides, policy=EvictionPolicy("lru")), [instance("i")]) as rig:
        await rig.reclaim()
        later: Instance = instance("later")
        await rig.manager.register_instance(later)
        await rig.write_each(range(81), "later")
        await rig.read([0], "later")
        await rig.reclaim()
        assert await rig.left([0, 1, 2], "later") == [1, 2]
