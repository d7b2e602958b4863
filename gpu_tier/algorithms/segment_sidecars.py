"""Sidecars of RetroInfer: whole segments of prompts, in slices beside the pages of their tokens (`wave_sidecar`).

A segment is taken over only if every page's slice is there, all agree, and the request's prompt is so long that it
would have been clustered as a whole. Segments are numbered through, so those behind a missing one wait until that has
been clustered from KV, layer by layer. In a conversation each turn leaves such a gap: its last pages were stored before
the segment that they begin was complete.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from gpu_tier.algorithms.base import AlgorithmContext, Sidecar
from gpu_tier.algorithms.segment_builder import SegmentBuilder, SegmentJob
from gpu_tier.config import RetroInferConfig
from gpu_tier.errors import ConfigError
from gpu_tier.index.wave_index import whole_segments
from gpu_tier.index.wave_meta import MetaIndex
from gpu_tier.index.wave_segment import WaveSegment
from gpu_tier.index.wave_sidecar import SegmentRows, StoredSegment
from gpu_tier.runtime import upload

__all__ = ["SegmentSidecars"]


@dataclass(slots=True)
class _Known:
    """What is kept of a request on the host.

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


class SegmentSidecars:
    """Hears of clustered segments, and exports and imports whole ones.

    Args:
        context: of the algorithm.
        settings: of the algorithm.
        index: where clusters are kept.
        builder: who keeps account of segments.

    Attributes:
        rows: the format; it has no rows where there is no sidecar.
        imported: segments taken over so far, each layer counted.
    """

    def __init__(
        self, context: AlgorithmContext, settings: RetroInferConfig, index: MetaIndex, builder: SegmentBuilder
    ) -> None:
        self._context = context
        self._settings = settings
        self._index = index
        self._builder = builder
        self._known: dict[int, _Known] = {}
        self.rows = SegmentRows(context.geometry, settings)
        self.imported = 0

    def reserve(self, request: int, n_tokens: int) -> None:
        """Hear of the tokens of a request."""
        known = self._known.setdefault(request, _Known())
        known.n_tokens = max(known.n_tokens, n_tokens)

    def store(self, layer_id: int, request: int, segment: WaveSegment) -> None:
        """Keep what the meta index does not: see `SegmentSink`."""
        number, beside = divmod(segment.start - self._settings.sink, self._settings.segment)
        if beside or segment.tokens != self._settings.segment:
            return
        # Into pinned memory and without waiting: who reads it, reads the meta index before, which waits.
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

    def take(self, request: int, sidecar: Sidecar) -> int:
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

    def settle(self, request: int) -> None:
        """Let go of rows that no segment needed."""
        if request in self._known:
            self._known[request].pending.clear()
            self._known[request].offered.clear()

    def free(self, request: int) -> None:
        """Forget a request; one that is not known too."""
        self._known.pop(request, None)
