"""Decode attention as one call: a tiling is chosen, the keys are split into pieces, and their results are merged.

How many heads a program holds is part of the tiling: more of them read a row less often, and leave fewer registers. The
number of pieces follows from it, so a tiling is chosen by measuring the whole call.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial

import torch
from torch import Tensor

from kvcm.gpu_tier.geometry import KVDtype
from kvcm.gpu_tier.kernels.lse_merge.triton_impl import run as merge
from kvcm.gpu_tier.kernels.operands import scratch
from kvcm.gpu_tier.kernels.split_decode import SlotTable, plan_splits
from kvcm.gpu_tier.kernels.split_decode.triton_impl import kernel, launch
from kvcm.gpu_tier.kernels.tuning import Tiling, is_capturing, next_power_of_2, processors
from kvcm.gpu_tier.types import LayerKV

__all__ = ["attend", "partials"]

_MOST_F32_DIMS = 256  # of rows that programs hold more than 16 heads of: products of f32 take no tensor cores


def attend(q: Tensor, kv: LayerKV, slots: SlotTable, sm_scale: float, out_o: Tensor, out_lse: Tensor) -> None:
    """Attend to the slots of a table; see `decode_attn_token` for shapes."""
    if not q.shape[0]:
        return
    group = q.shape[1] // kv.k.data.shape[1]
    most = 16 if kv.k.format.dtype is KVDtype.F32 and q.shape[2] > _MOST_F32_DIMS else max(16, next_power_of_2(group))
    call = partial(_attend, q, kv, slots, sm_scale, out_o, out_lse)
    tiling = kernel.choose(
        _key(q, kv, slots), lambda tiling: tiling["BLOCK_M"] <= most, call, measure=not is_capturing(q.device)
    )
    call(tiling)


def _key(q: Tensor, kv: LayerKV, slots: SlotTable) -> Hashable:
    """Return what the fastest tiling depends on.

    Rows to read count by powers of four, and as many as the table holds: lengths are known to the GPU alone.
    """
    heads = kv.k.data.shape[1]
    rows = q.shape[0] * heads * slots.capacity
    formats = kv.k.format, None if kv.v is None else kv.v.format
    return q.shape[1] // heads, q.dtype, formats, kv.v_dims, slots.table.shape[1] == 1, rows.bit_length() // 2


def _attend(
    q: Tensor, kv: LayerKV, slots: SlotTable, sm_scale: float, out_o: Tensor, out_lse: Tensor, tiling: Tiling
) -> None:
    """Attend with a tiling."""
    heads = kv.k.data.shape[1]
    programs = q.shape[0] * heads * -(-q.shape[1] // (heads * tiling["BLOCK_M"]))
    splits = plan_splits(programs, slots.capacity, processors(q.device))
    pieces = partial(launch, q, kv, slots, sm_scale, tiling, (programs, splits))
    if splits == 1:
        pieces(out_o[None], out_lse[None])
        return
    o, lse = partials(q.device, splits, *out_o.shape)
    pieces(o, lse)
    merge(o, lse, out_o, out_lse)


def partials(device: torch.device, splits: int, rows: int, heads: int, dims: int) -> tuple[Tensor, Tensor]:
    """Allocate partial results: outputs ``[S, B, Hq, dv]`` and log-sum-exps ``[S, B, Hq]``."""
    numbers = splits * rows * heads
    memory = scratch(device, torch.float32, numbers * (dims + 1))
    o, lse = memory[: numbers * dims], memory[numbers * dims : numbers * (dims + 1)]
    return o.view(splits, rows, heads, dims), lse.view(splits, rows, heads)
