"""Capacity plans: the memory of a request on the device and on the host, and how many requests fit.

A footprint is every byte that grows with requests. On the device these are the buffer (or the whole KV), the
representations, the layers that stay dense, and the tables and the state of the buffer. Statements such as "200 MB
per request" for a 128K request of DeepSeek-V3.2 leave out its index keys, which take 1.06 GB; these do not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvcm.gpu_tier.config import (
    DsaConfig,
    FullOffloadConfig,
    OracleConfig,
    PQCacheConfig,
    QuestConfig,
    RetroInferConfig,
    SnapKVConfig,
    SparseConfig,
)
from kvcm.gpu_tier.errors import ConfigError
from kvcm.gpu_tier.eval.model_shapes import Device, ModelShape
from kvcm.gpu_tier.eval.roofline import (
    StepTime,
    index_key_bytes,
    pq_budget,
    pq_code_bytes,
    pq_index_bytes,
    quest_bound_bytes,
    selected_tokens,
    skip_layers,
    step_time,
    traffic,
    wave_cache_tokens,
    wave_execution_tokens,
    wave_index_bytes,
    wave_store_tokens,
)
from kvcm.gpu_tier.geometry import KVGeometry

__all__ = ["Advice", "Footprint", "Limits", "Plan", "Workload", "advise", "footprint", "plan"]

_NEWEST_ITEMS = 2


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of one request.

    Attributes:
        kv: KV on the device: the buffer, or all of it.
        dense_layers: KV of layers that attend densely.
        representations: what the algorithm chooses by.
        tables: state of the buffer and tables of slots.
        host: KV in host memory, and codes.
        execution: KV of the layer that attends, put together for it; of residency `blocks`.
    """

    kv: int
    dense_layers: int
    representations: int
    tables: int
    host: int
    execution: int = 0

    @property
    def device(self) -> int:
        """All bytes on the device."""
        return self.kv + self.dense_layers + self.representations + self.tables + self.execution


def footprint(shape: ModelShape, config: SparseConfig, n_tokens: int) -> Footprint:
    """Return the bytes of a request of `n_tokens` tokens under an algorithm.

    A request below `min_sparse_prompt_len` is dense and has no copy on the host. Pages of a buffer hold all layers,
    those that attend densely included: there is one arena.
    """
    geometry = shape.geometry
    paged = _pages(geometry, n_tokens) * geometry.page_bytes
    if config.algorithm == "full" or n_tokens < config.min_sparse_prompt_len:
        return Footprint(kv=paged, dense_layers=0, representations=0, tables=4 * n_tokens, host=0)
    if config.residency == "stream":
        # Two pieces of one layer are shared by all requests: `plan` counts them once.
        return Footprint(kv=0, dense_layers=0, representations=0, tables=12 * n_tokens, host=paged)
    representations = representation_bytes(shape, config, n_tokens)
    if config.residency == "device":
        return Footprint(
            kv=paged,
            dense_layers=0,
            representations=representations,
            tables=_resident_tables(geometry, config, n_tokens),
            host=_codes(shape, config, n_tokens),
        )
    if config.residency in ("blocks", "auto"):
        return _of_blocks(shape, config, n_tokens, representations)
    skipped = replace(geometry, num_layers=max(1, skip_layers(config, geometry)))
    dense = _pages(geometry, n_tokens) * skipped.page_bytes if skip_layers(config, geometry) else 0
    return Footprint(
        kv=_pages(geometry, buffer_tokens(config, n_tokens)) * geometry.page_bytes,
        dense_layers=dense,
        representations=representations,
        tables=4 * n_tokens + (_lru_bytes(geometry, config, n_tokens) if config.residency == "lru" else 0),
        host=0 if _drops(config) else paged + _codes(shape, config, n_tokens),
    )


def _of_blocks(shape: ModelShape, config: SparseConfig, n_tokens: int, representations: int) -> Footprint:
    """Return the bytes of a request whose execution buffer is put together every step; the buffer is the steady zone
    and the block cache behind it."""
    geometry = shape.geometry
    execution_tokens = _execution_tokens(config, n_tokens)
    return Footprint(
        kv=_pages(geometry, block_places(geometry, config, n_tokens)) * geometry.page_bytes,
        dense_layers=0,
        representations=representations,
        tables=4 * n_tokens + 4 * geometry.num_kv_heads * execution_tokens,
        host=_host_of_blocks(geometry, config, n_tokens) + _codes(shape, config, n_tokens),
        execution=execution_tokens * geometry.token_layer_bytes,
    )


def block_places(geometry: KVGeometry, config: SparseConfig, n_tokens: int) -> int:
    """Return the places (tokens) of a request's buffer under residency `blocks`, the newest tokens' two included."""
    match config.algo:
        case RetroInferConfig() as wave:
            places = wave.unindexed + wave_cache_tokens(geometry, wave, n_tokens)
        case PQCacheConfig() as pq:
            places = pq_budget(pq, n_tokens)[0] + pq.cache_tokens
        case _:
            places = 0
    return places + _NEWEST_ITEMS


def _execution_tokens(config: SparseConfig, n_tokens: int) -> int:
    """Return the tokens of a row of the execution buffer, in whole pages."""
    match config.algo:
        case RetroInferConfig() as wave:
            tokens = wave_execution_tokens(wave, n_tokens)
        case PQCacheConfig() as pq:
            tokens = sum(pq_budget(pq, n_tokens))
        case _:
            tokens = 0
    return -(-tokens // config.page_size) * config.page_size


def _host_of_blocks(geometry: KVGeometry, config: SparseConfig, n_tokens: int) -> int:
    """Return the bytes of host memory set aside: of a wave index its own store, in cluster order, at its worst."""
    if isinstance(config.algo, RetroInferConfig):
        return wave_store_tokens(geometry, config.algo, n_tokens) * geometry.token_bytes
    return _pages(geometry, n_tokens) * geometry.page_bytes


def _codes(shape: ModelShape, config: SparseConfig, n_tokens: int) -> int:
    """Return the bytes of PQ codes in host memory."""
    if not isinstance(config.algo, PQCacheConfig):
        return 0
    return pq_code_bytes(shape.geometry, config.algo, n_tokens, n_tokens) * shape.geometry.num_layers


def _resident_tables(geometry: KVGeometry, config: SparseConfig, n_tokens: int) -> int:
    """Return the bytes of tables when all KV is on the device: slots, and of clusters which tokens are in each."""
    members = geometry.num_kv_heads * geometry.num_layers if isinstance(config.algo, RetroInferConfig) else 0
    return 4 * n_tokens * (1 + members)


def _lru_bytes(geometry: KVGeometry, config: SparseConfig, n_tokens: int) -> int:
    """Return the bytes of a buffer's state: see `LruDiffPolicy` and its kernel's scratch."""
    capacity, items = config.device_buffer_size // unit_tokens(config), -(-n_tokens // unit_tokens(config))
    heads = _selecting_heads(geometry, config)
    # A slot's item (int32) and its place in the order (int16), and the newest item, of each layer and head.
    state = geometry.num_layers * heads * (6 * capacity + 4)
    slots = 4 * (capacity + _NEWEST_ITEMS)
    scratch = heads * (4 * items + 12 * capacity)
    return state + slots + scratch + 8 * items


def representation_bytes(shape: ModelShape, config: SparseConfig, n_tokens: int) -> int:
    """Return the bytes on the device that an algorithm chooses by, of a request of `n_tokens` tokens."""
    geometry = shape.geometry
    layers = geometry.num_layers - skip_layers(config, geometry)
    match config.algo:
        case DsaConfig() as dsa:
            return n_tokens * index_key_bytes(dsa) * layers
        case QuestConfig(page=page):
            return -(-n_tokens // page) * quest_bound_bytes(geometry) * layers
        case OracleConfig():
            return n_tokens * geometry.num_kv_heads * geometry.parts[0].row_bytes * layers
        case RetroInferConfig() as wave:
            return wave_index_bytes(geometry, wave, n_tokens)
        case PQCacheConfig() as pq:
            return pq_index_bytes(geometry, pq, n_tokens)
    return 0


def buffer_tokens(config: SparseConfig, n_tokens: int) -> int:
    """Return the tokens of a request's buffer in a sparse layer, the newest items included."""
    if config.residency == "static":
        return selected_tokens(config, n_tokens) + _NEWEST_ITEMS
    return config.device_buffer_size + _NEWEST_ITEMS * unit_tokens(config)


def unit_tokens(config: SparseConfig) -> int:
    """Return the tokens of an item."""
    return config.algo.page if isinstance(config.algo, QuestConfig) else 1


def _selecting_heads(geometry: KVGeometry, config: SparseConfig) -> int:
    per_head = isinstance(config.algo, OracleConfig | SnapKVConfig | PQCacheConfig) or (
        isinstance(config.algo, QuestConfig) and config.algo.heads == "per_head"
    )
    return geometry.num_kv_heads if per_head else 1


def _pages(geometry: KVGeometry, tokens: int) -> int:
    return -(-tokens // geometry.page_size)


def _drops(config: SparseConfig) -> bool:
    return isinstance(config.algo, SnapKVConfig) and config.algo.mode == "drop"


# How many requests fit, and which limit binds: device memory, host memory, or a step's time.
#
# Everything but the hit rate and the requests' length follows from shapes; these two are inputs. Times are those of
# `roofline`, nothing overlapped: a plan that a real system can only miss from below is of no use. `advise` says from
# which batch on the KV is better off in host memory: below it, an algorithm that never waits for the link is faster.

_MOST_REQUESTS = 1 << 16


@dataclass(frozen=True, slots=True)
class Limits:
    """What a plan has to keep to.

    Attributes:
        gpu_bytes: memory of the GPU.
        host_bytes: memory of the host that may be pinned.
        latency_seconds: most time of a decode step; None for no limit.
        reserve_bytes: device memory for activations, graphs and fragments.
        staging_requests: requests in prefill at a time, whose whole KV is on the device until it was copied away.
    """

    gpu_bytes: int
    host_bytes: int
    latency_seconds: float | None = None
    reserve_bytes: int = 4 << 30
    staging_requests: int = 1

    def __post_init__(self) -> None:
        if self.gpu_bytes < 1:
            raise ConfigError("gpu_bytes", self.gpu_bytes, "must be at least 1")
        for field in ("host_bytes", "reserve_bytes", "staging_requests"):
            if getattr(self, field) < 0:
                raise ConfigError(field, getattr(self, field), "must not be negative")
        if self.latency_seconds is not None and self.latency_seconds <= 0:
            raise ConfigError("latency_seconds", self.latency_seconds, "must be above 0")


@dataclass(frozen=True, slots=True)
class Workload:
    """The planned load: requests of one length, and the hit rate of their selections."""

    n_tokens: int
    hit_rate: float


@dataclass(frozen=True, slots=True)
class Plan:
    """The largest batch, and why it is no larger.

    Attributes:
        algorithm: name of the algorithm.
        residency: where its KV is.
        batch: requests; 0 when not even one fits.
        binds: "gpu memory", "host memory", "latency", or "nothing" when `_MOST_REQUESTS` fit.
        fixed_bytes: device bytes that do not grow with the batch: weights, reserve, staging.
        request: bytes of one request.
        step: time of a step of that batch; None when nothing fits.
        limits: largest batch under each limit alone, None when it does not limit.
    """

    algorithm: str
    residency: str
    batch: int
    binds: str
    fixed_bytes: int
    request: Footprint
    step: StepTime | None
    limits: dict[str, int | None]

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all requests together."""
        return self.batch / self.step.serial if self.step else 0.0


def fixed_bytes(shape: ModelShape, config: SparseConfig, workload: Workload, limits: Limits) -> int:
    """Return the device bytes that do not grow with the batch."""
    geometry = shape.geometry
    staging = 0
    if config.residency in ("lru", "static", "blocks", "auto"):
        staging = limits.staging_requests * workload.n_tokens * geometry.token_bytes
    if isinstance(config.algo, FullOffloadConfig) and config.residency == "stream":
        staging = 2 * min(config.algo.chunk_tokens, workload.n_tokens) * geometry.token_layer_bytes
    return shape.weight_bytes + limits.reserve_bytes + staging


def time_of(shape: ModelShape, device: Device, config: SparseConfig, workload: Workload, batch: int) -> StepTime:
    """Return the time of a step of `batch` requests."""
    request = traffic(shape, config, workload.n_tokens, workload.hit_rate)
    sparse = config.algorithm != "full" and workload.n_tokens >= config.min_sparse_prompt_len
    layers = shape.geometry.num_layers - skip_layers(config, shape.geometry) if sparse else 0
    return step_time(shape, device, request, batch, layers)


def plan(shape: ModelShape, device: Device, config: SparseConfig, workload: Workload, limits: Limits) -> Plan:
    """Return the largest batch of requests of one length.

    Raises:
        ConfigError: a length or a rate that cannot be, or a buffer smaller than a selection.
    """
    request = footprint(shape, config, workload.n_tokens)
    _check_buffer(config, workload.n_tokens)
    fixed = fixed_bytes(shape, config, workload, limits)
    most: dict[str, int | None] = {
        "gpu memory": max(0, (limits.gpu_bytes - fixed) // request.device) if request.device else None,
        "host memory": limits.host_bytes // request.host if request.host else None,
        "latency": _most_in_time(shape, device, config, workload, limits.latency_seconds),
    }
    allowed = {name: count for name, count in most.items() if count is not None}
    batch = min([_MOST_REQUESTS, *allowed.values()])
    binds = next((name for name, count in allowed.items() if count == batch), "nothing")
    step = time_of(shape, device, config, workload, batch) if batch else None
    return Plan(
        algorithm=config.algorithm,
        residency=config.residency,
        batch=batch,
        binds=binds,
        fixed_bytes=fixed,
        request=request,
        step=step,
        limits=most,
    )


def _check_buffer(config: SparseConfig, n_tokens: int) -> None:
    selected = selected_tokens(config, n_tokens)
    if config.residency == "lru" and n_tokens >= config.min_sparse_prompt_len and config.device_buffer_size < selected:
        raise ConfigError("device_buffer_size", config.device_buffer_size, f"must hold the {selected} tokens selected")


def _most_in_time(
    shape: ModelShape, device: Device, config: SparseConfig, workload: Workload, seconds: float | None
) -> int | None:
    if seconds is None:
        return None
    fits, fails = 0, _MOST_REQUESTS + 1
    while fails - fits > 1:
        middle = (fits + fails) // 2
        if time_of(shape, device, config, workload, middle).serial <= seconds:
            fits = middle
        else:
            fails = middle
    return fits


@dataclass(frozen=True, slots=True)
class Advice:
    """How offload compares with a rival whose KV stays on the device.

    Attributes:
        rival: its plan.
        from_batch: smallest batch at which offload makes more tokens per second than the rival at the same batch, or at
            its largest where that is smaller; None when no batch that fits does.
        ratio_at_one: offload's speed over the rival's, one request each; None when one of them fits none.
    """

    rival: Plan
    from_batch: int | None
    ratio_at_one: float | None


def advise(
    shape: ModelShape, device: Device, config: SparseConfig, workload: Workload, limits: Limits
) -> tuple[Advice, ...]:
    """Return from which batch on KV in host memory is faster than full attention, and than the algorithm itself with
    all KV on the device.

    Below the capacity of the device all can run the same batch, and what does not wait for the link wins unless it
    reads far more; beyond it only offload can grow.
    """
    rivals = [SparseConfig("full")]
    if config.algorithm not in ("full", "full_offload"):
        rivals.append(config.replaced(residency="device"))
    offload = plan(shape, device, config, workload, limits)

    def speed(settings: SparseConfig, batch: int) -> float:
        return batch / time_of(shape, device, settings, workload, batch).serial if batch else 0.0

    def against(rival: SparseConfig) -> Advice:
        theirs = plan(shape, device, rival, workload, limits)
        batches = range(1, offload.batch + 1)
        first = next((b for b in batches if speed(config, b) > speed(rival, min(b, theirs.batch))), None)
        at_one = speed(config, 1) / speed(rival, 1) if theirs.batch and offload.batch else None
        return Advice(theirs, first, at_one)

    return tuple(against(rival) for rival in rivals)
