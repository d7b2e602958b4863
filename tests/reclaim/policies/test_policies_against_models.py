"""Every policy against its model, with iterations that run while blocks come, go, are read and are renamed.

Renaming a slot is nothing to a model, so a policy in which `moved` changed the order would give itself away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

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

from kvcm.reclaim.policies import Fifo, LeafLru, Lfu, Lru, S3Fifo, Sieve
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
        machine, settings=settings(max_examples=examples(100), stateful_step_count=50, deadline=None)
    )
