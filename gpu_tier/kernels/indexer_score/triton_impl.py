"""Scores of the lightning indexer in Triton.

A program keeps the queries of all index heads of a row and walks over a few tiles of keys: one fp8 dot gives every head
times every key of a tile, then ReLU, weights and the sum over heads stay in registers.
"""

from functools import partial
from importlib import import_module
from math import gcd
from typing import Any

import torch
from torch import Tensor

from kvcm.gpu_tier.errors import ConfigError
from kvcm.gpu_tier.kernels.tuning import Tiling, interpreting, is_capturing, next_power_of_2, tunable

__all__ = ["kernel", "run"]

triton: Any = import_module("triton")  # optional, and without types
tl: Any = import_module("triton.language")


def _score(
    q: "Any",
    weight: "Any",
    keys: "Any",
    scales: "Any",
    table: "Any",
    lengths: "Any",
    out: "Any",
    q_row: "Any",
    q_head: "Any",
    weight_row: "Any",
    keys_row: "Any",
    scales_row: "Any",
    table_row: "Any",
    out_row: "Any",
    width: "Any",
    HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    DIMS: tl.constexpr,
    PADDED: tl.constexpr,
    # The stride of keys is counted in these, so that the compiler sees how wide a load may be.
    ALIGN: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILES: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    length = tl.minimum(tl.load(lengths + row), width)
    head = tl.arange(0, HEADS_PADDED)
    dim = tl.arange(0, PADDED)
    exists = (head < HEADS)[:, None] & (dim < DIMS)[None, :]
    queries = tl.load(q + row * q_row + head[:, None] * q_head + dim[None, :], mask=exists, other=0.0)
    factor = tl.load(weight + row * weight_row + head, mask=head < HEADS, other=0.0)
    if UPCAST:
        queries = queries.to(tl.float32)
    for tile in tl.range(TILES):
        position = (tl.program_id(1) * TILES + tile) * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = position < length
        page = tl.load(table + row * table_row + position // PAGE_TOKENS, mask=inside, other=-1).to(tl.int64)
        valid = page >= 0
        slot = tl.where(valid, page * PAGE_TOKENS + position % PAGE_TOKENS, 0)
        key_at = (slot * keys_row * ALIGN)[:, None] + dim[None, :]
        key = tl.load(keys + key_at, mask=valid[:, None] & (dim < DIMS)[None, :], other=0.0)
        if UPCAST:
            key = key.to(tl.float32)
        dots = tl.maximum(tl.dot(queries, tl.trans(key)), 0.0)
        score = tl.sum(dots * factor[:, None], axis=0)
        score *= tl.load(scales + slot * scales_row, mask=valid, other=0.0)
        tl.store(out + row * out_row + position, tl.where(valid, score, -float("inf")), mask=position < width)


_TILINGS = (
    Tiling.of(BLOCK_N=64, TILES=2, num_warps=4, num_stages=3),
    Tiling.of(BLOCK_N=64, TILES=8, num_warps=4, num_stages=5),
    Tiling.of(BLOCK_N=128, TILES=1, num_warps=4, num_stages=2),
    Tiling.of(BLOCK_N=128, TILES=4, num_warps=4, num_stages=5),
    Tiling.of(BLOCK_N=128, TILES=8, num_warps=8, num_stages=5),
)
kernel = tunable(_TILINGS)(_score)


def run(
    q8: Tensor, weight: Tensor, keys: Tensor, page_table: Tensor, page_tokens: int, lengths: Tensor, out: Tensor
) -> None:
    """See `indexer_score`."""
    rows, heads, dims = q8.shape
    width = out.shape[1]
    if not rows * width:
        return
    if dims % 4 or keys.stride(0) % 4 or keys.storage_offset() % 4:
        raise ConfigError("keys", tuple(keys.shape), "dims, and rows in memory, must be multiples of 4 bytes")
    call = partial(_launch, q8, weight, keys, page_table, page_tokens, lengths, out)
    # Keys to score count by powers of four, and as many as fit.
    key = heads, dims, keys.stride(0), page_tokens, (rows * width).bit_length() // 2
    call(kernel.choose(key, lambda _: True, call, measure=not is_capturing(q8.device)))


def _launch(
    q8: Tensor,
    weight: Tensor,
    keys: Tensor,
    page_table: Tensor,
    page_tokens: int,
    lengths: Tensor,
    out: Tensor,
    tiling: Tiling,
) -> None:
    """Score with a tiling."""
    rows, heads, dims = q8.shape
    width = out.shape[1]
    align = gcd(16, keys.stride(0))
    kernel.at(tiling, (rows, triton.cdiv(width, tiling["BLOCK_N"] * tiling["TILES"])))(
        q8,
        weight,
        keys.view(torch.float8_e4m3fn),
        keys.view(torch.float32)[:, dims // 4 :],
        page_table,
        lengths,
        out,
        *q8.stride()[:2],
        weight.stride(0),
        keys.stride(0) // align,
        keys.stride(0) // 4,
        page_table.stride(0),
        out.stride(0),
        width,
        HEADS=heads,
        HEADS_PADDED=max(16, next_power_of_2(heads)),
        DIMS=dims,
        PADDED=max(32, next_power_of_2(dims)),
        ALIGN=align,
        PAGE_TOKENS=page_tokens,
        UPCAST=interpreting(),
    )
