"""What every algorithm asks of a batch, without waiting for the device."""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_tier.types import ForwardBatch

__all__ = ["keep_best", "real_rows", "sparse_lengths", "token_requests"]


def real_rows(batch: ForwardBatch) -> Tensor:
    """Return ``bool [B]``: the rows that are requests, not padding of a CUDA graph."""
    return torch.arange(batch.rows, device=batch.num_real_reqs.device) < batch.num_real_reqs


def sparse_lengths(batch: ForwardBatch, sparse_mask: Tensor) -> Tensor:
    """Return ``int32 [B]``: the tokens of the rows that select, 0 for the others and for padding."""
    return torch.where(sparse_mask & real_rows(batch), batch.seq_lens, 0).int()


def token_requests(batch: ForwardBatch) -> Tensor:
    """Return ``int64 [T]``: the request of each token of a prefill pass, padding left out."""
    device = batch.req_pool_indices.device
    repeats = torch.tensor(batch.extend_lens, dtype=torch.int64).to(device, non_blocking=True)
    rows = batch.req_pool_indices[: batch.num_real]
    return rows.repeat_interleave(repeats, output_size=sum(batch.extend_lens))


def keep_best(indices: Tensor, lengths: Tensor, scores: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Return the best `k` of a selection, again in ascending order; ties go to the lower id.

    Args:
        indices: ``int32 [B, Hs, K]`` ascending, -1 behind `lengths`.
        lengths: ``int32 [B, Hs]``.
        scores: ``f32 [B, Hs, N]`` what they were selected by.
        k: ``int32 [B]`` how many of each row to keep.

    Returns:
        New indices and lengths of the same shapes.
    """
    padding = indices < 0
    own = scores.gather(-1, indices.clamp_min(0).long())
    # Padding last: -inf is a score that an item may have, so it is ordered by the flag and not by a score.
    order = own.argsort(dim=-1, descending=True, stable=True)
    order = order.gather(-1, padding.gather(-1, order).int().argsort(dim=-1, stable=True))
    kept = torch.arange(indices.shape[-1], device=indices.device) < k[:, None, None]
    chosen = torch.where(kept, indices.gather(-1, order), -1)
    chosen = torch.where(chosen < 0, torch.iinfo(torch.int32).max, chosen).sort(-1).values
    shortened = torch.minimum(lengths, k[:, None].int())
    inside = torch.arange(indices.shape[-1], device=indices.device) < shortened[..., None]
    return torch.where(inside, chosen, -1).int(), shortened
