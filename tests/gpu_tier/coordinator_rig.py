"""Small models with coordinators of their own, and settings under which algorithms leave nothing out."""

from __future__ import annotations

import random
from typing import Any

from retrieval_cases import PQ, WAVE

from kvcm.gpu_tier.assembly import build
from kvcm.gpu_tier.config import SparseConfig
from kvcm.gpu_tier.coordinator import SparseCoordinator
from kvcm.gpu_tier.engine.decoder_models import LatentDecoder, LatentShape, LlamaDecoder, LlamaShape
from kvcm.gpu_tier.geometry import KVDtype, KVGeometry

MODELS = {"llama": LlamaDecoder.random(LlamaShape()), "latent": LatentDecoder.random(LatentShape())}
PAGE = 16

# With these settings each algorithm attends to every token of at most 160.
WHOLE: dict[str, dict[str, Any]] = {
    "full": {},
    "full_offload": {"algo": {"chunk_tokens": 48}},
    "oracle": {"top_k": 160, "device_buffer_size": 160, "algo": {"k": 160}},
    "streaming_llm": {"top_k": 192, "device_buffer_size": 192, "algo": {"window": 160}},
    "quest": {"top_k": 160, "device_buffer_size": 160, "algo": {"token_budget": 160, "skip_layers": 1}},
    "dsa": {"top_k": 160, "device_buffer_size": 160, "algo": {"index_heads": 4, "index_dim": 32}},
    "snapkv": {"algo": {"cap": 160, "w_obs": 8}},
    "retroinfer": {"algo": {**WAVE, "retrieval": 1.0, "estimation": 0.0, "local": 16}},
    "pqcache": {"algo": {**PQ, "token_budget": 160, "cache_tokens": 64, "block": 16}},
}


def whole(algorithm: str, *, has_indexer: bool = False) -> dict[str, Any]:
    """Return the settings of `WHOLE` for a model with an indexer of its own or without."""
    if algorithm == "dsa" and not has_indexer:
        return {**WHOLE["dsa"], "algo": {"index_source": "proxy"}}
    return WHOLE[algorithm]


def config_of(algorithm: str, settings: dict[str, Any], **changes: Any) -> SparseConfig:
    """Return settings under which every request of at least one token is sparse, unless they say otherwise."""
    base = {"algorithm": algorithm, "page_size": PAGE, "min_sparse_prompt_len": 1, "debug_checks": True}
    return SparseConfig.parse(base | settings | changes)


def coordinator_of(
    model: Any, config: SparseConfig, pages: int = 200, dtype: KVDtype = KVDtype.F32, **options: Any
) -> SparseCoordinator:
    """Return a coordinator for eight requests of at most 256 tokens; `options` are other arguments of `build`."""
    geometry = KVGeometry(
        model.kind, model.num_layers, model.num_kv_heads, model.head_dim, model.v_head_dim, dtype, PAGE
    )
    sizes: dict[str, Any] = {"device_pages": pages, "max_requests": 8, "max_tokens": 256} | options
    return build(config, geometry, num_q_heads=model.num_q_heads, sm_scale=model.sm_scale, **sizes)


def nothing_is_held(coordinator: SparseCoordinator) -> bool:
    """Whether every page is free."""
    manager = coordinator.manager
    return manager.device.allocator.in_use == 0 and manager.host.allocator.in_use == 0


def prompt(length: int, seed: int = 0) -> list[int]:
    """Return random tokens."""
    return random.Random(seed).choices(range(128), k=length)
