"""Scratch memory of kernels that need some between two launches."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

__all__ = ["scratch"]


def scratch(device: torch.device, dtype: torch.dtype, numbers: int) -> Tensor:
    """Return at least so many numbers, with whatever is in them, for work on the current stream.

    Two users on one stream share the memory: what one wrote is valid until the next launch of another.
    """
    stream = 0 if device.type == "cpu" else torch.accelerator.current_stream(device).stream_id
    return _room(device, dtype, stream, 1 << max(0, numbers - 1).bit_length())


@cache
def _room(device: torch.device, dtype: torch.dtype, _stream: int, numbers: int) -> Tensor:
    """Allocate. It is never freed, since a captured CUDA graph may point into it; sizes are powers of two."""
    return torch.empty(numbers, dtype=dtype, device=device)
