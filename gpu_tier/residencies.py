"""The residency that the settings name, and the sizes that follow from it.

| residency | algorithms | KV that is not on the device |
|---|---|---|
| lru | those that select tokens or pages | host pool, token order |
| static | snapkv | host pool, if it stays retrievable |
| stream | full_offload | host pool |
| device | all but full_offload | none |
| blocks | retroinfer | `WaveStore`, cluster order |
| blocks | pqcache | host pool |
| auto | retroinfer, pqcache | as device or blocks |

The host memory of RetroInfer goes to its store. A host pool in token order is kept beside it only for what needs one:
prompts that are published or attached, and prompts longer than the device pool; then each gets half.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpu_tier.algorithms.base import AlgorithmContext, BaseSparseAlgorithm
from gpu_tier.backend.adaptor import BackendAdaptor
from gpu_tier.backend.exec_adaptor import ExecAdaptor
from gpu_tier.backend.flash_adaptor import FlashAdaptor
from gpu_tier.backend.token_adaptor import TokenAdaptor
from gpu_tier.config import PQCacheConfig, RetroInferConfig, SparseConfig
from gpu_tier.errors import ConfigError
from gpu_tier.geometry import KVGeometry
from gpu_tier.manager.block_residency import BlockResidency
from gpu_tier.manager.cluster_resident import ClusterResidentPolicy
from gpu_tier.manager.device_resident import DeviceResidentPolicy
from gpu_tier.manager.execution_buffer import ExecutionBuffer
from gpu_tier.manager.host_tokens import HostTokens
from gpu_tier.manager.lru_state import LruDiffPolicy
from gpu_tier.manager.policy import ResidencyPolicy
from gpu_tier.manager.static_set import StaticSetPolicy
from gpu_tier.manager.token_blocks import TokenBlockPolicy
from gpu_tier.manager.wave_buffer import RawRows, WaveBuffer
from gpu_tier.manager.wave_gpu import WaveGpuBuffer
from gpu_tier.manager.wave_store import WaveStore
from gpu_tier.pools.device_pool import DeviceKVPool
from gpu_tier.pools.req_to_token import ReqToTokenPool
from gpu_tier.pools.transfer import KVTransfer
from gpu_tier.types import Unit

__all__ = ["HostSplit", "Parts", "Residency", "adaptor_of", "host_split", "policy_of", "resolved"]

Residency = ResidencyPolicy | BlockResidency

_BLOCKS = ("retroinfer", "pqcache")


def resolved(config: SparseConfig, device_tokens: int, total_tokens: int) -> SparseConfig:
    """Return the settings with a residency that is not `auto`, checked against the algorithm.

    Args:
        config: settings.
        device_tokens: tokens that the arena holds.
        total_tokens: most tokens that requests may have together.

    Raises:
        ConfigError: the algorithm does not have this residency.
    """
    _check(config)
    if config.residency != "auto":
        return config
    return config.replaced(residency="device" if device_tokens >= total_tokens else "blocks")


def _check(config: SparseConfig) -> None:
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
    """Return how host memory is divided; arguments as of `gpu_tier.assembly.build`."""
    nbytes = config.host_bytes or int(config.host_to_device_ratio * device_bytes)
    pages = nbytes // geometry.page_bytes
    if config.residency != "blocks" or config.algo.keeps_host_copy():
        return HostSplit(max(1, pages), 0, pages * geometry.page_size)
    ordered = max(1, pages // 2) if publishes or config.prefill_window_tokens else 1
    store = max(0, nbytes - ordered * geometry.page_bytes)
    return HostSplit(ordered, store, pages * geometry.page_size)


def adaptor_of(geometry: KVGeometry, algorithm: BaseSparseAlgorithm, policy: Residency) -> BackendAdaptor:
    """Return what tells the attention kernel of a residency what to read."""
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
        host_tokens: who holds which host pages.
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
        context.geometry, settings, store, parts.arena, execution, parts.rows, context.runtime,
        max_requests=context.max_requests, kernels=context.config.kernels,
    )  # fmt: skip
    algorithm.sink = policy
    return BlockResidency(policy, execution, store)


def _wave_on_device(
    context: AlgorithmContext, algorithm: BaseSparseAlgorithm, store: WaveStore, execution: ExecutionBuffer,
    parts: Parts,
) -> WaveGpuBuffer:  # fmt: skip
    return WaveGpuBuffer(
        context.geometry, context.settings(RetroInferConfig), store, parts.arena, execution, parts.rows,
        context.runtime, max_requests=context.max_requests, max_tokens=context.max_tokens,
        total_tokens=context.total_tokens, max_clusters=algorithm.max_items, kernels=context.config.kernels,
        debug_checks=context.config.debug_checks,
    )  # fmt: skip


def _token_blocks(
    context: AlgorithmContext, settings: PQCacheConfig, execution: ExecutionBuffer, parts: Parts
) -> TokenBlockPolicy:
    return TokenBlockPolicy(
        settings, execution, parts.host_tokens, parts.transfer, context.runtime, max_requests=context.max_requests,
        max_tokens=context.max_tokens, kernels=context.config.kernels, debug_checks=context.config.debug_checks,
    )  # fmt: skip


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
