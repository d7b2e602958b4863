"""Puts a coordinator together from settings, the model's geometry and the sizes of the pools."""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_tier.algorithms import registry
from gpu_tier.algorithms.base import AlgorithmContext, BaseSparseAlgorithm
from gpu_tier.backend.adaptor import BackendAdaptor
from gpu_tier.backend.flash_adaptor import FlashAdaptor
from gpu_tier.backend.token_adaptor import TokenAdaptor
from gpu_tier.config import FullOffloadConfig, SparseConfig
from gpu_tier.coordinator import SparseCoordinator
from gpu_tier.errors import ConfigError
from gpu_tier.geometry import KVGeometry
from gpu_tier.lifetime import Lifetimes
from gpu_tier.manager.device_resident import DeviceResidentPolicy
from gpu_tier.manager.host_tokens import HostTokens
from gpu_tier.manager.lru_state import LruDiffPolicy
from gpu_tier.manager.policy import ResidencyPolicy
from gpu_tier.manager.resident_layers import ResidentLayers
from gpu_tier.manager.sparse_kvcache_manager import SparseKVCacheManager
from gpu_tier.manager.static_set import StaticSetPolicy
from gpu_tier.manager.stream import HostStream
from gpu_tier.pools.device_pool import DeviceKVPool
from gpu_tier.pools.host_pool import HostKVPool
from gpu_tier.pools.req_to_token import ReqToTokenPool
from gpu_tier.runtime import DeviceRuntime, runtime_for
from gpu_tier.types import Unit

__all__ = ["build"]


class _Keys:
    """The reader of keys, which exists only after the algorithm that it is given to."""

    def __init__(self) -> None:
        self.manager: SparseKVCacheManager | None = None

    def keys(self, layer_id: int, request: int, start: int, stop: int) -> Tensor:
        """See `KeySource`."""
        assert self.manager is not None
        return self.manager.reader.keys(layer_id, request, start, stop)

    def rows(self, layer_id: int, request: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """See `KeySource`."""
        assert self.manager is not None
        return self.manager.reader.rows(layer_id, request, start, stop)


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
    _check(config, geometry, num_q_heads)
    page = config.page_size
    max_tokens = -(-max_tokens // page) * page
    runtime = runtime_for(device)
    arena = DeviceKVPool(geometry, device_pages, runtime)
    host_pages = (config.host_bytes or int(config.host_to_device_ratio * arena.nbytes)) // geometry.page_bytes
    host = HostKVPool(geometry, max(1, host_pages), config.host_layout, runtime)
    keys = _Keys()
    total = min(max_requests * max_tokens, (host_pages + device_pages) * page)
    context = AlgorithmContext(geometry, config, num_q_heads, sm_scale, max_requests, max_tokens, total, runtime, keys)
    algorithm = registry.make(context)
    tables = ReqToTokenPool(max_requests, max_tokens, runtime.device)
    host_tokens = HostTokens(host, max_requests, max_tokens, algorithm.unit_tokens, runtime.device)
    policy = _policy(context, algorithm, host_tokens, tables)
    manager = SparseKVCacheManager(config, arena, host, tables, policy, host_tokens, runtime, algorithm.unit_tokens)
    keys.manager = manager
    resident = None
    if algorithm.skip_layers:
        resident = ResidentLayers(
            geometry, algorithm.skip_layers, -(-total // page), max_requests, max_tokens, manager.transfer, runtime
        )
    lifetimes = Lifetimes(config, manager, algorithm, resident, max_tokens, publishes)
    stream = _stream(config, manager, runtime)
    return SparseCoordinator(config, lifetimes, _adaptor(geometry, algorithm), stream, runtime, sm_scale)


def _check(config: SparseConfig, geometry: KVGeometry, num_q_heads: int) -> None:
    if geometry.page_size != config.page_size:
        raise ConfigError("geometry.page_size", geometry.page_size, f"must be page_size={config.page_size}")
    if num_q_heads % geometry.num_kv_heads:
        allowed = f"must be a multiple of num_kv_heads={geometry.num_kv_heads}"
        raise ConfigError("num_q_heads", num_q_heads, allowed)
    if (config.residency == "stream") != (config.algorithm == "full_offload"):
        raise ConfigError("residency", config.residency, "stream is that of full_offload, and of no other algorithm")
    if config.residency == "static" and config.algorithm != "snapkv":
        raise ConfigError("residency", config.residency, "only snapkv has a fixed set")


def _policy(
    context: AlgorithmContext, algorithm: BaseSparseAlgorithm, host_tokens: HostTokens, tables: ReqToTokenPool
) -> ResidencyPolicy:
    config, runtime = context.config, context.runtime
    if config.page_size % algorithm.unit_tokens:
        allowed = f"must be a multiple of the {algorithm.unit_tokens} tokens that {config.algorithm} selects at once"
        raise ConfigError("page_size", config.page_size, allowed)
    if config.residency == "static":
        return StaticSetPolicy(context.max_requests, runtime.device)
    if config.residency != "lru":
        return DeviceResidentPolicy(tables.table)
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
        runtime=runtime,
        promote_newest=config.promote_newest,
        loads_hottest=config.loads_hottest,
        kernels=config.kernels,
        debug_checks=config.debug_checks,
    )


def _adaptor(geometry: KVGeometry, algorithm: BaseSparseAlgorithm) -> BackendAdaptor:
    if algorithm.unit is Unit.PAGE and not algorithm.per_head:
        return FlashAdaptor(algorithm.unit_tokens)
    return TokenAdaptor(geometry.num_kv_heads if algorithm.per_head else 1)


def _stream(config: SparseConfig, manager: SparseKVCacheManager, runtime: DeviceRuntime) -> HostStream | None:
    if not isinstance(config.algo, FullOffloadConfig):
        return None
    return HostStream(manager.host_tokens, manager.transfer, config.algo.chunk_tokens, runtime, config.kernels)
