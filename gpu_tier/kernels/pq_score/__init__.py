"""Scores of tokens from the codes of their quantised keys: sums of entries of a table made for the query."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcm.gpu_tier.errors import ConfigError
from kvcm.gpu_tier.kernels import registry
from kvcm.gpu_tier.kernels.operands import check_contiguous, check_last_contiguous

__all__ = ["pq_score"]


def pq_score(
    table: Tensor, codes: Tensor, page_table: Tensor, first: Tensor, lengths: Tensor, out: Tensor, *,
    impl: str = "auto",
) -> None:  # fmt: skip
    """Score the tokens of each row.

    Token t of row b is place ``t % E`` of page ``page_table[b, t // E]``, E being the tokens of a page.

    Args:
        table: ``f32 [B, Hq, m, 2^b]`` of any strides: of each sub-space the query's dot products with its centroids.
        codes: ``uint8 [pages, E, H, m]`` centroid of each sub-space; query head j reads KV head ``j // (Hq / H)``. None
            that is read may be 2^b or more.
        page_table: ``int32 [B, P]`` pages of each row.
        first: ``int32 [B]`` first token that is scored, not negative.
        lengths: ``int32 [B]`` end of those that are.
        out: ``f32 [B, Hq, N]`` with N ≤ P·E becomes Σ_j table[j, code_j], -inf for tokens before `first`, from
            `lengths` on and on negative pages.
        impl: implementation, see `registry.get`.

    Raises:
        ConfigError: the shapes or the dtypes do not fit.
    """
    rows, q_heads, parts, _ = table.shape
    if table.dtype is not torch.float32:
        raise ConfigError("table", table.dtype, "must be f32")
    if codes.dtype is not torch.uint8 or codes.ndim != 4 or codes.shape[3] != parts or q_heads % codes.shape[2]:
        raise ConfigError("codes", (codes.dtype, *codes.shape), f"must be uint8 [pages, E, H, {parts}]")
    if page_table.ndim != 2 or page_table.shape[0] != rows or first.shape != (rows,) or lengths.shape != (rows,):
        shapes = tuple(page_table.shape), tuple(first.shape), tuple(lengths.shape)
        raise ConfigError("page_table, first, lengths", shapes, f"must be [{rows}, P], [{rows}], [{rows}]")
    most = page_table.shape[1] * codes.shape[1]
    if out.dtype is not torch.float32 or out.shape[:2] != (rows, q_heads) or out.shape[2] > most:
        raise ConfigError("out", (out.dtype, *out.shape), f"must be f32 {(rows, q_heads)} and at most {most} tokens")
    check_contiguous(first=first, lengths=lengths)
    check_last_contiguous(codes=codes, page_table=page_table, out=out)
    registry.get("pq_score", table.device, impl)(table, codes, page_table, first, lengths, out)
