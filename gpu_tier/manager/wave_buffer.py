"""RetroInfer's wave buffer: clusters in host memory, some of them cached on the device, put together in every step.

Three places and their writers: the steady ring of a request (the engine, token by token), the block cache behind it
in the request's buffer of the arena (`commit`), and the blocks of the `WaveStore` in pinned host memory (`store`).

A step and layer:
1. `announce` begins to copy the ids of the selected clusters to the host, beside the estimation.
2. `resolve` waits for these ids only, looks every cluster up (read only) and uploads the runs of the execution buffer.
   Then it asks for the update: which clusters the cache takes in and gives up. That is decided on threads of its own,
   beside attention; with `async_update=False` before `resolve` returns.
3. `commit`, after attention was issued, waits for the decision and copies the admitted clusters out of the execution
   buffer into their places. The layer's next step finds them there by the order of the stream.

Invariants:
1. Order and bytes of the execution buffer depend on the selection alone.
2. A cluster is cached whole or not at all; one larger than the cache never. Every block that the table calls cached
   equals its bytes on the host when the layer's next plan is fetched.
3. What a step uses is not given up in that step.
4. The table of a layer is not read or changed while its update is being decided: all readers wait for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvcm.gpu_tier.config import RetroInferConfig
from kvcm.gpu_tier.errors import ConfigError, StateError
from kvcm.gpu_tier.geometry import KVGeometry
from kvcm.gpu_tier.index.wave_index import WaveSegment
from kvcm.gpu_tier.kernels.gather_copy import gather_copy
from kvcm.gpu_tier.kernels.operands import RowPool
from kvcm.gpu_tier.manager import wave_control
from kvcm.gpu_tier.manager.execution_buffer import ExecutionBuffer
from kvcm.gpu_tier.manager.wave_control import Change, Changes, Control, Lines, Plan, Stat
from kvcm.gpu_tier.manager.wave_control.tables import LayerTables, Places
from kvcm.gpu_tier.manager.wave_store import RawRows, WaveFill, WaveStore
from kvcm.gpu_tier.pools.device_pool import DeviceKVPool
from kvcm.gpu_tier.runtime import DeviceRuntime, Event, upload
from kvcm.gpu_tier.types import (
    CopyRuns,
    ExecutionPlan,
    ForwardBatch,
    ResidencyPlan,
    Selection,
    Source,
    SteadyRing,
    Unit,
)

__all__ = ["Plans", "RawRows", "WaveBuffer", "WaveCounters"]

# What the wave buffer counts, on the host: its control knows everything.


@dataclass(frozen=True, slots=True)
class WaveCounters:
    """What happened so far, over all layers, rows and heads.

    Attributes:
        clusters: selected clusters that are not empty.
        cluster_hits: those that were cached.
        blocks: their blocks.
        block_hits: those that were cached.
        tokens: their tokens.
        token_hits: those that were cached.
        host_bytes: bytes read from host memory, exactly.
        admissions: clusters taken into the cache.
        evictions: clusters given up.
    """

    clusters: int
    cluster_hits: int
    blocks: int
    block_hits: int
    tokens: int
    token_hits: int
    host_bytes: int
    admissions: int
    evictions: int

    @property
    def hit_rate(self) -> float:
        """Cached tokens per selected token; 1 when nothing was selected."""
        return self.token_hits / self.tokens if self.tokens else 1.0


class _WaveTotals:
    """Adds up what lookups and updates say of their lines.

    Args:
        token_bytes: bytes of a token of one head, all parts.
    """

    def __init__(self, token_bytes: int) -> None:
        self._token_bytes = token_bytes
        self._looked_up = np.zeros(len(Stat), np.int64)
        self._changed = np.zeros(len(Change), np.int64)

    def count_lookup(self, stats: npt.NDArray[np.int64]) -> None:
        """Add a lookup, ``int64 [B·H, Stat]``."""
        self._looked_up += stats.sum(0)

    def count_update(self, counts: npt.NDArray[np.int64]) -> None:
        """Add an update, ``int64 [B·H, Change]``."""
        self._changed += counts.sum(0)

    def read(self) -> WaveCounters:
        """Return the differences."""
        clusters, cluster_hits, blocks, block_hits, tokens, token_hits = (
            int(number) for number in self._looked_up[Stat.CLUSTERS : Stat.BAD]
        )
        return WaveCounters(
            clusters=clusters,
            cluster_hits=cluster_hits,
            blocks=blocks,
            block_hits=block_hits,
            tokens=tokens,
            token_hits=token_hits,
            host_bytes=(tokens - token_hits) * self._token_bytes,
            admissions=int(self._changed[Change.ADMISSIONS]),
            evictions=int(self._changed[Change.EVICTIONS]),
        )


# The ids of selected clusters on their way to the host, which looks them up there.


@dataclass(frozen=True, slots=True)
class _Copy:
    selection: Selection
    numbers: Tensor
    done: Event


class _SelectedIds:
    """Copies selections to the host beside what else the device computes."""

    def __init__(self, runtime: DeviceRuntime) -> None:
        self._runtime = runtime
        self._copy: _Copy | None = None

    def fetch(self, selection: Selection) -> None:
        """Begin to copy a selection; one that was not asked for is forgotten."""
        runtime = self._runtime
        # One piece, so that one copy brings ids and lengths. It is new memory: the selection may be overwritten.
        numbers = torch.cat([selection.indices.flatten(), selection.lengths.flatten()])
        runtime.fence(runtime.record("compute"), "upd")
        with runtime.stream("upd"):
            on_host = runtime.staging(numbers.nbytes).view(torch.int32)
            on_host.copy_(numbers, non_blocking=True)
            runtime.used(numbers)
        self._copy = _Copy(selection, on_host, runtime.record("upd"))

    def wait(self, selection: Selection) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Return a selection's ids ``int32 [B, H, K]`` and lengths ``int32 [B, H]`` when they have arrived."""
        if self._copy is None or self._copy.selection is not selection:
            self.fetch(selection)
        assert self._copy is not None
        copied, self._copy = self._copy, None
        copied.done.wait()
        ids = selection.indices.numel()
        numbers = copied.numbers.numpy()
        return numbers[:ids].reshape(selection.indices.shape), numbers[ids:].reshape(selection.lengths.shape)


# Host memory in which the control writes plans, and the way of the plans to the device: one copy each.

_FEWEST_RUNS = 64
_RUN_BYTES = 20  # src, kind, dst, tokens
_COPY_BYTES = 16  # src, dst, tokens


class Plans:
    """Makes plans of what the control finds.

    Args:
        runtime: of the device.
    """

    def __init__(self, runtime: DeviceRuntime) -> None:
        self._runtime = runtime
        self._run_capacity = _FEWEST_RUNS  # runs of a line: as many as were needed so far, and some more

    def lookup(self, control: Control, lines: Lines) -> tuple[ExecutionPlan, npt.NDArray[np.int64]]:
        """Return how the execution buffer is put together, and the statistics of each line, by `Stat`."""
        packed, plan = self._packed(lines.count)
        control.lookup(lines, plan)
        needed = int(plan.stats[:, Stat.RUNS].max(initial=0))
        if needed > self._run_capacity:
            self._run_capacity = needed + needed // 4
            packed, plan = self._packed(lines.count)
            control.lookup(lines, plan)
        return self._uploaded(packed, lines), plan.stats

    def _packed(self, lines: int) -> tuple[Tensor, Plan]:
        runs = lines * self._run_capacity
        packed = self._runtime.staging(_RUN_BYTES * runs + 8 * lines)
        src, rest = packed[: 8 * runs].view(torch.int64), packed[8 * runs :].view(torch.int32)
        arrays = rest.split([runs, runs, runs, lines, lines])
        kind, dst, tokens = (array.view(lines, -1).numpy() for array in arrays[:3])
        stats = np.zeros((lines, len(Stat)), np.int64)
        return packed, Plan(
            src=src.view(lines, -1).numpy(),
            kind=kind,
            dst=dst,
            tokens=tokens,
            count=arrays[3].numpy(),
            lens=arrays[4].numpy(),
            stats=stats,
        )

    def _uploaded(self, packed: Tensor, lines: Lines) -> ExecutionPlan:
        count, runs = lines.count, lines.count * self._run_capacity
        device = upload(packed, self._runtime.device)
        src = device[: 8 * runs].view(torch.int64).view(count, -1)
        kind, dst, tokens, number, lens = device[8 * runs :].view(torch.int32).split([runs, runs, runs, count, count])
        shaped = CopyRuns(
            kind=kind.view(count, -1), src=src, dst=dst.view(count, -1), tokens=tokens.view(count, -1), count=number
        )
        return ExecutionPlan(shaped, lens.view(lines.lengths.shape))

    def copies(self, changes: Changes) -> CopyRuns | None:
        """Return the copies from the execution buffer into the cache, None when there are none."""
        counts = changes.counts[:, Change.COPIES]
        lines, most = len(counts), int(counts.max(initial=0))
        if not most:
            return None
        runs = lines * most
        packed = self._runtime.staging(_COPY_BYTES * runs + 4 * lines)
        packed[: 8 * runs].view(torch.int64).view(lines, most).numpy()[:] = changes.src[:, :most]
        rest = packed[8 * runs :].view(torch.int32)
        rest[:runs].view(lines, most).numpy()[:] = changes.dst[:, :most]
        rest[runs : 2 * runs].view(lines, most).numpy()[:] = changes.tokens[:, :most]
        rest[2 * runs :].numpy()[:] = counts
        device = upload(packed, self._runtime.device)
        src = device[: 8 * runs].view(torch.int64).view(lines, most)
        dst, tokens, count = device[8 * runs :].view(torch.int32).split([runs, runs, lines])
        kind = torch.full((lines, most), int(Source.STEADY), dtype=torch.int32, device=device.device)
        return CopyRuns(kind=kind, src=src, dst=dst.view(lines, most), tokens=tokens.view(lines, most), count=count)


@dataclass(frozen=True, slots=True)
class _Update:
    """A pending decision: the selection, the memory of the answer, and the work that waits for it."""

    lines: Lines
    changes: Changes
    wait: Callable[[], None]


class WaveBuffer:
    """See `kvcm.gpu_tier.manager.residency.BlockPolicy` and `kvcm.gpu_tier.index.wave_index.SegmentSink`.

    Args:
        geometry: of the model's KV.
        settings: of RetroInfer.
        store: where the clusters' KV is; owned by the buffer from now on.
        arena: the pool of the requests' buffers.
        execution: what plans are put together in.
        rows: reader of the KV that `store` takes over.
        runtime: of the device.
        max_requests: rows of the per-request tables.
        kernels: which implementation of the kernels.
        control: which implementation of the control: native (C++), reference (Python) or auto (native if it can be
            built).

    Raises:
        ConfigError: there is no such control.
        KernelUnavailableError: control is native, and it cannot be built.
    """

    def __init__(
        self, geometry: KVGeometry, settings: RetroInferConfig, store: WaveStore, arena: DeviceKVPool,
        execution: ExecutionBuffer, rows: RawRows, runtime: DeviceRuntime, *, max_requests: int,
        kernels: str = "auto", control: str = "auto",
    ) -> None:  # fmt: skip
        self._geometry = geometry
        self._settings = settings
        self._store = store
        self._arena = arena
        self._execution = execution
        self._runtime = runtime
        self._kernels = kernels
        self._fill = WaveFill(store, rows, runtime, kernels)
        self._control = wave_control.make(settings, control)
        heads, layers = geometry.num_kv_heads, geometry.num_layers
        self._tables = [LayerTables(max_requests, heads, store.block_tokens) for _ in range(layers)]
        self._ids = _SelectedIds(runtime)
        self._plans = Plans(runtime)
        self._totals = _WaveTotals(sum(part.row_bytes for part in geometry.parts))
        self._places: dict[int, Places] = {}
        self._announced: Event | None = None
        self._updates: dict[int, _Update] = {}  # by the position of the layer

    plans_on_host = True

    # Lifetime of a request.

    def hold(self, request: int, n_tokens: int) -> None:
        """See `BlockPolicy`."""
        self._store.hold(request, n_tokens)

    def cache_slots(self, n_tokens: int) -> int:
        """See `BlockPolicy`: whole blocks in `cache_ratio` of the tokens."""
        block = self._store.block_tokens
        return int(self._settings.cache_ratio * n_tokens) // block * block

    def admit(self, request: int, ring: SteadyRing, buffer_slots: Tensor) -> None:
        """See `BlockPolicy`.

        Raises:
            StateError: the buffer is smaller than it was, or its ring another one.
        """
        old, new = self._places.get(request), Places.of(ring, buffer_slots, self._store.block_tokens)
        if old is not None and (old.ring != ring or len(new.slots) < len(old.slots)):
            text = f"{len(old.slots)} places with {old.ring} cannot become {len(new.slots)} with {ring}"
            raise StateError(f"the buffer of request {request} only grows: {text}")
        self._wait_for_all()
        self._places[request] = new
        for tables in self._tables:
            tables.admit(request, new)

    def release(self, request: int) -> None:
        """See `BlockPolicy`."""
        self._wait_for_all()
        for update in self._updates.values():
            update.changes.forget(np.flatnonzero(update.lines.requests == request), self._geometry.num_kv_heads)
        for tables in self._tables:
            tables.release(request)
        self._places.pop(request, None)
        self._store.release(request)

    def store(self, layer_id: int, request: int, segment: WaveSegment) -> None:
        """See `SegmentSink`. Waits for the sizes of the clusters: once per segment.

        Raises:
            PoolExhaustedError: the store is full; nothing changed.
            StateError: the segment is not the next one.
        """
        layer = self._geometry.layer_index(layer_id)
        tables = self._tables[layer]
        known = tables.table(request).num_clusters
        sizes, blocks = self._fill.take_over(layer_id, request, segment, known)
        self._wait_for(layer)
        tables.append(request, sizes, blocks)

    # A step of one layer.

    def announce(self, layer_id: int, batch: ForwardBatch, selection: Selection) -> None:
        """See `BlockPolicy`."""
        self._announced = self._runtime.record("compute")
        self._ids.fetch(selection)

    def resolve(self, layer_id: int, batch: ForwardBatch, selection: Selection, sparse_mask: Tensor) -> ResidencyPlan:
        """See `BlockPolicy`.

        Raises:
            ConfigError: the selection is not of clusters beside a steady zone.
            StateError: a row has no buffer, or selects an unknown cluster, or more than fits.
        """
        if selection.steady is None or selection.unit is not Unit.CLUSTER:
            raise ConfigError("selection", (selection.unit, selection.steady), "clusters beside a steady zone")
        layer = self._geometry.layer_index(layer_id)
        self._control.wake()
        lines = self._lines(layer, batch, selection)
        self._abandon(layer)
        plan, stats = self._plan(lines, sparse_mask)
        self._check(layer_id, lines, stats)
        self._totals.count_lookup(stats)
        self._begin_update(layer, lines, stats)
        return ResidencyPlan(device_slot=self._execution.table_of(batch.rows), execution=plan)

    def _plan(self, lines: Lines, sparse_mask: Tensor) -> tuple[ExecutionPlan, np.ndarray]:
        """Return the copies, made on the stream of the copies: it waits for nothing that was asked since."""
        runtime = self._runtime
        runtime.fence(self._announced or runtime.record("compute"), "h2d")
        self._announced = None
        with runtime.stream("h2d"):
            plan, stats = self._plans.lookup(self._control, lines)
            # The host does not know which rows with a buffer are left out of this step; the device does.
            count = torch.where(sparse_mask.repeat_interleave(self._geometry.num_kv_heads), plan.runs.count, 0)
            lens = torch.where(sparse_mask[:, None], plan.lens, 0)
            runtime.used(sparse_mask)
        runtime.used(lens)  # by attention
        return ExecutionPlan(replace(plan.runs, count=count), lens), stats

    def _lines(self, layer: int, batch: ForwardBatch, selection: Selection) -> Lines:
        assert selection.steady is not None
        ids, lengths = self._ids.wait(selection)
        rows = np.zeros((3, batch.rows), np.int32)
        rows[2] = -1
        for row, request in enumerate(batch.requests):
            if request in self._places:
                rows[:, row] = request, batch.lengths[row], selection.steady.firsts[row]
        if lengths[rows[2] < 0].any():
            raise StateError(f"one of the requests {list(batch.requests)} selects and has no buffer")
        return Lines(
            tables=self._tables[layer],
            requests=rows[0],
            ids=ids,
            lengths=lengths,
            tokens=rows[1],
            first=rows[2],
            row_slots=self._execution.tokens_per_row,
        )

    def _check(self, layer_id: int, lines: Lines, stats: np.ndarray) -> None:
        # A row that does not select may have any first token; its lines stay empty.
        bad = np.where(lines.lengths.flatten() > 0, stats[:, wave_control.Stat.BAD], 0)
        if bad.any():
            row = int(bad.argmax()) // self._geometry.num_kv_heads
            text = "selects a cluster that is not known" if bad.max() == 1 else "has more steady tokens than its ring"
            raise StateError(f"request {lines.requests[row]} {text}, in layer {layer_id}")
        longest = int(stats[:, wave_control.Stat.TOKENS].max(initial=0))
        if longest > lines.row_slots:
            raise StateError(f"{longest} tokens are attended to, the execution buffer has {lines.row_slots} of a row")

    def _begin_update(self, layer: int, lines: Lines, stats: np.ndarray) -> None:
        requests = lines.requests[lines.first >= 0].tolist()
        capacity = max((self._places[request].capacity(self._store.block_tokens) for request in requests), default=0)
        if not capacity:
            return
        missing = stats[:, wave_control.Stat.BLOCKS] - stats[:, wave_control.Stat.BLOCK_HITS]
        pieces = max(self._places[request].pieces for request in requests)
        changes = Changes.of(lines.count, min(int(missing.max()), capacity) * pieces)
        self._updates[layer] = _Update(lines, changes, self._control.begin_update(lines, changes))
        if not self._settings.async_update:
            self._wait_for(layer)

    def _wait_for(self, layer: int) -> None:
        if layer in self._updates:
            self._updates[layer].wait()

    def _wait_for_all(self) -> None:
        for layer in self._updates:
            self._wait_for(layer)

    def _abandon(self, layer: int) -> None:
        """Forget what a step cached that ended before its `commit`: it was decided, but never copied."""
        update = self._updates.pop(layer, None)
        if update is not None:
            update.wait()
            for request in update.lines.requests[update.lines.first >= 0].tolist():
                update.lines.tables.table(request).empty_cache()

    def commit(self, layer_id: int, plan: ResidencyPlan) -> None:
        """See `BlockPolicy`."""
        layer = self._geometry.layer_index(layer_id)
        update = self._updates.pop(layer, None)
        if update is None:
            return
        update.wait()
        self._totals.count_update(update.changes.counts)
        runs = self._plans.copies(update.changes)
        if runs is not None:
            target = RowPool(self._arena.data, self._arena.addressing, layer)
            heads = self._geometry.num_kv_heads
            gather_copy((self._execution.source(),), target, runs, num_heads=heads, impl=self._kernels)

    # What others ask.

    def host_source(self, layer_id: int) -> RowPool:
        """See `BlockPolicy`."""
        return self._store.source()

    @property
    def host_bytes(self) -> int:
        """See `BlockPolicy`."""
        return self._store.nbytes

    @property
    def counters(self) -> WaveCounters:
        """What happened so far."""
        return self._totals.read()

    def close(self) -> None:
        """End the threads and give the host memory back; the device must be done with it."""
        self._wait_for_all()
        self._control.close()
        self._store.close()
