"""Quality of selections: an algorithm chooses on S1 or S5 as it would in an engine, and attention over its choice is
compared with attention over everything.

The algorithm object itself is driven: it sees the context in one prefill (with the queries of the last tokens, which
some methods watch) and then one query per step; nothing else is simulated. Budgets are equal in tokens or in bytes:

* tokens: every method may select so many tokens;
* bytes: every method may hold so many bytes on the device, its representation of all keys and the KV of its selection
  together. What a representation costs is taken from the selection. The oracle needs all keys and is exempt: it is the
  ceiling, not a method.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_tier.algorithms import registry
from gpu_tier.algorithms.base import AlgorithmContext, BaseSparseAlgorithm
from gpu_tier.config import (
    AlgorithmConfig,
    DsaConfig,
    OracleConfig,
    QuestConfig,
    SnapKVConfig,
    SparseConfig,
    StreamingLLMConfig,
)
from gpu_tier.eval.metrics import Errors, attended, attention_weights, errors, mass_recall, recall_at, steady_tokens
from gpu_tier.eval.synth import KVSample
from gpu_tier.geometry import KVGeometry, KVKind
from gpu_tier.rows import KVDtype
from gpu_tier.runtime import NullRuntime
from gpu_tier.types import ForwardBatch, Mode, Selection

__all__ = ["METHODS", "OBSERVED", "QualityResult", "evaluate", "kv_bytes", "method", "method_for_bytes", "selections"]

OBSERVED = 32
"""Queries of the context's end that methods may watch."""

_PAGE = 64
_QUEST_PAGE = 16
_ELEMENT_BYTES = 2  # KV is counted as bf16


@dataclass(frozen=True, slots=True)
class QualityResult:
    """One method on one sample.

    Attributes:
        method: its name.
        tokens: tokens selected in a step, the mean.
        kv_bytes: bytes of their KV in bf16, one layer and KV head.
        representation_bytes: bytes on the device that the method chooses by, likewise.
        recall: share of the true top k found; k is `recall_k`.
        recall_k: tokens that are sought.
        mass: see `mass_recall`.
        errors: of the outputs.
    """

    method: str
    tokens: float
    kv_bytes: float
    representation_bytes: int
    recall: float
    recall_k: int
    mass: float
    errors: Errors


def _oracle(tokens: int) -> AlgorithmConfig:
    return OracleConfig(k=tokens)


def _quest(tokens: int) -> AlgorithmConfig:
    return QuestConfig(page=_QUEST_PAGE, token_budget=tokens // _QUEST_PAGE * _QUEST_PAGE, skip_layers=0)


def _streaming(tokens: int) -> AlgorithmConfig:
    # The sinks take a page, and the window may touch one page more than it fills.
    return StreamingLLMConfig(sink=4, window=max(1, tokens - 2 * _QUEST_PAGE), page=_QUEST_PAGE)


def _snapkv(tokens: int) -> AlgorithmConfig:
    return SnapKVConfig(w_obs=OBSERVED, cap=tokens)


def _dsa(_tokens: int) -> AlgorithmConfig:
    return DsaConfig(index_source="proxy")


METHODS: dict[str, Callable[[int], AlgorithmConfig]] = {
    "oracle": _oracle,
    "quest": _quest,
    "streaming_llm": _streaming,
    "snapkv": _snapkv,
    "dsa": _dsa,
}
"""The settings of each method for a budget of tokens. `dsa` is its stand-in for models without an indexer."""


class _ContextKeys:
    """Reads the sample's KV."""

    def __init__(self, sample: KVSample) -> None:
        self._k, self._v = sample.k[:, None], sample.v[:, None]

    def keys(self, layer_id: int, request: int, start: int, stop: int) -> Tensor:
        """See `KeySource`."""
        return self._k[start:stop]

    def rows(self, layer_id: int, request: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """See `KeySource`."""
        return self._k[start:stop], self._v[start:stop]


def kv_bytes(tokens: float, d: int) -> float:
    """Return the bytes of so many tokens' keys and values of one layer and KV head, in bf16."""
    return tokens * 2 * d * _ELEMENT_BYTES


def method(name: str, tokens: int) -> SparseConfig:
    """Return the settings under which a method selects `tokens` tokens."""
    return SparseConfig(algorithm=name, top_k=tokens, page_size=_PAGE, algo=METHODS[name](tokens))


def method_for_bytes(name: str, budget: float, sample: KVSample) -> SparseConfig | None:
    """Return the settings under which a method holds `budget` bytes, None when its representation leaves too little."""
    n, d = sample.k.shape
    representation = 0 if name == "oracle" else _algorithm(method(name, n), sample).representation_bytes(n)
    tokens = int((budget - representation) / kv_bytes(1, d))
    return method(name, tokens) if tokens >= 2 * _PAGE else None


def selections(config: SparseConfig, sample: KVSample) -> Tensor:
    """Return the tokens that an algorithm attends to, ``bool [T, n]``, for each query of the sample."""
    return _choices(_algorithm(config, sample), sample)


def evaluate(config: SparseConfig, sample: KVSample, recall_k: int = 100) -> QualityResult:
    """Return the quality of an algorithm on a sample."""
    n, d = sample.k.shape
    algorithm = _algorithm(config, sample)
    chosen = _choices(algorithm, sample)
    weights = attention_weights(sample.q, sample.k, sample.scale)
    full = weights @ sample.v
    steady = steady_tokens(n)
    tokens = float(chosen.sum(1).float().mean())
    return QualityResult(
        method=config.algorithm,
        tokens=tokens,
        kv_bytes=kv_bytes(tokens, d),
        representation_bytes=algorithm.representation_bytes(n),
        recall=recall_at(recall_k, weights, chosen, steady),
        recall_k=recall_k,
        mass=mass_recall(weights, chosen, steady),
        errors=errors(attended(weights, sample.v, chosen), full, sample.v),
    )


def _algorithm(config: SparseConfig, sample: KVSample) -> BaseSparseAlgorithm:
    """Return the algorithm for the sample's shape: one layer, one KV head, one request."""
    n, d = sample.k.shape
    geometry = KVGeometry(KVKind.MHA, 1, 1, d, d, KVDtype.F32, _PAGE)
    room = -(-n // _PAGE) * _PAGE
    keys = _ContextKeys(sample)
    context = AlgorithmContext(
        geometry, config, sample.q.shape[1], sample.scale, 1, room, room, NullRuntime(), keys
    )  # fmt: skip
    return registry.make(context)


def _choices(algorithm: BaseSparseAlgorithm, sample: KVSample) -> Tensor:
    n = len(sample.k)
    _prefill(algorithm, sample)
    step = _batch(Mode.DECODE, n, 1)
    everyone = torch.ones(1, dtype=torch.bool)
    chosen = [algorithm.retrieve_topk(q[None], 0, step, everyone) for q in sample.q]
    return torch.stack([_mask(selection, n) for selection in chosen])


def _prefill(algorithm: BaseSparseAlgorithm, sample: KVSample) -> None:
    n, group = len(sample.k), sample.q.shape[1]
    algorithm.reserve(0, n)
    # Only the queries of the last tokens are ever looked at.
    queries = torch.zeros(n, group, sample.k.shape[1])
    queries[n - len(sample.observed) :] = sample.observed
    prompt = _batch(Mode.PREFILL, n, n)
    algorithm.construct_representations(0, prompt, sample.k[:, None], sample.v[:, None], queries)
    algorithm.finish_prompt(0, n)


def _batch(mode: Mode, n: int, tokens: int) -> ForwardBatch:
    at = torch.arange(n - tokens, n)
    return ForwardBatch(
        mode=mode, req_pool_indices=torch.zeros(1, dtype=torch.int64), seq_lens=torch.tensor([n], dtype=torch.int32),
        out_cache_loc=at, positions=at, num_real_reqs=torch.ones(1, dtype=torch.int32), requests=(0,), lengths=(n,),
        extend_lens=(tokens,),
    )  # fmt: skip


def _mask(selection: Selection, n: int) -> Tensor:
    """Return ``bool [n]``: the tokens of a selection of one row and head."""
    ids = selection.indices[0, 0, : int(selection.lengths[0, 0])].long()
    tokens = (ids[:, None] * selection.unit_tokens + torch.arange(selection.unit_tokens)).flatten()
    return torch.zeros(n, dtype=torch.bool).index_fill(0, tokens[tokens < n], True)
