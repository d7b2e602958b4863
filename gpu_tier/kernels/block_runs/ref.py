"""The plan in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcm.gpu_tier.kernels.block_runs import BlockPlaces, BlockPlan
from kvcm.gpu_tier.kernels.cluster_expand import SelectedBlocks
from kvcm.gpu_tier.kernels.token_runs import SteadyPlan
from kvcm.gpu_tier.types import CopyRuns, Source

__all__ = ["run"]


def run(
    blocks: SelectedBlocks, requests: Tensor, active: Tensor, steady: SteadyPlan, places: BlockPlaces, out: BlockPlan
) -> None:
    """See `block_runs`."""
    rows, heads, _ = blocks.ids.shape
    valid = (places.place >= 0) & active[:, None, None]
    place = places.place.long().where(valid, 0)
    loaded = (places.loaded.gather(-1, place) > 0) & valid
    _count(blocks, valid, loaded, places.evicted, out.counters)
    offset = torch.arange(0, places.block_tokens, places.piece, device=place.device)
    tokens = (blocks.tokens.where(valid, 0)[..., None] - offset).clamp(0, places.piece).flatten(2)
    row = requests.where(active, 0)[:, None, None, None]
    slots = places.slots[row, place[..., None] * places.block_tokens + offset].flatten(2)
    host = (blocks.hosts.long()[..., None] * places.block_tokens + offset).flatten(2)
    from_host = loaded.repeat_interleave(len(offset), -1)
    kind = torch.where(from_host, int(Source.HOST), int(Source.CACHE)).where(tokens > 0, -1)
    dst = steady.end[:, None, None] + (blocks.offsets[..., None] + offset).flatten(2)
    src = host.where(from_host, slots.long())
    before = steady.kind.shape[1]
    of_steady = (steady.kind, steady.src, steady.dst, steady.tokens)
    for target, first, second in zip(_tables(out.runs), of_steady, (kind, src, dst, tokens), strict=True):
        target.view(rows, heads, -1)[..., :before] = first[:, None]
        target.view(rows, heads, -1)[..., before:] = second
    admitted = (torch.where(kind == int(Source.HOST), 0, -1), dst, slots, tokens)
    for target, values in zip(_tables(out.admissions), admitted, strict=True):
        target.view(rows, heads, -1).copy_(values)
    pieces = (blocks.lengths * len(offset)).where(active[:, None], 0)
    out.runs.count.copy_((pieces + before).where(active[:, None], 0).flatten())
    out.admissions.count.copy_(pieces.flatten())
    out.lens.copy_((steady.total[:, None] + blocks.totals).where(active[:, None], 0))


def _tables(runs: CopyRuns) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return runs.kind, runs.src, runs.dst, runs.tokens


def _count(blocks: SelectedBlocks, valid: Tensor, loaded: Tensor, evicted: Tensor, counters: Tensor) -> None:
    cached = valid & ~loaded
    tokens = (blocks.tokens.where(valid, 0).sum(), blocks.tokens.where(cached, 0).sum())
    counters += torch.stack([valid.sum(), cached.sum(), *tokens, loaded.sum(), (evicted >= 0).sum()])
