"""All KV on the device: the baseline that a hierarchy is compared with, and what short contexts are best served by."""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_tier.manager.policy import BufferFill
from gpu_tier.types import ForwardBatch, ResidencyPlan, Selection

__all__ = ["DeviceResidentPolicy"]


class DeviceResidentPolicy:
    """Selected items are where they always were; nothing moves.

    Args:
        table: ``int32 [R, max_tokens]`` device slot of every token.
    """

    def __init__(self, table: Tensor) -> None:
        self._table = table

    def hold(self, request: int, n_tokens: int) -> None:
        """See `ResidencyPolicy`; it keeps nothing."""

    def admit(self, request: int, buffer_slots: Tensor, newest_slots: Tensor, n_tokens: int) -> BufferFill:
        """See `ResidencyPolicy`; there is no buffer."""
        return BufferFill(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64))

    def release(self, request: int) -> None:
        """See `ResidencyPolicy`."""

    def resolve(self, layer_id: int, batch: ForwardBatch, selection: Selection, sparse_mask: Tensor) -> ResidencyPlan:
        """See `ResidencyPolicy`."""
        rows = batch.req_pool_indices[:, None, None]
        tokens = selection.indices.long() * selection.unit_tokens
        slots = self._table[rows, tokens.clamp_min(0)]
        return ResidencyPlan(torch.where(selection.indices >= 0, slots, -1))

    def commit(self, layer_id: int, plan: ResidencyPlan) -> None:
        """See `ResidencyPolicy`."""
