"""Iterations end, whatever is done in between, and name each block once; chains leave from their tail."""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcm.model.groups import EvictionPolicy
from kvcm.reclaim.policies import POLICIES, LeafLru
from kvcm.reclaim.policies.policy import Policy

COUNT = 30


def no_child(slot: int) -> bool:
    return True


def filled(name: str, count: int = COUNT) -> Policy:
    """Return a policy with some blocks that were read, up to four times."""
    policy = POLICIES[name](no_child, EvictionPolicy(name, 60, ttl_sliding=True))
    for slot in range(count):
        policy.insert(slot, slot)
    for slot in range(0, count, 2):
        policy.touch(slot, slot % 5)
    return policy


@pytest.fixture(params=sorted(POLICIES))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_an_iteration_that_evicts_nothing_names_every_block_once(name: str) -> None:
    policy = filled(name)
    for _ in range(3):
        assert sorted(policy.victims()) == list(range(COUNT))


def test_an_iteration_that_evicts_all_names_every_block_once(name: str) -> None:
    policy = filled(name)
    found = []
    for slot in policy.victims():
        policy.remove(slot)
        found.append(slot)
    assert sorted(found) == list(range(COUNT))
    assert len(policy) == 0
    assert list(policy.victims()) == []


@pytest.mark.parametrize("every", [2, 3])
def test_an_iteration_that_evicts_some_names_none_twice(name: str, every: int) -> None:
    policy = filled(name)
    found = []
    for slot in policy.victims():
        found.append(slot)
        if len(found) % every == 0:
            policy.remove(slot)
    assert sorted(found) == list(range(COUNT))
    assert len(policy) == COUNT - COUNT // every


def test_a_new_block_in_the_slot_of_one_that_was_passed_over_is_another_block(name: str) -> None:
    policy = POLICIES[name](no_child, EvictionPolicy(name))
    for slot in range(3):
        policy.insert(slot, slot)
    victims = policy.victims()
    assert [next(victims), next(victims)] == [0, 1]
    policy.remove(0)
    policy.insert(0, 99)
    policy.remove(2)
    assert list(victims) == [0]


def touch_it(policy: Policy, slot: int) -> None:
    policy.touch(slot)


def replace_it(policy: Policy, slot: int) -> None:
    policy.remove(slot)
    policy.insert(slot, -slot - 1)


def insert_another(policy: Policy, slot: int) -> None:
    policy.insert(len(policy), len(policy))


def rename_it(policy: Policy, slot: int) -> None:
    policy.moved(slot, slot + 100)


@pytest.mark.parametrize("between", [touch_it, replace_it, insert_another, rename_it])
def test_an_iteration_ends_whatever_is_done_with_its_victims(name: str, between: Callable[[Policy, int], None]) -> None:
    policy = filled(name)
    found = []
    for slot in islice(policy.victims(), 10 * COUNT):
        assert slot in policy
        found.append(slot)
        between(policy, slot)
    assert 0 < len(found) <= COUNT


def test_a_rename_changes_no_order(name: str) -> None:
    plain, renamed = filled(name), filled(name)
    for slot in range(COUNT):
        renamed.moved(slot, slot + 100)
    # One block to the name that another one had, in front of the arrays' end and behind it.
    renamed.moved(100, 5)
    renamed.moved(129, 4000)
    names = {**{slot + 100: slot for slot in range(COUNT)}, 5: 0, 4000: 29}
    assert [names[slot] for slot in renamed.victims()] == list(plain.victims())


def test_an_iteration_that_is_given_up_leaves_nothing_behind(name: str) -> None:
    policy, fresh = filled(name), filled(name)
    victim = next(policy.victims())
    abandoned = policy.victims()
    next(abandoned)
    del abandoned
    gc.collect()
    assert policy._links.cursors == []  # type: ignore[attr-defined]
    assert next(policy.victims()) == victim == next(fresh.victims())


class Forest:
    """Chains of blocks: `parents[slot]` is a smaller slot, or -1."""

    def __init__(self, parents: list[int]) -> None:
        self.parents = parents
        self.resident = set(range(len(parents)))

    def is_leaf(self, slot: int) -> bool:
        return all(self.parents[each] != slot for each in self.resident)

    def path(self, slot: int) -> list[int]:
        """Return a block and those before it, the head first."""
        return [*(self.path(self.parents[slot]) if self.parents[slot] >= 0 else []), slot]


forests = st.lists(st.integers(-1, 10**6), min_size=1, max_size=25).map(
    lambda picks: Forest([pick % (at + 1) - 1 for at, pick in enumerate(picks)])
)


@given(forests, st.lists(st.integers(0, 10**6), max_size=20), st.booleans(), st.booleans())
def test_leaf_lru_takes_every_chain_from_its_tail(
    forest: Forest, reads: list[int], tail_first: bool, at_once: bool
) -> None:
    """Invariant 7; the first victim of an iteration is the leaf that was read least lately, and one takes all."""
    policy = LeafLru(forest.is_leaf)
    order = list(forest.resident)
    for slot in order:
        policy.insert(slot, slot)
    for pick in reads:
        path = forest.path(pick % len(forest.parents))
        for slot in path[::-1] if tail_first else path:
            policy.touch(slot)
            order.remove(slot)
            order.append(slot)
    victims = policy.victims()
    while order:
        oldest = next(slot for slot in order if forest.is_leaf(slot))
        slot = next(victims) if at_once else next(policy.victims())
        assert forest.is_leaf(slot)
        if not at_once:
            assert slot == oldest
        order.remove(slot)
        forest.resident.remove(slot)
        policy.remove(slot)


def test_leaf_lru_looks_at_few_blocks_of_chains_that_are_touched_from_the_tail() -> None:
    looks = 0

    def is_leaf(slot: int) -> bool:
        nonlocal looks
        looks += 1
        return slot % 10 == 9 or slot + 1 not in policy

    policy = LeafLru(is_leaf)
    for head in range(0, 1000, 10):
        for slot in reversed(range(head, head + 10)):
            policy.insert(slot, slot)
    for slot in policy.victims():
        policy.remove(slot)
    assert len(policy) == 0
    assert looks <= 2000


def test_leaf_lru_goes_on_where_it_was_when_many_followed_blocks_are_older() -> None:
    looks = 0

    def is_leaf(slot: int) -> bool:
        nonlocal looks
        looks += 1
        return slot >= 1000 and (slot % 2 == 1 or slot + 1 not in policy)

    policy = LeafLru(is_leaf)
    for slot in [*range(1000), *range(1000, 1200)]:
        policy.insert(slot, slot)
    found = []
    for slot in policy.victims():
        found.append(slot)
        policy.remove(slot)
    # An even block is followed by the odd one behind it, and comes right after it.
    assert found == [slot for odd in range(1001, 1200, 2) for slot in (odd, odd - 1)]
    assert looks < 1000 + 200 * 260


def test_leaf_lru_takes_a_block_in_its_turn_though_another_lies_between() -> None:
    """Only the tail was read lately, so its parent is not its neighbour in the order."""
    followers = {0: 2, 1: 0}  # the chain is 1, 0, 2
    policy = LeafLru(lambda slot: followers.get(slot, -1) not in policy)
    for slot in (0, 1, 3, 2):
        policy.insert(slot, slot)
    victims = policy.victims()
    assert next(victims) == 3  # stays
    assert next(victims) == 2
    for slot in (2, 0, 1):
        policy.remove(slot)
        assert next(victims, None) == {2: 0, 0: 1, 1: None}[slot]
