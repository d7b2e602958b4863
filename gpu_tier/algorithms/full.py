"""Dense attention: nothing is selected.

`full` keeps every request on the device. `full_offload` keeps all KV in host memory and streams it through the device,
layer by layer: the honest baseline for contexts that do not fit. What differs is the residency, not the selection.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from kvcm.gpu_tier.algorithms.base import BaseSparseAlgorithm
from kvcm.gpu_tier.types import ForwardBatch, Selection, Unit

__all__ = ["FullAttention"]


class FullAttention(BaseSparseAlgorithm):
    """Selects nothing: requests are dense, or streamed whole."""

    unit: ClassVar[Unit] = Unit.TOKEN
    selects: ClassVar[bool] = False

    @property
    def max_items(self) -> int:
        """See `BaseSparseAlgorithm`."""
        return 0

    def retrieve_topk(
        self, queries: Tensor, layer_id: int, batch: ForwardBatch, sparse_mask: Tensor, **extra: Tensor
    ) -> Selection:
        """Return an empty selection."""
        indices = torch.empty(batch.rows, 1, 0, dtype=torch.int32, device=queries.device)
        lengths = torch.zeros(batch.rows, 1, dtype=torch.int32, device=queries.device)
        return Selection(unit=self.unit, unit_tokens=1, indices=indices, lengths=lengths)

    def representation_bytes(self, n_tokens: int) -> int:
        """See `BaseSparseAlgorithm`."""
        return 0
