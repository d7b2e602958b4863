"""The LRU diff policy against its model, and its kernels against the reference; I1 to I13 are its invariants."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import Any

import lru_model
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples
from torch import Tensor

from kvcm.gpu_tier.errors import ConfigError, StateError
from kvcm.gpu_tier.kernels.lru_diff import DiffError, DiffOutputs, DiffScratch, lru_diff, ref
from kvcm.gpu_tier.manager.residency import LruCounters, LruDiffPolicy
from kvcm.gpu_tier.runtime import NullRuntime
from kvcm.gpu_tier.types import ResidencyPlan

SEEDS = st.integers(0, 2**32 - 1)


def pad(values: list[int], width: int) -> list[int]:
    return values + [-1] * (width - len(values))


def check_plan(world: lru_model.World, steps: lru_model.Steps) -> None:
    """The plan is the model's; rows without an outcome are empty."""
    plan, width = steps.plan, world.case.width
    assert plan.misses is not None
    assert plan.evicted_items is not None
    assert plan.evicted_slots is not None
    nothing = lru_model.Outcome([])
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


def check_state(world: lru_model.World, layer: int) -> None:
    state = world.policy.layer_state(layer)
    for (buffer_layer, request, head), buffer in world.buffers.items():
        if buffer_layer == layer:
            assert state.slot_item[request, head].tolist() == buffer.held
            assert state.lru_slots[request, head].tolist() == buffer.order
            assert state.newest_item[request, head] == buffer.newest


def check_history(case: lru_model.Case, kernels: str) -> None:
    world = lru_model.World(case, kernels)
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
    for name in ("hits", "loads", "promotions"):
        assert getattr(counters, name) == totals[name]


@settings(max_examples=examples(2400), deadline=None)
@given(seed=SEEDS)
def test_histories_are_those_of_the_model(seed: int) -> None:
    check_history(lru_model.random_case(seed), "reference")


@pytest.mark.parametrize("part", range(5))
def test_histories_of_the_triton_kernel_are_those_of_the_model(part: int) -> None:
    each = examples(100) // 5
    for seed in range(part * each, (part + 1) * each):
        case = lru_model.random_case(seed)
        # The interpreter takes about 10 ms for a row and head.
        check_history(replace(case, steps=min(case.steps, 4), requests=2, layers=1), "triton")


class Watcher:
    """Checks the invariants on what the policy did, with nothing of the model but which steps were fast."""

    def __init__(self, world: lru_model.World) -> None:
        self.world = world
        self.used: dict[tuple[int, int, int, int], int] = {}  # layer, request, head, item
        self.now = 0

    def watch(self) -> None:
        self.now += 1
        admitted = self.world.admit_another()
        self.used = {key: step for key, step in self.used.items() if key[1] != admitted}
        before = {layer: lru_model.clone_state(self.world.policy, layer) for layer in self.world.geometry.layers}
        for steps in self.world.step():
            after = lru_model.clone_state(self.world.policy, steps.layer)
            for b in range(steps.batch.num_real):
                for h in range(self.world.case.heads) if steps.mask[b] else ():
                    self.check(steps, b, h, before[steps.layer], after)
            self.check_untouched(steps, before[steps.layer], after)

    def check_untouched(self, steps: lru_model.Steps, old: dict[str, Tensor], after: dict[str, Tensor]) -> None:
        active = {r for b, r in enumerate(steps.batch.requests) if steps.mask[b]}
        for request in set(self.world.locations) - active:
            for name in set(old) - {"host_loc"}:
                assert torch.equal(old[name][request], after[name][request]), f"I10: {name} of an idle request"
        idle = [b for b in range(steps.batch.rows) if b >= steps.batch.num_real or not steps.mask[b]]
        assert (steps.plan.device_slot[idle] == -1).all(), "I10: a padding row was planned"

    def check(self, steps: lru_model.Steps, b: int, h: int, old: dict[str, Tensor], after: dict[str, Tensor]) -> None:
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
    watcher = Watcher(lru_model.World(lru_model.random_case(seed)))
    for _ in range(watcher.world.case.steps):
        watcher.watch()


@settings(max_examples=examples(400), deadline=None)
@given(SEEDS)
def test_i9_a_step_repeated_loads_nothing(seed: int) -> None:
    world = lru_model.World(lru_model.random_case(seed))
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
    case = lru_model.Case(
        seed, capacity=32, width=8, unit=1, heads=1, steps=12, promote=seed % 2 == 0, loads_hottest=False, lag=0,
        jumps=True, max_items=32,
    )  # fmt: skip
    world = lru_model.World(case)
    loads: Counter[tuple[int, int, int]] = Counter()
    for _ in range(case.steps):
        world.grow([0, 1, 2])
        batch = lru_model.decode_batch([0, 1, 2], [world.tokens[r] for r in range(3)])
        for layer in world.geometry.layers:
            steps = world.layer_step(layer, batch, [True] * 3)
            for (b, _), outcome in steps.outcomes.items():
                loads.update((layer, b, item) for item, _, _ in outcome.loads)
            check_plan(world, steps)
    assert all(count == 1 for count in loads.values())


def on(device: str, values: Any) -> Any:
    return replace(values, **{field.name: getattr(values, field.name).to(device) for field in fields(values)})


def equals_the_reference(steps: lru_model.RandomSteps, run: Callable[..., object], device: str = "cpu") -> None:
    """Check four steps of an implementation, which gets the arguments of `ref.run`."""
    theirs, first = steps.state, steps.outputs()
    mine, second = on(device, lru_model.copied(theirs)), on(device, steps.outputs())
    shape = (3, 2, theirs.host_loc.shape[1], steps.capacity)
    scratch, other = (DiffScratch(*shape, torch.device(place)) for place in ("cpu", device))
    for number in range(4):
        arguments = steps.step(number)
        ref.run(*arguments, theirs, first, scratch, **steps.options)
        run(*(a.to(device) for a in arguments), mine, second, other, **steps.options)
        lru_model.outputs_equal(on("cpu", second), first)
        lru_model.states_equal(on("cpu", mine), theirs)
        assert (other.item_slot == -1).all(), "the direct map has to be empty between calls"


@pytest.mark.parametrize(
    ("capacity", "seeds", "block"), [(33, 8, 16), (33, 4, 32), (300, 3, 64), (300, 3, 128), (1000, 2, 1024)]
)
def test_larger_shapes_equal_the_reference(capacity: int, seeds: int, block: int) -> None:
    from kvcm.gpu_tier.kernels.lru_diff import triton_impl

    for seed in range(seeds):
        equals_the_reference(lru_model.RandomSteps(seed, capacity), partial(triton_impl.run, block=block))


@pytest.mark.parametrize(("block", "warps"), [(16, 1), (32, 1), (64, 2), (128, 4), (1024, 4)])
def test_no_two_warps_hold_the_same_numbers(block: int, warps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvcm.gpu_tier.kernels.lru_diff import triton_impl

    launches: list[dict[str, Any]] = []

    class Launched:
        def __getitem__(self, _grid: Any) -> Any:
            return lambda *_args, **options: launches.append(options)

    monkeypatch.setattr(triton_impl, "_diff", Launched())
    state = lru_model.random_state(8, 40, torch.Generator().manual_seed(0))
    out = DiffOutputs.empty(1, 2, 2, torch.zeros(4, dtype=torch.int64), torch.zeros(1, dtype=torch.int32))
    numbers = (torch.tensor([value], dtype=torch.int32) for value in (0, 40, 1, 1))
    triton_impl.run(
        torch.zeros(1, 2, 2, dtype=torch.int32), *numbers, state, out, DiffScratch(1, 2, 40, 8, torch.device("cpu")),
        unit_tokens=1, promote_newest=True, loads_hottest=True, block=block,
    )  # fmt: skip
    assert [options["num_warps"] for options in launches] == [warps]


def test_ids_beyond_the_request_are_reported_and_touch_nothing() -> None:
    state = lru_model.random_state(8, 40, torch.Generator().manual_seed(0))
    errors = []
    for impl in ("reference", "triton"):
        out = DiffOutputs.empty(1, 2, 2, torch.zeros(4, dtype=torch.int64), torch.zeros(1, dtype=torch.int32))
        scratch = DiffScratch(1, 2, 40, 8, torch.device("cpu"))
        items = torch.tensor([[[40, -1], [10**9, 3]]], dtype=torch.int32)
        lru_diff(
            items, torch.tensor([0]), torch.tensor([40], dtype=torch.int32), torch.tensor([True]),
            torch.tensor([1], dtype=torch.int32), lru_model.copied(state), out, scratch, unit_tokens=1, impl=impl,
        )  # fmt: skip
        assert out.device_slot[0, :, 0].tolist() == [-1, -1]
        errors.append(int(out.errors) & 4)
    assert errors == [4, 4]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("impl", ["triton", "cuda"])
@pytest.mark.parametrize("seed", range(40))
def test_on_the_gpu_random_states_equal_the_reference(impl: str, seed: int) -> None:
    equals_the_reference(lru_model.RandomSteps(seed, most_capacity=4096), partial(lru_diff, impl=impl), "cuda")


CAPACITY, MAX_ITEMS = 8, 40


def policy_of(**changes: Any) -> LruDiffPolicy:
    arguments: dict[str, Any] = {
        "capacity": CAPACITY, "unit_tokens": 1, "selecting_heads": 1, "max_requests": 2, "max_items": MAX_ITEMS,
        "host_loc": 100 + torch.arange(2 * MAX_ITEMS).reshape(2, MAX_ITEMS), "runtime": NullRuntime(),
    }  # fmt: skip
    return LruDiffPolicy(lru_model.geometry_of(), **(arguments | changes))


def admit(policy: LruDiffPolicy, request: int, n_tokens: int) -> tuple[list[int], list[int]]:
    base = 1000 * (request + 1)
    unit, capacity = policy.unit_tokens, policy.capacity
    newest = torch.tensor([base + 500, base + 500 + unit])
    fill = policy.admit(request, base + unit * torch.arange(capacity), newest, n_tokens)
    return fill.items.tolist(), fill.slots.tolist()


def resolve(policy: LruDiffPolicy, selected: list[int], n_tokens: int, layer: int = 0) -> ResidencyPlan:
    selection = lru_model.selection_of([[selected] * policy.selecting_heads], len(selected), policy.unit_tokens)
    return policy.resolve(layer, lru_model.decode_batch([0], [n_tokens]), selection, torch.ones(1, dtype=torch.bool))


def loads(plan: ResidencyPlan) -> int:
    assert plan.misses is not None
    return int(plan.misses.count.sum())


@pytest.mark.parametrize("n", [0, 1, CAPACITY - 1, CAPACITY, CAPACITY + 1, 3 * CAPACITY])
def test_admission_fills_by_number_or_with_the_last_items(n: int) -> None:
    items, slots = admit(policy_of(), 0, n)
    assert items == list(range(max(0, n - CAPACITY), n))
    assert slots == [1000 + i for i in range(min(n, CAPACITY))]


@pytest.mark.parametrize(("n", "items"), [(3, [0]), (4, [0]), (5, [0, 1]), (32, [*range(8)]), (37, [*range(1, 10)])])
def test_a_part_filled_item_goes_to_its_newest_slot(n: int, items: list[int]) -> None:
    filled, slots = admit(policy_of(unit_tokens=4), 0, n)
    assert filled == items
    if n % 4:
        assert slots[-1] == 1500 + 4 * (items[-1] % 2)
    held = min(n // 4, CAPACITY)
    assert slots[:held] == [1000 + 4 * i for i in range(held)]


def test_layers_are_counted_apart() -> None:
    policy = policy_of()
    admit(policy, 0, 30)
    resolve(policy, [1, 2, 3], 31, layer=0)
    assert policy.counters == policy.layer_counters(0) == LruCounters(selected=3, hits=0, loads=3, promotions=0)
    assert policy.layer_counters(1) == LruCounters(0, 0, 0, 0)
    assert (policy.counters.hit_rate, policy.layer_counters(1).hit_rate) == (0, 1)


def test_a_row_without_a_buffer_is_reported() -> None:
    policy = policy_of()
    assert (resolve(policy, [1, 2], 31).device_slot == -1).all()
    assert policy.errors == DiffError.NOT_ADMITTED
    with pytest.raises(StateError, match="NOT_ADMITTED"):
        policy.check()
    policy.check()


def test_debug_checks_raise_in_the_step() -> None:
    policy = policy_of(debug_checks=True, host_loc=torch.full((2, MAX_ITEMS), -1))
    admit(policy, 0, 30)
    with pytest.raises(StateError, match="NOT_BACKED_UP"):
        resolve(policy, [1], 31)
    with pytest.raises(ConfigError, match="repeats"):
        resolve(policy, [29, 29], 31)
    with pytest.raises(StateError, match="shrunk from 31 to 30"):
        resolve(policy, [29], 30)


def test_batches_of_about_the_same_size_share_memory_and_a_plan_outlives_the_next_layer() -> None:
    policy = policy_of(max_requests=4, host_loc=torch.zeros(4, MAX_ITEMS, dtype=torch.int64))
    mask = torch.ones(4, dtype=torch.bool)
    plans = []
    for rows, layer in ((3, 0), (3, 1), (4, 0), (4, 1)):
        batch, selection = lru_model.decode_batch([], [], rows=rows), lru_model.selection_of([[[1]]] * rows, 1, 1)
        plans.append(policy.resolve(layer, batch, selection, mask[:rows]))
    places = [plan.device_slot.data_ptr() for plan in plans]
    assert places[0] == places[2] != places[1] == places[3]
    assert [len(plan.device_slot) for plan in plans] == [3, 3, 4, 4]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"capacity": 0}, "capacity=0"), ({"capacity": 32768}, "capacity=32768"), ({"unit_tokens": 0}, "unit_tokens=0"),
        ({"selecting_heads": 3}, "selecting_heads=3"),
        ({"max_requests": 3}, "host_loc"), ({"max_items": 9}, "host_loc"),
        ({"host_loc": torch.zeros(2, MAX_ITEMS, dtype=torch.int32)}, "host_loc"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be_are_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        policy_of(**changes)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda policy: admit(policy, 1, 41), "n_tokens=41"), (lambda policy: admit(policy, 2, 5), "request=2"),
        (lambda policy: policy.admit(1, torch.arange(7), torch.tensor([10, 11]), 5), "buffer_slots"),
        (lambda policy: admit(policy, 0, 30), "request 0 has a buffer"),
        (lambda policy: resolve(policy, list(range(9)), 31), "capacity=8"),
        (lambda policy: resolve(policy, [1], 41), "lengths=41"),
        (lambda policy: resolve(policy, [1], 31, layer=2), "layer_id=2"),
    ],
)  # fmt: skip
def test_calls_that_cannot_be_are_refused(call: Callable[[LruDiffPolicy], object], named: str) -> None:
    policy = policy_of()
    admit(policy, 0, 30)
    with pytest.raises((ConfigError, StateError), match=named):
        call(policy)


def test_selections_of_other_heads_or_units_are_refused() -> None:
    policy, batch, mask = policy_of(), lru_model.decode_batch([0], [31]), torch.ones(1, dtype=torch.bool)
    with pytest.raises(ConfigError, match="selection=2"):
        policy.resolve(0, batch, lru_model.selection_of([[[1], [2]]], 1, 1), mask)
    with pytest.raises(ConfigError, match="unit_tokens=4"):
        policy.resolve(0, batch, replace(lru_model.selection_of([[[1]]], 1, 1), unit_tokens=4), mask)
