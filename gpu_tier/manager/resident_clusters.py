"""Clusters whose KV is all on the device (RetroInfer's `gpu_only`): selected clusters become the slots of their tokens.

The members of a layer's clusters are kept on the device, in pages of positions: the token that follows from a segment's
k-th member has position ``segment.start + k`` in the request's row, so clusters are runs of positions, and the
positions of all segments together are the clustered tokens. Expanding a selection is a search in the running sums of
its clusters' sizes; nothing waits for the device.

The order is that of the execution buffer of residency `blocks` (steady tokens, then the clusters as selected, ascending
tokens in each), and so is the width of the table: both residencies give the same numbers, bit by bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvcm.gpu_tier.geometry import KVGeometry
from kvcm.gpu_tier.index.wave_index import WaveSegment
from kvcm.gpu_tier.manager.residency import BufferFill
from kvcm.gpu_tier.pools.representation import RepresentationPool
from kvcm.gpu_tier.runtime import DeviceRuntime, upload
from kvcm.gpu_tier.types import ForwardBatch, ResidencyPlan, Selection, SteadyZone

__all__ = ["ClusterResidentPolicy"]

_PAGE_TOKENS = 1024
_ID_BYTES = 4
_ODD_CLUSTERS = 4  # more than the average says, of segments that end with a prompt or its prefix


@dataclass(frozen=True, slots=True)
class _Layer:
    """Pages of a layer: ``members int32 [pages, H, tokens]``, ``starts`` and ``sizes int32 [pages, H, clusters]``."""

    members: Tensor
    starts: Tensor
    sizes: Tensor


class ClusterResidentPolicy:
    """See `kvcm.gpu_tier.manager.residency.ResidencyPolicy` and `kvcm.gpu_tier.index.wave_index.SegmentSink`.

    Args:
        geometry: of the model's KV.
        table: ``int32 [R, max_tokens]`` device slot of every token.
        tokens_per_centroid: tokens of a cluster on average; some segments have a cluster more.
        width: most tokens S that a head attends to, the width of the tables.
        total_tokens: most tokens of all requests together.
        runtime: of the device.
    """

    def __init__(
        self, geometry: KVGeometry, table: Tensor, *, tokens_per_centroid: int, width: int, total_tokens: int,
        runtime: DeviceRuntime,
    ) -> None:  # fmt: skip
        self.geometry = geometry
        self.width = width
        self._table = table
        self._device = runtime.device
        heads = geometry.num_kv_heads
        self._page_clusters = -(-_PAGE_TOKENS // tokens_per_centroid) + _ODD_CLUSTERS
        max_requests, max_tokens = table.shape
        pages = -(-total_tokens // _PAGE_TOKENS) + max_requests
        self.pool = RepresentationPool(
            num_layers=geometry.num_layers, page_tokens=_PAGE_TOKENS,
            page_bytes=_ID_BYTES * heads * (_PAGE_TOKENS + 2 * self._page_clusters), max_requests=max_requests,
            max_tokens=max_tokens, total_tokens=pages * _PAGE_TOKENS, device=runtime.device,
        )  # fmt: skip
        self._layers = [self._views(layer) for layer in range(geometry.num_layers)]

    def _views(self, layer: int) -> _Layer:
        heads, clusters = self.geometry.num_kv_heads, self._page_clusters
        ids = self.pool.layer(layer).view(torch.int32)
        members, starts, sizes = ids.split([heads * _PAGE_TOKENS, heads * clusters, heads * clusters], dim=1)
        return _Layer(*(part.unflatten(1, (heads, -1)) for part in (members, starts, sizes)))

    @property
    def nbytes(self) -> int:
        """Bytes of the member tables."""
        return self.pool.nbytes

    def hold(self, request: int, n_tokens: int) -> None:
        """See `ResidencyPolicy`."""
        self.pool.reserve(request, n_tokens)

    def admit(self, request: int, buffer_slots: Tensor, newest_slots: Tensor, n_tokens: int) -> BufferFill:
        """See `ResidencyPolicy`; there is no buffer."""
        return BufferFill(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64))

    def release(self, request: int) -> None:
        """See `ResidencyPolicy`."""
        self.pool.free(request)

    def store(self, layer_id: int, request: int, segment: WaveSegment) -> None:
        """See `SegmentSink`; the members are taken over, KV stays where it is."""
        layer = self._layers[self.geometry.layer_index(layer_id)]
        pages = upload(torch.tensor(self.pool.held(request)), self._device)
        positions = torch.arange(segment.start, segment.start + segment.tokens, device=self._device)
        layer.members[pages[positions // _PAGE_TOKENS], :, positions % _PAGE_TOKENS] = (
            segment.members + segment.start
        ).T
        clusters = torch.arange(segment.first_cluster, segment.first_cluster + segment.clusters, device=self._device)
        page, place = pages[clusters // self._page_clusters], clusters % self._page_clusters
        starts = segment.start + segment.sizes.cumsum(1) - segment.sizes
        layer.starts[page, :, place] = starts.int().T
        layer.sizes[page, :, place] = segment.sizes.T

    def resolve(self, layer_id: int, batch: ForwardBatch, selection: Selection, sparse_mask: Tensor) -> ResidencyPlan:
        """See `ResidencyPolicy`: the slots of the steady tokens and of the members, and how many there are."""
        assert selection.steady is not None
        layer = self._layers[self.geometry.layer_index(layer_id)]
        pages = self.pool.table[batch.req_pool_indices]
        starts, sizes = self._clusters(layer, pages, selection)
        sink, steady = _steady_counts(selection.steady, batch, sparse_mask)
        ends = sizes.cumsum(-1)
        lens = steady[:, None] + sizes.sum(-1)
        place = torch.arange(self.width, device=self._device)
        behind_sink = selection.steady.first[:, None] + place - sink[:, None]
        of_zone = torch.where(place < sink[:, None], place, behind_sink)[:, None].expand(-1, lens.shape[1], -1)
        of_clusters = self._members(
            layer=layer, pages=pages, starts=starts, begins=ends - sizes, ends=ends, place=place - steady[:, None, None]
        )
        tokens = torch.where(place < steady[:, None, None], of_zone, of_clusters)
        valid = place < lens[..., None]
        slots = self._table[batch.req_pool_indices[:, None, None], torch.where(valid, tokens, 0).long()]
        return ResidencyPlan(torch.where(valid, slots, -1), lens=lens.clamp(max=self.width).int().contiguous())

    def _clusters(self, layer: _Layer, pages: Tensor, selection: Selection) -> tuple[Tensor, Tensor]:
        """Return first position and size of each selected cluster, ``int64 [B, H, K]``; 0 behind the last."""
        ids = selection.indices.clamp_min(0).long()
        heads = torch.arange(ids.shape[1], device=ids.device)[:, None]
        page = pages[:, None].expand(-1, ids.shape[1], -1).gather(2, ids // self._page_clusters).clamp_min(0).long()
        place = ids % self._page_clusters
        size = torch.where(selection.indices >= 0, layer.sizes[page, heads, place], 0)
        return layer.starts[page, heads, place].long(), size.long()

    def _members(
        self, layer: _Layer, pages: Tensor, starts: Tensor, begins: Tensor, ends: Tensor, place: Tensor
    ) -> Tensor:
        """Return the token at each place behind the steady ones, ``int [B, H, S]``; anything behind the last."""
        rows, heads, clusters = starts.shape
        if not clusters:
            return place.expand(rows, heads, -1)
        place = place.expand(-1, heads, -1).contiguous()
        which = torch.searchsorted(ends, place, right=True).clamp_max(clusters - 1)
        position = (starts.gather(2, which) + place - begins.gather(2, which)).clamp_min(0)
        number = (position // _PAGE_TOKENS).clamp_max(pages.shape[1] - 1)
        page = pages[:, None].expand(-1, heads, -1).gather(2, number).clamp_min(0).long()
        head = torch.arange(heads, device=place.device)[:, None]
        return layer.members[page, head, position % _PAGE_TOKENS]

    def commit(self, layer_id: int, plan: ResidencyPlan) -> None:
        """See `ResidencyPolicy`."""


def _steady_counts(zone: SteadyZone, batch: ForwardBatch, sparse_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sink tokens and all steady tokens of each row, ``int64 [B]``; 0 of rows that do not select."""
    sink = batch.seq_lens.clamp_max(zone.sink).long()
    behind_sink = (batch.seq_lens - zone.first).clamp_min(0).long()
    return torch.where(sparse_mask, sink, 0), torch.where(sparse_mask, sink + behind_sink, 0)
