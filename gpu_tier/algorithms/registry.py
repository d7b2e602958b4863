"""Maps the names of algorithms to their classes."""

from __future__ import annotations

from kvcm.gpu_tier.algorithms.base import AlgorithmContext, BaseSparseAlgorithm
from kvcm.gpu_tier.algorithms.dsa import DSA
from kvcm.gpu_tier.algorithms.full import FullAttention
from kvcm.gpu_tier.algorithms.oracle import Oracle
from kvcm.gpu_tier.algorithms.pqcache import PQCache
from kvcm.gpu_tier.algorithms.quest import Quest
from kvcm.gpu_tier.algorithms.retroinfer import RetroInfer
from kvcm.gpu_tier.algorithms.snapkv import SnapKV
from kvcm.gpu_tier.algorithms.streaming_llm import StreamingLLM
from kvcm.gpu_tier.errors import ConfigError

__all__ = ["ALGORITHMS", "make"]

ALGORITHMS: dict[str, type[BaseSparseAlgorithm]] = {
    "full": FullAttention,
    "full_offload": FullAttention,
    "oracle": Oracle,
    "streaming_llm": StreamingLLM,
    "dsa": DSA,
    "quest": Quest,
    "snapkv": SnapKV,
    "pqcache": PQCache,
    "retroinfer": RetroInfer,
}


def make(context: AlgorithmContext) -> BaseSparseAlgorithm:
    """Return the algorithm that the settings name.

    Raises:
        ConfigError: nothing is registered under the name, or the settings do not fit the model.
    """
    heads, kv_heads = context.num_q_heads, context.geometry.num_kv_heads
    if heads < 1 or heads % kv_heads:
        raise ConfigError("num_q_heads", heads, f"must be a multiple of the {kv_heads} KV heads")
    name = context.config.algorithm
    if name not in ALGORITHMS:
        raise ConfigError.choice("algorithm", name, ALGORITHMS)
    return ALGORITHMS[name](context)
