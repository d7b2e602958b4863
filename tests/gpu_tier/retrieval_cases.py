"""Settings of RetroInfer and PQCache, small enough that requests of some dozens of tokens have an index."""

from __future__ import annotations

from typing import Any

__all__ = ["BLOCKS", "CASES", "PQ", "WAVE"]

WAVE: dict[str, Any] = {
    "sink": 4, "local": 6, "segment": 32, "update_segment": 8, "tokens_per_centroid": 4, "retrieval": 0.2,
    "estimation": 0.3, "block_bytes": 128, "cache_ratio": 0.25, "cpu_threads": 2,
}  # fmt: skip
PQ: dict[str, Any] = {
    "m": 2, "b": 3, "init": 4, "token_budget": 16, "cache_tokens": 16, "block": 4, "k_cache": 3, "iterations": 3,
    "kmeans_threads": 1,
}  # fmt: skip

BLOCKS: dict[str, dict[str, Any]] = {
    "retroinfer": {"algorithm": "retroinfer", "algo": WAVE},
    "retroinfer gpu control": {"algorithm": "retroinfer", "algo": {**WAVE, "control": "gpu"}},
    "pqcache": {"algorithm": "pqcache", "algo": PQ},
}
"""Those whose residency is `blocks`."""

CASES: dict[str, dict[str, Any]] = {
    **BLOCKS,
    "retroinfer device": {"algorithm": "retroinfer", "algo": {**WAVE, "mode": "gpu_only"}},
    "pqcache lru": {"algorithm": "pqcache", "algo": PQ, "residency": "lru", "device_buffer_size": 48},
    "pqcache device": {"algorithm": "pqcache", "algo": PQ, "residency": "device"},
}
