"""Upper bounds of q·k over the keys of a page, from the page's smallest and largest number of each dim."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcm.gpu_tier.errors import ConfigError
from kvcm.gpu_tier.kernels import registry
from kvcm.gpu_tier.kernels.operands import check_contiguous, check_last_contiguous

__all__ = ["page_bounds", "quest_score", "round_down", "round_up"]


def quest_score(
    q: Tensor, bounds: Tensor, page_table: Tensor, n_pages: Tensor, out: Tensor, *, impl: str = "auto"
) -> None:
    """Score pages.

    Args:
        q: ``[B, Hx, d]``: all query heads, or one averaged query per KV head.
        bounds: ``bf16 [pages, H, 2, d]``: smallest (0) and largest (1) numbers, see `bounds`.
        page_table: ``int32 [B, P]`` scoring pages of each row.
        n_pages: ``int32 [B]`` entries of the table that count.
        out: ``f32 [B, Hx, P]`` becomes Σ_j max(q_j·min_j, q_j·max_j), -inf behind `n_pages` and for negative entries.
        impl: implementation, see `registry.get`.

    Raises:
        ConfigError: the shapes or the dtype do not fit.
    """
    rows, q_heads, dims = q.shape
    if bounds.dtype is not torch.bfloat16 or bounds.shape[2:] != (2, dims) or q_heads % bounds.shape[1]:
        raise ConfigError("bounds", (bounds.dtype, *bounds.shape), f"must be bf16 [pages, H, 2, {dims}]")
    if n_pages.shape != (rows,) or page_table.shape[0] != rows:
        raise ConfigError("page_table, n_pages", (tuple(page_table.shape), tuple(n_pages.shape)), "must be [B,P], [B]")
    if out.shape != (rows, q_heads, page_table.shape[1]):
        raise ConfigError("out", tuple(out.shape), f"must be {(rows, q_heads, page_table.shape[1])}")
    check_contiguous(n_pages=n_pages)
    check_last_contiguous(q=q, bounds=bounds, page_table=page_table, out=out)
    registry.get("quest_score", q.device, impl)(q, bounds, page_table, n_pages, out)


# Rounds bounds of keys to bf16 so that they stay bounds: the smaller ones down, the larger ones up.


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
