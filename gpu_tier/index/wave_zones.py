"""Which clusters a head attends to exactly, and of which it estimates the attention: the zones of RetroInfer.

Clusters are ranked by their centroids' scores. The best r make the retrieval zone and the next e the estimation zone;
empty clusters are in neither. The tokens of the retrieval zone have to fit the room that the head has in the execution
buffer: a cluster larger than the whole room is never retrieved, of the others those by rank whose sizes together fit.
What does not fit is estimated. Everything is decided on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_tier.index.meta_pages import PAGE_CLUSTERS
from gpu_tier.kernels.topk_select import topk_select

__all__ = ["Asked", "Zones", "cluster_sizes", "divide", "rank"]

_LAST = torch.iinfo(torch.int32).max


@dataclass(frozen=True, slots=True)
class Asked:
    """What is asked of each row; 0 in rows that do not select.

    Attributes:
        clusters: ``int32 [B]`` clusters m.
        retrieved: ``int32 [B]`` clusters r of the retrieval zone.
        ranked: ``int32 [B]`` r and those of the estimation zone together, at most m.
        room: ``int32 [B]`` tokens that may be retrieved.
        most_clusters: the largest m, on the host.
        most_retrieved: the largest r.
        most_ranked: the largest of `ranked`.
    """

    clusters: Tensor
    retrieved: Tensor
    ranked: Tensor
    room: Tensor
    most_clusters: int
    most_retrieved: int
    most_ranked: int


@dataclass(frozen=True, slots=True)
class Zones:
    """The zones of each row and head; ids ascend, -1 behind the lengths.

    Attributes:
        retrieved: ``int32 [B, H, R]`` clusters that are attended to exactly.
        retrieved_lengths: ``int32 [B, H]``.
        estimated: ``int32 [B, H, E]`` clusters whose attention is estimated.
        estimated_lengths: ``int32 [B, H]``.
        overflow: ``int64 []`` clusters that did not fit their retrieval zone, of all rows and heads; among `estimated`.
    """

    retrieved: Tensor
    retrieved_lengths: Tensor
    estimated: Tensor
    estimated_lengths: Tensor
    overflow: Tensor

    @classmethod
    def none(cls, rows: int, heads: int, device: torch.device) -> Zones:
        """Return the zones of requests without clusters."""
        ids = torch.empty(rows, heads, 0, dtype=torch.int32, device=device)
        lengths = torch.zeros(rows, heads, dtype=torch.int32, device=device)
        return cls(ids, lengths, ids, lengths, torch.zeros((), dtype=torch.int64, device=device))


def rank(scores: Tensor, heads: int, rule: str) -> Tensor:
    """Return what clusters are ranked by, ``f32 [B, H, M]``; -inf for those that are empty or none.

    Args:
        scores: ``f32 [B, Hq, M]``, already multiplied by the softmax's scale.
        heads: KV heads H.
        rule: sum_softmax (Σ over the query heads of a KV head of each one's softmax over the clusters) or max_ip (the
            largest score). With one query head both give the order of the scores.
    """
    by_head: Tensor = scores.unflatten(1, (heads, scores.shape[1] // heads))
    if rule == "max_ip":
        return by_head.amax(2)
    # A row without clusters has softmax NaN, which goes with the rest of its -inf.
    return by_head.softmax(-1).sum(2).masked_fill(by_head[:, :, 0] == -torch.inf, -torch.inf)


def cluster_sizes(log_size: Tensor, table: Tensor, ids: Tensor) -> Tensor:
    """Return the tokens of clusters, ``int64 [B, H, R]``; of negative ids those of cluster 0.

    Args:
        log_size: ``f32 [pages, H, 64]``.
        table: ``int32 [B, P]`` pages of each row.
        ids: ``int32 [B, H, R]``.
    """
    ids = ids.clamp_min(0).long()
    pages = table[:, None].expand(-1, ids.shape[1], -1).gather(2, ids // PAGE_CLUSTERS).long()
    heads = torch.arange(ids.shape[1], device=ids.device)[:, None]
    # The logarithm of a size below 2^17 is exact enough in f32 to give the size back; larger ones fit in no room.
    return log_size[pages, heads, ids % PAGE_CLUSTERS].exp().round().long()


def divide(ranks: Tensor, log_size: Tensor, table: Tensor, asked: Asked, kernels: str = "auto") -> Zones:
    """Return the zones.

    Args:
        ranks: ``f32 [B, H, M]``, see `rank`.
        log_size: ``f32 [pages, H, 64]`` of the layer.
        table: ``int32 [B, P]`` pages of each row.
        asked: what is asked of each row.
        kernels: which implementations run.
    """
    ids, wanted = _ranked(ranks, asked, kernels)
    first = slice(0, asked.most_retrieved)
    place = torch.arange(asked.most_retrieved, device=ids.device)
    chosen = wanted[..., first] & (place < asked.retrieved[:, None, None])
    sizes = cluster_sizes(log_size, table, ids[..., first])
    room = asked.room[:, None, None]
    fits = chosen & (sizes <= room)
    retrieved = fits & ((sizes * fits).cumsum(-1) <= room)
    estimated = torch.cat([wanted[..., first] & ~retrieved, wanted[..., asked.most_retrieved :]], -1)
    return Zones(*_compact(ids[..., first], retrieved), *_compact(ids, estimated), (chosen & ~retrieved).sum())


def _ranked(ranks: Tensor, asked: Asked, kernels: str) -> tuple[Tensor, Tensor]:
    """Return the best clusters, the best first, ``int32 [B, H, K]``, and which of them are in one of the zones."""
    shape = (*ranks.shape[:2], asked.most_ranked)
    ids = torch.empty(shape, dtype=torch.int32, device=ranks.device)
    counts = torch.empty(shape[:2], dtype=torch.int32, device=ranks.device)
    topk_select(ranks, asked.clusters, asked.most_ranked, ids, counts, impl=kernels)
    own = ranks.gather(-1, ids.clamp_min(0).long()).masked_fill(ids < 0, -torch.inf)
    # Ids ascend and the order is stable: of equal ranks the lower id comes first.
    own, order = own.sort(dim=-1, descending=True, stable=True)
    place = torch.arange(asked.most_ranked, device=ranks.device)
    return ids.gather(-1, order), (own > -torch.inf) & (place < asked.ranked[:, None, None])


def _compact(ids: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """Return the ids that are kept, ascending, -1 behind them, and how many they are."""
    ordered = torch.where(kept, ids, _LAST).sort(-1).values
    return torch.where(ordered == _LAST, -1, ordered), kept.sum(-1, dtype=torch.int32)
