"""Hands contiguous copies to the copy engine of the device.

Implementations: the reference, one `copy_` of torch each, and CUDA C++, which spares the microseconds of Python that
would cost more than a copy of 64 KiB takes.
"""

from __future__ import annotations

from torch import Tensor

from kvcm.gpu_tier.errors import ConfigError
from kvcm.gpu_tier.kernels import registry

__all__ = ["dma_copy"]


def dma_copy(
    src: Tensor, dst: Tensor, src_start: Tensor, dst_start: Tensor, nbytes: Tensor, *, impl: str = "auto"
) -> None:
    """Copy runs of bytes, in the current stream.

    Args:
        src: flat ``uint8``, on the device or in host memory.
        dst: flat ``uint8``, likewise.
        src_start: ``int64 [n]`` on the host, first byte of each run in `src`.
        dst_start: ``int64 [n]`` on the host, first byte of each run in `dst`.
        nbytes: ``int64 [n]`` on the host, bytes of each run.
        impl: auto, reference or cuda.

    Raises:
        ConfigError: a run does not lie inside both tensors.
    """
    if not nbytes.numel():
        return
    for name, start, data in (("src_start", src_start, src), ("dst_start", dst_start, dst)):
        if bool((start < 0).any()) or bool((start + nbytes > data.numel()).any()):
            raise ConfigError(name, (int(start.min()), int(start.max())), f"runs must lie in {data.numel()} bytes")
    device = dst.device if dst.is_cuda else src.device
    registry.get("dma_copy", device, impl)(src, dst, src_start, dst_start, nbytes)
