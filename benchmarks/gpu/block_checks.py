"""What the kernels of a block cache of clusters compute on random inputs; see `kernel_checks`."""

from __future__ import annotations

import torch
from check_case import Check, Outputs, Sizes
from torch import Tensor

from kvcm.gpu_tier.kernels.block_runs import BlockPlaces, BlockPlan, block_runs
from kvcm.gpu_tier.kernels.cluster_expand import ClusterPages, SelectedBlocks, cluster_expand
from kvcm.gpu_tier.kernels.token_runs import SteadyPlan
from kvcm.gpu_tier.runtime import DeviceRuntime
from kvcm.gpu_tier.types import CopyRuns

__all__ = ["block_checks"]

_HEADS, _BLOCK, _PAGE = 2, 8, 68
_PAGE_BLOCKS = 3 * _PAGE


def block_checks(runtime: DeviceRuntime, sizes: Sizes) -> list[Check]:
    """Return the checks: clusters to blocks, and plans of blocks that lie together and of such that do not."""
    return [_expansion(runtime, sizes), *(_plans(runtime, sizes, piece) for piece in (_BLOCK, 2))]


def _ints(runtime: DeviceRuntime, high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape, dtype=torch.int32).to(runtime.device)


def _expansion(runtime: DeviceRuntime, sizes: Sizes) -> Check:
    rows, pages = sizes.batch, max(2, sizes.tokens // 1024)
    widths = [_HEADS * width for width in (_PAGE, _PAGE, _PAGE_BLOCKS)]
    parts = _ints(runtime, 40, rows * pages, sum(widths)).split(widths, 1)
    firsts, tokens, hosts = (part.unflatten(1, (_HEADS, -1)) for part in parts)
    firsts += _ints(runtime, pages * _PAGE_BLOCKS - 50, rows * pages, _HEADS, _PAGE)
    table = torch.randperm(rows * pages).view(rows, pages).int().to(runtime.device)
    known = ClusterPages(table, firsts, tokens, hosts, _BLOCK)
    picks = min(pages * _PAGE, sizes.selected // 16)
    ids = torch.stack([torch.randperm(pages * _PAGE) for _ in range(rows * _HEADS)])[:, :picks].int()
    ids = ids.view(rows, _HEADS, picks).to(runtime.device)
    ids[0, :, 3:] = -1
    requests, active = torch.randperm(rows).to(runtime.device), (torch.arange(rows) != 1).to(runtime.device)

    def run(impl: str) -> Outputs:
        out = SelectedBlocks.empty(rows, _HEADS, 4 * picks, runtime.device)
        cluster_expand(ids, requests, active, known, out, impl=impl)
        wide = (out.ids, out.tokens, out.hosts, out.offsets, out.lengths, out.totals)
        return tuple(tensor.cpu() for tensor in wide)

    return Check("cluster_expand", f"{picks} clusters", run)


def _plans(runtime: DeviceRuntime, sizes: Sizes, piece: int) -> Check:
    device, rows, width = runtime.device, sizes.batch, sizes.selected // _BLOCK
    lengths = torch.randint(0, width + 1, (rows, _HEADS), dtype=torch.int32).to(device)
    inside = torch.arange(width, device=device) < lengths[..., None]
    tokens = (_ints(runtime, _BLOCK, rows, _HEADS, width) + 1).where(inside, 0)
    offsets = (tokens.cumsum(-1) - tokens).int()
    ids, hosts = (_ints(runtime, 9999, rows, _HEADS, width) for _ in range(2))
    blocks = SelectedBlocks(ids, tokens, hosts, offsets, lengths, tokens.sum(-1).int())
    place = torch.rand(rows, _HEADS, 2 * width).argsort(-1)[..., :width].int().to(device).where(inside, -1)
    places = BlockPlaces(
        place.contiguous(), _ints(runtime, 2, rows, _HEADS, 2 * width + 1).byte(),
        _ints(runtime, 9, rows, _HEADS, width) - 1, _ints(runtime, 1 << 20, rows, 2 * width * _BLOCK), _BLOCK, piece,
    )  # fmt: skip
    lines = [_ints(runtime, 1000, rows, 20) for _ in range(3)]
    numbers = [_ints(runtime, 99, rows) for _ in range(2)]
    steady = SteadyPlan(torch.zeros_like(lines[0]), lines[0].long(), *lines[1:], *numbers)
    requests, active = torch.randperm(rows).to(device), (torch.arange(rows) != 1).to(device)

    def run(impl: str) -> Outputs:
        counters = torch.zeros(6, dtype=torch.int64, device=device)
        out = BlockPlan.empty(rows, _HEADS, 20, width * (_BLOCK // piece), counters)
        block_runs(blocks, requests, active, steady, places, out, impl=impl)
        return (*_used(out.runs), *_used(out.admissions), out.lens.cpu(), counters.cpu())

    return Check("block_runs", f"pieces of {piece} of {_BLOCK} tokens", run)


def _used(runs: CopyRuns) -> Outputs:
    used = torch.arange(runs.kind.shape[1], device=runs.kind.device) < runs.count[:, None]
    tables = (runs.kind, runs.src, runs.dst, runs.tokens)
    return (*(table.where(used, 0).cpu() for table in tables), runs.count.cpu())
