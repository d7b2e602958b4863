"""Estimated attention in Triton: split like decode attention, over the clusters of a list.

A program holds 16 to 64 query heads of one KV head, which share its list, and walks over one piece of the list with a
running softmax, so that a cluster is read once for all of them. Pieces are merged by `lse_merge`. The softmax runs over
scores with the logarithm of the size; what multiplies a sum of values is the weight without it.

Dims need not be a power of two: those of centroids are cut into the largest one and the rest, so that 576 are not read
as 1024.
"""

from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from kvcm.gpu_tier.kernels.lse_merge.triton_impl import run as merge
from kvcm.gpu_tier.kernels.split_decode import plan_splits
from kvcm.gpu_tier.kernels.split_decode.attend import partials
from kvcm.gpu_tier.kernels.split_decode.triton_impl import fold, operand, piece, write
from kvcm.gpu_tier.kernels.tuning import Tiling, interpreting, is_capturing, next_power_of_2, processors, tunable

__all__ = ["kernel", "run"]

triton: Any = import_module("triton")  # optional, and without types
tl: Any = import_module("triton.language")

_LOG2E = 1.4426950408889634
LOG2E = tl.constexpr(_LOG2E)
_MOST_TILE_BYTES = 72 * 1024  # of what a step of a program reads: several steps are under way
_MOST_F32_SCORES = 32  # of a step and warp: products of f32 take no tensor cores, and many registers


@triton.jit  # type: ignore[untyped-decorator]
def _read(at: "Any", valid: "Any", dim: "Any", dims: "Any", DTYPE: tl.constexpr, UPCAST: tl.constexpr) -> "Any":
    """Return ``[rows, PADDED]`` numbers of rows that begin at the pointers `at`."""
    return operand(tl.load(at[:, None] + dim[None, :], mask=valid[:, None] & (dim < dims)[None, :], other=0.0), DTYPE,
                   UPCAST)  # fmt: skip


def _estimate(
    q: "Any",
    centroids: "Any",
    value_sums: "Any",
    log_size: "Any",
    table: "Any",
    ids: "Any",
    lengths: "Any",
    o: "Any",
    lse: "Any",
    q_row: "Any",
    q_head: "Any",
    centroids_page: "Any",
    centroids_head: "Any",
    centroids_place: "Any",
    sums_page: "Any",
    sums_head: "Any",
    sums_place: "Any",
    size_page: "Any",
    size_head: "Any",
    table_row: "Any",
    ids_row: "Any",
    ids_head: "Any",
    lengths_row: "Any",
    lengths_head: "Any",
    o_split: "Any",
    lse_split: "Any",
    sm_scale_log2: "Any",
    splits: "Any",
    capacity: "Any",
    heads: "Any",
    GROUP: tl.constexpr,
    ENTRIES: tl.constexpr,
    MAIN: tl.constexpr,
    MAIN_PADDED: tl.constexpr,
    REST: tl.constexpr,
    REST_PADDED: tl.constexpr,
    V_DIMS: tl.constexpr,
    V_PADDED: tl.constexpr,
    DTYPE: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    # Blocks of heads that read the same clusters are neighbours, so that the later ones find them in the L2 cache.
    HEAD_BLOCKS: tl.constexpr = (GROUP + BLOCK_M - 1) // BLOCK_M
    block = tl.program_id(0) % HEAD_BLOCKS
    head = (tl.program_id(0) // HEAD_BLOCKS % heads).to(tl.int64)
    row = (tl.program_id(0) // HEAD_BLOCKS // heads).to(tl.int64)
    split = tl.program_id(1)
    start, stop = piece(lengths + row * lengths_row + head * lengths_head, split, splits, capacity, BLOCK_N)

    member = block * BLOCK_M + tl.arange(0, BLOCK_M)
    real = member < GROUP
    q_at = q + row * q_row + (head * GROUP + member) * q_head
    dim = tl.arange(0, MAIN_PADDED)
    rest_dim = tl.arange(0, REST_PADDED)
    q_main = _read(q_at, real, dim, MAIN, DTYPE, UPCAST)
    if REST > 0:
        q_rest = _read(q_at + MAIN, real, rest_dim, REST, DTYPE, UPCAST)

    v_dim = tl.arange(0, V_PADDED)
    highest = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, V_PADDED], tl.float32)
    listed = ids + row * ids_row + head * ids_head
    pages = table + row * table_row
    for at in tl.range(start, stop, BLOCK_N):
        position = at + tl.arange(0, BLOCK_N)
        cluster = tl.load(listed + position, mask=position < stop, other=-1)
        page = tl.load(pages + cluster // ENTRIES, mask=cluster >= 0, other=-1).to(tl.int64)
        exists = page >= 0
        page = tl.where(exists, page, 0)
        place = tl.where(exists, cluster % ENTRIES, 0)
        size = tl.load(log_size + page * size_page + head * size_head + place, mask=exists, other=-float("inf"))
        valid = size > -float("inf")
        size = tl.where(valid, size, 0.0) * LOG2E
        c_at = centroids + page * centroids_page + head * centroids_head + place * centroids_place
        score = tl.dot(q_main, tl.trans(_read(c_at, exists, dim, MAIN, DTYPE, UPCAST)), input_precision="ieee")
        if REST > 0:
            rest = _read(c_at + MAIN, exists, rest_dim, REST, DTYPE, UPCAST)
            score += tl.dot(q_rest, tl.trans(rest), input_precision="ieee")
        score = tl.where(valid[None, :], score * sm_scale_log2 + size[None, :], -float("inf"))
        weight, shrink, highest, total = fold(score, highest, total)
        weight *= tl.exp2(-size)[None, :]
        sums_at = value_sums + page * sums_page + head * sums_head + place * sums_place
        sums = _read(sums_at, exists, v_dim, V_DIMS, DTYPE, UPCAST)
        acc = tl.dot(operand(weight, DTYPE, UPCAST), sums, acc * shrink[:, None], input_precision="ieee")

    # The output of an empty piece is not read, except that of the only one.
    written = member < tl.where(tl.maximum(stop - start, 2 - splits) > 0, GROUP, 0)
    out_row = (row * heads + head) * GROUP + member
    o_at = o + split.to(tl.int64) * o_split + out_row * V_DIMS
    lse_at = lse + split.to(tl.int64) * lse_split + out_row
    write(o_at, lse_at, acc, highest, total, real, written, v_dim, v_dim < V_DIMS)


# The first that fits a shape is the default, and spills no registers on a GPU of compute capability 9.0.
# A load of rows is three loads in a row (list, page, rows): five stages keep one tile under way, seven keep two.
_TILINGS = (
    Tiling.of(BLOCK_M=32, BLOCK_N=32, num_warps=8, num_stages=5),
    Tiling.of(BLOCK_M=16, BLOCK_N=64, num_warps=4, num_stages=7),
    Tiling.of(BLOCK_M=16, BLOCK_N=32, num_warps=4, num_stages=7),
    Tiling.of(BLOCK_M=16, BLOCK_N=32, num_warps=4, num_stages=11),
    Tiling.of(BLOCK_M=16, BLOCK_N=64, num_warps=8, num_stages=7),
    Tiling.of(BLOCK_M=16, BLOCK_N=128, num_warps=8, num_stages=5),
    Tiling.of(BLOCK_M=32, BLOCK_N=64, num_warps=8, num_stages=5),
    Tiling.of(BLOCK_M=64, BLOCK_N=32, num_warps=8, num_stages=5),
    Tiling.of(BLOCK_M=16, BLOCK_N=16, num_warps=8, num_stages=4),
)
kernel = tunable(_TILINGS, varying=("splits", "capacity"))(_estimate)


def run(
    q: Tensor, centroids: Tensor, value_sums: Tensor, log_size: Tensor, page_table: Tensor, ids: Tensor,
    lengths: Tensor, sm_scale: float, out_o: Tensor, out_lse: Tensor,
) -> None:  # fmt: skip
    """See `weighted_attn`."""
    rows, q_heads, dims = q.shape
    heads, v_dims = centroids.shape[1], value_sums.shape[3]
    if not rows:
        return
    group, row_bytes = q_heads // heads, 2 * (dims + v_dims)
    most = max(16, next_power_of_2(group))

    def fits(tiling: Tiling) -> bool:
        scores = tiling["BLOCK_M"] * tiling["BLOCK_N"] // tiling.num_warps
        small = q.dtype is torch.bfloat16 or scores <= _MOST_F32_SCORES
        return small and tiling["BLOCK_M"] <= most and tiling["BLOCK_N"] * row_bytes <= _MOST_TILE_BYTES

    call = partial(_split, q, (centroids, value_sums, log_size), page_table, ids, lengths, sm_scale, out_o, out_lse)
    # Clusters to read count by powers of four, and as many as the list holds.
    key = group, dims, v_dims, q.dtype, (rows * heads * ids.shape[2]).bit_length() // 2
    call(kernel.choose(key, fits, call, measure=not is_capturing(q.device)))


def _split(
    q: Tensor, index: tuple[Tensor, Tensor, Tensor], page_table: Tensor, ids: Tensor, lengths: Tensor, sm_scale: float,
    out_o: Tensor, out_lse: Tensor, tiling: Tiling,
) -> None:  # fmt: skip
    """Estimate with a tiling, in pieces that are merged."""
    heads = index[0].shape[1]
    programs = q.shape[0] * heads * triton.cdiv(q.shape[1] // heads, tiling["BLOCK_M"])
    splits = plan_splits(programs, ids.shape[2], processors(q.device))
    pieces = partial(_launch, q, index, page_table, ids, lengths, sm_scale, tiling, (programs, splits))
    if splits == 1:
        pieces(out_o[None], out_lse[None])
        return
    o, lse = partials(q.device, splits, *out_o.shape)
    pieces(o, lse)
    merge(o, lse, out_o, out_lse)


def _launch(
    q: Tensor, index: tuple[Tensor, Tensor, Tensor], page_table: Tensor, ids: Tensor, lengths: Tensor, sm_scale: float,
    tiling: Tiling, grid: tuple[int, int], o: Tensor, lse: Tensor,
) -> None:  # fmt: skip
    """Compute the pieces of a grid ``(programs, pieces)``: ``f32 [pieces, B, Hq, dv]`` and ``[pieces, B, Hq]``."""
    centroids, value_sums, log_size = index
    heads, dims, v_dims = centroids.shape[1], q.shape[2], value_sums.shape[3]
    main = 1 << (dims.bit_length() - 1)
    exact = interpreting() or q.dtype is not torch.bfloat16
    kernel.at(tiling, grid)(
        q,
        *index,
        page_table,
        ids,
        lengths,
        o,
        lse,
        *q.stride()[:2],
        *centroids.stride()[:3],
        *value_sums.stride()[:3],
        *log_size.stride()[:2],
        page_table.stride(0),
        *ids.stride()[:2],
        *lengths.stride(),
        o.stride(0),
        lse.stride(0),
        sm_scale * _LOG2E,
        grid[1],
        ids.shape[2],
        heads,
        GROUP=q.shape[1] // heads,
        ENTRIES=log_size.shape[2],
        MAIN=main,
        MAIN_PADDED=max(16, main),
        REST=dims - main,
        REST_PADDED=max(16, next_power_of_2(max(1, dims - main))),
        V_DIMS=v_dims,
        V_PADDED=max(16, next_power_of_2(v_dims)),
        DTYPE=tl.float32 if exact else tl.bfloat16,
        UPCAST=interpreting(),
    )
