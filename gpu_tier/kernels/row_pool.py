"""A pool of rows as a copy kernel sees one layer of it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gpu_tier.geometry import Addressing

__all__ = ["RowPool"]


@dataclass(frozen=True, slots=True)
class RowPool:
    """One layer of a pool; the row of slot s and head h is at ``addressing.address(part, s, layer, h)``.

    Attributes:
        data: the pool, flat ``uint8``, on the device or readable by it.
        addressing: where each row lies in it.
        layer: position of the layer in the pool.
    """

    data: Tensor
    addressing: Addressing
    layer: int
