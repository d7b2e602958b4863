"""Exact top-k in Triton, by radix: no sort.

Scores become integers of the same order. Four passes of 8 bits, from the highest, count how many candidates have each
digit among those that share the digits found so far; the digit of the k-th highest follows. That gives the k-th highest
score itself and how many of its equals are needed. A last walk in the order of ids takes the higher ones, and the first
equals, to places that prefix sums give: so ids come out ascending, and ties go to the lower id.

A short row is done by one program in one launch. Of a long one each chunk has a program, and a pass is a launch: the
counts of all chunks are added in memory, and each program derives the digits found so far from them.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from kvcm.gpu_tier.kernels.operands import scratch
from kvcm.gpu_tier.kernels.tuning import next_power_of_2

__all__ = ["run"]

triton: Any = import_module("triton")  # optional, and without types
tl: Any = import_module("triton.language")
_jit: Callable[[Callable[..., Any]], Any] = triton.jit

_ALONE = 8192  # scores of a row that one program does
_BLOCK = 2048  # scores that it looks at at once
_CHUNK = 4096  # scores of a program where a row has several

BINS = tl.constexpr(256)
PASSES = tl.constexpr(4)
LOWEST = tl.constexpr(-(2**31))  # below the integers of all scores


@_jit
def _ordered(scores: "Any", at: "Any", inside: "Any") -> "Any":
    """Return int32 in the order of the scores; NaN as -inf, and -0 as 0."""
    x = tl.load(scores + at, mask=inside, other=-float("inf"))
    x = tl.where(x == x, x, -float("inf"))
    x = tl.where(x == 0.0, 0.0, x)
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@_jit
def _count(scores: "Any", at: "Any", stop: "Any", prefix: "Any", PASS: tl.constexpr) -> "Any":
    """Return how many of a block's candidates have each digit, among those that begin with the prefix."""
    inside = at < stop
    order = _ordered(scores, at, inside)
    digit = (order >> (24 - 8 * PASS)) & 255
    if PASS == 0:
        digit = digit ^ 128  # the highest bit is the sign
        counted = inside
    else:
        counted = inside & ((order >> (32 - 8 * PASS)) == prefix)
    return tl.histogram(digit, BINS, mask=counted)


@_jit
def _pick(found: "Any", prefix: "Any", need: "Any", PASS: tl.constexpr) -> "Any":
    """Return the prefix with the digit of the need-th highest, and how many are needed among those that share it."""
    bins = tl.arange(0, BINS)
    at_least = tl.sum(found, axis=0) - tl.cumsum(found, axis=0) + found
    digit = tl.max(tl.where(at_least >= need, bins, 0), axis=0)
    higher = tl.sum(tl.where(bins > digit, found, 0), axis=0)
    prefix = digit - 128 if PASS == 0 else prefix * 256 + digit
    return prefix, need - higher


@_jit
def _emit(
    scores: "Any", out: "Any", at: "Any", stop: "Any", threshold: "Any", need: "Any", higher: "Any", equal: "Any"
) -> "Any":
    """Write the ids that a block brings; return `higher` and `equal`, seen before it, with those of the block."""
    inside = at < stop
    order = _ordered(scores, at, inside)
    more = (inside & (order > threshold)).to(tl.int32)
    same = (inside & (order == threshold)).to(tl.int32)
    same_before = equal + tl.cumsum(same, axis=0) - same
    taken = more + tl.where(same_before < need, same, 0)
    place = higher + tl.cumsum(more, axis=0) - more + tl.minimum(same_before, need)
    tl.store(out + place, at, mask=taken > 0)
    return higher + tl.sum(more, axis=0), equal + tl.sum(same, axis=0)


@_jit
def _finish(
    out: "Any", out_count: "Any", count: "Any", width: "Any", first: "Any", step: "Any", BLOCK: tl.constexpr
) -> None:
    """Write the count, and -1 behind the ids in the program's share of the row."""
    tl.store(out_count, count)
    for start in tl.range(first, width, step):
        column = start + tl.arange(0, BLOCK)
        tl.store(out + column, tl.full([BLOCK], -1, tl.int32), mask=(column >= count) & (column < width))


def _row(
    scores: "Any",
    lengths: "Any",
    out: "Any",
    out_counts: "Any",
    scores_row: "Any",
    scores_head: "Any",
    heads: "Any",
    width: "Any",
    k: "Any",
    out_width: "Any",
    BLOCK: tl.constexpr,
) -> None:
    item = tl.program_id(0).to(tl.int64)
    scores += item // heads * scores_row + item % heads * scores_head
    out += item * out_width
    length = tl.minimum(tl.maximum(tl.load(lengths + item // heads), 0), width)
    stop = tl.where(length > k, length, 0)  # nothing to find out where all are taken
    prefix = length * 0
    need = prefix + k
    for number in tl.static_range(PASSES):
        found = tl.zeros([BINS], tl.int32)
        for start in tl.range(0, stop, BLOCK):
            found += _count(scores, start + tl.arange(0, BLOCK), stop, prefix, number)
        prefix, need = _pick(found, prefix, need, number)
    threshold = tl.where(length > k, prefix, LOWEST)
    higher = length * 0
    equal = length * 0
    for start in tl.range(0, length, BLOCK):
        higher, equal = _emit(scores, out, start + tl.arange(0, BLOCK), length, threshold, need, higher, equal)
    _finish(out, out_counts + item, tl.minimum(length, k), out_width, 0, BLOCK, BLOCK)


@_jit
def _found_so_far(counts: "Any", length: "Any", k: "Any", STEPS: tl.constexpr) -> "Any":
    """Return the digits found by the passes so far, and how many are needed among those that share them."""
    prefix = length * 0
    need = prefix + k
    for number in tl.static_range(STEPS):
        found = tl.load(counts + number * BINS + tl.arange(0, BINS))
        prefix, need = _pick(found, prefix, need, number)
    return prefix, need


def _chunk_count(
    scores: "Any",
    lengths: "Any",
    counts: "Any",
    scores_row: "Any",
    scores_head: "Any",
    heads: "Any",
    width: "Any",
    k: "Any",
    PASS: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    item = tl.program_id(0).to(tl.int64)
    length = tl.minimum(tl.load(lengths + item // heads), width)
    start = tl.program_id(1) * CHUNK
    if (start < length) & (length > k):
        scores += item // heads * scores_row + item % heads * scores_head
        counts += item * PASSES * BINS
        prefix, _ = _found_so_far(counts, length, k, PASS)
        found = _count(scores, start + tl.arange(0, CHUNK), length, prefix, PASS)
        bins = tl.arange(0, BINS)
        tl.atomic_add(counts + PASS * BINS + bins, found, mask=found > 0)


def _chunk_tally(
    scores: "Any",
    lengths: "Any",
    counts: "Any",
    tallies: "Any",
    scores_row: "Any",
    scores_head: "Any",
    heads: "Any",
    width: "Any",
    k: "Any",
    CHUNK: tl.constexpr,
) -> None:
    item = tl.program_id(0).to(tl.int64)
    length = tl.minimum(tl.load(lengths + item // heads), width)
    scores += item // heads * scores_row + item % heads * scores_head
    prefix, _ = _found_so_far(counts + item * PASSES * BINS, length, k, PASSES)
    threshold = tl.where(length > k, prefix, LOWEST)
    at = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = at < length
    order = _ordered(scores, at, inside)
    mine = tallies + (item * tl.num_programs(1) + tl.program_id(1)) * 2
    tl.store(mine, tl.sum((inside & (order > threshold)).to(tl.int32), axis=0))
    tl.store(mine + 1, tl.sum((inside & (order == threshold)).to(tl.int32), axis=0))


def _chunk_emit(
    scores: "Any",
    lengths: "Any",
    counts: "Any",
    tallies: "Any",
    out: "Any",
    out_counts: "Any",
    scores_row: "Any",
    scores_head: "Any",
    heads: "Any",
    width: "Any",
    k: "Any",
    out_width: "Any",
    CHUNK: tl.constexpr,
    CHUNKS_PADDED: tl.constexpr,
) -> None:
    item = tl.program_id(0).to(tl.int64)
    length = tl.minimum(tl.maximum(tl.load(lengths + item // heads), 0), width)
    scores += item // heads * scores_row + item % heads * scores_head
    out += item * out_width
    prefix, need = _found_so_far(counts + item * PASSES * BINS, length, k, PASSES)
    threshold = tl.where(length > k, prefix, LOWEST)
    chunk = tl.arange(0, CHUNKS_PADDED)
    before = tallies + (item * tl.num_programs(1) + chunk) * 2
    higher = tl.sum(tl.load(before, mask=chunk < tl.program_id(1), other=0), axis=0)
    equal = tl.sum(tl.load(before + 1, mask=chunk < tl.program_id(1), other=0), axis=0)
    at = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    _emit(scores, out, at, length, threshold, need, higher, equal)
    step = tl.num_programs(1) * CHUNK
    _finish(out, out_counts + item, tl.minimum(length, k), out_width, tl.program_id(1) * CHUNK, step, CHUNK)


_row_kernel = _jit(_row)
_count_kernel = _jit(_chunk_count)
_tally_kernel = _jit(_chunk_tally)
_emit_kernel = _jit(_chunk_emit)


def run(scores: Tensor, lengths: Tensor, k: int, out_indices: Tensor, out_lengths: Tensor) -> None:
    """See `topk_select`; the scores of a row and head, and the outputs, must be contiguous."""
    rows, heads, width = scores.shape
    items = rows * heads
    if not items:
        return
    shape = (*scores.stride()[:2], heads, width, k)
    if width <= _ALONE:
        block = max(16, min(_BLOCK, next_power_of_2(max(1, width))))
        options = {"BLOCK": block, "num_warps": 8}
        _row_kernel[(items,)](scores, lengths, out_indices, out_lengths, *shape, out_indices.shape[-1], **options)
        return
    chunks = triton.cdiv(width, _CHUNK)
    room = scratch(scores.device, torch.int32, items * (PASSES.value * BINS.value + 2 * chunks))
    counts = room[: items * PASSES.value * BINS.value].zero_()
    tallies = room[items * PASSES.value * BINS.value :]
    grid, options = (items, chunks), {"CHUNK": _CHUNK, "num_warps": 8}
    for number in range(PASSES.value):
        _count_kernel[grid](scores, lengths, counts, *shape, PASS=number, **options)
    _tally_kernel[grid](scores, lengths, counts, tallies, *shape, **options)
    outputs = (out_indices, out_lengths, *shape, out_indices.shape[-1])
    padded = next_power_of_2(chunks)
    _emit_kernel[grid](scores, lengths, counts, tallies, *outputs, CHUNKS_PADDED=padded, **options)
