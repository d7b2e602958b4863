"""What the tests of RetroInfer share: a rig whose requests have values, and whoever keeps the clusters' tokens."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from algorithm_rig import PlainKeys, Rig, mha
from torch import Tensor

from gpu_tier.algorithms.retroinfer import RetroInfer
from gpu_tier.geometry import KVGeometry, KVKind
from gpu_tier.index.wave_segment import WaveSegment
from gpu_tier.types import ForwardBatch, Mode, Partial, Selection

__all__ = [
    "SMALL",
    "Members",
    "PlainRows",
    "WaveRig",
    "check_step",
    "plain_zones",
    "rebuild",
    "same_state",
    "selections_of",
]

SMALL: dict[str, Any] = {
    "sink": 3, "local": 6, "segment": 32, "tokens_per_centroid": 4, "update_segment": 16, "retrieval": 0.2,
    "estimation": 0.3,
}  # fmt: skip


class PlainRows(PlainKeys):
    """Keys and values of requests, as they would be read back."""

    def __init__(self, geometry: KVGeometry, seed: int = 0, device: str = "cpu") -> None:
        super().__init__(geometry, seed, device)
        self.values: dict[tuple[int, int], Tensor] = {}

    def make(self, request: int, n_tokens: int) -> None:
        super().make(request, n_tokens)
        for layer in self.geometry.layers:
            self.values[layer, request] = self._values(layer, request, n_tokens)

    def _values(self, layer: int, request: int, n_tokens: int) -> Tensor:
        if self.geometry.kind is KVKind.MLA:
            return self.of[layer, request][..., : self.geometry.v_head_dim]
        row = self.geometry.parts[1]
        shape = (n_tokens, self.geometry.num_kv_heads, self.geometry.v_head_dim)
        return row.decode(row.encode(torch.randn(shape, generator=self.random)))

    def rows(self, layer_id: int, request: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        values = self.values[layer_id, request][start:stop].to(self.device, non_blocking=True)
        return self.keys(layer_id, request, start, stop), values


class Members:
    """Hears of segments and knows the tokens of each cluster, ``[layer, request][head][cluster]``."""

    def __init__(self) -> None:
        self.segments: dict[tuple[int, int], list[WaveSegment]] = defaultdict(list)
        self.of: dict[tuple[int, int], list[list[list[int]]]] = {}

    def store(self, layer_id: int, request: int, segment: WaveSegment) -> None:
        known = self.segments[layer_id, request]
        assert segment.first_cluster == sum(s.clusters for s in known), "clusters are numbered through"
        assert not known or segment.start == known[-1].start + known[-1].tokens, "segments follow each other"
        known.append(segment)
        heads = self.of.setdefault((layer_id, request), [[] for _ in segment.sizes])
        for head, sizes, members in zip(heads, segment.sizes.tolist(), segment.members, strict=True):
            head += [(part + segment.start).tolist() for part in members.split(sizes)]

    def forget(self, request: int) -> None:
        for key in [key for key in self.of if key[1] == request]:
            del self.of[key], self.segments[key]


class WaveRig(Rig):
    """RetroInfer over requests whose KV is known in advance."""

    source_type = PlainRows

    def __init__(
        self, geometry: KVGeometry | None = None, group: int = 2, device: str = "cpu", hears: bool = True,
        kernels: str = "auto", **algo: Any,
    ) -> None:  # fmt: skip
        settings = {"residency": "blocks", "kernels": kernels}
        super().__init__(geometry or mha(), "retroinfer", group, {**SMALL, **algo}, device, **settings)
        self.members = Members()
        if hears:
            self.retro.sink = self.members

    @property
    def retro(self) -> RetroInfer:
        assert isinstance(self.algorithm, RetroInfer)
        return self.algorithm

    @property
    def rows(self) -> PlainRows:
        assert isinstance(self.source, PlainRows)
        return self.source

    def copy_request(self, source: int, target: int) -> None:
        super().copy_request(source, target)
        for layer in self.geometry.layers:
            self.rows.values[layer, target] = self.rows.values[layer, source]

    def end(self, request: int) -> None:
        self.algorithm.free(request)
        self.members.forget(request)

    def chosen(self, selection: Selection, row: int, head: int) -> list[int]:
        return [i for i in selection.indices[row, head].tolist() if i >= 0]

    def attention(self, layer: int, batch: ForwardBatch, selection: Selection) -> Tensor:
        """Attention of a step as an engine would merge it, ``f64 [B, Hq, dv]``; of rows that are requests."""
        q = torch.stack([self.query(layer, request).flatten(0, 1) for request in batch.requests])
        partial = self.algorithm.estimate(_padded(q, batch.rows), layer, batch, selection)
        assert selection.steady is not None
        rows = [
            self._merged(layer, request, row, q[row].double(), selection, partial)
            for row, request in enumerate(batch.requests)
        ]
        return torch.stack(rows)

    def _merged(
        self, layer: int, request: int, row: int, q: Tensor, selection: Selection, partial: Partial | None
    ) -> Tensor:
        outs = []
        for index, query in enumerate(q):
            head = index // self.group
            tokens = self.exact_tokens(layer, request, row, head, selection)
            k = self.source.of[layer, request][tokens, head].double()
            v = self.rows.values[layer, request][tokens, head].double()
            scores = k @ query * self.context.sm_scale
            lse, out = scores.logsumexp(0), scores.softmax(0) @ v
            if partial is not None:
                total = torch.logaddexp(lse, partial.lse[row, index].double())
                share = (partial.lse[row, index].double() - total).exp()
                out = out * (lse - total).exp() + partial.o[row, index].double() * share
            outs.append(out)
        return torch.stack(outs)

    def exact_tokens(self, layer: int, request: int, row: int, head: int, selection: Selection) -> list[int]:
        """Tokens that a head attends to exactly, in the order of the execution buffer."""
        n, steady = self.n[request], selection.steady
        assert steady is not None
        tokens = [*range(min(n, steady.sink)), *range(steady.firsts[row], n)]
        for cluster in self.chosen(selection, row, head):
            tokens += self.members.of[layer, request][head][cluster]
        return tokens

    def full_attention(self, layer: int, request: int) -> Tensor:
        """Attention over all tokens, ``f64 [Hq, dv]``."""
        n = self.n[request]
        q = self.query(layer, request).double()
        k = self.source.of[layer, request][:n].double()
        v = self.rows.values[layer, request][:n].double()
        weights = (torch.einsum("hgd,nhd->hgn", q, k) * self.context.sm_scale).softmax(-1)
        return torch.einsum("hgn,nhd->hgd", weights, v).flatten(0, 1)

    def state(self, request: int) -> Mapping[int, tuple[int, int, Tensor, Tensor, Tensor]]:
        """What the index holds of a request, by layer."""
        found = {}
        for position, layer in enumerate(self.geometry.layers):
            indexed, views = self.retro.segments.of(layer, request), self.retro.index.views(position)
            pages = self.retro.index.pool.held(request)
            found[layer] = (
                indexed.boundary, indexed.clusters, views.centroids[pages].clone(), views.value_sums[pages].clone(),
                views.log_size[pages].clone(),
            )  # fmt: skip
        return found


def _padded(x: Tensor, rows: int) -> Tensor:
    return torch.cat([x, torch.full((rows - len(x), *x.shape[1:]), 3.0, dtype=x.dtype)])


def same_state(one: WaveRig, request: int, other: WaveRig, its: int) -> None:
    """Two requests have the same bits in all layers."""
    for (a, b, *x), (c, d, *y) in zip(one.state(request).values(), other.state(its).values(), strict=True):
        assert (a, b) == (c, d)
        assert all(torch.equal(p[: len(q)], q[: len(p)]) for p, q in zip(x, y, strict=True))


def plain_zones(rig: WaveRig, layer: int, request: int, head: int) -> tuple[list[int], list[int]]:
    """Clusters to retrieve and to estimate, by the centroids that are stored."""
    position = rig.geometry.layer_index(layer)
    m = rig.retro.segments.of(layer, request).clusters
    pages = rig.retro.index.pool.held(request)
    views = rig.retro.index.views(position)
    centroids = views.centroids[pages, head].flatten(0, 1)[:m].float()
    sizes = [len(tokens) for tokens in rig.members.of[layer, request][head]] if m else []
    scores = rig.query(layer, request)[head] @ centroids.T * rig.context.sm_scale
    scores[:, [c for c in range(m) if not sizes[c]]] = -torch.inf
    rule = rig.retro.settings.rank
    ranks = (scores.softmax(-1).sum(0) if rule == "sum_softmax" else scores.amax(0)).tolist() if m else []
    order = sorted((c for c in range(m) if sizes[c]), key=lambda c: (-ranks[c], c))
    share = rig.retro.settings
    r = max(1, round(share.retrieval * m))
    e = m - r if share.estimation == 1 else round(share.estimation * m)
    room, used, retrieved = share.exec_factor * r * share.tokens_per_centroid, 0, []
    for c in order[:r]:
        used += sizes[c] if sizes[c] <= room else 0
        if sizes[c] <= room and used <= room:
            retrieved.append(c)
    return sorted(retrieved), sorted(set(order[: r + e]) - set(retrieved))


def check_step(rig: WaveRig, requests: list[int], selections: dict[int, Selection]) -> None:
    for layer, selection in selections.items():
        assert selection.steady is not None
        for row, request in enumerate(requests):
            for head in range(rig.geometry.num_kv_heads):
                retrieved, estimated = plain_zones(rig, layer, request, head)
                assert rig.chosen(selection, row, head) == retrieved
                assert selection.estimate is None or rig.chosen(selection.estimate, row, head) == estimated
                tokens = rig.exact_tokens(layer, request, row, head, selection)
                assert len(set(tokens)) == len(tokens) <= rig.retro.max_execution_tokens


def selections_of(rig: WaveRig, requests: list[int], padding: int = 0) -> dict[int, Selection]:
    """Selections of a step in which nothing becomes due."""
    for request in requests:
        rig.n[request] += 1
        rig.algorithm.reserve(request, rig.n[request])
    batch = rig.batch(Mode.DECODE, requests, [1] * len(requests), padding)
    found = {}
    for layer in rig.geometry.layers:
        q = torch.stack([rig.query(layer, request).flatten(0, 1) for request in requests])
        q = torch.cat([q, q.new_full((padding, *q.shape[1:]), 3.0)])
        found[layer] = rig.algorithm.retrieve_topk(q, layer, batch, torch.ones(batch.rows, dtype=torch.bool))
        found[layer].validate(batch)
        assert not found[layer].lengths[len(requests) :].any()
        steady = found[layer].steady
        assert steady is not None
        assert steady.first.tolist() == [*steady.firsts, *[0] * padding]
    return found


def rebuild(rig: WaveRig, lengths: dict[int, int]) -> None:
    """Index requests anew, after their KV was changed."""
    for request, n in lengths.items():
        rig.end(request)
        rig.n[request] = 0
        rig.algorithm.reserve(request, n)
        rig.prefill({request: n})
        rig.algorithm.finish_prompt(request, n)
