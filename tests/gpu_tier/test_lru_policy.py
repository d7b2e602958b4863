"""What the LRU diff policy promises beside the diff itself: admission, release, refusals, counters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from lru_model import clone_state, decode_batch, geometry_of, selection_of

from gpu_tier.errors import ConfigError, StateError
from gpu_tier.kernels.lru_diff import DiffError
from gpu_tier.manager.lru_state import LruCounters, LruDiffPolicy
from gpu_tier.runtime import NullRuntime
from gpu_tier.types import ResidencyPlan

CAPACITY, MAX_ITEMS = 8, 40


def policy_of(**changes: Any) -> LruDiffPolicy:
    arguments: dict[str, Any] = {
        "capacity": CAPACITY, "unit_tokens": 1, "selecting_heads": 1, "max_requests": 2, "max_items": MAX_ITEMS,
        "host_loc": 100 + torch.arange(2 * MAX_ITEMS).reshape(2, MAX_ITEMS), "runtime": NullRuntime(),
    }  # fmt: skip
    return LruDiffPolicy(geometry_of(), **(arguments | changes))


def admit(policy: LruDiffPolicy, request: int, n_tokens: int) -> tuple[list[int], list[int]]:
    base = 1000 * (request + 1)
    unit, capacity = policy.unit_tokens, policy.capacity
    newest = torch.tensor([base + 500, base + 500 + unit])
    fill = policy.admit(request, base + unit * torch.arange(capacity), newest, n_tokens)
    return fill.items.tolist(), fill.slots.tolist()


def resolve(policy: LruDiffPolicy, selected: list[int], n_tokens: int, layer: int = 0) -> ResidencyPlan:
    selection = selection_of([[selected] * policy.selecting_heads], len(selected), policy.unit_tokens)
    return policy.resolve(layer, decode_batch([0], [n_tokens]), selection, torch.ones(1, dtype=torch.bool))


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


def test_release_leaves_nothing_for_the_next_request() -> None:
    policy, fresh = policy_of(), policy_of()
    admit(policy, 0, 30)
    for layer in policy.geometry.layers:
        resolve(policy, [3, 5, 30], 31, layer)
    policy.release(0)
    policy.release(0)
    policy.release(1)
    for layer in policy.geometry.layers:
        ours, clean = clone_state(policy, layer), clone_state(fresh, layer)
        assert all(torch.equal(ours[name], clean[name]) for name in ours)
    admit(policy, 0, 2)
    assert loads(resolve(policy, [0, 1, 2], 3)) == 0


def test_layers_and_requests_are_apart() -> None:
    policy = policy_of()
    admit(policy, 0, 30)
    admit(policy, 1, 30)
    other_layer, before = clone_state(policy, 1), clone_state(policy, 0)
    resolve(policy, [1, 2, 3], 31, layer=0)
    assert all(torch.equal(rows, clone_state(policy, 1)[name]) for name, rows in other_layer.items())
    after = clone_state(policy, 0)
    assert torch.equal(after["slot_item"][1], before["slot_item"][1])
    assert not torch.equal(after["slot_item"][0], before["slot_item"][0])
    assert policy.layer_counters(0) == LruCounters(selected=3, hits=0, loads=3, promotions=0)
    assert policy.layer_counters(1) == LruCounters(0, 0, 0, 0)
    assert policy.counters == policy.layer_counters(0)
    assert policy.counters.hit_rate == 0
    assert policy.layer_counters(1).hit_rate == 1


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
    plans = [
        policy.resolve(layer, decode_batch([], [], rows=rows), selection_of([[[1]]] * rows, 1, 1), mask[:rows])
        for rows in (3, 4)
        for layer in (0, 1)
    ]
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


def test_calls_that_cannot_be_are_refused() -> None:
    policy = policy_of()
    with pytest.raises(ConfigError, match="n_tokens=41"):
        admit(policy, 0, 41)
    with pytest.raises(ConfigError, match="buffer_slots"):
        policy.admit(0, torch.arange(7), torch.tensor([10, 11]), 5)
    with pytest.raises(ConfigError, match="request=2"):
        admit(policy, 2, 5)
    admit(policy, 0, 30)
    with pytest.raises(StateError, match="request 0 has a buffer"):
        admit(policy, 0, 30)
    with pytest.raises(ConfigError, match="capacity=8"):
        resolve(policy, list(range(9)), 31)
    with pytest.raises(ConfigError, match="lengths=41"):
        resolve(policy, [1], 41)
    batch, mask = decode_batch([0], [31]), torch.ones(1, dtype=torch.bool)
    with pytest.raises(ConfigError, match="selection=2"):
        policy.resolve(0, batch, selection_of([[[1], [2]]], 1, 1), mask)
    with pytest.raises(ConfigError, match="unit_tokens=4"):
        policy.resolve(0, batch, replace(selection_of([[[1]]], 1, 1), unit_tokens=4), mask)
    with pytest.raises(ConfigError, match="layer_id=2"):
        resolve(policy, [1], 31, layer=2)


def test_the_state_has_the_size_of_the_specification() -> None:
    # 4 bytes for the item and 2 for the order per slot, layer and request; 4 per slot and request for its place.
    policy = policy_of()
    rows = 2 * (2 * CAPACITY * 6 + 2 * 4 + CAPACITY * 4 + 2 * 4)
    assert policy.nbytes == rows
