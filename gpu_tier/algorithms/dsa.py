"""DeepSeek sparse attention (DeepSeek-V3.2): a lightning indexer scores all tokens, the best `top_k` are attended to.

The representation of a token is its index key in e4m3 with one f32 scale: 132 bytes per layer for 128 dims. The index
keys are projections of their own, so they cannot be rebuilt from KV: a prefix without them is of no use.

A request of at most `top_k` tokens selects all of them and is not scored. All heads share a selection.

`index_source="proxy"` is a stand-in for models that have no indexer, and no DSA: the index key is the mean of the KV
heads' keys, the index queries are the mean query of each KV head's group, all of weight 1.
"""

from __future__ import annotations

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
    real_rows,
    sparse_lengths,
    token_requests,
)
from kvcm.gpu_tier.config import DsaConfig
from kvcm.gpu_tier.errors import ConfigError
from kvcm.gpu_tier.index.lightning_indexer import SCALE_BYTES, hadamard, index_rows, quantise
from kvcm.gpu_tier.kernels.indexer_score import indexer_score
from kvcm.gpu_tier.kernels.topk_select import topk_select
from kvcm.gpu_tier.pools.representation import RepresentationPool
from kvcm.gpu_tier.types import ForwardBatch, Selection, Unit

__all__ = ["DSA"]


@dataclass(frozen=True, slots=True)
class _StepLengths:
    """What all layers of a step ask for.

    Attributes:
        everything: ``int32 [B, 1, K]`` all tokens of the rows that have at most K.
        lengths: ``int32 [B, 1]`` tokens that each row selects.
        scored: ``int32 [B]`` tokens of the rows that have more, 0 for the others.
        is_scored: ``bool [B, 1, 1]`` which those are.
        table: ``int32 [B, P]`` pages of the index keys.
    """

    everything: Tensor
    lengths: Tensor
    scored: Tensor
    is_scored: Tensor
    table: Tensor


class DSA(BaseSparseAlgorithm):
    """Selects the tokens that the indexer ranks highest."""

    unit: ClassVar[Unit] = Unit.TOKEN
    updates_before_retrieval: ClassVar[bool] = True
    required_sidecar: ClassVar[bool] = True

    def initialize_representation_pool(self) -> None:
        """Allocate one row per token and layer."""
        context, geometry = self.context, self.context.geometry
        self.settings = context.settings(DsaConfig)
        self.proxy = self.settings.index_source == "proxy"
        self.dims = geometry.head_dim if self.proxy else self.settings.index_dim
        if self.dims & (self.dims - 1):
            raise ConfigError("index_dim", self.dims, "must be a power of two; of a proxy it is the head's")
        self.pool = RepresentationPool(
            num_layers=geometry.num_layers,
            page_tokens=geometry.page_size,
            page_bytes=geometry.page_size * (self.dims + SCALE_BYTES),
            max_requests=context.max_requests,
            max_tokens=context.max_tokens,
            total_tokens=context.total_tokens,
            device=context.runtime.device,
        )
        self._requests = PerPass(lambda batch, _: token_requests(batch))
        self._rows = PerPass(self._newest_rows)
        self._asked = PerPass(self._step_lengths)

    @property
    def represents_keys(self) -> bool:
        """Index keys are projections of their own; only a proxy's come from keys."""
        return self.proxy

    @property
    def max_items(self) -> int:
        """`top_k`."""
        return self.context.config.top_k

    def index_keys(self, layer_id: int) -> Tensor:
        """Return ``uint8 [rows, dI + 4]`` of a layer; row ``page · page_size + offset`` is a token."""
        layer = self.pool.layer(self.context.geometry.layer_index(layer_id))
        return layer.view(-1, self.dims + SCALE_BYTES)

    def reserve(self, request: int, n_tokens: int) -> None:
        """See `BaseSparseAlgorithm`."""
        self.pool.reserve(request, n_tokens)

    def construct_representations(
        self, layer_id: int, batch: ForwardBatch, k: Tensor, v: Tensor | None = None, q: Tensor | None = None,
        **extra: Tensor,
    ) -> None:  # fmt: skip
        """Write the index keys of the chunk; `extra` brings ``index_key [T, dI]``."""
        tokens = sum(batch.extend_lens)
        pages = self.pool.locate(self._requests.of(batch), batch.positions[:tokens])
        rows = self._row(pages, batch.positions[:tokens])
        self._write(layer_id, rows, self._index_key(k, extra)[:tokens])

    def update_representations(
        self, layer_id: int, batch: ForwardBatch, k: Tensor, v: Tensor | None = None, **extra: Tensor
    ) -> None:
        """Write the index key of each row's token; `extra` brings ``index_key [B, dI]``."""
        self._write(layer_id, self._rows.of(batch), self._index_key(k, extra))

    def _newest_rows(self, batch: ForwardBatch, _: Tensor | None) -> Tensor:
        pages = self.pool.locate(batch.req_pool_indices, batch.positions, real_rows(batch))
        return self._row(pages, batch.positions)

    def _row(self, pages: Tensor, positions: Tensor) -> Tensor:
        return pages * self.pool.page_tokens + positions % self.pool.page_tokens

    def _write(self, layer_id: int, rows: Tensor, keys: Tensor) -> None:
        self.index_keys(layer_id)[rows] = index_rows(keys, self.settings.scale_format)

    def _index_key(self, k: Tensor, extra: dict[str, Tensor]) -> Tensor:
        return k.float().mean(1) if self.proxy else _given(extra, "index_key", self.dims)

    def _index_query(self, queries: Tensor, extra: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return queries ``[B, HI, dI]`` and their weights ``f32 [B, HI]``."""
        if self.proxy:
            means = queries.float().unflatten(1, (self.context.geometry.num_kv_heads, self.context.group)).mean(2)
            return means, means.new_ones(means.shape[:2])
        heads = self.settings.index_heads
        return _given(extra, "index_query", heads, self.dims), _given(extra, "index_weight", heads).float()

    def retrieve_topk(
        self, queries: Tensor, layer_id: int, batch: ForwardBatch, sparse_mask: Tensor, **extra: Tensor
    ) -> Selection:
        """See `BaseSparseAlgorithm`; `extra` brings ``index_query [B, HI, dI]`` and ``index_weight [B, HI]``."""
        asked, k = self._asked.of(batch, sparse_mask), self.max_items
        if max((0, *batch.lengths)) <= k:
            return Selection(unit=self.unit, unit_tokens=1, indices=asked.everything, lengths=asked.lengths)
        best = torch.empty_like(asked.everything)
        scores = self._scores(queries, layer_id, batch, asked, extra)
        topk_select(scores, asked.scored, k, best, torch.empty_like(asked.lengths), impl=self.context.config.kernels)
        return Selection(
            unit=self.unit,
            unit_tokens=1,
            indices=torch.where(asked.is_scored, best, asked.everything),
            lengths=asked.lengths,
        )

    def _step_lengths(self, batch: ForwardBatch, sparse_mask: Tensor | None) -> _StepLengths:
        assert sparse_mask is not None
        tokens, k = sparse_lengths(batch, sparse_mask), self.max_items
        place = torch.arange(k, dtype=torch.int32, device=tokens.device)
        width = max((0, *batch.lengths))
        return _StepLengths(
            everything=torch.where(place < tokens[:, None], place, -1)[:, None],
            lengths=tokens.clamp_max(k)[:, None],
            scored=torch.where(tokens > k, tokens, 0),
            is_scored=(tokens > k)[:, None, None],
            table=self.pool.table[batch.req_pool_indices, : self.pool.pages_of(width)],
        )

    def _scores(
        self, queries: Tensor, layer_id: int, batch: ForwardBatch, asked: _StepLengths, extra: dict[str, Tensor]
    ) -> Tensor:
        query, weight = self._index_query(queries, extra)
        q8, scale = quantise(hadamard(query), self.settings.scale_format)
        out = torch.empty(batch.rows, max(batch.lengths), device=queries.device)
        indexer_score(
            q8=q8,
            weight=weight * scale,
            keys=self.index_keys(layer_id),
            page_table=asked.table,
            page_tokens=self.pool.page_tokens,
            lengths=asked.scored,
            out=out,
            impl=self.context.config.kernels,
        )
        return out[:, None]

    def free(self, request: int) -> None:
        """See `BaseSparseAlgorithm`."""
        self.pool.free(request)

    def representation_bytes(self, n_tokens: int) -> int:
        """Return ``dI + 4`` bytes for each token and layer, in whole pages."""
        return self.pool.bytes_of(n_tokens)

    def sidecar_page_bytes(self) -> int:
        """Return the index keys' bytes of one page, all layers."""
        return self.pool.bytes_of(self.context.geometry.page_size)

    def export_sidecar(self, request: int, start: int, stop: int) -> Sidecar | None:
        """See `BaseSparseAlgorithm`."""
        return export_pages(self.pool, self.context.geometry.page_size, request, start, stop)

    def import_sidecar(self, request: int, sidecar: Sidecar) -> int:
        """See `BaseSparseAlgorithm`."""
        return import_pages(self.pool, self.context.geometry.page_size, request, sidecar)


def _given(extra: dict[str, Tensor], name: str, *shape: int) -> Tensor:
    value = extra.get(name)
    if value is None or value.shape[1:] != shape:
        allowed = f"the engine must pass [tokens, {', '.join(map(str, shape))}] to the hooks"
        raise ConfigError(name, None if value is None else tuple(value.shape), allowed)
    return value
