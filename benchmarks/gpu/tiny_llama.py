"""A model of Llama's shape, and settings, so small that a smoke run on a CPU takes seconds."""

from __future__ import annotations

from kvcm.gpu_tier.config import PQCacheConfig, RetroInferConfig
from kvcm.gpu_tier.eval.model_shapes import ModelShape
from kvcm.gpu_tier.geometry import KVDtype, KVGeometry, KVKind

__all__ = ["TINY_LLAMA", "TINY_PAGE", "TINY_PQ", "TINY_WAVE"]

TINY_PAGE = 8
TINY_LLAMA = ModelShape(
    "tiny", KVGeometry(KVKind.MHA, 4, 2, 16, 16, KVDtype.BF16, TINY_PAGE), 4, 1 << 20, 1 << 20, 1 << 19
)
TINY_WAVE = RetroInferConfig(
    local=8, segment=64, update_segment=32, tokens_per_centroid=8, iterations=0, retrieval=0.1, estimation=0.2,
    exec_factor=8, block_bytes=128, cache_ratio=0.4,
)  # fmt: skip
TINY_PQ = PQCacheConfig(
    m=2, b=3, init=4, token_ratio=0.3, iterations=1, cache_tokens=32, block=8, k_cache=4, kmeans_device="device"
)
