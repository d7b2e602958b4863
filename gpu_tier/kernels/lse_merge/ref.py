"""Merging of partial attention in torch."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["run"]


def run(o: Tensor, lse: Tensor, out_o: Tensor, out_lse: Tensor) -> None:
    """See `lse_merge`."""
    total = lse.float().logsumexp(0)
    weights = (lse - total.nan_to_num(neginf=0.0)).exp()
    # The output of an empty part may never have been written.
    counted = o.masked_fill((lse == -torch.inf)[..., None], 0.0)
    out_o.copy_((counted * weights[..., None]).sum(0))
    out_lse.copy_(total)
