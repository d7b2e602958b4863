"""Marks at every level: what is crossed decides what goes, from whom, and down to where."""

from __future__ import annotations

import pytest
from levels_rig import BLOCK, LEVELS_POOL, Levels, group, instance, levels

from kvcm.model.errors import CapacityError
from kvcm.model.groups import CachePreferStrategy, EvictionPolicy, GlobalQuota, InstanceGroup, StorageGuarantee
from kvcm.model.locations import BlockRecord, Location, LocationStatus, SpecUri, encode_chunk
from kvcm.model.storages import StorageType

DUMMY, POOL = StorageType.ST_DUMMY, StorageType.ST_TAIRMEMPOOL
PREFERS_POOL = CachePreferStrategy.CPS_PREFER_TAIR_MEMPOOL


def typed(**changes: object) -> InstanceGroup:
    """Writes go to the pool while that has room for them: 100 bytes, of which 80 are its mark."""
    fields = {"storages": ("a", LEVELS_POOL), "types": {POOL: 100}, "prefers": PREFERS_POOL, **changes}
    return group(blocks=100, hysteresis=0.2, **fields)  # type: ignore[arg-type]


# One type.


async def test_a_mark_of_one_type_evicts_that_type_only() -> None:
    with levels(typed()) as rig:
        await rig.without(LEVELS_POOL, lambda: rig.write_each(range(20)))
        await rig.write_each(range(100, 109))
        assert await rig.reclaim() == 3
        assert rig.order() == [100, 101, 102]
        assert await rig.left(range(20)) == list(range(20))
        assert rig.reasons() == {"type": 3}


@pytest.mark.parametrize("policy", ["lru", "leaf_lru"])
async def test_blocks_with_a_copy_elsewhere_lose_only_the_copies_that_help(policy: str) -> None:
    """Invariant 1: they are readable without a break, and the other copies are not touched."""
    with levels(typed(reclaim={"policy": EvictionPolicy(policy)})) as rig:
        chain = list(range(1, 10))
        await rig.without(LEVELS_POOL, lambda: rig.write(chain))
        await rig.without("a", lambda: rig.write(chain))
        assert await rig.places(9) == ["a", LEVELS_POOL]
        assert await rig.reclaim() == 3
        assert sorted(rig.order()) == [7, 8, 9]
        for key in rig.order():
            assert await rig.places(key) == ["a"]
        assert await rig.left(chain) == chain
        assert all(uri.startswith(f"dummy://{LEVELS_POOL}/") for uri in rig.marked_uris())


@pytest.mark.parametrize("policy", ["lru", "leaf_lru"])
async def test_cold_copies_of_a_chain_go_before_warmer_blocks(policy: str) -> None:
    with levels(typed(reclaim={"policy": EvictionPolicy(policy)})) as rig:
        await rig.without(LEVELS_POOL, lambda: rig.write([1, 2, 3, 4]))
        await rig.without("a", lambda: rig.write([1, 2, 3, 4]))
        rig.wait(1)
        await rig.write_each(range(100, 105))
        assert await rig.reclaim() == 3
        assert rig.order() == [4, 3, 2]
        assert await rig.left([1, 2, 3, 4]) == [1, 2, 3, 4]


def part(rig: Levels, name: str, storage: str, size: int = BLOCK) -> Location:
    """A serving location of one spec."""
    kind = POOL if storage == LEVELS_POOL else DUMMY
    chunk = encode_chunk(kind, 1, [SpecUri(name, f"dummy://{storage}/{name}?size={size}")])
    return Location(name, storage, kind, LocationStatus.SERVING, (name,), chunk, size, rig.clock.now())


async def test_what_could_not_be_read_alone_goes_with_the_part_that_helps() -> None:
    """Specs of one spec group live and die together, wherever they lie."""
    with levels(typed(), instance(specs={"tp0": BLOCK, "tp1": BLOCK})) as rig:
        index = rig.manager.cache("i").index
        for key in range(9):
            places = (part(rig, "tp0", LEVELS_POOL), part(rig, "tp1", "a"))
            await index.put({key: BlockRecord(None, 0, places)})
            rig.wait(1)
        assert await rig.reclaim() == 3
        assert [await rig.places(key) for key in range(4)] == [[], [], [], [LEVELS_POOL, "a"]]
        assert rig.remaining() == 6 * 2 * BLOCK


async def test_a_part_that_is_readable_alone_stays() -> None:
    registered = instance(specs={"tp0": BLOCK, "tp1": BLOCK}, groups={"left": ("tp0",), "right": ("tp1",)})
    with levels(typed(), registered) as rig:
        index = rig.manager.cache("i").index
        for key in range(9):
            places = (part(rig, "tp0", LEVELS_POOL), part(rig, "tp1", "a"))
            await index.put({key: BlockRecord(None, 0, places)})
            rig.wait(1)
        assert await rig.reclaim() == 3
        assert [await rig.places(key) for key in range(4)] == [["a"], ["a"], ["a"], [LEVELS_POOL, "a"]]


async def test_a_head_goes_with_its_tail_where_only_the_head_helps() -> None:
    """Invariant 7: nothing is left behind whose prefix is gone."""
    with levels(typed()) as rig:
        for chain in range(9):
            await rig.without("a", lambda chain=chain: rig.write([10 * chain]))
            await rig.without(
                LEVELS_POOL, lambda chain=chain: rig.write([10 * chain + 1, 10 * chain + 2], parent_key=10 * chain)
            )
            rig.wait(1)
        await rig.reclaim()
        assert await rig.left([10 * chain for chain in range(9)]) == [10 * chain for chain in range(3, 9)]
        assert await rig.left([10 * chain + 2 for chain in range(9)]) == [10 * chain + 2 for chain in range(3, 9)]


async def test_what_goes_from_a_type_counts_for_the_total_of_the_group() -> None:
    changed = group(blocks=10, hysteresis=0.1, storages=("a", LEVELS_POOL), types={POOL: 50}, prefers=PREFERS_POOL)
    with levels(changed) as rig:  # total: 100 bytes, mark 80, low 70; pool: 50, 40, 35
        await rig.without(LEVELS_POOL, lambda: rig.write_each(range(4)))
        await rig.write_each(range(10, 15))
        assert await rig.reclaim() == 2
        assert rig.reasons() == {"type": 2}
        assert await rig.left(range(20)) == [0, 1, 2, 3, 12, 13, 14]


# Bytes, blocks.


async def test_used_size_is_a_mark_in_bytes() -> None:
    with levels(group(blocks=1000, mark=0, used_size=10 * BLOCK, hysteresis=0.2)) as rig:
        await rig.write_each(range(10))
        assert await rig.reclaim() == 0
        await rig.write([10])
        assert await rig.reclaim() == 3
        assert rig.order() == [0, 1, 2]


async def test_the_blocks_of_one_instance_have_a_mark() -> None:
    """The other instance of the group has fewer and gives nothing, though its blocks are older."""
    with levels(group(blocks=1000, max_keys=10, hysteresis=0.2), [instance("i"), instance("j")]) as rig:
        await rig.write_each(range(8), "j")
        await rig.write_each(range(9), "i")
        assert await rig.reclaim() == 3
        assert rig.order() == [0, 1, 2]
        assert {each.instance.instance_id for each in rig.evicted} == {"i"}
        assert rig.reasons() == {"keys": 3}


async def test_a_lower_limit_on_blocks_holds_before_anybody_writes() -> None:
    with levels(group(blocks=1000, max_keys=100, hysteresis=0.2)) as rig:
        await rig.write_each(range(20))
        await rig.update(group(blocks=1000, max_keys=10, hysteresis=0.2))
        assert await rig.reclaim() == 14


# Storages that groups share.


async def test_a_storage_takes_from_the_group_furthest_above_its_share() -> None:
    groups = [group(name, blocks=1000) for name in ("big", "middle", "small")]
    with levels(groups, [instance(each.name, each.name) for each in groups]) as rig:
        await rig.limit_storage("a", 100 * BLOCK, 0.9)  # low: 88 blocks, a share of 29 each
        await rig.write_each(range(5), "small")
        await rig.write_each(range(29), "middle")
        await rig.write_each(range(57), "big")
        assert rig.remaining("big") == 57 * BLOCK
        assert await rig.reclaim() == 3
        assert {each.instance.instance_id for each in rig.evicted} == {"big"}
        assert rig.reasons() == {"storage": 3}


async def test_a_guarantee_is_kept_while_others_are_above_theirs() -> None:
    kept = group("kept", blocks=1000, storage_guarantees=(StorageGuarantee("a", 70 * BLOCK),))
    with levels([kept, group("other", blocks=1000)], [instance("k", "kept"), instance("o", "other")]) as rig:
        await rig.limit_storage("a", 100 * BLOCK, 0.9)
        await rig.write_each(range(70), "k")
        await rig.write_each(range(21), "o")
        assert await rig.reclaim() == 3
        assert {each.instance.instance_id for each in rig.evicted} == {"o"}


async def test_what_is_guaranteed_to_a_group_that_does_not_use_it_is_no_room_for_others() -> None:
    """Otherwise the others are refused at a hard limit below every mark, and nothing is ever evicted for them."""
    idle = group("idle", blocks=1000, storage_guarantees=(StorageGuarantee("a", 50 * BLOCK),))
    with levels([idle, group("busy", blocks=1000)], [instance("i", "idle"), instance("b", "busy")]) as rig:
        await rig.limit_storage("a", 100 * BLOCK, 0.9)
        for key in range(200):
            await rig.write([key], "b")
            await rig.reclaim()
            await rig.delete()
        assert 35 * BLOCK <= rig.remaining("b") <= 50 * BLOCK
        await rig.write_each(range(50), "i", seconds=0)
        assert rig.remaining("i") == 50 * BLOCK


async def test_only_bytes_on_the_storage_count_for_its_mark() -> None:
    with levels([group(blocks=1000, storages=("a", "b"))]) as rig:
        await rig.limit_storage("a", 10 * BLOCK, 0.8)
        await rig.without("a", lambda: rig.write_each(range(50, 80)))
        await rig.write_each(range(9))
        assert await rig.reclaim() == 2  # 78 of 100 bytes is the low end
        assert rig.order() == [0, 1]


async def test_a_storage_without_a_mark_of_its_own_has_one_at_nine_tenths() -> None:
    with levels(group(blocks=1000, mark=0)) as rig:
        await rig.limit_storage("a", 100 * BLOCK)
        await rig.write_each(range(90))
        assert await rig.reclaim() == 0
        await rig.write([90])
        assert await rig.reclaim() == 3


# Global quotas.


async def test_a_global_quota_takes_from_the_groups_that_draw_from_it() -> None:
    groups = [group("x", blocks=1000, quota="q"), group("y", blocks=1000, quota="q"), group("z", blocks=1000)]
    with levels(groups, [instance(each.name, each.name) for each in groups]) as rig:
        await rig.registry.quotas.set(GlobalQuota("q", 100 * BLOCK, 0.5))
        await rig.write_each(range(60), "z")
        await rig.write_each(range(10), "x")
        await rig.write_each(range(40), "y")
        assert await rig.reclaim() == 0
        await rig.write([40], "y")
        assert await rig.reclaim() == 3
        assert {each.instance.instance_id for each in rig.evicted} == {"y"}
        assert rig.reasons() == {"global": 3}
        assert rig.remaining("z") == 60 * BLOCK


async def test_a_global_quota_above_one_never_evicts() -> None:
    with levels(group(blocks=1000, mark=0, quota="q")) as rig:
        await rig.registry.quotas.set(GlobalQuota("q", 10 * BLOCK, 1.5))
        await rig.write_each(range(10))
        assert await rig.reclaim() == 0
        with pytest.raises(CapacityError):
            await rig.write([10])


# Where marks lie.


@pytest.mark.parametrize("mark", [0.0, 1.01, 2.0])
async def test_a_mark_above_one_or_unset_is_off(mark: float) -> None:
    with levels(group(blocks=10, mark=mark, max_keys=10, types={DUMMY: 100})) as rig:
        await rig.write_each(range(10))
        assert await rig.reclaim() == 0
        with pytest.raises(CapacityError):
            await rig.write([10])
        assert rig.woken


@pytest.mark.parametrize(("hysteresis", "goes"), [(None, 3), (0.0, 1), (0.1, 11), (0.5, 51), (0.9, 81)])
async def test_the_hysteresis_is_how_far_eviction_goes(hysteresis: float | None, goes: int) -> None:
    with levels(group(blocks=100, mark=0.8, hysteresis=hysteresis)) as rig:
        await rig.write_each(range(80))
        assert await rig.reclaim() == 0
        await rig.write([80])
        assert await rig.reclaim() == goes
        assert await rig.reclaim() == 0


@pytest.mark.parametrize("level", ["group", "type", "keys", "storage", "global"])
async def test_a_mark_of_one_still_makes_room_before_a_write_is_refused(level: str) -> None:
    """Nobody is refused while something could be evicted."""
    limits = {"types": {DUMMY: 100}} if level == "type" else {"max_keys": 10} if level == "keys" else {}
    quota = "q" if level == "global" else ""
    configured = group(blocks=10 if level == "group" else 1000, mark=1.0, quota=quota, **limits)  # type: ignore[arg-type]
    with levels(configured) as rig:
        if level == "storage":
            await rig.limit_storage("a", 100, 1.0)
        if level == "global":
            await rig.registry.quotas.set(GlobalQuota("q", 100, 1.0))
        for key in range(30):
            await rig.write([key])
            await rig.reclaim()
            await rig.delete()
        assert await rig.left(range(29, 30)) == [29]


@pytest.mark.parametrize("level", ["group", "type", "keys", "storage", "global", "size"])
@pytest.mark.parametrize("mark", [0.8, 1.0])
async def test_a_write_that_crosses_a_mark_wakes(level: str, mark: float) -> None:
    """Whatever there is to evict after a write, somebody was woken for."""
    limits = {"types": {DUMMY: 100}} if level == "type" else {"max_keys": 10} if level == "keys" else {}
    size = {"used_size": 80} if level == "size" else {}
    quota = "q" if level == "global" else ""
    blocks = 10 if level == "group" else 1000
    configured = group(blocks=blocks, mark=mark, quota=quota, **limits, **size)  # type: ignore[arg-type]
    with levels(configured) as rig:
        if level == "storage":
            await rig.limit_storage("a", 100, mark)
        if level == "global":
            await rig.registry.quotas.set(GlobalQuota("q", 100, mark))
        for key in range(10):
            await rig.write([key])
            woken = bool(rig.woken)
            assert (await rig.reclaim() > 0) == woken, key
            rig.woken.clear()
            await rig.delete()
            if woken:
                return
        raise AssertionError("no mark was ever crossed")


async def test_nothing_elsewhere_goes_where_all_that_would_help_is_pinned() -> None:
    """Blocks on another type would be lost and the mark would stay crossed."""
    with levels(typed(pin_budget_bytes=1000)) as rig:
        await rig.without("a", lambda: rig.write(list(range(9))))
        await rig.pin(list(range(9)), 1000)
        await rig.without(LEVELS_POOL, lambda: rig.write_each(range(100, 120)))
        await rig.without(LEVELS_POOL, lambda: rig.write([9, 10], parent_key=8))
        assert await rig.reclaim() == 0
        assert await rig.left([*range(11), *range(100, 120)]) == [*range(11), *range(100, 120)]
        assert rig.reclaimer.stats.unmet == {"type": 30}


async def test_what_follows_stays_where_it_is_pinned_itself() -> None:
    with levels(typed(pin_budget_bytes=1000)) as rig:
        for chain in range(0, 90, 10):
            await rig.without("a", lambda chain=chain: rig.write([chain]))
            await rig.without(LEVELS_POOL, lambda chain=chain: rig.write([chain + 1, chain + 2], parent_key=chain))
            rig.wait(1)
        await rig.without(LEVELS_POOL, lambda: rig.write([3], parent_key=1))
        await rig.pin([0, 1, 3], 1000)
        await rig.reclaim()
        assert await rig.left([0, 1, 2, 3]) == [0, 1, 2, 3]
        assert rig.remaining() == (3 * 9 + 1 - 9) * BLOCK
