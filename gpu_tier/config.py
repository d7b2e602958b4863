"""Settings of the sparse tier: one dataclass for the framework and one for each algorithm.

Defaults are those of the algorithms' documents. Every value is checked when the object is made; unknown keys are
refused with the nearest known one, so that a misspelt setting never passes silently.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gpu_tier.algorithm_config import AlgorithmConfig
from gpu_tier.errors import ConfigError
from gpu_tier.geometry import Layout
from gpu_tier.retrieval_config import PQCacheConfig, RetroInferConfig
from gpu_tier.setting_checks import at_least, check_known, choice, ratio

__all__ = [
    "AlgorithmConfig", "DsaConfig", "FullConfig", "FullOffloadConfig", "OracleConfig", "PQCacheConfig", "QuestConfig",
    "RetroInferConfig", "SnapKVConfig", "SparseConfig", "StreamingLLMConfig",
]  # fmt: skip

RESIDENCIES = ("lru", "device", "static", "stream", "blocks", "auto")


@dataclass(frozen=True, slots=True)
class FullConfig(AlgorithmConfig):
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
        at_least(self, 1, "chunk_tokens")

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
        at_least(self, 1, "k")
        ratio(self, "ratio")

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
        at_least(self, 0, "sink")
        at_least(self, 1, "window", "page")

    def selected_tokens(self, config: SparseConfig) -> int:
        """Return the tokens of the pages that sinks and window can touch."""
        return (-(-self.sink // self.page) + (self.window + 2 * self.page - 2) // self.page) * self.page

    def min_sparse_prompt_len(self, _config: SparseConfig) -> int:
        """Return what is kept anyway."""
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
        at_least(self, 1, "index_heads", "index_dim")
        choice(self, "scale_format", ("f32", "ue8m0"))
        choice(self, "index_source", ("model", "proxy"))

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
        at_least(self, 1, "page", "token_budget", "recent_pages")
        at_least(self, 0, "sink_pages", "skip_layers")
        ratio(self, "sparsity_ratio")
        choice(self, "group", ("mean", "max", "softmax"))
        choice(self, "heads", ("shared", "per_head"))
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
        reselect_every: decode steps after which the last `w_obs` queries vote anew; 0 never. Only of retrievable.
    """

    w_obs: int = 32
    cap: int = 1056
    ratio: float | None = None
    pool: str = "avg"
    kernel: int = 7
    mode: str = "drop"
    reselect_every: int = 0

    def __post_init__(self) -> None:
        at_least(self, 1, "w_obs", "kernel")
        at_least(self, self.w_obs + 1, "cap")
        at_least(self, 0, "reselect_every")
        ratio(self, "ratio")
        choice(self, "pool", ("avg", "max"))
        choice(self, "mode", ("drop", "retrievable"))
        if self.kernel % 2 == 0:
            raise ConfigError("kernel", self.kernel, "must be odd, so that the pooled votes stay in place")
        if self.reselect_every and self.mode == "drop":
            raise ConfigError("reselect_every", self.reselect_every, "needs mode='retrievable': dropped KV is gone")

    def default_residency(self) -> str:
        """Return static: the set is fixed; with reselection lru, since sets then change."""
        return "lru" if self.reselect_every else "static"

    def keeps_host_copy(self) -> bool:
        """Return whether what is not in the set stays retrievable."""
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


ALGORITHMS: dict[str, type[AlgorithmConfig]] = {
    "full": FullConfig,
    "full_offload": FullOffloadConfig,
    "oracle": OracleConfig,
    "streaming_llm": StreamingLLMConfig,
    "dsa": DsaConfig,
    "quest": QuestConfig,
    "snapkv": SnapKVConfig,
    "retroinfer": RetroInferConfig,
    "pqcache": PQCacheConfig,
}


@dataclass(frozen=True, slots=True)
class SparseConfig:
    """Settings of the framework.

    Attributes:
        algorithm: one of `ALGORITHMS`.
        top_k: tokens that dsa selects.
        device_buffer_size: tokens of a request's buffer on the device, per layer; 0 means twice what is selected.
        page_size: tokens of a page of the pools, which is the block of the storage.
        host_to_device_ratio: size of the host pool over that of the device pool, when `host_bytes` is 0.
        host_bytes: size of the host pool.
        host_layout: order of the host pool, see `gpu_tier.geometry`.
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
        check_known(cls, data, "")
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
        at_least(self, 1, "top_k", "page_size", "io_blocks")
        at_least(self, 0, "device_buffer_size", "host_bytes", "prefill_window_tokens", "publish_every")
        at_least(self, -1, "min_sparse_prompt_len")
        choice(self, "residency", ("", *RESIDENCIES))
        choice(self, "kernels", ("auto", "reference", "triton", "cuda"))
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
