"""Prefill attention by torch's flash kernels, for models that compute in half precision.

Prefixes are read piece by piece as in `gpu_tier.engine.prefill`; products are taken in the queries' own dtype and not
in f32, as an engine's own kernels do. The kernels are torch's internal ones: of its public functions none returns the
log-sum-exp that partial results are merged by.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from gpu_tier.engine.hooks import KeyReader
from gpu_tier.kernels.dense import merge_partials
from gpu_tier.types import Partial

__all__ = ["can_flash", "flash_chunk"]

_HALVES = (torch.float16, torch.bfloat16)
_MOST_DIMS = 256


def can_flash(q: Tensor) -> bool:
    """Whether the kernels take queries ``[T, Hq, D]``."""
    dims = q.shape[-1]
    return dims % 8 == 0 and dims <= _MOST_DIMS and (q.dtype in _HALVES or q.device.type == "cpu")


def flash_chunk(
    reader: KeyReader, q: Tensor, layer_id: int, request: int, stop: int, sm_scale: float, piece_tokens: int
) -> Tensor:
    """Return the attention ``f32 [T, Hq, dv]`` of one request's tokens, the last of which is token ``stop - 1``.

    Args:
        reader: of the request's KV.
        q: ``[T, Hq, D]`` queries, for which `can_flash` holds.
        layer_id: id of the layer.
        request: row of the per-request tables.
        stop: tokens of the request, those of the queries included.
        sm_scale: what scores are multiplied by before the softmax.
        piece_tokens: tokens of a piece of the prefix.
    """
    start = stop - len(q)
    total = _partial(q, reader.rows(layer_id, request, start, stop), sm_scale, is_causal=True)
    for first in range(0, start, piece_tokens):
        rows = reader.rows(layer_id, request, first, min(first + piece_tokens, start))
        total = merge_partials(total, _partial(q, rows, sm_scale, is_causal=False))
    return total.o


def _partial(q: Tensor, rows: tuple[Tensor, Tensor], sm_scale: float, *, is_causal: bool) -> Partial:
    heads, v_dims = q.shape[1], rows[1].shape[-1]
    k, v = (row.to(q.dtype).repeat_interleave(heads // row.shape[1], dim=1) for row in rows)
    v = pad(v, (0, k.shape[-1] - v_dims))  # they want values as wide as keys
    on_gpu = q.device.type == "cuda"
    names = torch.ops.aten
    kernel = names._scaled_dot_product_flash_attention if on_gpu else names._scaled_dot_product_flash_attention_for_cpu
    o, lse = kernel(*(x.transpose(0, 1)[None] for x in (q, k, v)), 0.0, is_causal, scale=sm_scale)[:2]
    return Partial(o[0].transpose(0, 1)[..., :v_dims].float(), lse[0].T.float())
