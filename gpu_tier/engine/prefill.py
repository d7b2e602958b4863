"""Prefill attention over KV that does not fit the device: it is read piece by piece.

The keys of a request, those of the chunk included, are read as they are stored, in pieces that begin at multiples of
`piece_tokens`; partial results are merged by their log-sum-exp. So memory does not grow with the prefix, and the result
does not depend on how a prompt is cut into chunks, but for the order of sums.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_tier.engine.flash_prefill import can_flash, flash_chunk
from gpu_tier.engine.hooks import KeyReader
from gpu_tier.engine.sparse_prefill import BlockSparse, block_sparse_chunk
from gpu_tier.errors import ConfigError
from gpu_tier.kernels.dense import causal_partial, merge_partials
from gpu_tier.types import ForwardBatch, Partial

__all__ = ["KERNELS", "PrefillAttention"]

KERNELS = ("exact", "flash")


class PrefillAttention:
    """Attention of prompt chunks over everything before them and themselves.

    Args:
        reader: of the requests' KV.
        sm_scale: what scores are multiplied by before the softmax.
        piece_tokens: tokens of a piece.
        kernel: exact (f32, any rows) or flash (torch's kernels in the queries' precision, where they take the rows); or
            `BlockSparse`, which leaves blocks of keys out and reads all pieces at once.
    """

    def __init__(
        self, reader: KeyReader, sm_scale: float, piece_tokens: int, kernel: str | BlockSparse = "exact"
    ) -> None:
        if piece_tokens < 1:
            raise ConfigError("piece_tokens", piece_tokens, "must be at least 1")
        if isinstance(kernel, str) and kernel not in KERNELS:
            raise ConfigError.choice("prefill", kernel, KERNELS)
        self._sparse = kernel if isinstance(kernel, BlockSparse) else None
        self._flash = kernel == "flash"
        self._reader = reader
        self.sm_scale = sm_scale
        self._piece_tokens = piece_tokens

    def run(self, q: Tensor, layer_id: int, batch: ForwardBatch) -> Tensor:
        """Return the attention ``f32 [T, Hq, dv]`` of the chunks' queries ``q [T, Hq, D]``."""
        rows = zip(batch.requests, batch.lengths, q.split(batch.extend_lens), strict=True)
        return torch.cat([self.chunk(queries, layer_id, request, stop) for request, stop, queries in rows])

    def chunk(self, q: Tensor, layer_id: int, request: int, stop: int) -> Tensor:
        """Return the attention of one request's tokens, the last of which is token ``stop - 1``."""
        if self._sparse is not None:
            return block_sparse_chunk(self._reader, q, layer_id, request, stop, self.sm_scale, self._sparse)
        if self._flash and can_flash(q):
            return flash_chunk(self._reader, q, layer_id, request, stop, self.sm_scale, self._piece_tokens)
        q = q.float()
        start = stop - len(q)
        total: Partial | None = None
        for first in range(0, stop, self._piece_tokens):
            k, v = self._reader.rows(layer_id, request, first, min(first + self._piece_tokens, stop))
            part = causal_partial(q, k, v, self.sm_scale, start - first)
            total = part if total is None else merge_partials(total, part)
        assert total is not None
        return total.o
