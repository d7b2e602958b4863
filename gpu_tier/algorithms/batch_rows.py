"""What every algorithm asks of a batch, without waiting for the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch import Tensor

from gpu_tier.types import ForwardBatch

__all__ = ["PerPass", "keep_best", "real_rows", "sparse_lengths", "token_requests"]

T = TypeVar("T")


class PerPass(Generic[T]):
    """Something that is the same in all layers of a pass: made by the first that asks, kept for the others.

    Args:
        make: of a batch, and of its sparse mask where that matters.
    """

    def __init__(self, make: Callable[[ForwardBatch, Tensor | None], T]) -> None:
        self._make = make
        self._kept: tuple[ForwardBatch, Tensor | None, T] | None = None

    def of(self, batch: ForwardBatch, sparse_mask: Tensor | None = None) -> T:
        """Return it for a pass."""
        if self._kept is None or self._kept[0] is not batch or self._kept[1] is not sparse_mask:
            self._kept = batch, sparse_mask, self._make(batch, sparse_mask)
        return self._kept[2]


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
