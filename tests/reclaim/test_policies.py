"""Eviction policies: against models, on traces, while they are iterated over, and after a restart."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from itertools import islice
from random import Random
from typing import NamedTuple

import pytest
from hypothesis import given, settings
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
from trace_runner import TRACE, CacheOf

from kvcm.model.groups import EvictionPolicy
from kvcm.reclaim.policies import POLICIES, Fifo, LeafLru, Lfu, Lru, S3Fifo, Sieve, Summary, by_age
from kvcm.reclaim.policies.policy import IsLeaf, Policy

MAKE: dict[str, Callable[[IsLeaf], Policy]] = {
    "fifo": lambda is_leaf: Fifo(),
    "leaf_lru": LeafLru,
    "lfu": lambda is_leaf: Lfu(ageing=False),
    "lfu ageing": lambda is_leaf: Lfu(ageing=True),
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
    def agree_on_who_is_resident(self) -> None:
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


@pytest.mark.parametrize("name", MAKE)
def test_a_policy_does_what_its_model_does(name: str) -> None:
    machine = type("Machine", (PolicyMachine,), {"name": name})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=examples(60), stateful_step_count=50, deadline=None)
    )


# ── What each policy is worth on the hand-sized trace ──


BY_NAME: dict[str, Callable[[IsLeaf], Policy]] = {
    **MAKE,
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
        cache = CacheOf(capacity, BY_NAME[name])
        for ids in TRACE:
            cache.read(ids, spares_path=name == "leaf_lru")
        found.append(cache.prefix_hits)
    assert tuple(found) == hits


@pytest.mark.parametrize("name", BY_NAME)
def test_a_cache_for_all_blocks_evicts_none(name: str) -> None:
    cache = CacheOf(8, BY_NAME[name])
    for ids in TRACE:
        cache.read(ids)
    assert sorted(cache.slots) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert cache.prefix_hits == 18


def test_s3fifo_by_hand() -> None:
    """Ten blocks: one of them in small, nine in main, nine names remembered."""
    cache = CacheOf(10, BY_NAME["s3fifo"])
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


# ── Iterations end, whatever is done in between, and name each block once ──


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


@pytest.mark.parametrize("every", [0, 1, 2, 3])
def test_an_iteration_names_every_block_once_however_many_are_evicted(name: str, every: int) -> None:
    policy = filled(name)
    found = []
    for slot in policy.victims():
        found.append(slot)
        if every and len(found) % every == 0:
            policy.remove(slot)
    assert sorted(found) == list(range(COUNT))
    assert len(policy) == len(list(policy.victims())) == (COUNT - COUNT // every if every else COUNT)


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


def summary(written_at: float, reads: int) -> Summary:
    return Summary(written_at, written_at + reads, reads)


def test_sieve_takes_what_was_never_read_and_then_the_rest_each_by_age() -> None:
    summaries = {0: summary(4, 0), 1: summary(1, 2), 2: summary(2, 0), 3: summary(3, 1)}
    policy = restored(Sieve, summaries)
    policy.insert(4, 4)
    assert list(policy.victims()) == [2, 0, 4, 1, 3]


def test_s3fifo_puts_what_was_read_twice_into_main() -> None:
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
