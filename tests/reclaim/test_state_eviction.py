"""Linear-attention state under pressure: states between go first, and nothing of the attention part with them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from levels_rig import LEVELS_POOL, Levels, group, instance, levels

from kvcm.cache.match import MatchMode
from kvcm.model.groups import CachePreferStrategy, EvictionPolicy, InstanceGroup
from kvcm.model.instances import Instance
from kvcm.model.locations import LocationStatus
from kvcm.model.storages import StorageType
from kvcm.model.uri import LocationUri

KV, STATE = 10, 30
CHAIN = list(range(1, 9))
ALL_POLICIES = pytest.mark.parametrize("policy", ["leaf_lru", "lru", "lfu", "fifo", "sieve", "s3fifo", "ttl"])


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
        assert len(await rig.seen(CHAIN, mode=MatchMode.PREFIX_MATCH)) == 8


@pytest.mark.parametrize("apart", [False, True])
async def test_all_states_between_go_before_any_block(apart: bool) -> None:
    with levels(bytes_for(8 * (KV + STATE), low=7 * STATE - 1), hybrid()) as rig:
        await (write_apart(rig, CHAIN) if apart else rig.write(CHAIN))
        await rig.reclaim()
        assert await states(rig, CHAIN) == [8]
        assert await rig.left(CHAIN) == CHAIN
        assert rig.remaining() == 8 * KV + STATE


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


async def test_a_match_that_needs_state_ends_at_the_last_one() -> None:
    """Invariant 1: whoever reads in either way gets nothing that is being deleted."""
    with levels(bytes_for(9 * KV + 8 * STATE, low=7 * STATE - 1), hybrid()) as rig:
        await rig.write(CHAIN)
        await rig.write([20], parent_key=8, spec_groups=["light"])
        await rig.reclaim()
        kept = await states(rig, CHAIN)
        assert len(kept) == 1
        found = await rig.seen([*CHAIN, 20], mode=MatchMode.PREFIX_MATCH_WITH_MAMBA)
        assert len(found) == kept[-1]
        assert found[-1].get("state")
        assert len(await rig.seen([*CHAIN, 20], mode=MatchMode.PREFIX_MATCH)) == 9


@pytest.mark.parametrize("apart", [False, True])
async def test_only_the_bytes_of_the_states_are_deleted(apart: bool) -> None:
    """Invariants 4 and 5: what was marked, what is gone and what still counts are the same."""
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


async def test_states_of_an_instance_without_spec_groups() -> None:
    registered = instance(specs={"kv": KV, "state": STATE}, linear=("state",))
    with levels(bytes_for(8 * (KV + STATE), low=7 * STATE - 1), registered) as rig:
        await rig.write(CHAIN)
        await rig.reclaim()
        assert await states(rig, CHAIN) == [8]
        assert await rig.left(CHAIN) == CHAIN


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
