"""Settings of the algorithms that retrieve through an index: RetroInfer and PQCache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpu_tier.algorithm_config import AlgorithmConfig
from gpu_tier.errors import ConfigError
from gpu_tier.setting_checks import at_least, choice, ratio

if TYPE_CHECKING:
    from gpu_tier.config import SparseConfig

__all__ = ["CACHE_POLICIES", "PQCacheConfig", "RetroInferConfig"]

CACHE_POLICIES = ("lru", "lfu", "fifo", "random")
"""Orders in which a block cache gives up blocks; random is for tests: results must not depend on the order."""


@dataclass(frozen=True, slots=True)
class RetroInferConfig(AlgorithmConfig):
    """Attention over retrieved clusters and an estimate of the others (RetroInfer, PVLDB 19(5), 2026).

    Attributes:
        sink: first tokens of the steady zone.
        local: last tokens that are always steady.
        segment: prompt tokens that are clustered together.
        tokens_per_centroid: tokens of a cluster, on average.
        iterations: of k-means.
        center: what is subtracted from keys before they are clustered: the mean of their segment, that of the prompt,
            or none.
        final_assign: whether tokens belong to the nearest centroid of their segment or of all segments (global).
        rank: how the query heads of a KV head rank clusters: sum_softmax or max_ip.
        retrieval: share of the clusters whose tokens are attended to exactly.
        estimation: share of the clusters whose attention is estimated; with 1 all that are not retrieved.
        update_segment: decoded tokens that are clustered together.
        exec_factor: tokens of the execution buffer per head, in those of the retrieved clusters on average; what does
            not fit is estimated.
        block_bytes: bytes of the keys of a block of the host's store and of the cache.
        cache_ratio: share of a request's KV that the cache on the device holds; 0 for none. With control='gpu' it is
            that share of the longest request for all of them, and at least as much as a step can select.
        policy: which clusters the cache gives up: one of `CACHE_POLICIES`.
        control: where the cache is looked up and updated: cpu, as in the paper, or gpu (LRU diff over blocks).
        cpu_threads: threads of the control on the CPU, at most as many as there are cores.
        async_update: whether the cache is updated beside attention, and not before it.
        mode: offload (KV in host memory), gpu_only (all KV on the device) or auto (gpu_only if all requests fit).
    """

    sink: int = 4
    local: int = 64
    segment: int = 8192
    tokens_per_centroid: int = 16
    iterations: int = 10
    center: str = "segment"
    final_assign: str = "segment"
    rank: str = "sum_softmax"
    retrieval: float = 0.018
    estimation: float = 0.232
    update_segment: int = 1024
    exec_factor: int = 4
    block_bytes: int = 2048
    cache_ratio: float = 0.05
    policy: str = "lru"
    control: str = "cpu"
    cpu_threads: int = 24
    async_update: bool = True
    mode: str = "offload"

    def __post_init__(self) -> None:
        at_least(self, 0, "sink", "iterations")
        at_least(self, 1, "local", "segment", "tokens_per_centroid", "update_segment", "exec_factor", "block_bytes")
        at_least(self, 1, "cpu_threads")
        ratio(self, "retrieval")
        choice(self, "center", ("segment", "prompt", "none"))
        choice(self, "final_assign", ("segment", "global"))
        choice(self, "rank", ("sum_softmax", "max_ip"))
        choice(self, "policy", CACHE_POLICIES)
        choice(self, "control", ("cpu", "gpu"))
        choice(self, "mode", ("offload", "gpu_only", "auto"))
        _share(self, "estimation", "cache_ratio")
        if self.control == "gpu" and self.policy != "lru":
            raise ConfigError("policy", self.policy, "control='gpu' has an LRU cache only")
        if self.segment % self.tokens_per_centroid or self.update_segment % self.tokens_per_centroid:
            values = (self.segment, self.update_segment)
            allowed = f"must be multiples of tokens_per_centroid={self.tokens_per_centroid}"
            raise ConfigError("segment, update_segment", values, allowed)

    @property
    def unindexed(self) -> int:
        """Tokens of a request that are steady before the first of them are clustered."""
        return self.sink + self.local + self.update_segment

    def default_residency(self) -> str:
        """Return the residency of the mode."""
        return {"offload": "blocks", "gpu_only": "device", "auto": "auto"}[self.mode]

    def selected_tokens(self, config: SparseConfig) -> int:
        """Return the steady zone; what is retrieved lies in the execution buffer."""
        return self.unindexed

    def keeps_host_copy(self) -> bool:
        """Return False: clusters are kept in a store of their own."""
        return False

    def min_sparse_prompt_len(self, _config: SparseConfig) -> int:
        """Return the tokens from which there is an index."""
        return self.unindexed

    def sidecar_settings(self) -> dict[str, Any]:
        """Return what the clusters of a whole segment follow from; zones, cache and threads are each engine's own."""
        names = ("sink", "segment", "tokens_per_centroid", "iterations", "center", "final_assign")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True)
class PQCacheConfig(AlgorithmConfig):
    """Top tokens by product-quantised keys (PQCache, SIGMOD 2025).

    Attributes:
        m: sub-vectors of a key; 0 means 2 where requests have up to 16384 tokens, else 4.
        b: bits of a code; 0 means 6 or 8 likewise.
        init: first tokens that are always attended to.
        token_ratio: share of a prompt's tokens that are attended to, `init` aside.
        token_budget: tokens instead of `token_ratio`; 0 for none.
        local_ratio: share of these that are the last ones; the others are retrieved.
        iterations: of k-means; 0 means as many as fit beside the computation of a layer (equations 1 to 3).
        min_iterations: fewest of them.
        max_iterations: most of them.
        profile: JSON with the fitted coefficients of this machine; "" measures them when first needed.
        cache_tokens: tokens of a request's cache on the device, per layer; 0 for none.
        block: tokens of a block of the cache.
        k_cache: blocks with the most selected tokens that are cached after a step; at most those of the cache. Of
            single tokens (cache_unit) as many of each head as these blocks have, the first selected ones.
        cache_unit: block, or token for a cache of single selected tokens.
        policy: which blocks the cache gives up: one of `CACHE_POLICIES`.
        kmeans_device: cpu, or device for the device that attention runs on.
        kmeans_threads: threads of clustering on the CPU, at most as many as there are cores.
        turns: what a prompt that continues an indexed prefix does: extend (codes of the old centroids), per_turn
            (centroids of its own), rebuild (new centroids for all).
        rebuild_every: decoded tokens after which all is clustered anew; 0 never.
        seed: of the first centroids.
    """

    m: int = 0
    b: int = 0
    init: int = 32
    token_ratio: float = 0.2
    token_budget: int = 0
    local_ratio: float = 0.5
    iterations: int = 0
    min_iterations: int = 3
    max_iterations: int = 300
    profile: str = ""
    cache_tokens: int = 4096
    block: int = 128
    k_cache: int = 32
    cache_unit: str = "block"
    policy: str = "lru"
    kmeans_device: str = "cpu"
    kmeans_threads: int = 4
    turns: str = "extend"
    rebuild_every: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        at_least(self, 0, "m", "b", "init", "token_budget", "iterations", "cache_tokens", "rebuild_every", "seed")
        at_least(self, 1, "min_iterations", "block", "k_cache", "kmeans_threads")
        at_least(self, self.min_iterations, "max_iterations")
        ratio(self, "token_ratio", "local_ratio")
        choice(self, "cache_unit", ("block", "token"))
        choice(self, "policy", CACHE_POLICIES)
        choice(self, "kmeans_device", ("cpu", "device"))
        choice(self, "turns", ("extend", "per_turn", "rebuild"))
        if self.b > 8:
            raise ConfigError("b", self.b, "codes are bytes: at most 8 bits, 0 for automatic")
        if self.cache_tokens % self.block:
            raise ConfigError("cache_tokens", self.cache_tokens, f"must be a multiple of block={self.block}")
        blocks = self.cache_tokens // self.block
        if self.cache_tokens and self.k_cache > blocks:
            allowed = f"must be at most the {blocks} blocks of the cache, or blocks would push each other out"
            raise ConfigError("k_cache", self.k_cache, allowed)

    def quantisation(self, max_tokens: int) -> tuple[int, int]:
        """Return (m, b) for an engine whose requests have at most so many tokens."""
        short = max_tokens <= 16384
        return self.m or (2 if short else 4), self.b or (6 if short else 8)

    def budget(self, n_prompt: int) -> tuple[int, int]:
        """Return the last tokens and the retrieved ones that a step attends to, for a prompt of so many tokens."""
        tokens = self.token_budget or max(2, round(self.token_ratio * n_prompt))
        local = min(max(1, round(self.local_ratio * tokens)), max(1, tokens - 1))
        return local, max(1, tokens - local)

    def default_residency(self) -> str:
        """Return blocks."""
        return "blocks"

    def selected_tokens(self, config: SparseConfig) -> int:
        """Return the budget, for residencies with a buffer; a share is of `top_k` tokens' worth at most."""
        return self.init + (self.token_budget or config.top_k)

    def min_sparse_prompt_len(self, config: SparseConfig) -> int:
        """Return the tokens from which clustering is worth while: four per centroid."""
        return 4 << (self.b or 8)

    def sidecar_settings(self) -> dict[str, Any]:
        """Return what codebooks are trained by; budgets, caches and threads are each engine's own."""
        names = ("m", "b", "init", "iterations", "min_iterations", "max_iterations", "turns", "seed")
        return {name: getattr(self, name) for name in names}


def _share(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if not 0 <= value <= 1:
            raise ConfigError(name, value, "must be at least 0 and at most 1")
