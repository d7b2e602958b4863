"""Step limits: what one look marks at most, and that later looks go on."""

from __future__ import annotations

from typing import Any

import pytest
from levels_rig import BLOCK, group, instance, levels

from kvcm.model.groups import InstanceGroup


def stepped(mark: float = 0.5, name: str = "g", **reclaim: Any) -> InstanceGroup:
    return group(name, blocks=100, mark=mark, hysteresis=0.1, reclaim=reclaim)


@pytest.mark.parametrize(
    ("limits", "blocks"),
    [
        ({"reclaim_step_size": 5 * BLOCK}, 5),
        ({"reclaim_step_percentage": 7}, 7),
        ({"reclaim_step_size": 5 * BLOCK, "reclaim_step_percentage": 7}, 5),
        ({"reclaim_step_size": 8 * BLOCK, "reclaim_step_percentage": 7}, 7),
        ({"reclaim_step_size": BLOCK // 2}, 1),
    ],
)
async def test_a_look_marks_no_more_than_a_step(limits: dict[str, int], blocks: int) -> None:
    """A step below one block is one block: otherwise nothing would ever go."""
    with levels(stepped(**limits)) as rig:
        await rig.write_each(range(80))
        assert await rig.reclaimer.look() == blocks
        assert rig.reclaimer.is_held_back
        assert rig.order() == list(range(blocks))


async def test_later_looks_go_on_to_the_low_end_and_then_stop() -> None:
    """Also below the high end, where a fresh reclaimer would not begin."""
    with levels(stepped(reclaim_step_size=9 * BLOCK)) as rig:
        await rig.write_each(range(80))
        looks = [await rig.reclaimer.look() for _ in range(6)]
        assert looks == [9, 9, 9, 9, 4, 0]
        assert not rig.reclaimer.is_held_back
        assert rig.remaining() == 40 * BLOCK


async def test_a_step_that_just_suffices_holds_nothing_back() -> None:
    with levels(stepped(reclaim_step_size=40 * BLOCK)) as rig:
        await rig.write_each(range(80))
        assert await rig.reclaimer.look() == 40
        assert not rig.reclaimer.is_held_back


async def test_a_step_of_one_group_does_not_hold_another_one_back() -> None:
    groups = [stepped(reclaim_step_size=BLOCK), stepped(name="free")]
    with levels(groups, [instance("i"), instance("f", "free")]) as rig:
        await rig.write_each(range(80), "i")
        await rig.write_each(range(80), "f")
        assert await rig.reclaimer.look() == 41
        assert rig.remaining("f") == 40 * BLOCK
        assert rig.reclaimer.is_held_back


async def test_a_storage_takes_no_more_than_a_step_of_each_group() -> None:
    groups = [stepped(0, name, reclaim_step_size=3 * BLOCK) for name in ("x", "y")]
    with levels(groups, [instance("i", "x"), instance("j", "y")]) as rig:
        await rig.limit_storage("a", 100 * BLOCK, 0.5)
        await rig.write_each(range(40), "i")
        await rig.write_each(range(40), "j")
        assert await rig.reclaimer.look() == 6
        assert (rig.remaining("i"), rig.remaining("j")) == (37 * BLOCK, 37 * BLOCK)
        assert rig.reclaimer.is_held_back


async def test_a_step_counts_bytes_where_the_mark_counts_blocks() -> None:
    configured = group(blocks=1000, mark=0.5, hysteresis=0.1, max_keys=100, reclaim={"reclaim_step_size": 5 * BLOCK})
    with levels(configured) as rig:
        await rig.write_each(range(80))
        assert await rig.reclaimer.look() == 5
        assert rig.reclaimer.is_held_back


async def test_a_step_does_not_touch_what_is_pinned() -> None:
    configured = group(
        blocks=100, mark=0.5, hysteresis=0.1, reclaim={"reclaim_step_size": 5 * BLOCK}, pin_budget_bytes=1000
    )
    with levels(configured) as rig:
        await rig.write([1000, 1001])
        await rig.pin([1000, 1001], 1000)
        rig.wait(1)
        await rig.write_each(range(80))
        while await rig.reclaimer.look():
            pass
        assert await rig.left([1000, 1001]) == [1000, 1001]
        assert rig.remaining() == 40 * BLOCK
