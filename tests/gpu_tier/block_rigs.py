"""Requests that decode over a host pool or a store of clusters and an arena, with a block cache between them.

What the coordinator would do is done here by hand. Clusters are made up: each head of a layer puts the tokens of a
segment where it likes. `assemble` carries a plan of an execution buffer out in plain loops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from random import Random
from typing import Any, Protocol

import torch
from lru_model import decode_batch
from torch import Tensor

from kvcm.gpu_tier.config import PQCacheConfig, RetroInferConfig, SparseConfig
from kvcm.gpu_tier.geometry import KVDtype, KVGeometry, KVKind, Layout
from kvcm.gpu_tier.index.wave_index import SegmentSink, WaveSegment
from kvcm.gpu_tier.kernels.gather_copy import gather_copy
from kvcm.gpu_tier.kernels.operands import RowPool, pool_rows
from kvcm.gpu_tier.manager.execution_buffer import ExecutionBuffer
from kvcm.gpu_tier.manager.host_tokens import HostTokens
from kvcm.gpu_tier.manager.residency import BlockPolicy, SparseBuffers
from kvcm.gpu_tier.manager.token_blocks import TokenBlockPolicy
from kvcm.gpu_tier.manager.wave_store import WaveStore
from kvcm.gpu_tier.pools.device_pool import DeviceKVPool
from kvcm.gpu_tier.pools.host_pool import HostKVPool
from kvcm.gpu_tier.pools.transfer import KVTransfer
from kvcm.gpu_tier.runtime import DeviceRuntime, NullRuntime
from kvcm.gpu_tier.types import ExecutionPlan, ForwardBatch, ResidencyPlan, Selection, SteadyRing, SteadyZone, Unit


def coded(seed: int, geometry: KVGeometry, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return keys and values of tokens that say whose they are, ``f32 [L, n, H, d or dv]``.

    Numbers 0 to 3 of a row are the seed, the layer (by its position), the head and the token; keys are negative.
    """
    layers, heads = geometry.num_layers, geometry.num_kv_heads

    def rows(dims: int, sign: int) -> Tensor:
        numbers = torch.zeros(layers, len(tokens), heads, dims)
        numbers[..., 0] = seed
        numbers[..., 1] = torch.arange(layers)[:, None, None]
        numbers[..., 2] = torch.arange(heads)
        numbers[..., 3] = torch.tensor(list(tokens))[:, None]
        return sign * numbers

    return rows(geometry.head_dim, -1), rows(geometry.v_head_dim, 1)


def rows_of(pool: RowPool, part: int, slots: Tensor, head: int) -> Tensor:
    """Return the first four numbers of f32 rows, ``f32 [n, 4]``."""
    starts = [pool.addressing.address(part, slot, pool.layer, head) for slot in slots.tolist()]
    places = torch.tensor(starts, dtype=torch.int64)[:, None] + torch.arange(16)
    return pool.data[places].view(torch.float32)


def assemble(
    sources: Sequence[RowPool], plan: ExecutionPlan, geometry: KVGeometry, tokens_per_row: int
) -> dict[tuple[int, int], list[tuple[float, ...]]]:
    """Return what each row and head attends to, token after token: (seed, layer, head, token).

    Checks that every one of its slots is written once, and none besides.
    """
    runs = plan.runs
    heads = geometry.num_kv_heads
    found: dict[tuple[int, int], list[tuple[float, ...]]] = {}
    for line in range(len(runs.count)):
        row, head = divmod(line, heads)
        placed: dict[int, tuple[float, ...]] = {}
        for run in range(int(runs.count[line])):
            kind, tokens = int(runs.kind[line, run]), int(runs.tokens[line, run])
            if kind < 0:
                continue
            slots = int(runs.src[line, run]) + torch.arange(tokens)
            keys = rows_of(sources[kind], 0, slots, head)
            values = rows_of(sources[kind], 1, slots, head)
            assert torch.equal(keys, -values)
            first = int(runs.dst[line, run]) - row * tokens_per_row
            for i, value in enumerate(values.tolist()):
                assert first + i not in placed, "two runs write one slot"
                placed[first + i] = tuple(value)
        length = int(plan.lens[row, head])
        assert sorted(placed) == list(range(length)), (row, head)
        assert length <= tokens_per_row
        found[row, head] = [placed[i] for i in range(length)]
    return found


GEOMETRY = KVGeometry(KVKind.MHA, 3, 2, 4, 6, KVDtype.F32, page_size=4, start_layer=2)


class _Rig:
    """What both kinds of rigs do: write requests' rows, and check what attention would read of a step."""

    geometry: KVGeometry
    arena: DeviceKVPool
    buffers: SparseBuffers
    execution: ExecutionBuffer
    policy: Any
    requests: dict[int, Any]
    gathered: list[Tensor]

    def _cover(self, request: int, ring: SteadyRing, tokens: int) -> None:
        """Let a request of so many tokens have its buffer, or a larger one."""
        capacity = ring.capacity + self.policy.cache_slots(tokens)
        self.buffers.cover(request, capacity)
        self.policy.admit(request, ring, self.buffers.buffer(request).items[:capacity])

    def _write_rows(self, pool: DeviceKVPool | HostKVPool, seed: int, tokens: Sequence[int], slots: Tensor) -> None:
        size = self.geometry.page_size
        for part, rows in enumerate(coded(seed, self.geometry, tokens)):
            for layer in range(self.geometry.num_layers):
                target = pool_rows(pool.data, pool.addressing, part, layer, self.geometry.num_kv_heads)
                target[slots // size, slots % size] = rows[layer].view(torch.uint8)

    def release(self, request: int) -> None:
        """Let a request end, and overwrite what it had on the device."""
        slots = self.buffers.buffer(request).items.long()
        self._write_rows(self.arena, 10**6, range(len(slots)), slots)
        self.policy.release(request)
        self.buffers.release(request)
        del self.requests[request]

    def batch(self, requests: list[int], padding: int = 0) -> ForwardBatch:
        """Return a decode batch; padding rows point nowhere."""
        return decode_batch(requests, [self.requests[r].tokens for r in requests], len(requests) + padding)

    def sources(self, layer_id: int) -> tuple[RowPool, RowPool, RowPool]:
        """Return what the runs of a layer point into."""
        arena = RowPool(self.arena.data, self.arena.addressing, self.geometry.layer_index(layer_id))
        return arena, arena, self.policy.host_source(layer_id)

    def _checked(
        self, batch: ForwardBatch, layer: int, selection: Selection, mask: Tensor, tokens_of: Callable[..., list[int]]
    ) -> ResidencyPlan:
        """Return the plan of a layer's step, in which each row, request and head attends to `tokens_of` them."""
        layer_id = self.geometry.start_layer + layer
        self.policy.announce(layer_id, batch, selection)
        plan: ResidencyPlan = self.policy.resolve(layer_id, batch, selection, mask)
        assert plan.execution is not None
        found = assemble(self.sources(layer_id), plan.execution, self.geometry, self.execution.tokens_per_row)
        for row, head in product(range(batch.rows), range(self.geometry.num_kv_heads)):
            expected: list[tuple[float, ...]] = []
            if row < batch.num_real and mask[row]:
                state = self.requests[batch.requests[row]]
                expected = [(state.seed, layer, head, token) for token in tokens_of(state, row, head)]
            assert found[row, head] == expected, (row, head)
        self.gathered = self._gather(plan.execution, layer_id)
        return plan

    def _gather(self, plan: ExecutionPlan, layer_id: int) -> list[Tensor]:
        """Let the copy kernel put the buffer together, and return what attention reads, line after line."""
        heads, target = self.geometry.num_kv_heads, self.execution.source()
        gather_copy(self.sources(layer_id), target, plan.runs, num_heads=heads, impl="reference")
        lines = []
        for line, length in enumerate(plan.lens.flatten().tolist()):
            slots = line // heads * self.execution.tokens_per_row + torch.arange(length)
            lines += [rows_of(target, part, slots, line % heads) for part in (0, 1)]
        return lines


class Policy(BlockPolicy, SegmentSink, Protocol):
    """What keeps clusters and puts execution buffers together."""


@dataclass
class Clustered:
    """A request.

    Attributes:
        seed: what its values say.
        tokens: how many it has.
        indexed: the first token behind the sink that is not clustered.
        clusters: tokens of each cluster, by layer (position) and head.
    """

    seed: int
    tokens: int = 0
    indexed: int = 0
    clusters: dict[tuple[int, int], list[list[int]]] = field(default_factory=dict)


@dataclass
class ClusterRig(_Rig):
    """See the module. `make` gets the rig when everything that a policy is made of is there."""

    make: Callable[[ClusterRig], Policy]
    settings: RetroInferConfig
    seed: int = 0
    max_requests: int = 4
    max_tokens: int = 160
    width: int = 6
    geometry: KVGeometry = GEOMETRY
    runtime: DeviceRuntime = field(default_factory=NullRuntime)
    requests: dict[int, Clustered] = field(default_factory=dict)
    gathered: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = Random(self.seed)
        pages = self.max_requests * -(-self.max_tokens // self.geometry.page_size)
        self.arena = DeviceKVPool(self.geometry, 4 * pages, self.runtime)
        self.arena.allocator.alloc(3)
        self.store = WaveStore(self.geometry, self.settings, 1 << 20, self.runtime)
        self.buffers = SparseBuffers(self.arena, 1)
        s = self.settings
        self.ring = SteadyRing(s.sink, s.local + s.update_segment)
        self.most_retrieved = 30
        execution = self.ring.capacity + self.most_retrieved
        self.execution = ExecutionBuffer(self.geometry, self.max_requests, execution, self.runtime)
        self.policy = self.make(self)

    def raw(self, layer_id: int, part: int, request: int, start: int, stop: int) -> Tensor:
        """See `RawRows`: a request's KV, wherever it is."""
        rows = coded(self.requests[request].seed, self.geometry, range(start, stop))[part]
        return rows[self.geometry.layer_index(layer_id)].contiguous().view(torch.uint8)

    # Requests.

    def admit(self, request: int, seed: int, tokens: int) -> None:
        """Take a request in that has so many tokens; all but the steady ones are clustered."""
        state = self.requests[request] = Clustered(seed, indexed=self.settings.sink)
        self.policy.hold(request, tokens)
        state.tokens = tokens
        stop = tokens - self.settings.local
        while state.indexed < stop:
            self._cluster(request, min(self.settings.segment, stop - state.indexed))
        self._to_buffer(request)
        self._write(request, [t for t in range(tokens) if t < self.ring.sink or t >= tokens - self.ring.ring])

    def _to_buffer(self, request: int) -> None:
        self._cover(request, self.ring, self.requests[request].tokens)

    def _write(self, request: int, tokens: list[int]) -> None:
        slots = torch.tensor([self.buffers.item_slot(request, self.ring.position(t)) for t in tokens])
        self._write_rows(self.arena, self.requests[request].seed, tokens, slots)

    def _cluster(self, request: int, tokens: int) -> None:
        """Let the next tokens of a request become clusters of their own in every layer."""
        state = self.requests[request]
        count = max(1, round(tokens / self.settings.tokens_per_centroid))
        for layer in range(self.geometry.num_layers):
            sizes, members = [], []
            known = len(state.clusters.get((layer, 0), []))
            for head in range(self.geometry.num_kv_heads):
                clusters = self._made_up(tokens, count)
                sizes.append([len(cluster) for cluster in clusters])
                members.append([token for cluster in clusters for token in cluster])
                absolute = [[state.indexed + token for token in cluster] for cluster in clusters]
                state.clusters.setdefault((layer, head), []).extend(absolute)
            segment = WaveSegment(
                state.indexed, known, torch.tensor(sizes, dtype=torch.int32), torch.tensor(members, dtype=torch.int32)
            )
            self.policy.store(self.geometry.start_layer + layer, request, segment)
        state.indexed += tokens

    def _made_up(self, tokens: int, count: int) -> list[list[int]]:
        skew = self.rng.choice([1, 1, 3])
        clusters: list[list[int]] = [[] for _ in range(count)]
        for token in range(tokens):
            clusters[int(count * self.rng.random() ** skew)].append(token)
        return clusters

    def decode(self, requests: list[int]) -> None:
        """Let each request have its next token; when there are enough of them they are clustered."""
        s = self.settings
        for request in requests:
            state = self.requests[request]
            self.policy.hold(request, state.tokens + 1)
            before = self.policy.cache_slots(state.tokens)
            state.tokens += 1
            if self.policy.cache_slots(state.tokens) > before:
                self._to_buffer(request)
            self._write(request, [state.tokens - 1])
            if state.tokens - state.indexed == s.local + s.update_segment:
                self._cluster(request, s.update_segment)

    def come_and_go(self, rng: Random, step: int) -> None:
        """Let some requests begin and some end."""
        for request in range(self.max_requests):
            if request not in self.requests and rng.random() < 0.5:
                self.admit(request, 100 * step + request, rng.choice([16, 17, 40, 47, 90]))
            elif request in self.requests and rng.random() < 0.1:
                self.release(request)

    # Steps.

    def pick(self, requests: list[int], layer: int) -> list[list[list[int]]]:
        """Return clusters for each row and head in some order, as many as the execution buffer holds."""
        return [
            [self._clusters(self.requests[request].clusters.get((layer, head), [])) for head in range(2)]
            for request in requests
        ]

    def _clusters(self, clusters: list[list[int]]) -> list[int]:
        near = len(clusters) if self.rng.random() < 0.5 else min(len(clusters), self.width)
        picked, left = [], self.most_retrieved
        for cluster in self.rng.sample(range(near), min(near, self.rng.randint(0, self.width))):
            if len(clusters[cluster]) <= left:
                picked.append(cluster)
                left -= len(clusters[cluster])
        return picked

    def selection(self, batch: ForwardBatch, picked: list[list[list[int]]], sparse: Tensor) -> Selection:
        """Return a selection beside the steady zone."""
        indices = torch.full((batch.rows, self.geometry.num_kv_heads, self.width), -1, dtype=torch.int32)
        for row, heads in enumerate(picked):
            for head, clusters in enumerate(heads):
                indices[row, head, : len(clusters)] = torch.tensor(clusters, dtype=torch.int32)
        firsts = tuple(
            self.requests[r].indexed if is_sparse else 0
            for r, is_sparse in zip(batch.requests, sparse.tolist(), strict=False)
        )
        first = torch.tensor([*firsts, *[0] * (batch.rows - len(firsts))], dtype=torch.int32)
        lengths = (indices >= 0).sum(-1, dtype=torch.int32)
        return Selection(Unit.CLUSTER, 0, indices, lengths, steady=SteadyZone(self.settings.sink, first, firsts))

    def step(
        self, batch: ForwardBatch, layer: int, picked: list[list[list[int]]], sparse: Tensor | None = None,
        *, commit: bool = True,
    ) -> ResidencyPlan:  # fmt: skip
        """Do a step of one layer (by its position), check what attention would read, and return the plan."""
        mask = torch.ones(batch.rows, dtype=torch.bool) if sparse is None else sparse

        def tokens_of(state: Clustered, row: int, head: int) -> list[int]:
            clusters = [state.clusters[layer, head][cluster] for cluster in picked[row][head]]
            return [*self.steady(state), *[token for cluster in clusters for token in cluster]]

        plan = self._checked(batch, layer, self.selection(batch, picked, mask), mask, tokens_of)
        if commit:
            self.policy.commit(self.geometry.start_layer + layer, plan)
        return plan

    def steady(self, state: Clustered) -> list[int]:
        """Return the steady tokens of a request, ascending."""
        return [token for token in range(state.tokens) if token < self.ring.sink or token >= state.indexed]

    @staticmethod
    def settings_of(**changes: Any) -> RetroInferConfig:
        """Return settings of small segments: two tokens in a block."""
        small = {"sink": 3, "local": 5, "segment": 32, "update_segment": 8, "tokens_per_centroid": 4}
        return RetroInferConfig(**{**small, "block_bytes": 32, **changes})


_LAG = 2  # tokens whose host slot is not named yet


@dataclass
class Decoding:
    """A request: its seed, its tokens, its steady places and how many of its last tokens are steady."""

    seed: int
    tokens: int
    ring: SteadyRing
    local: int


@dataclass
class BlockRig(_Rig):
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
        self._cover(request, steady, tokens)
        self._add_tokens(request, tokens)
        self.host_tokens.locate([request], [tokens])

    def _add_tokens(self, request: int, count: int) -> None:
        """Write the next tokens to the host, and to their steady places those that are not overwritten at once."""
        state = self.requests[request]
        tokens = range(state.tokens, state.tokens + count)
        state.tokens += count
        kept = [t for t in tokens if t < state.ring.sink or t >= state.tokens - state.ring.ring]
        places = [self.buffers.item_slot(request, state.ring.position(token)) for token in kept]
        slots = self.host_tokens.slots(request, tokens.start, tokens.stop)
        self._write_rows(self.host, state.seed, tokens, slots)
        self._write_rows(self.arena, state.seed, kept, torch.tensor(places, dtype=torch.int64))

    def decode(self, requests: list[int]) -> None:
        """Let each request have its next token; its buffer grows with it."""
        for request in requests:
            n = self.requests[request].tokens + 1
            self.host_tokens.cover(request, n)
            if self.policy.cache_slots(n) > self.policy.cache_slots(n - 1):
                self._cover(request, self.requests[request].ring, n)
            self._add_tokens(request, 1)
            self.host_tokens.locate([request], [max(0, n - _LAG)])

    def release(self, request: int) -> None:
        """See `_Rig`; its host slots are free, too."""
        super().release(request)
        self.host_tokens.release(request)

    # Steps.

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
        mask = torch.ones(batch.rows, dtype=torch.bool) if sparse is None else sparse

        def tokens_of(state: Decoding, row: int, head: int) -> list[int]:
            return [*self.steady(state), *picked[row][head]]

        plan = self._checked(batch, layer, self.selection(batch, picked), mask, tokens_of)
        self.policy.commit(self.geometry.start_layer + layer, plan)
        self.check_cache(layer)
        return plan

    def steady(self, state: Decoding) -> list[int]:
        """Return the steady tokens of a request, ascending."""
        first = max(state.ring.sink, state.tokens - state.local)
        return [token for token in range(state.tokens) if token < state.ring.sink or token >= first]

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
