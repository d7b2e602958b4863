"""`dma_copy` in CUDA C++; see dma_copy.cu."""

from __future__ import annotations

import ctypes

from torch import Tensor

from kvcm.gpu_tier.kernels import cuda_build

__all__ = ["run"]


def run(src: Tensor, dst: Tensor, src_start: Tensor, dst_start: Tensor, nbytes: Tensor) -> None:
    """See `kvcm.gpu_tier.kernels.dma_copy.dma_copy`."""
    runs = [run.contiguous() for run in (src_start, dst_start, nbytes)]
    pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (src, dst, *runs)]
    stream = cuda_build.stream(dst.device if dst.is_cuda else src.device)
    cuda_build.check(cuda_build.library().gpu_tier_dma_copy(*pointers, ctypes.c_int64(len(nbytes)), stream))
