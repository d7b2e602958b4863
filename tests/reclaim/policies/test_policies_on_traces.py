"""What each policy is worth on the hand-sized trace: the figures were worked out by hand, and by other programs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from trace_runner import TRACE, CacheOf

from kvcm.model.groups import EvictionPolicy
from kvcm.reclaim.policies import POLICIES, Fifo, LeafLru, Lfu, Lru, S3Fifo, Sieve, by_age
from kvcm.reclaim.policies.policy import IsLeaf, Policy

MAKE: dict[str, Callable[[IsLeaf], Policy]] = {
    "fifo": lambda is_leaf: Fifo(),
    "leaf_lru": LeafLru,
    "lfu": lambda is_leaf: Lfu(ageing=False),
    "lru": lambda is_leaf: Lru(),
    "s3fifo": lambda is_leaf: S3Fifo(),
    "sieve": lambda is_leaf: Sieve(),
    "ttl fixed": lambda is_leaf: by_age(sliding=False),
    "ttl sliding": lambda is_leaf: by_age(sliding=True),
}


@pytest.mark.parametrize(
    ("name", "hits"),
    [
        ("fifo", (4, 7, 7, 18)),
        ("leaf_lru", (11, 12, 13, 18)),
        ("lfu", (10, 12, 12, 18)),
        ("lru", (6, 9, 12, 18)),
        ("sieve", (10, 12, 12, 18)),
        ("ttl fixed", (4, 7, 7, 18)),
        ("ttl sliding", (6, 9, 12, 18)),
    ],
)
def test_prefix_hits_of_the_hand_sized_trace(name: str, hits: tuple[int, ...]) -> None:
    found = []
    for capacity in (4, 5, 6, 8):
        cache = CacheOf(capacity, MAKE[name])
        for ids in TRACE:
            cache.read(ids, spares_path=name == "leaf_lru")
        found.append(cache.prefix_hits)
    assert tuple(found) == hits


@pytest.mark.parametrize("name", MAKE)
def test_a_cache_for_all_blocks_evicts_none(name: str) -> None:
    cache = CacheOf(8, MAKE[name])
    for ids in TRACE:
        cache.read(ids)
    assert sorted(cache.slots) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert cache.prefix_hits == 18


def test_s3fifo_by_hand() -> None:
    """Ten blocks: one of them in small, nine in main, nine names remembered."""
    cache = CacheOf(10, MAKE["s3fifo"])
    for each in range(10):
        cache.read([each])
    for each in (0, 0, 1, 2, 2, 2):
        cache.read([each])
    cache.read([10])  # 0 goes to main; 1, read once, leaves and is remembered
    assert 1 not in cache.slots
    cache.read([1])  # 2 goes to main, 3 leaves, and 1 comes back into main
    assert 3 not in cache.slots
    for each in range(11, 18):
        cache.read([each])  # the rest of small, from 4 to 10, leaves in its order
    assert sorted(cache.slots) == [0, 1, 2, *range(11, 18)]
    for each in range(4, 11):
        cache.read([each])  # they come back into main, which grows to ten; 11 and later leave small
    assert sorted(cache.slots) == [0, 1, 2, *range(4, 11)]
    cache.read([0])
    cache.read([99])  # main is over its size: 0 was read and goes round again, 2 is the oldest of the others
    assert sorted(cache.slots) == [0, 1, *range(4, 11), 99]


def test_s3fifo_fills_main_while_it_warms_up() -> None:
    cold, warm = S3Fifo(), S3Fifo(warmup=1)
    for policy in (cold, warm):
        for slot in range(10):
            policy.insert(slot, slot)
    assert next(cold.victims()) == 0
    # One block in small, nine in main: not more than its share, so small gives up its only block, then main.
    assert list(warm.victims()) == list(range(10))
    warm.remove(3)
    warm.insert(3, 30)
    warm.insert(10, 10)  # the first eviction ended the rule: both are in small, beside 0
    for slot in range(4, 9):
        warm.remove(slot, evicted=False)
    assert [slot for slot in warm.victims() if slot in (3, 10)] == [3, 10]


def test_an_lfu_that_ages_forgets_old_glory() -> None:
    """A block that was read a lot once leaves after as many evictions; without ageing it never does."""

    def evictions_until_gone(policy: Lfu) -> int | None:
        policy.insert(0, 0)
        policy.touch(0, reads=20)
        for number in range(1, 100):
            policy.insert(number, number)
            victim = next(policy.victims())
            policy.remove(victim)
            if victim == 0:
                return number
        return None

    assert evictions_until_gone(Lfu(ageing=False)) is None
    assert evictions_until_gone(Lfu(ageing=True)) == 21


def test_only_evictions_for_want_of_room_age_the_others() -> None:
    policy = Lfu(ageing=True)
    policy.insert(0, 0)
    policy.touch(0, reads=2)
    policy.insert(1, 1)
    policy.touch(1, reads=8)
    policy.remove(1, evicted=False)
    policy.insert(2, 2)
    assert list(policy.victims()) == [2, 0]
    policy.insert(1, 1)
    policy.touch(1, reads=8)
    policy.remove(1)
    policy.insert(3, 3)
    assert list(policy.victims()) == [2, 0, 3]


def test_only_evictions_for_want_of_room_are_remembered_by_s3fifo() -> None:
    policy = S3Fifo()
    for slot in range(20):
        policy.insert(slot, slot)
    policy.remove(4)
    policy.remove(5, evicted=False)
    policy.insert(4, 4)
    policy.insert(5, 5)
    # Small has far more than its share: it leaves first, with 5 in it and without 4, which was remembered.
    assert list(policy.victims()) == [0, 1, 2, 3, *range(6, 20), 5, 4]


def test_s3fifo_keeps_shares_of_the_size_it_is_told() -> None:
    """One block in small, nine in main: ten blocks are one too many in main for eight, and not for ten."""

    def first_victim(blocks: int | None) -> int:
        policy = S3Fifo(warmup=1, blocks=blocks)
        for slot in range(10):
            policy.insert(slot, slot)
        return next(policy.victims())

    assert [first_victim(blocks) for blocks in (None, 10, 8)] == [0, 0, 1]


@pytest.mark.parametrize("name", POLICIES)
def test_every_name_makes_a_policy_that_evicts(name: str) -> None:
    policy = POLICIES[name](lambda slot: slot != 0, EvictionPolicy(name))
    for slot in (2, 0, 1):
        policy.insert(slot, slot)
    assert list(policy.victims()) == ([2, 1] if name == "leaf_lru" else [2, 0, 1])


def test_the_live_ttl_counts_from_what_it_is_told_and_the_live_lfu_ages() -> None:
    def victims(policy: Policy) -> list[int]:
        policy.insert(0, 0)
        policy.insert(1, 1)
        policy.touch(0)
        return list(policy.victims())

    is_leaf: IsLeaf = bool
    assert victims(POLICIES["ttl"](is_leaf, EvictionPolicy("ttl", 60))) == [0, 1]
    assert victims(POLICIES["ttl"](is_leaf, EvictionPolicy("ttl", 60, ttl_sliding=True))) == [1, 0]
    lfu = POLICIES["lfu"](is_leaf, EvictionPolicy("lfu"))
    lfu.insert(0, 0)
    lfu.touch(0)
    lfu.insert(1, 1)
    lfu.remove(1)
    lfu.insert(1, 1)
    lfu.remove(1)
    lfu.insert(1, 1)
    assert list(lfu.victims()) == [0, 1]
