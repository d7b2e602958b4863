"""A fixed set of tokens per layer and KV head, to which new tokens are appended: nothing is ever loaded again.

The j-th token of a head's set lies in the j-th slot of the buffer, whatever token it is; decoded tokens take the slots
behind the set in the order in which they come.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_tier.manager.policy import BufferFill
from gpu_tier.runtime import upload
from gpu_tier.types import ForwardBatch, ResidencyPlan, Selection

__all__ = ["StaticSetPolicy"]


class StaticSetPolicy:
    """Positions in the selection are positions in the buffer.

    Args:
        max_requests: rows of the tables.
        device: where they lie.
    """

    def __init__(self, max_requests: int, device: torch.device) -> None:
        self._slots = torch.full((max_requests, 0), -1, dtype=torch.int32, device=device)

    def hold(self, request: int, n_tokens: int) -> None:
        """See `ResidencyPolicy`; it keeps nothing."""

    def admit(self, request: int, buffer_slots: Tensor, newest_slots: Tensor, n_tokens: int) -> BufferFill:
        """See `ResidencyPolicy`; what goes into the buffer differs by layer and head, so it is not named here.

        Called again when the buffer has grown.
        """
        missing = len(buffer_slots) - self._slots.shape[1]
        if missing > 0:
            self._slots = torch.nn.functional.pad(self._slots, (0, missing), value=-1)
        self._slots[request, : len(buffer_slots)] = upload(buffer_slots, self._slots.device)
        return BufferFill(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64))

    def release(self, request: int) -> None:
        """See `ResidencyPolicy`."""
        self._slots[request] = -1

    def resolve(self, layer_id: int, batch: ForwardBatch, selection: Selection, sparse_mask: Tensor) -> ResidencyPlan:
        """See `ResidencyPolicy`."""
        width = selection.indices.shape[-1]
        slots = self._slots[batch.req_pool_indices, :width]
        slots = torch.nn.functional.pad(slots, (0, width - slots.shape[1]), value=-1)
        return ResidencyPlan(torch.where(selection.indices >= 0, slots[:, None], -1))

    def commit(self, layer_id: int, plan: ResidencyPlan) -> None:
        """See `ResidencyPolicy`."""
