"""When a write wakes the reclaimer: marks that several groups share, against what groups hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
from at_once import now
from hypothesis import example, given
from hypothesis import strategies as st
from levels_rig import BLOCK, LEVELS_POOL, group, instance, levels

from kvcm.model.groups import GlobalQuota, InstanceGroup, StorageGuarantee
from kvcm.model.locations import Place
from kvcm.model.storages import StorageType
from kvcm.reclaim.needs import Holding, Limits, Reason, needs
from kvcm.reclaim.pressure import Pressure

A = Place("a", StorageType.ST_DUMMY)
NAMES = ("x", "y", "z")


@dataclass
class Books:
    """Bytes of groups on storage `a`.

    Attributes:
        asked: what was asked for, how often.
    """

    on_a: Mapping[str, int]
    asked: Counter[str] = field(default_factory=Counter)

    def held(self, group_name: str) -> Mapping[Place, int]:
        self.asked["held"] += 1
        return {A: self.on_a[group_name]}

    def held_on(self, storage: str) -> Mapping[str, int]:
        self.asked["held_on"] += 1
        return self.on_a if storage == "a" else {}

    def held_by_group(self) -> Mapping[str, int]:
        self.asked["held_by_group"] += 1
        return self.on_a


def big(name: str, guaranteed: int = 0, quota: str = "", types: dict[StorageType, int] | None = None) -> InstanceGroup:
    """A group whose own marks are far away."""
    kept = (StorageGuarantee("a", guaranteed),) if guaranteed else ()
    return group(name, blocks=1000, quota=quota, types=types, storages=("a", "b"), storage_guarantees=kept)


@given(
    used=st.lists(st.integers(0, 60), min_size=3, max_size=3),
    guaranteed=st.lists(st.sampled_from([0, 0, 20, 45, 95]), min_size=3, max_size=3),
    grown=st.integers(1, 30),
)
@example(used=[30, 0, 0], guaranteed=[0, 45, 0], grown=20)
@example(used=[0, 14, 45], guaranteed=[45, 20, 45], grown=30)
def test_a_write_wakes_exactly_where_there_is_something_to_evict(
    used: list[int], guaranteed: list[int], grown: int
) -> None:
    """A storage of 100 bytes, marked at 90: who is woken finds something to do, and a write that makes something to do
    wakes."""
    groups = [big(name, size) for name, size in zip(NAMES, guaranteed, strict=True)]
    instances = [instance(name, name, {"kv": 1}) for name in NAMES]
    with levels(groups, instances) as rig:
        now(rig.limit_storage("a", 100, 0.9))
        limits = Limits(rig.registry.storages.all(), [], groups)

        def is_above(on_a: Mapping[str, int]) -> bool:
            return Pressure(rig.registry, lambda: Books(on_a), lambda _: []).is_above_a_mark(groups[0])

        def has_needs(on_a: Mapping[str, int]) -> bool:
            held = [
                Holding(uid, each, configured, {A: on_a[each.instance_id]}, 1, 1 << 62)
                for uid, (each, configured) in enumerate(zip(instances, groups, strict=True))
                if on_a[each.instance_id]
            ]
            return any(need.reason is Reason.STORAGE for need in needs(held, limits))

        before = dict(zip(NAMES, used, strict=True))
        after = {**before, "x": before["x"] + grown}
        if is_above(after):
            assert has_needs(after)
        elif has_needs(after):
            assert has_needs(before)


async def test_an_unused_guarantee_of_ones_own_presses_nobody() -> None:
    with levels([big("x", 95)], [instance("i", "x")]) as rig:
        await rig.limit_storage("a", 100, 0.9)
        await rig.write([1])
        assert rig.woken == []


@pytest.mark.parametrize("level", ["storage", "global"])
async def test_a_shared_mark_leaves_room_for_the_largest_block_of_all_who_share_it(level: str) -> None:
    """Else the group of the large blocks is refused before anything is evicted for it."""
    small, large = big("small", quota="q"), big("large", quota="q")
    with levels([small, large], [instance("s", "small"), instance("l", "large", {"kv": 4 * BLOCK})]) as rig:
        if level == "storage":
            await rig.limit_storage("a", 10 * BLOCK, 1.0)
        else:
            await rig.registry.quotas.set(GlobalQuota("q", 10 * BLOCK, 1.0))
        await rig.write_each(range(6), "s")
        assert rig.woken == []
        await rig.write([6], "s")
        assert rig.woken


async def test_what_follows_from_the_settings_follows_their_changes() -> None:
    with levels([big("x", quota="q"), big("y")], [instance("i", "x")]) as rig:
        books = Books({"x": 50, "y": 45})
        pressure = Pressure(rig.registry, lambda: books, lambda _: [])
        x = big("x", quota="q")
        assert not pressure.is_above_a_mark(x)
        await rig.limit_storage("a", 100, 0.9)
        assert pressure.is_above_a_mark(x)
        await rig.limit_storage("a", 200, 0.9)
        assert not pressure.is_above_a_mark(x)
        await rig.registry.quotas.set(GlobalQuota("q", 55))
        assert pressure.is_above_a_mark(x)


async def test_a_write_asks_once_for_each_limit_however_many_groups_there_are() -> None:
    groups = [big(f"g{number}", quota="q") for number in range(50)]
    with levels(groups, [instance("i", "g0")]) as rig:
        for name in ("a", "b", LEVELS_POOL):
            await rig.limit_storage(name, 10_000)
        await rig.registry.quotas.set(GlobalQuota("q", 10_000))
        books = Books({each.name: 10 for each in groups})
        assert not Pressure(rig.registry, lambda: books, lambda _: []).is_above_a_mark(groups[0])
        assert books.asked == {"held": 1, "held_on": 2, "held_by_group": 1}


async def test_what_a_quota_forbids_is_kept_from_nobody_by_the_mark() -> None:
    """Hard limit and mark mean the same by a guarantee: the least of it, the group's quota, and that on the type."""
    a, b = big("x", 60, types={StorageType.ST_DUMMY: 10}), big("y")
    with levels([a, b], [instance("i", "x", {"kv": 1}), instance("j", "y", {"kv": 1})]) as rig:
        await rig.limit_storage("a", 100, 0.9)
        await rig.write(range(8), "i")
        await rig.write(range(45), "j")
        assert rig.woken == []
        assert await rig.reclaim() == 0
