"""A clustered segment as bytes beside the KV pages of its tokens.

A segment is longer than a page and does not begin at one: segment i is tokens ``sink + t·i`` to before
``sink + t·(i + 1)``, with t tokens a segment. Its bytes, of all layers, are cut into as many equal slices as it has
pages. Slice j lies beside page ``⌈sink / page⌉ + i·t/page + j``, so the last slice is beside the page of the segment's
last token, and the key of that page names all tokens that the segment was clustered from.

A row of a page is a header and a slice:

| bytes | what |
|---|---|
| 8 | 1, or 0 where nothing is stored: the segment was not clustered when the page was written |
| 8 | number i of the segment |
| 16 | BLAKE2b of all slices of the segment |
| rest | the slice, zeros behind its end |

A segment's bytes are, for all layers together, the centroids ``bf16 [L, H, m, d]``, the value sums
``bf16 [L, H, m, dv]``, the sizes ``int32 [L, H, m]`` and the members ``int16 [L, H, t]`` (int32 where t > 32768).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from gpu_tier.geometry import KVGeometry
from gpu_tier.index.wave_index import clusters_of
from gpu_tier.retrieval_config import RetroInferConfig

__all__ = ["SegmentRows", "StoredSegment"]

_HEADER_BYTES, _DIGEST_BYTES = 32, 16
_NARROW = 1 << 15


@dataclass(frozen=True, slots=True)
class StoredSegment:
    """A segment in all layers, in host memory.

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
