"""Requests that decode over a host pool and an arena, with PQCache's block cache between them.

What the coordinator would do is done here by hand: every token goes to the host page by page and, while it is steady,
to its place in the request's buffer; a token's host slot is named two steps after it was computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from random import Random
from typing import Any

import torch
from execution_reader import assemble, coded, rows_of
from lru_model import decode_batch
from torch import Tensor

from gpu_tier.config import SparseConfig
from gpu_tier.geometry import KVGeometry, KVKind, Layout
from gpu_tier.kernels.gather_copy import gather_copy
from gpu_tier.kernels.pool_rows import pool_rows
from gpu_tier.kernels.row_pool import RowPool
from gpu_tier.manager.buffers import SparseBuffers
from gpu_tier.manager.execution_buffer import ExecutionBuffer
from gpu_tier.manager.host_tokens import HostTokens
from gpu_tier.manager.token_blocks import TokenBlockPolicy
from gpu_tier.pools.device_pool import DeviceKVPool
from gpu_tier.pools.host_pool import HostKVPool
from gpu_tier.pools.transfer import KVTransfer
from gpu_tier.retrieval_config import PQCacheConfig
from gpu_tier.rows import KVDtype
from gpu_tier.runtime import DeviceRuntime, NullRuntime
from gpu_tier.types import ForwardBatch, ResidencyPlan, Selection, SteadyRing, SteadyZone, Unit

__all__ = ["GEOMETRY", "BlockRig", "Decoding"]

GEOMETRY = KVGeometry(KVKind.MHA, 3, 2, 4, 6, KVDtype.F32, page_size=4, start_layer=2)
_LAG = 2  # tokens whose host slot is not named yet


@dataclass
class Decoding:
    """A request: its seed, its tokens, its steady places and how many of its last tokens are steady."""

    seed: int
    tokens: int
    ring: SteadyRing
    local: int


@dataclass
class BlockRig:
    """See the module."""

    settings: PQCacheConfig
    layout: Layout = Layout.LAYER_FIRST
    max_requests: int = 4
    max_tokens: int = 120
    width: int = 12
    layers_at_once: int = 1
    kernels: str = "auto"
    geometry: KVGeometry = GEOMETRY
    runtime: DeviceRuntime = field(default_factory=NullRuntime)
    requests: dict[int, Decoding] = field(default_factory=dict)
    gathered: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        pages = self.max_requests * -(-self.max_tokens // self.geometry.page_size)
        self.arena = DeviceKVPool(self.geometry, 2 * pages, self.runtime)
        self.host = HostKVPool(self.geometry, pages + 5, self.layout, self.runtime)
        self.host.allocator.alloc(3)  # host slots are not positions
        self.host_tokens = HostTokens(self.host, self.max_requests, self.max_tokens, 1, self.runtime.device)
        self.buffers = SparseBuffers(self.arena, 1)
        config = SparseConfig.parse({"algorithm": "pqcache", "page_size": self.geometry.page_size})
        self.transfer = KVTransfer(self.host, self.arena, self.runtime, config)
        self.execution = ExecutionBuffer(self.geometry, self.max_requests, 60, self.runtime)
        self.policy = TokenBlockPolicy(
            self.settings, self.execution, self.host_tokens, self.transfer, self.runtime,
            max_requests=self.max_requests, max_tokens=self.max_tokens, layers_at_once=self.layers_at_once,
            kernels=self.kernels, debug_checks=True,
        )  # fmt: skip

    # Requests.

    def admit(self, request: int, seed: int, tokens: int, *, local: int = 5, ring: int = 9) -> None:
        """Take a request in that has so many tokens."""
        steady = SteadyRing(self.settings.init, ring)
        self.requests[request] = Decoding(seed, 0, steady, local)
        self.host_tokens.cover(request, tokens)
        self._to_buffer(request, tokens)
        self._add_tokens(request, tokens)
        self.host_tokens.locate([request], [tokens])

    def _to_buffer(self, request: int, tokens: int) -> None:
        ring = self.requests[request].ring
        capacity = ring.capacity + self.policy.cache_slots(tokens)
        self.buffers.cover(request, capacity)
        self.policy.admit(request, ring, self.buffers.buffer(request).items[:capacity])

    def _add_tokens(self, request: int, count: int) -> None:
        """Write the next tokens to the host, and to their steady places those that are not overwritten at once."""
        state = self.requests[request]
        tokens = range(state.tokens, state.tokens + count)
        state.tokens += count
        kept = [t for t in tokens if t < state.ring.sink or t >= state.tokens - state.ring.ring]
        places = [self.buffers.item_slot(request, state.ring.position(token)) for token in kept]
        slots = self.host_tokens.slots(request, tokens.start, tokens.stop)
        self._write(self.host, state.seed, tokens, slots)
        self._write(self.arena, state.seed, kept, torch.tensor(places, dtype=torch.int64))

    def _write(self, pool: DeviceKVPool | HostKVPool, seed: int, tokens: Sequence[int], slots: Tensor) -> None:
        size = self.geometry.page_size
        for part, rows in enumerate(coded(seed, self.geometry, tokens)):
            for layer in range(self.geometry.num_layers):
                target = pool_rows(pool.data, pool.addressing, part, layer, self.geometry.num_kv_heads)
                target[slots // size, slots % size] = rows[layer].view(torch.uint8)

    def decode(self, requests: list[int]) -> None:
        """Let each request have its next token; its buffer grows with it."""
        for request in requests:
            n = self.requests[request].tokens + 1
            self.host_tokens.cover(request, n)
            if self.policy.cache_slots(n) > self.policy.cache_slots(n - 1):
                self._to_buffer(request, n)
            self._add_tokens(request, 1)
            self.host_tokens.locate([request], [max(0, n - _LAG)])

    def release(self, request: int) -> None:
        """Let a request end, and overwrite what it had."""
        self.policy.release(request)
        slots = self.buffers.buffer(request).items.long()
        self._write(self.arena, 10**6, range(len(slots)), slots)
        self.buffers.release(request)
        self.host_tokens.release(request)
        del self.requests[request]

    # Steps.

    def batch(self, requests: list[int], padding: int = 0) -> ForwardBatch:
        """Return a decode batch; padding rows point nowhere."""
        return decode_batch(requests, [self.requests[r].tokens for r in requests], len(requests) + padding)

    def pick(self, requests: list[int], rng: Random) -> list[list[list[int]]]:
        """Return middle tokens for each row and head, ascending; some rows want many of a few blocks."""
        return [[self._middle(request, rng) for _ in range(self.geometry.num_kv_heads)] for request in requests]

    def _middle(self, request: int, rng: Random) -> list[int]:
        state = self.requests[request]
        middle = range(self.settings.init, state.tokens - state.local)
        if rng.random() < 0.5:
            start = rng.randrange(len(middle) + 1)
            middle = middle[start : start + 2 * self.settings.block]
        return sorted(rng.sample(middle, min(len(middle), rng.randint(0, self.width))))

    def selection(self, batch: ForwardBatch, picked: list[list[list[int]]]) -> Selection:
        """Return a selection beside the steady zone; rows without a pick do not select."""
        indices = torch.full((batch.rows, self.geometry.num_kv_heads, self.width), -1, dtype=torch.int32)
        for row, heads in enumerate(picked):
            for head, tokens in enumerate(heads):
                indices[row, head, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        states = [self.requests[r] for r in batch.requests]
        firsts = tuple(max(s.ring.sink, s.tokens - s.local) for s in states)
        first = torch.tensor([*firsts, *[0] * (batch.rows - len(firsts))], dtype=torch.int32)
        lengths = (indices >= 0).sum(-1, dtype=torch.int32)
        zone = SteadyZone(self.settings.init, first, firsts)
        return Selection(Unit.TOKEN, 1, indices, lengths, steady=zone)

    def step(
        self, batch: ForwardBatch, layer: int, picked: list[list[list[int]]], sparse: Tensor | None = None
    ) -> ResidencyPlan:
        """Do a step of one layer (by its position), check what attention would read, and return the plan."""
        layer_id = self.geometry.start_layer + layer
        mask = torch.ones(batch.rows, dtype=torch.bool) if sparse is None else sparse
        selection = self.selection(batch, picked)
        self.policy.announce(layer_id, batch, selection)
        plan = self.policy.resolve(layer_id, batch, selection, mask)
        assert plan.execution is not None
        found = assemble(self.sources(layer_id), plan.execution, self.geometry, self.execution.tokens_per_row)
        for row in range(batch.rows):
            for head in range(self.geometry.num_kv_heads):
                expected: list[tuple[float, ...]] = []
                if row < batch.num_real and mask[row]:
                    state = self.requests[batch.requests[row]]
                    tokens = [*self.steady(state), *picked[row][head]]
                    expected = [(state.seed, layer, head, token) for token in tokens]
                assert found[row, head] == expected, (row, head)
        self.gathered = self._gathered(plan, layer)
        self.policy.commit(layer_id, plan)
        self.check_cache(layer)
        return plan

    def _gathered(self, plan: ResidencyPlan, layer: int) -> list[Tensor]:
        """Return the bytes that attention of a layer reads, line after line, as the copy kernel puts them together."""
        assert plan.execution is not None
        heads = self.geometry.num_kv_heads
        sources = self.sources(self.geometry.start_layer + layer)
        gather_copy(sources, self.execution.source(), plan.execution.runs, num_heads=heads, impl="reference")
        lines = []
        for (row, head), length in zip(
            product(range(len(plan.execution.lens)), range(heads)), plan.execution.lens.flatten(), strict=True
        ):
            slots = row * self.execution.tokens_per_row + torch.arange(int(length))
            lines += [rows_of(self.execution.source(), part, slots, head) for part in (0, 1)]
        return lines

    def steady(self, state: Decoding) -> list[int]:
        """Return the steady tokens of a request, ascending."""
        first = max(state.ring.sink, state.tokens - state.local)
        return [token for token in range(state.tokens) if token < state.ring.sink or token >= first]

    def sources(self, layer_id: int) -> tuple[RowPool, RowPool, RowPool]:
        """Return what the runs of a layer point into."""
        arena = RowPool(self.arena.data, self.arena.addressing, self.geometry.layer_index(layer_id))
        return arena, arena, self.policy.host_source(layer_id)

    # The cache.

    def cached(self, layer: int, request: int) -> list[list[int]]:
        """Return the item of each place, for each head that has places of its own."""
        held: list[list[int]] = self.policy.cached_items(self.geometry.start_layer + layer, request).tolist()
        return held

    def check_cache(self, layer: int) -> None:
        """Check that each place holds the bytes of its item, in the heads that it is for."""
        by_token = self.settings.cache_unit == "token"
        unit = 1 if by_token else self.settings.block
        arena = self.sources(self.geometry.start_layer + layer)[0]
        for request, state in self.requests.items():
            slots = self.buffers.buffer(request).items[state.ring.capacity :]
            for head in range(self.geometry.num_kv_heads):
                for place, item in enumerate(self.cached(layer, request)[head if by_token else 0]):
                    if item < 0:
                        continue
                    where = slots[place * unit : (place + 1) * unit].long()
                    tokens = state.ring.sink + item * unit + torch.arange(unit)
                    assert int(tokens[-1]) < state.tokens - state.local, "not only of the middle"
                    head_layer = torch.tensor([[float(state.seed), float(layer), float(head)]]).expand(unit, -1)
                    expected = torch.cat([head_layer, tokens[:, None].float()], 1)
                    for part, sign in ((0, -1), (1, 1)):
                        assert torch.equal(rows_of(arena, part, where, head), sign * expected)

    @staticmethod
    def settings_of(**changes: Any) -> PQCacheConfig:
        """Return small settings of the cache."""
        return PQCacheConfig(**{"init": 3, "block": 4, "cache_tokens": 16, "k_cache": 2, **changes})
