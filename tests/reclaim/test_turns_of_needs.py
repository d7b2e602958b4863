"""Needs take turns: a group that always needs something does not keep others waiting, and nothing goes twice for two
marks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from levels_rig import BLOCK, LEVELS_POOL, group, instance, levels

from kvcm.model.groups import CachePreferStrategy
from kvcm.model.storages import StorageType
from kvcm.reclaim.needs import Holding, Need, Reason
from kvcm.reclaim.servings import Servings

POOL = StorageType.ST_TAIRMEMPOOL


def holding(uid: int, group_name: str) -> Holding:
    name = f"{group_name}{uid}"
    return Holding(uid, instance(name, group_name), group(group_name), {}, 0, 0)


def need(reason: Reason, amount: int, *holdings: Holding, name: str = "", payer: str = "") -> Need:
    named = name or holdings[0].group.name
    return Need(reason, amount, bool, holdings, named, payer, reason is Reason.KEYS)


G, H = holding(1, "g"), holding(2, "h")


def served(found: list[Need], batches: int) -> list[tuple[str, int]]:
    """Return who is served, and how much, when every batch gives one block and new writes take its place."""
    servings, turns = Servings(set()), []
    for _ in range(batches):
        chosen = servings.next(found)
        assert chosen is not None
        turns.append((chosen.name, chosen.amount))
        servings.note(chosen, 1, is_held_back=False)
    return turns


def test_groups_take_turns() -> None:
    found = [need(Reason.GROUP, 500, G), need(Reason.GROUP, 300, H)]
    assert served(found, 4) == [("g", 500), ("h", 300)] * 2


def test_a_wide_mark_has_its_turn_for_what_narrow_ones_leave() -> None:
    """The first one takes up to a block more than it needs."""
    narrow, wide = need(Reason.GROUP, 300, G), need(Reason.STORAGE, 500, G, H, name="nfs")
    assert served([narrow, wide], 4) == [("g", 300), ("nfs", 200 - BLOCK)] * 2


def test_a_wide_mark_waits_where_narrow_ones_may_do() -> None:
    narrow, wide = need(Reason.TYPE, 300, G, name="g/nfs"), need(Reason.GROUP, 305, G)
    assert served([narrow, wide], 2) == [("g/nfs", 300)] * 2


def test_groups_that_pay_for_one_mark_do_not_both_pay_it_whole() -> None:
    first = need(Reason.STORAGE, 400, G, name="nfs", payer="g")
    second = need(Reason.STORAGE, 300, H, name="nfs", payer="h")
    assert served([first, second], 2) == [("nfs", 400)] * 2
    servings = Servings(set())
    servings.note(first, 0, is_held_back=False)  # it has nothing to give
    assert servings.next([first, second]) == second


def test_blocks_and_bytes_wait_for_each_other() -> None:
    size, keys, total = need(Reason.TYPE, 10, G, name="t"), need(Reason.KEYS, 5, G, name="i"), need(Reason.GROUP, 99, G)
    assert served([size, keys], 2) == [("t", 10)] * 2
    assert served([keys, total], 2) == [("i", 5)] * 2


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=6))
def test_levels_of_one_group_together_take_what_the_greatest_asks_for(amounts: list[int]) -> None:
    """Nothing goes twice for two marks (invariant 7)."""
    found = [need(Reason.GROUP, amount, G, name=f"level {number}") for number, amount in enumerate(amounts)]
    turns = dict(served(found, 2 * len(found)))
    assert sum(turns.values()) <= max(amounts)
    assert turns[found[0].name] == amounts[0]


async def test_a_look_serves_groups_in_turns() -> None:
    """A batch is 32 blocks."""
    groups = [group(name, blocks=200, mark=0.5, hysteresis=0.0) for name in ("g", "h")]
    with levels(groups, [instance(each.name, each.name) for each in groups]) as rig:
        for each in groups:
            await rig.write_each(range(196), each.name)
        await rig.reclaimer.look()
        assert [(each.instance.instance_id, len(each.changes)) for each in rig.evicted] == [("g", 32), ("h", 32)] * 3


@pytest.mark.parametrize("mark", [0.5, 0.3])
@pytest.mark.parametrize("is_pool_colder", [True, False])
async def test_levels_that_are_served_in_turns_evict_no_more_than_needed(mark: float, *, is_pool_colder: bool) -> None:
    """What goes for the pool counts for the total, which is 20 blocks or more further above its mark."""
    configured = group(
        blocks=200,
        mark=mark,
        hysteresis=0.0,
        storages=("a", LEVELS_POOL),
        types={POOL: 160 * BLOCK},
        prefers=CachePreferStrategy.CPS_PREFER_TAIR_MEMPOOL,
    )
    with levels(configured) as rig:
        if is_pool_colder:
            await rig.write_each(range(150))
        await rig.without(LEVELS_POOL, lambda: rig.write_each(range(200, 240)))
        if not is_pool_colder:
            await rig.write_each(range(150))
        assert await rig.reclaim() == 190 - int(200 * mark)
        assert rig.remaining() == int(200 * mark) * BLOCK
        assert len(await rig.left(range(150))) <= 160 * mark


async def test_a_look_that_takes_long_begins_anew() -> None:
    """Else instances, ages and settings that came since would wait until a flood ends. A batch takes 0.4 s here."""
    with levels(group(blocks=1000, mark=0.5, hysteresis=0.0)) as rig:
        await rig.write_each(range(900))
        rig.reclaimer = rig.new_reclaimer(lambda _evicted: rig.wait(0.4))
        assert [await rig.reclaimer.look() for _ in range(5)] == [96, 96, 96, 96, 16]
