"""Exact attention in torch that also returns its log-sum-exp, so that parts of it can be merged.

The definition for every attention kernel, and the attention of prefill over a prefix that is streamed from the host.
The arithmetic is f32, or f64 when the inputs are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcm.gpu_tier.errors import ConfigError
from kvcm.gpu_tier.geometry import Rows
from kvcm.gpu_tier.kernels.operands import check_contiguous, check_last_contiguous
from kvcm.gpu_tier.types import LayerKV, Partial

__all__ = [
    "attend_to_slots",
    "causal_partial",
    "check_decode",
    "empty_partial",
    "group_scores",
    "merge_partials",
    "softmax_partial",
]

_SCORES_AT_ONCE = 1 << 24  # numbers; 64 MiB of f32


def _exact(x: Tensor) -> Tensor:
    return x if x.dtype is torch.float64 else x.float()


def group_scores(q: Tensor, k: Tensor, sm_scale: float) -> Tensor:
    """Return q·k·sm_scale of the query heads with their KV head's keys.

    Args:
        q: ``[B, Hq, D]``.
        k: ``[B, H, N, D]``.
        sm_scale: what the dot products are multiplied by.

    Returns:
        ``[B, Hq, N]``
    """
    grouped = _exact(q).unflatten(1, (k.shape[1], -1))
    return torch.einsum("bhgd,bhnd->bhgn", grouped, _exact(k)).flatten(1, 2) * sm_scale


def softmax_partial(scores: Tensor, v: Tensor) -> Partial:
    """Return attention from scores that are -inf where a key does not count.

    Args:
        scores: ``[B, Hq, N]``.
        v: ``[B, H, N, dv]``; rows that do not count must be finite.

    Returns:
        ``o [B, Hq, dv]``, ``lse [B, Hq]``; 0 and -inf where no key counts.
    """
    lse = scores.logsumexp(-1) if scores.shape[-1] else scores.new_full(scores.shape[:-1], -torch.inf)
    weights = (scores - lse.nan_to_num(neginf=0.0)[..., None]).exp()
    grouped = weights.unflatten(1, (v.shape[1], -1))
    return Partial(torch.einsum("bhgn,bhnd->bhgd", grouped, _exact(v)).flatten(1, 2), lse)


def empty_partial(q: Tensor, v_dims: int) -> Partial:
    """Return attention of queries ``[B, Hq, D]`` over no keys."""
    like = _exact(q)
    return Partial(like.new_zeros(*q.shape[:2], v_dims), like.new_full(q.shape[:2], -torch.inf))


def merge_partials(*parts: Partial) -> Partial:
    """Return attention over the union of disjoint sets of tokens."""
    lses = torch.stack([part.lse for part in parts])
    lse = lses.logsumexp(0)
    weights = (lses - lse.nan_to_num(neginf=0.0)).exp()
    return Partial((torch.stack([part.o for part in parts]) * weights[..., None]).sum(0), lse)


def causal_partial(q: Tensor, k: Tensor, v: Tensor, sm_scale: float, query_offset: int) -> Partial:
    """Return attention of consecutive queries over a chunk of consecutive keys.

    Query t attends to key s when ``s <= query_offset + t``: of a chunk of keys that begins at position c, and queries
    that begin at position p, the offset is p - c. With an offset of at least S - 1 all keys count; one below -T counts
    none. Memory is bounded by working on pieces of the keys.

    Args:
        q: ``[T, Hq, D]``.
        k: ``[S, H, D]``.
        v: ``[S, H, dv]``.
        sm_scale: what scores are multiplied by.
        query_offset: place of the first query, counted from the first key.

    Returns:
        ``o [T, Hq, dv]``, ``lse [T, Hq]`` in f32, or f64 when q is f64.
    """
    seen = min(k.shape[0], max(0, query_offset + q.shape[0]))
    step = max(16, _SCORES_AT_ONCE // max(1, q.shape[0] * q.shape[1]))
    result = empty_partial(q, v.shape[-1])
    for start in range(0, seen, step):
        stop = min(start + step, seen)
        piece = _causal_piece(q, k[start:stop], v[start:stop], sm_scale, query_offset - start)
        result = piece if start == 0 else merge_partials(result, piece)
    return result


def _causal_piece(q: Tensor, k: Tensor, v: Tensor, sm_scale: float, query_offset: int) -> Partial:
    tokens, heads = q.shape[0], k.shape[1]
    # Heads are the batch and the tokens of a group its query heads: [H, G·T, D] over [H, 1, S, D].
    grouped = q.unflatten(1, (heads, -1)).permute(1, 2, 0, 3).flatten(1, 2)
    scores = group_scores(grouped, k.transpose(0, 1)[:, None], sm_scale).unflatten(1, (-1, tokens))
    if query_offset < k.shape[0] - 1:
        last_key = query_offset + torch.arange(tokens, device=q.device)
        hidden = torch.arange(k.shape[0], device=q.device) > last_key[:, None]
        scores = scores.masked_fill(hidden, -torch.inf)
    part = softmax_partial(scores.flatten(1, 2), v.transpose(0, 1)[:, None])
    o = part.o.unflatten(1, (-1, tokens)).permute(2, 0, 1, 3).flatten(1, 2)
    lse = part.lse.unflatten(1, (-1, tokens)).permute(2, 0, 1).flatten(1, 2)
    return Partial(o.contiguous(), lse.contiguous())


# Attention over rows that a table of slots names; the reference of both decode attentions.


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
