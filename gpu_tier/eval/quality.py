"""Quality of selections: an algorithm chooses on S1 or S5 as it would in an engine, and attention over its choice is
compared with attention over everything.

What an algorithm estimates of the rest is merged with attention over its choice, as in an engine. Budgets are equal in
tokens or in bytes:

* tokens: every method may select so many tokens;
* bytes: every method may hold so many bytes on the device, its representation of all keys and the KV of its selection
  together. What a representation costs is taken from the selection. The oracle needs all keys and is exempt: it is the
  ceiling, not a method. Estimates are read from the representation and cost nothing more.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvcm.gpu_tier.algorithms import registry
from kvcm.gpu_tier.algorithms.base import AlgorithmContext, BaseSparseAlgorithm
from kvcm.gpu_tier.config import SparseConfig
from kvcm.gpu_tier.eval.methods import PAGE, method
from kvcm.gpu_tier.eval.synth import KVSample, Regime
from kvcm.gpu_tier.geometry import KVDtype, KVGeometry, KVKind
from kvcm.gpu_tier.index.wave_index import WaveSegment
from kvcm.gpu_tier.kernels.lse_merge import lse_merge
from kvcm.gpu_tier.runtime import NullRuntime
from kvcm.gpu_tier.types import ForwardBatch, Mode, Partial, Selection, TokenRanges, Unit

__all__ = [
    "ERROR_TOLERANCE",
    "EXPECTED",
    "STEADY",
    "TOLERANCE",
    "Choices",
    "Concentration",
    "Driven",
    "Errors",
    "QualityResult",
    "attended",
    "attention_weights",
    "concentration",
    "errors",
    "evaluate",
    "judged",
    "kv_bytes",
    "mass_recall",
    "method_for_bytes",
    "recall_at",
    "selections",
    "steady_tokens",
]

# An algorithm that chooses on a sample as it would in an engine, without one.


@dataclass(frozen=True, slots=True)
class Choices:
    """What an algorithm attends to in T steps over a context of n tokens.

    Attributes:
        selected: ``bool [T, n]`` tokens that are attended to exactly, steady ones included.
        estimated: ``bool [T, n]`` tokens whose attention is estimated.
        steady: ``bool [n]`` tokens attended to without retrieval, as far as the selection tells them apart.
        estimates: of each step; None where nothing is estimated.
        ids: ids of the items selected in each step, ascending.
    """

    selected: Tensor
    estimated: Tensor
    steady: Tensor
    estimates: tuple[Partial | None, ...]
    ids: tuple[Tensor, ...]


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


class _Members:
    """The tokens of each cluster."""

    def __init__(self) -> None:
        self.segments: list[WaveSegment] = []
        self.tokens: list[Tensor] = []

    def store(self, layer_id: int, request: int, segment: WaveSegment) -> None:
        """See `SegmentSink`."""
        assert segment.first_cluster == len(self.tokens), "segments come in order, each once"
        self.segments.append(segment)
        members = segment.start + segment.members[0].long()
        self.tokens += members.split(segment.sizes[0].tolist())

    def of(self, clusters: Tensor) -> Tensor:
        """Return the tokens of some clusters."""
        return torch.cat([torch.zeros(0, dtype=torch.int64), *(self.tokens[c] for c in clusters.tolist())])


class Driven:
    """An algorithm after the prefill of a sample's context.

    The algorithm object itself runs: it sees the context in one prefill (with the queries of the last tokens, which
    some methods watch) and then one query per step; nothing else is simulated. Of methods that cluster, what each
    cluster holds is observed as the owner of their KV observes it.

    Attributes:
        sample: the context and the queries of the steps.
        algorithm: that chooses.

    Args:
        config: its settings.
        sample: the context and the queries of the steps.
    """

    def __init__(self, config: SparseConfig, sample: KVSample) -> None:
        self.sample, self._members = sample, _Members()
        self.algorithm = _make_algorithm(config, sample)
        if self.algorithm.unit is Unit.CLUSTER:
            self.algorithm.sink = self._members
        _prefill(self.algorithm, sample)

    @property
    def cluster_sizes(self) -> Tensor:
        """Tokens of each cluster, ``int64 [m]``."""
        return torch.tensor([len(tokens) for tokens in self._members.tokens])

    @property
    def segments(self) -> list[WaveSegment]:
        """The clustered segments, in order."""
        return self._members.segments

    @property
    def step(self) -> ForwardBatch:
        """The decode step that all queries are of: the context does not grow."""
        return _batch(Mode.DECODE, len(self.sample.k), 1)

    def selections(self) -> list[Selection]:
        """Return the selection of each step of the sample."""
        everyone = torch.ones(1, dtype=torch.bool)
        return [
            self.algorithm.retrieve_topk(queries=q[None], layer_id=0, batch=self.step, sparse_mask=everyone)
            for q in self.sample.q
        ]

    def choices(self) -> Choices:
        """Return what the algorithm attends to in each step of the sample."""
        n, step = len(self.sample.k), self.step
        found = self.selections()
        steady = _steady(found[0], n)
        return Choices(
            selected=torch.stack([self._mask(selection, n) | steady for selection in found]),
            estimated=torch.stack([self._mask(selection.estimate, n) for selection in found]),
            steady=steady,
            estimates=tuple(
                self.algorithm.estimate(q[None], 0, step, selection)
                for q, selection in zip(self.sample.q, found, strict=True)
            ),
            ids=tuple(_ids(selection) for selection in found),
        )

    def _mask(self, selection: Selection | None, n: int) -> Tensor:
        """Return ``bool [n]``: the tokens of a selection's items."""
        chosen = torch.zeros(n, dtype=torch.bool)
        if selection is None:
            return chosen
        ids = _ids(selection)
        if selection.unit is Unit.CLUSTER:
            return chosen.index_fill(0, self._members.of(ids), True)
        tokens = (ids[:, None] * selection.unit_tokens + torch.arange(selection.unit_tokens)).flatten()
        return chosen.index_fill(0, tokens[tokens < n], True)


def _make_algorithm(config: SparseConfig, sample: KVSample) -> BaseSparseAlgorithm:
    """Return the algorithm for the sample's shape: one layer, one KV head, one request; it has seen nothing yet."""
    n, d = sample.k.shape
    geometry = KVGeometry(
        kind=KVKind.MHA, num_layers=1, num_kv_heads=1, head_dim=d, v_head_dim=d, dtype=KVDtype.F32, page_size=PAGE
    )
    max_tokens = -(-n // PAGE) * PAGE
    context = AlgorithmContext(
        geometry=geometry,
        config=config,
        num_q_heads=sample.q.shape[1],
        sm_scale=sample.scale,
        max_requests=1,
        max_tokens=max_tokens,
        total_tokens=max_tokens,
        runtime=NullRuntime(),
        keys=_ContextKeys(sample),
    )
    return registry.make(context)


def _ids(selection: Selection) -> Tensor:
    return selection.indices[0, 0, : int(selection.lengths[0, 0])].long()


def _steady(selection: Selection, n: int) -> Tensor:
    at = torch.arange(n)
    if selection.steady is None:
        return torch.zeros(n, dtype=torch.bool)
    return (at < selection.steady.sink) | (at >= selection.steady.firsts[0])


def _prefill(algorithm: BaseSparseAlgorithm, sample: KVSample) -> None:
    n, group = len(sample.k), sample.q.shape[1]
    algorithm.reserve(0, n)
    # Only the queries of the last tokens are ever looked at.
    queries = torch.zeros(n, group, sample.k.shape[1])
    queries[n - len(sample.observed) :] = sample.observed
    prompt = _batch(Mode.PREFILL, n, n)
    algorithm.construct_representations(0, prompt, sample.k[:, None], sample.v[:, None], queries)
    algorithm.finish_prompt(0, n)
    algorithm.become_sparse(0, n)


def _batch(mode: Mode, n: int, tokens: int) -> ForwardBatch:
    at = torch.arange(n - tokens, n)
    return ForwardBatch(
        mode=mode, req_pool_indices=torch.zeros(1, dtype=torch.int64), seq_lens=torch.tensor([n], dtype=torch.int32),
        out_cache_loc=at, positions=at, num_real_reqs=torch.ones(1, dtype=torch.int32), requests=(0,), lengths=(n,),
        extend_lens=(tokens,),
    )  # fmt: skip


# How good a selection and its attention output are.
#
# The truth is always the attention weight summed over the query heads of the KV head (the group rule ``Σ_g softmax``),
# so figures of methods are comparable. Sinks and the local window, which every method keeps or could keep for nothing,
# count neither as found nor as sought.
#
# Shapes: T steps, n tokens, G query heads of one KV head, dv numbers of an output.

STEADY = TokenRanges(sink=4, local=64)
"""Tokens that recall leaves out for all methods."""


@dataclass(frozen=True, slots=True)
class Errors:
    """How far outputs are from those of full attention: means over steps and query heads, and the tail.

    Attributes:
        relative: of ``|o - o_full| / |o_full|``. Misleading where attention is diffuse: |o_full| is small there.
        normalised: of ``|o - o_full|`` over the mean length of a value.
        cosine: of the cosine between both.
        p95: of each query head, the value that 95 % of its steps' normalised errors are below; of the worst head.
    """

    relative: float
    normalised: float
    cosine: float
    p95: float


def attention_weights(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Return the softmax weights ``f32 [T, G, n]`` of ``q [T, G, d]`` over ``k [n, d]``."""
    return torch.softmax(q.float() @ k.float().T * scale, -1)


def attended(weights: Tensor, v: Tensor, selected: Tensor) -> Tensor:
    """Return the outputs ``f32 [T, G, dv]`` of attention over ``selected bool [T, n]`` alone; 0 where it is empty."""
    kept = weights * selected[:, None]
    total = kept.sum(-1, keepdim=True)
    return (kept / total.clamp_min(torch.finfo(torch.float32).tiny)) @ v.float()


def steady_tokens(n: int, ranges: TokenRanges = STEADY) -> Tensor:
    """Return ``bool [n]``: the first and the last tokens that need no retrieval."""
    at = torch.arange(n)
    return (at < ranges.sink) | (at >= n - ranges.local)


def recall_at(k: int, weights: Tensor, selected: Tensor, steady: Tensor) -> float:
    """Return which share of the true top `k` of each step is selected, steady tokens left out of both; the mean.

    Args:
        k: tokens that are sought.
        weights: ``[T, G, n]`` of full attention.
        selected: ``bool [T, n]``.
        steady: ``bool [n]``.
    """
    sought = weights.sum(1).masked_fill(steady, -1.0).topk(min(k, int((~steady).sum()))).indices
    return float(selected.gather(1, sought).float().mean())


def mass_recall(weights: Tensor, selected: Tensor, steady: Tensor) -> float:
    """Return the attention of the selection and the steady tokens over that of the best selection of the same size.

    The best has the steady tokens too, and fills up with the heaviest others. Mean over the steps.
    """
    mass = weights.sum(1)
    chosen = selected | steady
    others = mass.masked_fill(steady, -1.0).sort(-1, descending=True).values.clamp_min(0)
    rank = torch.arange(mass.shape[-1])
    best = (others * (rank < (selected & ~steady).sum(-1, keepdim=True))).sum(-1) + (mass * steady).sum(-1)
    return float(((mass * chosen).sum(-1) / best).mean())


def errors(out: Tensor, full: Tensor, v: Tensor) -> Errors:
    """Return how far ``out [T, G, dv]`` is from `full`, for values ``v [n, dv]``."""
    distance = (out - full).norm(dim=-1)
    normalised = distance / v.float().norm(dim=-1).mean()
    return Errors(
        relative=float((distance / full.norm(dim=-1)).mean()),
        normalised=float(normalised.mean()),
        cosine=float(torch.nn.functional.cosine_similarity(out, full, dim=-1).mean()),
        p95=float(normalised.quantile(0.95, dim=0).max()),
    )


# Attention on a sample, independent of a method: its concentration and its stability.

_TOP = 0.018
"""Share of the tokens that is called the top."""
_FEW = 100


@dataclass(frozen=True, slots=True)
class Concentration:
    """Means over steps.

    Attributes:
        mass: attention of a query head in its own top 1.8 % of the tokens.
        overlap: of the top 100 of the KV head, those that are in the next step's too.
        wide_overlap: the same of the top 1.8 %.
        exact_error: of attention over the KV head's exact top 1.8 %, relative to full attention.
        lasting: of the top 100, those that are in the next two steps' too.
    """

    mass: float
    overlap: float
    wide_overlap: float
    exact_error: float
    lasting: float = 0.0


EXPECTED = {
    Regime.SHARP: Concentration(mass=0.99, overlap=0.71, wide_overlap=0.73, exact_error=0.0),
    Regime.MID: Concentration(mass=0.86, overlap=0.65, wide_overlap=0.69, exact_error=0.43),
    Regime.DIFFUSE: Concentration(mass=0.50, overlap=0.57, wide_overlap=0.64, exact_error=1.26),
}
"""Figures of S1 at n = 32K that its regimes stand for; there is none of the sharp regime's exact error."""
TOLERANCE = 0.05
"""How far the means of shares over seeds 0 to 3 may be off."""
ERROR_TOLERANCE = 0.25
"""How far the mean exact error may be off, relative to it: seeds differ by as much."""


def concentration(sample: KVSample) -> Concentration:
    """Return what attention on a sample is like."""
    n = len(sample.k)
    weights = attention_weights(sample.q, sample.k, sample.scale)
    top = round(_TOP * n)
    mass = weights.sum(1)
    retrieved = mass.masked_fill(steady_tokens(n), -1.0)
    few, many = _top(retrieved, _FEW), _top(retrieved, top)
    exact = attended(weights, sample.v, _top(mass, top))
    return Concentration(
        mass=float(weights.topk(top, -1).values.sum(-1).mean()),
        overlap=_share((few[1:] & few[:-1]), _FEW),
        wide_overlap=_share((many[1:] & many[:-1]), top),
        exact_error=errors(exact, weights @ sample.v, sample.v).relative,
        lasting=_share(few[2:] & few[1:-1] & few[:-2], _FEW),
    )


def _top(mass: Tensor, k: int) -> Tensor:
    return torch.zeros_like(mass, dtype=torch.bool).scatter_(1, mass.topk(k).indices, True)


def _share(chosen: Tensor, k: int) -> float:
    return float(chosen.sum(1).float().mean() / k)


_ELEMENT_BYTES = 2  # KV is counted as bf16


@dataclass(frozen=True, slots=True)
class QualityResult:
    """One method on one sample.

    Attributes:
        method: the algorithm.
        tokens: tokens selected in a step, steady ones included, the mean.
        estimated: tokens whose attention is estimated in a step, the mean.
        kv_bytes: bytes of the selected tokens' KV in bf16, one layer and KV head.
        representation_bytes: bytes on the device that the method chooses by, likewise.
        recall: share of the true top k found; k is `recall_k`.
        recall_k: tokens that are sought.
        mass: see `mass_recall`.
        errors: of the outputs, estimates included.
        errors_alone: of the outputs without it.
    """

    method: str
    tokens: float
    estimated: float
    kv_bytes: float
    representation_bytes: int
    recall: float
    recall_k: int
    mass: float
    errors: Errors
    errors_alone: Errors


def kv_bytes(tokens: float, d: int) -> float:
    """Return the bytes of so many tokens' keys and values of one layer and KV head, in bf16."""
    return tokens * 2 * d * _ELEMENT_BYTES


def method_for_bytes(name: str, budget: float, sample: KVSample) -> SparseConfig | None:
    """Return the settings under which a method holds `budget` bytes, None when its representation leaves too little."""
    n, d = sample.k.shape
    everything = _make_algorithm(method(name, n, n), sample)
    representation = 0 if name == "oracle" else everything.representation_bytes(n)
    tokens = int((budget - representation) / kv_bytes(1, d))
    return method(name, tokens, n) if tokens >= 2 * PAGE else None


def selections(config: SparseConfig, sample: KVSample) -> Tensor:
    """Return the tokens that an algorithm attends to, ``bool [T, n]``, for each query of the sample."""
    return Driven(config, sample).choices().selected


def evaluate(config: SparseConfig, sample: KVSample, recall_k: int = 100) -> QualityResult:
    """Return the quality of an algorithm on a sample."""
    driven = Driven(config, sample)
    return judged(driven, driven.choices(), sample, recall_k)


def judged(driven: Driven, choices: Choices, sample: KVSample, recall_k: int) -> QualityResult:
    """Return the quality of what an algorithm chose.

    Tokens that this method or the metric keeps without retrieval are neither sought nor found.
    """
    n, d = sample.k.shape
    weights = attention_weights(sample.q, sample.k, sample.scale)
    full = weights @ sample.v
    steady = steady_tokens(n) | choices.steady
    tokens = float(choices.selected.sum(1).float().mean())
    alone = attended(weights, sample.v, choices.selected)
    return QualityResult(
        method=driven.algorithm.context.config.algorithm,
        tokens=tokens,
        estimated=float(choices.estimated.sum(1).float().mean()),
        kv_bytes=kv_bytes(tokens, d),
        representation_bytes=driven.algorithm.representation_bytes(n),
        recall=recall_at(recall_k, weights, choices.selected, steady),
        recall_k=recall_k,
        mass=mass_recall(weights, choices.selected, steady),
        errors=errors(_with_estimates(alone, choices, sample), full, sample.v),
        errors_alone=errors(alone, full, sample.v),
    )


def _with_estimates(alone: Tensor, choices: Choices, sample: KVSample) -> Tensor:
    """Return ``alone f32 [T, G, dv]``, attention over the choice, merged with what each step estimates of the rest."""
    scores = sample.q.float() @ sample.k.float().T * sample.scale
    lse = scores.masked_fill(~choices.selected[:, None], float("-inf")).logsumexp(-1)
    merged = alone.clone()
    for step, estimate in enumerate(choices.estimates):
        if estimate is not None:
            parts = torch.stack([alone[step, None], estimate.o]), torch.stack([lse[step, None], estimate.lse])
            lse_merge(*parts, merged[step, None], torch.empty_like(estimate.lse), impl="reference")
    return merged
