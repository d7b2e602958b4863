"""The plan in Triton: a program makes some runs of one line, the first of a line its numbers of runs and tokens."""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from kvcm.gpu_tier.kernels.block_runs import BlockPlaces, BlockPlan
from kvcm.gpu_tier.kernels.cluster_expand import SelectedBlocks
from kvcm.gpu_tier.kernels.token_runs import SteadyPlan

__all__ = ["run"]

triton: Any = import_module("triton")  # optional, and without types
tl: Any = import_module("triton.language")

_BLOCK = 512  # runs of a program


def _plan(
    block_tokens: "Any",
    block_hosts: "Any",
    block_offsets: "Any",
    lengths: "Any",
    totals: "Any",
    requests: "Any",
    active: "Any",
    steady_kind: "Any",
    steady_src: "Any",
    steady_dst: "Any",
    steady_tokens: "Any",
    steady_end: "Any",
    steady_total: "Any",
    places: "Any",
    loaded: "Any",
    evicted: "Any",
    slots: "Any",
    kind: "Any",
    src: "Any",
    dst: "Any",
    tokens: "Any",
    count: "Any",
    lens: "Any",
    in_kind: "Any",
    in_src: "Any",
    in_dst: "Any",
    in_tokens: "Any",
    in_count: "Any",
    counters: "Any",
    slots_row: "Any",
    capacity: "Any",
    heads: "Any",
    width: "Any",
    before: "Any",
    size: "Any",
    piece: "Any",
    BLOCK: tl.constexpr,
) -> None:
    line = tl.program_id(0).to(tl.int64)
    row = line // heads
    number = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_active = tl.load(active + row) != 0
    length = tl.load(lengths + line, mask=is_active, other=0)
    request = tl.load(requests + row, mask=is_active, other=0)
    # Pieces of blocks.
    per_block = size // piece
    item = number - before
    which = item // per_block
    offset = item % per_block * piece
    is_item = (item >= 0) & (which < width)
    block_at = line * width + which
    given = tl.where(is_active, width, 0)
    place = tl.load(places + block_at, mask=(item >= 0) & (which < given), other=-1)
    valid = place >= 0
    is_loaded = tl.load(loaded + line * capacity + place, mask=valid, other=0) != 0
    of_block = tl.load(block_tokens + block_at, mask=valid, other=0)
    filled = tl.minimum(tl.maximum(of_block - offset, 0), piece)
    slot = tl.load(slots + request * slots_row + place * size + offset, mask=valid, other=0)
    host = tl.load(block_hosts + block_at, mask=valid, other=0).to(tl.int64) * size + offset
    source = tl.where(filled > 0, tl.where(is_loaded, 2, 1), -1)
    place_in_row = tl.load(block_offsets + block_at, mask=is_item, other=0) + offset
    to = tl.load(steady_end + row) + place_in_row
    of_items = line * width * per_block + item
    tl.store(in_kind + of_items, tl.where(source == 2, 0, -1), mask=is_item)
    tl.store(in_src + of_items, to.to(tl.int64), mask=is_item)
    tl.store(in_dst + of_items, slot, mask=is_item)
    tl.store(in_tokens + of_items, filled, mask=is_item)
    # Steady runs.
    is_steady = number < before
    at = row * before + number
    source = tl.where(is_steady, tl.load(steady_kind + at, mask=is_steady, other=0), source)
    first = tl.where(is_loaded, host, slot.to(tl.int64))
    first = tl.where(is_steady, tl.load(steady_src + at, mask=is_steady, other=0), first)
    target = tl.where(is_steady, tl.load(steady_dst + at, mask=is_steady, other=0), to)
    of_run = tl.where(is_steady, tl.load(steady_tokens + at, mask=is_steady, other=0), filled)
    written = is_steady | is_item
    out = line * (before + width * per_block) + number
    tl.store(kind + out, source, mask=written)
    tl.store(src + out, first, mask=written)
    tl.store(dst + out, target, mask=written)
    tl.store(tokens + out, of_run, mask=written)
    # Counts.
    is_first = tl.program_id(1) == 0
    steady_of_row = tl.load(steady_total + row)
    total = tl.load(totals + line, mask=is_active, other=0)
    tl.store(count + line, tl.where(is_active, before + length * per_block, 0), mask=is_first)
    tl.store(in_count + line, length * per_block, mask=is_first)
    tl.store(lens + line, tl.where(is_active, steady_of_row + total, 0), mask=is_first)
    heading = valid & (offset == 0)
    cached = heading & (is_loaded == 0)
    left = tl.load(evicted + block_at, mask=is_item & (offset == 0), other=-1) >= 0
    tl.atomic_add(counters, tl.sum(heading.to(tl.int64), axis=0))
    tl.atomic_add(counters + 1, tl.sum(cached.to(tl.int64), axis=0))
    tl.atomic_add(counters + 2, tl.sum(tl.where(heading, of_block, 0).to(tl.int64), axis=0))
    tl.atomic_add(counters + 3, tl.sum(tl.where(cached, of_block, 0).to(tl.int64), axis=0))
    tl.atomic_add(counters + 4, tl.sum((heading & is_loaded).to(tl.int64), axis=0))
    tl.atomic_add(counters + 5, tl.sum(left.to(tl.int64), axis=0))


_kernel = triton.jit(_plan)


def run(
    blocks: SelectedBlocks, requests: Tensor, active: Tensor, steady: SteadyPlan, places: BlockPlaces, out: BlockPlan
) -> None:
    """See `block_runs`."""
    rows, heads, width = blocks.ids.shape
    if not rows * heads:
        return
    before, runs, admissions = steady.kind.shape[1], out.runs, out.admissions
    pieces = width * (places.block_tokens // places.piece)
    _kernel[rows * heads, max(1, triton.cdiv(before + pieces, _BLOCK))](
        blocks.tokens,
        blocks.hosts,
        blocks.offsets,
        blocks.lengths,
        blocks.totals,
        requests,
        active.view(torch.uint8),
        steady.kind,
        steady.src,
        steady.dst,
        steady.tokens,
        steady.end,
        steady.total,
        places.place,
        places.loaded,
        places.evicted,
        places.slots,
        runs.kind,
        runs.src,
        runs.dst,
        runs.tokens,
        runs.count,
        out.lens,
        admissions.kind,
        admissions.src,
        admissions.dst,
        admissions.tokens,
        admissions.count,
        out.counters,
        places.slots.stride(0),
        places.loaded.shape[2],
        heads,
        width,
        before,
        places.block_tokens,
        places.piece,
        BLOCK=_BLOCK,
    )
