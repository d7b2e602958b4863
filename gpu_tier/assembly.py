"""Puts a coordinator together from settings, the model's geometry and the sizes of the pools.

The residency that the settings name decides which parts there are:

| residency | algorithms | KV that is not on the device |
|---|---|---|
| lru | those that select tokens or pages | host pool, token order |
| static | snapkv | host pool, if it stays retrievable |
| stream | full_offload | host pool |
| device | all but full_offload | none |
| blocks | retroinfer | `WaveStore`, cluster order |
| blocks | pqcache | host pool |
| auto | retroinfer, pqcache | as device or blocks |

The host memory of RetroInfer goes to its store. A host pool in token order is kept beside it only for what needs
one: prompts that are published or attached, and prompts longer than the device pool; then each gets half.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvcm.gpu_tier.algorithms import registry
from kvcm.gpu_tier.algorithms.base import AlgorithmContext, BaseSparseAlgorithm
from kvcm.gpu_tier.backend import BackendAdaptor, ExecAdaptor, FlashAdaptor, TokenAdaptor
from kvcm.gpu_tier.config import FullOffloadConfig, PQCacheConfig, RetroInferConfig, SparseConfig
from kvcm.gpu_tier.coordinator import SparseCoordinator
from kvcm.gpu_tier.errors import ConfigError
from kvcm.gpu_tier.geometry import KVGeometry
from kvcm.gpu_tier.manager.execution_buffer import BlockResidency, ExecutionBuffer
from kvcm.gpu_tier.manager.host_tokens import HostTokens
from kvcm.gpu_tier.manager.residency import DeviceResidentPolicy, LruDiffPolicy, ResidencyPolicy, StaticSetPolicy
from kvcm.gpu_tier.manager.resident_clusters import ClusterResidentPolicy
from kvcm.gpu_tier.manager.sparse_kvcache_manager import KVReader, ResidentLayers, SparseKVCacheManager
from kvcm.gpu_tier.manager.stream import HostStream
from kvcm.gpu_tier.manager.token_blocks import TokenBlockPolicy
from kvcm.gpu_tier.manager.wave_buffer import RawRows, WaveBuffer
from kvcm.gpu_tier.manager.wave_gpu import WaveGpuBuffer
from kvcm.gpu_tier.manager.wave_store import WaveStore
from kvcm.gpu_tier.pools.device_pool import DeviceKVPool, ReqToTokenPool
from kvcm.gpu_tier.pools.host_pool import HostKVPool
from kvcm.gpu_tier.pools.transfer import KVTransfer
from kvcm.gpu_tier.request_lifecycle import RequestLifecycle
from kvcm.gpu_tier.runtime import DeviceRuntime, runtime_for
from kvcm.gpu_tier.types import Unit

__all__ = ["HostSplit", "Parts", "Residency", "build", "host_split", "policy_of", "resolved"]

Residency = ResidencyPolicy | BlockResidency
_BLOCKS = ("retroinfer", "pqcache")


def build(
    config: SparseConfig,
    geometry: KVGeometry,
    *,
    num_q_heads: int,
    sm_scale: float,
    device_pages: int,
    max_requests: int,
    max_tokens: int,
    device: torch.device | str = "cpu",
    publishes: bool = False,
) -> SparseCoordinator:
    """Return a coordinator with pools of its own.

    Args:
        config: settings.
        geometry: of the model's KV; its page size must be that of the settings.
        num_q_heads: query heads.
        sm_scale: what scores are multiplied by, 1/sqrt(d) for most models.
        device_pages: pages of the arena on the device.
        max_requests: requests at a time.
        max_tokens: most tokens of a request.
        device: where attention runs.
        publishes: whether prompts are to be published, so that all get a host copy.

    Raises:
        ConfigError: settings contradict each other or the geometry.
        PoolExhaustedError: the host has too little memory.
    """
    _check_geometry(config, geometry, num_q_heads)
    page = config.page_size
    max_tokens = -(-max_tokens // page) * page
    config = resolved(config, device_pages * page, max_requests * max_tokens)
    runtime = runtime_for(device)
    arena = DeviceKVPool(geometry, device_pages, runtime)
    split = host_split(config, geometry, arena.nbytes, publishes=publishes)
    host = HostKVPool(geometry, split.pages, config.host_layout, runtime)
    rows = _Rows()
    total = min(max_requests * max_tokens, split.tokens + device_pages * page)
    context = AlgorithmContext(
        geometry=geometry, config=config, num_q_heads=num_q_heads, sm_scale=sm_scale, max_requests=max_requests,
        max_tokens=max_tokens, total_tokens=total, runtime=runtime, keys=rows,
    )  # fmt: skip
    algorithm = registry.make(context)
    unit = algorithm.unit_tokens or 1  # clusters consist of single tokens
    tables = ReqToTokenPool(max_requests, max_tokens, runtime.device)
    host_tokens = HostTokens(
        pool=host, max_requests=max_requests, max_tokens=max_tokens, unit_tokens=unit, device=runtime.device
    )
    transfer = KVTransfer(host, arena, runtime, config)
    parts = Parts(
        arena=arena, tables=tables, host_tokens=host_tokens, transfer=transfer, rows=rows, store_bytes=split.store_bytes
    )
    return _coordinator(context, algorithm, parts, rows, unit_tokens=unit, publishes=publishes)


def _coordinator(
    context: AlgorithmContext,
    algorithm: BaseSparseAlgorithm,
    parts: Parts,
    rows: _Rows,
    *,
    unit_tokens: int,
    publishes: bool,
) -> SparseCoordinator:
    config, geometry, runtime = context.config, context.geometry, context.runtime
    policy = policy_of(context, algorithm, parts)
    manager = SparseKVCacheManager(
        policy=policy, transfer=parts.transfer, tables=parts.tables, host_tokens=parts.host_tokens, runtime=runtime,
        unit_tokens=unit_tokens,
    )  # fmt: skip
    rows.reader = manager.reader
    resident = None
    if algorithm.skip_layers:
        resident = ResidentLayers(
            geometry=geometry,
            count=algorithm.skip_layers,
            num_pages=-(-context.total_tokens // config.page_size),
            max_requests=context.max_requests,
            max_tokens=context.max_tokens,
            transfer=parts.transfer,
            runtime=runtime,
        )
    lifecycle = RequestLifecycle(
        config=config, manager=manager, algorithm=algorithm, resident=resident, max_tokens=context.max_tokens,
        publishes=publishes,
    )  # fmt: skip
    return SparseCoordinator(
        config=config, lifecycle=lifecycle, adaptor=_adaptor_of(geometry, algorithm, policy),
        stream=_stream(config, manager, runtime), runtime=runtime, sm_scale=context.sm_scale,
    )  # fmt: skip


def _check_geometry(config: SparseConfig, geometry: KVGeometry, num_q_heads: int) -> None:
    if geometry.page_size != config.page_size:
        raise ConfigError("geometry.page_size", geometry.page_size, f"must be page_size={config.page_size}")
    if num_q_heads % geometry.num_kv_heads:
        allowed = f"must be a multiple of num_kv_heads={geometry.num_kv_heads}"
        raise ConfigError("num_q_heads", num_q_heads, allowed)


def _stream(config: SparseConfig, manager: SparseKVCacheManager, runtime: DeviceRuntime) -> HostStream | None:
    if not isinstance(config.algo, FullOffloadConfig):
        return None
    return HostStream(
        host=manager.host_tokens,
        transfer=manager.transfer,
        chunk_tokens=config.algo.chunk_tokens,
        runtime=runtime,
        kernels=config.kernels,
    )


class _Rows:
    """The reader of KV, which exists only after those that it is given to."""

    reader: KVReader

    def keys(self, layer_id: int, request: int, start: int, stop: int) -> Tensor:
        """See `KeySource`."""
        return self.reader.keys(layer_id, request, start, stop)

    def rows(self, layer_id: int, request: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """See `KeySource`."""
        return self.reader.rows(layer_id, request, start, stop)

    def raw(self, layer_id: int, part: int, request: int, start: int, stop: int) -> Tensor:
        """See `RawRows`."""
        return self.reader.raw(layer_id, part, request, start, stop)


def resolved(config: SparseConfig, device_tokens: int, total_tokens: int) -> SparseConfig:
    """Return the settings with a residency that is not `auto`, checked against the algorithm.

    Args:
        config: settings.
        device_tokens: tokens that the arena holds.
        total_tokens: most tokens that requests may have together.

    Raises:
        ConfigError: the algorithm does not have this residency.
    """
    _check_residency(config)
    if config.residency != "auto":
        return config
    return config.replaced(residency="device" if device_tokens >= total_tokens else "blocks")


def _check_residency(config: SparseConfig) -> None:
    residency = config.residency
    if (residency == "stream") != (config.algorithm == "full_offload"):
        raise ConfigError("residency", residency, "stream is that of full_offload, and of no other algorithm")
    if residency == "static" and config.algorithm != "snapkv":
        raise ConfigError("residency", residency, "only snapkv has a fixed set")
    if residency in ("blocks", "auto") and config.algorithm not in _BLOCKS:
        raise ConfigError("residency", residency, f"only {' and '.join(_BLOCKS)} have a steady zone and a block cache")
    if isinstance(config.algo, RetroInferConfig):
        if residency == "lru":
            raise ConfigError("residency", residency, "clusters differ in size: retroinfer runs with blocks or device")
        if config.algo.mode == "gpu_only" and residency != "device":
            raise ConfigError("residency", residency, "mode='gpu_only' is residency device")


@dataclass(frozen=True, slots=True)
class HostSplit:
    """What host memory is used for.

    Attributes:
        pages: of the host pool, in token order.
        store_bytes: of the store of clusters; 0 when there is none.
        tokens: whose KV fits in both.
    """

    pages: int
    store_bytes: int
    tokens: int


def host_split(config: SparseConfig, geometry: KVGeometry, device_bytes: int, *, publishes: bool) -> HostSplit:
    """Return how host memory is divided; arguments as of `kvcm.gpu_tier.assembly.build`."""
    nbytes = config.host_bytes or int(config.host_to_device_ratio * device_bytes)
    pages = nbytes // geometry.page_bytes
    if config.residency != "blocks" or config.algo.keeps_host_copy():
        return HostSplit(max(1, pages), 0, pages * geometry.page_size)
    ordered = max(1, pages // 2) if publishes or config.prefill_window_tokens else 1
    store = max(0, nbytes - ordered * geometry.page_bytes)
    return HostSplit(ordered, store, pages * geometry.page_size)


def _adaptor_of(geometry: KVGeometry, algorithm: BaseSparseAlgorithm, policy: Residency) -> BackendAdaptor:
    """Return the adaptor of a residency: it makes the metadata that the attention kernel reads."""
    if isinstance(policy, BlockResidency):
        return ExecAdaptor(policy.execution.layer_kv(), policy.execution.table_of, geometry.page_size)
    if algorithm.unit is Unit.PAGE and not algorithm.per_head:
        return FlashAdaptor(algorithm.unit_tokens)
    return TokenAdaptor(geometry.num_kv_heads if algorithm.per_head else 1)


@dataclass(frozen=True, slots=True)
class Parts:
    """What residencies are made of.

    Attributes:
        arena: the pool on the device.
        tables: device slots of every token.
        host_tokens: owners of the host pages.
        transfer: between host pool and arena.
        rows: reader of KV as it is stored.
        store_bytes: of the store of clusters.
    """

    arena: DeviceKVPool
    tables: ReqToTokenPool
    host_tokens: HostTokens
    transfer: KVTransfer
    rows: RawRows
    store_bytes: int


def policy_of(context: AlgorithmContext, algorithm: BaseSparseAlgorithm, parts: Parts) -> Residency:
    """Return the policy of the settings; one that keeps clusters is the algorithm's sink.

    Raises:
        ConfigError: sizes of the settings contradict each other.
    """
    config, runtime = context.config, context.runtime
    if algorithm.unit_tokens and config.page_size % algorithm.unit_tokens:
        allowed = f"must be a multiple of the {algorithm.unit_tokens} tokens that {config.algorithm} selects at once"
        raise ConfigError("page_size", config.page_size, allowed)
    if config.residency == "static":
        return StaticSetPolicy(context.max_requests, runtime.device)
    if config.residency == "lru":
        return _lru(context, algorithm, parts.host_tokens)
    if config.residency == "blocks":
        return _blocks(context, algorithm, parts)
    if config.residency == "device" and algorithm.unit is Unit.CLUSTER:
        return _cluster_resident(context, algorithm, parts)
    return DeviceResidentPolicy(parts.tables.table)


def _cluster_resident(context: AlgorithmContext, algorithm: BaseSparseAlgorithm, parts: Parts) -> ClusterResidentPolicy:
    page, settings = context.geometry.page_size, context.settings(RetroInferConfig)
    policy = ClusterResidentPolicy(
        context.geometry, parts.tables.table, tokens_per_centroid=settings.tokens_per_centroid,
        width=-(-algorithm.max_execution_tokens // page) * page, total_tokens=context.total_tokens,
        runtime=context.runtime,
    )  # fmt: skip
    algorithm.sink = policy
    return policy


def _blocks(context: AlgorithmContext, algorithm: BaseSparseAlgorithm, parts: Parts) -> BlockResidency:
    execution = ExecutionBuffer(context.geometry, context.max_requests, algorithm.max_execution_tokens, context.runtime)
    if isinstance(context.config.algo, PQCacheConfig):
        return BlockResidency(_token_blocks(context, context.config.algo, execution, parts), execution)
    settings = context.settings(RetroInferConfig)
    store = WaveStore(context.geometry, settings, parts.store_bytes, context.runtime)
    if settings.control == "gpu":
        on_device = _wave_on_device(context, algorithm, store, execution, parts)
        algorithm.sink = on_device
        return BlockResidency(on_device, execution, store)
    policy = WaveBuffer(
        geometry=context.geometry,
        settings=settings,
        store=store,
        arena=parts.arena,
        execution=execution,
        rows=parts.rows,
        runtime=context.runtime,
        max_requests=context.max_requests,
        kernels=context.config.kernels,
    )
    algorithm.sink = policy
    return BlockResidency(policy, execution, store)


def _wave_on_device(
    context: AlgorithmContext, algorithm: BaseSparseAlgorithm, store: WaveStore, execution: ExecutionBuffer,
    parts: Parts,
) -> WaveGpuBuffer:  # fmt: skip
    return WaveGpuBuffer(
        geometry=context.geometry,
        settings=context.settings(RetroInferConfig),
        store=store,
        arena=parts.arena,
        execution=execution,
        rows=parts.rows,
        runtime=context.runtime,
        max_requests=context.max_requests,
        max_tokens=context.max_tokens,
        total_tokens=context.total_tokens,
        max_clusters=algorithm.max_items,
        kernels=context.config.kernels,
        debug_checks=context.config.debug_checks,
    )


def _token_blocks(
    context: AlgorithmContext, settings: PQCacheConfig, execution: ExecutionBuffer, parts: Parts
) -> TokenBlockPolicy:
    return TokenBlockPolicy(
        settings=settings,
        execution=execution,
        host_tokens=parts.host_tokens,
        transfer=parts.transfer,
        runtime=context.runtime,
        max_requests=context.max_requests,
        max_tokens=context.max_tokens,
        kernels=context.config.kernels,
        debug_checks=context.config.debug_checks,
    )


def _lru(context: AlgorithmContext, algorithm: BaseSparseAlgorithm, host_tokens: HostTokens) -> LruDiffPolicy:
    config = context.config
    capacity = config.device_buffer_size // algorithm.unit_tokens
    if capacity < algorithm.max_items:
        allowed = f"must hold the {algorithm.max_items * algorithm.unit_tokens} tokens that a step selects"
        raise ConfigError("device_buffer_size", config.device_buffer_size, allowed)
    return LruDiffPolicy(
        context.geometry,
        capacity=capacity,
        unit_tokens=algorithm.unit_tokens,
        selecting_heads=context.geometry.num_kv_heads if algorithm.per_head else 1,
        max_requests=context.max_requests,
        max_items=host_tokens.host_loc.shape[1],
        host_loc=host_tokens.host_loc,
        runtime=context.runtime,
        promote_newest=config.promote_newest,
        loads_hottest=config.loads_hottest,
        kernels=config.kernels,
        debug_checks=config.debug_checks,
    )
