"""Upper bounds of q·k over the keys of a page, from the page's smallest and largest number of each dim."""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_tier.errors import ConfigError
from gpu_tier.kernels import registry
from gpu_tier.kernels.memory import check_contiguous, check_last_contiguous

__all__ = ["quest_score"]


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
