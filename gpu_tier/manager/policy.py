"""What a residency policy is: it decides where selected items are on the device and what has to move for that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from gpu_tier.types import ForwardBatch, ResidencyPlan, Selection

__all__ = ["BufferFill", "ResidencyPolicy"]


@dataclass(frozen=True, slots=True)
class BufferFill:
    """Items to copy into a request's fresh buffer, the same in all layers and heads.

    Attributes:
        items: ``int64 [M]`` items, on the host.
        slots: ``int64 [M]`` device slot of each item's first token.
    """

    items: Tensor
    slots: Tensor


class ResidencyPolicy(Protocol):
    """One policy over all layers and requests of one engine."""

    def admit(self, request: int, buffer_slots: Tensor, newest_slots: Tensor, n_tokens: int) -> BufferFill:
        """Give a request its buffer and return what to fill it with.

        Args:
            request: row of the per-request tables.
            buffer_slots: ``int32 [C]`` device slot of each item of the buffer.
            newest_slots: ``int32 [2]`` device slots of the newest item i: entry ``i % 2``.
            n_tokens: tokens whose KV exists; the last, part-filled item goes to its newest slot.
        """

    def release(self, request: int) -> None:
        """Forget a request; one that is not known too."""

    def resolve(self, layer_id: int, batch: ForwardBatch, selection: Selection, sparse_mask: Tensor) -> ResidencyPlan:
        """Return where each selected item is after the plan was fetched; no bytes move."""

    def commit(self, layer_id: int, plan: ResidencyPlan) -> None:
        """Take note that the layer's attention has read the buffer."""
