"""Split-K decode attention in Triton.

A program holds 16 to 64 query heads of one KV head (they read the same rows; a dot needs 16 of them at least) and walks
over one piece of the keys with a running softmax. Each row divides its own length by the number of pieces, so rows of
any lengths share one launch. Pieces are merged by `lse_merge`; a single one writes the result itself.

The tile of keys is ``[BLOCK_N, dims]``, gathered row by row: its loads are wide because the dims of a row are
contiguous, and the slots of the next tiles are read ahead by the pipeline. Of MLA the value is the leading part of the
same row, so it is loaded once. fp8 of MHA has one scale per row: those of the keys multiply the scores, those of the
values the weights, and the rows themselves are only converted. fp8 of MLA has one per group of dims.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from kvcm.gpu_tier.kernels.split_decode import SlotTable, operands_of, tile_sizes
from kvcm.gpu_tier.kernels.tuning import Tiling, interpreting, tunable
from kvcm.gpu_tier.types import LayerKV

__all__ = ["fold", "kernel", "launch", "operand", "piece", "write"]

triton: Any = import_module("triton")  # optional, and without types
tl: Any = import_module("triton.language")
_jit: Callable[[Callable[..., Any]], Any] = triton.jit

_LOG2E = 1.4426950408889634
LN2 = tl.constexpr(0.6931471805599453)


@_jit
def _slots(table: "Any", position: "Any", inside: "Any", PAGE_TOKENS: tl.constexpr) -> "Any":
    """Return the slots of positions, negative for none."""
    entry = tl.load(table + position // PAGE_TOKENS, mask=inside, other=-1).to(tl.int64)
    return tl.where(entry < 0, -1, entry * PAGE_TOKENS + position % PAGE_TOKENS)


@_jit
def operand(x: "Any", DTYPE: tl.constexpr, UPCAST: tl.constexpr) -> "Any":
    """Return a tile in the type that dots take; the interpreter's arithmetic is right in f32 only."""
    if UPCAST:
        return x.to(tl.float32)
    return x.to(DTYPE)


@_jit
def _plain_rows(
    data: "Any",
    row: "Any",
    valid: "Any",
    N: tl.constexpr,
    PADDED: tl.constexpr,
    DTYPE: tl.constexpr,
    UPCAST: tl.constexpr,
) -> "Any":
    """Return ``[BLOCK_N, PADDED]`` numbers of rows that begin at the offsets `row`."""
    dim = tl.arange(0, PADDED)
    x = tl.load(data + row[:, None] + dim[None, :], mask=valid[:, None] & (dim < N)[None, :], other=0.0)
    return operand(x, DTYPE, UPCAST)


@_jit
def _scaled_rows(
    data: "Any",
    row: "Any",
    scale: "Any",
    scale_row: "Any",
    valid: "Any",
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS_PADDED: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    DTYPE: tl.constexpr,
    UPCAST: tl.constexpr,
) -> "Any":
    """Return ``[BLOCK_N, GROUPS_PADDED * GROUP_PADDED]`` numbers, each group multiplied by its scale."""
    group = tl.arange(0, GROUPS_PADDED)
    dim = tl.arange(0, GROUP_PADDED)
    at = row[:, None, None] + (group * GROUP)[None, :, None] + dim[None, None, :]
    exists = (group < GROUPS)[None, :, None] & (dim < GROUP)[None, None, :]
    x = tl.load(data + at, mask=valid[:, None, None] & exists, other=0.0).to(tl.float32)
    factors = tl.load(
        scale + scale_row[:, None] + group[None, :], mask=valid[:, None] & (group < GROUPS)[None, :], other=0.0
    )
    x = x * factors[:, :, None]
    return operand(tl.reshape(x, (x.shape[0], GROUPS_PADDED * GROUP_PADDED)), DTYPE, UPCAST)


@_jit
def _tile_dims(
    GROUPS: tl.constexpr, GROUP: tl.constexpr, GROUPS_PADDED: tl.constexpr, GROUP_PADDED: tl.constexpr
) -> "Any":
    """Return the dim of each column of a tile of keys, and whether it exists: groups are padded one by one."""
    column = tl.arange(0, GROUPS_PADDED * GROUP_PADDED)
    within = column % GROUP_PADDED
    group = column // GROUP_PADDED
    return group * GROUP + within, (group < GROUPS) & (within < GROUP)


@_jit
def _queries(q: "Any", real: "Any", dim: "Any", exists: "Any", DTYPE: tl.constexpr, UPCAST: tl.constexpr) -> "Any":
    """Return ``[BLOCK_M, dims]`` numbers of the queries that begin at the pointers `q`."""
    return operand(tl.load(q + dim[None, :], mask=real[:, None] & exists[None, :], other=0.0), DTYPE, UPCAST)


@_jit
def fold(score: "Any", highest: "Any", total: "Any") -> "Any":
    """Return a tile's weights, what earlier sums shrink by, and the running maximum and sum with it."""
    raised = tl.maximum(highest, tl.max(score, axis=1))
    base = tl.where(raised == -float("inf"), 0.0, raised)
    shrink = tl.exp2(highest - base)
    weight = tl.exp2(score - base[:, None])
    return weight, shrink, raised, total * shrink + tl.sum(weight, axis=1)


@_jit
def piece(
    lens: "Any",
    split: "Any",
    splits: "Any",
    capacity: "Any",
    BLOCK_N: tl.constexpr,
) -> "Any":
    """Return where a piece of a row's tokens begins and ends; the length of the row is where `lens` points."""
    length = tl.minimum(tl.load(lens), capacity)
    tokens = tl.cdiv(tl.cdiv(length, splits), BLOCK_N) * BLOCK_N
    start = split * tokens
    return start, tl.minimum(start + tokens, length)


@_jit
def write(
    o: "Any",
    lse: "Any",
    acc: "Any",
    highest: "Any",
    total: "Any",
    real: "Any",
    written: "Any",
    dim: "Any",
    exists: "Any",
) -> None:
    """Write a piece's result to pointers to the first number of each head, and to where its log-sum-exp is."""
    some = tl.where(total > 0.0, total, 1.0)
    tl.store(lse, tl.where(total > 0.0, (highest + tl.log2(some)) * LN2, -float("inf")), mask=real)
    tl.store(o[:, None] + dim[None, :], acc / some[:, None], mask=written[:, None] & exists[None, :])


def _split(
    q: "Any",
    k: "Any",
    k_scale: "Any",
    rope: "Any",
    v: "Any",
    v_scale: "Any",
    table: "Any",
    lens: "Any",
    o: "Any",
    lse: "Any",
    q_row: "Any",
    q_head: "Any",
    k_slot: "Any",
    k_head: "Any",
    k_scale_slot: "Any",
    k_scale_head: "Any",
    rope_slot: "Any",
    rope_head: "Any",
    v_slot: "Any",
    v_head: "Any",
    v_scale_slot: "Any",
    v_scale_head: "Any",
    table_row: "Any",
    table_head: "Any",
    lens_row: "Any",
    lens_head: "Any",
    o_split: "Any",
    lse_split: "Any",
    sm_scale_log2: "Any",
    splits: "Any",
    capacity: "Any",
    heads: "Any",
    GROUP_HEADS: tl.constexpr,
    SHARED_TABLE: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    K_DIMS: tl.constexpr,
    K_PADDED: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_PADDED: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_PADDED: tl.constexpr,
    V_DIMS: tl.constexpr,
    V_PADDED: tl.constexpr,
    LATENT: tl.constexpr,
    FP8: tl.constexpr,
    # Strides of rows are counted in these, so that the compiler sees how wide a load may be.
    K_ALIGN: tl.constexpr,
    SCALE_ALIGN: tl.constexpr,
    ROPE_ALIGN: tl.constexpr,
    V_ALIGN: tl.constexpr,
    V_SCALE_ALIGN: tl.constexpr,
    DTYPE: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    # Blocks of heads that read the same rows are neighbours, so that the later ones find them in the L2 cache.
    HEAD_BLOCKS: tl.constexpr = (GROUP_HEADS + BLOCK_M - 1) // BLOCK_M
    block = tl.program_id(0) % HEAD_BLOCKS
    head = tl.program_id(0) // HEAD_BLOCKS % heads
    row = (tl.program_id(0) // HEAD_BLOCKS // heads).to(tl.int64)
    split = tl.program_id(1)
    selector = 0 if SHARED_TABLE else head

    start, stop = piece(lens + row * lens_row + selector * lens_head, split, splits, capacity, BLOCK_N)

    member = block * BLOCK_M + tl.arange(0, BLOCK_M)
    real = member < GROUP_HEADS
    q_at = q + row * q_row + (head * GROUP_HEADS + member).to(tl.int64)[:, None] * q_head
    GROUP: tl.constexpr = K_DIMS // GROUPS
    GROUP_PADDED: tl.constexpr = K_PADDED // GROUPS_PADDED
    k_dim, k_exists = _tile_dims(GROUPS, GROUP, GROUPS_PADDED, GROUP_PADDED)
    q_main = _queries(q_at, real, k_dim, k_exists, DTYPE, UPCAST)
    if ROPE > 0:
        r_dim = tl.arange(0, ROPE_PADDED)
        q_rope = _queries(q_at + K_DIMS, real, r_dim, r_dim < ROPE, DTYPE, UPCAST)

    highest = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, V_PADDED], tl.float32)
    slots_of_row = table + row * table_row + selector * table_head
    head = head.to(tl.int64)
    for at in tl.range(start, stop, BLOCK_N):
        position = at + tl.arange(0, BLOCK_N)
        slot = _slots(slots_of_row, position, position < stop, PAGE_TOKENS)
        valid = slot >= 0
        slot = tl.where(valid, slot, 0)
        k_row = (slot * k_slot + head * k_head) * K_ALIGN
        if LATENT and FP8:
            s_row = (slot * k_scale_slot + head * k_scale_head) * SCALE_ALIGN
            keys = _scaled_rows(
                k, k_row, k_scale, s_row, valid, GROUPS, GROUP, GROUPS_PADDED, GROUP_PADDED, DTYPE, UPCAST
            )
        else:
            keys = _plain_rows(k, k_row, valid, K_DIMS, K_PADDED, DTYPE, UPCAST)
        score = tl.dot(q_main, tl.trans(keys), input_precision="ieee")
        if ROPE > 0:
            r_row = (slot * rope_slot + head * rope_head) * ROPE_ALIGN
            ropes = _plain_rows(rope, r_row, valid, ROPE, ROPE_PADDED, DTYPE, UPCAST)
            score += tl.dot(q_rope, tl.trans(ropes), input_precision="ieee")
        score *= sm_scale_log2
        if FP8 and not LATENT:
            s_row = (slot * k_scale_slot + head * k_scale_head) * SCALE_ALIGN
            score *= tl.load(k_scale + s_row, mask=valid, other=0.0)[None, :]
        score = tl.where(valid[None, :], score, -float("inf"))

        weight, shrink, highest, total = fold(score, highest, total)
        if LATENT:
            values = keys
        else:
            v_row = (slot * v_slot + head * v_head) * V_ALIGN
            values = _plain_rows(v, v_row, valid, V_DIMS, V_PADDED, DTYPE, UPCAST)
            if FP8:
                f_row = (slot * v_scale_slot + head * v_scale_head) * V_SCALE_ALIGN
                v_factor = tl.load(v_scale + f_row, mask=valid, other=0.0)
                weight *= v_factor[None, :]
        acc = tl.dot(operand(weight, DTYPE, UPCAST), values, acc * shrink[:, None], input_precision="ieee")

    if LATENT:
        v_dim, v_exists = k_dim, k_exists
    else:
        v_dim = tl.arange(0, V_PADDED)
        v_exists = v_dim < V_DIMS
    # The output of an empty piece is not read, except that of the only one.
    written = member < tl.where(tl.maximum(stop - start, 2 - splits) > 0, GROUP_HEADS, 0)
    out_row = (row * heads + head) * GROUP_HEADS + member
    o_at = o + split.to(tl.int64) * o_split + out_row * V_DIMS
    lse_at = lse + split.to(tl.int64) * lse_split + out_row
    write(o_at, lse_at, acc, highest, total, real, written, v_dim, v_exists)


# The first that fits a shape is the default, and spills no registers on a GPU of compute capability 9.0.
# A load through a table is two loads in a row: three stages keep one tile of rows under way, five keep two.
_TILINGS = (
    Tiling.of(BLOCK_M=32, BLOCK_N=32, num_warps=8, num_stages=5),
    Tiling.of(BLOCK_M=16, BLOCK_N=32, num_warps=8, num_stages=5),
    Tiling.of(BLOCK_M=16, BLOCK_N=64, num_warps=4, num_stages=5),
    Tiling.of(BLOCK_M=16, BLOCK_N=64, num_warps=4, num_stages=3),
    Tiling.of(BLOCK_M=16, BLOCK_N=32, num_warps=4, num_stages=5),
    Tiling.of(BLOCK_M=16, BLOCK_N=64, num_warps=8, num_stages=5),
    Tiling.of(BLOCK_M=16, BLOCK_N=128, num_warps=8, num_stages=3),
    Tiling.of(BLOCK_M=32, BLOCK_N=64, num_warps=8, num_stages=3),
    Tiling.of(BLOCK_M=64, BLOCK_N=32, num_warps=8, num_stages=5),
    Tiling.of(BLOCK_M=64, BLOCK_N=64, num_warps=8, num_stages=3),
    Tiling.of(BLOCK_M=64, BLOCK_N=64, num_warps=4, num_stages=3),
)
kernel = tunable(_TILINGS, varying=("splits", "capacity"))(_split)


def launch(
    q: Tensor,
    kv: LayerKV,
    slots: SlotTable,
    sm_scale: float,
    tiling: Tiling,
    grid: tuple[int, int],
    o: Tensor,
    lse: Tensor,
) -> None:
    """Compute the pieces of a grid ``(programs, pieces)`` with a tiling.

    Args:
        o: ``f32 [pieces, B, Hq, dv]``, written, but not for empty pieces beside others.
        lse: ``f32 [pieces, B, Hq]``, written.
    """
    keys, values = operands_of(kv)
    heads = kv.k.data.shape[1]
    tensors = (keys.main, keys.scale, keys.rope, values.main, values.scale)
    kernel.at(tiling, grid)(
        q,
        *(operand.data for operand in tensors),
        slots.table,
        slots.lens,
        o,
        lse,
        q.stride(0),
        q.stride(1),
        *(stride for operand in tensors for stride in operand.strides),
        slots.table.stride(0),
        slots.table.stride(1),
        slots.lens.stride(0),
        slots.lens.stride(1),
        o.stride(0),
        lse.stride(0),
        sm_scale * _LOG2E,
        grid[1],
        slots.capacity,
        heads,
        GROUP_HEADS=q.shape[1] // heads,
        SHARED_TABLE=slots.table.shape[1] == 1,
        PAGE_TOKENS=slots.page_tokens,
        LATENT=kv.v is None,
        DTYPE=_dot_type(keys.main.data.dtype),
        UPCAST=interpreting(),
        **tile_sizes(keys, values, latent=kv.v is None),
    )


def _dot_type(dtype: torch.dtype) -> Any:
    return {torch.float32: tl.float32, torch.float16: tl.float16}.get(dtype, tl.bfloat16)
