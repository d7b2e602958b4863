"""Puts a coordinator together from settings, the model's geometry and the sizes of the pools."""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_tier.algorithms import registry
from gpu_tier.algorithms.base import AlgorithmContext
from gpu_tier.config import FullOffloadConfig, SparseConfig
from gpu_tier.coordinator import SparseCoordinator
from gpu_tier.errors import ConfigError
from gpu_tier.geometry import KVGeometry
from gpu_tier.lifetime import Lifetimes
from gpu_tier.manager.host_tokens import HostTokens
from gpu_tier.manager.key_reader import KVReader
from gpu_tier.manager.resident_layers import ResidentLayers
from gpu_tier.manager.sparse_kvcache_manager import SparseKVCacheManager
from gpu_tier.manager.stream import HostStream
from gpu_tier.pools.device_pool import DeviceKVPool
from gpu_tier.pools.host_pool import HostKVPool
from gpu_tier.pools.req_to_token import ReqToTokenPool
from gpu_tier.pools.transfer import KVTransfer
from gpu_tier.residencies import Parts, adaptor_of, host_split, policy_of, resolved
from gpu_tier.runtime import DeviceRuntime, runtime_for

__all__ = ["build"]


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
    config = resolved(config, device_pages * page, max_requests * max_tokens)
    runtime = runtime_for(device)
    arena = DeviceKVPool(geometry, device_pages, runtime)
    split = host_split(config, geometry, arena.nbytes, publishes=publishes)
    host = HostKVPool(geometry, split.pages, config.host_layout, runtime)
    rows = _Rows()
    total = min(max_requests * max_tokens, split.tokens + device_pages * page)
    context = AlgorithmContext(geometry, config, num_q_heads, sm_scale, max_requests, max_tokens, total, runtime, rows)
    algorithm = registry.make(context)
    unit = algorithm.unit_tokens or 1  # clusters consist of single tokens
    tables = ReqToTokenPool(max_requests, max_tokens, runtime.device)
    host_tokens = HostTokens(host, max_requests, max_tokens, unit, runtime.device)
    transfer = KVTransfer(host, arena, runtime, config)
    parts = Parts(arena, tables, host_tokens, transfer, rows, split.store_bytes)
    policy = policy_of(context, algorithm, parts)
    manager = SparseKVCacheManager(policy, transfer, tables, host_tokens, runtime, unit)
    rows.reader = manager.reader
    resident = None
    if algorithm.skip_layers:
        resident = ResidentLayers(
            geometry, algorithm.skip_layers, -(-total // page), max_requests, max_tokens, transfer, runtime
        )
    lifetimes = Lifetimes(config, manager, algorithm, resident, max_tokens, publishes)
    stream = _stream(config, manager, runtime)
    return SparseCoordinator(config, lifetimes, adaptor_of(geometry, algorithm, policy), stream, runtime, sm_scale)


def _check(config: SparseConfig, geometry: KVGeometry, num_q_heads: int) -> None:
    if geometry.page_size != config.page_size:
        raise ConfigError("geometry.page_size", geometry.page_size, f"must be page_size={config.page_size}")
    if num_q_heads % geometry.num_kv_heads:
        allowed = f"must be a multiple of num_kv_heads={geometry.num_kv_heads}"
        raise ConfigError("num_q_heads", num_q_heads, allowed)


def _stream(config: SparseConfig, manager: SparseKVCacheManager, runtime: DeviceRuntime) -> HostStream | None:
    if not isinstance(config.algo, FullOffloadConfig):
        return None
    return HostStream(manager.host_tokens, manager.transfer, config.algo.chunk_tokens, runtime, config.kernels)
