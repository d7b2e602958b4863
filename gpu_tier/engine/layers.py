"""The pieces that the models here are made of."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["random_matrix", "rms_norm", "rotate", "swiglu"]


def random_matrix(generator: torch.Generator, outputs: int, inputs: int, gain: float = 1.0) -> Tensor:
    """Return a weight ``f64 [outputs, inputs]`` that keeps the size of its input's numbers, times `gain`."""
    scale = gain * inputs**-0.5
    weight: Tensor = scale * torch.randn(outputs, inputs, generator=generator, dtype=torch.float64)
    return weight


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Return ``x [..., d]`` divided by the root of its mean square, times the weight; reduced in f32 at least."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Return ``x [T, heads, d]`` with rotary positions; angles are computed in f32 at least.

    Numbers i and i + d/2 are a pair, which is the order of Llama's weights.
    """
    half = x.shape[-1] // 2
    wide = torch.promote_types(x.dtype, torch.float32)
    frequency = theta ** -(torch.arange(half, device=x.device, dtype=wide) / half)
    angle = positions.to(wide)[:, None] * frequency
    cos, sin = angle.cos().to(x.dtype)[:, None], angle.sin().to(x.dtype)[:, None]
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def swiglu(x: Tensor, weights: Mapping[str, Tensor], prefix: str) -> Tensor:
    """Return the feed-forward of Llama: ``down(silu(gate(x)) * up(x))``; weights are named as there."""
    gate, up, down = (weights[f"{prefix}.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return (functional.silu(x @ gate.T) * (x @ up.T)) @ down.T
