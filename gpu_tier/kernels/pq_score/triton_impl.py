"""Scores of tokens from codes in Triton.

A program scores a block of tokens for all query heads of a KV head, so that a code is read once: all codes of a token,
or as many as fit into one word, in one load. The table of a row and head is small and stays in the L1 cache.
"""

from functools import partial
from importlib import import_module
from math import gcd
from typing import Any

import torch
from torch import Tensor

from kvcm.gpu_tier.kernels.tuning import Tiling, is_capturing, next_power_of_2, tunable

__all__ = ["kernel", "run"]

triton: Any = import_module("triton")  # optional, and without types
tl: Any = import_module("triton.language")

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _score(
    table: "Any",
    codes: "Any",
    pages: "Any",
    first: "Any",
    lengths: "Any",
    out: "Any",
    table_row: "Any",
    table_head: "Any",
    table_part: "Any",
    table_code: "Any",
    codes_page: "Any",
    codes_token: "Any",
    codes_head: "Any",
    pages_row: "Any",
    out_row: "Any",
    out_head: "Any",
    heads: "Any",
    width: "Any",
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    WORDS: tl.constexpr,
    WORD_CODES: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    # Heads are neighbours: their codes of a token are in the same line of memory.
    head = (tl.program_id(0) % heads).to(tl.int64)
    row = (tl.program_id(0) // heads).to(tl.int64)
    token = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (token >= tl.load(first + row)) & (token < tl.minimum(tl.load(lengths + row), width))
    page = tl.load(pages + row * pages_row + token // PAGE_TOKENS, mask=inside, other=-1).to(tl.int64)
    valid = page >= 0
    at = tl.where(valid, page, 0) * codes_page + token % PAGE_TOKENS * codes_token + head * codes_head
    member = tl.arange(0, GROUP_PADDED)
    real = member < GROUP
    q_head = head * GROUP + member
    entries = table + row * table_row + q_head * table_head
    read = valid[:, None] & real[None, :]
    score = tl.zeros([BLOCK_N, GROUP_PADDED], tl.float32)
    for number in tl.static_range(WORDS):
        word = tl.load(codes + at + number, mask=valid, other=0)
        for part in tl.static_range(WORD_CODES):
            code = ((word >> (8 * part)) & 0xFF).to(tl.int64)
            of_part = entries + (number * WORD_CODES + part) * table_part
            score += tl.load(of_part[None, :] + code[:, None] * table_code, mask=read, other=0.0)
    score = tl.where(valid[:, None], score, -float("inf"))
    out_at = out + row * out_row + q_head * out_head
    tl.store(out_at[None, :] + token[:, None], score, mask=(token < width)[:, None] & real[None, :])


# The first is the default, and spills no registers on a GPU of compute capability 9.0.
_TILINGS = (
    Tiling.of(BLOCK_N=256, num_warps=4),
    Tiling.of(BLOCK_N=128, num_warps=4),
    Tiling.of(BLOCK_N=512, num_warps=8),
    Tiling.of(BLOCK_N=1024, num_warps=8),
)
kernel = tunable(_TILINGS, varying=("width",))(_score)


def run(table: Tensor, codes: Tensor, page_table: Tensor, first: Tensor, lengths: Tensor, out: Tensor) -> None:
    """See `pq_score`."""
    if not out.numel():
        return
    call = partial(_launch, table, codes, page_table, first, lengths, out)
    # Tokens to score count by powers of four, and as many as the output holds.
    heads = codes.shape[2]
    key = table.shape[1] // heads, *table.shape[2:], (table.shape[0] * heads * out.shape[2]).bit_length() // 2
    call(kernel.choose(key, lambda _: True, call, measure=not is_capturing(table.device)))


def _launch(
    table: Tensor, codes: Tensor, page_table: Tensor, first: Tensor, lengths: Tensor, out: Tensor, tiling: Tiling
) -> None:
    """Score with a tiling."""
    rows, q_heads, parts, _ = table.shape
    _, page_tokens, heads, _ = codes.shape
    group, width = q_heads // heads, out.shape[2]
    size = gcd(8, parts, *codes.stride()[:3], codes.data_ptr())
    words = codes.view(_WORDS[size])
    kernel.at(tiling, (rows * heads, triton.cdiv(width, tiling["BLOCK_N"])))(
        table,
        words,
        page_table,
        first,
        lengths,
        out,
        *table.stride(),
        *words.stride()[:3],
        page_table.stride(0),
        *out.stride()[:2],
        heads,
        width,
        GROUP=group,
        GROUP_PADDED=next_power_of_2(group),
        PAGE_TOKENS=page_tokens,
        WORDS=parts // size,
        WORD_CODES=size,
    )
