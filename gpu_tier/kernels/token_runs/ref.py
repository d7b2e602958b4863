"""The plan in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcm.gpu_tier.kernels.token_runs import SteadyPlan, TokenPlaces, TokenPlan
from kvcm.gpu_tier.types import Source

__all__ = ["run"]


def run(
    indices: Tensor, lengths: Tensor, requests: Tensor, active: Tensor, steady: SteadyPlan, places: TokenPlaces,
    out: TokenPlan,
) -> None:  # fmt: skip
    """See `token_runs`."""
    rows, heads, width = indices.shape
    before = steady.kind.shape[1]
    count = lengths.where(active[:, None], 0)
    number = torch.arange(width, dtype=torch.int32, device=indices.device)
    kind, src = _sources(indices, number < count[..., None], requests.where(active, 0), places, out.counters)
    tokens = (number < count[..., None]).int()
    dst = (steady.end[:, None, None] + number).expand(-1, heads, -1)
    of_items = (kind, src, dst, tokens)
    of_steady = (steady.kind, steady.src, steady.dst, steady.tokens)
    targets = (out.runs.kind, out.runs.src, out.runs.dst, out.runs.tokens)
    for target, first, second in zip(targets, of_steady, of_items, strict=True):
        target.view(rows, heads, -1)[..., :before] = first[:, None]
        target.view(rows, heads, -1)[..., before:] = second
    out.runs.count.copy_((before + lengths).where(active[:, None], 0).flatten())
    out.lens.copy_((steady.total[:, None] + lengths).where(active[:, None], 0))


def _sources(
    indices: Tensor, inside: Tensor, requests: Tensor, places: TokenPlaces, counters: Tensor
) -> tuple[Tensor, Tensor]:
    """Return kind and slot of each token, and count."""
    valid = inside & (indices >= 0)
    tokens = indices.long().where(valid, places.sink)
    row = requests[:, None, None]
    head = torch.arange(places.place_of.shape[1], device=indices.device)[:, None]
    place = places.place_of[row, head, (tokens - places.sink) // places.unit]
    cached = valid & (place >= 0)
    offset = (tokens - places.sink) % places.unit
    slot = places.slots[row, (place * places.unit + offset).where(cached, 0)].long()
    src = slot.where(cached, places.host_loc[row, tokens])
    found = valid & (src >= 0)
    counters += torch.stack([valid.sum(), cached.sum(), (valid & ~found).sum()])
    kind = torch.where(cached, int(Source.CACHE), int(Source.HOST)).where(found, -1)
    return kind, src
