"""Reference of `dma_copy`."""

from __future__ import annotations

from torch import Tensor

__all__ = ["run"]


def run(src: Tensor, dst: Tensor, src_start: Tensor, dst_start: Tensor, nbytes: Tensor) -> None:
    """See `kvcm.gpu_tier.kernels.dma_copy.dma_copy`."""
    for here, there, size in zip(src_start.tolist(), dst_start.tolist(), nbytes.tolist(), strict=True):
        dst[there : there + size].copy_(src[here : here + size], non_blocking=True)
