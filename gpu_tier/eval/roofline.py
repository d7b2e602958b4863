"""What a decode step costs at least: bytes over bandwidths and products over their speed, from shapes alone.

`traffic` counts what one request moves in one step under an algorithm, exactly, from the bytes of its rows and
representations; `step_time` turns that into seconds. How often a selected item is on the device already is an input:
no model knows it. A real step lies above these figures by launches, queues and all work that is not overlapped.

Bytes of a request of n tokens (L layers, k selected tokens, t bytes of a token and layer, miss = 1 - hit rate):

| algorithm | device memory | link to the host |
|---|---|---|
| full | n·t·L | 0 |
| full_offload | 2·n·t·L (written, read) | n·t·L |
| oracle | keys of all n, then as dsa | as dsa |
| dsa | index keys of all n; k·t·L read; misses written | k·t·L·miss |
| quest | bounds of all pages, in sparse layers; as dsa, and n·t in dense layers | as dsa, in sparse layers |
| snapkv, streaming_llm | the kept tokens | 0 |
| retroinfer | centroids, estimated part of the index; attended KV three times (gathered, read) | retrieved·miss |
| pqcache | codes of all n twice (written, read), centroids; attended KV likewise | codes of all n, retrieved·miss |

Missed clusters are also copied into RetroInfer's cache. Whole blocks that PQCache loads into its cache beside the next
layers are not counted: how many is a trace's affair. `wave_traffic` is the estimate of a wave index that its paper's
figures are compared with: no steady zone, and retrieved tokens count twice.

Products: scores of the representations and attention, 2 per multiply-add. An algorithm whose KV stays on the device
(`residency="device"`) moves nothing over the link, but PQCache its codes.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcm.gpu_tier.config import (
    DsaConfig,
    OracleConfig,
    PQCacheConfig,
    QuestConfig,
    RetroInferConfig,
    SnapKVConfig,
    SparseConfig,
    StreamingLLMConfig,
)
from kvcm.gpu_tier.errors import ConfigError
from kvcm.gpu_tier.eval.model_shapes import Device, ModelShape
from kvcm.gpu_tier.geometry import KVGeometry

__all__ = [
    "StepTime",
    "Traffic",
    "index_key_bytes",
    "pq_budget",
    "pq_code_bytes",
    "pq_index_bytes",
    "quest_bound_bytes",
    "selected_tokens",
    "skip_layers",
    "step_time",
    "traffic",
    "wave_block_tokens",
    "wave_cache_tokens",
    "wave_execution_tokens",
    "wave_index_bytes",
    "wave_retrieved",
    "wave_store_tokens",
    "wave_traffic",
]

# How much RetroInfer and PQCache keep, and where, from shapes and settings alone.
#
# Figures of a wave index are those right after its prompt was clustered: until `update_segment` tokens were decoded
# these are steady too. Clusters have `tokens_per_centroid` tokens on average, and retrieved clusters are counted by
# that.

_CLUSTERS_OF_A_PAGE = 64
_ELEMENT_BYTES = 2  # centroids, value sums and PQ centroids are 16 bits wide
_LOG_SIZE_BYTES = 4


def _wave_clusters(settings: RetroInferConfig, n_tokens: int) -> int:
    """Return the clusters of a prompt of so many tokens, of each layer and head; 0 while all of it is steady."""
    if n_tokens < settings.unindexed:
        return 0
    full, rest = divmod(n_tokens - settings.sink - settings.local, settings.segment)
    per = settings.tokens_per_centroid
    return full * max(1, round(settings.segment / per)) + (max(1, round(rest / per)) if rest else 0)


def wave_retrieved(settings: RetroInferConfig, n_tokens: int) -> int:
    """Return the tokens that a head retrieves in a step."""
    clusters = _wave_clusters(settings, n_tokens)
    return max(1, round(settings.retrieval * clusters)) * settings.tokens_per_centroid if clusters else 0


def wave_execution_tokens(settings: RetroInferConfig, n_tokens: int) -> int:
    """Return the tokens of the execution buffer of a row: the steady zone at its longest, and the clusters."""
    return settings.unindexed + settings.exec_factor * wave_retrieved(settings, n_tokens)


def wave_index_bytes(geometry: KVGeometry, settings: RetroInferConfig, n_tokens: int) -> int:
    """Return the bytes of the meta index: pages of 64 clusters with centroid, value sum and log of the size.

    They are set aside for the most clusters that so many tokens can have.
    """
    if n_tokens < settings.unindexed:
        return 0
    most = -(-(n_tokens - settings.sink - settings.local) // settings.tokens_per_centroid)
    numbers = geometry.head_dim + geometry.v_head_dim
    page = geometry.num_kv_heads * _CLUSTERS_OF_A_PAGE * (_ELEMENT_BYTES * numbers + _LOG_SIZE_BYTES)
    return -(-most // _CLUSTERS_OF_A_PAGE) * page * geometry.num_layers


def wave_block_tokens(geometry: KVGeometry, settings: RetroInferConfig) -> int:
    """Return the tokens of a block."""
    return max(1, settings.block_bytes // geometry.parts[0].row_bytes)


def wave_cache_tokens(geometry: KVGeometry, settings: RetroInferConfig, n_tokens: int) -> int:
    """Return the places of the block cache, in each layer and head."""
    block = wave_block_tokens(geometry, settings)
    return int(settings.cache_ratio * n_tokens / block) * block


def wave_store_tokens(geometry: KVGeometry, settings: RetroInferConfig, n_tokens: int) -> int:
    """Return the tokens for which host memory is set aside, per layer and head: every cluster may waste a block."""
    clusters = _wave_clusters(settings, n_tokens)
    if not clusters:
        return 0
    block = wave_block_tokens(geometry, settings)
    return ((n_tokens - settings.sink - settings.local) // block + clusters) * block


def pq_budget(settings: PQCacheConfig, n_tokens: int) -> tuple[int, int]:
    """Return (steady tokens, retrieved tokens) of a step, for a prompt of so many tokens."""
    local, top = settings.budget(n_tokens)
    steady = min(n_tokens, settings.init + local)
    return steady, min(top, n_tokens - steady)


def pq_index_bytes(geometry: KVGeometry, settings: PQCacheConfig, n_tokens: int) -> int:
    """Return the bytes on the device that tokens are scored by.

    These are the centroids of all layers, the codes of two layers (one is scored while the next one's arrive), in
    pages, and of every layer the page that codes are being added to.
    """
    page = pq_code_bytes(geometry, settings, geometry.page_size, n_tokens)
    pages = 2 * -(-n_tokens // geometry.page_size) + geometry.num_layers
    return _pq_centroid_bytes(geometry, settings, n_tokens) + pages * page


def pq_code_bytes(geometry: KVGeometry, settings: PQCacheConfig, coded: int, n_tokens: int) -> int:
    """Return the bytes of the codes of so many tokens of one layer: a byte for each sub-vector, token and head.

    Args:
        geometry: of the KV.
        settings: of the algorithm.
        coded: tokens that have codes.
        n_tokens: most tokens of a request, which decide how fine codes are.
    """
    return coded * geometry.num_kv_heads * settings.quantisation(n_tokens)[0]


def _pq_centroid_bytes(geometry: KVGeometry, settings: PQCacheConfig, n_tokens: int) -> int:
    """Return the bytes of all layers' centroids: 2^b keys' worth for each head."""
    bits = settings.quantisation(n_tokens)[1]
    return (geometry.head_dim << bits) * geometry.num_kv_heads * geometry.num_layers * _ELEMENT_BYTES


_WAVE_TOKENS_PER_CENTROID = 16


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one request moves and computes in one decode step, all layers.

    Attributes:
        hbm_bytes: read from and written to device memory.
        link_bytes: from host memory.
        flops: of scores and attention.
    """

    hbm_bytes: float
    link_bytes: float
    flops: float

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.hbm_bytes + other.hbm_bytes, self.link_bytes + other.link_bytes, self.flops + other.flops
        )  # fmt: skip

    def times(self, factor: float) -> Traffic:
        """Return the traffic of so many requests."""
        return Traffic(self.hbm_bytes * factor, self.link_bytes * factor, self.flops * factor)


@dataclass(frozen=True, slots=True)
class StepTime:
    """The parts of a step's time, in seconds.

    Attributes:
        weights: products with the weights, the larger of reading and computing them.
        attention: scores and attention, likewise.
        link: misses.
        overhead: of launches, as the device says.
    """

    weights: float
    attention: float
    link: float
    overhead: float

    @property
    def serial(self) -> float:
        """Nothing overlaps: what a layer selects is known only once the layer runs."""
        return self.weights + self.attention + self.link + self.overhead

    @property
    def overlapped(self) -> float:
        """The link is busy beside everything else: no schedule is faster."""
        return max(self.weights + self.attention + self.overhead, self.link)


def selected_tokens(config: SparseConfig, n_tokens: int) -> int:
    """Return how many tokens a row attends to in a sparse layer."""
    return min(n_tokens, _budget(config, n_tokens))


def _budget(config: SparseConfig, n_tokens: int) -> int:
    match config.algo:
        case DsaConfig():
            return config.top_k
        case OracleConfig(k=k, ratio=ratio):
            return k if ratio is None else max(1, round(ratio * n_tokens))
        case QuestConfig(token_budget=budget, sparsity_ratio=ratio, page=page):
            return -(-(budget if ratio is None else min(budget, round(ratio * n_tokens))) // page) * page
        case SnapKVConfig(cap=cap, ratio=ratio):
            return cap if ratio is None else max(1, round(ratio * n_tokens))
        case StreamingLLMConfig(sink=sink, window=window, page=page):
            return -(-sink // page) * page + -(-window // page) * page
        case RetroInferConfig() as wave:
            return wave.sink + wave.local + wave_retrieved(wave, n_tokens)
        case PQCacheConfig() as pq:
            return sum(pq_budget(pq, n_tokens))
    return n_tokens


def skip_layers(config: SparseConfig, geometry: KVGeometry) -> int:
    """Return how many layers attend densely and keep all their KV on the device."""
    return min(config.algo.skip_layers, geometry.num_layers) if isinstance(config.algo, QuestConfig) else 0


def index_key_bytes(config: DsaConfig) -> int:
    """Bytes of one index key: e4m3 numbers and an f32 scale."""
    return config.index_dim + 4


def quest_bound_bytes(geometry: KVGeometry) -> int:
    """Bytes of one page's bounds in one layer: least and greatest key of each head, in bf16."""
    return 2 * geometry.num_kv_heads * geometry.head_dim * 2


def _scoring(shape: ModelShape, config: SparseConfig, n_tokens: int) -> Traffic:
    geometry, layers = shape.geometry, shape.geometry.num_layers - skip_layers(config, shape.geometry)
    match config.algo:
        case DsaConfig(index_heads=heads, index_dim=dim) as dsa:
            return Traffic(n_tokens * index_key_bytes(dsa) * layers, 0, 2 * n_tokens * heads * dim * layers)
        case QuestConfig(page=page):
            pages = -(-n_tokens // page)
            flops = 4 * pages * shape.num_q_heads * geometry.head_dim * layers
            return Traffic(pages * quest_bound_bytes(geometry) * layers, 0, flops)
        case OracleConfig():
            rows = n_tokens * geometry.num_kv_heads * geometry.parts[0].row_bytes
            return Traffic(rows * layers, 0, 2 * n_tokens * shape.num_q_heads * geometry.head_dim * layers)
        case RetroInferConfig() as wave:
            return _wave_scoring(shape, wave, n_tokens)
        case PQCacheConfig() as pq:
            return _pq_scoring(shape, pq, n_tokens)
    return Traffic(0, 0, 0)


def _wave_scoring(shape: ModelShape, settings: RetroInferConfig, n_tokens: int) -> Traffic:
    """Return the traffic of ranking all clusters and estimating some."""
    geometry, clusters = shape.geometry, _wave_clusters(settings, n_tokens)
    estimated = round(settings.estimation * clusters)
    centroid, values = 2 * geometry.head_dim, 2 * geometry.v_head_dim
    index = clusters * centroid + estimated * (centroid + values + 4)
    products = clusters * geometry.head_dim + estimated * (geometry.head_dim + geometry.v_head_dim)
    layers = geometry.num_layers
    return Traffic(index * geometry.num_kv_heads * layers, 0, 2 * products * shape.num_q_heads * layers)


def _pq_scoring(shape: ModelShape, settings: PQCacheConfig, n_tokens: int) -> Traffic:
    """Return the traffic of tables and scores; codes come from the host for every layer, into one of two buffers."""
    geometry = shape.geometry
    m, bits = settings.quantisation(n_tokens)
    codes = pq_code_bytes(geometry, settings, n_tokens, n_tokens) * geometry.num_layers
    centroids = 2 * (geometry.head_dim << bits) * geometry.num_kv_heads * geometry.num_layers
    products = (geometry.head_dim << bits) + n_tokens * m / 2  # a score is a sum of m entries of the tables
    return Traffic(2 * codes + centroids, codes, 2 * products * shape.num_q_heads * geometry.num_layers)


def _attention(shape: ModelShape, tokens: int, layers: int) -> Traffic:
    geometry = shape.geometry
    flops = 2 * tokens * shape.num_q_heads * (geometry.head_dim + geometry.v_head_dim) * layers
    return Traffic(tokens * geometry.token_layer_bytes * layers, 0, flops)


def traffic(shape: ModelShape, config: SparseConfig, n_tokens: int, hit_rate: float) -> Traffic:
    """Return what one request of `n_tokens` moves in one decode step.

    Args:
        shape: of the model.
        config: algorithm, its budget and where its KV is.
        n_tokens: tokens of the request; below `min_sparse_prompt_len` it attends densely, from the device.
        hit_rate: share of the selected items that the device holds already.

    Raises:
        ConfigError: a length or a rate that cannot be.
    """
    if n_tokens < 1:
        raise ConfigError("n_tokens", n_tokens, "must be at least 1")
    if not 0 <= hit_rate <= 1:
        raise ConfigError("hit_rate", hit_rate, "must be from 0 to 1")
    geometry = shape.geometry
    if config.residency == "stream":
        streamed = n_tokens * geometry.token_bytes
        return _attention(shape, n_tokens, geometry.num_layers) + Traffic(streamed, streamed, 0)
    if config.algorithm == "full" or n_tokens < config.min_sparse_prompt_len:
        return _attention(shape, n_tokens, geometry.num_layers)
    skipped = skip_layers(config, geometry)
    sparse = geometry.num_layers - skipped
    tokens = selected_tokens(config, n_tokens)
    dense = _attention(shape, n_tokens, skipped)
    return (
        _scoring(shape, config, n_tokens)
        + _attention(shape, tokens, sparse)
        + dense
        + _movement(geometry, config, n_tokens, hit_rate, sparse)
    )


def _movement(geometry: KVGeometry, config: SparseConfig, n_tokens: int, hit_rate: float, layers: int) -> Traffic:
    """Return the bytes loaded and gathered before attention reads it."""
    if not _loads(config):
        return Traffic(0, 0, 0)
    tokens = selected_tokens(config, n_tokens)
    row = geometry.token_layer_bytes * layers
    if config.residency == "lru":
        loaded = tokens * row * (1 - hit_rate)
        return Traffic(loaded, loaded, 0)
    steady = min(tokens, _steady_tokens(config, n_tokens))
    missed = (tokens - steady) * (1 - hit_rate)
    # Read where it lies unless it comes over the link, written to the buffer; a missed cluster is copied to the cache.
    admitted = 2 * missed if isinstance(config.algo, RetroInferConfig) and config.algo.cache_ratio else 0.0
    return Traffic((2 * tokens - missed + admitted) * row, missed * row, 0)


def _steady_tokens(config: SparseConfig, n_tokens: int) -> int:
    match config.algo:
        case RetroInferConfig(sink=sink, local=local):
            return sink + local
        case PQCacheConfig() as pq:
            return pq_budget(pq, n_tokens)[0]
    return 0


def _loads(config: SparseConfig) -> bool:
    retrieves = isinstance(config.algo, DsaConfig | QuestConfig | OracleConfig | PQCacheConfig | RetroInferConfig)
    return retrieves and config.residency in ("lru", "blocks", "auto")


def wave_traffic(
    shape: ModelShape, n_tokens: int, hit_rate: float, retrieval: float = 0.018, estimation: float = 0.232
) -> Traffic:
    """Return what a request moves under a wave index (RetroInfer): one centroid for 16 tokens.

    Device memory: all centroids for ranking, the estimated part of the index, and the retrieved KV twice (gathered,
    read). Link: the retrieved KV that the block cache lacks.
    """
    geometry = shape.geometry
    heads = geometry.num_kv_heads * geometry.num_layers
    clusters = n_tokens / _WAVE_TOKENS_PER_CENTROID * heads
    centroid = geometry.parts[0].row_bytes
    retrieved = retrieval * n_tokens * geometry.token_bytes
    index = clusters * (centroid + geometry.parts[-1].row_bytes + 4)
    flops = (
        4 * (clusters + retrieval * n_tokens * heads) * geometry.head_dim * shape.num_q_heads / geometry.num_kv_heads
    )
    return Traffic(clusters * centroid + estimation * index + 2 * retrieved, retrieved * (1 - hit_rate), flops)


def step_time(shape: ModelShape, device: Device, request: Traffic, batch: int, sparse_layers: int = 0) -> StepTime:
    """Return the time of a decode step.

    Args:
        shape: of the model.
        device: that it runs on.
        request: traffic of one of its requests.
        batch: requests, all alike.
        sparse_layers: layers that pay `Device.layer_overhead_seconds`.
    """
    if batch < 1:
        raise ConfigError("batch", batch, "must be at least 1")
    total = request.times(batch)
    read = shape.step_weight_bytes(batch) / device.hbm_bytes_per_second
    computed = 2 * shape.active_params * batch / device.flops_per_second
    attention = max(total.hbm_bytes / device.hbm_bytes_per_second, total.flops / device.flops_per_second)
    link = total.link_bytes / (device.link_bytes_per_second * device.link_efficiency)
    return StepTime(max(read, computed), attention, link, sparse_layers * device.layer_overhead_seconds)
