"""Requests under RetroInfer or PQCache, as many as a benchmark asks for, with the parts that a coordinator works with.

Algorithm, residency, pools and manager are those of `kvcm.gpu_tier.assembly`, put together here because nothing is
prefilled: KV is planted (`PlantedKV`), indexes are built of it by the algorithm itself, clusters go to the host through
its sink, and what only attention reads (steady tokens, resident KV, the host pool) is random. To begin in time indexes
are built with few k-means iterations, as the settings say: a step takes as long with any centroids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from device_clock import DeviceClock
from pinned_pool import pinned_pool
from planted_kv import PlantedKV
from torch import Tensor

from kvcm.gpu_tier.algorithms import registry
from kvcm.gpu_tier.algorithms.base import AlgorithmContext
from kvcm.gpu_tier.assembly import Parts, policy_of
from kvcm.gpu_tier.config import PQCacheConfig, RetroInferConfig, SparseConfig
from kvcm.gpu_tier.eval.model_shapes import ModelShape
from kvcm.gpu_tier.eval.roofline import wave_block_tokens
from kvcm.gpu_tier.geometry import KVGeometry, Layout
from kvcm.gpu_tier.index.wave_index import SegmentSink, WaveSegment
from kvcm.gpu_tier.manager.host_tokens import HostTokens
from kvcm.gpu_tier.manager.sparse_kvcache_manager import SparseKVCacheManager
from kvcm.gpu_tier.manager.wave_store import EXTENT_BLOCKS
from kvcm.gpu_tier.pools.device_pool import DeviceKVPool, ReqToTokenPool
from kvcm.gpu_tier.pools.transfer import KVTransfer
from kvcm.gpu_tier.runtime import DeviceRuntime

__all__ = ["SparseSystem", "Work", "random_rows", "store_bytes"]

_ODD_CLUSTERS = 2


@dataclass(frozen=True, slots=True)
class Work:
    """Requests of one length.

    Attributes:
        shape: of the model, with the layers that are measured.
        config: algorithm and residency (blocks, or device).
        batch: requests.
        n_prompt: tokens of the prompt of each.
        decoded: tokens that each has beside them in the steps.
    """

    shape: ModelShape
    config: SparseConfig
    batch: int
    n_prompt: int
    decoded: int

    @property
    def geometry(self) -> KVGeometry:
        """Of the KV."""
        return self.shape.geometry

    @property
    def n_tokens(self) -> int:
        """Tokens of a request in a step, at least."""
        return self.n_prompt + self.decoded

    @property
    def max_tokens(self) -> int:
        """Most tokens of a request, in whole pages."""
        page = self.geometry.page_size
        return -(-(self.n_tokens + 2) // page) * page


class _Watched:
    """A sink that remembers the members of one request's clusters in one layer, by head, for checks."""

    def __init__(self, sink: SegmentSink, layer_id: int, request: int) -> None:
        self._sink, self._watched = sink, (layer_id, request)
        self.clusters: list[list[Tensor]] = []

    def store(self, layer_id: int, request: int, segment: WaveSegment) -> None:
        """See `SegmentSink`."""
        if (layer_id, request) == self._watched:
            for members, sizes in zip(segment.members, segment.sizes.tolist(), strict=True):
                self.clusters.append(list((members.long() + segment.start).split(sizes)))
        self._sink.store(layer_id, request, segment)

    def tokens(self, head: int, heads: int, clusters: Sequence[int]) -> Tensor:
        """Return the tokens of clusters of a head, cluster after cluster."""
        known = [tokens for of_head in self.clusters[head::heads] for tokens in of_head]
        return torch.cat([known[cluster] for cluster in clusters])


class SparseSystem:
    """Pools, algorithm and residency of some requests, which are all there.

    Args:
        work: the decoded workload.
        clock: fills pools.
        runtime: of the device.

    Attributes:
        requests: rows of the requests.
        manager: residency and pools.
        algorithm: what selects.
        is_resident: whether all KV is on the device.
    """

    def __init__(self, work: Work, clock: DeviceClock, runtime: DeviceRuntime) -> None:
        self.work, self.runtime = work, runtime
        geometry, config = work.geometry, work.config
        self.is_resident = config.residency == "device"
        self.kv = PlantedKV(geometry, runtime.device)
        context = AlgorithmContext(
            geometry, config, work.shape.num_q_heads, geometry.head_dim**-0.5, work.batch, work.max_tokens,
            work.batch * work.max_tokens, runtime, self.kv,
        )  # fmt: skip
        self.algorithm = registry.make(context)
        rows = random_rows(geometry, runtime.device)
        arena = DeviceKVPool(geometry, work.batch * self._arena_pages(), runtime)
        clock.fill(arena.data, rows)
        host = pinned_pool(geometry, self._host_pages(), Layout.PAGE_FIRST, runtime)
        clock.fill(host.data, rows)
        tables = ReqToTokenPool(work.batch, work.max_tokens, runtime.device)
        host_tokens = HostTokens(host, work.batch, work.max_tokens, 1, runtime.device)
        transfer = KVTransfer(host, arena, runtime, config)
        parts = Parts(arena, tables, host_tokens, transfer, self.kv, store_bytes(work) * work.batch)
        self.policy = policy_of(context, self.algorithm, parts)
        self.manager = SparseKVCacheManager(self.policy, transfer, tables, host_tokens, runtime, 1)
        self._check_pinned()
        self.requests = [tables.alloc() for _ in range(work.batch)]
        self._watched = self._watch()
        for request in self.requests:
            self._admit(request)

    def _check_pinned(self) -> None:
        store = None if self.manager.blocks is None else self.manager.blocks.store
        if store is not None and not store.is_device_readable:
            nbytes = store.nbytes
            self.close()
            raise RuntimeError(
                f"{nbytes} bytes of host memory could not be pinned: nothing here can be measured without"
            )

    def _watch(self) -> _Watched | None:
        sink = self.algorithm.sink
        if sink is None:
            return None
        self.algorithm.sink = watched = _Watched(sink, self.last_layer, self.requests[0])
        return watched

    @property
    def last_layer(self) -> int:
        """Id of the last layer, which checks read."""
        return self.work.geometry.layers[-1]

    # Sizes.

    def _arena_pages(self) -> int:
        work = self.work
        if self.is_resident:
            return work.max_tokens // work.geometry.page_size
        ring = self.algorithm.steady_ring(work.n_prompt).capacity
        return -(-(ring + self._cache_places() + 2) // work.geometry.page_size)

    def _cache_places(self) -> int:
        """Return the most places that a request's cache may have."""
        work, settings = self.work, self.work.config.algo
        if isinstance(settings, PQCacheConfig):
            return settings.cache_tokens
        assert isinstance(settings, RetroInferConfig)
        block, places = wave_block_tokens(work.geometry, settings), int(settings.cache_ratio * work.max_tokens)
        if settings.control == "gpu":  # it holds all clusters selected in a step, in whole blocks
            page = work.geometry.page_size
            space = -(-self.algorithm.max_execution_tokens // page) * page
            places = max(places, space + (self.algorithm.max_items + 1) * block) + 2 * block
        return places

    def _host_pages(self) -> int:
        work = self.work
        holds_all = isinstance(work.config.algo, PQCacheConfig) and not self.is_resident
        return work.batch * work.max_tokens // work.geometry.page_size if holds_all else 1

    @property
    def device_bytes(self) -> int:
        """Bytes on the device of all requests: arena, representations, execution buffer and tables."""
        algorithm = self.algorithm.representation_bytes(self.work.max_tokens) * self.work.batch
        execution = 0 if self.manager.blocks is None else self.manager.blocks.execution.nbytes
        tables = getattr(self.manager.policy, "nbytes", 0)
        return self.manager.device.nbytes + algorithm + execution + tables

    # Requests.

    def _admit(self, request: int) -> None:
        work, manager, algorithm = self.work, self.manager, self.algorithm
        algorithm.reserve(request, work.n_prompt)
        algorithm.reserve(request, work.max_tokens)
        manager.policy.hold(request, work.max_tokens)
        if self.is_resident:
            self._make_resident(request)
        if self._host_pages() > 1:
            manager.host_tokens.cover(request, work.max_tokens)
            manager.host_tokens.back_up([request], [work.max_tokens])
        algorithm.finish_prompt(request, work.n_prompt)
        if isinstance(work.config.algo, PQCacheConfig):  # clusters beyond the prompt's are due only after more tokens
            algorithm.become_sparse(request, work.n_tokens + 1)
        if manager.blocks is not None:
            ring = algorithm.steady_ring(work.n_prompt)
            manager.blocks.admit(request, ring, work.max_tokens, manager.buffers)

    def _make_resident(self, request: int) -> None:
        pages, page = self.manager.device.allocator.alloc(self._arena_pages()), self.work.geometry.page_size
        slots = (torch.tensor(pages)[:, None] * page + torch.arange(page)).flatten()
        self.manager.tables.set_slots(request, 0, slots)

    def newest_slots(self, batch: int, token: int) -> Tensor:
        """Return where a token of the first `batch` requests is written, ``int64 [batch]`` on the device."""
        if self.is_resident:
            return self.manager.tables.table[self.requests[:batch], token].long()
        ring, buffers = self.algorithm.steady_ring(self.work.n_prompt), self.manager.buffers
        slots = [buffers.item_slot(request, ring.position(token)) for request in self.requests[:batch]]
        return torch.tensor(slots, device=self.runtime.device)

    def retrieved_tokens(self, head: int, ids: Tensor) -> Tensor:
        """Return the tokens that ids of the first request stand for in the last layer, in their order."""
        if self._watched is None:
            return ids.long()
        return self._watched.tokens(head, self.work.geometry.num_kv_heads, ids.tolist())

    def stored_rows(self, head: int, tokens: Tensor) -> Tensor:
        """Return keys of the first request in the last layer as they are on the host, ``uint8 [n, row_bytes]``."""
        request = self.requests[0]
        if self._watched is not None:
            return self.kv.rows_of(self.last_layer, 0, request, tokens)[:, head].cpu()
        slots = self.manager.host_tokens.slots(request, 0, self.work.max_tokens)[tokens.cpu()]
        return self.manager.host.read(self.last_layer, 0, slots)[:, head]

    def close(self) -> None:
        """Give host memory back, when the device is done with it."""
        self.manager.close()
        self.algorithm.close()


def store_bytes(work: Work) -> int:
    """Return the bytes of host memory that clusters of a request take at worst; 0 where none are stored."""
    settings, geometry = work.config.algo, work.geometry
    if not isinstance(settings, RetroInferConfig) or work.config.residency == "device":
        return 0
    block = wave_block_tokens(geometry, settings)
    # A cluster wastes less than a block; the end of a prompt may have clusters of its own.
    clustered = work.max_tokens - settings.sink - settings.local
    clusters = clustered // settings.tokens_per_centroid + _ODD_CLUSTERS
    tokens = ((clustered + clusters * (block - 1)) // block + 1) * block
    lines = geometry.num_layers * geometry.num_kv_heads
    return (tokens * lines + 2 * EXTENT_BLOCKS * block) * geometry.token_layer_bytes // geometry.num_kv_heads


def random_rows(geometry: KVGeometry, device: torch.device) -> Tensor:
    """Return some random rows one behind the other, where keys and values are as wide."""
    return geometry.parts[0].encode(torch.randn(1 << 12, geometry.head_dim, device=device)).flatten()
