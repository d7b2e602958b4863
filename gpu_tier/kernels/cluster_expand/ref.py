"""The expansion in torch: a search in the running sums of the clusters' blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcm.gpu_tier.kernels.cluster_expand import ClusterPages, SelectedBlocks

__all__ = ["run"]


def run(ids: Tensor, requests: Tensor, active: Tensor, pages: ClusterPages, out: SelectedBlocks) -> None:
    """See `cluster_expand`."""
    size, width = pages.block_tokens, out.ids.shape[2]
    table = pages.table[requests.where(active, 0)]
    valid = (ids >= 0) & active[:, None, None]
    for wide in (out.tokens, out.hosts, out.offsets, out.lengths, out.totals):
        wide.zero_()
    out.ids.fill_(-1)
    if not ids.shape[2] or not width:
        return
    sizes = _get(pages.sizes, table, ids.clamp_min(0)).where(valid, 0)
    firsts = _get(pages.firsts, table, ids.clamp_min(0))
    counts = -(-sizes // size)
    ends = counts.cumsum(-1)
    place = torch.arange(width, device=ids.device).repeat(*ids.shape[:2], 1)
    which = torch.searchsorted(ends, place, right=True).clamp_max(ids.shape[2] - 1)
    inside = place < ends[..., -1:]
    number = place - (ends - counts).gather(-1, which)
    block = (firsts.gather(-1, which) + number).where(inside, 0)
    tokens = (sizes.gather(-1, which) - number * size).clamp_max(size).where(inside, 0)
    out.ids.copy_(block.where(inside, -1))
    out.tokens.copy_(tokens)
    out.hosts.copy_(_get(pages.hosts, table, block).where(inside, 0))
    out.offsets.copy_(((sizes.cumsum(-1) - sizes).gather(-1, which) + number * size).where(inside, 0))
    out.lengths.copy_(ends[..., -1].clamp_max(width))
    out.totals.copy_(tokens.sum(-1))


def _get(entries: Tensor, table: Tensor, numbers: Tensor) -> Tensor:
    """Return entries of pages, ``int64 [B, H, ·]``."""
    width, heads = entries.shape[2], numbers.shape[1]
    numbers = numbers.long()
    page = table[:, None].expand(-1, heads, -1).gather(2, (numbers // width).clamp_max(table.shape[1] - 1))
    head = torch.arange(heads, device=numbers.device)[:, None]
    return entries[page.clamp_min(0).long(), head, numbers % width].long()
