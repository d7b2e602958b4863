"""Scores of DSA's lightning indexer: many small query heads against one fp8 index key per token."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcm.gpu_tier.errors import ConfigError
from kvcm.gpu_tier.kernels import registry
from kvcm.gpu_tier.kernels.operands import check_contiguous, check_last_contiguous

__all__ = ["indexer_score"]


def indexer_score(
    q8: Tensor, weight: Tensor, keys: Tensor, page_table: Tensor, page_tokens: int, lengths: Tensor, out: Tensor,
    *, impl: str = "auto",
) -> None:  # fmt: skip
    """Score tokens: I = s_k · Σ_j weight_j · ReLU(q_j · k).

    Args:
        q8: ``float8_e4m3fn [B, HI, dI]`` quantised index queries.
        weight: ``f32 [B, HI]`` weights of the heads times the scales of their queries.
        keys: ``uint8 [rows, dI + 4]``: dI e4m3 numbers and their f32 scale.
        page_table: ``int32 [B, P]`` pages of `keys`; page p is rows ``p·page_tokens`` to ``(p+1)·page_tokens - 1``.
        page_tokens: tokens of a page.
        lengths: ``int32 [B]`` tokens of each row.
        out: ``f32 [B, N]``, N at most P·page_tokens, becomes the scores, -inf behind `lengths` and in negative pages.
        impl: implementation, see `registry.get`.

    Raises:
        ConfigError: the shapes or dtypes do not fit.
    """
    rows, heads, dims = q8.shape
    if q8.dtype is not torch.float8_e4m3fn or weight.shape != (rows, heads):
        raise ConfigError("q8, weight", (q8.dtype, tuple(weight.shape)), f"must be e4m3 and {(rows, heads)}")
    if keys.dtype is not torch.uint8 or keys.shape[-1] != dims + 4:
        raise ConfigError("keys", (keys.dtype, *keys.shape), f"must be uint8 [rows, {dims + 4}]")
    if page_table.shape[0] != rows or lengths.shape != (rows,):
        raise ConfigError("page_table, lengths", (tuple(page_table.shape), tuple(lengths.shape)), "must be [B,P], [B]")
    if out.shape[0] != rows or out.shape[1] > page_table.shape[1] * page_tokens:
        raise ConfigError("out", tuple(out.shape), f"at most {page_table.shape[1] * page_tokens} tokens in {rows} rows")
    check_contiguous(lengths=lengths)
    check_last_contiguous(q8=q8, weight=weight, keys=keys, page_table=page_table, out=out)
    registry.get("indexer_score", q8.device, impl)(q8, weight, keys, page_table, page_tokens, lengths, out)
