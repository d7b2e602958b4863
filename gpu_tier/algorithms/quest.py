"""Query-aware selection of pages by bounds of their keys (Tang et al., ICML 2024).

The representation of a scoring page is the minimum and the maximum of its keys in each dimension, in bf16, the minimum
rounded down and the maximum rounded up: ``Σ_j max(q_j·min_j, q_j·max_j)`` is then an upper bound of every ``q·k`` of
the page. Both start from the identity (+inf, -inf) and only ever widen, hence:

1. chunks of a prefill in any cut, and decoded tokens, leave the same bits as one prefill of everything;
2. the same chunk again changes nothing.

The page that is being written is always selected and never scored: its bounds need not exist yet.

Group rules, for the query heads of a KV head: `mean` bounds the mean query, `max` takes the largest bound, `softmax`
sums each head's softmax over the scored pages. With `heads=shared` the KV heads' scores are summed and one set serves
all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvcm.gpu_tier.algorithms.base import (
    BaseSparseAlgorithm,
    PerPass,
    Sidecar,
    export_pages,
    import_pages,
    keep_best,
    real_rows,
    sparse_lengths,
)
from kvcm.gpu_tier.config import QuestConfig
from kvcm.gpu_tier.errors import ConfigError
from kvcm.gpu_tier.kernels.quest_score import quest_score, round_down, round_up
from kvcm.gpu_tier.kernels.topk_select import topk_select
from kvcm.gpu_tier.pools.representation import RepresentationPool
from kvcm.gpu_tier.types import ForwardBatch, Selection, TokenRanges, Unit

__all__ = ["ChunkPages", "Quest"]

# A prefill pass laid out in whole scoring pages, so that a reduction over pages needs no atomics.


@dataclass(frozen=True, slots=True)
class ChunkPages:
    """The pages that the tokens of a pass touch, row by row.

    Attributes:
        token: ``int64 [T]`` place of each token in ``[touched pages · page]``.
        requests: ``int64 [touched pages]`` request of each page.
        positions: ``int64 [touched pages]`` position of the page's first token in its request.
    """

    token: Tensor
    requests: Tensor
    positions: Tensor

    @classmethod
    def of(cls, batch: ForwardBatch, page: int, device: torch.device) -> ChunkPages:
        """Return the layout of a pass; computed on the host from the lengths that it brings along."""
        tokens, requests, positions, touched = [], [], [], 0
        for request, length, extend in zip(batch.requests, batch.lengths, batch.extend_lens, strict=True):
            if not extend:
                continue
            start = length - extend
            borders = torch.arange(start - start % page, length, page)
            tokens.append(torch.arange(extend) + touched * page + start % page)
            requests.append(torch.full_like(borders, request))
            positions.append(borders)
            touched += len(borders)
        return cls(*(_joined(pieces, device) for pieces in (tokens, requests, positions)))


def _joined(pieces: list[Tensor], device: torch.device) -> Tensor:
    whole = torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int64)
    return whole.to(device, non_blocking=True)


_BF16_BYTES = 2


@dataclass(frozen=True, slots=True)
class _StepPages:
    """What all layers of a step ask for.

    Attributes:
        tokens: ``int32 [B]`` tokens of the sparse rows, 0 for the others.
        pages: ``int32 [B]`` their scoring pages.
        complete: ``int32 [B]`` those before the page that is being written.
        always: ``bool [B, 1, P]`` pages that are selected at any score.
        table: ``int32 [B, P]`` pages of the bounds.
    """

    tokens: Tensor
    pages: Tensor
    complete: Tensor
    always: Tensor
    table: Tensor


class Quest(BaseSparseAlgorithm):
    """Selects the pages that may hold the largest products, and always the first and the last ones."""

    unit: ClassVar[Unit] = Unit.PAGE

    def initialize_representation_pool(self) -> None:
        """Allocate two bf16 rows per scoring page, layer and KV head."""
        context, geometry = self.context, self.context.geometry
        self.settings = context.settings(QuestConfig)
        if geometry.page_size % self.settings.page:
            raise ConfigError("page", self.settings.page, f"must divide the page size {geometry.page_size}")
        shape = (geometry.num_kv_heads, 2, geometry.head_dim)
        empty = torch.full(shape, torch.inf, dtype=torch.bfloat16)
        empty[:, 1] = -torch.inf
        self.shape = shape
        self._places = PerPass(lambda batch, _: ChunkPages.of(batch, self.settings.page, context.runtime.device))
        self._newest_pages = PerPass(
            lambda batch, _: self.pool.locate(batch.req_pool_indices, batch.positions, real_rows(batch))
        )
        self._asked = PerPass(self._step_pages)
        self.pool = RepresentationPool(
            num_layers=geometry.num_layers - self.skip_layers,
            page_tokens=self.settings.page,
            page_bytes=math.prod(shape) * _BF16_BYTES,
            max_requests=context.max_requests,
            max_tokens=context.max_tokens,
            total_tokens=context.total_tokens,
            device=context.runtime.device,
            fill=empty.view(torch.uint8).flatten(),
        )

    @property
    def unit_tokens(self) -> int:
        """Tokens of a scoring page."""
        return self.settings.page

    @property
    def per_head(self) -> bool:
        """Whether each KV head has a set of its own."""
        return self.settings.heads == "per_head"

    @property
    def skip_layers(self) -> int:
        """First layers held here that attend densely; a later stage of a pipeline has none of the model's first."""
        geometry = self.context.geometry
        return min(max(0, self.settings.skip_layers - geometry.start_layer), geometry.num_layers)

    @property
    def max_items(self) -> int:
        """The budget in pages."""
        return -(-self.settings.token_budget // self.settings.page)

    def bounds(self, layer_id: int) -> Tensor:
        """Return ``bf16 [pages + 1, H, 2, d]`` of a layer: minimum and maximum; the last page is the pool's spare.

        Raises:
            ConfigError: the layer attends densely.
        """
        if self._is_dense(layer_id):
            raise ConfigError("layer_id", layer_id, f"the first {self.settings.skip_layers} layers attend densely")
        layer = self.pool.layer(self.context.geometry.layer_index(layer_id) - self.skip_layers)
        return layer.view(torch.bfloat16).view(-1, *self.shape)

    def reserve(self, request: int, n_tokens: int) -> None:
        """See `BaseSparseAlgorithm`."""
        self.pool.reserve(request, n_tokens)

    def construct_representations(
        self, layer_id: int, batch: ForwardBatch, k: Tensor, v: Tensor | None = None, q: Tensor | None = None,
        **extra: Tensor,
    ) -> None:  # fmt: skip
        """Widen the bounds of the pages that the chunk touches; of layers that attend densely there are none."""
        if self._is_dense(layer_id):
            return
        places = self._places.of(batch)
        pages = self.pool.locate(places.requests, places.positions)
        low, high = self._page_bounds(k[: len(places.token)].float(), places)
        self._widen(layer_id, pages, low, high)

    def _is_dense(self, layer_id: int) -> bool:
        return self.context.geometry.layer_index(layer_id) < self.skip_layers

    def _page_bounds(self, k: Tensor, places: ChunkPages) -> tuple[Tensor, Tensor]:
        shape = (len(places.positions), self.settings.page)
        padded = k.new_full((shape[0] * shape[1], *k.shape[1:]), torch.inf)
        padded[places.token] = k
        low = padded.unflatten(0, shape).amin(1)
        padded.fill_(-torch.inf)
        padded[places.token] = k
        return low, padded.unflatten(0, shape).amax(1)

    def _widen(self, layer_id: int, pages: Tensor, low: Tensor, high: Tensor) -> None:
        bounds = self.bounds(layer_id)
        held = bounds[pages]
        # Rounding is monotone, so the rounded minimum is the minimum of the rounded keys: the cut does not matter.
        # Adding 0 turns -0 into +0, between which minimum and maximum choose at will.
        low = torch.minimum(held[:, :, 0], round_down(low) + 0.0)
        high = torch.maximum(held[:, :, 1], round_up(high) + 0.0)
        bounds[pages] = torch.stack([low, high], dim=2)

    def update_representations(
        self, layer_id: int, batch: ForwardBatch, k: Tensor, v: Tensor | None = None, **extra: Tensor
    ) -> None:
        """Widen the bounds of each row's last page; of layers that attend densely there are none."""
        if self._is_dense(layer_id):
            return
        keys = k.float()
        self._widen(layer_id, self._newest_pages.of(batch), keys, keys)

    def retrieve_topk(
        self, queries: Tensor, layer_id: int, batch: ForwardBatch, sparse_mask: Tensor, **extra: Tensor
    ) -> Selection:
        """See `BaseSparseAlgorithm`."""
        settings = self.settings
        asked = self._asked.of(batch, sparse_mask)
        tokens, pages = asked.tokens, asked.pages
        scores = self._scores(queries, layer_id, batch, asked).masked_fill(asked.always, torch.inf)
        heads = scores.shape[1]
        indices = torch.empty(batch.rows, heads, self.max_items, dtype=torch.int32, device=queries.device)
        lengths = torch.empty(batch.rows, heads, dtype=torch.int32, device=queries.device)
        topk_select(scores, pages, self.max_items, indices, lengths, impl=self.context.config.kernels)
        if settings.sparsity_ratio is not None:
            indices, lengths = keep_best(indices, lengths, scores, self._share(tokens, pages))
        always = TokenRanges(settings.sink_pages * settings.page, settings.recent_pages * settings.page)
        return Selection(unit=self.unit, unit_tokens=settings.page, indices=indices, lengths=lengths, always=always)

    def _share(self, tokens: Tensor, pages: Tensor) -> Tensor:
        assert self.settings.sparsity_ratio is not None
        wanted = (tokens.double() * self.settings.sparsity_ratio / self.settings.page).ceil().int()
        least = self.settings.recent_pages + self.settings.sink_pages
        return torch.minimum(wanted.clamp(least, self.max_items), pages)

    def _step_pages(self, batch: ForwardBatch, sparse_mask: Tensor | None) -> _StepPages:
        assert sparse_mask is not None
        settings = self.settings
        tokens = sparse_lengths(batch, sparse_mask)
        pages = (tokens + settings.page - 1) // settings.page
        width = max(1, self.pool.pages_of(max((1, *batch.lengths))))
        page = torch.arange(width, device=tokens.device)
        always = (page >= (pages - settings.recent_pages)[:, None]) | (page < settings.sink_pages)
        table = self.pool.table[batch.req_pool_indices, :width]
        return _StepPages(
            tokens=tokens, pages=pages, complete=(pages - 1).clamp_min(0), always=always[:, None], table=table
        )

    def _scores(self, queries: Tensor, layer_id: int, batch: ForwardBatch, step: _StepPages) -> Tensor:
        """Return ``f32 [B, Hs, P]``; -inf for the page that is being written and behind it."""
        context, heads, rule = self.context, self.context.geometry.num_kv_heads, self.settings.group
        grouped = queries.float().unflatten(1, (heads, context.group))
        asked = grouped.mean(2) if rule == "mean" else queries
        out = torch.empty(batch.rows, asked.shape[1], step.table.shape[1], device=queries.device)
        quest_score(asked, self.bounds(layer_id), step.table, step.complete, out, impl=context.config.kernels)
        if rule == "mean":
            scores = out
        else:
            by_head = out.unflatten(1, (heads, context.group))
            scores = by_head.amax(2) if rule == "max" else self._softmax(by_head).sum(2)
        return scores if self.per_head else scores.sum(1, keepdim=True)

    def _softmax(self, bounds: Tensor) -> Tensor:
        weights = (bounds * self.context.sm_scale).softmax(-1)
        return torch.where(bounds == -torch.inf, 0.0, weights)

    def free(self, request: int) -> None:
        """See `BaseSparseAlgorithm`."""
        self.pool.free(request)

    def representation_bytes(self, n_tokens: int) -> int:
        """Return ``2·H·d·2`` bytes for each page and layer."""
        return self.pool.bytes_of(n_tokens)

    def sidecar_page_bytes(self) -> int:
        """Return the bounds' bytes of one page of the pools, all layers."""
        return self.pool.bytes_of(self.context.geometry.page_size)

    def export_sidecar(self, request: int, start: int, stop: int) -> Sidecar | None:
        """See `BaseSparseAlgorithm`."""
        return export_pages(self.pool, self.context.geometry.page_size, request, start, stop)

    def import_sidecar(self, request: int, sidecar: Sidecar) -> int:
        """See `BaseSparseAlgorithm`."""
        return import_pages(self.pool, self.context.geometry.page_size, request, sidecar)
