"""Attention over all KV in host memory, streamed to the device every step: the honest baseline beyond GPU memory.

Pieces of at most `chunk_tokens` tokens go through two device buffers in turn: while one is read by attention, the next
is loaded, across the end of a layer too. Each piece gives a partial; partials are merged by their log-sum-exp.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvcm.gpu_tier.kernels.decode_attn_paged import decode_attn_paged
from kvcm.gpu_tier.manager.host_tokens import HostTokens
from kvcm.gpu_tier.pools.device_pool import DeviceKVPool
from kvcm.gpu_tier.pools.transfer import KVTransfer
from kvcm.gpu_tier.runtime import DeviceRuntime, Event, upload
from kvcm.gpu_tier.types import LayerKV, PagedMeta, Partial

__all__ = ["HostStream"]

_BUFFERS = 2


@dataclass(frozen=True, slots=True)
class _Piece:
    """Whole pages of some rows, packed one behind the other into a buffer: (row, first token, last token + 1)."""

    spans: tuple[tuple[int, int, int], ...]


class HostStream:
    """Streams the KV of rows of a batch and attends to it.

    Args:
        host: owners of the host pages.
        transfer: moves the bytes.
        chunk_tokens: tokens of a piece.
        runtime: of the device.
        kernels: which implementation of attention.
    """

    def __init__(
        self, host: HostTokens, transfer: KVTransfer, chunk_tokens: int, runtime: DeviceRuntime, kernels: str
    ) -> None:
        geometry = host.pool.geometry
        self._host = host
        self._runtime = runtime
        self._kernels = kernels
        self._pages = -(-chunk_tokens // geometry.page_size)
        one_layer = replace(geometry, num_layers=1)
        self.pool = DeviceKVPool(one_layer, _BUFFERS * self._pages, runtime)
        self._transfer = transfer.to(self.pool, is_one_layer=True)
        self._pieces: list[_Piece] = []
        self._requests: tuple[int, ...] = ()
        self._last_layer = geometry.layers[-1]
        self._loaded: dict[tuple[int, int], tuple[int, Event]] = {}
        self._slots: dict[int, Tensor] = {}
        self._tables: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._read: list[Event | None] = [None] * _BUFFERS
        self._turn = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return self.pool.nbytes

    def begin(self, requests: tuple[int, ...], totals: tuple[int, ...]) -> None:
        """Begin a step: row i reads the first `totals[i]` tokens of `requests[i]` from the host, none if 0."""
        self._requests = requests
        self._pieces = self._packed(totals)
        for known in (self._loaded, self._slots, self._tables):
            known.clear()

    def _packed(self, totals: tuple[int, ...]) -> list[_Piece]:
        size = self.pool.addressing.page_size
        pieces: list[_Piece] = []
        spans: list[tuple[int, int, int]] = []
        pages_left = self._pages
        for row, total in enumerate(totals):
            start = 0
            while start < total:
                stop = min(total, start + pages_left * size)
                spans.append((row, start, stop))
                pages_left -= -(-(stop - start) // size)
                start = stop
                if not pages_left:
                    pieces.append(_Piece(tuple(spans)))
                    spans, pages_left = [], self._pages
        return [*pieces, _Piece(tuple(spans))] if spans else pieces

    def partials(self, q: Tensor, layer_id: int, sm_scale: float) -> list[Partial]:
        """Return the attention of ``q [B, Hq, d]`` over every piece of a layer."""
        return [self._partial(q, layer_id, number, sm_scale) for number in range(len(self._pieces))]

    def _partial(self, q: Tensor, layer_id: int, number: int, sm_scale: float) -> Partial:
        buffer, loaded = self._load(layer_id, number)
        self._load_ahead(layer_id, number)
        self._runtime.fence(loaded, "compute")
        meta = self._metadata(number, buffer, q.shape[0])
        dims = self.pool.geometry.v_head_dim
        o = torch.empty(*q.shape[:2], dims, dtype=torch.float32, device=q.device)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        decode_attn_paged(
            q=q,
            kv=meta.kv,
            page_table=meta.page_table,
            cache_seqlens=meta.cache_seqlens,
            page_tokens=meta.page_tokens,
            sm_scale=sm_scale,
            out_o=o,
            out_lse=lse,
            impl=self._kernels,
        )
        self._read[buffer] = self._runtime.record("compute")
        return Partial(o, lse)

    def _load_ahead(self, layer_id: int, number: int) -> None:
        if number + 1 < len(self._pieces):
            self._load(layer_id, number + 1)
        elif layer_id < self._last_layer:
            self._load(layer_id + 1, 0)

    def _load(self, layer_id: int, number: int) -> tuple[int, Event]:
        if (layer_id, number) not in self._loaded:
            buffer, self._turn = self._turn, (self._turn + 1) % _BUFFERS
            if (event := self._read[buffer]) is not None:
                self._runtime.fence(event, "h2d")
            self._loaded[layer_id, number] = (buffer, self._copy(layer_id, number, buffer))
        return self._loaded[layer_id, number]

    def _copy(self, layer_id: int, number: int, buffer: int) -> Event:
        with self._runtime.stream("h2d"):
            source, target = self._slots_of(number)
            offset = buffer * self._pages * self.pool.addressing.page_size
            self._transfer.load(source, target + offset, layers=range(layer_id, layer_id + 1))
        return self._runtime.record("h2d")

    def _slots_of(self, number: int) -> Tensor:
        """Return the host slots of a piece and its slots in the first buffer, ``int64 [2, 1, tokens]``."""
        if number not in self._slots:
            size = self.pool.addressing.page_size
            sources, targets, page = [], [], 0
            for row, start, stop in self._pieces[number].spans:
                sources.append(self._host.slots(self._requests[row], start, stop))
                targets.append(torch.arange(page * size, page * size + stop - start))
                page += -(-(stop - start) // size)
            both = torch.stack([torch.cat(sources), torch.cat(targets)])
            self._slots[number] = upload(both[:, None], self._runtime.device)
        return self._slots[number]

    def _metadata(self, number: int, buffer: int, rows: int) -> PagedMeta:
        if (number, buffer) not in self._tables:
            table, lengths = self._table(self._pieces[number], buffer, rows)
            device = self._runtime.device
            self._tables[number, buffer] = upload(table, device), upload(lengths, device)
        return PagedMeta(self._layer(), *self._tables[number, buffer], self.pool.addressing.page_size)

    def _table(self, piece: _Piece, buffer: int, rows: int) -> tuple[Tensor, Tensor]:
        size = self.pool.addressing.page_size
        table = torch.full((rows, self._pages), -1, dtype=torch.int32)
        lengths = torch.zeros(rows, dtype=torch.int32)
        page = buffer * self._pages
        for row, start, stop in piece.spans:
            count = -(-(stop - start) // size)
            table[row, :count] = torch.arange(page, page + count, dtype=torch.int32)
            lengths[row] = stop - start
            page += count
        return table, lengths

    def _layer(self) -> LayerKV:
        return self.pool.layer(self.pool.geometry.start_layer)
