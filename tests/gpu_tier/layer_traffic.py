"""Drives a coordinator as an engine does, with made-up queries and KV, and checks what attention would read.

A value says where it comes from: number 0 of a value row is its request, 1 the layer, 2 the head, 3 the token. After
every `attention_begin` each selected item is read back from the slot that the metadata names and has to say so: steady
tokens first, then the items in the order of the selection. The members of
clusters are what the algorithm told its sink.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from gpu_tier.assembly import build
from gpu_tier.config import SparseConfig
from gpu_tier.coordinator import SparseCoordinator
from gpu_tier.geometry import KVGeometry, KVKind
from gpu_tier.index.wave_segment import SegmentSink, WaveSegment
from gpu_tier.rows import KVDtype
from gpu_tier.trackers import RequestState
from gpu_tier.types import AttnMetadata, ForwardBatch, PagedMeta, Selection, TokenMeta, Unit

__all__ = ["Members", "Shape", "Traffic"]


@dataclass(frozen=True)
class Shape:
    """The model and the pools of a test."""

    layers: int = 3
    heads: int = 2
    group: int = 2
    dims: int = 16
    v_dims: int = 16
    page: int = 8
    kind: KVKind = KVKind.MHA
    dtype: KVDtype = KVDtype.F32
    start_layer: int = 0
    device_pages: int = 120
    max_requests: int = 5
    max_tokens: int = 256

    @property
    def geometry(self) -> KVGeometry:
        """What the coordinator is told of the model."""
        return KVGeometry(
            self.kind, self.layers, self.heads, self.dims, self.v_dims, self.dtype, self.page, self.start_layer
        )

    @property
    def q_heads(self) -> int:
        """Query heads."""
        return self.heads * self.group

    @property
    def sm_scale(self) -> float:
        """Scale of the scores."""
        return self.dims**-0.5


@dataclass
class Tokens:
    """The KV and queries of one request, by layer."""

    q: Tensor
    k: Tensor
    v: Tensor
    extra: dict[str, Tensor] = field(default_factory=dict)


class Members:
    """Hears of clustered segments on their way to the sink, and remembers who is in which cluster."""

    def __init__(self, sink: SegmentSink) -> None:
        self.sink = sink
        self.of: dict[tuple[int, int], list[list[Tensor]]] = {}  # (layer id, request): of each head the clusters

    def store(self, layer_id: int, request: int, segment: WaveSegment) -> None:
        """See `SegmentSink`."""
        heads = self.of.setdefault((layer_id, request), [[] for _ in segment.sizes])
        for known, sizes, members in zip(heads, segment.sizes, segment.members, strict=True):
            assert len(known) == segment.first_cluster
            known.extend((members + segment.start).split(sizes.tolist()))
        self.sink.store(layer_id, request, segment)

    def forget(self, request: int) -> None:
        """Forget a request."""
        for key in [key for key in self.of if key[1] == request]:
            del self.of[key]


class Traffic:
    """One coordinator and the requests that go through it."""

    def __init__(self, shape: Shape, config: dict[str, Any], coordinator: SparseCoordinator | None = None) -> None:
        self.shape = shape
        self.config = SparseConfig.parse({"page_size": shape.page, "debug_checks": True, **config})
        self.coordinator = coordinator or build(
            self.config,
            shape.geometry,
            num_q_heads=shape.q_heads,
            sm_scale=shape.sm_scale,
            device_pages=shape.device_pages,
            max_requests=shape.max_requests,
            max_tokens=shape.max_tokens,
        )
        self.sequences: dict[int, Tokens] = {}
        self.checked = 0
        self._selections: list[Selection] = []
        self.members: Members | None = None
        if (sink := self.coordinator.algorithm.sink) is not None:
            self.members = self.coordinator.algorithm.sink = Members(sink)
        self._spy_on_selections()

    def _spy_on_selections(self) -> None:
        algorithm = self.coordinator.algorithm
        retrieve = algorithm.retrieve_topk

        def kept(*args: Any, **kwargs: Any) -> Any:
            selection = retrieve(*args, **kwargs)
            self._selections.append(replace(selection, indices=selection.indices.clone()))
            return selection

        algorithm.retrieve_topk = kept  # type: ignore[method-assign]

    def sequence(self, seed: int) -> Tokens:
        """Return made-up queries and KV of `max_tokens` tokens; what a request holds depends on its seed alone."""
        s = self.shape
        draw = torch.Generator().manual_seed(seed)
        n = s.max_tokens
        q = torch.randn(s.layers, n, s.q_heads, s.dims, generator=draw)
        k = torch.randn(s.layers, n, s.heads, s.dims, generator=draw)
        rows = k if s.kind is KVKind.MLA else torch.zeros(s.layers, n, s.heads, s.v_dims)
        rows[..., 0] = seed
        rows[..., 1] = torch.arange(s.layers)[:, None, None]
        rows[..., 2] = torch.arange(s.heads)
        rows[..., 3] = torch.arange(n)[:, None]
        extra = {
            "index_query": torch.randn(s.layers, n, 4, 16, generator=draw),
            "index_key": torch.randn(s.layers, n, 16, generator=draw),
            "index_weight": torch.rand(s.layers, n, 4, generator=draw),
        }
        return Tokens(q, k, rows, extra if self.config.algorithm == "dsa" else {})

    def begin(self, n_prompt: int, seed: int, prefix: Any = None) -> int:
        """Take a request in."""
        request = self.coordinator.on_request_begin(n_prompt, prefix)
        self.sequences[request] = self.sequence(seed)
        return request

    def prefill(self, requests: Sequence[int], extend_lens: Sequence[int]) -> None:
        """Run one pass over prompt tokens."""
        c = self.coordinator
        batch = c.plan_prefill(requests, extend_lens)
        c.forward_begin(batch)
        for layer in range(self.shape.layers):
            q, k, v, extra = self._inputs(batch, layer)
            layer_id = layer + self.shape.start_layer
            c.write_kv(layer_id, batch, k, v)
            assert c.attention_begin(q, k, v, layer_id, batch, **extra) == (None, [])
            c.attention_end(torch.empty(0), layer_id, batch)
        c.forward_end(batch)

    def prompt(self, requests: Sequence[int], chunk: int = 1 << 30) -> None:
        """Run the rest of some prompts, together, in chunks."""
        trackers = self.coordinator.trackers
        left = {request: trackers[request].n_prompt - trackers[request].seq_len for request in requests}
        while left:
            self.prefill(list(left), [min(chunk, n) for n in left.values()])
            left = {request: n - chunk for request, n in left.items() if n > chunk}
        for request in requests:
            self.coordinator.prompt_finished(request)

    def _inputs(self, batch: ForwardBatch, layer: int) -> tuple[Tensor, Tensor, Tensor | None, dict[str, Tensor]]:
        starts = [n - e for n, e in zip(batch.lengths, batch.extend_lens, strict=True)]
        spans = [
            (self.sequences[request], slice(start, stop))
            for request, start, stop in zip(batch.requests, starts, batch.lengths, strict=True)
        ]
        padding = len(batch.positions) - sum(batch.extend_lens)

        def rows(parts: list[Tensor]) -> Tensor:
            return torch.cat([*parts, torch.zeros(padding, *parts[0].shape[1:])])

        q = rows([s.q[layer, span] for s, span in spans])
        k = rows([s.k[layer, span] for s, span in spans])
        v = None if self.shape.kind is KVKind.MLA else rows([s.v[layer, span] for s, span in spans])
        return q, k, v, {name: rows([s.extra[name][layer, span] for s, span in spans]) for name in spans[0][0].extra}

    def decode(self, requests: Sequence[int], pad_to: int = 0) -> Tensor:
        """Run one decode step, check what it reads, and return the attention ``[L, B, Hq, dv]``."""
        c = self.coordinator
        batch = c.plan_decode(requests, pad_to)
        c.forward_begin(batch)
        outputs = []
        for layer in range(self.shape.layers):
            q, k, v, extra = self._inputs(batch, layer)
            layer_id = layer + self.shape.start_layer
            c.write_kv(layer_id, batch, k, v)
            self._selections.clear()
            meta, partials = c.attention_begin(q, k, v, layer_id, batch, **extra)
            if self._selections and meta is not None:
                self._check_content(batch, layer, meta)
            out = c.attend(q, meta, partials, self.shape.sm_scale)
            if self._selections:
                self._check_output(batch, layer, out)
            assert not out[batch.num_real :].any()  # padding reads nothing
            c.attention_end(out, layer_id, batch)
            outputs.append(out[: batch.num_real])
        c.forward_end(batch)
        return torch.stack(outputs)

    def _is_sparse(self, request: int) -> bool:
        return self.coordinator.trackers[request].state is RequestState.SPARSE

    def _attended(self, batch: ForwardBatch, layer: int, row: int, head: int) -> Tensor:
        """Return the tokens that a row's head attends to, in the order in which it does."""
        selection, n = self._selections[-1], batch.lengths[row]
        items = self._items(selection, layer, batch.requests[row], row, head)
        items = items[items < n]
        if (zone := selection.steady) is None:
            return items
        first = zone.firsts[row]
        return torch.cat([torch.arange(min(zone.sink, n)), torch.arange(min(first, n), n), items])

    def _items(self, selection: Selection, layer: int, request: int, row: int, head: int) -> Tensor:
        head = head if selection.indices.shape[1] > 1 else 0
        ids = selection.indices[row, head]
        ids = ids[ids >= 0].long()
        if selection.unit is Unit.CLUSTER:
            assert self.members is not None
            clusters = self.members.of.get((layer + self.shape.start_layer, request), [[]] * self.shape.heads)[head]
            return torch.cat([torch.empty(0, dtype=torch.int64), *(clusters[i].long() for i in ids.tolist())])
        return (ids[:, None] * selection.unit_tokens + torch.arange(selection.unit_tokens)).flatten()

    def _check_content(self, batch: ForwardBatch, layer: int, meta: AttnMetadata) -> None:
        """I11: what attention reads are the rows of the selected tokens, of this layer, head and request."""
        selecting = self._selections[-1].indices.shape[1]
        rows = meta.kv.v or meta.kv.k
        for row, request in enumerate(batch.requests):
            if not self._is_sparse(request):
                continue
            for head in range(selecting):
                tokens = self._attended(batch, layer, row, head)
                assert 0 < len(tokens) == len(tokens.unique())
                slots = _slots(meta, row, head)
                assert len(slots) == len(tokens)
                found = rows.decode(slots)
                expected = self._stored(self.sequences[request].v[layer, tokens], rows.format)
                heads = [head] if selecting > 1 else range(self.shape.heads)
                for h in heads:
                    torch.testing.assert_close(found[:, h], expected[:, h], rtol=0, atol=0)
                self.checked += len(tokens)

    def _check_output(self, batch: ForwardBatch, layer: int, out: Tensor) -> None:
        """The output is the attention over the selected tokens, computed from the sequence alone; or an estimate.

        Rows that are dense attend to all their tokens.
        """
        group, estimates = self.shape.group, self._selections[-1].estimate is not None
        for row, request in enumerate(batch.requests):
            for head in range(self.shape.heads):
                n = batch.lengths[row]
                sparse = self._is_sparse(request)
                tokens = self._attended(batch, layer, row, head) if sparse else torch.arange(n)
                if not len(tokens):
                    continue
                sequence, parts = self.sequences[request], self.shape.geometry.parts
                k = self._stored(sequence.k[layer, tokens, head], parts[0]).double()
                v = self._stored(sequence.v[layer, tokens, head], parts[-1]).double()[:, : self.shape.v_dims]
                q = sequence.q[layer, n - 1].view(self.shape.heads, group, -1)[head].double()
                scores, exact = q @ k.T * self.shape.sm_scale, out[row].view(self.shape.heads, group, -1)[head]
                tolerance = 1e-4
                if sparse and estimates:
                    more, values = self._estimated(batch, layer, row, head, q)
                    scores, v, tolerance = torch.cat([scores, more], 1), torch.cat([v, values]), 0.02
                expected = (scores.softmax(-1) @ v).float()
                scale = max(1.0, float(v.abs().max())) if tolerance > 1e-4 else 1.0
                torch.testing.assert_close(exact, expected, rtol=tolerance, atol=tolerance * scale)

    def _estimated(self, batch: ForwardBatch, layer: int, row: int, head: int, q: Tensor) -> tuple[Tensor, Tensor]:
        """Return scores ``[G, C]`` and values ``[C, dv]`` that stand for the estimated clusters."""
        selection, request = self._selections[-1].estimate, batch.requests[row]
        assert selection is not None
        sequence, parts = self.sequences[request], self.shape.geometry.parts
        ids, scores, values = selection.indices[row, head], [q[:, :0]], [q.new_empty(0, self.shape.v_dims)]
        for i in ids[ids >= 0].tolist():
            tokens = self.members.of[layer + self.shape.start_layer, request][head][i].long()  # type: ignore[union-attr]
            if len(tokens):
                k = self._stored(sequence.k[layer, tokens, head], parts[0]).double()
                v = self._stored(sequence.v[layer, tokens, head], parts[-1]).double()[:, : self.shape.v_dims]
                score = q @ k.mean(0) * self.shape.sm_scale + torch.tensor(float(len(tokens))).log()
                scores.append(score[:, None])
                values.append(v.mean(0)[None])
        return torch.cat(scores, 1), torch.cat(values)

    @staticmethod
    def _stored(numbers: Tensor, row_format: Any) -> Tensor:
        return row_format.decode(row_format.encode(numbers))

    def exact(self, request: int, token: int) -> Tensor:
        """Return full attention of a token, ``[L, Hq, dv]``, computed from the sequence alone."""
        s, seq = self.shape, self.sequences[request]
        parts = s.geometry.parts
        k = self._stored(seq.k[:, : token + 1], parts[0]).repeat_interleave(s.group, 2).double()
        v_rows = k if s.kind is KVKind.MLA else self._stored(seq.v[:, : token + 1], parts[1])
        v = v_rows[..., : s.v_dims] if s.kind is KVKind.MLA else v_rows.repeat_interleave(s.group, 2).double()
        scores = torch.einsum("lhd,lnhd->lhn", seq.q[:, token].double(), k) * s.sm_scale
        return torch.einsum("lhn,lnhd->lhd", scores.softmax(-1), v).float()

    def end(self, request: int, reason: str = "finished") -> None:
        """End a request."""
        self.coordinator.on_request_end(request, reason)
        self.sequences.pop(request, None)
        if self.members is not None:
            self.members.forget(request)

    def assert_empty(self) -> None:
        """Every allocator is at its start level."""
        c, manager = self.coordinator, self.coordinator.manager
        assert not len(c.trackers)
        assert manager.device.allocator.in_use == 0
        assert manager.host.allocator.in_use == 0
        assert manager.tables.available == self.shape.max_requests
        assert bool((manager.tables.table == -1).all())
        assert bool((manager.host_tokens.host_loc == -1).all())
        if c.resident is not None:
            assert c.resident.pool.allocator.in_use == 0
        for owner in (c.algorithm, manager.policy):
            if (pool := getattr(owner, "pool", None)) is not None:
                assert pool.allocator.in_use == 0
        if manager.blocks is not None and manager.blocks.store is not None:
            assert manager.blocks.store.allocator.in_use == 0


def _slots(meta: AttnMetadata, row: int, head: int) -> Tensor:
    if isinstance(meta, TokenMeta):
        return meta.token_table[row, head, : int(meta.lens[row, head])].long()
    assert isinstance(meta, PagedMeta)
    n = int(meta.cache_seqlens[row])
    pages = meta.page_table[row, : -(-n // meta.page_tokens)].long()
    return (pages[:, None] * meta.page_tokens + torch.arange(meta.page_tokens)).flatten()[:n]
