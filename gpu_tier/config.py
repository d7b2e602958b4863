"""Settings of the sparse tier: one dataclass for the framework and one for each algorithm.

Defaults are those of the algorithms' documents. Every value is checked when the object is made; unknown keys are
refused with the nearest known one, so that a misspelt setting never passes silently.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Self

from kvcm.gpu_tier.errors import ConfigError
from kvcm.gpu_tier.geometry import Layout

__all__ = [
    "ALGORITHMS",
    "CACHE_POLICIES",
    "AlgorithmConfig",
    "DsaConfig",
    "FullOffloadConfig",
    "OracleConfig",
    "PQCacheConfig",
    "QuestConfig",
    "RetroInferConfig",
    "SnapKVConfig",
    "SparseConfig",
    "StreamingLLMConfig",
]

CACHE_POLICIES = ("lru", "lfu", "fifo", "random")
"""Orders in which a block cache gives up blocks; random is for tests: results must not depend on the order."""
_RESIDENCIES = ("lru", "device", "static", "stream", "blocks", "auto")


@dataclass(frozen=True, slots=True)
class AlgorithmConfig:
    """Settings of one algorithm."""

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> Self:
        """Return the settings in `data`.

        Raises:
            ConfigError: a key is unknown, or a value is not allowed.
        """
        _check_known(cls, data, "algo.")
        return cls(**data)

    def default_residency(self) -> str:
        """Return the residency when the settings name none."""
        return "lru"

    def selected_tokens(self, config: SparseConfig) -> int:
        """Return the tokens that a head attends to in a step; the buffer is twice that by default."""
        return config.top_k

    def min_sparse_prompt_len(self, _config: SparseConfig) -> int:
        """Return the prompt length from which requests become sparse when the settings name none."""
        return 0

    def keeps_host_copy(self) -> bool:
        """Return whether sparse requests need all of their KV in the host pool."""
        return True

    def sidecar_settings(self) -> dict[str, Any]:
        """Return the settings that side data depends on: engines in which others differ share it."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class SparseConfig:
    """Settings of the framework.

    Attributes:
        algorithm: one of `ALGORITHMS`.
        top_k: tokens that dsa selects.
        device_buffer_size: tokens of a request's buffer on the device, per layer; 0 means twice the selected tokens.
        page_size: tokens of a page of the pools, which is the block of the storage.
        host_to_device_ratio: size of the host pool over that of the device pool, when `host_bytes` is 0.
        host_bytes: size of the host pool.
        host_layout: order of the host pool, see `kvcm.gpu_tier.geometry`.
        min_sparse_prompt_len: prompt tokens from which a request is sparse; -1 means the algorithm's default.
        residency: lru (buffer with incremental loads), device (all KV stays on the device), static (a fixed set),
            stream (all KV is streamed every step), blocks (an execution buffer is put together every step from a
            steady zone, a block cache and the host), auto (device if the device pool holds all that requests may need,
            else blocks); "" means the algorithm's default.
        io_blocks: multiprocessors that the transfer kernel may use beside attention.
        kernels: auto, reference, triton or cuda.
        debug_checks: check selections and device error flags after every step (waits for the device).
        prefill_window_tokens: prompt tokens of a request that stay on the device while it is prefilled, for prompts
            larger than the device pool; 0 means all.
        publish_every: decoded blocks after which a request publishes; 0 means only at its end.
        promote_newest: keep the token of the previous step in the buffer instead of loading it back.
        loads_hottest: loaded items are hotter than hits, instead of the other way round.
        algo: settings of the algorithm.
    """

    algorithm: str
    top_k: int = 2048
    device_buffer_size: int = 0
    page_size: int = 64
    host_to_device_ratio: float = 2.0
    host_bytes: int = 0
    host_layout: Layout = Layout.PAGE_FIRST
    min_sparse_prompt_len: int = -1
    residency: str = ""
    io_blocks: int = 8
    kernels: str = "auto"
    debug_checks: bool = False
    prefill_window_tokens: int = 0
    publish_every: int = 0
    promote_newest: bool = True
    loads_hottest: bool = False
    algo: AlgorithmConfig = field(default_factory=AlgorithmConfig)

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> SparseConfig:
        """Return the settings in `data`, whose `algo` is a mapping too.

        Raises:
            ConfigError: a key is unknown, or a value is not allowed.
        """
        _check_known(cls, data, "")
        name = data.get("algorithm")
        if name not in ALGORITHMS:
            raise ConfigError.choice("algorithm", name, ALGORITHMS)
        layout = data.get("host_layout", Layout.PAGE_FIRST)
        if layout not in list(Layout):
            raise ConfigError.choice("host_layout", layout, Layout)
        return cls(**{**data, "host_layout": Layout(layout), "algo": ALGORITHMS[name].parse(data.get("algo", {}))})

    def __post_init__(self) -> None:
        if self.algorithm not in ALGORITHMS:
            raise ConfigError.choice("algorithm", self.algorithm, ALGORITHMS)
        if type(self.algo) is AlgorithmConfig:
            object.__setattr__(self, "algo", ALGORITHMS[self.algorithm]())
        if not isinstance(self.algo, ALGORITHMS[self.algorithm]):
            raise ConfigError("algo", self.algo, f"must be a {ALGORITHMS[self.algorithm].__name__}")
        _at_least(self, 1, "top_k", "page_size", "io_blocks")
        _at_least(self, 0, "device_buffer_size", "host_bytes", "prefill_window_tokens", "publish_every")
        _at_least(self, -1, "min_sparse_prompt_len")
        _choice(self, "residency", ("", *_RESIDENCIES))
        _choice(self, "kernels", ("auto", "reference", "triton", "cuda"))
        if self.host_to_device_ratio <= 0:
            raise ConfigError("host_to_device_ratio", self.host_to_device_ratio, "must be above 0")
        if not self.device_buffer_size:
            object.__setattr__(self, "device_buffer_size", 2 * self.algo.selected_tokens(self))
        if not self.residency:
            object.__setattr__(self, "residency", self.algo.default_residency())
        if self.min_sparse_prompt_len < 0:
            object.__setattr__(self, "min_sparse_prompt_len", self.algo.min_sparse_prompt_len(self))

    def replaced(self, **changes: Any) -> SparseConfig:
        """Return these settings with some changed."""
        return replace(self, **changes)


@dataclass(frozen=True, slots=True)
class _FullConfig(AlgorithmConfig):
    """Dense attention; every request stays on the device."""

    def min_sparse_prompt_len(self, _config: SparseConfig) -> int:
        """Return more than any prompt has: no request becomes sparse."""
        return sys.maxsize

    def default_residency(self) -> str:
        """Return device: nothing moves."""
        return "device"


@dataclass(frozen=True, slots=True)
class FullOffloadConfig(AlgorithmConfig):
    """Dense attention over KV in host memory, streamed layer by layer.

    Attributes:
        chunk_tokens: tokens of one streamed piece per request; two pieces are on the device at a time.
    """

    chunk_tokens: int = 65536

    def __post_init__(self) -> None:
        _at_least(self, 1, "chunk_tokens")

    def default_residency(self) -> str:
        """Return stream."""
        return "stream"


@dataclass(frozen=True, slots=True)
class OracleConfig(AlgorithmConfig):
    """The exact top-k of the attention weights: the ceiling of every top-k method. For tests and evaluation.

    Attributes:
        k: tokens per KV head.
        ratio: share of the request's tokens instead of `k`, which then is the most.
    """

    k: int = 2048
    ratio: float | None = None

    def __post_init__(self) -> None:
        _at_least(self, 1, "k")
        _ratio(self, "ratio")

    def selected_tokens(self, config: SparseConfig) -> int:
        """Return k, the most that `ratio` may select too."""
        return self.k

    def min_sparse_prompt_len(self, _config: SparseConfig) -> int:
        """Return k: below it every token is selected."""
        return self.k


@dataclass(frozen=True, slots=True)
class StreamingLLMConfig(AlgorithmConfig):
    """Attention sinks and a sliding window (Xiao et al., ICLR 2024); nothing is retrieved.

    Attributes:
        sink: first tokens that are always kept.
        window: last tokens that are kept.
        page: tokens of a page: sinks and window are rounded up to whole pages.
    """

    sink: int = 4
    window: int = 2048
    page: int = 16

    def __post_init__(self) -> None:
        _at_least(self, 0, "sink")
        _at_least(self, 1, "window", "page")

    def selected_tokens(self, config: SparseConfig) -> int:
        """Return the tokens of the pages that sinks and window can touch."""
        return (-(-self.sink // self.page) + (self.window + 2 * self.page - 2) // self.page) * self.page

    def min_sparse_prompt_len(self, _config: SparseConfig) -> int:
        """Return the tokens that are always kept."""
        return self.sink + self.window


@dataclass(frozen=True, slots=True)
class DsaConfig(AlgorithmConfig):
    """DeepSeek sparse attention: a lightning indexer picks `SparseConfig.top_k` tokens (DeepSeek-V3.2).

    Attributes:
        index_heads: index query heads HI.
        index_dim: numbers of an index key dI, quantised to e4m3 with one scale.
        scale_format: f32, or ue8m0 for scales that are powers of two.
        index_source: model (the model gives index queries, keys and weights) or proxy (a stand-in for models without an
            indexer: mean query of the group against the mean key of the heads; this is not DSA).
    """

    index_heads: int = 64
    index_dim: int = 128
    scale_format: str = "f32"
    index_source: str = "model"

    def __post_init__(self) -> None:
        _at_least(self, 1, "index_heads", "index_dim")
        _choice(self, "scale_format", ("f32", "ue8m0"))
        _choice(self, "index_source", ("model", "proxy"))

    def min_sparse_prompt_len(self, config: SparseConfig) -> int:
        """Return the size of the buffer: what fits is not worth moving."""
        return config.device_buffer_size


@dataclass(frozen=True, slots=True)
class QuestConfig(AlgorithmConfig):
    """Query-aware page selection by bounds of each page's keys (Tang et al., ICML 2024).

    Attributes:
        page: tokens of a scoring page; `SparseConfig.page_size` must be a multiple of it.
        token_budget: tokens selected, recent and sink pages included.
        sparsity_ratio: share of the request's tokens instead of `token_budget`, which then is the most.
        recent_pages: last pages that are always selected, the page being written included.
        sink_pages: first pages that are always selected.
        skip_layers: first layers that attend densely.
        group: how the query heads of a KV head vote: mean (of the queries), max (of the bounds) or softmax (sum of the
            softmax of the bounds).
        heads: shared (one page table for all KV heads) or per_head.
    """

    page: int = 16
    token_budget: int = 2048
    sparsity_ratio: float | None = None
    recent_pages: int = 4
    sink_pages: int = 1
    skip_layers: int = 2
    group: str = "softmax"
    heads: str = "shared"

    def __post_init__(self) -> None:
        _at_least(self, 1, "page", "token_budget", "recent_pages")
        _at_least(self, 0, "sink_pages", "skip_layers")
        _ratio(self, "sparsity_ratio")
        _choice(self, "group", ("mean", "max", "softmax"))
        _choice(self, "heads", ("shared", "per_head"))
        if self.token_budget < (self.recent_pages + self.sink_pages) * self.page:
            allowed = f"must hold the {self.recent_pages} recent and {self.sink_pages} sink pages of {self.page} tokens"
            raise ConfigError("token_budget", self.token_budget, allowed)

    def selected_tokens(self, config: SparseConfig) -> int:
        """Return the budget in whole pages."""
        return -(-self.token_budget // self.page) * self.page

    def min_sparse_prompt_len(self, _config: SparseConfig) -> int:
        """Return the budget: below it every page is selected."""
        return self.token_budget


@dataclass(frozen=True, slots=True)
class SnapKVConfig(AlgorithmConfig):
    """The prompt's tokens that its last queries attend to, chosen once (Li et al., NeurIPS 2024).

    Attributes:
        w_obs: last prompt tokens whose queries vote; they are always kept.
        cap: tokens kept per KV head, the observation window included.
        ratio: share of the prompt instead of `cap`.
        pool: avg or max pooling of the votes.
        kernel: width of the pooling, odd.
        mode: drop (the rest is freed) or retrievable (the rest stays in host memory).
        reselect_every: decode steps after which the last `w_obs` queries vote again; 0 never. Only of retrievable.
    """

    w_obs: int = 32
    cap: int = 1056
    ratio: float | None = None
    pool: str = "avg"
    kernel: int = 7
    mode: str = "drop"
    reselect_every: int = 0

    def __post_init__(self) -> None:
        _at_least(self, 1, "w_obs", "kernel")
        _at_least(self, self.w_obs + 1, "cap")
        _at_least(self, 0, "reselect_every")
        _ratio(self, "ratio")
        _choice(self, "pool", ("avg", "max"))
        _choice(self, "mode", ("drop", "retrievable"))
        if self.kernel % 2 == 0:
            raise ConfigError("kernel", self.kernel, "must be odd, so that the pooled votes stay in place")
        if self.reselect_every and self.mode == "drop":
            raise ConfigError("reselect_every", self.reselect_every, "needs mode='retrievable': dropped KV is gone")

    def default_residency(self) -> str:
        """Return static: the set is fixed; with reselection lru, since sets then change."""
        return "lru" if self.reselect_every else "static"

    def keeps_host_copy(self) -> bool:
        """Return whether tokens outside the set stay retrievable."""
        return self.mode != "drop"

    def kept(self, n_prompt: int) -> int:
        """Return the tokens of the prompt that each head keeps."""
        most = self.cap if self.ratio is None else max(self.w_obs + 1, round(self.ratio * n_prompt))
        return min(n_prompt, most)

    def selected_tokens(self, config: SparseConfig) -> int:
        """Return the set and the tokens decoded until the next reselection."""
        return self.cap + self.reselect_every

    def min_sparse_prompt_len(self, _config: SparseConfig) -> int:
        """Return the cap: below it everything is kept."""
        return self.cap


@dataclass(frozen=True, slots=True)
class RetroInferConfig(AlgorithmConfig):
    """Attention over retrieved clusters and an estimate of the others (RetroInfer, PVLDB 19(5), 2026).

    Attributes:
        sink: first tokens of the steady zone.
        local: last tokens that are always steady.
        segment: prompt tokens that are clustered together.
        tokens_per_centroid: tokens of a cluster, on average.
        iterations: of k-means.
        center: vector subtracted from keys before clustering: the mean of their segment, that of the prompt,
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
        _at_least(self, 0, "sink", "iterations")
        _at_least(self, 1, "local", "segment", "tokens_per_centroid", "update_segment", "exec_factor", "block_bytes")
        _at_least(self, 1, "cpu_threads")
        _ratio(self, "retrieval")
        _choice(self, "center", ("segment", "prompt", "none"))
        _choice(self, "final_assign", ("segment", "global"))
        _choice(self, "rank", ("sum_softmax", "max_ip"))
        _choice(self, "policy", CACHE_POLICIES)
        _choice(self, "control", ("cpu", "gpu"))
        _choice(self, "mode", ("offload", "gpu_only", "auto"))
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
        """Return the steady zone; retrieved tokens lie in the execution buffer."""
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
        rebuild_every: decoded tokens after which all tokens are clustered again; 0 never.
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
        _at_least(self, 0, "m", "b", "init", "token_budget", "iterations", "cache_tokens", "rebuild_every", "seed")
        _at_least(self, 1, "min_iterations", "block", "k_cache", "kmeans_threads")
        _at_least(self, self.min_iterations, "max_iterations")
        _ratio(self, "token_ratio", "local_ratio")
        _choice(self, "cache_unit", ("block", "token"))
        _choice(self, "policy", CACHE_POLICIES)
        _choice(self, "kmeans_device", ("cpu", "device"))
        _choice(self, "turns", ("extend", "per_turn", "rebuild"))
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


ALGORITHMS: dict[str, type[AlgorithmConfig]] = {
    "full": _FullConfig,
    "full_offload": FullOffloadConfig,
    "oracle": OracleConfig,
    "streaming_llm": StreamingLLMConfig,
    "dsa": DsaConfig,
    "quest": QuestConfig,
    "snapkv": SnapKVConfig,
    "retroinfer": RetroInferConfig,
    "pqcache": PQCacheConfig,
}


# Checks of settings: each error names the setting, its value and the allowed ones.


def _check_known(cls: type[Any], data: Mapping[str, Any], where: str) -> None:
    """Refuse keys that are no fields of a dataclass, with the nearest that is."""
    known = [f.name for f in fields(cls)]
    for key in data:
        if key not in known:
            nearest = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {nearest[0]!r}?" if nearest else f"; known are {', '.join(known) or 'none'}"
            raise ConfigError(f"{where}{key}", data[key], f"no such setting{hint}")


def _at_least(config: object, least: int, *names: str) -> None:
    """Refuse fields that are not integers of at least `least`."""
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(name, value, f"must be an integer of at least {least}")


def _ratio(config: object, *names: str) -> None:
    """Refuse fields that are not above 0 and at most 1; None is allowed."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not 0 < value <= 1:
            raise ConfigError(name, value, "must be above 0 and at most 1")


def _share(config: object, *names: str) -> None:
    """Refuse fields that are not at least 0 and at most 1."""
    for name in names:
        value = getattr(config, name)
        if not 0 <= value <= 1:
            raise ConfigError(name, value, "must be at least 0 and at most 1")


def _choice(config: object, name: str, choices: tuple[object, ...]) -> None:
    """Refuse a field that is none of the choices."""
    if getattr(config, name) not in choices:
        raise ConfigError.choice(name, getattr(config, name), choices)
