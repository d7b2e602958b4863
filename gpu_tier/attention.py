"""Runs the attention kernel that a step's metadata asks for, and merges what was computed apart."""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_tier.kernels.decode_attn_paged import decode_attn_paged
from gpu_tier.kernels.decode_attn_token import decode_attn_token
from gpu_tier.kernels.lse_merge import lse_merge
from gpu_tier.types import AttnMetadata, PagedMeta, Partial

__all__ = ["attend", "partial_of"]


def attend(
    q: Tensor, meta: AttnMetadata | None, partials: list[Partial], sm_scale: float, kernels: str = "auto"
) -> Tensor:
    """Return the attention of one token per row.

    Args:
        q: ``[B, Hq, D]`` queries.
        meta: what to read; None when everything is in `partials`.
        partials: attention over other tokens.
        sm_scale: what scores are multiplied by.
        kernels: implementation.

    Returns:
        ``f32 [B, Hq, dv]``; 0 for rows without tokens.
    """
    parts = [*partials] if meta is None else [partial_of(q, meta, sm_scale, kernels), *partials]
    if len(parts) == 1:
        return parts[0].o
    o, lse = torch.empty_like(parts[0].o), torch.empty_like(parts[0].lse)
    lse_merge(torch.stack([p.o for p in parts]), torch.stack([p.lse for p in parts]), o, lse, impl=kernels)
    return o


def partial_of(q: Tensor, meta: AttnMetadata, sm_scale: float, kernels: str = "auto") -> Partial:
    """Return the attention over what the metadata names, to be merged; arguments as of `attend`."""
    o = torch.empty(*q.shape[:2], meta.kv.v_dims, dtype=torch.float32, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    if isinstance(meta, PagedMeta):
        decode_attn_paged(
            q, meta.kv, meta.page_table, meta.cache_seqlens, meta.page_tokens, sm_scale, o, lse, impl=kernels
        )
    else:
        decode_attn_token(q, meta.kv, meta.token_table, meta.lens, sm_scale, o, lse, impl=kernels)
    return Partial(o, lse)
