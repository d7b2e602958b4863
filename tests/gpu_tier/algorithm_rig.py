"""What the tests of the algorithms share: keys in plain tensors, passes over them, and plain Python's selection."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from gpu_tier.algorithms import registry
from gpu_tier.algorithms.base import AlgorithmContext, BaseSparseAlgorithm
from gpu_tier.config import SparseConfig
from gpu_tier.geometry import KVGeometry, KVKind
from gpu_tier.rows import KVDtype
from gpu_tier.runtime import runtime_for
from gpu_tier.types import ForwardBatch, Mode, Selection

__all__ = ["INDEX_DIM", "INDEX_HEADS", "PAGE", "IndexRig", "PlainKeys", "Rig", "ids", "mha", "mla", "top"]

ROWS, TOKENS, PAGE = 6, 512, 16
INDEX_HEADS, INDEX_DIM = 4, 16


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
        """Return a pass over what was revealed; padding rows name request 0 with a length that must not matter."""
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
