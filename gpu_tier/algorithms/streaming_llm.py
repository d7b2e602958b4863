"""Attention sinks and a sliding window (Xiao et al., ICLR 2024): the first and the last pages, nothing retrieved.

The window are the pages that hold the last `window` tokens, so up to a page more than asked for; the page that is being
written is the last of them.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from kvcm.gpu_tier.algorithms.base import BaseSparseAlgorithm, sparse_lengths
from kvcm.gpu_tier.config import StreamingLLMConfig
from kvcm.gpu_tier.types import ForwardBatch, Selection, TokenRanges, Unit

__all__ = ["StreamingLLM"]


class StreamingLLM(BaseSparseAlgorithm):
    """Selects sink pages and window pages, one table for all heads."""

    unit: ClassVar[Unit] = Unit.PAGE

    def initialize_representation_pool(self) -> None:
        """Keep the settings in pages; there is nothing to represent."""
        settings = self.context.settings(StreamingLLMConfig)
        self.page, self.window = settings.page, settings.window
        self.sink_pages = -(-settings.sink // settings.page)

    @property
    def unit_tokens(self) -> int:
        """Tokens of a page."""
        return self.page

    @property
    def represents_keys(self) -> bool:
        """See `BaseSparseAlgorithm`."""
        return False

    @property
    def max_items(self) -> int:
        """Sink pages, and the most pages that `window` consecutive tokens can touch."""
        return self.sink_pages + (self.window - 2) // self.page + 2

    def retrieve_topk(
        self, queries: Tensor, layer_id: int, batch: ForwardBatch, sparse_mask: Tensor, **extra: Tensor
    ) -> Selection:
        """Return the pages of the sinks and of the window; no query is looked at."""
        tokens = sparse_lengths(batch, sparse_mask)[:, None]
        pages = (tokens + self.page - 1) // self.page
        sinks = pages.clamp_max(self.sink_pages)
        first = torch.maximum(sinks, (tokens - self.window).clamp_min(0) // self.page)
        place = torch.arange(self.max_items, dtype=torch.int32, device=tokens.device)
        ids = torch.where(place < sinks, place, first + place - sinks)
        lengths = sinks + (pages - first)
        indices = torch.where(place < lengths, ids, -1).int()
        always = TokenRanges(self.sink_pages * self.page, self.window)
        return Selection(
            unit=self.unit, unit_tokens=self.page, indices=indices[:, None], lengths=lengths.int(), always=always
        )

    def representation_bytes(self, n_tokens: int) -> int:
        """See `BaseSparseAlgorithm`."""
        return 0
