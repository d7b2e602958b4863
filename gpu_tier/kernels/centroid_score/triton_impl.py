"""Scores of clusters in Triton.

A program holds all query heads of a KV head, or 128 of them, so that a centroid is read once. Its tile of centroids is
cut along the dims, which need not be a power of two. A single head has too few rows for a dot and is summed directly.
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

_MOST_HEADS = 128  # of a program


def _score(
    q: "Any",
    centroids: "Any",
    log_size: "Any",
    table: "Any",
    n_clusters: "Any",
    out: "Any",
    q_row: "Any",
    q_head: "Any",
    centroids_page: "Any",
    centroids_head: "Any",
    centroids_place: "Any",
    size_page: "Any",
    size_head: "Any",
    table_row: "Any",
    out_row: "Any",
    out_head: "Any",
    heads: "Any",
    width: "Any",
    sm_scale: "Any",
    GROUP: tl.constexpr,
    DIMS: tl.constexpr,
    ENTRIES: tl.constexpr,
    EXACT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    HEAD_BLOCKS: tl.constexpr = (GROUP + BLOCK_M - 1) // BLOCK_M
    block = tl.program_id(0) % HEAD_BLOCKS
    head = (tl.program_id(0) // HEAD_BLOCKS % heads).to(tl.int64)
    row = (tl.program_id(0) // HEAD_BLOCKS // heads).to(tl.int64)
    cluster = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    count = tl.minimum(tl.load(n_clusters + row), width)
    page = tl.load(table + row * table_row + cluster // ENTRIES, mask=cluster < count, other=-1).to(tl.int64)
    valid = page >= 0
    page = tl.where(valid, page, 0)
    place = cluster % ENTRIES
    size = tl.load(log_size + page * size_page + head * size_head + place, mask=valid, other=-float("inf"))
    valid = size > -float("inf")
    c_at = centroids + page * centroids_page + head * centroids_head + place * centroids_place
    member = block * BLOCK_M + tl.arange(0, BLOCK_M)
    real = member < GROUP
    q_at = q + row * q_row + (head * GROUP + member) * q_head
    score = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    for first in tl.static_range(0, DIMS, BLOCK_D):
        dim = first + tl.arange(0, BLOCK_D)
        c = tl.load(c_at[:, None] + dim[None, :], mask=valid[:, None] & (dim < DIMS)[None, :], other=0.0)
        x = tl.load(q_at[:, None] + dim[None, :], mask=real[:, None] & (dim < DIMS)[None, :], other=0.0)
        if EXACT or GROUP == 1:
            c = c.to(tl.float32)
            x = x.to(tl.float32)
        if GROUP == 1:
            score += tl.sum(x * c, axis=1)[None, :]
        else:
            score = tl.dot(x, tl.trans(c), score, input_precision="ieee")
    score = tl.where(valid[None, :], score * sm_scale, -float("inf"))
    out_at = out + row * out_row + (head * GROUP + member) * out_head
    tl.store(out_at[:, None] + cluster[None, :], score, mask=real[:, None] & (cluster < width)[None, :])


# The first is the default, and spills no registers on a GPU of compute capability 9.0.
_TILINGS = (
    Tiling.of(BLOCK_C=64, num_warps=4),
    Tiling.of(BLOCK_C=32, num_warps=4),
    Tiling.of(BLOCK_C=16, num_warps=2),
    Tiling.of(BLOCK_C=64, num_warps=8),
    Tiling.of(BLOCK_C=128, num_warps=8),
)
kernel = tunable(_TILINGS, varying=("width",))(_score)


def run(
    q: Tensor, centroids: Tensor, log_size: Tensor, page_table: Tensor, n_clusters: Tensor, sm_scale: float, out: Tensor
) -> None:
    """See `centroid_score`."""
    if not out.numel():
        return
    call = partial(_launch, q, centroids, log_size, page_table, n_clusters, sm_scale, out)
    # Clusters to score count by powers of four, and as many as the output holds.
    heads = centroids.shape[1]
    key = q.shape[1] // heads, q.shape[2], q.dtype, (q.shape[0] * heads * out.shape[2]).bit_length() // 2
    call(kernel.choose(key, lambda _: True, call, measure=not is_capturing(q.device)))


def _launch(
    q: Tensor, centroids: Tensor, log_size: Tensor, page_table: Tensor, n_clusters: Tensor, sm_scale: float,
    out: Tensor, tiling: Tiling,
) -> None:  # fmt: skip
    """Score with a tiling."""
    rows, q_heads, dims = q.shape
    heads, width = centroids.shape[1], out.shape[2]
    group = q_heads // heads
    members = 1 if group == 1 else min(_MOST_HEADS, max(16, next_power_of_2(group)))
    grid = (rows * heads * triton.cdiv(group, members), triton.cdiv(width, tiling["BLOCK_C"]))
    kernel.at(tiling, grid)(
        q,
        centroids,
        log_size,
        page_table,
        n_clusters,
        out,
        *q.stride()[:2],
        *centroids.stride()[:3],
        *log_size.stride()[:2],
        page_table.stride(0),
        *out.stride()[:2],
        heads,
        width,
        sm_scale,
        GROUP=group,
        DIMS=dims,
        ENTRIES=log_size.shape[2],
        EXACT=interpreting() or q.dtype is not torch.bfloat16,
        BLOCK_M=members,
        BLOCK_D=min(128, max(16, next_power_of_2(dims))),
    )
