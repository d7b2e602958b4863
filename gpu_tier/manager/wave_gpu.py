"""The wave buffer without the CPU: blocks of clusters are looked up and given up by the LRU diff, on the device.

What `kvcm.gpu_tier.manager.wave_buffer` does, with three differences. Selected clusters are expanded to their blocks
on the device, and the unit of the cache is the block, not the cluster; the last used are kept (`lru_diff` with one
item per block). Everything that is selected is in the cache after the step, so the cache holds at least the widest
selection. Nothing waits for the device, in no step; only a segment's sizes are read when it is stored.

A step and layer: `resolve` finds the blocks' places; those that were cached are read there, and the others on the host.
`commit`, after attention, copies the latter out of the execution buffer into their places.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcm.gpu_tier.config import RetroInferConfig
from kvcm.gpu_tier.errors import ConfigError, StateError
from kvcm.gpu_tier.geometry import KVGeometry
from kvcm.gpu_tier.index.wave_index import WaveSegment
from kvcm.gpu_tier.kernels.block_runs import BlockPlaces, BlockPlan, block_runs
from kvcm.gpu_tier.kernels.cluster_expand import ClusterPages, SelectedBlocks, cluster_expand
from kvcm.gpu_tier.kernels.gather_copy import gather_copy
from kvcm.gpu_tier.kernels.operands import RowPool
from kvcm.gpu_tier.manager.execution_buffer import ExecutionBuffer, SteadyPlanner
from kvcm.gpu_tier.manager.residency import LruDiffPolicy
from kvcm.gpu_tier.manager.wave_store import RawRows, WaveFill, WaveStore
from kvcm.gpu_tier.pools.device_pool import DeviceKVPool
from kvcm.gpu_tier.pools.representation import RepresentationPool
from kvcm.gpu_tier.runtime import DeviceRuntime, upload
from kvcm.gpu_tier.types import CopyRuns, ExecutionPlan, ForwardBatch, ResidencyPlan, Selection, SteadyRing, Unit

__all__ = ["WaveGpuBuffer", "WaveGpuCounters"]

# The cluster mapping table on the device: which blocks each cluster of a request consists of, and where on the host.

_PAGE_TOKENS = 1024
_ODD_CLUSTERS = 4  # more than the average says, of segments that end with a prompt or its prefix
_ID_BYTES = 4


class _ClusterBlocks:
    """The tables of all layers and requests.

    The blocks of a request, layer and head are numbered through, cluster after cluster, so a cluster is a first block
    and a number of tokens. Both lie in pages of the request, and so does the place of every block in the `WaveStore`:
    from there a kernel expands selected clusters to their blocks (`kvcm.gpu_tier.kernels.cluster_expand`).

    Args:
        block_tokens: tokens of a block.
        tokens_per_centroid: tokens of a cluster on average; some segments have a cluster more.
        max_requests: rows of the per-request tables.
        max_tokens: most tokens of a request.
        total_tokens: most tokens of all requests together.

    Attributes:
        most_blocks: more blocks no head of a request has.
    """

    def __init__(
        self, geometry: KVGeometry, *, block_tokens: int, tokens_per_centroid: int, max_requests: int, max_tokens: int,
        total_tokens: int, runtime: DeviceRuntime,
    ) -> None:  # fmt: skip
        self._geometry, self._device, self._block_tokens = geometry, runtime.device, block_tokens
        heads = geometry.num_kv_heads
        self._page_clusters = -(-_PAGE_TOKENS // tokens_per_centroid) + _ODD_CLUSTERS
        self._page_blocks = -(-(_PAGE_TOKENS + self._page_clusters * (block_tokens - 1)) // block_tokens)
        self.pool = RepresentationPool(
            num_layers=geometry.num_layers, page_tokens=_PAGE_TOKENS,
            page_bytes=_ID_BYTES * heads * (2 * self._page_clusters + self._page_blocks), max_requests=max_requests,
            max_tokens=max_tokens, total_tokens=(-(-total_tokens // _PAGE_TOKENS) + max_requests) * _PAGE_TOKENS,
            device=runtime.device,
        )  # fmt: skip
        self.most_blocks = self.pool.table.shape[1] * self._page_blocks
        self._layers = [self._views(layer) for layer in range(geometry.num_layers)]
        self._known: dict[tuple[int, int], tuple[int, NDArray[np.int64]]] = {}  # clusters, and blocks of each head

    def _views(self, layer: int) -> ClusterPages:
        heads = self._geometry.num_kv_heads
        widths = (self._page_clusters, self._page_clusters, self._page_blocks)
        ids = self.pool.layer(layer).view(torch.int32)
        firsts, sizes, hosts = (
            part.unflatten(1, (heads, -1)) for part in ids.split([heads * width for width in widths], dim=1)
        )
        return ClusterPages(
            table=self.pool.table, firsts=firsts, sizes=sizes, hosts=hosts, block_tokens=self._block_tokens
        )

    def reserve(self, request: int, n_tokens: int) -> None:
        """Allocate the tables of a request of so many tokens.

        Raises:
            PoolExhaustedError: there is none; what the request had stays.
        """
        self.pool.reserve(request, n_tokens)

    def release(self, request: int) -> None:
        """Forget a request; one that is not known too."""
        self.pool.free(request)
        for layer in range(self._geometry.num_layers):
            self._known.pop((layer, request), None)

    def clusters(self, layer: int, request: int) -> int:
        """Return the clusters of a request that are known in the layer at a position."""
        return self._known.get((layer, request), (0, np.zeros(0)))[0]

    def append(self, layer: int, request: int, sizes: NDArray[np.int32], hosts: NDArray[np.int32]) -> None:
        """Add the clusters of a segment.

        Args:
            layer: position of the layer.
            request: row of the per-request tables.
            sizes: ``int32 [H, m]`` tokens of each.
            hosts: their blocks of the store: head after head, in each cluster after cluster.

        Raises:
            StateError: so many were not allocated.
        """
        heads, new = sizes.shape
        known, blocks = self._known.get((layer, request), (0, np.zeros(heads, np.int64)))
        counts = -(-sizes // self._block_tokens)
        added = counts.sum(1)
        pages = np.asarray(self.pool.held(request), np.int64)
        if known + new > len(pages) * self._page_clusters or (blocks + added).max() > len(pages) * self._page_blocks:
            raise StateError(f"request {request} holds memory for {len(pages) * _PAGE_TOKENS} tokens of clusters only")
        firsts = blocks[:, None] + counts.cumsum(1) - counts
        clusters = np.broadcast_to(np.arange(known, known + new), (heads, new))
        of_clusters = np.repeat(np.arange(heads), new)
        tables = self._layers[layer]
        self._put(tables.firsts, pages, of_clusters, clusters.ravel(), firsts.ravel())
        self._put(tables.sizes, pages, of_clusters, clusters.ravel(), sizes.ravel())
        numbers = np.concatenate([np.arange(first, first + count) for first, count in zip(blocks, added, strict=True)])
        self._put(tables.hosts, pages, np.repeat(np.arange(heads), added), numbers, hosts)
        self._known[layer, request] = known + new, blocks + added

    def _put(
        self, table: Tensor, pages: NDArray[np.int64], heads: NDArray[np.int64], numbers: NDArray[np.int64],
        values: NDArray[np.int32] | NDArray[np.int64],
    ) -> None:  # fmt: skip
        width = table.shape[2]
        where = np.stack([pages[numbers // width], heads, numbers % width, values])
        page, head, place, value = upload(torch.from_numpy(where), self._device)
        table[page, head, place] = value.int()

    def pages(self, layer: int) -> ClusterPages:
        """Return the pages of the clusters and blocks of the layer at a position."""
        return self._layers[layer]

    @property
    def nbytes(self) -> int:
        """Bytes of the tables."""
        return self.pool.nbytes


@dataclass(frozen=True, slots=True)
class WaveGpuCounters:
    """What happened so far, over all layers, rows and heads.

    Attributes:
        blocks: blocks of selected clusters.
        block_hits: those that were cached.
        tokens: their tokens.
        token_hits: those that were cached.
        admissions: blocks taken into the cache.
        evictions: blocks given up.
    """

    blocks: int
    block_hits: int
    tokens: int
    token_hits: int
    admissions: int
    evictions: int

    @property
    def hit_rate(self) -> float:
        """Cached tokens per selected token; 1 when nothing was selected."""
        return self.token_hits / self.tokens if self.tokens else 1.0


@dataclass(frozen=True, slots=True)
class _Admission:
    """What `commit` copies, and of which requests the cache is wrong until then."""

    runs: CopyRuns
    requests: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Rows:
    """Values that all layers of a step share: which rows select, and the batch as the diff of blocks sees it."""

    batch: ForwardBatch
    mask: Tensor
    active: Tensor
    of_blocks: ForwardBatch


class WaveGpuBuffer:
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
        max_tokens: most tokens of a request.
        total_tokens: most tokens of all requests together.
        max_clusters: most clusters that a head selects in a step.
        kernels: which implementation of the kernels.
        debug_checks: check every step; waits for the device.

    Raises:
        ConfigError: the cache would have more blocks than the LRU diff can number.
    """

    def __init__(
        self, geometry: KVGeometry, settings: RetroInferConfig, store: WaveStore, arena: DeviceKVPool,
        execution: ExecutionBuffer, rows: RawRows, runtime: DeviceRuntime, *, max_requests: int, max_tokens: int,
        total_tokens: int, max_clusters: int, kernels: str = "auto", debug_checks: bool = False,
    ) -> None:  # fmt: skip
        self.geometry = geometry
        self._settings, self._store, self._arena, self._execution = settings, store, arena, execution
        self._runtime, self._kernels, self._debug_checks = runtime, kernels, debug_checks
        self._block = store.block_tokens
        # Tokens whose slots follow each other at every position of a block in the arena.
        self._piece = gcd(self._block, geometry.page_size)
        self._fill = WaveFill(store, rows, runtime, kernels)
        self._tables = _ClusterBlocks(
            geometry, block_tokens=self._block, tokens_per_centroid=settings.tokens_per_centroid,
            max_requests=max_requests, max_tokens=max_tokens, total_tokens=total_tokens, runtime=runtime,
        )  # fmt: skip
        self._steady = SteadyPlanner(execution.tokens_per_row, runtime)
        self._capacity = max(int(settings.cache_ratio * max_tokens) // self._block, self._widest(max_clusters), 1)
        self._lru = self._diff(max_requests)
        self._slots = torch.zeros(max_requests, self._capacity * self._block, dtype=torch.int32, device=runtime.device)
        self._counts = torch.zeros(6, dtype=torch.int64, device=runtime.device)
        self._admissions: dict[int, _Admission] = {}
        self._last_rows: _Rows | None = None

    def _widest(self, clusters: int) -> int:
        """Return the most blocks of so many clusters that fit into a row of the execution buffer."""
        tokens = self._execution.tokens_per_row - self._settings.sink - self._settings.local
        blocks = (max(0, tokens) + clusters * (self._block - 1)) // self._block
        return min(blocks, self._tables.most_blocks)

    def _diff(self, max_requests: int) -> LruDiffPolicy:
        # One item more than there are blocks: the diff takes the last one for the newest, which has rules of its own.
        # It names the host slots of blocks by their numbers, since these differ by layer and head.
        self._items = self._tables.most_blocks + 1
        host_loc = torch.arange(self._items, device=self._runtime.device).repeat(max_requests, 1)
        return LruDiffPolicy(
            self.geometry, capacity=self._capacity, unit_tokens=1, selecting_heads=self.geometry.num_kv_heads,
            max_requests=max_requests, max_items=self._items, host_loc=host_loc, runtime=self._runtime,
            promote_newest=False, kernels=self._kernels, debug_checks=self._debug_checks,
        )  # fmt: skip

    plans_on_host = False

    # Lifetime of a request.

    def hold(self, request: int, n_tokens: int) -> None:
        """See `BlockPolicy`."""
        self._tables.reserve(request, n_tokens)
        self._store.hold(request, n_tokens)

    def cache_slots(self, n_tokens: int) -> int:
        """See `BlockPolicy`: the same for all requests, padded to begin at a multiple of contiguous tokens."""
        return self._capacity * self._block + self._piece - 1

    def admit(self, request: int, ring: SteadyRing, buffer_slots: Tensor) -> None:
        """See `BlockPolicy`."""
        self._steady.admit(request, ring, buffer_slots)
        cache = buffer_slots[ring.capacity :].int()
        first = -int(cache[0]) % self._piece
        self._slots[request] = upload(cache[first:][: self._slots.shape[1]], self._runtime.device)
        self._empty(request)

    def _empty(self, request: int) -> None:
        """Let nothing of a request be cached."""
        places = torch.arange(self._capacity + 2, dtype=torch.int32)  # the last two are the newest's, which is never
        self._lru.release(request)
        self._lru.admit(request, places[:-2], places[-2:], 0)

    def release(self, request: int) -> None:
        """See `BlockPolicy`."""
        self._lru.release(request)
        self._steady.release(request)
        self._tables.release(request)
        self._store.release(request)

    def store(self, layer_id: int, request: int, segment: WaveSegment) -> None:
        """See `SegmentSink`. Waits for the sizes of the clusters: once per segment.

        Raises:
            PoolExhaustedError: the store is full; nothing changed.
            StateError: the segment is not the next one.
        """
        layer = self.geometry.layer_index(layer_id)
        known = self._tables.clusters(layer, request)
        sizes, blocks = self._fill.take_over(layer_id, request, segment, known)
        self._tables.append(layer, request, sizes, blocks)

    # A step of one layer.

    def announce(self, layer_id: int, batch: ForwardBatch, selection: Selection) -> None:
        """See `BlockPolicy`: nothing to prepare."""

    def resolve(self, layer_id: int, batch: ForwardBatch, selection: Selection, sparse_mask: Tensor) -> ResidencyPlan:
        """See `BlockPolicy`.

        Raises:
            ConfigError: the selection is not of clusters beside a steady zone.
            StateError: more tokens are steady than have places, or, with `debug_checks`, the step broke a rule.
        """
        if selection.steady is None or selection.unit is not Unit.CLUSTER:
            raise ConfigError("selection", (selection.unit, selection.steady), "clusters beside a steady zone")
        layer = self.geometry.layer_index(layer_id)
        self._abandon(layer)
        rows = self._rows_of(batch, sparse_mask)
        blocks = self._expanded(layer, rows, selection.indices)
        places = self._places(layer_id, rows, blocks)
        steady = self._steady.plan(batch, selection.steady)
        heads, width = blocks.ids.shape[1:]
        pieces = width * (self._block // self._piece)
        plan = BlockPlan.empty(batch.rows, heads, steady.kind.shape[1], pieces, self._counts)
        requests = batch.req_pool_indices
        block_runs(
            blocks=blocks,
            requests=requests,
            active=rows.active,
            steady=steady,
            places=places,
            out=plan,
            impl=self._kernels,
        )
        if self._debug_checks and int(plan.lens.amax()) > self._execution.tokens_per_row:
            raise StateError(f"{int(plan.lens.amax())} tokens are attended to, more than the execution buffer has")
        self._admissions[layer] = _Admission(plan.admissions, batch.requests)
        return ResidencyPlan(self._execution.table_of(batch.rows), execution=ExecutionPlan(plan.runs, plan.lens))

    def _rows_of(self, batch: ForwardBatch, sparse_mask: Tensor) -> _Rows:
        """Return the values that all layers of a step share."""
        if self._last_rows is None or self._last_rows.batch is not batch or self._last_rows.mask is not sparse_mask:
            active = sparse_mask & (torch.arange(batch.rows, device=sparse_mask.device) < batch.num_real_reqs)
            lengths = (self._items,) * batch.num_real
            of_blocks = replace(batch, seq_lens=torch.full_like(batch.seq_lens, self._items), lengths=lengths)
            self._last_rows = _Rows(batch, sparse_mask, active, of_blocks)
        return self._last_rows

    def _expanded(self, layer: int, rows: _Rows, ids: Tensor) -> SelectedBlocks:
        width = min(self._capacity, self._widest(ids.shape[2]))
        blocks = SelectedBlocks.empty(ids.shape[0], ids.shape[1], width, ids.device)
        requests, pages = rows.batch.req_pool_indices, self._tables.pages(layer)
        cluster_expand(ids, requests, rows.active, pages, blocks, impl=self._kernels)
        return blocks

    def _abandon(self, layer: int) -> None:
        """Empty the caches that a step changed which ended before its `commit`: their bytes were never copied."""
        admission = self._admissions.pop(layer, None)
        for request in admission.requests if admission else ():
            if request in self._steady:
                self._empty(request)

    def _places(self, layer_id: int, rows: _Rows, blocks: SelectedBlocks) -> BlockPlaces:
        """Let the diff find a place for each block."""
        selection = Selection(unit=Unit.TOKEN, unit_tokens=1, indices=blocks.ids, lengths=blocks.lengths)
        plan = self._lru.resolve(layer_id, rows.of_blocks, selection, rows.mask)
        assert plan.misses is not None
        assert plan.evicted_items is not None
        targets = plan.misses.dst_dev
        loaded = torch.zeros(*targets.shape[:2], self._capacity + 1, dtype=torch.uint8, device=targets.device)
        loaded.scatter_(-1, targets.where(targets >= 0, self._capacity).long(), value=1)
        evicted, slots = plan.evicted_items.contiguous(), self._slots
        return BlockPlaces(
            place=plan.device_slot.contiguous(),
            loaded=loaded,
            evicted=evicted,
            slots=slots,
            block_tokens=self._block,
            piece=self._piece,
        )

    def commit(self, layer_id: int, plan: ResidencyPlan) -> None:
        """See `BlockPolicy`."""
        layer = self.geometry.layer_index(layer_id)
        admission = self._admissions.pop(layer, None)
        if admission is not None:
            target = RowPool(self._arena.data, self._arena.addressing, layer)
            heads = self.geometry.num_kv_heads
            gather_copy((self._execution.source(),), target, admission.runs, num_heads=heads, impl=self._kernels)

    # What others ask.

    def host_source(self, layer_id: int) -> RowPool:
        """See `BlockPolicy`."""
        return self._store.source()

    @property
    def host_bytes(self) -> int:
        """See `BlockPolicy`."""
        return self._store.nbytes

    @property
    def counters(self) -> WaveGpuCounters:
        """What happened so far; reading it waits for the device."""
        return WaveGpuCounters(*self._counts.tolist())

    @property
    def nbytes(self) -> int:
        """Bytes of the tables on the device; the cache lies in the requests' buffers."""
        return self._tables.nbytes + self._lru.nbytes + self._slots.nbytes

    def cached_blocks(self, layer_id: int, request: int) -> Tensor:
        """Return the number of the block in each place, ``int32 [H, C]``, -1 for an empty one; for tests."""
        return self._lru.layer_state(layer_id).slot_item[request]

    def close(self) -> None:
        """Give the host memory back; the device must be done with it."""
        self._store.close()
