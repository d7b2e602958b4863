"""What the tests of PQCache share: its rig, whose requests become sparse, and what it selects in plain torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from algorithm_rig import PAGE, Rig, mha, top
from torch import Tensor

from gpu_tier.algorithms.pqcache import PQCache
from gpu_tier.geometry import KVGeometry
from gpu_tier.index import pq
from gpu_tier.types import ForwardBatch, Selection

__all__ = ["SMALL", "PQRig", "codebook_of", "codes_of", "continued", "plain_selection"]

SMALL: dict[str, Any] = {"m": 2, "b": 3, "init": 4, "token_budget": 16, "iterations": 3, "cache_tokens": 0}


class PQRig(Rig):
    """A rig of pqcache with 8 centroids per sub-vector; a request has an index from a middle of 16 tokens on."""

    def __init__(
        self, geometry: KVGeometry | None = None, members: int = 2, *, residency: str = "blocks",
        min_sparse_prompt_len: int = 32, device: str = "cpu", top_k: int = 64, kernels: str = "reference",
        **algo: Any,
    ) -> None:  # fmt: skip
        super().__init__(
            geometry or mha(), "pqcache", members, {**SMALL, **algo}, device, residency=residency, top_k=top_k,
            min_sparse_prompt_len=min_sparse_prompt_len, kernels=kernels,
        )  # fmt: skip
        assert isinstance(self.algorithm, PQCache)
        self.pq: PQCache = self.algorithm

    def add(self, lengths: Mapping[int, int], *, chunk: int = 0, spare: int = 0) -> None:
        """Prefill requests of these lengths and let them be sparse."""
        super().add(lengths, chunk=chunk, spare=spare)
        for request, length in lengths.items():
            self.pq.become_sparse(request, length)

    def decode(self, layer: int, batch: ForwardBatch, sparse_mask: Tensor | None = None) -> Selection:
        for request, length in zip(batch.requests, batch.lengths, strict=True):
            if length > self.n[request]:
                raise AssertionError("a step must reveal its token first")
        return super().decode(layer, batch, sparse_mask)


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
