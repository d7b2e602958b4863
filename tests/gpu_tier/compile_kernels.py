"""Compiles the Triton kernels for a GPU by calling them: `python compile_kernels.py KERNEL...`; needs no GPU.

The interpreter accepts what the compiler refuses. Here Triton believes in a GPU of compute capability 9.0 and compiles
what a call would launch, with the very types and constants of the call; nothing is launched.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch

from gpu_tier.geometry import Addressing, KVGeometry, KVKind, Layout
from gpu_tier.index.meta_pages import MetaViews, empty_meta_page
from gpu_tier.kernels.block_runs import BlockPlaces, BlockPlan, block_runs
from gpu_tier.kernels.centroid_score import centroid_score
from gpu_tier.kernels.cluster_expand import ClusterPages, SelectedBlocks, cluster_expand
from gpu_tier.kernels.decode_attn_token import decode_attn_token
from gpu_tier.kernels.gather_copy import gather_copy
from gpu_tier.kernels.indexer_score import indexer_score
from gpu_tier.kernels.io_transfer import io_transfer
from gpu_tier.kernels.kmeans_assign import kmeans_assign
from gpu_tier.kernels.kmeans_update import kmeans_update
from gpu_tier.kernels.lse_merge import lse_merge
from gpu_tier.kernels.pq_score import pq_score
from gpu_tier.kernels.quest_score import quest_score
from gpu_tier.kernels.row_pool import RowPool
from gpu_tier.kernels.segment_sum import segment_sum
from gpu_tier.kernels.token_runs import SteadyPlan, TokenPlaces, TokenPlan, token_runs
from gpu_tier.kernels.topk_select import topk_select
from gpu_tier.kernels.weighted_attn import weighted_attn
from gpu_tier.rows import KVDtype, RowFormat, Rows
from gpu_tier.types import CopyRuns, LayerKV

__all__ = ["CASES"]

INT, LONG = torch.int32, torch.int64


def _io_transfer() -> None:
    geometry = KVGeometry(KVKind.MHA, 3, 2, 128, 128, KVDtype.BF16, 64)
    pools = [Addressing.of(geometry, layout, 2) for layout in (Layout.PAGE_HEAD, Layout.LAYER_FIRST)]
    data = torch.zeros(pools[0].total_bytes, dtype=torch.uint8)
    for rows, count in ((2, torch.zeros(2, dtype=INT)), (1, None)):
        io_transfer(
            data, data.clone(), *pools, torch.zeros(rows, 16, dtype=LONG), torch.zeros(rows, 16, dtype=INT),
            layers=((1, 1),), num_heads=2, count=count, per_head=rows == 2, blocks=8, moved=torch.zeros(1, dtype=LONG),
            impl="triton",
        )  # fmt: skip


def _gather_copy() -> None:
    geometry = KVGeometry(KVKind.MHA, 3, 2, 128, 64, KVDtype.BF16, 64)
    pools = [Addressing.of(geometry, layout, 2) for layout in (Layout.LAYER_FIRST, Layout.PAGE_FIRST)]
    here, there = (RowPool(torch.zeros(pool.total_bytes, dtype=torch.uint8), pool, 1) for pool in pools)
    table = torch.zeros(4, 8, dtype=INT)
    runs = CopyRuns(table, table.long(), table, table, table[:, 0].clone())
    for sources, moved in (((here, here, there), torch.zeros(3, dtype=LONG)), ((there,), None)):
        gather_copy(sources, here, runs, num_heads=2, moved=moved, impl="triton")


def _topk_select() -> None:
    for n in (4096, 1 << 17):
        out = torch.zeros(2, 1, 512, dtype=INT), torch.zeros(2, 1, dtype=INT)
        topk_select(torch.zeros(2, 1, n), torch.zeros(2, dtype=INT), 512, *out, impl="triton")


def _lse_merge() -> None:
    outputs = torch.zeros(2, 8, 128), torch.zeros(2, 8)
    lse_merge(torch.zeros(3, 2, 8, 128), torch.zeros(3, 2, 8), *outputs, impl="triton")


def _quest_score() -> None:
    bounds = torch.zeros(32, 2, 2, 128, dtype=torch.bfloat16)
    table = torch.zeros(2, 32, dtype=INT)
    quest_score(torch.zeros(2, 8, 128), bounds, table, table[:, 0].clone(), torch.zeros(2, 8, 32), impl="triton")


def _indexer_score() -> None:
    q8 = torch.zeros(2, 64, 128).to(torch.float8_e4m3fn)
    keys, table = torch.zeros(128, 132, dtype=torch.uint8), torch.zeros(2, 2, dtype=INT)
    out = torch.zeros(2, 128)
    indexer_score(q8, torch.zeros(2, 64), keys, table, 64, table[:, 0].clone(), out, impl="triton")


def _meta_index(heads: int, dims: int, v_dims: int) -> MetaViews:
    return MetaViews.of(empty_meta_page(heads, dims, v_dims).repeat(3, 1), heads, dims, v_dims)


def _centroid_score() -> None:
    for heads, group, dims, dtype in (
        (2, 4, 128, torch.bfloat16),
        (2, 1, 80, torch.float32),
        (1, 16, 576, torch.bfloat16),
    ):
        views, table = _meta_index(heads, dims, 128), torch.zeros(2, 3, dtype=INT)
        q = torch.zeros(2, heads * group, dims, dtype=dtype)
        out = torch.zeros(2, heads * group, 192)
        centroid_score(q, views.centroids, views.log_size, table, table[:, 0].clone(), 0.1, out, impl="triton")


def _weighted_attn() -> None:
    for heads, group, dims, v_dims, dtype in (
        (2, 4, 128, 128, torch.bfloat16), (2, 1, 80, 64, torch.float32), (1, 128, 576, 512, torch.bfloat16)
    ):  # fmt: skip
        views, table = _meta_index(heads, dims, v_dims), torch.zeros(2, 3, dtype=INT)
        q, ids = torch.zeros(2, heads * group, dims, dtype=dtype), torch.zeros(2, heads, 90, dtype=INT)
        outputs = torch.zeros(2, heads * group, v_dims), torch.zeros(2, heads * group)
        index = views.centroids, views.value_sums, views.log_size
        weighted_attn(q, *index, table, ids, ids[..., 0].clone(), 0.1, *outputs, impl="triton")


def _pq_score() -> None:
    for parts, bits in ((2, 6), (4, 8), (3, 4)):
        table, pages = torch.zeros(2, 8, parts, 2**bits), torch.zeros(2, 4, dtype=INT)
        codes, limits = torch.zeros(9, 64, 2, parts, dtype=torch.uint8), pages[:, 0].clone()
        pq_score(table, codes, pages, limits, limits, torch.zeros(2, 8, 256), impl="triton")


def _decode_attn_token() -> None:
    form = RowFormat(128, KVDtype.BF16)
    rows = Rows(torch.zeros(256, 2, form.row_bytes, dtype=torch.uint8), form)
    table = torch.zeros(2, 1, 64, dtype=INT)
    outputs = torch.zeros(2, 8, 128), torch.zeros(2, 8)
    q = torch.zeros(2, 8, 128, dtype=torch.bfloat16)
    decode_attn_token(q, LayerKV(rows, rows, 128), table, table[..., 0].clone(), 0.1, *outputs, impl="triton")


def _with_tilings(name: str, launch: Callable[[], None]) -> None:
    """Launch with the first two tilings of a kernel."""
    kernel = import_module(f"gpu_tier.kernels.{name}.triton_impl").kernel
    for tiling in kernel.tilings[:2]:
        kernel.forced = tiling
        launch()


def _kmeans_assign() -> None:
    labels, most = torch.zeros(2, 256, dtype=INT), torch.zeros(2, dtype=INT)
    for dims, metric in ((128, "ip"), (32, "l2")):
        x, centroids = torch.zeros(2, 256, dims), torch.zeros(2, 64, dims)
        kmeans_assign(x, centroids, most, most, labels, metric=metric, impl="triton")


def _kmeans_update() -> None:
    labels, sizes = torch.zeros(2, 256, dtype=INT), torch.zeros(2, 64, dtype=INT)
    for dims in (128, 32):
        x, centroids = torch.zeros(2, 256, dims), torch.zeros(2, 64, dims)
        kmeans_update(x, labels, centroids, sizes, spherical=dims == 128, impl="triton")


def _segment_sum() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.zeros(256, 2, 128, dtype=dtype).transpose(0, 1)
        segment_sum(x, torch.zeros(2, 256, dtype=INT), torch.zeros(2, 64, 128), impl="triton")


def _token_runs() -> None:
    lines, numbers = torch.zeros(2, 8, dtype=INT), torch.zeros(2, dtype=INT)
    steady = SteadyPlan(lines, lines.long(), lines, lines, numbers, numbers)
    for heads in (1, 2):
        places = TokenPlaces(torch.zeros(3, heads, 9, dtype=INT), lines, lines.long(), 32, 128)
        out = TokenPlan.empty(2, 2, 72, torch.zeros(3, dtype=LONG))
        indices = torch.zeros(2, 2, 64, dtype=INT)
        lengths, active = torch.zeros(2, 2, dtype=INT), torch.zeros(2, dtype=torch.bool)
        token_runs(indices, lengths, numbers.long(), active, steady, places, out, impl="triton")


def _cluster_expand() -> None:
    requests, active = torch.zeros(2, dtype=LONG), torch.zeros(2, dtype=torch.bool)
    pages = torch.zeros(5, 2 * (68 + 68 + 180), dtype=INT).split([136, 136, 360], 1)
    firsts, sizes, hosts = (part.unflatten(1, (2, -1)) for part in pages)
    known = ClusterPages(torch.zeros(3, 4, dtype=INT), firsts, sizes, hosts, 8)
    for clusters in (16, 300):
        out = SelectedBlocks.empty(2, 2, 1200, requests.device)
        cluster_expand(torch.zeros(2, 2, clusters, dtype=INT), requests, active, known, out, impl="triton")


def _block_runs() -> None:
    requests, active = torch.zeros(2, dtype=LONG), torch.zeros(2, dtype=torch.bool)
    lines, numbers, wide = torch.zeros(2, 8, dtype=INT), torch.zeros(2, dtype=INT), torch.zeros(2, 2, 64, dtype=INT)
    steady = SteadyPlan(lines, lines.long(), lines, lines, numbers, numbers)
    blocks = SelectedBlocks.empty(2, 2, 64, requests.device)
    for piece in (8, 2):
        places = BlockPlaces(wide, torch.zeros(2, 2, 99, dtype=torch.uint8), wide, lines, 8, piece)
        out = BlockPlan.empty(2, 2, 8, 64 * 8 // piece, torch.zeros(6, dtype=LONG))
        block_runs(blocks, requests, active, steady, places, out, impl="triton")


CASES: dict[str, Callable[[], None]] = {
    "io_transfer": _io_transfer,
    "gather_copy": _gather_copy,
    "topk_select": _topk_select,
    "lse_merge": _lse_merge,
    "quest_score": _quest_score,
    "indexer_score": _indexer_score,
    "decode_attn_token": _decode_attn_token,
    "kmeans_assign": partial(_with_tilings, "kmeans_assign", _kmeans_assign),
    "kmeans_update": partial(_with_tilings, "kmeans_update", _kmeans_update),
    "segment_sum": partial(_with_tilings, "segment_sum", _segment_sum),
    "centroid_score": _centroid_score,
    "weighted_attn": _weighted_attn,
    "pq_score": _pq_score,
    "token_runs": _token_runs,
    "cluster_expand": _cluster_expand,
    "block_runs": _block_runs,
}


class _Driver:
    """What Triton asks of a driver in order to compile."""

    def get_current_target(self) -> Any:
        return import_module("triton.backends.compiler").GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0


def _compile_only() -> list[str]:
    """Let launches compile and stop there; return the list that compiled kernels are added to."""
    compiled: list[str] = []
    jit = import_module("triton.runtime.jit").JITFunction
    launch = jit.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        binary = launch(self, *args, grid=grid, warmup=True, **kwargs)
        assert binary.asm["cubin"]
        compiled.append(f"{self.fn.__module__}.{self.fn.__name__}")
        return binary

    jit.run = run
    import_module("triton.runtime").driver.set_active(_Driver())
    return compiled


if __name__ == "__main__":
    kernels = _compile_only()
    for name in sys.argv[1:]:
        before = len(kernels)
        CASES[name]()
        assert len(kernels) > before, f"{name} launched nothing"
    print(*sorted(set(kernels)), sep="\n")
