"""I11 and O1 on bytes: what attention would read at each item's device slot is that item, in every layer and head.

Each token's KV is one number that says its request, layer, head and position. The device, the host memory and an engine
that writes and backs up tokens are plain tensors and loops; only the plan is the policy's.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lru_model import decode_batch, geometry_of, selection_of
from thoroughness import examples
from torch import Tensor

from kvcm.gpu_tier.kernels.lru_diff import DiffError
from kvcm.gpu_tier.manager.residency import LruDiffPolicy
from kvcm.gpu_tier.runtime import NullRuntime

LAYERS, HEADS, REQUESTS = 3, 2, 3
GARBAGE = -7


def code(request: int, layer: int, head: int, token: int) -> int:
    return ((request * 10 + layer) * 10 + head) * 10_000 + token


@dataclass
class Setting:
    seed: int
    capacity: int
    width: int
    unit: int
    heads: int
    promote: bool
    lag: int
    kernels: str = "reference"


class Engine:
    """An engine that decodes requests and keeps what the policy plans."""

    def __init__(self, setting: Setting) -> None:
        self.s, self.rng = setting, Random(setting.seed)
        self.max_items = 6 * setting.capacity + 8
        self.host_loc = torch.full((REQUESTS, self.max_items), -1, dtype=torch.int64)
        self.geometry = geometry_of(layers=LAYERS, heads=HEADS, start_layer=2)
        self.policy = LruDiffPolicy(
            self.geometry, capacity=setting.capacity, unit_tokens=setting.unit, selecting_heads=setting.heads,
            max_requests=REQUESTS, max_items=self.max_items, host_loc=self.host_loc, runtime=NullRuntime(),
            promote_newest=setting.promote, kernels=setting.kernels,
        )  # fmt: skip
        per_request = (setting.capacity + 2) * setting.unit
        self.device = torch.full((LAYERS, REQUESTS * per_request, HEADS), GARBAGE)
        self.host = torch.full((LAYERS, REQUESTS * self.max_items * setting.unit, HEADS), GARBAGE)
        self.tokens = [0] * REQUESTS
        self.newest_slots: list[list[int]] = [[]] * REQUESTS
        self.to_back_up: list[tuple[int, int]] = []  # request, item whose bytes are copied but not announced
        for request in range(REQUESTS):
            self.admit(request)

    def host_slot(self, request: int, item: int) -> int:
        # Any place will do; backwards, a mix-up of items and slots shows.
        return ((request + 1) * self.max_items - 1 - item) * self.s.unit

    def admit(self, request: int) -> None:
        s, unit = self.s, self.s.unit
        self.policy.release(request)
        self.to_back_up = [(r, item) for r, item in self.to_back_up if r != request]
        slots = [(request * (s.capacity + 2) + i) * unit for i in range(s.capacity + 2)]
        self.rng.shuffle(slots)
        self.newest_slots[request] = slots[:2]
        n = self.rng.choice((0, 1, s.capacity - 1, s.capacity, s.capacity + 1, 3 * s.capacity)) * unit
        n += self.rng.randrange(unit)
        self.tokens[request] = n
        self.host_loc[request] = -1
        for item in range(n // unit):
            self.host_loc[request, item] = self.host_slot(request, item)
        self.write(request, range(n), {t: self.host_slot(request, t // unit) + t % unit for t in range(n)}, self.host)
        for slot in slots:
            self.device[:, slot : slot + unit] = GARBAGE
        fill = self.policy.admit(request, torch.tensor(slots[2:]), torch.tensor(slots[:2]), n)
        for item, slot in zip(fill.items.tolist(), fill.slots.tolist(), strict=True):
            tokens = range(item * unit, min(n, (item + 1) * unit))
            self.write(request, tokens, {t: slot + t % unit for t in tokens}, self.device)

    def write(self, request: int, tokens: range, slots: dict[int, int], target: Tensor) -> None:
        for token in tokens:
            for layer in range(LAYERS):
                for head in range(HEADS):
                    target[layer, slots[token], head] = code(request, layer, head, token)

    def announce(self) -> None:
        """Let backups end, all but the youngest few items of each request."""
        for request, item in list(self.to_back_up):
            if item < self.tokens[request] // self.s.unit - self.rng.randint(0, self.s.lag):
                self.host_loc[request, item] = self.host_slot(request, item)
                self.to_back_up.remove((request, item))

    def step(self) -> None:
        requests = [r for r in range(REQUESTS) if self.tokens[r] < self.max_items * self.s.unit]
        self.announce()
        for request in requests:  # the engine writes the new token before the layers' plans
            token = self.tokens[request]
            item, offset = divmod(token, self.s.unit)
            self.tokens[request] += 1
            slot = self.newest_slots[request][item % 2] + offset
            self.write(request, range(token, token + 1), {token: slot}, self.device)
        batch = decode_batch(requests, [self.tokens[r] for r in requests])
        # A row that sits a step out loses its newest item, which has to be in host memory then.
        sparse = torch.tensor([self.s.lag > 0 or self.rng.random() < 0.8 for _ in requests])
        for layer in self.geometry.layers:
            picked = [[self.pick(r) for _ in range(self.s.heads)] for r in requests]
            selection = selection_of(picked, self.s.width, self.s.unit)
            plan = self.policy.resolve(layer, batch, selection, sparse)
            self.fetch(layer - 2, plan)
            self.check(layer - 2, requests, picked, plan.device_slot, sparse)
        for request in requests:
            self.back_up(request)

    def pick(self, request: int) -> list[int]:
        items = -(-self.tokens[request] // self.s.unit)
        last = [i for i in range(max(0, items - 3), items) if self.rng.random() < 0.7]
        others = self.rng.sample(range(items), min(items, self.s.width))
        return list(dict.fromkeys(last + others))[: self.s.width]

    def heads_of(self, head: int) -> slice:
        return slice(head, head + 1) if self.s.heads > 1 else slice(0, HEADS)

    def fetch(self, layer: int, plan) -> None:  # type: ignore[no-untyped-def]
        unit = self.s.unit
        for b in range(len(plan.device_slot)):
            for h in range(self.s.heads):
                heads = self.heads_of(h)
                if plan.promotion is not None and plan.promotion.src[b, h] >= 0:
                    src, dst = int(plan.promotion.src[b, h]), int(plan.promotion.dst[b, h])
                    self.device[layer, dst : dst + unit, heads] = self.device[layer, src : src + unit, heads].clone()
                for j in range(int(plan.misses.count[b, h])):
                    src, dst = int(plan.misses.src_host[b, h, j]), int(plan.misses.dst_dev[b, h, j])
                    assert src >= 0, "O1: a load from nowhere"
                    self.device[layer, dst : dst + unit, heads] = self.host[layer, src : src + unit, heads]

    def check(
        self, layer: int, requests: list[int], picked: list[list[list[int]]], device_slot: Tensor, sparse: Tensor
    ) -> None:
        unit = self.s.unit
        for b, request in enumerate(requests):
            for h, items in enumerate(picked[b]) if sparse[b] else ():
                for i, item in enumerate(items):
                    slot = int(device_slot[b, h, i])
                    assert slot >= 0, "O1: an item was lost"
                    for token in range(item * unit, min(self.tokens[request], (item + 1) * unit)):
                        for head in range(HEADS)[self.heads_of(h)]:
                            read = int(self.device[layer, slot + token % unit, head])
                            assert read == code(request, layer, head, token), f"I11: item {item} of request {request}"

    def back_up(self, request: int) -> None:
        """Copy the item that the step has filled, from where it is: its newest slot."""
        item, rest = divmod(self.tokens[request], self.s.unit)
        if rest:
            return
        slot, place = self.newest_slots[request][(item - 1) % 2], self.host_slot(request, item - 1)
        self.host[:, place : place + self.s.unit] = self.device[:, slot : slot + self.s.unit]
        self.to_back_up.append((request, item - 1))


def run_history(setting: Setting, steps: int) -> Engine:
    engine = Engine(setting)
    for step in range(steps):
        if step and step % 9 == 0:
            engine.admit(engine.rng.randrange(REQUESTS))  # a row that was another request's
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
    # Items whose backup is in flight keep their slots: the selection has to leave room for them.
    lag = lag if promote else 0
    setting = Setting(seed, capacity, capacity - lag, unit, heads, promote, lag)
    engine = run_history(setting, steps=12)
    counters = engine.policy.counters
    assert counters.selected == counters.hits + counters.loads


@pytest.mark.ci
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("unit", [1, 4])
def test_i11_with_the_triton_kernel(heads: int, unit: int) -> None:
    pytest.importorskip("triton")
    run_history(
        Setting(7, 5, 4, unit, heads, promote=True, lag=1, kernels="triton"), steps=4 * unit if heads == 1 else 3 * unit
    )
