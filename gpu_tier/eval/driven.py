"""An algorithm that chooses on a sample as it would in an engine, without one.

The algorithm object itself runs: it sees the context in one prefill (with the queries of the last tokens, which some
methods watch) and then one query per step; nothing else is simulated. Of methods that cluster, what each cluster holds
is heard as whoever keeps their KV hears it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_tier.algorithms import registry
from gpu_tier.algorithms.base import AlgorithmContext, BaseSparseAlgorithm
from gpu_tier.config import SparseConfig
from gpu_tier.eval.methods import PAGE
from gpu_tier.eval.synth import KVSample
from gpu_tier.geometry import KVGeometry, KVKind
from gpu_tier.index.wave_segment import WaveSegment
from gpu_tier.rows import KVDtype
from gpu_tier.runtime import NullRuntime
from gpu_tier.types import ForwardBatch, Mode, Partial, Selection, Unit

__all__ = ["Choices", "Driven", "make_algorithm"]


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

    Attributes:
        sample: the context and the queries of the steps.
        algorithm: that chooses.

    Args:
        config: its settings.
        sample: the context and the queries of the steps.
    """

    def __init__(self, config: SparseConfig, sample: KVSample) -> None:
        self.sample, self._members = sample, _Members()
        self.algorithm = make_algorithm(config, sample)
        if self.algorithm.unit is Unit.CLUSTER:
            self.algorithm.sink = self._members
        _prefill(self.algorithm, sample)

    @property
    def cluster_sizes(self) -> Tensor:
        """Tokens of each cluster, ``int64 [m]``."""
        return torch.tensor([len(tokens) for tokens in self._members.tokens])

    @property
    def segments(self) -> list[WaveSegment]:
        """What was clustered, in order."""
        return self._members.segments

    @property
    def step(self) -> ForwardBatch:
        """The decode step that all queries are of: the context does not grow."""
        return _batch(Mode.DECODE, len(self.sample.k), 1)

    def selections(self) -> list[Selection]:
        """Return the selection of each step of the sample."""
        everyone = torch.ones(1, dtype=torch.bool)
        return [self.algorithm.retrieve_topk(q[None], 0, self.step, everyone) for q in self.sample.q]

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


def make_algorithm(config: SparseConfig, sample: KVSample) -> BaseSparseAlgorithm:
    """Return the algorithm for the sample's shape: one layer, one KV head, one request; it has seen nothing yet."""
    n, d = sample.k.shape
    geometry = KVGeometry(KVKind.MHA, 1, 1, d, d, KVDtype.F32, PAGE)
    room = -(-n // PAGE) * PAGE
    context = AlgorithmContext(
        geometry, config, sample.q.shape[1], sample.scale, 1, room, room, NullRuntime(), _ContextKeys(sample)
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
