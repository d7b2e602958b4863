"""`gather_copy` in Triton: a program per run, which copies the words of the run in tiles."""

import math
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

__all__ = ["run"]

triton: Any = import_module("triton")  # optional, and without types
tl: Any = import_module("triton.language")

_TILE = 1024
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# Triton evaluates the annotations of a kernel, hence the text and no `annotations` of the future in this file.


def _copy_tiles(
    source: "Any", stride: "Any", first: "Any", target: "Any", total: "Any", words: tl.constexpr, tile: tl.constexpr
) -> None:
    start = total * 0
    while start < total:
        number = start + tl.arange(0, tile)
        inside = number < total
        offset = (first + number // words) * stride + number % words
        value = tl.load(source + offset, mask=inside, eviction_policy="evict_first")
        tl.store(target + number, value, mask=inside)
        start += tile


copy_tiles: Any = triton.jit(_copy_tiles)


def _copy_runs(
    source0: "Any", source1: "Any", source2: "Any", stride0: "Any", stride1: "Any", stride2: "Any", kind: "Any",
    src_row: "Any", n_rows: "Any", dst_row: "Any", count: "Any", out: "Any", runs: "Any", buffer_words: "Any",
    words: tl.constexpr, tile: tl.constexpr,
) -> None:  # fmt: skip
    buffer = tl.program_id(0).to(tl.int64)
    number = tl.program_id(1)
    if number < tl.load(count + buffer):
        place = buffer * runs + number
        which = tl.load(kind + place)
        first = tl.load(src_row + place).to(tl.int64)
        total = tl.load(n_rows + place).to(tl.int64) * words
        target = out + buffer * buffer_words + tl.load(dst_row + place).to(tl.int64) * words
        if which == 0:
            copy_tiles(source0, stride0, first, target, total, words, tile)
        if which == 1:
            copy_tiles(source1, stride1, first, target, total, words, tile)
        if which == 2:
            copy_tiles(source2, stride2, first, target, total, words, tile)


_kernel = triton.jit(_copy_runs)


def run(
    sources: tuple[Tensor, ...],
    kind: Tensor,
    src_row: Tensor,
    n_rows: Tensor,
    dst_row: Tensor,
    count: Tensor,
    out: Tensor,
) -> None:
    """See `gpu_tier.kernels.gather_copy.gather_copy`."""
    buffers, runs = kind.shape
    row_bytes = out.shape[2]
    sizes = [number for source in sources for number in (source.stride(0), source.data_ptr())]
    size = math.gcd(8, row_bytes, out.data_ptr(), *sizes)
    padded = (*sources, *(sources[0],) * (3 - len(sources)))
    words = row_bytes // size
    _kernel[(buffers, runs)](
        *(_as_words(source, size) for source in padded), *(source.stride(0) // size for source in padded),
        kind.contiguous(), src_row.contiguous(), n_rows.contiguous(), dst_row.contiguous(), count.contiguous(),
        out.view(_WORDS[size]), runs, out.shape[1] * words, words=words, tile=_TILE,
    )  # fmt: skip


def _as_words(source: Tensor, size: int) -> Tensor:
    # Only the address and the type matter to the kernel; `view` refuses some rows that are apart.
    return source.as_strided((source.shape[0], source.shape[1]), (source.stride(0), 1)).view(_WORDS[size])
