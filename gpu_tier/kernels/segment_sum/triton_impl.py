"""Sums by label in Triton.

A program has the sums of some clusters and walks over all rows of its problem: membership as a matrix of ones and zeros
times the rows, on tensor cores. That does a few products with 0 too many, but no atomic addition: each sum has its
order, and two calls give the same bits. 16-bit numbers are exact in tf32; of f32 ones the high bits are multiplied, and
then the remainder, which loses less than an addition in f32 does.
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from kvcm.gpu_tier.kernels.tuning import Tiling, is_capturing, next_power_of_2, tunable

__all__ = ["TILINGS", "add_rows", "fits", "kernel", "run"]

triton: Any = import_module("triton")  # optional, and without types
tl: Any = import_module("triton.language")
_jit: Callable[[Callable[..., Any]], Any] = triton.jit

HIGH_BITS = tl.constexpr(-(1 << 13))  # of an f32 number, those that tf32 has too


@_jit
def add_rows(
    x: "Any",
    labels: "Any",
    x_row: "Any",
    tokens: "Any",
    cluster: "Any",
    DIMS: tl.constexpr,
    PADDED: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
) -> "Any":
    """Return the sums ``[BLOCK_C, PADDED]`` of one problem's rows with the labels `cluster`, and how many rows."""
    dim = tl.arange(0, PADDED)
    total = tl.zeros([BLOCK_C, PADDED], tl.float32)
    size = tl.zeros([BLOCK_C], tl.int32)
    for start in tl.range(0, tokens, BLOCK_T):
        token = start + tl.arange(0, BLOCK_T)
        label = tl.load(labels + token, mask=token < tokens, other=-1)
        # Rows without a label may hold NaN, and 0 times NaN is NaN.
        inside = (label >= 0)[:, None] & (dim < DIMS)[None, :]
        rows = tl.load(x + token.to(tl.int64)[:, None] * x_row + dim[None, :], mask=inside, other=0.0).to(tl.float32)
        member = label[None, :] == cluster[:, None]
        ones = member.to(tl.float32)
        if SPLIT:
            high = (rows.to(tl.int32, bitcast=True) & HIGH_BITS).to(tl.float32, bitcast=True)
            total = tl.dot(ones, high, total, input_precision="tf32")
            rows -= high
        total = tl.dot(ones, rows, total, input_precision="tf32")
        size += tl.sum(member.to(tl.int32), axis=1)
    return total, size


def _sum(
    x: "Any",
    labels: "Any",
    out: "Any",
    x_problem: "Any",
    x_row: "Any",
    tokens: "Any",
    clusters: "Any",
    DIMS: tl.constexpr,
    PADDED: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
) -> None:
    blocks = tl.cdiv(clusters, BLOCK_C)
    problem = (tl.program_id(0) // blocks).to(tl.int64)
    cluster = tl.program_id(0) % blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    total, _ = add_rows(
        x + problem * x_problem,
        labels + problem * tokens,
        x_row,
        tokens,
        cluster,
        DIMS,
        PADDED,
        SPLIT,
        BLOCK_T,
        BLOCK_C,
    )
    dim = tl.arange(0, PADDED)
    at = (problem * clusters + cluster)[:, None] * DIMS + dim[None, :]
    tl.store(out + at, total, mask=(cluster < clusters)[:, None] & (dim < DIMS)[None, :])


TILINGS = (
    Tiling.of(BLOCK_T=64, BLOCK_C=32, num_warps=4),
    Tiling.of(BLOCK_T=64, BLOCK_C=64, num_warps=8),
    Tiling.of(BLOCK_T=128, BLOCK_C=32, num_warps=8),
    Tiling.of(BLOCK_T=32, BLOCK_C=16, num_warps=2),
    Tiling.of(BLOCK_T=16, BLOCK_C=16, num_warps=4),
)
"""Rows and clusters of a tile; with fewer clusters there are more programs, which each read all rows."""

_TILE = 64 * 128  # numbers of the sums of a program
kernel = tunable(TILINGS, varying=("tokens", "clusters"))(_sum)


def fits(padded: int, tiling: Tiling) -> bool:
    """Return whether the sums of a tiling are few enough for registers; the smallest always are."""
    return tiling["BLOCK_C"] * padded <= _TILE or tiling == TILINGS[-1]


def run(x: Tensor, labels: Tensor, out: Tensor) -> None:
    """See `segment_sum`."""
    dims = x.shape[2]
    if not out.numel():
        return
    # Rows and clusters count by powers of four.
    key = dims, x.dtype, labels.numel().bit_length() // 2, out.shape[1].bit_length() // 2
    call = partial(_launch, x, labels, out)
    padded = max(16, next_power_of_2(dims))
    call(kernel.choose(key, partial(fits, padded), call, measure=not is_capturing(x.device)))


def _launch(x: Tensor, labels: Tensor, out: Tensor, tiling: Tiling) -> None:
    """Add with a tiling."""
    problems, tokens, dims = x.shape
    clusters = out.shape[1]
    kernel.at(tiling, (problems * triton.cdiv(clusters, tiling["BLOCK_C"]),))(
        x,
        labels,
        out,
        *x.stride()[:2],
        tokens,
        clusters,
        DIMS=dims,
        PADDED=max(16, next_power_of_2(dims)),
        SPLIT=x.dtype is torch.float32,
    )
