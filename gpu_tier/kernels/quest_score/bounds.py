"""Rounds bounds of keys to bf16 so that they stay bounds: the smaller ones down, the larger ones up."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["page_bounds", "round_down", "round_up"]


def round_down(x: Tensor) -> Tensor:
    """Return the largest bf16 numbers that are not above `x` (f32, f16 or bf16)."""
    exact = x.float()
    rounded = exact.to(torch.bfloat16)
    return torch.where(rounded.float() > exact, _step(rounded, up=False), rounded)


def round_up(x: Tensor) -> Tensor:
    """Return the smallest bf16 numbers that are not below `x` (f32, f16 or bf16)."""
    exact = x.float()
    rounded = exact.to(torch.bfloat16)
    return torch.where(rounded.float() < exact, _step(rounded, up=True), rounded)


def page_bounds(keys: Tensor, counts: Tensor | None = None) -> Tensor:
    """Return the bounds of pages of keys.

    Args:
        keys: ``[..., tokens, H, d]``.
        counts: tokens of each page that count, of shape ``[...]``; all when None. A page without any gets +inf, -inf,
            to which bounds of more tokens can be merged, and must not be scored.

    Returns:
        ``bf16 [..., H, 2, d]``: smallest and largest numbers.
    """
    low = high = keys.float()
    if counts is not None:
        outside = torch.arange(keys.shape[-3], device=keys.device) >= counts[..., None]
        low = low.masked_fill(outside[..., None, None], torch.inf)
        high = high.masked_fill(outside[..., None, None], -torch.inf)
    return torch.stack([round_down(low.amin(-3)), round_up(high.amax(-3))], dim=-2)


def _step(x: Tensor, *, up: bool) -> Tensor:
    """Return the neighbours of bf16 numbers; of 0 the smallest number beside it."""
    bits = x.view(torch.int16)
    away = (bits >= 0) if up else (bits < 0)
    stepped = torch.where(away, bits + 1, bits - 1)
    # Rounding gave +0 or -0 for a tiny number on the other side: the neighbour has that side's sign.
    tiny = torch.full_like(bits, 1 if up else -0x7FFF)
    return torch.where(x == 0, tiny, stepped).view(torch.bfloat16)
