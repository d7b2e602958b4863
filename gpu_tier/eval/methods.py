"""The settings of the methods that are compared, for a budget of tokens.

A budget is what a head attends to in a step, steady tokens included. Sinks and local windows are as small as each
method's documents allow, so that only retrieval is compared: the wave index keeps 4 + 64 tokens, PQ 32 + 64.
Clustering runs for a fixed number of iterations: figures must not depend on how busy a machine is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from kvcm.gpu_tier.config import (
    AlgorithmConfig,
    DsaConfig,
    OracleConfig,
    PQCacheConfig,
    QuestConfig,
    RetroInferConfig,
    SnapKVConfig,
    SparseConfig,
    StreamingLLMConfig,
)
from kvcm.gpu_tier.errors import ConfigError

__all__ = [
    "BASELINES",
    "METHODS",
    "OBSERVED",
    "PAGE",
    "RETRIEVAL",
    "Method",
    "method",
    "pq_top",
    "retrieving",
    "wave_share",
]

OBSERVED = 32
"""Queries of the context's end that methods may watch."""

PAGE = 64
"""Tokens of a page of the pools."""

_QUEST_PAGE = 16
_WAVE = RetroInferConfig()
_WAVE_STEADY = _WAVE.sink + _WAVE.local
_PQ_LOCAL = 64
_PQ = PQCacheConfig(iterations=10)


@dataclass(frozen=True, slots=True)
class Method:
    """One method.

    Attributes:
        algorithm: that it runs.
        settings: of the algorithm, for (tokens selected, tokens of the context).
    """

    algorithm: str
    settings: Callable[[int, int], AlgorithmConfig]


def _oracle(tokens: int, _n: int) -> AlgorithmConfig:
    return OracleConfig(k=tokens)


def _quest(tokens: int, _n: int) -> AlgorithmConfig:
    return QuestConfig(page=_QUEST_PAGE, token_budget=tokens // _QUEST_PAGE * _QUEST_PAGE, skip_layers=0)


def _streaming(tokens: int, _n: int) -> AlgorithmConfig:
    # The sinks take a page, and the window may touch one page more than it fills.
    return StreamingLLMConfig(sink=4, window=max(1, tokens - 2 * _QUEST_PAGE), page=_QUEST_PAGE)


def _snapkv(tokens: int, _n: int) -> AlgorithmConfig:
    return SnapKVConfig(w_obs=OBSERVED, cap=tokens)


def _dsa(_tokens: int, _n: int) -> AlgorithmConfig:
    return DsaConfig(index_source="proxy")


def _wave(tokens: int, n: int) -> RetroInferConfig:
    return wave_share(min(1.0, max(1, tokens - _WAVE_STEADY) / n))


def _wave_alone(tokens: int, n: int) -> AlgorithmConfig:
    return replace(_wave(tokens, n), estimation=0.0)


def _pq(m: int, b: int) -> Callable[[int, int], AlgorithmConfig]:
    return lambda tokens, _n: pq_top(m, b, max(1, tokens - _PQ.init - _PQ_LOCAL))


def wave_share(retrieval: float) -> RetroInferConfig:
    """Return the wave index with a share of its clusters retrieved and the default estimation zone."""
    return replace(_WAVE, retrieval=retrieval)


def pq_top(m: int, b: int, top: int, local: int = _PQ_LOCAL) -> PQCacheConfig:
    """Return product quantisation that retrieves `top` tokens beside 32 first and `local` last ones."""
    tokens = top + local
    return replace(_PQ, m=m, b=b, token_budget=tokens, local_ratio=local / tokens)


METHODS: dict[str, Method] = {
    "oracle": Method("oracle", _oracle),
    "quest": Method("quest", _quest),
    "streaming_llm": Method("streaming_llm", _streaming),
    "snapkv": Method("snapkv", _snapkv),
    "dsa": Method("dsa", _dsa),
    "wave": Method("retroinfer", _wave),
    "wave, no estimation": Method("retroinfer", _wave_alone),
    "pq m4b8": Method("pqcache", _pq(4, 8)),
    "pq m2b6": Method("pqcache", _pq(2, 6)),
}
"""All methods by name. `dsa` is its stand-in for models without an indexer."""

BASELINES = ("oracle", "quest", "streaming_llm", "snapkv", "dsa")
RETRIEVAL = ("oracle", "wave", "wave, no estimation", "pq m4b8", "pq m2b6")


def method(name: str, tokens: int, n_tokens: int) -> SparseConfig:
    """Return the settings under which a method selects `tokens` of a context's `n_tokens` tokens."""
    chosen = METHODS[name]
    settings = chosen.settings(tokens, n_tokens)
    return SparseConfig(algorithm=chosen.algorithm, top_k=tokens, page_size=PAGE, algo=settings)


def retrieving(name: str, share: float, n_tokens: int) -> SparseConfig:
    """Return the settings under which a method retrieves a share of clusters or tokens beside its steady tokens.

    Raises:
        ConfigError: the method has no steady tokens.
    """
    algorithm = METHODS[name].algorithm
    if algorithm == "retroinfer":
        settings = METHODS[name].settings(n_tokens, n_tokens)
        assert isinstance(settings, RetroInferConfig)
        return SparseConfig(algorithm, page_size=PAGE, algo=replace(settings, retrieval=share))
    if algorithm != "pqcache":
        raise ConfigError("name", name, "must be a method with a steady zone")
    return method(name, round(share * n_tokens) + _PQ.init + _PQ_LOCAL, n_tokens)
