"""Upper bounds of pages in Triton.

max(q·min, q·max) is q·max where q is positive and q·min elsewhere, so the bounds of a group of query heads are two dots
over the same tiles: each bound is read once. A single head has too few rows for a dot and is summed directly.
"""

from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from kvcm.gpu_tier.kernels.tuning import Tiling, interpreting, is_capturing, next_power_of_2, tunable

__all__ = ["kernel", "run"]

triton: Any = import_module("triton")  # optional, and without types
tl: Any = import_module("triton.language")


def _score(
    q: "Any",
    bounds: "Any",
    table: "Any",
    n_pages: "Any",
    out: "Any",
    q_row: "Any",
    q_head: "Any",
    bounds_page: "Any",
    bounds_head: "Any",
    bounds_side: "Any",
    table_row: "Any",
    out_row: "Any",
    out_head: "Any",
    heads: "Any",
    width: "Any",
    GROUP: tl.constexpr,
    DIMS: tl.constexpr,
    PADDED: tl.constexpr,
    EXACT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_P: tl.constexpr,
) -> None:
    head = tl.program_id(0) % heads
    row = (tl.program_id(0) // heads).to(tl.int64)
    place = tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P)
    count = tl.minimum(tl.load(n_pages + row), width)
    page = tl.load(table + row * table_row + place, mask=place < count, other=-1).to(tl.int64)
    valid = page >= 0
    dim = tl.arange(0, PADDED)
    at = tl.where(valid, page, 0) * bounds_page + head.to(tl.int64) * bounds_head
    exists = valid[:, None] & (dim < DIMS)[None, :]
    low = tl.load(bounds + at[:, None] + dim[None, :], mask=exists, other=0.0)
    high = tl.load(bounds + at[:, None] + bounds_side + dim[None, :], mask=exists, other=0.0)
    q_of_head = q + row * q_row + (head * GROUP).to(tl.int64) * q_head
    out_of_head = out + row * out_row + (head * GROUP).to(tl.int64) * out_head
    if GROUP == 1:
        x = tl.load(q_of_head + dim, mask=dim < DIMS, other=0.0).to(tl.float32)[None, :]
        best = tl.sum(tl.maximum(x * low.to(tl.float32), x * high.to(tl.float32)), axis=1)
        tl.store(out_of_head + place, tl.where(valid, best, -float("inf")), mask=place < width)
    else:
        member = tl.arange(0, BLOCK_M)
        x_at = q_of_head + member[:, None] * q_head + dim[None, :]
        x = tl.load(x_at, mask=(member < GROUP)[:, None] & (dim < DIMS)[None, :], other=0.0)
        if EXACT:
            x = x.to(tl.float32)
            low = low.to(tl.float32)
            high = high.to(tl.float32)
        zero = tl.zeros_like(x)
        score = tl.dot(tl.where(x > zero, x, zero), tl.trans(high), input_precision="ieee")
        score = tl.dot(tl.where(x < zero, x, zero), tl.trans(low), score, input_precision="ieee")
        score = tl.where(valid[None, :], score, -float("inf"))
        inside = (member < GROUP)[:, None] & (place < width)[None, :]
        tl.store(out_of_head + member[:, None] * out_head + place[None, :], score, mask=inside)


_TILINGS = (
    Tiling.of(BLOCK_P=64, num_warps=4),
    Tiling.of(BLOCK_P=32, num_warps=4),
    Tiling.of(BLOCK_P=16, num_warps=2),
    Tiling.of(BLOCK_P=128, num_warps=8),
)
kernel = tunable(_TILINGS)(_score)


def run(q: Tensor, bounds: Tensor, page_table: Tensor, n_pages: Tensor, out: Tensor) -> None:
    """See `quest_score`."""
    rows, q_heads, dims = q.shape
    heads, width = bounds.shape[1], page_table.shape[1]
    if not rows * width:
        return
    call = partial(_launch, q, bounds, page_table, n_pages, out)
    # Pages to score count by powers of four, and as many as the table holds.
    key = q_heads // heads, dims, q.dtype, (rows * heads * width).bit_length() // 2
    call(kernel.choose(key, lambda _: True, call, measure=not is_capturing(q.device)))


def _launch(q: Tensor, bounds: Tensor, page_table: Tensor, n_pages: Tensor, out: Tensor, tiling: Tiling) -> None:
    """Score with a tiling."""
    rows, q_heads, dims = q.shape
    heads, width = bounds.shape[1], page_table.shape[1]
    group = q_heads // heads
    kernel.at(tiling, (rows * heads, triton.cdiv(width, tiling["BLOCK_P"])))(
        q,
        bounds,
        page_table,
        n_pages,
        out,
        *q.stride()[:2],
        *bounds.stride()[:3],
        page_table.stride(0),
        *out.stride()[:2],
        heads,
        width,
        GROUP=group,
        DIMS=dims,
        PADDED=max(16, next_power_of_2(dims)),
        EXACT=interpreting() or q.dtype is not torch.bfloat16,
        BLOCK_M=max(16, next_power_of_2(group)),
    )
