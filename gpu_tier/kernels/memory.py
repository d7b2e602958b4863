"""What the kernels ask of the memory of their tensors."""

from __future__ import annotations

from torch import Tensor

from gpu_tier.errors import ConfigError

__all__ = ["check_contiguous", "check_last_contiguous"]


def check_contiguous(**tensors: Tensor) -> None:
    """Check outputs, which are written as one piece.

    Raises:
        ConfigError: one of them is not contiguous.
    """
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ConfigError(name, (*tensor.shape, "strides", *tensor.stride()), "must be contiguous")


def check_last_contiguous(**tensors: Tensor) -> None:
    """Check inputs whose last dimension is read with wide loads.

    Raises:
        ConfigError: the last dimension of one of them is not contiguous.
    """
    for name, tensor in tensors.items():
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            strides = (*tensor.shape, "strides", *tensor.stride())
            raise ConfigError(name, strides, "the last dimension must be contiguous")
