"""The execution buffer of residency `blocks`: the tokens that a layer attends to, gathered in every step.

One buffer serves all layers, one after the other, so the next layer's tokens are gathered only when this layer's
attention and its admissions to the cache have read it (O3 and O4). Row b of a batch owns slots b·S to (b + 1)·S - 1,
the same ones for all its heads, whose lengths differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcm.gpu_tier.errors import ConfigError, StateError
from kvcm.gpu_tier.geometry import KVGeometry
from kvcm.gpu_tier.kernels.operands import RowPool
from kvcm.gpu_tier.kernels.token_runs import SteadyPlan
from kvcm.gpu_tier.manager.residency import BlockPolicy, SparseBuffers
from kvcm.gpu_tier.manager.wave_store import WaveStore
from kvcm.gpu_tier.pools.device_pool import DeviceKVPool
from kvcm.gpu_tier.runtime import DeviceRuntime, upload
from kvcm.gpu_tier.types import ForwardBatch, LayerKV, Source, SteadyRing, SteadyZone

__all__ = ["BlockResidency", "ExecutionBuffer", "SteadyPlanner", "SteadyRuns"]


class ExecutionBuffer:
    """The tokens that each row and head attends to in one layer.

    Args:
        geometry: of the model's KV.
        rows: most requests of a batch.
        tokens_per_row: most tokens that a head attends to; rounded up to whole pages.
        runtime: of the device.

    Attributes:
        rows: most requests of a batch.
        tokens_per_row: slots S of a row.
        pool: the pool of one layer that they lie in.
    """

    def __init__(self, geometry: KVGeometry, rows: int, tokens_per_row: int, runtime: DeviceRuntime) -> None:
        if rows < 1 or tokens_per_row < 1:
            raise ConfigError("rows, tokens_per_row", (rows, tokens_per_row), "must be at least 1")
        pages = -(-tokens_per_row // geometry.page_size)
        self.rows = rows
        self.tokens_per_row = pages * geometry.page_size
        self.pool = DeviceKVPool(replace(geometry, num_layers=1), rows * pages, runtime)
        slots = torch.arange(rows * self.tokens_per_row, dtype=torch.int32, device=runtime.device)
        self._table = slots.view(rows, 1, -1).expand(-1, geometry.num_kv_heads, -1)
        self._padded: dict[int, Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return self.pool.nbytes

    @property
    def table(self) -> Tensor:
        """Slots of every row and head, ``int32 [rows, H, S]``."""
        return self._table

    def table_of(self, rows: int) -> Tensor:
        """Return the slots of a batch of so many rows, ``int32 [B, H, S]``; rows beyond the buffer's are padding."""
        if rows <= self.rows:
            return self._table[:rows]
        if rows not in self._padded:
            padding = self._table[:1].new_full((rows - self.rows, *self._table.shape[1:]), -1)
            self._padded[rows] = torch.cat([self._table, padding])
        return self._padded[rows]

    def source(self) -> RowPool:
        """Return the buffer as a copy kernel sees it: its target, and the source of admissions to a cache."""
        return RowPool(self.pool.data, self.pool.addressing, 0)

    def layer_kv(self) -> LayerKV:
        """Return the rows that attention reads."""
        return self.pool.layer(self.pool.geometry.start_layer)


# Where the steady tokens of requests lie, as runs of consecutive slots of the arena.


@dataclass(frozen=True, slots=True)
class SteadyRuns:
    """The steady tokens of one request, ascending; they are the first of its execution row.

    Attributes:
        src: ``int64 [U]`` slot in the arena of each run's first token.
        first: ``int64 [U]`` place of that token in the execution row.
        tokens: ``int64 [U]`` tokens of the run.
        total: tokens of all runs.
    """

    src: NDArray[np.int64]
    first: NDArray[np.int64]
    tokens: NDArray[np.int64]
    total: int


@dataclass(frozen=True, slots=True)
class _Places:
    """A request's places; `breaks` are those whose slot does not follow that of the place before."""

    ring: SteadyRing
    slots: NDArray[np.int64]
    breaks: NDArray[np.int64]


class SteadyPlanner:
    """Where the steady tokens of requests lie, and the runs of a batch with which every plan begins.

    A request's steady tokens are in the first places of its buffer (see `SteadyRing`). The buffer is whole pages of the
    arena, so neighbouring places have neighbouring slots but for where a page ends. The steady tokens follow from the
    lengths of requests and are the same in all layers and heads: their runs are computed on the host as ranges, and are
    uploaded once a step.

    Args:
        tokens_per_row: slots of a row of the execution buffer.
        runtime: of the device.
    """

    def __init__(self, tokens_per_row: int, runtime: DeviceRuntime) -> None:
        self._of: dict[int, _Places] = {}
        self._tokens_per_row = tokens_per_row
        self._device = runtime.device
        self._last: tuple[object, SteadyPlan] | None = None

    def admit(self, request: int, ring: SteadyRing, buffer_slots: Tensor) -> None:
        """Take note of a request's places, or of those of its grown buffer.

        Args:
            request: row of the per-request tables.
            ring: which place each steady token has.
            buffer_slots: ``int [at least ring.capacity]`` device slot of each place, on the host.

        Raises:
            ConfigError: there are too few places.
        """
        if len(buffer_slots) < ring.capacity:
            raise ConfigError("buffer_slots", len(buffer_slots), f"must be the {ring.capacity} steady places and more")
        slots = buffer_slots[: ring.capacity].numpy().astype(np.int64)
        self._last = None
        self._of[request] = _Places(ring, slots, np.flatnonzero(np.diff(slots) != 1) + 1)

    def release(self, request: int) -> None:
        """Forget a request; one that is not known too."""
        self._last = None
        self._of.pop(request, None)

    def __contains__(self, request: int) -> bool:
        return request in self._of

    def runs(self, request: int, first: int, n_tokens: int) -> SteadyRuns:
        """Return the runs of the sink and of tokens `first` to `n_tokens - 1`.

        Raises:
            StateError: more tokens are steady than have places.
        """
        places = self._of[request]
        starts, stops = _split(_intervals(places.ring, first, n_tokens), places.breaks)
        tokens = stops - starts
        ends = np.cumsum(tokens)
        return SteadyRuns(places.slots[starts], ends - tokens, tokens, int(ends[-1]) if len(ends) else 0)

    def plan(self, batch: ForwardBatch, zone: SteadyZone) -> SteadyPlan:
        """Return the steady runs of a batch, none of rows that do not select or have no places.

        Raises:
            StateError: more tokens of a request are steady than have places.
        """
        key = (batch.requests, batch.lengths, batch.rows, zone.firsts)
        if self._last is None or self._last[0] != key:
            self._last = key, self._packed(batch, zone.firsts)
        return self._last[1]

    def _packed(self, batch: ForwardBatch, firsts: tuple[int, ...]) -> SteadyPlan:
        runs: dict[int, SteadyRuns] = {}
        for row, (request, first, length) in enumerate(zip(batch.requests, firsts, batch.lengths, strict=True)):
            if self._may_select(request, first, length):
                runs[row] = self.runs(request, first, length)
        width = max((len(run.src) for run in runs.values()), default=0)
        begin = np.arange(batch.rows) * self._tokens_per_row
        kind_dst_tokens = np.zeros((3, batch.rows, width), np.int32)
        kind_dst_tokens[0] = -1
        src = np.zeros((batch.rows, width), np.int64)
        total = np.zeros(batch.rows, np.int64)
        for row, run in runs.items():
            used = slice(len(run.src))
            kind_dst_tokens[0, row, used] = int(Source.STEADY)
            kind_dst_tokens[1, row, used] = begin[row] + run.first
            kind_dst_tokens[2, row, used] = run.tokens
            src[row, used] = run.src
            total[row] = run.total
        kind, dst, tokens = self._upload(kind_dst_tokens)
        end, total_of_row = self._upload(np.stack([begin + total, total]).astype(np.int32))
        return SteadyPlan(kind=kind, src=self._upload(src), dst=dst, tokens=tokens, end=end, total=total_of_row)

    def _may_select(self, request: int, first: int, length: int) -> bool:
        # Of rows that do not select, most have 0 for their first token. It is also that of a request without a sink
        # all of whose tokens are steady: all of them have places then, and a row that is masked out reads none.
        return request in self._of and (first > 0 or length <= self._of[request].ring.ring)

    def _upload(self, numbers: NDArray[np.int32] | NDArray[np.int64]) -> Tensor:
        return upload(torch.from_numpy(numbers), self._device)


def _intervals(ring: SteadyRing, first: int, n_tokens: int) -> list[tuple[int, int]]:
    """Return the intervals of places that hold the steady tokens, in the order of the tokens."""
    first = max(first, ring.sink)
    in_ring = max(0, n_tokens - first)
    if in_ring > ring.ring:
        raise StateError(f"{in_ring} recent tokens are steady, and there are {ring.ring} places for them")
    start = ring.position(first)
    before_the_end = min(in_ring, ring.capacity - start)
    intervals = [
        (0, min(ring.sink, n_tokens)),
        (start, start + before_the_end),
        (ring.sink, ring.sink + in_ring - before_the_end),
    ]
    return [(lower, upper) for lower, upper in intervals if lower < upper]


def _split(intervals: list[tuple[int, int]], breaks: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return first places and places behind the last of the runs that breaks split intervals into."""
    starts, stops = [], []
    for lower, upper in intervals:
        inside = breaks[np.searchsorted(breaks, lower, "right") : np.searchsorted(breaks, upper, "left")]
        starts.append(np.concatenate([[lower], inside]))
        stops.append(np.concatenate([inside, [upper]]))
    if not starts:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    return np.concatenate(starts).astype(np.int64), np.concatenate(stops).astype(np.int64)


# Residency `blocks`: what a request holds on the device, and how a layer's execution buffer is put together.


@dataclass(frozen=True, slots=True)
class _Buffer:
    """The buffer that the policy knows of a request: its ring, and the places of its cache."""

    ring: SteadyRing
    cache: int


class BlockResidency:
    """The buffers of requests, and the policy that decides their content.

    A request's buffer in the arena has places for its steady tokens, and behind them those of its block cache. A steady
    token has a fixed place as long as it is steady, so that the engine writes a new token where it stays; the token
    that was there before has been clustered, or has its host copy, by then.

    Args:
        policy: decides which blocks are cached.
        execution: what a layer attends to.
        store: where the policy keeps clusters on the host; None when the host pool has all.
    """

    def __init__(self, policy: BlockPolicy, execution: ExecutionBuffer, store: WaveStore | None = None) -> None:
        self.policy = policy
        self.execution = execution
        self.store = store
        self._buffers: dict[int, _Buffer] = {}

    def capacity(self, ring: SteadyRing, n_tokens: int) -> int:
        """Return the places of the buffer of a request of so many tokens."""
        return ring.capacity + self.policy.cache_slots(n_tokens)

    def admit(self, request: int, ring: SteadyRing, n_tokens: int, buffers: SparseBuffers) -> None:
        """Let the policy know of a request's buffer, whose pages are held.

        Raises:
            PoolExhaustedError: there are too few pages; then nothing changed.
        """
        buffers.cover(request, self.capacity(ring, n_tokens))
        self._admit(request, _Buffer(ring, self.policy.cache_slots(n_tokens)), buffers)

    def grow(self, request: int, n_tokens: int, buffers: SparseBuffers) -> None:
        """Let the cache of a request grow with its tokens.

        Raises:
            PoolExhaustedError: there are too few pages; then nothing changed.
        """
        known, cache = self._buffers[request], self.policy.cache_slots(n_tokens)
        if cache > known.cache:
            buffers.cover(request, known.ring.capacity + cache)
            self._admit(request, _Buffer(known.ring, cache), buffers)

    def _admit(self, request: int, buffer: _Buffer, buffers: SparseBuffers) -> None:
        places = buffers.buffer(request).items[: buffer.ring.capacity + buffer.cache]
        self.policy.admit(request, buffer.ring, places)
        self._buffers[request] = buffer

    def ring(self, request: int) -> SteadyRing:
        """Return the steady places of a request that has a buffer."""
        return self._buffers[request].ring

    def shortest_ring(self, requests: Sequence[int]) -> int:
        """Return the fewest steps after which a request's newest token may lose its place; of those with a buffer."""
        rings = [self._buffers[request].ring.ring for request in requests if request in self._buffers]
        return min(rings, default=1 << 30)

    def overwritten(self, request: int, token: int) -> int:
        """Return the token whose place a token takes, -1 when that was free or is the token's for good."""
        ring = self._buffers[request].ring
        return token - ring.ring if token - ring.ring >= ring.sink else -1

    def steady_spans(self, request: int, n_tokens: int) -> list[range]:
        """Return the tokens that have a place when a request has so many."""
        ring = self._buffers[request].ring
        sink = min(ring.sink, n_tokens)
        return [span for span in (range(sink), range(max(sink, n_tokens - ring.ring), n_tokens)) if span]

    def places(self, request: int, tokens: range, buffers: SparseBuffers) -> Tensor:
        """Return the device slots of steady tokens, ``int32 [n]``, on the host."""
        ring, slots = self._buffers[request].ring, buffers.buffer(request).items
        return slots[torch.tensor([ring.position(token) for token in tokens], dtype=torch.int64)]

    def sources(self, layer_id: int, arena: RowPool) -> tuple[RowPool, RowPool, RowPool]:
        """Return what the runs of a plan name by `Source`; steady places and the cache both lie in the arena."""
        return arena, arena, self.policy.host_source(layer_id)

    def release(self, request: int) -> None:
        """Forget a request; one that is not known too."""
        self._buffers.pop(request, None)
        self.policy.release(request)
