"""Reference of `gather_copy`: the runs as lists of rows. Waits for the device when its tensors are on one."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["run"]


def run(
    sources: tuple[Tensor, ...],
    kind: Tensor,
    src_row: Tensor,
    n_rows: Tensor,
    dst_row: Tensor,
    count: Tensor,
    out: Tensor,
) -> None:
    """See `gpu_tier.kernels.gather_copy.gather_copy`."""
    inside = torch.arange(kind.shape[1], device=kind.device) < count[:, None]
    flat = out.view(-1, out.shape[2])
    for number, source in enumerate(sources):
        buffers, runs = (inside & (kind == number)).nonzero(as_tuple=True)
        lengths = n_rows[buffers, runs].long()
        first = lengths.cumsum(0) - lengths
        offset = torch.arange(int(lengths.sum()), device=kind.device) - first.repeat_interleave(lengths)
        read = src_row[buffers, runs].repeat_interleave(lengths) + offset
        target = (buffers * out.shape[1] + dst_row[buffers, runs]).repeat_interleave(lengths) + offset
        flat[target] = source[read.to(source.device)].to(out.device)
