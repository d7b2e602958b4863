"""Requests that decode over a store of clusters, with a cache of its blocks between it and attention.

The clusters are made up: each head of a layer puts the tokens of a segment where it likes, some nowhere near evenly.
The policy is either of those that run with clusters; what it is asked and what has to come out is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any, Protocol

import torch
from execution_reader import assemble, coded, rows_of
from lru_model import decode_batch
from torch import Tensor

from gpu_tier.geometry import KVGeometry, KVKind
from gpu_tier.index.wave_segment import SegmentSink, WaveSegment
from gpu_tier.kernels.gather_copy import gather_copy
from gpu_tier.kernels.pool_rows import pool_rows
from gpu_tier.kernels.row_pool import RowPool
from gpu_tier.manager.buffers import SparseBuffers
from gpu_tier.manager.execution_buffer import ExecutionBuffer
from gpu_tier.manager.policy import BlockPolicy
from gpu_tier.manager.wave_store import WaveStore
from gpu_tier.pools.device_pool import DeviceKVPool
from gpu_tier.retrieval_config import RetroInferConfig
from gpu_tier.rows import KVDtype
from gpu_tier.runtime import DeviceRuntime, NullRuntime
from gpu_tier.types import ForwardBatch, ResidencyPlan, Selection, SteadyRing, SteadyZone, Unit

__all__ = ["GEOMETRY", "ClusterRig", "Clustered", "Policy"]

GEOMETRY = KVGeometry(KVKind.MHA, 3, 2, 4, 6, KVDtype.F32, page_size=4, start_layer=2)


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
class ClusterRig:
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
        capacity = self.ring.capacity + self.policy.cache_slots(self.requests[request].tokens)
        self.buffers.cover(request, capacity)
        self.policy.admit(request, self.ring, self.buffers.buffer(request).items[:capacity])

    def _write(self, request: int, tokens: list[int]) -> None:
        size = self.geometry.page_size
        slots = torch.tensor([self.buffers.item_slot(request, self.ring.position(t)) for t in tokens])
        for part, rows in enumerate(coded(self.requests[request].seed, self.geometry, tokens)):
            for layer in range(self.geometry.num_layers):
                target = pool_rows(self.arena.data, self.arena.addressing, part, layer, self.geometry.num_kv_heads)
                target[slots // size, slots % size] = rows[layer].view(torch.uint8)

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

    def release(self, request: int) -> None:
        """Let a request end, and overwrite what it had on the device."""
        slots = self.buffers.buffer(request).items.long()
        for part in range(2):
            for layer in range(self.geometry.num_layers):
                rows = pool_rows(self.arena.data, self.arena.addressing, part, layer, self.geometry.num_kv_heads)
                rows[slots // self.geometry.page_size, slots % self.geometry.page_size] = 93
        self.policy.release(request)
        self.buffers.release(request)
        del self.requests[request]

    def come_and_go(self, rng: Random, step: int) -> None:
        """Let some requests begin and some end."""
        for request in range(self.max_requests):
            if request not in self.requests and rng.random() < 0.5:
                self.admit(request, 100 * step + request, rng.choice([16, 17, 40, 47, 90]))
            elif request in self.requests and rng.random() < 0.1:
                self.release(request)

    # Steps.

    def batch(self, requests: list[int], padding: int = 0) -> ForwardBatch:
        """Return a decode batch; padding rows point nowhere."""
        return decode_batch(requests, [self.requests[r].tokens for r in requests], len(requests) + padding)

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
        layer_id = self.geometry.start_layer + layer
        mask = torch.ones(batch.rows, dtype=torch.bool) if sparse is None else sparse
        selection = self.selection(batch, picked, mask)
        self.policy.announce(layer_id, batch, selection)
        plan = self.policy.resolve(layer_id, batch, selection, mask)
        assert plan.execution is not None
        found = assemble(self.sources(layer_id), plan.execution, self.geometry, self.execution.tokens_per_row)
        for row in range(batch.rows):
            for head in range(self.geometry.num_kv_heads):
                expected: list[tuple[float, ...]] = []
                if row < batch.num_real and mask[row]:
                    state = self.requests[batch.requests[row]]
                    clusters = [state.clusters[layer, head][cluster] for cluster in picked[row][head]]
                    tokens = [*self.steady(state), *[token for cluster in clusters for token in cluster]]
                    expected = [(state.seed, layer, head, token) for token in tokens]
                assert found[row, head] == expected, (row, head)
        self.gathered = self._gather(plan, layer)
        if commit:
            self.policy.commit(layer_id, plan)
        return plan

    def steady(self, state: Clustered) -> list[int]:
        """Return the steady tokens of a request, ascending."""
        return [token for token in range(state.tokens) if token < self.ring.sink or token >= state.indexed]

    def sources(self, layer_id: int) -> tuple[RowPool, RowPool, RowPool]:
        """Return what the runs of a layer point into."""
        arena = RowPool(self.arena.data, self.arena.addressing, self.geometry.layer_index(layer_id))
        return arena, arena, self.policy.host_source(layer_id)

    def _gather(self, plan: ResidencyPlan, layer: int) -> list[Tensor]:
        """Let the copy kernel put the buffer together, and return what attention reads, line after line."""
        assert plan.execution is not None
        heads, lens = self.geometry.num_kv_heads, plan.execution.lens
        sources = self.sources(self.geometry.start_layer + layer)
        gather_copy(sources, self.execution.source(), plan.execution.runs, num_heads=heads, impl="reference")
        lines = []
        for line, length in enumerate(lens.flatten().tolist()):
            slots = line // heads * self.execution.tokens_per_row + torch.arange(length)
            lines += [rows_of(self.execution.source(), part, slots, line % heads) for part in (0, 1)]
        return lines

    @staticmethod
    def settings_of(**changes: Any) -> RetroInferConfig:
        """Return settings of small segments: two tokens in a block."""
        small = {"sink": 3, "local": 5, "segment": 32, "update_segment": 8, "tokens_per_centroid": 4}
        return RetroInferConfig(**{**small, "block_bytes": 32, **changes})
