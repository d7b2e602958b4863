"""Selections whose hit rate is an input.

Every row has a random order of its tokens, and step s selects the window that starts at s · (1 - hit rate) · k of it.
So exactly that share of each selection is new, no token returns before all others had their turn, and the places are
as scattered as real ones. The newest token is always selected beside the window. Real traces, whose tokens return, are
measured in the evaluation; here a hit rate has to be what the row says.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["SlidingTrace"]


class SlidingTrace:
    """A trace of many rows.

    Args:
        rows: independent rows, one per layer and request.
        n_tokens: tokens to select from; more than the buffer and a selection together.
        k: tokens of a selection, the newest included.
        hit_rate: share of the selection that the step before had, too.
        device: where selections are made.
    """

    def __init__(self, rows: int, n_tokens: int, k: int, hit_rate: float, device: torch.device) -> None:
        self.k = k
        self.per_step = round(k * (1 - hit_rate))
        self._orders = torch.stack([torch.randperm(n_tokens, device=device, dtype=torch.int32) for _ in range(rows)])
        self._window = torch.arange(k - 1, device=device)

    def select(self, step: int, newest: int) -> Tensor:
        """Return the selections of a step, ``int32 [rows, k]``, in ascending order; `newest` is the newest token."""
        places = (self._window + step * self.per_step) % self._orders.shape[1]
        chosen = self._orders[:, places].sort(-1).values
        return torch.cat([chosen, chosen.new_full((len(chosen), 1), newest)], dim=1)
