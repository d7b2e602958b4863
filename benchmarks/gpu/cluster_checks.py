"""What the kernels of RetroInfer and PQCache compute on random inputs; see `kernel_checks`."""

from __future__ import annotations

import torch
from check_case import Check, Outputs, Sizes, ragged
from torch import Tensor

from kvcm.gpu_tier.index.meta_index import PAGE_CLUSTERS, MetaViews, empty_meta_page
from kvcm.gpu_tier.kernels.centroid_score import centroid_score
from kvcm.gpu_tier.kernels.pq_score import pq_score
from kvcm.gpu_tier.kernels.token_runs import SteadyPlan, TokenPlaces, TokenPlan, token_runs
from kvcm.gpu_tier.kernels.weighted_attn import weighted_attn
from kvcm.gpu_tier.runtime import DeviceRuntime

__all__ = ["cluster_checks"]


def cluster_checks(runtime: DeviceRuntime, sizes: Sizes) -> list[Check]:
    """Return the checks: GQA with bf16 and f32 queries, MLA, codes of 6 and 8 bits, caches of blocks and tokens."""
    dims, latent = sizes.dims, 4 * sizes.dims
    shapes = [
        (2, 8, dims, dims, torch.bfloat16), (2, 8, dims, dims, torch.float32),
        (1, sizes.latent_heads, latent + 64, latent, torch.bfloat16),
    ]  # fmt: skip
    found = [check for shape in shapes for check in _clusters(runtime, sizes, *shape)]
    codes = [_codes(runtime, sizes, parts, bits) for parts, bits in ((2, 6), (4, 8))]
    return [*found, *codes, *(_token_runs(runtime, sizes, unit) for unit in (128, 1))]


def _clusters(
    runtime: DeviceRuntime, sizes: Sizes, heads: int, q_heads: int, dims: int, v_dims: int, dtype: torch.dtype
) -> list[Check]:
    """Return the checks of ranking and estimation over pages with empty clusters."""
    pages, device, rows = max(2, sizes.tokens // 1024), runtime.device, sizes.batch
    memory = empty_meta_page(heads, dims, v_dims).repeat(rows * pages + 1, 1).to(device)
    views = MetaViews.of(memory, heads, dims, v_dims)
    views.centroids.copy_(torch.randn(views.centroids.shape))
    views.value_sums.copy_(torch.randn(views.value_sums.shape).mul(20))
    size = torch.randint(0, 60, views.log_size.shape)
    views.log_size.copy_(size.float().log())
    q = torch.randn(rows, q_heads, dims).to(dtype).to(device)
    table = torch.randperm(rows * pages).view(rows, pages).int().to(device)
    clusters = PAGE_CLUSTERS * pages
    counts = ragged(sizes, clusters - 5).to(device)
    chosen = torch.stack([torch.randperm(clusters) for _ in range(rows * heads)]).view(rows, heads, clusters)
    ids = chosen[..., : clusters // 2].int().to(device)
    lengths = ragged(sizes, clusters // 2)[:, None].repeat(1, heads).to(device)
    scale = dims**-0.5

    def score(impl: str) -> Outputs:
        out = torch.full((rows, q_heads, clusters), torch.nan, device=device)
        centroid_score(q, views.centroids, views.log_size, table, counts, scale, out, impl=impl)
        return (out.cpu(),)

    def estimate(impl: str) -> Outputs:
        o, lse = (torch.full(shape, torch.nan, device=device) for shape in ((rows, q_heads, v_dims), (rows, q_heads)))
        index = views.centroids, views.value_sums, views.log_size
        weighted_attn(q, *index, table, ids, lengths, scale, o, lse, impl=impl)
        return o.cpu(), lse.cpu()

    name, exact = f"{q_heads} query heads of {dims} dims, {dtype}", dtype is torch.float32
    return [
        Check("centroid_score", name, score, 1e-5),
        Check("weighted_attn", name, estimate, 2e-5 if exact else 1e-2),
    ]


def _codes(runtime: DeviceRuntime, sizes: Sizes, parts: int, bits: int) -> Check:
    pages, device = sizes.tokens // 64, runtime.device
    codes = torch.randint(0, 2**bits, (pages + 1, 64, 2, parts), dtype=torch.uint8).to(device)
    table = torch.randn(sizes.batch, 8, parts, 2**bits).to(device)
    page_table = torch.stack([torch.randperm(pages) for _ in range(sizes.batch)]).int().to(device)
    lengths = ragged(sizes, sizes.tokens).to(device)
    first: Tensor = torch.full_like(lengths, 32)

    def run(impl: str) -> Outputs:
        out = torch.full((sizes.batch, 8, sizes.tokens), torch.nan, device=device)
        pq_score(table, codes, page_table, first, lengths, out, impl=impl)
        return (out.cpu(),)

    return Check("pq_score", f"{parts} codes of {bits} bits", run, 1e-6)


def _token_runs(runtime: DeviceRuntime, sizes: Sizes, unit: int) -> Check:
    """Return the check of plans of single tokens, some of them cached, in blocks of so many tokens."""
    device, rows, heads, sink = runtime.device, sizes.batch, 2, 32
    places, blocks = 4096 // unit, -(-sizes.tokens // unit)

    def ints(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, dtype=torch.int32).to(device)

    per_head = heads if unit == 1 else 1
    where = TokenPlaces(
        ints(-places, places, rows, per_head, blocks).clamp_min(-1), ints(0, 1 << 20, rows, 4096),
        ints(0, 1 << 20, rows, sizes.tokens).long(), sink, unit,
    )  # fmt: skip
    chosen = torch.stack([torch.randperm(sizes.tokens - sink) for _ in range(rows * heads)])[:, : sizes.selected] + sink
    indices = chosen.sort(-1).values.view(rows, heads, -1).int().to(device)
    lengths = ragged(sizes, indices.shape[2])[:, None].repeat(1, heads).to(device)
    lines = [ints(0, 1000, rows, 20) for _ in range(3)]
    steady = SteadyPlan(torch.zeros_like(lines[0]), lines[0].long(), *lines[1:], ints(0, 99, rows), ints(0, 99, rows))
    requests, active = torch.randperm(rows).to(device), (torch.arange(rows) != 1).to(device)

    def run(impl: str) -> Outputs:
        counters = torch.zeros(3, dtype=torch.int64, device=device)
        out = TokenPlan.empty(rows, heads, 20 + indices.shape[2], counters)
        token_runs(indices, lengths, requests, active, steady, where, out, impl=impl)
        used = torch.arange(out.runs.kind.shape[1], device=device) < out.runs.count[:, None]
        tables = (out.runs.kind, out.runs.src, out.runs.dst, out.runs.tokens)
        return (*(table.where(used, 0).cpu() for table in tables), out.runs.count.cpu(), out.lens.cpu(), counters.cpu())

    return Check("token_runs", f"{unit} tokens in a block", run)
