"""The wave index of RetroInfer: which tokens are clustered together, and what a cluster is (PVLDB 19(5), 2026, §4.2).

Rules:

1. A segment is clustered on its own: neither its clusters nor its place in the index depend on what comes behind it.
   Whole segments of a prompt begin at ``sink + segment·i``, for every chunking of the prompt.
2. Keys are centred before they are clustered, so that clusters follow directions that differ and not the one that all
   keys share; adding a constant to all keys of a segment changes no label.
3. A cluster is kept as the mean of its keys as they are, neither normalised nor centred, and the sum of its
   values: ``size · exp(q·mean)`` then never exceeds ``Σ exp(q·k)`` over its keys (Jensen).

Everything is computed in f32 for every format of the KV. Shapes: S segments of t tokens each, H KV heads, m clusters
of a segment.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from kvcm.gpu_tier.config import RetroInferConfig
from kvcm.gpu_tier.geometry import KVGeometry
from kvcm.gpu_tier.index.kmeans import spherical_kmeans
from kvcm.gpu_tier.kernels.segment_sum import segment_sum

__all__ = [
    "Clusters",
    "SegmentRows",
    "SegmentSink",
    "StoredSegment",
    "WaveSegment",
    "build_global",
    "build_segment",
    "build_segments",
    "clusters_of",
    "due_updates",
    "most_clusters",
    "prompt_mean",
    "prompt_segments",
    "whole_segments",
]

_SCORES = 1 << 26  # numbers of a piece of the scores of a global assignment


@dataclass(frozen=True, slots=True)
class Clusters:
    """The clusters of segments, and of each segment's heads.

    Attributes:
        centroids: ``f32 [S, H, m, d]`` mean of each cluster's keys; 0 of an empty one.
        value_sums: ``f32 [S, H, m, dv]`` sum of its values.
        sizes: ``int32 [S, H, m]`` its tokens.
        members: ``int32 [S, H, t]`` tokens of the segment, cluster after cluster, ascending in each.
    """

    centroids: Tensor
    value_sums: Tensor
    sizes: Tensor
    members: Tensor


def clusters_of(tokens: int, settings: RetroInferConfig) -> int:
    """Return the clusters m of a segment of so many tokens."""
    return max(1, round(tokens / settings.tokens_per_centroid))


def most_clusters(n_tokens: int, settings: RetroInferConfig) -> int:
    """Return the most clusters that a request of so many tokens has, however many of them are its prompt.

    Only the last segment of a prompt need not be a multiple of `tokens_per_centroid`; it has at most one cluster for
    each part of that.
    """
    if n_tokens < settings.unindexed:
        return 0
    return -(-(n_tokens - settings.sink - settings.local) // settings.tokens_per_centroid)


def whole_segments(indexed: int, n_tokens: int, settings: RetroInferConfig) -> list[range]:
    """Return the whole segments of a prompt, of which `n_tokens` tokens exist, from token `indexed` on."""
    if n_tokens < settings.unindexed:
        return []
    stops = range(indexed + settings.segment, n_tokens - settings.local + 1, settings.segment)
    return [range(stop - settings.segment, stop) for stop in stops]


def prompt_segments(indexed: int, n_prompt: int, settings: RetroInferConfig) -> list[range]:
    """Return the segments of a complete prompt from token `indexed` on; the last one may be shorter."""
    if n_prompt < settings.unindexed:
        return []
    whole = whole_segments(indexed, n_prompt, settings)
    start, stop = indexed + len(whole) * settings.segment, n_prompt - settings.local
    return [*whole, range(start, stop)] if start < stop else whole


def due_updates(indexed: int, n_tokens: int, settings: RetroInferConfig) -> list[range]:
    """Return the segments of decoded tokens that are to be clustered: as many as leave `local` tokens steady."""
    stops = range(indexed + settings.update_segment, n_tokens - settings.local + 1, settings.update_segment)
    return [range(stop - settings.update_segment, stop) for stop in stops]


def build_segment(
    k: Tensor, v: Tensor, settings: RetroInferConfig, kernels: str = "auto"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the clusters of one segment.

    Args:
        k: ``f32 [t, H, d]`` keys.
        v: ``f32 [t, H, dv]`` values.
        settings: of the algorithm.
        kernels: which implementations run.

    Returns:
        Centroids ``f32 [H, m, d]``, value sums ``f32 [H, m, dv]``, sizes ``int32 [H, m]`` and members
        ``int32 [H, t]``, see `Clusters`.
    """
    built = build_segments(k[None], v[None], settings, kernels=kernels)
    return built.centroids[0], built.value_sums[0], built.sizes[0], built.members[0]


def build_segments(
    k: Tensor, v: Tensor, settings: RetroInferConfig, mean: Tensor | None = None, kernels: str = "auto"
) -> Clusters:
    """Return the clusters of segments of the same length.

    Args:
        k: ``f32 [S, t, H, d]`` keys.
        v: ``f32 [S, t, H, dv]`` values.
        settings: of the algorithm.
        mean: ``f32 [H, d]`` of the whole prompt, for `center="prompt"`.
        kernels: which implementations run.
    """
    segments, tokens, heads = k.shape[:3]
    keys, values = _by_problem(k), _by_problem(v)
    clusters = clusters_of(tokens, settings)
    labels = _labels(keys, _centre(keys, segments, settings, mean), clusters, settings.iterations, kernels)[0]
    built = _gather(keys, values, labels, clusters, kernels)
    return Clusters(*(x.unflatten(0, (segments, heads)) for x in built))


def build_global(
    k: Tensor, v: Tensor, segments: list[range], settings: RetroInferConfig, kernels: str = "auto"
) -> Clusters:
    """Return the clusters of a prompt whose tokens belong to the nearest centroid of all segments.

    The centroids are those of the segments; a centroid is compared with keys centred as its own were.

    Args:
        k: ``f32 [t, H, d]`` keys of all segments.
        v: ``f32 [t, H, dv]`` values.
        segments: one behind the other.
        settings: of the algorithm.
        kernels: which implementations run.

    Returns:
        The clusters of the prompt as one segment, S = 1.
    """
    keys, values = _by_problem(k[None]), _by_problem(v[None])
    mean = prompt_mean(k) if settings.center == "prompt" else None
    units, offsets = [], []
    for segment in segments:
        part = keys[:, segment.start - segments[0].start : segment.stop - segments[0].start]
        centre = _centre(keys=part, segments=1, settings=settings, mean=mean)
        unit = _labels(part, centre, clusters_of(len(segment), settings), settings.iterations, kernels)[1]
        units.append(unit)
        offsets.append((unit @ centre[..., None])[..., 0])
    labels = _nearest(keys, torch.cat(units, 1), torch.cat(offsets, 1))
    clusters = sum(clusters_of(len(segment), settings) for segment in segments)
    return Clusters(*(x[None] for x in _gather(keys, values, labels, clusters, kernels)))


def prompt_mean(k: Tensor) -> Tensor:
    """Return the mean of keys ``f32 [t, H, d]``, ``f32 [H, d]``."""
    return k.mean(0, dtype=torch.float64).float()


def _by_problem(x: Tensor) -> Tensor:
    """Return ``[S, t, H, d]`` as ``[S·H, t, d]``: each head of each segment is clustered on its own."""
    return x.float().transpose(1, 2).flatten(0, 1).contiguous()


def _centre(keys: Tensor, segments: int, settings: RetroInferConfig, mean: Tensor | None) -> Tensor:
    """Return the vector subtracted from the keys of each problem, ``f32 [S·H, d]``."""
    if settings.center == "none":
        return keys.new_zeros(keys.shape[0], keys.shape[2])
    if settings.center == "prompt" and mean is not None:
        return mean.repeat(segments, 1)
    # In f64 the sum is as good as exact, so the mean does not depend on how many problems are computed at a time.
    return keys.mean(1, dtype=torch.float64).float()


def _labels(keys: Tensor, centre: Tensor, clusters: int, iterations: int, kernels: str) -> tuple[Tensor, Tensor]:
    """Return labels ``int32 [S·H, t]`` and the unit centroids ``f32 [S·H, m, d]`` of centred keys."""
    problems, tokens = keys.shape[:2]
    centred = keys - centre[:, None]
    return spherical_kmeans(centred, [tokens] * problems, [clusters] * problems, iterations, kernels=kernels)


def _nearest(keys: Tensor, units: Tensor, offsets: Tensor) -> Tensor:
    """Return the centroid of the largest ``k·ĉ - offset`` for each key, ``int32 [H, t]``; ties to the lower id."""
    step = max(1, _SCORES // (units.shape[0] * units.shape[1]))
    pieces = keys.split(step, dim=1)
    return torch.cat([(x @ units.mT - offsets[:, None]).argmax(-1).int() for x in pieces], 1)


def _gather(
    keys: Tensor, values: Tensor, labels: Tensor, clusters: int, kernels: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return centroids, value sums, sizes and members of labelled tokens, with the problems in front."""
    problems = keys.shape[0]
    sizes = torch.zeros(problems, clusters, dtype=torch.int32, device=keys.device)
    sizes.scatter_add_(1, labels.long(), torch.ones_like(labels))
    sums = keys.new_empty(problems, clusters, keys.shape[2])
    value_sums = values.new_empty(problems, clusters, values.shape[2])
    segment_sum(keys, labels, sums, impl=kernels)
    segment_sum(values, labels, value_sums, impl=kernels)
    centroids = sums / sizes.clamp_min(1)[..., None]
    members = labels.argsort(dim=1, stable=True).int()
    return centroids, value_sums, sizes, members


# A clustered segment of a request, and the interface of its observers.


@dataclass(frozen=True, slots=True)
class WaveSegment:
    """Which cluster each token of a segment belongs to, in one layer.

    The clusters of a request in a layer are numbered through: those of its first segment first, then those of the next.
    All KV heads have the same number of clusters in a segment, which follows from its tokens alone.

    Attributes:
        start: first token.
        first_cluster: number of the segment's first cluster.
        sizes: ``int32 [H, m]`` tokens of each cluster; some may be empty.
        members: ``int32 [H, t]`` tokens, counted from `start`: cluster after cluster, ascending in each.
    """

    start: int
    first_cluster: int
    sizes: Tensor
    members: Tensor

    @property
    def tokens(self) -> int:
        """Tokens t of the segment."""
        return self.members.shape[1]

    @property
    def clusters(self) -> int:
        """Clusters m of the segment."""
        return self.sizes.shape[1]


class SegmentSink(Protocol):
    """Owner of the KV of clusters."""

    def store(self, layer_id: int, request: int, segment: WaveSegment) -> None:
        """Take over a segment that was clustered; its KV can be read. Segments come in order, each once.

        From the next step on its clusters may be selected, and its tokens are steady no more.
        """


# A clustered segment as bytes beside the KV pages of its tokens.

_HEADER_BYTES, _DIGEST_BYTES = 32, 16
_NARROW = 1 << 15


@dataclass(frozen=True, slots=True)
class StoredSegment:
    """A segment in all layers, in host memory.

    A segment is longer than a page and does not begin at one: segment i is tokens ``sink + t·i`` to before ``sink +
    t·(i + 1)``, with t tokens a segment. Its bytes, of all layers, are cut into as many equal slices as it has pages.
    Slice j lies beside page ``⌈sink / page⌉ + i·t/page + j``, so the last slice is beside the page of the segment's
    last token, and the key of that page names all tokens that the segment was clustered from.

    A row of a page is a header and a slice:

    | bytes | what |
    |---|---|
    | 8 | 1, or 0 where nothing is stored: the segment was not clustered when the page was written |
    | 8 | number i of the segment |
    | 16 | BLAKE2b of all slices of the segment |
    | rest | the slice, zeros behind its end |

    A segment's bytes are, for all layers together, the centroids ``bf16 [L, H, m, d]``, the value sums ``bf16 [L, H, m,
    dv]``, the sizes ``int32 [L, H, m]`` and the members ``int16 [L, H, t]`` (int32 where t > 32768).

    Attributes:
        centroids: ``bf16 [L, H, m, d]``.
        value_sums: ``bf16 [L, H, m, dv]``.
        sizes: ``int32 [L, H, m]``.
        members: ``int16 or int32 [L, H, t]``.
    """

    centroids: Tensor
    value_sums: Tensor
    sizes: Tensor
    members: Tensor


class SegmentRows:
    """Cuts segments into the rows of pages and puts them together again.

    Args:
        geometry: of the model's KV.
        settings: of the algorithm.

    Attributes:
        pages: pages, and slices, of a segment; 0 where pages do not divide segments: then there are no rows.
        row_bytes: bytes of a row, 0 likewise.
    """

    def __init__(self, geometry: KVGeometry, settings: RetroInferConfig) -> None:
        tokens, page = settings.segment, geometry.page_size
        clusters = clusters_of(tokens, settings)
        of_all = geometry.num_layers, geometry.num_kv_heads
        index = torch.int16 if tokens <= _NARROW else torch.int32
        self._parts = (
            ((*of_all, clusters, geometry.head_dim), torch.bfloat16),
            ((*of_all, clusters, geometry.v_head_dim), torch.bfloat16),
            ((*of_all, clusters), torch.int32),
            ((*of_all, tokens), index),
        )
        self.index_dtype = index
        sizes = [torch.Size(shape).numel() * dtype.itemsize for shape, dtype in self._parts]
        self._ends = list(accumulate(sizes))
        self.pages = 0 if tokens % page else tokens // page
        self._slice = -(-self._ends[-1] // max(1, self.pages) // 16) * 16
        self._first_page = -(-settings.sink // page)
        self.row_bytes = self.pages and _HEADER_BYTES + self._slice

    def pages_of(self, number: int) -> range:
        """Return the pages that the slices of a segment lie beside."""
        first = self._first_page + number * self.pages
        return range(first, first + self.pages)

    def segments_in(self, pages: range) -> range:
        """Return the segments that have a slice beside one of some pages."""
        first = max(0, pages.start - self._first_page) // self.pages
        return range(first, max(first, -(-(pages.stop - self._first_page) // self.pages)))

    def pack(self, number: int, segment: StoredSegment) -> Tensor:
        """Return the rows of a segment, ``uint8 [pages, row_bytes]``."""
        parts = (segment.centroids, segment.value_sums, segment.sizes, segment.members)
        data = torch.zeros(self.pages * self._slice, dtype=torch.uint8)
        for part, end, (_, dtype) in zip(parts, self._ends, self._parts, strict=True):
            flat = part.to(dtype).contiguous().view(torch.uint8).flatten()
            data[end - len(flat) : end] = flat
        rows = torch.empty(self.pages, self.row_bytes, dtype=torch.uint8)
        rows[:, :_HEADER_BYTES] = self._header(number, data)
        rows[:, _HEADER_BYTES:] = data.view(self.pages, self._slice)
        return rows

    def unpack(self, number: int, rows: list[Tensor]) -> StoredSegment | None:
        """Return the segment of its rows, None unless all are there, agree and are whole.

        Args:
            number: of the segment that it has to be.
            rows: ``uint8 [row_bytes]`` of each of its pages.
        """
        stacked = torch.stack(rows)
        data = stacked[:, _HEADER_BYTES:].contiguous().flatten()
        if not bool((stacked[:, :_HEADER_BYTES] == self._header(number, data)).all()):
            return None
        starts = [0, *self._ends]
        centroids, value_sums, sizes, members = (
            data[start:end].clone().view(dtype).view(shape)
            for start, end, (shape, dtype) in zip(starts, self._ends, self._parts, strict=False)
        )
        return StoredSegment(centroids, value_sums, sizes, members)

    def _header(self, number: int, data: Tensor) -> Tensor:
        digest = hashlib.blake2b(
            data.numpy().data, digest_size=_DIGEST_BYTES, key=number.to_bytes(8, "little")
        ).digest()
        header = (1).to_bytes(8, "little") + number.to_bytes(8, "little") + digest
        return torch.frombuffer(bytearray(header), dtype=torch.uint8)
