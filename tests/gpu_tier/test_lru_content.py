"""I11 and O1 on bytes: what attention would read at each item's device slot is that item, in every layer and head.

Each token's KV is one number that says its request, layer, head and position. The device, the host memory and an engine
that writes and backs up tokens are plain tensors and loops; only the plan is the policy's.
"""

from __future__ import annotations

import torch
from lru_model import decode_batch, geometry_of, selection_of

from gpu_tier.kernels.lru_diff import DiffError
from gpu_tier.manager.lru_state import LruDiffPolicy
from gpu_tier.runtime import NullRuntime

LAYERS, HEADS, REQUESTS = 3, 2, 3


def test_o1_an_item_without_a_copy_stays_until_it_has_one() -> None:
    host_loc = torch.full((1, 50), -1, dtype=torch.int64)
    host_loc[0, :9] = torch.arange(9)
    policy = LruDiffPolicy(
        geometry_of(layers=1), capacity=4, unit_tokens=1, selecting_heads=1, max_requests=1, max_items=50,
        host_loc=host_loc, runtime=NullRuntime(),
    )  # fmt: skip
    policy.admit(0, torch.arange(4), torch.tensor([10, 11]), 10)  # items 6 to 9; 9 has no copy yet

    def loaded(selected: list[int], n: int) -> list[int]:
        selection = selection_of([[selected]], 4, 1)
        plan = policy.resolve(0, decode_batch([0], [n]), selection, torch.ones(1, dtype=torch.bool))
        assert plan.misses is not None
        return plan.misses.src_host[0, 0, : int(plan.misses.count)].tolist()

    assert loaded([0, 1, 2], 11) == [0, 1, 2]  # in the slots of 6, 7 and 8, though 9 was used no later
    assert policy.layer_state(0).slot_item[0, 0].tolist() == [0, 1, 2, 9]
    assert loaded([3, 4, 5, 6], 11) == [3, 4, 5]  # 6 finds no slot
    assert policy.errors == DiffError.NO_VICTIM
    policy.clear_errors()
    host_loc[0, 9] = 9
    assert loaded([3, 4, 5, 6], 11) == [6]
    assert policy.errors == DiffError(0)


def test_o1_nothing_is_loaded_from_nowhere() -> None:
    host_loc = torch.full((1, 50), -1, dtype=torch.int64)
    policy = LruDiffPolicy(
        geometry_of(layers=1), capacity=4, unit_tokens=1, selecting_heads=1, max_requests=1, max_items=50,
        host_loc=host_loc, runtime=NullRuntime(),
    )  # fmt: skip
    policy.admit(0, torch.arange(4), torch.tensor([10, 11]), 10)
    selection = selection_of([[[2, 7]]], 4, 1)
    plan = policy.resolve(0, decode_batch([0], [11]), selection, torch.ones(1, dtype=torch.bool))
    assert plan.misses is not None
    assert int(plan.misses.count) == 0
    assert plan.device_slot.tolist() == [[[-1, 1, -1, -1]]]
    assert policy.errors == DiffError.NOT_BACKED_UP
