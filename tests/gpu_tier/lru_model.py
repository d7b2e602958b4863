"""The LRU diff in lists and sets, and random states to compare its implementations with."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from random import Random
from typing import Any

import torch
from torch import Tensor

from kvcm.gpu_tier.geometry import KVDtype, KVGeometry, KVKind
from kvcm.gpu_tier.kernels.lru_diff import DiffError, DiffOutputs, LayerState
from kvcm.gpu_tier.manager.residency import LruDiffPolicy
from kvcm.gpu_tier.runtime import NullRuntime
from kvcm.gpu_tier.types import ForwardBatch, Mode, ResidencyPlan, Selection, Unit

NO_ERROR = DiffError(0)


@dataclass
class Outcome:
    """What a step decided; slots are positions in the buffer."""

    places: list[tuple[str, int] | None]
    loads: list[tuple[int, int, int]] = field(default_factory=list)  # item, slot, evicted item or -1
    promoted: tuple[int, int] | None = None  # item, slot
    hits: int = 0
    errors: DiffError = NO_ERROR
    fast: bool = False


class Buffer:
    """The buffer of one request, layer and head."""

    def __init__(self, capacity: int, unit: int, *, promote: bool, loads_hottest: bool) -> None:
        self.held: list[int] = [-1] * capacity
        self.order = list(range(capacity))
        self.newest = -1
        self.unit, self.promote, self.loads_hottest = unit, promote, loads_hottest

    def admit(self, n_tokens: int) -> None:
        full, part = divmod(n_tokens, self.unit)
        kept = list(range(full))[-len(self.held) :]
        self.held = kept + [-1] * (len(self.held) - len(kept))
        self.order = [s for s, item in enumerate(self.held) if item < 0] + list(range(len(kept)))
        self.newest = full if part else -1

    def step(self, n_tokens: int, selected: list[int], backed_up: set[int]) -> Outcome:
        newest, previous = (n_tokens - 1) // self.unit, self.newest
        self.newest = newest
        moves = self.promote and previous >= 0 and previous + 1 == newest
        known = {item: slot for slot, item in enumerate(self.held) if item >= 0}
        outside = {newest} | ({previous} if moves else set())
        hits = [known[item] for item in selected if item in known and item not in outside]
        missing = [item for item in selected if item not in known and item not in outside]
        loadable = [item for item in missing if item in backed_up]
        free = [s for s in self.order if s not in hits and (self.held[s] < 0 or self.held[s] in backed_up)]
        out = Outcome([], fast=self._is_fast(newest, selected, outside, moves=moves))
        if len(missing) > len(loadable):
            out.errors |= DiffError.NOT_BACKED_UP
        if moves and len(free) > (0 if previous in selected else len(loadable)):
            out.promoted = previous, free.pop(0)
        for item, slot in zip(loadable, free, strict=False):
            out.loads.append((item, slot, self.held[slot]))
        if len(loadable) > len(out.loads) or (moves and previous in selected and not out.promoted):
            out.errors |= DiffError.NO_VICTIM
        self._apply(out, hits)
        now = {item: slot for slot, item in enumerate(self.held)}
        for item in selected:
            at_newest = ("newest", newest % 2) if item == newest else None
            out.places.append(("slot", now[item]) if item in now and item != newest else at_newest)
        out.hits = sum(place is not None for place in out.places) - len(out.loads)
        return out

    def _is_fast(self, newest: int, selected: list[int], outside: set[int], *, moves: bool) -> bool:
        if not self.promote or newest >= len(self.held) or (moves and self.held[self.order[0]] >= 0):
            return False
        return all(item in outside or self.held[item] == item for item in selected)

    def _apply(self, out: Outcome, hits: list[int]) -> None:
        loaded = [slot for _, slot, _ in out.loads]
        last = [out.promoted[1]] if out.promoted else []
        warm = [] if out.fast else [s for s in self.order if s in hits]
        cold = [s for s in self.order if s not in {*loaded, *last, *warm}]
        self.order = cold + (warm + loaded if self.loads_hottest else loaded + warm) + last
        for item, slot, _ in out.loads:
            self.held[slot] = item
        if out.promoted:
            self.held[out.promoted[1]] = out.promoted[0]


def geometry_of(layers: int = 2, heads: int = 2, page_size: int = 4, start_layer: int = 0) -> KVGeometry:
    return KVGeometry(KVKind.MHA, layers, heads, 8, 8, KVDtype.F32, page_size, start_layer)


def decode_batch(requests: list[int], lengths: list[int], rows: int | None = None) -> ForwardBatch:
    """Return a decode step; rows behind the requests are padding that points nowhere."""
    padding = (rows or len(requests)) - len(requests)
    seq_lens = torch.tensor(lengths + [1] * padding, dtype=torch.int32)
    pool_indices = torch.tensor(requests + [10**9] * padding, dtype=torch.int64)
    slots, positions = torch.zeros(len(seq_lens), dtype=torch.int64), seq_lens.long() - 1
    count, on_host = torch.tensor([len(requests)], dtype=torch.int32), (tuple(requests), tuple(lengths))
    extend_lens = (1,) * len(requests)
    return ForwardBatch(Mode.DECODE, pool_indices, seq_lens, slots, positions, count, *on_host, extend_lens)


def selection_of(rows: list[list[list[int]]], width: int, unit: int) -> Selection:
    """Return the selection of ``rows[b][head]``."""
    indices = torch.full((len(rows), len(rows[0]), width), -1, dtype=torch.int32)
    for b, heads in enumerate(rows):
        for h, items in enumerate(heads):
            indices[b, h, : len(items)] = torch.tensor(items, dtype=torch.int32)
    lengths = (indices >= 0).sum(-1, dtype=torch.int32)
    return Selection(Unit.TOKEN if unit == 1 else Unit.PAGE, unit, indices, lengths)


@dataclass(frozen=True)
class Case:
    """One random history."""

    seed: int
    capacity: int
    width: int
    unit: int
    heads: int
    steps: int
    promote: bool
    loads_hottest: bool
    lag: int  # most items whose backup may be missing
    jumps: bool
    requests: int = 3
    max_items: int = 40
    layers: int = 2


def random_case(seed: int) -> Case:
    rng = Random(seed)
    capacity = rng.randint(1, 12)
    return Case(
        seed, capacity, rng.randint(1, capacity), rng.choice((1, 1, 3)), rng.randint(1, 2), rng.randint(1, 7),
        rng.random() < 0.8, rng.random() < 0.3, rng.choice((0, 0, 1, 4)), rng.random() < 0.3,
    )  # fmt: skip


@dataclass
class Steps:
    """What one step was given and gave."""

    layer: int
    batch: ForwardBatch
    mask: list[bool]
    selected: list[list[list[int]]]
    plan: ResidencyPlan
    outcomes: dict[tuple[int, int], Outcome]  # of (row, head), active rows only


class World:
    """A policy and the buffers of the model side by side."""

    def __init__(self, case: Case, kernels: str = "reference") -> None:
        self.case, self.rng = case, Random(case.seed)
        self.geometry = geometry_of(layers=case.layers, heads=2, start_layer=case.seed % 3)
        self.host_loc = torch.full((case.requests, case.max_items), -1, dtype=torch.int64)
        self.policy = LruDiffPolicy(
            self.geometry, capacity=case.capacity, unit_tokens=case.unit, selecting_heads=case.heads,
            max_requests=case.requests, max_items=case.max_items, host_loc=self.host_loc, runtime=NullRuntime(),
            promote_newest=case.promote, loads_hottest=case.loads_hottest, kernels=kernels,
        )  # fmt: skip
        self.buffers: dict[tuple[int, int, int], Buffer] = {}
        self.tokens: dict[int, int] = {}
        self.locations: dict[int, list[int]] = {}
        self.newest_slots: dict[int, list[int]] = {}
        self.last: dict[tuple[int, int], list[int]] = {}
        self.fresh: set[int] = set()
        for request in range(case.requests):
            self.admit(request)

    def admit(self, request: int) -> None:
        case, rng = self.case, self.rng
        self.policy.release(request)
        self.fresh.add(request)
        self.tokens[request] = rng.randint(0, case.max_items * case.unit // 2)
        slots = [s * case.unit for s in rng.sample(range(10 * case.capacity), case.capacity + 2)]
        self.locations[request], self.newest_slots[request] = slots[2:], slots[:2]
        self.policy.admit(request, torch.tensor(slots[2:]), torch.tensor(slots[:2]), self.tokens[request])
        self.host_loc[request] = -1
        self.back_up(request)
        for layer in self.geometry.layers:
            for head in range(case.heads):
                buffer = Buffer(case.capacity, case.unit, promote=case.promote, loads_hottest=case.loads_hottest)
                buffer.admit(self.tokens[request])
                self.buffers[layer, request, head] = buffer

    def admit_another(self) -> int | None:
        """Sometimes give a row to another request, and return the row."""
        if self.rng.random() < 0.9:
            return None
        request = self.rng.randrange(self.case.requests)
        self.admit(request)
        return request

    def back_up(self, request: int) -> None:
        done = self.tokens[request] // self.case.unit - self.rng.randint(0, self.case.lag)
        done = max(done, int((self.host_loc[request] >= 0).sum()))
        self.host_loc[request, :done] = 1000 * request + 7 * torch.arange(done)

    def backed_up(self, request: int) -> set[int]:
        return {int(i) for i in (self.host_loc[request] >= 0).nonzero()}

    def grow(self, requests: list[int]) -> None:
        case, rng = self.case, self.rng
        for request in requests:
            self.back_up(request)
            fresh = request in self.fresh  # the first step is behind the admitted tokens
            step = rng.choice((int(fresh), 1, 2 * case.unit)) if case.jumps else 1
            self.fresh.discard(request)
            self.tokens[request] = min(self.tokens[request] + step, case.max_items * case.unit)

    def pick(self, layer: int, request: int, head: int) -> list[int]:
        """Return a selection: some of the last one, some others, often the newest items."""
        items = -(-self.tokens[request] // self.case.unit)
        old = [i for i in self.last.get((layer, request), []) if i < items and self.rng.random() < 0.7]
        recent = [i for i in (items - 1, items - 2) if i >= 0 and self.rng.random() < 0.7]
        others = self.rng.sample(range(items), min(items, self.rng.randint(0, self.case.width)))
        picked = list(dict.fromkeys(recent + old + others))[: self.case.width]
        self.rng.shuffle(picked)
        self.last[layer, request] = picked
        return picked

    def step(self) -> list[Steps]:
        """Let one decode step pass through all layers."""
        rng, case = self.rng, self.case
        requests = rng.sample(range(case.requests), rng.randint(1, case.requests))
        self.grow(requests)
        batch = decode_batch(requests, [self.tokens[r] for r in requests], rows=case.requests)
        mask = [rng.random() < 0.85 for _ in range(case.requests)]
        return [self.layer_step(layer, batch, mask) for layer in self.geometry.layers]

    def layer_step(self, layer: int, batch: ForwardBatch, mask: list[bool]) -> Steps:
        case = self.case
        padding = [[[0] for _ in range(case.heads)] for _ in range(case.requests - batch.num_real)]
        real = [[self.pick(layer, r, h) for h in range(case.heads)] for r in batch.requests]
        selection = selection_of(real + padding, case.width, case.unit)
        plan = self.policy.resolve(layer, batch, selection, torch.tensor(mask))
        outcomes = {}
        for b, request in enumerate(batch.requests):
            for h in range(case.heads) if mask[b] else ():
                buffer = self.buffers[layer, request, h]
                outcomes[b, h] = buffer.step(self.tokens[request], real[b][h], self.backed_up(request))
        return Steps(layer, batch, mask, real, plan, outcomes)

    def device_slots(self, request: int, outcome: Outcome) -> list[int]:
        """Return the device slots of an outcome, -1 padded."""
        slots = [-1] * self.case.width
        for i, place in enumerate(outcome.places):
            if place:
                table = self.locations[request] if place[0] == "slot" else self.newest_slots[request]
                slots[i] = table[place[1]]
        return slots


def clone_state(policy: LruDiffPolicy, layer: int) -> dict[str, Tensor]:
    state = policy.layer_state(layer)
    names = ("slot_item", "lru_slots", "newest_item", "slot_loc", "newest_slots", "host_loc")
    return {name: getattr(state, name).clone() for name in names}


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
    for each in fields(DiffOutputs):
        assert torch.equal(getattr(ours, each.name), getattr(theirs, each.name)), each.name


def states_equal(ours: LayerState, theirs: LayerState) -> None:
    for each in fields(LayerState):
        assert torch.equal(getattr(ours, each.name), getattr(theirs, each.name)), each.name


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
