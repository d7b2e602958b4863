"""Index vectors as bytes: an orthonormal Hadamard rotation, then e4m3 with one scale per vector.

The rotation spreads a large number over all dims, so that one scale loses less, and leaves dot products as they are. It
is one product with a matrix of signs in f64, where the sums are as good as exact: what a vector becomes then does not
depend on how many others are rotated beside it, and a prompt in chunks leaves the same bytes as a whole one. (The
butterflies of a fast transform would do that too, but take 7 steps of small kernels in every layer and step.)

Scales are ``max|x| / 448``; with `ue8m0` the next power of two that is not below.
"""

from __future__ import annotations

from functools import lru_cache

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
    return (x.double() @ _signs(dims, x.device)).mul(dims**-0.5).float()


@lru_cache(maxsize=16)
def _signs(dims: int, device: torch.device) -> Tensor:
    """Return Sylvester's matrix, ``f64 [d, d]``."""
    signs = torch.ones(1, 1, dtype=torch.float64)
    while len(signs) < dims:
        signs = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), signs)
    return signs.to(device)


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
