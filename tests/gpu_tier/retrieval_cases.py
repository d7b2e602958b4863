"""Settings of all algorithms, small enough that requests of some dozens of tokens are sparse and have an index."""

from __future__ import annotations

from typing import Any

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

INDEXER = {"index_heads": 4, "index_dim": 16}
QUEST = {"page": 4, "token_budget": 24, "skip_layers": 1}
SNAPKV = {"w_obs": 4, "cap": 16, "kernel": 3}

ALGORITHMS: dict[str, dict[str, Any]] = {
    "full": {"algorithm": "full"},
    "full_offload": {"algorithm": "full_offload", "algo": {"chunk_tokens": 24}},
    "oracle": {"algorithm": "oracle", "algo": {"k": 16}},
    "quest": {"algorithm": "quest", "algo": QUEST},
    "quest per head": {"algorithm": "quest", "algo": {**QUEST, "skip_layers": 0, "heads": "per_head"}},
    "streaming_llm": {"algorithm": "streaming_llm", "algo": {"page": 4, "window": 16}},
    "dsa": {"algorithm": "dsa", "top_k": 16, "min_sparse_prompt_len": 16, "algo": INDEXER},
    "snapkv": {"algorithm": "snapkv", "algo": SNAPKV},
    "snapkv retrievable": {"algorithm": "snapkv", "algo": {**SNAPKV, "mode": "retrievable", "reselect_every": 5}},
}
"""Those without an index in host memory."""
