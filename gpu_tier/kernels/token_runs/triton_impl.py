"""The plan in Triton: a program makes some runs of one line, the first of a line its numbers of runs and tokens."""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from kvcm.gpu_tier.kernels.token_runs import SteadyPlan, TokenPlaces, TokenPlan

__all__ = ["run"]

triton: Any = import_module("triton")  # optional, and without types
tl: Any = import_module("triton.language")

_BLOCK = 1024  # runs of a program


def _plan(
    indices: "Any",
    lengths: "Any",
    requests: "Any",
    active: "Any",
    steady_kind: "Any",
    steady_src: "Any",
    steady_dst: "Any",
    steady_tokens: "Any",
    steady_end: "Any",
    steady_total: "Any",
    place_of: "Any",
    slots: "Any",
    host_loc: "Any",
    kind: "Any",
    src: "Any",
    dst: "Any",
    tokens: "Any",
    count: "Any",
    lens: "Any",
    counters: "Any",
    place_row: "Any",
    place_head: "Any",
    slots_row: "Any",
    host_row: "Any",
    heads: "Any",
    width: "Any",
    before: "Any",
    sink: "Any",
    unit: "Any",
    BLOCK: tl.constexpr,
) -> None:
    line = tl.program_id(0).to(tl.int64)
    row = line // heads
    number = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_active = tl.load(active + row) != 0
    length = tl.load(lengths + line, mask=is_active, other=0)
    request = tl.load(requests + row, mask=is_active, other=0)
    # Selected tokens.
    item = number - before
    inside = (item >= 0) & (item < length)
    token = tl.load(indices + line * width + item, mask=inside, other=-1)
    valid = inside & (token >= 0)
    middle = tl.where(valid, token - sink, 0)
    block = request * place_row + (line % heads) * place_head + middle // unit
    place = tl.load(place_of + block, mask=valid, other=-1)
    cached = place >= 0
    slot = tl.load(slots + request * slots_row + place * unit + middle % unit, mask=cached, other=0).to(tl.int64)
    on_host = tl.load(host_loc + request * host_row + token, mask=valid & ~cached, other=-1)
    found_at = tl.where(cached, slot, on_host)
    found = valid & (found_at >= 0)
    source = tl.where(found, tl.where(cached, 1, 2), -1)
    # Steady runs.
    is_steady = number < before
    at = row * before + number
    source = tl.where(is_steady, tl.load(steady_kind + at, mask=is_steady, other=0), source)
    first = tl.where(is_steady, tl.load(steady_src + at, mask=is_steady, other=0), found_at)
    steady_to = tl.load(steady_dst + at, mask=is_steady, other=0)
    target = tl.where(is_steady, steady_to, tl.load(steady_end + row) + item)
    of_run = tl.where(is_steady, tl.load(steady_tokens + at, mask=is_steady, other=0), inside.to(tl.int32))
    written = number < before + width
    out = line * (before + width) + number
    tl.store(kind + out, source, mask=written)
    tl.store(src + out, first, mask=written)
    tl.store(dst + out, target, mask=written)
    tl.store(tokens + out, of_run, mask=written)
    is_first = tl.program_id(1) == 0
    steady_tokens_of_row = tl.load(steady_total + row)
    tl.store(count + line, tl.where(is_active, before + length, 0), mask=is_first)
    tl.store(lens + line, tl.where(is_active, steady_tokens_of_row + length, 0), mask=is_first)
    selected = tl.sum(valid.to(tl.int32), axis=0).to(tl.int64)
    hits = tl.sum(cached.to(tl.int32), axis=0).to(tl.int64)
    lost = tl.sum((valid & (found_at < 0)).to(tl.int32), axis=0).to(tl.int64)
    tl.atomic_add(counters, selected, mask=selected > 0)
    tl.atomic_add(counters + 1, hits, mask=hits > 0)
    tl.atomic_add(counters + 2, lost, mask=lost > 0)


_kernel = triton.jit(_plan)


def run(
    indices: Tensor, lengths: Tensor, requests: Tensor, active: Tensor, steady: SteadyPlan, places: TokenPlaces,
    out: TokenPlan,
) -> None:  # fmt: skip
    """See `token_runs`."""
    rows, heads, width = indices.shape
    before = steady.kind.shape[1]
    if not rows * heads:
        return
    per_head = places.place_of.stride(1) if places.place_of.shape[1] > 1 else 0
    runs = out.runs
    _kernel[rows * heads, max(1, triton.cdiv(before + width, _BLOCK))](
        indices,
        lengths,
        requests,
        active.view(torch.uint8),
        steady.kind,
        steady.src,
        steady.dst,
        steady.tokens,
        steady.end,
        steady.total,
        places.place_of,
        places.slots,
        places.host_loc,
        runs.kind,
        runs.src,
        runs.dst,
        runs.tokens,
        runs.count,
        out.lens,
        out.counters,
        places.place_of.stride(0),
        per_head,
        places.slots.stride(0),
        places.host_loc.stride(0),
        heads,
        width,
        before,
        places.sink,
        places.unit,
        BLOCK=_BLOCK,
    )
