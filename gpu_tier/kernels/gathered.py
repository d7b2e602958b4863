"""Attention over rows that a table of slots names; the reference of both decode attentions."""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_tier.errors import ConfigError
from gpu_tier.kernels.dense import group_scores, softmax_partial
from gpu_tier.kernels.memory import check_contiguous, check_last_contiguous
from gpu_tier.rows import Rows
from gpu_tier.types import LayerKV, Partial

__all__ = ["attend_to_slots", "check_decode"]


def check_decode(q: Tensor, kv: LayerKV, table: Tensor, out_o: Tensor, out_lse: Tensor) -> None:
    """Check the shapes and the memory that both decode attentions share.

    Raises:
        ConfigError: one of them does not fit.
    """
    rows, q_heads, dims = q.shape
    heads = kv.k.data.shape[1]
    if q_heads % heads:
        raise ConfigError("q", tuple(q.shape), f"query heads must be a multiple of the {heads} KV heads")
    if dims != kv.k.format.dims:
        raise ConfigError("q", tuple(q.shape), f"the last dimension must be {kv.k.format.dims}")
    if table.shape[0] != rows:
        raise ConfigError("table", tuple(table.shape), f"needs {rows} rows")
    if out_o.shape != (rows, q_heads, kv.v_dims) or out_lse.shape != (rows, q_heads):
        shapes = (tuple(out_o.shape), tuple(out_lse.shape))
        raise ConfigError("out_o, out_lse", shapes, f"must be {(rows, q_heads, kv.v_dims)} and {(rows, q_heads)}")
    check_contiguous(out_o=out_o, out_lse=out_lse)
    check_last_contiguous(q=q, table=table)


def attend_to_slots(q: Tensor, kv: LayerKV, slots: Tensor, sm_scale: float) -> Partial:
    """Return attention over slots.

    Args:
        q: ``[B, Hq, D]``.
        kv: rows of the layer.
        slots: ``int [B, Hs, N]``, negative where nothing counts.
        sm_scale: what scores are multiplied by.
    """
    heads = kv.k.data.shape[1]
    counts = (slots >= 0).expand(-1, heads, -1).repeat_interleave(q.shape[1] // heads, dim=1)
    k = _gather(kv.k, slots)
    v = k[..., : kv.v_dims] if kv.v is None else _gather(kv.v, slots)
    scores = group_scores(q, k, sm_scale).masked_fill(~counts, -torch.inf)
    return softmax_partial(scores, v)


def _gather(rows: Rows, slots: Tensor) -> Tensor:
    """Return ``f32 [B, H, N, dims]``, zeros for negative slots (what lies in slot 0 may not be finite)."""
    heads = rows.data.shape[1]
    head = torch.arange(heads, device=slots.device)[:, None]
    data = rows.data[slots.clamp_min(0).long().expand(-1, heads, -1), head]
    return rows.format.decode(data).masked_fill((slots < 0)[..., None], 0.0)
