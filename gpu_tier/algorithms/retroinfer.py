"""Attention over retrieved clusters of tokens and an estimate of the others (RetroInfer, PVLDB 19(5), 2026).

Tokens of a request, in one layer:

    0 … sink      clustered, [sink, boundary)      the last ones, [boundary, n)
    steady        retrieved | estimated | left out  steady

`boundary` moves to ``n_prompt - local`` while the prompt is computed, segment by segment as their KV arrives, and by
`update_segment` tokens in a decode step in which it is ``local + update_segment`` behind. Requests that attend densely
are indexed like the others. A prompt shorter than ``sink + local + update_segment`` is not indexed before it has grown
so far. With `center="prompt"` or `final_assign="global"` a prompt is indexed when it is complete.

In a step each head ranks its m clusters by their centroids. Of the first ``max(1, round(retrieval · m))`` the tokens
are attended to exactly, of the next ``round(estimation · m)`` attention is estimated by their centroids and sums of
values, and steady tokens are always attended to. What differs from the paper:

* The softmax is normalised over exactly these three sets. Equation 2 of the paper has the estimates of all clusters in
  the denominator, of those too that the numerator leaves out; here what is left out is in neither, as if it did not
  exist. With ``estimation = 1`` nothing is left out and both agree.
* Both counts follow from m at every step. The paper adds ``max(1, round(ratio · 64))`` with every update: with 64
  clusters an update 1 instead of 1.152 retrieved and 15 instead of 14.848 estimated ones.

What the host knows of the index are numbers: the boundary and m of each layer. Steps never wait for the device, but
where a segment is clustered whoever keeps its KV (`sink`) may.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import ClassVar

import torch
from torch import Tensor

from gpu_tier.algorithms.base import BaseSparseAlgorithm, Sidecar
from gpu_tier.algorithms.batch_rows import PerPass, real_rows
from gpu_tier.algorithms.segment_builder import SegmentBuilder, SegmentJob
from gpu_tier.algorithms.segment_sidecars import SegmentSidecars
from gpu_tier.config import RetroInferConfig
from gpu_tier.index.wave_index import due_updates, most_clusters, prompt_segments, whole_segments
from gpu_tier.index.wave_meta import MetaIndex
from gpu_tier.index.wave_segment import WaveSegment
from gpu_tier.index.wave_zones import Asked, Zones, divide, rank
from gpu_tier.kernels.centroid_score import centroid_score
from gpu_tier.kernels.weighted_attn import weighted_attn
from gpu_tier.runtime import upload
from gpu_tier.types import ForwardBatch, Partial, Selection, SteadyRing, SteadyZone, Unit

__all__ = ["RetroInfer"]


@dataclass(frozen=True, slots=True)
class _Step:
    """What is asked of the rows of a step; `indexed` are boundary and clusters of the real ones."""

    batch: ForwardBatch
    sparse_mask: Tensor
    indexed: tuple[tuple[int, int], ...]
    asked: Asked
    steady: SteadyZone


class RetroInfer(BaseSparseAlgorithm):
    """Selects clusters of tokens.

    Attributes:
        index: the clusters on the device.
        segments: what is clustered of each request.
        sidecars: whole segments as they are stored beside KV.
    """

    unit: ClassVar[Unit] = Unit.CLUSTER
    needs_values: ClassVar[bool] = True

    def initialize_representation_pool(self) -> None:
        """Allocate the meta index."""
        context = self.context
        self.settings = context.settings(RetroInferConfig)
        self.index = MetaIndex(
            context.geometry, self.settings, max_requests=context.max_requests, max_tokens=context.max_tokens,
            total_tokens=context.total_tokens, device=context.runtime.device,
        )  # fmt: skip
        self.segments = SegmentBuilder(context, self.settings, self.index, self._tell)
        self.sidecars = SegmentSidecars(context, self.settings, self.index, self.segments)
        self._overflow = torch.zeros((), dtype=torch.int64, device=context.runtime.device)
        self._kept: _Step | None = None
        self._tables = PerPass(self._table)

    def _tell(self, layer_id: int, request: int, segment: WaveSegment) -> None:
        if self.sidecar_page_bytes():
            self.sidecars.store(layer_id, request, segment)
        if self.sink is not None:
            self.sink.store(layer_id, request, segment)

    # What it selects.

    @property
    def unit_tokens(self) -> int:
        """0: clusters differ in size."""
        return 0

    @property
    def per_head(self) -> bool:
        """Each KV head has clusters of its own."""
        return True

    @property
    def represents_keys(self) -> bool:
        """What an attached prefix lacks is clustered with the next chunk, which reads the KV that it needs itself."""
        return False

    @property
    def max_items(self) -> int:
        """Clusters retrieved of the longest request. Selections are narrower and grow up to it."""
        return self.retrieved(most_clusters(self.context.max_tokens, self.settings))

    @property
    def exec_overflow(self) -> int:
        """Clusters of the retrieval zones that did not fit the room and were estimated; waits for the device."""
        return int(self._overflow)

    @property
    def built(self) -> int:
        """Segments that were clustered, each layer counted."""
        return self.segments.built

    @property
    def imported(self) -> int:
        """Segments that were taken over from sidecars, each layer counted."""
        return self.sidecars.imported

    def retrieved(self, clusters: int) -> int:
        """Return the clusters r of the retrieval zone, of so many."""
        return min(clusters, max(1, round(self.settings.retrieval * clusters)))

    def estimated(self, clusters: int) -> int:
        """Return the clusters of the estimation zone, of so many."""
        rest = clusters - self.retrieved(clusters)
        share = self.settings.estimation
        return rest if share == 1 else min(rest, round(share * clusters))

    def room(self, clusters: int) -> int:
        """Return the tokens that a head may retrieve."""
        return self.settings.exec_factor * self.retrieved(clusters) * self.settings.tokens_per_centroid

    @property
    def max_execution_tokens(self) -> int:
        """See `BaseSparseAlgorithm`."""
        most = self.room(most_clusters(self.context.max_tokens, self.settings))
        return min(self.context.max_tokens, self.settings.unindexed + most)

    def steady_ring(self, n_prompt: int) -> SteadyRing:
        """See `BaseSparseAlgorithm`."""
        return SteadyRing(self.settings.sink, self.settings.local + self.settings.update_segment)

    # The index.

    def reserve(self, request: int, n_tokens: int) -> None:
        """See `BaseSparseAlgorithm`."""
        self.index.reserve(request, n_tokens)
        self.segments.open(request)
        self.sidecars.reserve(request, n_tokens)

    @property
    def _needs_whole_prompt(self) -> bool:
        return self.settings.center == "prompt" or self.settings.final_assign == "global"

    def construct_representations(
        self, layer_id: int, batch: ForwardBatch, k: Tensor, v: Tensor | None = None, q: Tensor | None = None,
        **extra: Tensor,
    ) -> None:  # fmt: skip
        """Index the whole segments that are complete with this chunk: from sidecars, or from KV that is read back."""
        if self._needs_whole_prompt:
            return
        rows = zip(batch.requests, batch.lengths, strict=True)
        self._index_whole([(layer_id, request, length) for request, length in rows])

    def _index_whole(self, wanted: Sequence[tuple[int, int, int]]) -> None:
        """Take over or cluster the whole segments of (layer, request, tokens), one behind the other."""
        while jobs := [job for one in wanted for job in self._missing(*one)]:
            self.segments.build(jobs)

    def _missing(self, layer_id: int, request: int, n_tokens: int) -> list[SegmentJob]:
        """Take over the segments that come next, and return those that are to be clustered before others are."""
        while self.sidecars.append(layer_id, request):
            pass
        segments = whole_segments(self.segments.of(layer_id, request).boundary, n_tokens, self.settings)
        missing = takewhile(lambda segment: not self.sidecars.has(request, segment.start), segments)
        return [SegmentJob(layer_id, request, segment) for segment in missing]

    def finish_prompt(self, request: int, n_prompt: int) -> None:
        """Cluster what is left of the prompt up to its last `local` tokens."""
        layers = self.context.geometry.layers
        if not self._needs_whole_prompt:
            self._index_whole([(layer_id, request, n_prompt) for layer_id in layers])
        self.sidecars.settle(request)
        jobs = [
            SegmentJob(layer_id, request, segment)
            for layer_id in layers
            for segment in prompt_segments(self.segments.of(layer_id, request).boundary, n_prompt, self.settings)
        ]
        if not self._needs_whole_prompt:
            self.segments.build(jobs)
            return
        for layer_id in layers:
            self.segments.build_prompt([job for job in jobs if job.layer_id == layer_id])

    def update_representations(
        self, layer_id: int, batch: ForwardBatch, k: Tensor, v: Tensor | None = None, **extra: Tensor
    ) -> None:
        """Cluster the oldest tokens of rows whose steady zone is full."""
        self.segments.build([
            job
            for request, length in zip(batch.requests, batch.lengths, strict=True)
            for job in self._due(layer_id, request, length)
        ])  # fmt: skip

    def become_sparse(self, request: int, n_tokens: int) -> None:
        """Cluster what no step has clustered."""
        self.segments.build([
            job for layer_id in self.context.geometry.layers for job in self._due(layer_id, request, n_tokens)
        ])  # fmt: skip

    def _due(self, layer_id: int, request: int, n_tokens: int) -> list[SegmentJob]:
        segments = due_updates(self.segments.of(layer_id, request).boundary, n_tokens, self.settings)
        return [SegmentJob(layer_id, request, segment) for segment in segments]

    # A step.

    def retrieve_topk(
        self, queries: Tensor, layer_id: int, batch: ForwardBatch, sparse_mask: Tensor, **extra: Tensor
    ) -> Selection:
        """See `BaseSparseAlgorithm`."""
        step = self._step(layer_id, batch, sparse_mask)
        zones = self._zones(queries, layer_id, batch, step.asked)
        estimate = Selection(self.unit, 0, zones.estimated, zones.estimated_lengths)
        return Selection(
            self.unit, 0, zones.retrieved, zones.retrieved_lengths, steady=step.steady,
            estimate=estimate if estimate.indices.shape[-1] else None,
        )  # fmt: skip

    def _zones(self, queries: Tensor, layer_id: int, batch: ForwardBatch, asked: Asked) -> Zones:
        context, heads = self.context, self.context.geometry.num_kv_heads
        if not asked.most_clusters:
            return Zones.none(batch.rows, heads, queries.device)
        views, table = self.index.views(context.geometry.layer_index(layer_id)), self._tables.of(batch)
        scores = torch.empty(batch.rows, queries.shape[1], asked.most_clusters, device=queries.device)
        centroid_score(
            queries, views.centroids, views.log_size, table, asked.clusters, context.sm_scale, scores,
            impl=context.config.kernels,
        )  # fmt: skip
        ranks = rank(scores, heads, self.settings.rank)
        zones = divide(ranks, views.log_size, table, asked, context.config.kernels)
        self._overflow += zones.overflow
        return zones

    def _step(self, layer_id: int, batch: ForwardBatch, sparse_mask: Tensor) -> _Step:
        """Return what is asked; what was uploaded for one layer serves all in which as much is indexed."""
        states = [self.segments.of(layer_id, request) for request in batch.requests]
        indexed = tuple((state.boundary, state.clusters) for state in states)
        kept = self._kept
        if kept is None or kept.batch is not batch or kept.sparse_mask is not sparse_mask or kept.indexed != indexed:
            kept = self._kept = self._ask(batch, sparse_mask, indexed)
        return kept

    def _ask(self, batch: ForwardBatch, sparse_mask: Tensor, indexed: tuple[tuple[int, int], ...]) -> _Step:
        rows = [
            (boundary, m, self.retrieved(m), self.retrieved(m) + self.estimated(m), self.room(m))
            for boundary, m in indexed
        ]
        rows += [(0,) * 5] * (batch.rows - batch.num_real)
        device = batch.seq_lens.device
        numbers = upload(torch.tensor(rows, dtype=torch.int32).T.contiguous(), device)
        numbers = torch.where(sparse_mask & real_rows(batch), numbers, 0)
        most = [max(column) for column in zip(*rows, strict=True)]
        asked = Asked(numbers[1], numbers[2], numbers[3], numbers[4], most[1], most[2], most[3])
        firsts = tuple(boundary for boundary, _ in indexed)
        steady = SteadyZone(self.settings.sink, numbers[0], firsts)
        return _Step(batch, sparse_mask, indexed, asked, steady)

    def _table(self, batch: ForwardBatch, _mask: Tensor | None) -> Tensor:
        clusters = most_clusters(max(batch.lengths, default=0), self.settings)
        return self.index.table(batch.req_pool_indices, clusters)

    def estimate(self, queries: Tensor, layer_id: int, batch: ForwardBatch, selection: Selection) -> Partial | None:
        """See `BaseSparseAlgorithm`."""
        if selection.estimate is None:
            return None
        context = self.context
        views = self.index.views(context.geometry.layer_index(layer_id))
        shape = queries.shape[:2]
        partial = Partial(
            torch.empty(*shape, context.geometry.v_head_dim, device=queries.device),
            torch.empty(shape, device=queries.device),
        )
        weighted_attn(
            queries, views.centroids, views.value_sums, views.log_size, self._tables.of(batch),
            selection.estimate.indices, selection.estimate.lengths, context.sm_scale, partial.o, partial.lse,
            impl=context.config.kernels,
        )  # fmt: skip
        return partial

    # Memory.

    def free(self, request: int) -> None:
        """See `BaseSparseAlgorithm`."""
        self.index.free(request)
        self.segments.close(request)
        self.sidecars.free(request)

    def representation_bytes(self, n_tokens: int) -> int:
        """Return the bytes of the meta index: ``2·d + 2·dv + 4`` for each cluster and head, in whole pages."""
        return self.index.bytes_of(n_tokens)

    def sidecar_page_bytes(self) -> int:
        """Return the bytes of a page's slice; 0 where a prompt is clustered as a whole, or pages divide no segment."""
        return 0 if self._needs_whole_prompt else self.sidecars.rows.row_bytes

    def export_sidecar(self, request: int, start: int, stop: int) -> Sidecar | None:
        """Return the slices of the whole pages in [start, stop) of segments that are clustered; waits for the device.

        Only whole segments of the prompt are exported: the last one depends on where the prompt ends, and decoded
        tokens are not those of a prompt.
        """
        return self.sidecars.export(request, start, stop) if self.sidecar_page_bytes() else None

    def import_sidecar(self, request: int, sidecar: Sidecar) -> int:
        """Take whole segments over, those of a leading run; `reserve` was called with the prompt's tokens before."""
        return self.sidecars.take(request, sidecar) if self.sidecar_page_bytes() else 0
