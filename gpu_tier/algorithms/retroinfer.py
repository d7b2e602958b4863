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
  the denominator, of those too that the numerator leaves out; here omitted clusters are in neither, as if they did not
  exist. With ``estimation = 1`` nothing is left out and both agree.
* Both counts follow from m at every step. The paper adds ``max(1, round(ratio · 64))`` with every update: with 64
  clusters an update 1 instead of 1.152 retrieved and 15 instead of 14.848 estimated ones.

What the host knows of the index are numbers: the boundary and m of each layer. Steps never wait for the device, but
where a segment is clustered the owner of its KV (`sink`) may.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import ClassVar

import torch
from torch import Tensor

from kvcm.gpu_tier.algorithms.base import AlgorithmContext, BaseSparseAlgorithm, PerPass, Sidecar, real_rows
from kvcm.gpu_tier.config import RetroInferConfig
from kvcm.gpu_tier.errors import ConfigError, StateError
from kvcm.gpu_tier.index.meta_index import MetaIndex, Zones, ZoneSizes, divide, rank
from kvcm.gpu_tier.index.wave_index import (
    Clusters,
    SegmentRows,
    StoredSegment,
    WaveSegment,
    build_global,
    build_segments,
    due_updates,
    most_clusters,
    prompt_mean,
    prompt_segments,
    whole_segments,
)
from kvcm.gpu_tier.kernels.centroid_score import centroid_score
from kvcm.gpu_tier.kernels.weighted_attn import weighted_attn
from kvcm.gpu_tier.runtime import upload
from kvcm.gpu_tier.types import ForwardBatch, Partial, Selection, SteadyRing, SteadyZone, Unit

__all__ = ["Indexed", "RetroInfer", "SegmentJob"]

# Clusters segments of requests and keeps account of them, for RetroInfer.

_TOGETHER_TOKENS = 32768  # tokens that are clustered in one call; bounds the memory that it takes


@dataclass(slots=True)
class Indexed:
    """How far a request is indexed in a layer: tokens from the sinks to before `boundary`, in so many clusters."""

    boundary: int
    clusters: int = 0


@dataclass(frozen=True, slots=True)
class SegmentJob:
    """A segment to cluster in a layer."""

    layer_id: int
    request: int
    segment: range


class _SegmentBuilder:
    """The clustered segments of all layers and requests of one engine.

    In each layer the segments of a request follow each other from the first token behind the sinks, and their clusters
    are numbered through. The host knows of a layer how far it is clustered and into how many clusters; nothing here
    reads what the device computed, except the owner of the clusters' KV (`sink`).

    Args:
        on_segment: is called with layer, request and segment when one was clustered or imported.

    Attributes:
        built: segments clustered so far, each layer counted.
    """

    def __init__(
        self, context: AlgorithmContext, settings: RetroInferConfig, index: MetaIndex,
        on_segment: Callable[[int, int, WaveSegment], None],
    ) -> None:  # fmt: skip
        self._context = context
        self._settings = settings
        self._index = index
        self._indexed: dict[int, list[Indexed]] = {}
        self._on_segment = on_segment
        self.built = 0

    def open(self, request: int) -> None:
        """Begin with a request, if that was not done."""
        if request not in self._indexed:
            layers = self._context.geometry.layers
            self._indexed[request] = [Indexed(self._settings.sink) for _ in layers]

    def of(self, layer_id: int, request: int) -> Indexed:
        """Return how far a request is indexed in a layer.

        Raises:
            StateError: nothing was reserved for the request.
        """
        if request not in self._indexed:
            raise StateError(f"request {request} has no index: reserve() comes first")
        return self._indexed[request][self._context.geometry.layer_index(layer_id)]

    def close(self, request: int) -> None:
        """Forget a request; one that is not known too."""
        self._indexed.pop(request, None)

    def build(self, jobs: Sequence[SegmentJob]) -> None:
        """Cluster segments, neighbours of the same length together; of a request and layer they come in order."""
        start = 0
        while start < len(jobs):
            tokens = len(jobs[start].segment)
            stop = most = start + max(1, _TOGETHER_TOKENS // tokens)
            stop = next((i for i, job in enumerate(jobs[start:most], start) if len(job.segment) != tokens), stop)
            self._build_together(jobs[start:stop])
            start = stop

    def _build_together(self, jobs: Sequence[SegmentJob]) -> None:
        rows = [self._rows_of(job) for job in jobs]
        k, v = torch.stack([k for k, _ in rows]), torch.stack([v for _, v in rows])
        built = build_segments(k, v, self._settings, kernels=self._context.config.kernels)
        for i, job in enumerate(jobs):
            self._store(job, built, i)

    def build_prompt(self, jobs: Sequence[SegmentJob]) -> None:
        """Cluster a prompt of one layer as settings have it that need all of it at once.

        Args:
            jobs: its segments, one behind the other.
        """
        if not jobs:
            return
        settings, kernels = self._settings, self._context.config.kernels
        whole = SegmentJob(jobs[0].layer_id, jobs[0].request, range(jobs[0].segment.start, jobs[-1].segment.stop))
        k, v = self._rows_of(whole)
        if settings.final_assign == "global":
            self._store(whole, build_global(k, v, [job.segment for job in jobs], settings, kernels), 0)
            return
        mean = prompt_mean(k)
        for job in jobs:
            part = slice(job.segment.start - whole.segment.start, job.segment.stop - whole.segment.start)
            self._store(job, build_segments(k[None, part], v[None, part], settings, mean, kernels), 0)

    def _rows_of(self, job: SegmentJob) -> tuple[Tensor, Tensor]:
        return self._context.keys.rows(job.layer_id, job.request, job.segment.start, job.segment.stop)

    def _store(self, job: SegmentJob, built: Clusters, i: int) -> None:
        clusters = built.centroids[i], built.value_sums[i], built.sizes[i]
        self.append(job, *clusters, built.members[i])
        self.built += 1

    def append(self, job: SegmentJob, centroids: Tensor, value_sums: Tensor, sizes: Tensor, members: Tensor) -> None:
        """Take a clustered segment into the index, and say so.

        Args:
            job: the segment, which begins where the layer is indexed to.
            centroids: ``[H, m, d]``.
            value_sums: ``[H, m, dv]``.
            sizes: ``int32 [H, m]``.
            members: ``int32 [H, t]``.

        Raises:
            StateError: the segment begins elsewhere.
        """
        state = self.of(job.layer_id, job.request)
        if state.boundary != job.segment.start:
            raise StateError(f"request {job.request} is indexed to {state.boundary}, not {job.segment.start}")
        layer = self._context.geometry.layer_index(job.layer_id)
        self._index.write(
            layer=layer,
            request=job.request,
            first=state.clusters,
            centroids=centroids,
            value_sums=value_sums,
            sizes=sizes,
        )
        segment = WaveSegment(job.segment.start, state.clusters, sizes, members)
        state.boundary, state.clusters = job.segment.stop, state.clusters + segment.clusters
        self._on_segment(job.layer_id, job.request, segment)


# Sidecars of RetroInfer: whole segments of prompts, in slices beside the pages of their tokens (`wave_sidecar`).


@dataclass(slots=True)
class _RequestSegments:
    """State of a request on the host.

    Attributes:
        n_tokens: tokens that it is known to have.
        segments: first cluster, sizes and members of each of its whole segments, by number and layer.
        pending: rows that were offered, by page, until the prompt is complete; they stay as they are while it lives.
        offered: whole segments of them, by number; None where they do not agree.
    """

    n_tokens: int = 0
    segments: dict[int, dict[int, tuple[int, Tensor, Tensor]]] = field(default_factory=dict)
    pending: dict[int, Tensor] = field(default_factory=dict)
    offered: dict[int, StoredSegment | None] = field(default_factory=dict)


class _SegmentSidecars:
    """Receives clustered segments, and exports and imports whole ones.

    A segment is taken over only if every page's slice is there, all agree, and the request's prompt is so long that it
    would have been clustered as a whole. Segments are numbered through, so those behind a missing one wait until that
    has been clustered from KV, layer by layer. In a conversation each turn leaves such a gap: its last pages were
    stored before the segment that they begin was complete.

    Args:
        builder: keeps account of segments.

    Attributes:
        rows: the format; it has no rows where there is no sidecar.
        imported: segments taken over so far, each layer counted.
    """

    def __init__(
        self, context: AlgorithmContext, settings: RetroInferConfig, index: MetaIndex, builder: _SegmentBuilder
    ) -> None:
        self._context = context
        self._settings = settings
        self._index = index
        self._builder = builder
        self._known: dict[int, _RequestSegments] = {}
        self.rows = SegmentRows(context.geometry, settings)
        self.imported = 0

    def reserve(self, request: int, n_tokens: int) -> None:
        """Record the tokens of a request."""
        known = self._known.setdefault(request, _RequestSegments())
        known.n_tokens = max(known.n_tokens, n_tokens)

    def store(self, layer_id: int, request: int, segment: WaveSegment) -> None:
        """Keep what the meta index does not: see `SegmentSink`."""
        number, beside = divmod(segment.start - self._settings.sink, self._settings.segment)
        if beside or segment.tokens != self._settings.segment:
            return
        # Into pinned memory and without waiting: a reader reads the meta index before it, which waits.
        members = segment.members.to(self.rows.index_dtype).to("cpu", non_blocking=True)
        sizes = segment.sizes.to("cpu", non_blocking=True)
        self._known[request].segments.setdefault(number, {})[layer_id] = segment.first_cluster, sizes, members

    def export(self, request: int, start: int, stop: int) -> Sidecar:
        """Return the rows of the whole pages in [start, stop); waits for the device."""
        size = self._context.geometry.page_size
        pages = range(-(-start // size), max(-(-start // size), stop // size))
        data = torch.zeros(len(pages), self.rows.row_bytes, dtype=torch.uint8)
        for number in self.rows.segments_in(pages):
            segment = self._stored(request, number)
            if segment is None:
                continue
            beside = self.rows.pages_of(number)
            shared = range(max(pages.start, beside.start), min(pages.stop, beside.stop))
            rows = self.rows.pack(number, segment)
            data[shared.start - pages.start : shared.stop - pages.start] = rows[
                shared.start - beside.start : shared.stop - beside.start
            ]
        return Sidecar(pages.start * size, data)

    def _stored(self, request: int, number: int) -> StoredSegment | None:
        """Return a segment that is clustered in all layers, None when it is not."""
        layers = self._context.geometry.layers
        known = self._known[request].segments.get(number, {}) if request in self._known else {}
        if len(known) < len(layers):
            return None
        firsts, sizes, members = zip(*(known[layer_id] for layer_id in layers), strict=True)
        clusters = sizes[0].shape[1]
        found = [self._index.read(layer, request, first, clusters) for layer, first in enumerate(firsts)]
        centroids, value_sums = (torch.stack(part).cpu() for part in zip(*found, strict=True))
        return StoredSegment(centroids, value_sums, torch.stack(sizes), torch.stack(members))

    def import_rows(self, request: int, sidecar: Sidecar) -> int:
        """Take over the segments that are complete with these rows, and return the tokens that they cover.

        Raises:
            ConfigError: the sidecar does not start at a page or has another shape.
        """
        size = self._context.geometry.page_size
        if sidecar.start % size:
            raise ConfigError("start", sidecar.start, f"must be a multiple of the page size {size}")
        if sidecar.data.ndim != 2 or sidecar.data.shape[1] != self.rows.row_bytes:
            raise ConfigError("data", tuple(sidecar.data.shape), f"must be rows of {self.rows.row_bytes} bytes")
        self._known[request].pending.update(enumerate(sidecar.data, sidecar.start // size))
        covered = 0
        while tokens := self._append_in_all_layers(request):
            covered += tokens
        return covered

    def _append_in_all_layers(self, request: int) -> int:
        """Take over the segment that comes next, if it is there; returns the tokens that it covers."""
        layers = self._context.geometry.layers
        start = self._builder.of(layers.start, request).boundary
        if not all(self.append(layer_id, request) for layer_id in layers):
            return 0
        return self._settings.segment + (start if start == self._settings.sink else 0)

    def append(self, layer_id: int, request: int) -> bool:
        """Take over the segment that a layer is indexed up to; returns false when it is not there."""
        start = self._builder.of(layer_id, request).boundary
        stored = self._offered(request, start)
        if stored is None:
            return False
        settings, device = self._settings, self._context.runtime.device
        position = self._context.geometry.layer_index(layer_id)
        parts = (stored.centroids, stored.value_sums, stored.sizes, stored.members.int())
        job = SegmentJob(layer_id, request, range(start, start + settings.segment))
        self._builder.append(job, *(upload(part[position], device) for part in parts))
        self.imported += 1
        return True

    def has(self, request: int, start: int) -> bool:
        """Return whether the segment that begins there can be taken over."""
        return self._offered(request, start) is not None

    def _offered(self, request: int, start: int) -> StoredSegment | None:
        """Return the segment that begins there, if its rows are there, agree, and it may be taken over."""
        known, settings = self._known.get(request), self._settings
        number, beside = divmod(start - settings.sink, settings.segment)
        if known is None or not known.pending or beside or not whole_segments(start, known.n_tokens, settings):
            return None
        rows = [known.pending.get(page) for page in self.rows.pages_of(number)]
        complete = [row for row in rows if row is not None]
        if len(complete) < len(rows):
            return None
        if number not in known.offered:
            known.offered[number] = self.rows.unpack(number, complete)
        return known.offered[number]

    def drop_pending(self, request: int) -> None:
        """Let go of rows that no segment needed."""
        if request in self._known:
            self._known[request].pending.clear()
            self._known[request].offered.clear()

    def free(self, request: int) -> None:
        """Forget a request; one that is not known too."""
        self._known.pop(request, None)


@dataclass(frozen=True, slots=True)
class _Step:
    """The query for the rows of a step; `indexed` are boundary and clusters of the real ones."""

    batch: ForwardBatch
    sparse_mask: Tensor
    indexed: tuple[tuple[int, int], ...]
    asked: ZoneSizes
    steady: SteadyZone


class RetroInfer(BaseSparseAlgorithm):
    """Selects clusters of tokens.

    Attributes:
        index: the clusters on the device.
        segments: the clustered segments of each request.
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
        self.segments = _SegmentBuilder(context, self.settings, self.index, self._publish_segment)
        self.sidecars = _SegmentSidecars(context, self.settings, self.index, self.segments)
        self._overflow = torch.zeros((), dtype=torch.int64, device=context.runtime.device)
        self._kept: _Step | None = None
        self._tables = PerPass(self._table)

    def _publish_segment(self, layer_id: int, request: int, segment: WaveSegment) -> None:
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
        """Clusters of the retrieval zones that did not fit the buffer and were estimated; waits for the device."""
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

    def retrieval_capacity(self, clusters: int) -> int:
        """Return the tokens that a head may retrieve."""
        return self.settings.exec_factor * self.retrieved(clusters) * self.settings.tokens_per_centroid

    @property
    def max_execution_tokens(self) -> int:
        """See `BaseSparseAlgorithm`."""
        most = self.retrieval_capacity(most_clusters(self.context.max_tokens, self.settings))
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
        """Cluster the remaining prompt up to its last `local` tokens."""
        layers = self.context.geometry.layers
        if not self._needs_whole_prompt:
            self._index_whole([(layer_id, request, n_prompt) for layer_id in layers])
        self.sidecars.drop_pending(request)
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
        estimate = Selection(unit=self.unit, unit_tokens=0, indices=zones.estimated, lengths=zones.estimated_lengths)
        return Selection(
            unit=self.unit, unit_tokens=0, indices=zones.retrieved, lengths=zones.retrieved_lengths, steady=step.steady,
            estimate=estimate if estimate.indices.shape[-1] else None,
        )  # fmt: skip

    def _zones(self, queries: Tensor, layer_id: int, batch: ForwardBatch, asked: ZoneSizes) -> Zones:
        context, heads = self.context, self.context.geometry.num_kv_heads
        if not asked.most_clusters:
            return Zones.none(batch.rows, heads, queries.device)
        views, table = self.index.views(context.geometry.layer_index(layer_id)), self._tables.of(batch)
        scores = torch.empty(batch.rows, queries.shape[1], asked.most_clusters, device=queries.device)
        centroid_score(
            q=queries,
            centroids=views.centroids,
            log_size=views.log_size,
            page_table=table,
            n_clusters=asked.clusters,
            sm_scale=context.sm_scale,
            out=scores,
            impl=context.config.kernels,
        )
        ranks = rank(scores, heads, self.settings.rank)
        zones = divide(ranks, views.log_size, table, asked, context.config.kernels)
        self._overflow += zones.overflow
        return zones

    def _step(self, layer_id: int, batch: ForwardBatch, sparse_mask: Tensor) -> _Step:
        """Return the query; an upload for one layer serves all layers in which as much is indexed."""
        states = [self.segments.of(layer_id, request) for request in batch.requests]
        indexed = tuple((state.boundary, state.clusters) for state in states)
        kept = self._kept
        if kept is None or kept.batch is not batch or kept.sparse_mask is not sparse_mask or kept.indexed != indexed:
            kept = self._kept = self._make_step(batch, sparse_mask, indexed)
        return kept

    def _make_step(self, batch: ForwardBatch, sparse_mask: Tensor, indexed: tuple[tuple[int, int], ...]) -> _Step:
        rows = [
            (boundary, m, self.retrieved(m), self.retrieved(m) + self.estimated(m), self.retrieval_capacity(m))
            for boundary, m in indexed
        ]
        rows += [(0,) * 5] * (batch.rows - batch.num_real)
        device = batch.seq_lens.device
        numbers = upload(torch.tensor(rows, dtype=torch.int32).T.contiguous(), device)
        numbers = torch.where(sparse_mask & real_rows(batch), numbers, 0)
        most = [max(column) for column in zip(*rows, strict=True)]
        asked = ZoneSizes(
            clusters=numbers[1],
            retrieved=numbers[2],
            ranked=numbers[3],
            capacity=numbers[4],
            most_clusters=most[1],
            most_retrieved=most[2],
            most_ranked=most[3],
        )
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
            q=queries,
            centroids=views.centroids,
            value_sums=views.value_sums,
            log_size=views.log_size,
            page_table=self._tables.of(batch),
            ids=selection.estimate.indices,
            lengths=selection.estimate.lengths,
            sm_scale=context.sm_scale,
            out_o=partial.o,
            out_lse=partial.lse,
            impl=context.config.kernels,
        )
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
        return self.sidecars.import_rows(request, sidecar) if self.sidecar_page_bytes() else 0
