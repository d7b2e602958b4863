"""What each kernel computes on random inputs, at sizes of a real step: to compare its implementations with each other.

A check takes an implementation and returns its outputs on the host. Every implementation gets the same inputs; the
reference's outputs are the expected ones. Outputs are poisoned before each call, so that unwritten elements show.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from block_checks import block_checks
from check_case import Check, Outputs, Sizes, ragged
from cluster_checks import cluster_checks
from clustering_checks import clustering
from pinned_pool import pinned_pool
from sliding_trace import SlidingTrace
from torch import Tensor

from kvcm.gpu_tier.config import SparseConfig
from kvcm.gpu_tier.geometry import Addressing, KVDtype, KVGeometry, KVKind, Layout, PartStrides, Rows
from kvcm.gpu_tier.kernels.decode_attn_paged import decode_attn_paged
from kvcm.gpu_tier.kernels.decode_attn_token import decode_attn_token
from kvcm.gpu_tier.kernels.gather_copy import gather_copy
from kvcm.gpu_tier.kernels.indexer_score import indexer_score
from kvcm.gpu_tier.kernels.lse_merge import lse_merge
from kvcm.gpu_tier.kernels.operands import RowPool
from kvcm.gpu_tier.kernels.quest_score import quest_score
from kvcm.gpu_tier.kernels.topk_select import topk_select
from kvcm.gpu_tier.manager.residency import LruDiffPolicy
from kvcm.gpu_tier.pools.device_pool import DeviceKVPool
from kvcm.gpu_tier.pools.transfer import Engine, KVTransfer
from kvcm.gpu_tier.runtime import DeviceRuntime
from kvcm.gpu_tier.types import CopyRuns, ForwardBatch, LayerKV, Mode, Selection, Unit

__all__ = ["Check", "Sizes", "checks"]


def checks(runtime: DeviceRuntime, sizes: Sizes) -> list[Check]:
    """Return the checks of all kernels."""
    return [
        *_attention(runtime, sizes), _merge(runtime, sizes), *_top_k(runtime, sizes), _quest(runtime, sizes),
        _indexer(runtime, sizes), *_lru(runtime, sizes), *_transfers(runtime), _dma(runtime),
        *(_gather(runtime, dtype) for dtype in (KVDtype.BF16, KVDtype.FP8)),
        *clustering(runtime, sizes),
        *cluster_checks(runtime, sizes),
        *block_checks(runtime, sizes),
    ]  # fmt: skip


def _shapes(sizes: Sizes) -> list[tuple[KVGeometry, int]]:
    """Geometries and query heads: GQA and MLA, plain and fp8."""
    dims, latent = sizes.dims, 4 * sizes.dims
    found = [(KVGeometry(KVKind.MHA, 1, 2, dims, dims, dtype), 8) for dtype in KVDtype]
    mla = [KVGeometry(KVKind.MLA, 1, 1, latent + 64, latent, dtype) for dtype in (KVDtype.BF16, KVDtype.FP8)]
    return found + [(geometry, sizes.latent_heads) for geometry in mla]


def _attention(runtime: DeviceRuntime, sizes: Sizes) -> list[Check]:
    found = []
    for geometry, q_heads in _shapes(sizes):
        tolerance = 2e-5 if geometry.dtype is KVDtype.F32 else 1e-2
        name = f"{geometry.kind} {geometry.dtype}, {q_heads} query heads"
        found.append(Check("decode_attn_token", name, _token(runtime, sizes, geometry, q_heads), tolerance))
        found.append(Check("decode_attn_paged", name, _paged(runtime, sizes, geometry, q_heads), tolerance))
    return found


def _layer(runtime: DeviceRuntime, geometry: KVGeometry, slots: int) -> LayerKV:
    parts = [
        Rows(part.encode(torch.randn(slots, geometry.num_kv_heads, part.dims)).to(runtime.device), part)
        for part in geometry.parts
    ]
    return LayerKV(parts[0], parts[1] if len(parts) > 1 else None, geometry.v_head_dim)


def _query(runtime: DeviceRuntime, sizes: Sizes, geometry: KVGeometry, q_heads: int) -> Tensor:
    dtype = torch.bfloat16 if geometry.dtype is KVDtype.FP8 else geometry.dtype.torch_dtype
    return torch.randn(sizes.batch, q_heads, geometry.head_dim).to(dtype).to(runtime.device)


def _poisoned(q: Tensor, geometry: KVGeometry) -> tuple[Tensor, Tensor]:
    o = torch.full((*q.shape[:2], geometry.v_head_dim), torch.nan, device=q.device)
    return o, torch.full(q.shape[:2], torch.nan, device=q.device)


def _token(runtime: DeviceRuntime, sizes: Sizes, geometry: KVGeometry, q_heads: int) -> Callable[[str], Outputs]:
    kv, q = _layer(runtime, geometry, sizes.tokens), _query(runtime, sizes, geometry, q_heads)
    chosen = [torch.randperm(sizes.tokens)[: sizes.selected] for _ in range(sizes.batch)]
    table = torch.stack(chosen)[:, None].int().to(runtime.device)
    lens = ragged(sizes, sizes.selected)[:, None].to(runtime.device)

    def run(impl: str) -> Outputs:
        o, lse = _poisoned(q, geometry)
        decode_attn_token(q, kv, table, lens, geometry.head_dim**-0.5, o, lse, impl=impl)
        return o.cpu(), lse.cpu()

    return run


def _paged(runtime: DeviceRuntime, sizes: Sizes, geometry: KVGeometry, q_heads: int) -> Callable[[str], Outputs]:
    kv, q = _layer(runtime, geometry, sizes.tokens), _query(runtime, sizes, geometry, q_heads)
    pages = sizes.tokens // geometry.page_size
    table = torch.stack([torch.randperm(pages) for _ in range(sizes.batch)]).int().to(runtime.device)
    lengths = ragged(sizes, pages * geometry.page_size).to(runtime.device)

    def run(impl: str) -> Outputs:
        o, lse = _poisoned(q, geometry)
        decode_attn_paged(q, kv, table, lengths, geometry.page_size, geometry.head_dim**-0.5, o, lse, impl=impl)
        return o.cpu(), lse.cpu()

    return run


def _merge(runtime: DeviceRuntime, sizes: Sizes) -> Check:
    o = torch.randn(7, sizes.batch, 16, sizes.dims).to(runtime.device)
    lse = torch.randn(7, sizes.batch, 16).mul(20)
    lse[torch.rand(lse.shape) < 0.3] = -torch.inf
    lse[:, 0, 0] = -torch.inf
    lse = lse.to(runtime.device)

    def run(impl: str) -> Outputs:
        out_o, out_lse = torch.full_like(o[0], torch.nan), torch.full_like(lse[0], torch.nan)
        lse_merge(o, lse, out_o, out_lse, impl=impl)
        return out_o.cpu(), out_lse.cpu()

    return Check("lse_merge", "7 parts, some empty", run, 1e-5)


def _top_k(runtime: DeviceRuntime, sizes: Sizes) -> list[Check]:
    def check(case: str, scores: Tensor) -> Check:
        scores, lengths = scores.to(runtime.device), ragged(sizes, scores.shape[-1]).to(runtime.device)

        def run(impl: str) -> Outputs:
            ids = torch.full((*scores.shape[:2], sizes.selected), -7, dtype=torch.int32, device=runtime.device)
            counts = torch.full(scores.shape[:2], -7, dtype=torch.int32, device=runtime.device)
            topk_select(scores, lengths, sizes.selected, ids, counts, impl=impl)
            return ids.cpu(), counts.cpu()

        return Check("topk_select", case, run)

    numbers = torch.randn(sizes.batch, 2, 4 * sizes.tokens)
    masked = numbers.masked_fill(torch.rand(numbers.shape) < 0.9, -torch.inf)
    return [check("random", numbers), check("many ties", numbers.mul(4).round()), check("mostly -inf", masked)]


def _quest(runtime: DeviceRuntime, sizes: Sizes) -> Check:
    pages = sizes.tokens // 16
    pair = torch.randn(2, pages, 2, sizes.dims)
    bounds = torch.stack([pair.amin(0), pair.amax(0)], dim=2).bfloat16().to(runtime.device)
    q = torch.randn(sizes.batch, 8, sizes.dims).bfloat16().to(runtime.device)
    table = torch.stack([torch.randperm(pages) for _ in range(sizes.batch)]).int().to(runtime.device)
    counts = ragged(sizes, pages).to(runtime.device)

    def run(impl: str) -> Outputs:
        out = torch.full((sizes.batch, 8, pages), torch.nan, device=runtime.device)
        quest_score(q, bounds, table, counts, out, impl=impl)
        return (out.cpu(),)

    return Check("quest_score", "bf16 queries", run, 1e-5)


def _indexer(runtime: DeviceRuntime, sizes: Sizes) -> Check:
    pages = sizes.tokens // 64
    numbers = torch.randn(sizes.tokens, 128).to(torch.float8_e4m3fn).view(torch.uint8)
    keys = torch.cat([numbers, torch.rand(sizes.tokens, 1).add(0.5).view(torch.uint8)], dim=1).to(runtime.device)
    q8 = torch.randn(sizes.batch, 64, 128).to(torch.float8_e4m3fn).to(runtime.device)
    weight = torch.randn(sizes.batch, 64).to(runtime.device)
    table = torch.stack([torch.randperm(pages) for _ in range(sizes.batch)]).int().to(runtime.device)
    lengths = ragged(sizes, sizes.tokens).to(runtime.device)

    def run(impl: str) -> Outputs:
        out = torch.full((sizes.batch, sizes.tokens), torch.nan, device=runtime.device)
        indexer_score(q8, weight, keys, table, 64, lengths, out, impl=impl)
        return (out.cpu(),)

    return Check("indexer_score", "64 heads of 128 dims", run, 1e-3)


def _lru(runtime: DeviceRuntime, sizes: Sizes) -> list[Check]:
    found = []
    for ratio, rate in ((1, 0.7), (2, 0.9), (4, 0.5)):
        name = f"C = {ratio}K, {sizes.steps} steps, hit rate {rate}"
        capacity = min(ratio * sizes.selected, sizes.tokens // 2)
        found.append(Check("lru_diff", name, _lru_run(runtime, sizes, capacity, rate)))
    return found


def _lru_run(runtime: DeviceRuntime, sizes: Sizes, capacity: int, rate: float) -> Callable[[str], Outputs]:
    geometry, device = KVGeometry(KVKind.MLA, 1, 1, 576, 512, KVDtype.BF16), runtime.device
    items = sizes.tokens + sizes.steps
    host_loc = torch.stack([torch.randperm(items) for _ in range(sizes.batch)]).to(device)
    slots = torch.randperm(sizes.batch * (capacity + 2), dtype=torch.int32).view(sizes.batch, -1).to(device)
    trace = SlidingTrace(sizes.batch, sizes.tokens - 1, sizes.selected, rate, device)
    selections = [trace.select(step, sizes.tokens + step)[:, None] for step in range(sizes.steps)]

    def run(impl: str) -> Outputs:
        policy = LruDiffPolicy(
            geometry, capacity=capacity, unit_tokens=1, selecting_heads=1, max_requests=sizes.batch, max_items=items,
            host_loc=host_loc, runtime=runtime, kernels=impl,
        )  # fmt: skip
        for request, own in enumerate(slots):
            policy.admit(request, own[:capacity], own[capacity:], sizes.tokens)
        found: list[Tensor] = []
        for step, chosen in enumerate(selections):
            found += _plan(policy, chosen, sizes.tokens + step + 1)
        policy.check()
        state = policy.layer_state(0)
        return (*found, state.slot_item.cpu(), state.lru_slots.cpu(), state.newest_item.cpu())

    return run


def _plan(policy: LruDiffPolicy, chosen: Tensor, n_tokens: int) -> list[Tensor]:
    rows, device = len(chosen), chosen.device
    # One row is padding and one is dense: neither may touch any state.
    real, requests = rows - 1, tuple(range(rows - 1))
    lengths = torch.full((rows,), n_tokens, dtype=torch.int32, device=device)
    ids = torch.arange(rows, device=device)
    batch = ForwardBatch(
        Mode.DECODE, ids, lengths, ids, lengths.long() - 1, torch.tensor([real], dtype=torch.int32, device=device),
        requests, (n_tokens,) * real, (1,) * real,
    )  # fmt: skip
    counts = torch.full((rows, 1), chosen.shape[-1], dtype=torch.int32, device=device)
    plan = policy.resolve(0, batch, Selection(Unit.TOKEN, 1, chosen, counts), ids != 1)
    misses, promotion = plan.misses, plan.promotion
    assert misses is not None
    assert promotion is not None
    behind = torch.arange(chosen.shape[-1], device=device) >= misses.count[..., None]
    loads = [tensor.masked_fill(behind, -1) for tensor in (misses.src_host, misses.dst_dev)]
    outputs = [plan.device_slot, misses.count, *loads, promotion.src, promotion.dst]
    return [tensor.cpu().clone() for tensor in outputs]


def _transfers(runtime: DeviceRuntime) -> list[Check]:
    mla = KVGeometry(KVKind.MLA, 4, 1, 576, 512, KVDtype.FP8, page_size=16)
    mha = KVGeometry(KVKind.MHA, 3, 4, 80, 80, KVDtype.BF16, page_size=16)
    cases = [(mla, False), (mha, False), (mha, True)]
    return [
        Check(
            "io_transfer", f"{geometry.kind}, {layout}, {'per head' if per_head else 'all heads'}",
            _transfer(runtime, geometry, layout, per_head),
        )
        for geometry, per_head in cases for layout in Layout
    ]  # fmt: skip


def _transfer(runtime: DeviceRuntime, geometry: KVGeometry, layout: Layout, per_head: bool) -> Callable[[str], Outputs]:
    pages, unit = 24, 2
    heads = geometry.num_kv_heads if per_head else 1
    items = pages * geometry.page_size // unit
    there, here = (
        (torch.stack([torch.randperm(items) for _ in range(heads)]) * unit).to(runtime.device) for _ in range(2)
    )
    count = torch.full((heads,), items // 2, dtype=torch.int32, device=runtime.device)
    there[:, 3] = -1

    def run(impl: str) -> Outputs:
        generator = torch.Generator().manual_seed(1)
        host = pinned_pool(geometry, pages, layout, runtime)
        host.data.copy_(torch.randint(0, 256, host.data.shape, dtype=torch.uint8, generator=generator))
        device = DeviceKVPool(geometry, pages, runtime)
        transfer = KVTransfer(host, device, runtime, SparseConfig("dsa", kernels=impl))
        how: dict[str, Any] = {"count": count, "per_head": per_head, "unit_tokens": unit, "engine": Engine.KERNEL}
        transfer.load(there, here, layers=geometry.layers[:1], **how)
        transfer.load(here, there, layers=geometry.layers[1:], **how)
        loaded = device.data.cpu()
        transfer.store(there, here, layers=geometry.layers, **how)
        moved = torch.tensor([transfer.counters.h2d_bytes, transfer.counters.d2h_bytes])
        stored = host.data.clone()
        host.close()
        return loaded, stored, moved

    return run


def _dma(runtime: DeviceRuntime) -> Check:
    geometry = KVGeometry(KVKind.MHA, 3, 2, 32, 32, KVDtype.BF16, page_size=16)
    there, here = ((torch.randperm(12) * 16)[None] for _ in range(2))

    def run(impl: str) -> Outputs:
        host = pinned_pool(geometry, 12, Layout.LAYER_FIRST, runtime)
        host.data.copy_(torch.arange(len(host.data)).mul(31).to(torch.uint8))
        device = DeviceKVPool(geometry, 12, runtime)
        transfer = KVTransfer(host, device, runtime, SparseConfig("dsa", kernels=impl))
        transfer.load(there, here, layers=geometry.layers, unit_tokens=16, engine=Engine.DMA)
        loaded = device.data.cpu()
        transfer.store(there, here, layers=geometry.layers[1:], unit_tokens=16, engine=Engine.DMA)
        runtime.record().wait()
        stored = host.data.clone()
        host.close()
        return loaded, stored

    return Check("dma_copy", "pages in any order, both directions", run)


def _gather(runtime: DeviceRuntime, dtype: KVDtype) -> Check:
    rows, width, most, device = 10, 24, 40, runtime.device
    geometry = KVGeometry(KVKind.MHA, 2, 4, 128, 128, dtype, page_size=16)
    pages = rows * width * most // 16 + 1
    sources = _gather_sources(runtime, geometry)
    kind = torch.randint(-1, 3, (rows * 4, width), dtype=torch.int32)
    src = torch.randint(0, 16 * 40 - most, kind.shape)
    tokens = torch.randint(0, most + 1, kind.shape, dtype=torch.int32)
    first = (torch.arange(rows).repeat_interleave(4) * width)[:, None]
    dst = (torch.stack([torch.randperm(width) for _ in range(rows * 4)]) + first).int() * most
    count = torch.randint(0, width + 1, (rows * 4,), dtype=torch.int32)
    runs = CopyRuns(*(table.to(device) for table in (kind, src, dst, tokens, count)))

    def run(impl: str) -> Outputs:
        pool = DeviceKVPool(geometry, pages, runtime)
        pool.data.fill_(0xAB)
        moved = torch.zeros(3, dtype=torch.int64, device=device)
        target = RowPool(pool.data, pool.addressing, 1)
        gather_copy(sources, target, runs, num_heads=4, moved=moved, impl=impl)
        return pool.data.cpu(), moved.cpu()

    return Check("gather_copy", f"{dtype}, runs of 0 to {most} tokens from 3 sources", run)


def _gather_sources(runtime: DeviceRuntime, geometry: KVGeometry) -> tuple[RowPool, ...]:
    """Return 40 pages of the arena, of the host, and of the host in blocks of one head."""
    arena = DeviceKVPool(geometry, 40, runtime)
    host = pinned_pool(geometry, 40, Layout.PAGE_FIRST, runtime)
    row, slots = geometry.parts[0].row_bytes, 16 * 40
    parts = tuple(PartStrides(part * slots * row, 8 * row, row, 0, 0, row) for part in range(2))
    blocks = Addressing(Layout.LAYER_FIRST, 8, 2 * slots * row, parts)
    generator = torch.Generator().manual_seed(1)
    for data in (arena.data, host.data):
        data.copy_(torch.randint(0, 256, data.shape, dtype=torch.uint8, generator=generator))
    return (
        RowPool(arena.data, arena.addressing, 1),
        RowPool(host.data[: blocks.total_bytes], blocks, 1),
        RowPool(host.data, host.addressing, 0),
    )
