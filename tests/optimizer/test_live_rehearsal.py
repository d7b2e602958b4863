"""The rehearsal of a group against the manager's own core, lookup by lookup, and by hand."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import recordings
from hypothesis import given, settings
from hypothesis import strategies as st
from manager_core import Core
from thoroughness import examples

from kvcm.model import groups
from kvcm.optimizer.live.recording import Lookup
from kvcm.optimizer.live.rehearsal import UNLIMITED_BYTES, rehearse, unlimited

BLOCK_BYTES = 100
SIZES = {"g-a": BLOCK_BYTES, "g-b": 2 * BLOCK_BYTES}
POLICIES = ("leaf_lru", "lru", "lfu", "lfu_aging", "fifo", "sieve", "s3fifo")


def group_of(
    blocks: int, policy: str = "lru", mark: float = 0.9, hysteresis: float = 0.1, share: str = "", **rule: Any
) -> groups.InstanceGroup:
    strategy = groups.CacheReclaimStrategy(
        trigger_strategy=groups.TriggerStrategy(0, mark, hysteresis),
        policy=groups.EvictionPolicy(policy, **rule),
        share=share,
    )
    quota = groups.InstanceGroupQuota(blocks * BLOCK_BYTES)
    return groups.InstanceGroup("g", ("dummy",), "g", 10, quota, groups.CacheConfig(strategy))


def path(*steps: int) -> list[int]:
    """Return the keys of a path through a tree, whose steps say which way it goes at each of its blocks."""
    keys: list[int] = []
    for step in steps:
        keys.append((keys[-1] if keys else 0) * 4 + step + 1)
    return keys


Turn = tuple[str, list[int], float, int]
"""Instance, path, seconds since the turn before, blocks whose writing fails."""


def turns_of(seed: int) -> list[Turn]:
    """Return turns of two instances whose engines come back to the same few paths."""
    draw = random.Random(seed)
    return [_turn(draw) for _ in range(draw.randint(5, 40))]


def _turn(draw: random.Random) -> Turn:
    instance = draw.choice(["g-a", "g-a", "g-b"])
    steps = [draw.randint(0, 2) for _ in range(draw.randint(1, 6))]
    return instance, steps, draw.choice([0.0, 0.1, 0.3, 0.7]), draw.choice([0, 0, 0, 1, 3])


async def played(core: Core, turns: list[Turn]) -> None:
    at = 1000.0
    for instance, steps, pause, failing in turns:
        at = round(at + pause, 3)
        await core.advance(at)
        await core.read(instance, path(*steps))
        await core.write(instance, path(*steps), failing)


@settings(max_examples=examples(300), deadline=None)
@given(
    st.integers(0, 1 << 32),
    st.sampled_from(POLICIES),
    st.integers(4, 40),
    st.sampled_from([0.5, 0.9, 1.0]),
    st.sampled_from([0.0, 0.1, 0.4]),
    st.sampled_from(["", "proportional", "fixed"]),
)
def test_the_rehearsal_equals_the_core(
    seed: int, policy: str, blocks: int, mark: float, hysteresis: float, share: str
) -> None:
    """Every block that lookups found, for every policy, mark and share, with two instances of different block sizes."""
    group = group_of(blocks, policy, mark, hysteresis, share)
    core = Core(group, SIZES)
    asyncio.run(played(core, turns_of(seed)))
    recording = core.recording()
    outcome = rehearse(recording, group, SIZES)
    found = dict.fromkeys(outcome.found_blocks, 0)
    for access in recording.accesses:
        if isinstance(access, Lookup):
            found[recording.instance_names[access.instance]] += access.found
    assert outcome.found_blocks == found


recorded = partial(recordings.recorded, source="g-a")


def test_without_limits_everything_is_found_again() -> None:
    turns = [(float(second), list(range(1, 11))) for second in range(5)]
    outcome = rehearse(recorded(turns), unlimited(group_of(3)), SIZES)
    assert (outcome.found_blocks, outcome.asked_blocks) == ({"g-a": 40}, {"g-a": 50})
    assert outcome.hit_rate == 0.8
    assert unlimited(group_of(3)).quota.capacity == UNLIMITED_BYTES


def test_an_age_frees_space() -> None:
    turns = [(float(second), [100 * second + block for block in range(10)]) for second in range(60)]
    plain = rehearse(recorded(turns), group_of(1000), SIZES)
    aged = rehearse(recorded(turns), group_of(1000, ttl_seconds=5), SIZES)
    assert aged.mean_used_bytes < plain.mean_used_bytes / 3
    assert aged.evicted_blocks > 400


def test_blocks_in_deletion_take_space_until_deleted() -> None:
    turns = [(float(second) / 10, [100 * second + block for block in range(10)]) for second in range(60)]
    group = group_of(40, mark=0.5)
    strategy = replace(group.cache_config.reclaim_strategy, delay_before_delete_ms=5000)
    slow = replace(group, cache_config=replace(group.cache_config, reclaim_strategy=strategy))
    assert rehearse(recorded(turns), group, SIZES).refused_blocks == 0
    assert rehearse(recorded(turns), slow, SIZES).refused_blocks > 100


def test_warm_blocks_are_present_again() -> None:
    """The blocks were found at once, so they were there; and a group that is full now was full then."""
    recording = recorded([(0.0, [1, 2, 3, 4])], hits=4)
    assert rehearse(recording, group_of(10), SIZES).hit_rate == 1.0
    assert rehearse(recording, group_of(10), SIZES, used_bytes=1000).mean_used_bytes == 800
    assert rehearse(recording, group_of(3), SIZES).hit_rate < 1.0


def test_an_engine_writes_missed_blocks_again() -> None:
    """It found four blocks and wrote the fifth; where the four are gone it would have written them, too."""
    recording = recorded([(0.0, [1, 2, 3, 4]), (1.0, [11, 12, 13]), (2.0, [1, 2, 3, 4]), (3.0, [1, 2, 3, 4])])
    only_new = [
        access._replace(blocks=access.blocks[3:]) if place == 7 else access
        for place, access in enumerate(recording.accesses)
    ]
    trimmed = replace(recording, accesses=only_new)
    group = group_of(5, mark=1.0, hysteresis=0.0)
    assert rehearse(trimmed, group, SIZES).found_blocks == rehearse(recording, group, SIZES).found_blocks


def test_an_instance_may_have_a_policy_of_its_own() -> None:
    turns = [(float(second), [1, 2, 3] if second % 2 else [10 * second + 100]) for second in range(40)]
    group = group_of(5, "fifo", mark=1.0, hysteresis=0.0)
    strategy = group.cache_config.reclaim_strategy
    own = replace(strategy, instance_overrides=(groups.InstanceOverride("g-a", groups.EvictionPolicy("lru")),))
    changed = replace(group, cache_config=replace(group.cache_config, reclaim_strategy=own))
    sizes = {"g-a": BLOCK_BYTES}
    assert rehearse(recorded(turns), changed, sizes).hit_rate > rehearse(recorded(turns), group, sizes).hit_rate


@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_recorded_gives_nothing(policy: str) -> None:
    outcome = rehearse(recorded([]), group_of(5, policy), SIZES)
    assert (outcome.hit_rate, outcome.mean_used_bytes) == (0.0, 0.0)
