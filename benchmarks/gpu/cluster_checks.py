"""What the kernels of RetroInfer and PQCache compute on random inputs; see `kernel_checks`."""

from __future__ import annotations

import torch
from check_case import Check, Outputs, Sizes, ragged
from torch import Tensor

from gpu_tier.index.meta_pages import PAGE_CLUSTERS, MetaViews, empty_meta_page
from gpu_tier.kernels.centroid_score import centroid_score
from gpu_tier.kernels.pq_score import pq_score
from gpu_tier.kernels.weighted_attn import weighted_attn
from gpu_tier.runtime import DeviceRuntime

__all__ = ["cluster_checks"]


def cluster_checks(runtime: DeviceRuntime, sizes: Sizes) -> list[Check]:
    """Return the checks: GQA with bf16 and f32 queries, MLA, and codes of 6 and 8 bits."""
    dims, latent = sizes.dims, 4 * sizes.dims
    shapes = [
        (2, 8, dims, dims, torch.bfloat16), (2, 8, dims, dims, torch.float32),
        (1, sizes.latent_heads, latent + 64, latent, torch.bfloat16),
    ]  # fmt: skip
    found = [check for shape in shapes for check in _clusters(runtime, sizes, *shape)]
    return [*found, *(_codes(runtime, sizes, parts, bits) for parts, bits in ((2, 6), (4, 8)))]


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
