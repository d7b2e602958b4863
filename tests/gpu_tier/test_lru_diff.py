"""The LRU diff policy against its model; I1 to I13 are the invariants of the buffer."""

from __future__ import annotations

from collections import Counter

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lru_model import Case, Outcome, Steps, World, clone_state, decode_batch, random_case
from thoroughness import examples
from torch import Tensor

from gpu_tier.kernels.lru_diff import DiffError

SEEDS = st.integers(0, 2**32 - 1)


def pad(values: list[int], width: int) -> list[int]:
    return values + [-1] * (width - len(values))


def check_plan(world: World, steps: Steps) -> None:
    """The plan is the model's; rows without an outcome are empty."""
    plan, width = steps.plan, world.case.width
    assert plan.misses is not None
    assert plan.evicted_items is not None
    assert plan.evicted_slots is not None
    nothing = Outcome([])
    for b in range(steps.batch.rows):
        request = steps.batch.requests[b] if b < steps.batch.num_real else -1
        for h in range(world.case.heads):
            outcome = steps.outcomes.get((b, h), nothing)
            locations = world.locations.get(request, [])
            loads = outcome.loads
            assert plan.device_slot[b, h].tolist() == world.device_slots(request, outcome)
            assert plan.misses.count[b, h] == len(loads)
            sources = [int(world.host_loc[request, item]) for item, _, _ in loads]
            assert plan.misses.src_host[b, h].tolist() == pad(sources, width)
            targets = [locations[slot] for _, slot, _ in loads]
            assert plan.misses.dst_dev[b, h].tolist() == pad(targets, width)
            assert plan.evicted_items[b, h].tolist() == pad([old for _, _, old in loads], width)
            assert plan.evicted_slots[b, h].tolist() == pad(targets, width)
            promoted = outcome.promoted
            source, target = (-1, -1)
            if promoted:
                source, target = world.newest_slots[request][promoted[0] % 2], locations[promoted[1]]
            if plan.promotion is not None:
                assert (plan.promotion.src[b, h], plan.promotion.dst[b, h]) == (source, target)


def check_state(world: World, layer: int) -> None:
    state = world.policy.layer_state(layer)
    for (buffer_layer, request, head), buffer in world.buffers.items():
        if buffer_layer == layer:
            assert state.slot_item[request, head].tolist() == buffer.held
            assert state.lru_slots[request, head].tolist() == buffer.order
            assert state.newest_item[request, head] == buffer.newest


@settings(max_examples=examples(2400), deadline=None)
@given(seed=SEEDS)
def test_histories_are_those_of_the_model(seed: int) -> None:
    world = World(random_case(seed))
    totals: Counter[str] = Counter()
    for _ in range(world.case.steps):
        world.admit_another()
        errors = DiffError(0)
        for steps in world.step():
            check_plan(world, steps)
            check_state(world, steps.layer)
            for outcome in steps.outcomes.values():
                errors |= outcome.errors
                totals["hits"] += outcome.hits
                totals["loads"] += len(outcome.loads)
                totals["promotions"] += outcome.promoted is not None
        assert world.policy.errors == errors
        world.policy.clear_errors()
    counters = world.policy.counters
    assert (counters.hits, counters.loads, counters.promotions) == (
        totals["hits"],
        totals["loads"],
        totals["promotions"],
    )


class Watcher:
    """Checks the invariants on what the policy did, with nothing of the model but which steps were fast."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.used: dict[tuple[int, int, int, int], int] = {}  # layer, request, head, item
        self.now = 0

    def watch(self) -> None:
        self.now += 1
        admitted = self.world.admit_another()
        self.used = {key: step for key, step in self.used.items() if key[1] != admitted}
        before = {layer: clone_state(self.world.policy, layer) for layer in self.world.geometry.layers}
        for steps in self.world.step():
            after = clone_state(self.world.policy, steps.layer)
            for b in range(steps.batch.num_real):
                for h in range(self.world.case.heads) if steps.mask[b] else ():
                    self.check(steps, b, h, before[steps.layer], after)
            self.check_untouched(steps, before[steps.layer], after)

    def check_untouched(self, steps: Steps, old: dict[str, Tensor], after: dict[str, Tensor]) -> None:
        active = {r for b, r in enumerate(steps.batch.requests) if steps.mask[b]}
        for request in set(self.world.locations) - active:
            for name in set(old) - {"host_loc"}:
                assert torch.equal(old[name][request], after[name][request]), f"I10: {name} of an idle request"
        for b in range(steps.batch.rows):
            if b >= steps.batch.num_real or not steps.mask[b]:
                assert (steps.plan.device_slot[b] == -1).all(), "I10: a padding row was planned"

    def check(self, steps: Steps, b: int, h: int, old: dict[str, Tensor], after: dict[str, Tensor]) -> None:
        world, plan = self.world, steps.plan
        request, outcome = steps.batch.requests[b], steps.outcomes[b, h]
        held_before, held = old["slot_item"][request, h].tolist(), after["slot_item"][request, h].tolist()
        selected, slots = steps.selected[b][h], plan.device_slot[b, h].tolist()
        newest = (world.tokens[request] - 1) // world.case.unit
        located = dict(zip(world.locations[request], held, strict=True))
        located[world.newest_slots[request][newest % 2]] = newest
        for item, slot in zip(selected, slots, strict=False):
            assert slot == -1 or located[slot] == item, "I1: the slot holds another item"
        placed = [slot for slot in slots if slot >= 0]
        assert len(placed) == len(set(placed)), "I2: two items have one slot"
        items = [item for item in held if item >= 0]
        assert len(items) == len(set(items)), "I4: an item is in two slots"
        assert sorted(after["lru_slots"][request, h].tolist()) == list(range(world.case.capacity)), "I5"
        promoted = int(old["newest_item"][request, h]) if outcome.promoted else -1
        loaded = {item for item in selected if item in held} - set(held_before) - {promoted}
        assert plan.misses is not None
        count = int(plan.misses.count[b, h])
        expected = sorted(int(world.host_loc[request, item]) for item in loaded)
        assert sorted(plan.misses.src_host[b, h, :count].tolist()) == expected, "I3: loads"
        gone = set(held_before) - set(held) - {-1}
        assert not gone & set(selected), "I6: a selected item was evicted"
        assert gone <= world.backed_up(request), "O1: an item without a copy was evicted"
        self.check_age(steps.layer, request, h, gone, set(held_before) & set(held), set(selected))
        if -1 not in held_before:
            assert plan.evicted_items is not None
            assert plan.evicted_slots is not None
            targets = plan.misses.dst_dev[b, h, :count].tolist()
            assert plan.evicted_slots[b, h, :count].tolist() == targets, "I8"
            before_of = dict(zip(world.locations[request], held_before, strict=True))
            assert plan.evicted_items[b, h, :count].tolist() == [before_of[slot] for slot in targets], "I8"
        hits = set() if outcome.fast else set(selected) & set(held_before)
        for item in hits | loaded | {promoted}:
            self.used[steps.layer, request, h, item] = self.now

    def check_age(
        self, layer: int, request: int, head: int, gone: set[int], stayed: set[int], selected: set[int]
    ) -> None:
        free = (stayed - selected - {-1}) & self.world.backed_up(request)
        ages = {item: self.used.get((layer, request, head, item), 0) for item in gone | free}
        for left in gone:
            assert all(ages[left] <= ages[item] for item in free), "I7: an item used later was evicted"


@settings(max_examples=examples(1000), deadline=None)
@given(SEEDS)
def test_invariants_i1_to_i8_and_i10(seed: int) -> None:
    watcher = Watcher(World(random_case(seed)))
    for _ in range(watcher.world.case.steps):
        watcher.watch()


@settings(max_examples=examples(400), deadline=None)
@given(SEEDS)
def test_i9_a_step_repeated_loads_nothing(seed: int) -> None:
    world = World(random_case(seed))
    for _ in range(world.case.steps):
        for steps in world.step():
            if any(outcome.errors for outcome in steps.outcomes.values()):
                return
            first = steps.plan.device_slot.clone()
            before = world.policy.counters
            world.pick = lambda layer, request, head, steps=steps: steps.selected[  # type: ignore[method-assign]
                steps.batch.requests.index(request)
            ][head]
            again = world.layer_step(steps.layer, steps.batch, steps.mask)
            del world.pick
            assert torch.equal(again.plan.device_slot, first)
            assert again.plan.misses is not None
            assert not again.plan.misses.count.any()
            assert world.policy.counters.promotions == before.promotions


@settings(max_examples=examples(300), deadline=None)
@given(SEEDS)
def test_i12_items_of_a_request_that_fits_are_loaded_once(seed: int) -> None:
    case = Case(
        seed, capacity=32, width=8, unit=1, heads=1, steps=12, promote=seed % 2 == 0, loads_hottest=False, lag=0,
        jumps=True, max_items=32,
    )  # fmt: skip
    world = World(case)
    loads: Counter[tuple[int, int, int]] = Counter()
    for _ in range(case.steps):
        batch_requests = [0, 1, 2]
        world.grow(batch_requests)
        batch_lengths = [world.tokens[r] for r in batch_requests]
        batch = decode_batch(batch_requests, batch_lengths)
        for layer in world.geometry.layers:
            steps = world.layer_step(layer, batch, [True] * 3)
            for (b, _), outcome in steps.outcomes.items():
                loads.update((layer, b, item) for item, _, _ in outcome.loads)
            check_plan(world, steps)
    assert all(count == 1 for count in loads.values())
