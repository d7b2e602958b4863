"""Clusters segments of requests and keeps account of what is clustered, for RetroInfer.

In each layer the segments of a request follow each other from the first token behind the sinks, and their clusters are
numbered through. The host knows of a layer how far it is clustered and into how many clusters; nothing here reads what
the device computed, except whoever keeps the KV of clusters (`sink`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_tier.algorithms.base import AlgorithmContext
from gpu_tier.config import RetroInferConfig
from gpu_tier.errors import StateError
from gpu_tier.index.wave_index import Clusters, build_global, build_segments, prompt_mean
from gpu_tier.index.wave_meta import MetaIndex
from gpu_tier.index.wave_segment import WaveSegment

__all__ = ["Indexed", "SegmentBuilder", "SegmentJob"]

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


class SegmentBuilder:
    """The clustered segments of all layers and requests of one engine.

    Args:
        context: of the algorithm.
        settings: of the algorithm.
        index: where clusters are kept.
        tell: is called with layer, request and segment when one was clustered or taken over.

    Attributes:
        built: segments clustered so far, each layer counted.
    """

    def __init__(
        self, context: AlgorithmContext, settings: RetroInferConfig, index: MetaIndex,
        tell: Callable[[int, int, WaveSegment], None],
    ) -> None:  # fmt: skip
        self._context = context
        self._settings = settings
        self._index = index
        self._indexed: dict[int, list[Indexed]] = {}
        self._tell = tell
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
        self._index.write(layer, job.request, state.clusters, centroids, value_sums, sizes)
        segment = WaveSegment(job.segment.start, state.clusters, sizes, members)
        state.boundary, state.clusters = job.segment.stop, state.clusters + segment.clusters
        self._tell(job.layer_id, job.request, segment)
