"""Index vectors as bytes: an orthonormal Hadamard rotation, then e4m3 with one scale per vector.

The rotation spreads a large number over all dims, so that one scale loses less, and leaves dot products as they are. It
is done by butterflies and not by a matrix product: what a vector becomes then does not depend on how many others are
rotated beside it, and a prompt in chunks leaves the same bytes as a whole one.

Scales are ``max|x| / 448``; with `ue8m0` the next power of two that is not below.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_tier.errors import ConfigError
from gpu_tier.rows import FP8_MAX

__all__ = ["SCALE_BYTES", "hadamard", "index_rows", "quantise"]

SCALE_BYTES = 4


def hadamard(x: Tensor) -> Tensor:
    """Return ``[..., d]`` rotated, in f32.

    Raises:
        ConfigError: d is no power of two.
    """
    dims = x.shape[-1]
    if dims & (dims - 1):
        raise ConfigError("dims", dims, "a Hadamard rotation needs a power of two")
    rotated, width = x.float(), 1
    while width < dims:
        low, high = rotated.unflatten(-1, (dims // (2 * width), 2, width)).unbind(-2)
        rotated = torch.stack([low + high, low - high], dim=-2).flatten(-3)
        width *= 2
    return rotated.mul(dims**-0.5)


def quantise(x: Tensor, scale_format: str) -> tuple[Tensor, Tensor]:
    """Return ``[..., d]`` as ``e4m3 [..., d]`` and its scales ``f32 [...]``; `scale_format` is f32 or ue8m0."""
    x = x.float()
    scale = (x.abs().amax(-1) / FP8_MAX).clamp_min(torch.finfo(torch.float32).tiny)
    if scale_format == "ue8m0":
        mantissa, exponent = torch.frexp(scale)
        scale = torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).int())
    return (x / scale[..., None]).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scale


def index_rows(keys: Tensor, scale_format: str) -> Tensor:
    """Return index keys ``[..., d]`` rotated and quantised, ``uint8 [..., d + 4]``."""
    quantised, scale = quantise(hadamard(keys), scale_format)
    return torch.cat([quantised.view(torch.uint8), scale[..., None].view(torch.uint8)], dim=-1)
