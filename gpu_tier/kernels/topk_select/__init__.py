"""Exact top-k of scores, ties to the lower id, ids in ascending order."""

from __future__ import annotations

from torch import Tensor

from kvcm.gpu_tier.errors import ConfigError
from kvcm.gpu_tier.kernels import registry
from kvcm.gpu_tier.kernels.operands import check_contiguous, check_last_contiguous

__all__ = ["topk_select"]


def topk_select(
    scores: Tensor, lengths: Tensor, k: int, out_indices: Tensor, out_lengths: Tensor, *, impl: str = "auto"
) -> None:
    """Select the k highest scores of each row and head.

    Args:
        scores: ``f32 [B, Hs, N]``. -inf within `lengths` still is a candidate, the last one; NaN counts as -inf.
        lengths: ``int32 [B]`` leading scores of a row that are candidates.
        k: how many to select; fewer when there are fewer candidates.
        out_indices: ``int32 [B, Hs, K]``, K >= k, becomes the ids, ascending, -1 behind them.
        out_lengths: ``int32 [B, Hs]`` becomes the number of ids.
        impl: implementation, see `registry.get`.

    Raises:
        ConfigError: the shapes do not fit.
    """
    rows, heads, _ = scores.shape
    if lengths.shape != (rows,):
        raise ConfigError("lengths", tuple(lengths.shape), f"must be {(rows,)}")
    if not 1 <= k <= out_indices.shape[-1]:
        raise ConfigError("k", k, f"must be 1 to {out_indices.shape[-1]}, the width of out_indices")
    if out_indices.shape[:2] != (rows, heads) or out_lengths.shape != (rows, heads):
        shapes = (tuple(out_indices.shape), tuple(out_lengths.shape))
        raise ConfigError("out_indices, out_lengths", shapes, f"must be ({rows}, {heads}, K) and {(rows, heads)}")
    check_contiguous(out_indices=out_indices, out_lengths=out_lengths, lengths=lengths)
    check_last_contiguous(scores=scores)
    registry.get("topk_select", scores.device, impl)(scores, lengths, k, out_indices, out_lengths)
