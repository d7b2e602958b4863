"""How much RetroInfer and PQCache keep, and where, from shapes and settings alone.

Figures of a wave index are those right after its prompt was clustered: until `update_segment` tokens were decoded these
are steady too. Clusters have `tokens_per_centroid` tokens on average, and what is retrieved is counted by that.
"""

from __future__ import annotations

from gpu_tier.config import PQCacheConfig, RetroInferConfig
from gpu_tier.geometry import KVGeometry

__all__ = [
    "pq_budget", "pq_centroid_bytes", "pq_code_bytes", "pq_index_bytes", "wave_block_tokens", "wave_cache_tokens",
    "wave_clusters", "wave_index_bytes", "wave_retrieved", "wave_room", "wave_store_tokens",
]  # fmt: skip

_CLUSTERS_OF_A_PAGE = 64
_ELEMENT_BYTES = 2  # centroids, value sums and PQ centroids are 16 bits wide
_LOG_SIZE_BYTES = 4


def wave_clusters(settings: RetroInferConfig, n_tokens: int) -> int:
    """Return the clusters of a prompt of so many tokens, of each layer and head; 0 while all of it is steady."""
    if n_tokens < settings.unindexed:
        return 0
    full, rest = divmod(n_tokens - settings.sink - settings.local, settings.segment)
    per = settings.tokens_per_centroid
    return full * max(1, round(settings.segment / per)) + (max(1, round(rest / per)) if rest else 0)


def wave_retrieved(settings: RetroInferConfig, n_tokens: int) -> int:
    """Return the tokens that a head retrieves in a step."""
    clusters = wave_clusters(settings, n_tokens)
    return max(1, round(settings.retrieval * clusters)) * settings.tokens_per_centroid if clusters else 0


def wave_room(settings: RetroInferConfig, n_tokens: int) -> int:
    """Return the tokens of the execution buffer of a row: the steady zone at its longest, and room for clusters."""
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
    clusters = wave_clusters(settings, n_tokens)
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
    return pq_centroid_bytes(geometry, settings, n_tokens) + pages * page


def pq_code_bytes(geometry: KVGeometry, settings: PQCacheConfig, coded: int, n_tokens: int) -> int:
    """Return the bytes of the codes of so many tokens of one layer: a byte for each sub-vector, token and head.

    Args:
        geometry: of the KV.
        settings: of the algorithm.
        coded: tokens that have codes.
        n_tokens: most tokens of a request, which decide how fine codes are.
    """
    return coded * geometry.num_kv_heads * settings.quantisation(n_tokens)[0]


def pq_centroid_bytes(geometry: KVGeometry, settings: PQCacheConfig, n_tokens: int) -> int:
    """Return the bytes of all layers' centroids: 2^b keys' worth for each head."""
    bits = settings.quantisation(n_tokens)[1]
    return (geometry.head_dim << bits) * geometry.num_kv_heads * geometry.num_layers * _ELEMENT_BYTES
