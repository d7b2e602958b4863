"""Random states of one layer's buffers, for tests that compare implementations of the diff."""

from __future__ import annotations

from dataclasses import dataclass, fields
from random import Random
from typing import Any

import torch
from torch import Tensor

from gpu_tier.kernels.lru_diff import DiffOutputs, LayerState

__all__ = ["RandomSteps", "copied", "outputs_equal", "random_state", "states_equal"]


def random_state(capacity: int, n_items: int, rng: torch.Generator) -> LayerState:
    """Two requests of two heads: full buffers of random items, of which some have no copy in host memory."""
    held = torch.stack([torch.randperm(n_items - 2, generator=rng)[:capacity] for _ in range(4)])
    orders = torch.stack([torch.randperm(capacity, generator=rng) for _ in range(4)])
    host_loc = torch.randperm(2 * n_items, generator=rng).reshape(2, n_items)
    host_loc[torch.rand(2, n_items, generator=rng) < 0.02] = -1
    return LayerState(
        slot_item=held.int().reshape(2, 2, capacity).contiguous(),
        lru_slots=orders.short().reshape(2, 2, capacity).contiguous(),
        newest_item=torch.full((2, 2), n_items - 2, dtype=torch.int32),
        slot_loc=torch.randperm(2 * capacity, generator=rng).int().reshape(2, capacity),
        newest_slots=torch.tensor([[9001, 9002], [9003, 9004]], dtype=torch.int32),
        host_loc=host_loc,
    )


def short_state(capacity: int, rng: torch.Generator) -> LayerState:
    """Two requests whose items all fit, each in the slot of its number; three slots are left."""
    state = random_state(capacity, capacity + 4, rng)
    full = max(capacity - 3, 0)
    state.slot_item.copy_(torch.arange(capacity))
    state.slot_item[..., full:] = -1
    state.lru_slots.copy_(torch.arange(capacity).roll(capacity - full))
    state.newest_item.fill_(full)
    return state


def copied(state: LayerState) -> LayerState:
    return LayerState(**{field.name: getattr(state, field.name).clone() for field in fields(LayerState)})


def outputs_equal(ours: DiffOutputs, theirs: DiffOutputs) -> None:
    for field in fields(DiffOutputs):
        assert torch.equal(getattr(ours, field.name), getattr(theirs, field.name)), field.name


def states_equal(ours: LayerState, theirs: LayerState) -> None:
    for field in fields(LayerState):
        assert torch.equal(getattr(ours, field.name), getattr(theirs, field.name)), field.name


@dataclass
class RandomSteps:
    """Steps over a random state of two requests, the third row is padding."""

    seed: int
    most_capacity: int = 300

    def __post_init__(self) -> None:
        self.shape, self.rng = Random(self.seed), torch.Generator().manual_seed(self.seed)
        sizes = [size for size in (1, 3, 8, 31, 32, 33, 100, 300, 1000, 4096) if size <= self.most_capacity]
        self.capacity = self.shape.choice(sizes)
        self.width = self.shape.randint(1, self.capacity)
        fits = self.shape.random() < 0.3
        self.first_length = self.capacity - 2 if fits and self.capacity > 3 else 4 * self.capacity + 4
        state = short_state(self.capacity, self.rng) if fits else None
        self.state = state or random_state(self.capacity, 4 * self.capacity + 5, self.rng)
        self.first_length = min(self.first_length, self.state.host_loc.shape[1] - 1)
        self.options: dict[str, Any] = {
            "unit_tokens": 1, "promote_newest": self.seed % 5 != 0, "loads_hottest": self.seed % 3 == 0,
        }  # fmt: skip

    def outputs(self) -> DiffOutputs:
        counters, errors = torch.zeros(4, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
        return DiffOutputs.empty(3, 2, self.width, counters, errors)

    def step(self, number: int) -> tuple[Tensor, ...]:
        """Return the arguments of step `number`: items, requests, lengths, mask and real rows."""
        length = max(1, min(self.first_length + number, self.state.host_loc.shape[1]))
        items = torch.full((3, 2, self.width), -1, dtype=torch.int32)
        for row in range(3):
            for head in range(2):
                picked = self._pick(length)
                items[row, head, : len(picked)] = picked
        mask = torch.tensor([True, self.shape.random() < 0.8, True])
        lengths = torch.tensor([length, length, 1], dtype=torch.int32)
        return items, torch.tensor([1, 0, 9]), lengths, mask, torch.tensor([2], dtype=torch.int32)

    def _pick(self, length: int) -> Tensor:
        picked = torch.randperm(length, generator=self.rng)[: self.shape.randint(0, self.width)]
        for item in (length - 1, length - 2):
            if item >= 0 and self.shape.random() < 0.5:
                picked = torch.cat([torch.tensor([item]), picked[picked != item]])[: self.width]
        return picked.int()
