"""Merging of partial attention in torch."""

from __future__ import annotations

from torch import Tensor

__all__ = ["run"]


def run(o: Tensor, lse: Tensor, out_o: Tensor, out_lse: Tensor) -> None:
    """See `lse_merge`."""
    total = lse.float().logsumexp(0)
    weights = (lse - total.nan_to_num(neginf=0.0)).exp()
    out_o.copy_((o * weights[..., None]).sum(0))
    out_lse.copy_(total)
