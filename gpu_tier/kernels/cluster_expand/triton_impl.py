"""The expansion in Triton: a program does one row and head, the first blocks of all clusters, then the second ones."""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from kvcm.gpu_tier.kernels.cluster_expand import ClusterPages, SelectedBlocks
from kvcm.gpu_tier.kernels.tuning import next_power_of_2

__all__ = ["run"]

triton: Any = import_module("triton")  # optional, and without types
tl: Any = import_module("triton.language")

_FILL = 1024  # places that are filled up at a time


def _expand(
    ids: "Any",
    requests: "Any",
    active: "Any",
    table: "Any",
    firsts: "Any",
    sizes: "Any",
    hosts: "Any",
    out_ids: "Any",
    out_tokens: "Any",
    out_hosts: "Any",
    out_offsets: "Any",
    out_lengths: "Any",
    out_totals: "Any",
    table_row: "Any",
    cluster_page: "Any",
    cluster_head: "Any",
    block_page: "Any",
    block_head: "Any",
    heads: "Any",
    clusters: "Any",
    width: "Any",
    page_clusters: "Any",
    page_blocks: "Any",
    size: "Any",
    CLUSTERS: tl.constexpr,
    FILL: tl.constexpr,
) -> None:
    line = tl.program_id(0).to(tl.int64)
    row, head = line // heads, line % heads
    is_active = tl.load(active + row) != 0
    pages = table + tl.load(requests + row, mask=is_active, other=0) * table_row
    number = tl.arange(0, CLUSTERS)
    given = tl.where(is_active, clusters, 0)
    cluster = tl.load(ids + line * clusters + number, mask=number < given, other=-1)
    valid = cluster >= 0
    page = tl.load(pages + cluster // page_clusters, mask=valid, other=0).to(tl.int64)
    at = page * cluster_page + head * cluster_head + cluster % page_clusters
    tokens = tl.load(sizes + at, mask=valid, other=0)
    first = tl.load(firsts + at, mask=valid, other=0)
    count = (tokens + size - 1) // size
    begin = tl.cumsum(count, axis=0) - count
    tokens_before = tl.cumsum(tokens, axis=0) - tokens
    room = tl.maximum(width - begin, 0)
    length = tl.minimum(tl.sum(count, axis=0), width)
    tl.store(out_lengths + line, length)
    tl.store(out_totals + line, tl.sum(tl.minimum(tokens, room * size), axis=0))
    most = tl.max(count, axis=0)
    step = 0
    while step < most:
        inside = (step < count) & (step < room)
        block = first + step
        block_at = tl.load(pages + block // page_blocks, mask=inside, other=0).to(tl.int64) * block_page
        host = tl.load(hosts + block_at + head * block_head + block % page_blocks, mask=inside, other=0)
        out = line * width + begin + step
        tl.store(out_ids + out, block, mask=inside)
        tl.store(out_tokens + out, tl.minimum(tokens - step * size, size), mask=inside)
        tl.store(out_hosts + out, host, mask=inside)
        tl.store(out_offsets + out, tokens_before + step * size, mask=inside)
        step += 1
    start = length // FILL * FILL
    while start < width:
        place = start + tl.arange(0, FILL)
        behind = (place >= length) & (place < width)
        zero = tl.zeros([FILL], tl.int32)
        tl.store(out_ids + line * width + place, zero - 1, mask=behind)
        tl.store(out_tokens + line * width + place, zero, mask=behind)
        tl.store(out_hosts + line * width + place, zero, mask=behind)
        tl.store(out_offsets + line * width + place, zero, mask=behind)
        start += FILL


_kernel = triton.jit(_expand)


def run(ids: Tensor, requests: Tensor, active: Tensor, pages: ClusterPages, out: SelectedBlocks) -> None:
    """See `cluster_expand`."""
    rows, heads, clusters = ids.shape
    if not rows * heads:
        return
    _kernel[rows * heads,](
        ids,
        requests,
        active.view(torch.uint8),
        pages.table,
        pages.firsts,
        pages.sizes,
        pages.hosts,
        out.ids,
        out.tokens,
        out.hosts,
        out.offsets,
        out.lengths,
        out.totals,
        pages.table.stride(0),
        *pages.sizes.stride()[:2],
        *pages.hosts.stride()[:2],
        heads,
        clusters,
        out.ids.shape[2],
        pages.sizes.shape[2],
        pages.hosts.shape[2],
        pages.block_tokens,
        CLUSTERS=next_power_of_2(max(1, clusters)),
        FILL=_FILL,
    )
