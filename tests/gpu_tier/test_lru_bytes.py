"""I11 and O1 on bytes: what attention would read at each item's device slot is that item, in every layer and head.

Each token's KV is one number that says its request, layer, head and position. The device, the host memory and an engine
that writes and backs up tokens are plain tensors and loops; only the plan is the policy's.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lru_model import Case, Steps, World, decode_batch
from thoroughness import examples
from torch import Tensor

from kvcm.gpu_tier.kernels.lru_diff import DiffError

HEADS = 2
GARBAGE = -7


def code(request: int, layer: int, head: int, token: int) -> int:
    return ((request * 10 + layer) * 10 + head) * 10_000 + token


class Engine(World):
    """An engine that decodes requests and keeps what the policy plans."""

    def __init__(self, case: Case, kernels: str = "reference") -> None:
        # Slots of requests overlap, so each request has a device of its own.
        self.device = torch.full((case.requests, case.layers, 10 * case.capacity * case.unit, HEADS), GARBAGE)
        self.host = torch.full((case.layers, 1000 * case.requests, HEADS), GARBAGE)
        super().__init__(case, kernels)

    def write(self, request: int, target: Tensor, slot: int, item: int) -> None:
        """Write an item's tokens, as far as they exist, in all layers."""
        for token in range(item * self.case.unit, min((item + 1) * self.case.unit, self.tokens[request])):
            for layer in range(self.case.layers):
                for head in range(HEADS):
                    target[layer, slot + token % self.case.unit, head] = code(request, layer, head, token)

    def admit(self, request: int) -> None:
        super().admit(request)
        full, part = divmod(self.tokens[request], self.case.unit)
        self.device[request] = GARBAGE
        for item in range(full):
            self.write(request, self.host, 1000 * request + 7 * item, item)
        held = self.buffers[self.geometry.start_layer, request, 0].held
        for slot, item in zip(self.locations[request], held, strict=True):
            if item >= 0:
                self.write(request, self.device[request], slot, item)
        if part:
            self.write(request, self.device[request], self.newest_slots[request][full % 2], full)

    def step(self) -> list[Steps]:
        requests = [r for r in self.tokens if self.tokens[r] < self.case.max_items * self.case.unit]
        self.grow(requests)
        for request in requests:  # the engine writes the new token before the layers' plans
            item = (self.tokens[request] - 1) // self.case.unit
            self.write(request, self.device[request], self.newest_slots[request][item % 2], item)
        batch = decode_batch(requests, [self.tokens[r] for r in requests], rows=self.case.requests)
        # A row that sits a step out loses its newest item, which has to be in host memory then.
        sparse = [self.case.lag > 0 or self.rng.random() < 0.8 for _ in range(self.case.requests)]
        found = []
        for layer in self.geometry.layers:
            found.append(self.layer_step(layer, batch, sparse))
            self.fetch(found[-1])
            self.check(found[-1])
        for request in requests:  # back up the item that the step has filled, from its newest slot
            item, rest = divmod(self.tokens[request], self.case.unit)
            if not rest:
                slot, place = self.newest_slots[request][(item - 1) % 2], 1000 * request + 7 * (item - 1)
                self.host[:, place : place + self.case.unit] = self.device[request][:, slot : slot + self.case.unit]
        return found

    def heads_of(self, head: int) -> slice:
        return slice(head, head + 1) if self.case.heads > 1 else slice(0, HEADS)

    def fetch(self, steps: Steps) -> None:
        unit, layer, plan = self.case.unit, self.geometry.layer_index(steps.layer), steps.plan
        assert plan.misses is not None
        for b, request in enumerate(steps.batch.requests):
            device = self.device[request, layer]
            for h in range(self.case.heads):
                heads = self.heads_of(h)
                if plan.promotion is not None and plan.promotion.src[b, h] >= 0:
                    src, dst = int(plan.promotion.src[b, h]), int(plan.promotion.dst[b, h])
                    device[dst : dst + unit, heads] = device[src : src + unit, heads].clone()
                for j in range(int(plan.misses.count[b, h])):
                    src, dst = int(plan.misses.src_host[b, h, j]), int(plan.misses.dst_dev[b, h, j])
                    assert src >= 0, "O1: a load from nowhere"
                    device[dst : dst + unit, heads] = self.host[layer, src : src + unit, heads]

    def check(self, steps: Steps) -> None:
        unit, layer = self.case.unit, self.geometry.layer_index(steps.layer)
        for b, h in steps.outcomes:
            request = steps.batch.requests[b]
            for i, item in enumerate(steps.selected[b][h]):
                slot = int(steps.plan.device_slot[b, h, i])
                assert slot >= 0, "O1: an item was lost"
                for token in range(item * unit, min(self.tokens[request], (item + 1) * unit)):
                    for head in range(HEADS)[self.heads_of(h)]:
                        read = int(self.device[request, layer, slot + token % unit, head])
                        assert read == code(request, layer, head, token), f"I11: item {item} of request {request}"


def run_history(case: Case, kernels: str = "reference") -> Engine:
    engine = Engine(case, kernels)
    for step in range(case.steps):
        if step and step % 9 == 0:
            engine.admit(engine.rng.randrange(case.requests))  # a row that was another request's
        engine.step()
        assert engine.policy.errors == DiffError(0)
    return engine


@settings(max_examples=examples(120), deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1), capacity=st.integers(4, 9), unit=st.sampled_from([1, 4]),
    heads=st.sampled_from([1, 2]), promote=st.booleans(), lag=st.integers(0, 2),
)  # fmt: skip
def test_i11_attention_reads_the_items_it_selected(
    seed: int, capacity: int, unit: int, heads: int, *, promote: bool, lag: int
) -> None:
    # Items whose backup is in flight keep their slots: the selection has to leave slots for them.
    lag = lag if promote else 0
    case = Case(
        seed, capacity, capacity - lag, unit, heads, 12, promote, loads_hottest=False, lag=lag, jumps=False, layers=3
    )
    counters = run_history(case).policy.counters
    assert counters.selected == counters.hits + counters.loads


@pytest.mark.ci
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("unit", [1, 4])
def test_i11_with_the_triton_kernel(heads: int, unit: int) -> None:
    pytest.importorskip("triton")
    steps = 4 * unit if heads == 1 else 3 * unit
    case = Case(7, 5, 4, unit, heads, steps, promote=True, loads_hottest=False, lag=1, jumps=False, layers=3)
    run_history(case, "triton")
