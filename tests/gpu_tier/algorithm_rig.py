"""What the tests of the algorithms share: KV in plain tensors, passes over it, and what plain Python selects."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kvcm.gpu_tier.algorithms import registry
from kvcm.gpu_tier.algorithms.base import AlgorithmContext, BaseSparseAlgorithm
from kvcm.gpu_tier.algorithms.pqcache import PQCache
from kvcm.gpu_tier.algorithms.retroinfer import RetroInfer
from kvcm.gpu_tier.config import SparseConfig
from kvcm.gpu_tier.geometry import KVDtype, KVGeometry, KVKind
from kvcm.gpu_tier.index import pq
from kvcm.gpu_tier.index.wave_index import WaveSegment
from kvcm.gpu_tier.runtime import runtime_for
from kvcm.gpu_tier.types import ForwardBatch, Mode, Partial, Selection

ROWS, TOKENS, PAGE = 6, 512, 16


INDEX_HEADS, INDEX_DIM = 4, 16


class NoReading(TorchDispatchMode):
    """Fails on operations whose result the host has to read.

    Args:
        allows_masks: indexing by masks is a kernel's reference, and no part of the kernel.
    """

    def __init__(self, *, allows_masks: bool = False) -> None:
        super().__init__()
        self._allows_masks = allows_masks

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name in ("index", "index_put", "index_put_") and any(
            index is not None and index.dtype is torch.bool for index in args[1]
        )
        reads = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "item", "unique")
        assert not by_mask or self._allows_masks, f"{func} waits for the device"
        assert name not in reads, f"{func} waits for the device"
        return func(*args, **(kwargs or {}))


@contextmanager
def no_synchronisation() -> Iterator[None]:
    """Fail where the host waits for a GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def mha(heads: int = 2, dims: int = 8, *, layers: int = 3, start: int = 0, dtype: KVDtype = KVDtype.F32) -> KVGeometry:
    return KVGeometry(KVKind.MHA, layers, heads, dims, dims, dtype, page_size=PAGE, start_layer=start)


def mla(dims: int = 12, value: int = 8, *, dtype: KVDtype = KVDtype.F32) -> KVGeometry:
    return KVGeometry(KVKind.MLA, 2, 1, dims, value, dtype, page_size=PAGE)


class PlainKeys:
    """Keys of requests by layer, as they would be read back: ``f32 [n, H, d]``."""

    def __init__(self, geometry: KVGeometry, seed: int = 0, device: str = "cpu") -> None:
        self.geometry, self.device = geometry, device
        self.random = torch.Generator().manual_seed(seed)
        self.of: dict[tuple[int, int], Tensor] = {}

    def make(self, request: int, n_tokens: int) -> None:
        """Make up keys, already rounded to what the pools store."""
        row = self.geometry.parts[0]
        for layer in self.geometry.layers:
            shape = (n_tokens, self.geometry.num_kv_heads, self.geometry.head_dim)
            self.of[layer, request] = row.decode(row.encode(torch.randn(shape, generator=self.random)))

    def keys(self, layer_id: int, request: int, start: int, stop: int) -> Tensor:
        return self.of[layer_id, request][start:stop].to(self.device, non_blocking=True)


class Rig:
    """An algorithm over requests whose keys are known in advance; `step` and `prefill` only reveal more of them."""

    source_type: type[PlainKeys] = PlainKeys

    def __init__(
        self, geometry: KVGeometry, name: str, group: int = 2, algo: Mapping[str, Any] | None = None,
        device: str = "cpu", **settings: Any,
    ) -> None:  # fmt: skip
        self.geometry, self.group, self.device = geometry, group, device
        self.source = self.source_type(geometry, device=device)
        data = {"algorithm": name, "page_size": geometry.page_size, "algo": algo or {}, **settings}
        self.context = AlgorithmContext(
            geometry, SparseConfig.parse(data), group * geometry.num_kv_heads, geometry.head_dim**-0.5,
            ROWS, TOKENS, ROWS * TOKENS, runtime_for(device), self.source,
        )  # fmt: skip
        self.algorithm: BaseSparseAlgorithm = registry.make(self.context)
        self.watch: Callable[[], AbstractContextManager[Any]] = nullcontext  # entered around the hooks of every pass
        self.n: dict[int, int] = {}
        self.queries_seen: dict[tuple[int, int], Tensor] = {}

    def add(self, lengths: Mapping[int, int], *, chunk: int = 0, spare: int = 0) -> None:
        """Prefill requests of these lengths in chunks; `spare` tokens more exist for later steps."""
        for request, length in lengths.items():
            self.source.make(request, length + spare)
            self.algorithm.reserve(request, length)
            self.n[request] = 0
            for layer in self.geometry.layers:
                self.queries_seen[layer, request] = self._random_queries(length + spare)
        left = dict(lengths)
        while any(left.values()):
            extend = {request: min(tokens, chunk or tokens) for request, tokens in left.items() if tokens}
            self.prefill(extend)
            left = {request: tokens - extend.get(request, 0) for request, tokens in left.items()}
        for request, length in lengths.items():
            self.algorithm.finish_prompt(request, length)

    def _random_queries(self, tokens: int) -> Tensor:
        shape = (tokens, self.context.num_q_heads, self.geometry.head_dim)
        return torch.randn(shape, generator=self.source.random)

    def extra(self, layer: int, request: int, start: int, stop: int) -> dict[str, Tensor]:
        """What the model passes beside keys and queries of these tokens."""
        return {}

    def copy_request(self, source: int, target: int) -> None:
        """Let a request have another one's keys and queries; nothing of it is revealed yet."""
        self.n[target] = 0
        for layer in self.geometry.layers:
            self.source.of[layer, target] = self.source.of[layer, source]
            self.queries_seen[layer, target] = self.queries_seen[layer, source]

    def _joined(self, layer: int, extend: Mapping[int, int]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        keys, queries, extras = [], [], []
        for request, tokens in extend.items():
            stop = self.n[request]
            keys.append(self.source.keys(layer, request, stop - tokens, stop))
            queries.append(self.queries_seen[layer, request][stop - tokens : stop])
            extras.append(self.extra(layer, request, stop - tokens, stop))
        extra = {name: torch.cat([e[name] for e in extras]).to(self.device) for name in extras[0]}
        return torch.cat(keys), torch.cat(queries).to(self.device), extra

    def prefill(self, extend: Mapping[int, int], *, repeats: int = 1) -> None:
        """Reveal so many tokens more of each request."""
        for request, tokens in extend.items():
            self.n[request] += tokens
        batch = self.batch(Mode.PREFILL, list(extend), list(extend.values()))
        for _ in range(repeats):
            for layer in self.geometry.layers:
                k, q, extra = self._joined(layer, extend)
                with self.watch():
                    self.algorithm.construct_representations(layer, batch, k, None, q, **extra)

    def step(self, requests: Sequence[int], *, padding: int = 0) -> dict[int, Selection]:
        """Decode one token of each request in all layers and return the selections by layer."""
        for request in requests:
            self.n[request] += 1
            self.algorithm.reserve(request, self.n[request])
        batch = self.batch(Mode.DECODE, requests, [1] * len(requests), padding)
        return {layer: self.decode(layer, batch) for layer in self.geometry.layers}

    def decode(self, layer: int, batch: ForwardBatch, sparse_mask: Tensor | None = None) -> Selection:
        k, q, extra = self._joined(layer, dict.fromkeys(batch.requests, 1))
        k, q = (_padded(x, batch.rows) for x in (k, q))
        extra = {name: _padded(x, batch.rows) for name, x in extra.items()}
        mask = torch.ones(batch.rows, dtype=torch.bool) if sparse_mask is None else sparse_mask
        mask = mask.to(self.device)
        with self.watch():
            if self.algorithm.updates_before_retrieval:
                self.algorithm.update_representations(layer, batch, k, **extra)
            selection = self.algorithm.retrieve_topk(q, layer, batch, mask, **extra)
            if not self.algorithm.updates_before_retrieval:
                self.algorithm.update_representations(layer, batch, k, **extra)
        selection.validate(batch)
        return selection

    def batch(self, mode: Mode, requests: Sequence[int], extend: Sequence[int], padding: int = 0) -> ForwardBatch:
        """Return a pass over the revealed tokens; padding rows name request 0 with a length that must not matter."""
        lengths = [self.n[request] for request in requests]
        positions = [p for n, e in zip(lengths, extend, strict=True) for p in range(n - e, n)]
        return ForwardBatch(
            mode,
            torch.tensor([*requests, *[0] * padding], device=self.device),
            torch.tensor([*lengths, *[1] * padding], dtype=torch.int32, device=self.device),
            torch.zeros(len(positions) + padding, dtype=torch.int64, device=self.device),
            torch.tensor([*positions, *[0] * padding], device=self.device),
            torch.tensor([len(requests)], dtype=torch.int32, device=self.device),
            tuple(requests), tuple(lengths), tuple(extend),
        )  # fmt: skip

    def query(self, layer: int, request: int) -> Tensor:
        """The newest query, ``[H, G, d]``."""
        newest = self.queries_seen[layer, request][self.n[request] - 1]
        return newest.unflatten(0, (self.geometry.num_kv_heads, self.group))

    def all_keys(self, layer: int, request: int) -> Tensor:
        return self.source.of[layer, request][: self.n[request]]


class IndexRig(Rig):
    """A rig of dsa whose model has an indexer; what that says of a token depends on its place only."""

    def __init__(self, geometry: KVGeometry, algo: Mapping[str, Any] | None = None, **settings: Any) -> None:
        sizes = {"index_heads": INDEX_HEADS, "index_dim": INDEX_DIM}
        super().__init__(geometry, "dsa", algo={**sizes, **(algo or {})}, **settings)
        self.index: dict[tuple[int, int], dict[str, Tensor]] = {}

    def extra(self, layer: int, request: int, start: int, stop: int) -> dict[str, Tensor]:
        if (layer, request) not in self.index:
            random = torch.Generator().manual_seed(1000 * layer + request)
            self.index[layer, request] = {
                "index_query": torch.randn(600, INDEX_HEADS, INDEX_DIM, generator=random),
                "index_key": torch.randn(600, INDEX_DIM, generator=random),
                "index_weight": torch.randn(600, INDEX_HEADS, generator=random).abs(),
            }
        return {name: values[start:stop] for name, values in self.index[layer, request].items()}


def _padded(x: Tensor, rows: int) -> Tensor:
    return torch.cat([x, torch.full((rows - len(x), *x.shape[1:]), 3.0, dtype=x.dtype, device=x.device)])


def top(scores: Sequence[float], k: int) -> list[int]:
    """Ids of the k highest scores, ties to the lower id, ascending."""
    return sorted(sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:k])


def ids(selection: Selection, row: int, head: int = 0) -> list[int]:
    """What a row and head selected."""
    return [i for i in selection.indices[row, head].tolist() if i >= 0]


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
    """Receives segments and knows the tokens of each cluster, ``[layer, request][head][cluster]``."""

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
        self, geometry: KVGeometry | None = None, group: int = 2, device: str = "cpu", has_sink: bool = True,
        kernels: str = "auto", **algo: Any,
    ) -> None:  # fmt: skip
        settings = {"residency": "blocks", "kernels": kernels}
        super().__init__(geometry or mha(), "retroinfer", group, {**SMALL, **algo}, device, **settings)
        self.members = Members()
        if has_sink:
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
    most, used, retrieved = share.exec_factor * r * share.tokens_per_centroid, 0, []
    for c in order[:r]:
        used += sizes[c] if sizes[c] <= most else 0
        if sizes[c] <= most and used <= most:
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
    """Index requests again, after their KV was changed."""
    for request, n in lengths.items():
        rig.end(request)
        rig.n[request] = 0
        rig.algorithm.reserve(request, n)
        rig.prefill({request: n})
        rig.algorithm.finish_prompt(request, n)


PQ_SMALL: dict[str, Any] = {"m": 2, "b": 3, "init": 4, "token_budget": 16, "iterations": 3, "cache_tokens": 0}


class PQRig(Rig):
    """A rig of pqcache with 8 centroids per sub-vector; a request has an index from a middle of 16 tokens on."""

    def __init__(
        self, geometry: KVGeometry | None = None, members: int = 2, *, residency: str = "blocks",
        min_sparse_prompt_len: int = 32, device: str = "cpu", top_k: int = 64, kernels: str = "reference",
        **algo: Any,
    ) -> None:  # fmt: skip
        super().__init__(
            geometry or mha(), "pqcache", members, {**PQ_SMALL, **algo}, device, residency=residency, top_k=top_k,
            min_sparse_prompt_len=min_sparse_prompt_len, kernels=kernels,
        )  # fmt: skip
        assert isinstance(self.algorithm, PQCache)
        self.pq: PQCache = self.algorithm

    def add(self, lengths: Mapping[int, int], *, chunk: int = 0, spare: int = 0) -> None:
        """Prefill requests of these lengths and let them be sparse."""
        super().add(lengths, chunk=chunk, spare=spare)
        for request, length in lengths.items():
            self.pq.become_sparse(request, length)


def codes_of(rig: PQRig, layer: int, request: int, coded: int) -> Tensor:
    """Codes that a pass finds on the device, ``uint8 [coded, H, m]``."""
    position = rig.geometry.layer_index(layer)
    pages = rig.pq.codes
    on_device = pages.codes(position, pages.window([(request, coded, coded)])).flatten(0, 1)
    at = torch.arange(coded)
    page = pages.pool.table[request, at // pages.page_tokens].long()
    return on_device[page * pages.page_tokens + at % pages.page_tokens].clone()


def codebook_of(rig: PQRig, layer: int, request: int, number: int = 0) -> Tensor:
    """Centroids of a request, ``f16 [H, m, 2^b, d/m]``."""
    return rig.pq.codebooks[rig.geometry.layer_index(layer), request * rig.pq.books_each + number].clone()


def plain_scores(rig: PQRig, layer: int, request: int, codes: Tensor, codebook: Tensor) -> Tensor:
    """The group rule over keys with these codes, ``[H, n]``; keys of equal codes have equal scores."""
    table = pq.tables(rig.query(layer, request).flatten(0, 1)[None], codebook[None].float(), rig.context.sm_scale)[0]
    table = table.unflatten(0, (len(codebook), -1))
    heads, parts = torch.arange(len(codebook))[:, None], torch.arange(codebook.shape[1])
    entries = table.permute(0, 2, 3, 1)[heads, parts, codes.long()]
    return entries.sum(2).permute(1, 2, 0).softmax(-1).sum(1)


def plain_selection(
    rig: PQRig, layer: int, request: int, head: int, codebook: Tensor, *, n_prompt: int
) -> tuple[int, list[int]]:
    """Return the first token of the window and the selected tokens of the middle of a request with an index."""
    init, (local, k) = rig.pq.settings.init, rig.pq.budgets.tokens(n_prompt)
    first = max(rig.n[request] - local, min(init, rig.n[request]))
    keys = rig.all_keys(layer, request)[init:first]
    if not len(keys):
        return first, []
    scores = plain_scores(rig, layer, request, pq.encode(keys, codebook), codebook)
    return first, [init + i for i in top(scores[head].tolist(), k)]


def continued(rig: PQRig, source: PQRig, n: int, stop: int, request: int = 1, *, runs: int = 1) -> int:
    """Let a request of n tokens begin with another rig's request 0 up to `stop`; return the tokens taken over."""
    for layer in rig.geometry.layers:
        rig.source.of[layer, request] = source.source.of[layer, 0]
        rig.queries_seen[layer, request] = source.queries_seen[layer, 0]
    rig.algorithm.reserve(request, n)
    covered = 0
    step = -(-stop // PAGE // runs) * PAGE
    for start in range(0, stop, step):
        sidecar = source.algorithm.export_sidecar(0, start, min(stop, start + step))
        assert sidecar is not None
        assert sidecar.data.shape[1] == rig.algorithm.sidecar_page_bytes()
        covered += rig.algorithm.import_sidecar(request, sidecar)
    rig.n[request] = stop
    if n > stop:
        rig.prefill({request: n - stop})
    rig.algorithm.finish_prompt(request, n)
    rig.algorithm.become_sparse(request, n)
    return covered
