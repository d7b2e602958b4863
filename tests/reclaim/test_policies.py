"""Eviction policies: against models, while they are iterated over, and after a restart."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from random import Random
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from policy_models import MODELS, Walk
from thoroughness import examples

from kvcm.model.groups import EvictionPolicy
from kvcm.reclaim.policies import POLICIES, Fifo, LeafLru, Lfu, Lru, S3Fifo, Sieve, Summary
from kvcm.reclaim.policies.policy import IsLeaf, Policy, Summaries

MAKE: dict[str, Callable[[IsLeaf], Policy]] = {
    "fifo": lambda is_leaf: Fifo(),
    "leaf_lru": LeafLru,
    "lfu": lambda is_leaf: Lfu(ageing=False),
    "lfu_aging": lambda is_leaf: Lfu(ageing=True),
    "lru": lambda is_leaf: Lru(),
    "s3fifo": lambda is_leaf: S3Fifo(),
    "sieve": lambda is_leaf: Sieve(),
}
SLOTS = 16
BLOCKS = 24
PICKS = st.integers(0, 10**6)


class Running(NamedTuple):
    victims: Iterator[int]
    walk: Walk


class PolicyMachine(RuleBasedStateMachine):
    """A cache whose policy and model must agree on every victim."""

    name = ""

    def __init__(self) -> None:
        super().__init__()
        self.policy = MAKE[self.name](lambda slot: self.is_leaf(self.blocks[slot]))
        self.model = MODELS[self.name](self.is_leaf)
        self.blocks: dict[int, int] = {}
        self.parents: dict[int, int] = {}
        self.running: list[Running] = []
        self.last_victim: int | None = None

    def is_leaf(self, block: int) -> bool:
        return block not in self.parents.values()

    def slot_of(self, block: int | None) -> int:
        return next(slot for slot, each in self.blocks.items() if each == block)

    def resident(self, pick: int) -> int:
        slots = list(self.blocks)
        return slots[pick % len(slots)]

    def free(self, pick: int) -> int:
        slots = [slot for slot in range(SLOTS) if slot not in self.blocks]
        return slots[pick % len(slots)]

    @initialize(count=st.integers(0, 12))
    def fill(self, count: int) -> None:
        for each in range(count):
            self.insert(each, each, each)

    @precondition(lambda self: len(self.blocks) < SLOTS)
    @rule(slot=PICKS, block=st.integers(0, BLOCKS - 1), parent=PICKS)
    def insert(self, slot: int, block: int, parent: int) -> None:
        if block in self.blocks.values():
            return
        if self.blocks and parent % 2:
            self.parents[block] = self.blocks[self.resident(parent)]
        slot = self.free(slot)
        self.blocks[slot] = block
        self.policy.insert(slot, block)
        self.model.insert(block)

    @precondition(lambda self: len(self.blocks) < SLOTS)
    @rule(slots=st.lists(PICKS, min_size=1, max_size=4), blocks=st.lists(st.integers(0, BLOCKS - 1), unique=True))
    def insert_all(self, slots: list[int], blocks: list[int]) -> None:
        free = [slot for slot in range(SLOTS) if slot not in self.blocks]
        chosen = list(dict.fromkeys(free[pick % len(free)] for pick in slots))
        new = [block for block in blocks if block not in self.blocks.values()][: len(chosen)]
        together = dict(zip(chosen, new, strict=False))
        self.blocks |= together
        self.policy.insert_all(list(together), list(together.values()))
        for block in together.values():
            self.model.insert(block)

    @precondition(lambda self: self.blocks)
    @rule(pick=PICKS, reads=st.integers(1, 4))
    def touch(self, pick: int, reads: int) -> None:
        slot = self.resident(pick)
        self.policy.touch(slot, reads)
        self.model.touch(self.blocks[slot], reads)

    @precondition(lambda self: self.blocks)
    @rule(picks=st.lists(PICKS, min_size=1, max_size=8), times=st.integers(1, 3))
    def touch_all(self, picks: list[int], times: int) -> None:
        slots = list(dict.fromkeys(map(self.resident, picks)))
        for again in range(times):  # the second time they may stand together
            reads = [1 + (place + again) % 4 for place in range(len(slots))]
            self.policy.touch_all(slots, reads)
            for slot, count in zip(slots, reads, strict=True):
                self.model.touch(self.blocks[slot], count)

    @precondition(lambda self: self.blocks)
    @rule(pick=PICKS, evicted=st.booleans())
    def remove(self, pick: int, evicted: bool) -> None:
        self._remove(self.resident(pick), evicted)

    def _remove(self, slot: int, evicted: bool) -> None:
        block = self.blocks.pop(slot)
        self.parents.pop(block, None)
        self.policy.remove(slot, evicted=evicted)
        self.model.remove(block, evicted)

    @precondition(lambda self: 0 < len(self.blocks) < SLOTS)
    @rule(pick=PICKS, to=PICKS)
    def move(self, pick: int, to: int) -> None:
        slot, to = self.resident(pick), self.free(to)
        self.policy.moved(slot, to)
        self.blocks[to] = self.blocks.pop(slot)

    @precondition(lambda self: len(self.running) < 2)
    @rule()
    def begin(self) -> None:
        self.running.append(Running(self.policy.victims(), self.model.begin()))
        self.advance(len(self.running) - 1)  # an iteration begins when it is asked for the first time

    @precondition(lambda self: self.running)
    @rule(which=PICKS)
    def advance(self, which: int) -> None:
        each = self.running[which % len(self.running)]
        expected = self.model.next(each.walk)
        slot = next(each.victims, None)
        assert (None if slot is None else self.blocks[slot]) == expected
        self.last_victim = expected
        if expected is None:
            self.forget(which)

    @precondition(lambda self: self.last_victim in self.blocks.values())
    @rule(count=st.integers(1, 6), which=PICKS)
    def evict(self, count: int, which: int) -> None:
        """Evict the last victim, and a few more in the same iteration."""
        for _ in range(count):
            if self.last_victim not in self.blocks.values():
                return
            self._remove(self.slot_of(self.last_victim), evicted=True)
            if self.running:
                self.advance(which)

    @precondition(lambda self: self.running)
    @rule(which=PICKS)
    def forget(self, which: int) -> None:
        each = self.running.pop(which % len(self.running))
        each.victims.close()  # type: ignore[attr-defined]
        self.model.end(each.walk)

    @invariant()
    def agree_on_the_resident_blocks(self) -> None:
        assert len(self.policy) == len(self.blocks) == len(self.model.order())
        assert [slot for slot in range(-3, SLOTS + 3) if slot in self.policy] == sorted(self.blocks)

    def teardown(self) -> None:
        """Evict everything, one iteration per victim, as a full cache does."""
        while self.running:
            self.forget(0)
        while self.blocks:
            walk = self.model.begin()
            expected = self.model.next(walk)
            slot = next(self.policy.victims(), None)
            assert (None if slot is None else self.blocks[slot]) == expected
            self._remove(self.resident(0) if slot is None else slot, evicted=True)  # blocks may follow each other
            self.model.end(walk)


def test_every_policy_is_compared_with_a_model() -> None:
    assert POLICIES.keys() - MAKE.keys() == {"ttl"}, "ttl is fifo or lru"


@pytest.mark.parametrize("name", MAKE)
def test_a_policy_does_what_its_model_does(name: str) -> None:
    machine = type("Machine", (PolicyMachine,), {"name": name})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=examples(60), stateful_step_count=50, deadline=None)
    )


# ── What the models leave open: warm-up, sizes, names ──


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


def test_s3fifo_keeps_shares_of_the_size_it_is_reported() -> None:
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


def test_the_live_ttl_counts_from_what_it_is_reported_and_of_the_live_lfus_one_ages() -> None:
    def victims(policy: Policy) -> list[int]:
        policy.insert(0, 0)
        policy.insert(1, 1)
        policy.touch(0)
        return list(policy.victims())

    is_leaf: IsLeaf = bool
    assert victims(POLICIES["ttl"](is_leaf, EvictionPolicy("ttl", 60))) == [0, 1]
    assert victims(POLICIES["ttl"](is_leaf, EvictionPolicy("ttl", 60, ttl_sliding=True))) == [1, 0]
    for name, order in (("lfu", [1, 0]), ("lfu_aging", [0, 1])):
        lfu = POLICIES[name](is_leaf, EvictionPolicy(name))
        lfu.insert(0, 0)
        lfu.touch(0)
        lfu.insert(1, 1)
        lfu.remove(1)
        lfu.insert(1, 1)
        lfu.remove(1)
        lfu.insert(1, 1)
        assert list(lfu.victims()) == order


# ── Renames, abandoned iterations, and how many blocks are looked at ──


COUNT = 30


def filled(name: str) -> Policy:
    """Return a policy with some blocks that were read, up to four times."""
    policy = POLICIES[name](lambda _slot: True, EvictionPolicy(name, 60, ttl_sliding=True))
    for slot in range(COUNT):
        policy.insert(slot, slot)
    for slot in range(0, COUNT, 2):
        policy.touch(slot, slot % 5)
    return policy


@pytest.fixture(params=sorted(POLICIES))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


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


def test_leaf_lru_checks_few_blocks_of_chains_that_are_touched_from_the_tail() -> None:
    checks = 0

    def is_leaf(slot: int) -> bool:
        nonlocal checks
        checks += 1
        return slot % 10 == 9 or slot + 1 not in policy

    policy = LeafLru(is_leaf)
    for head in range(0, 1000, 10):
        for slot in reversed(range(head, head + 10)):
            policy.insert(slot, slot)
    for slot in policy.victims():
        policy.remove(slot)
    assert len(policy) == 0
    assert checks <= 2000


def test_leaf_lru_goes_on_where_it_was_when_many_followed_blocks_are_older() -> None:
    checks = 0

    def is_leaf(slot: int) -> bool:
        nonlocal checks
        checks += 1
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
    assert checks < 1000 + 200 * 260


# ── Blocks put back into an order by what a store remembers of them leave as they would have left ──


RESTORED_BLOCKS = 200


def restored(make: Callable[[], Policy], summaries: dict[int, Summary]) -> Policy:
    policy = make()
    for slot in sorted(summaries, key=lambda slot: policy.rank(summaries[slot])):
        policy.restore(slot, slot, summaries[slot])
    return policy


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("make", [Lru, Fifo, lambda: Lfu(ageing=False), lambda: LeafLru(lambda slot: True)])
def test_a_restart_changes_no_order(make: Callable[[], Policy], seed: int) -> None:
    random = Random(seed)
    policy = make()
    summaries: dict[int, Summary] = {}
    for second in range(3 * RESTORED_BLOCKS):
        slot = random.randrange(RESTORED_BLOCKS)
        if slot not in policy:
            policy.insert(slot, slot)
            summaries[slot] = Summary(second, second, 0)
        elif second % 7:
            policy.touch(slot, reads := random.randrange(1, 4))
            summaries[slot] = Summary(summaries[slot].written_at, second, summaries[slot].reads + reads)
        else:
            policy.remove(slot)
            del summaries[slot]
    after = restored(make, summaries)
    assert list(after.victims()) == list(policy.victims())
    for slot in list(summaries)[::3]:
        policy.touch(slot)
        after.touch(slot)
    assert list(after.victims()) == list(policy.victims())


@pytest.mark.parametrize("name", sorted(MAKE))
def test_blocks_put_back_together_stand_as_those_put_back_one_by_one(name: str) -> None:
    random = Random(7)
    policies = [MAKE[name](lambda slot: True) for _ in range(2)]
    for policy in policies:
        policy.insert(1000, 1000)
    reads = {slot: random.choice([0, 0, 1, 2, 70_000]) for slot in random.sample(range(500), 400)}
    summaries = {slot: Summary(slot % 7, slot % 7 + count, count) for slot, count in reads.items()}
    order = sorted(summaries, key=lambda slot: policies[0].rank(summaries[slot]))
    columns = [np.array(column) for column in zip(*(summaries[slot] for slot in order), strict=True)]
    ranks = zip(*policies[0].rank(Summaries(*columns)), strict=True)
    assert list(ranks) == [policies[0].rank(summaries[slot]) for slot in order]
    for slot in order:
        policies[0].restore(slot, -slot, summaries[slot])
    policies[1].restore_all(np.array(order), -np.array(order), Summaries(*columns))
    for slot in random.sample(order, 100):
        for policy in policies:
            policy.touch(slot)
    one_by_one, together = (list(policy.victims()) for policy in policies)
    assert one_by_one == together
    assert len(together) == 401


def summary(written_at: float, reads: int) -> Summary:
    return Summary(written_at, written_at + reads, reads)


def test_sieve_evicts_unread_blocks_and_then_the_others_each_by_age() -> None:
    summaries = {0: summary(4, 0), 1: summary(1, 2), 2: summary(2, 0), 3: summary(3, 1)}
    policy = restored(Sieve, summaries)
    policy.insert(4, 4)
    assert list(policy.victims()) == [2, 0, 4, 1, 3]


def test_s3fifo_puts_blocks_read_twice_into_main() -> None:
    summaries = {slot: summary(slot, 2 if slot < 6 else slot % 2) for slot in range(10)}
    policy = restored(S3Fifo, summaries)
    assert list(policy.victims()) == [*range(6, 10), *range(6)]
    policy.touch(7)  # its read before the restart still counts
    for slot in (6, 8, 9):
        policy.remove(slot)
    assert list(policy.victims()) == [*range(6), 7]


@pytest.mark.parametrize("make", [lambda: Lfu(ageing=False), lambda: Lfu(ageing=True), S3Fifo, Sieve])
def test_counts_of_any_size_are_taken(make: Callable[[], Policy]) -> None:
    policy = restored(make, {0: summary(0, 2**40), 1: summary(1, 2**31 - 1)})
    policy.touch(0, 2**31)
    policy.insert(2, 2)
    assert next(policy.victims()) == 2
