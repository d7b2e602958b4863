"""How much memory a request takes on the device and on the host: every byte that grows with requests.

On the device these are the buffer (or the whole KV), the representations, the layers that stay dense, and the tables
and the state of the buffer. Statements such as "200 MB per request" for a 128K request of DeepSeek-V3.2 leave out its
index keys, which take 1.06 GB; these do not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from gpu_tier.config import (
    DsaConfig,
    OracleConfig,
    PQCacheConfig,
    QuestConfig,
    RetroInferConfig,
    SnapKVConfig,
    SparseConfig,
)
from gpu_tier.eval.model_shapes import ModelShape
from gpu_tier.eval.retrieval_bytes import (
    pq_budget,
    pq_code_bytes,
    pq_index_bytes,
    wave_cache_tokens,
    wave_index_bytes,
    wave_room,
    wave_store_tokens,
)
from gpu_tier.eval.roofline import index_key_bytes, quest_bound_bytes, selected_tokens, skip_layers
from gpu_tier.geometry import KVGeometry

__all__ = ["Footprint", "footprint"]

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
        return Footprint(paged, 0, 0, 4 * n_tokens, 0)
    if config.residency == "stream":
        # Two pieces of one layer are shared by all requests: `plan` counts them once.
        return Footprint(0, 0, 0, 12 * n_tokens, paged)
    representations = representation_bytes(shape, config, n_tokens)
    if config.residency == "device":
        return Footprint(
            paged, 0, representations, _resident_tables(geometry, config, n_tokens), _codes(shape, config, n_tokens)
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
    room = execution_tokens(config, n_tokens)
    return Footprint(
        kv=_pages(geometry, block_places(geometry, config, n_tokens)) * geometry.page_bytes,
        dense_layers=0,
        representations=representations,
        tables=4 * n_tokens + 4 * geometry.num_kv_heads * room,
        host=_host_of_blocks(geometry, config, n_tokens) + _codes(shape, config, n_tokens),
        execution=room * geometry.token_layer_bytes,
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


def execution_tokens(config: SparseConfig, n_tokens: int) -> int:
    """Return the tokens of a row of the execution buffer, in whole pages."""
    match config.algo:
        case RetroInferConfig() as wave:
            tokens = wave_room(wave, n_tokens)
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
