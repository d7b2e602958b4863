"""RetroInfer's meta index: pages of 64 clusters on the device, and the zones that heads retrieve and estimate.

A page has, of each KV head, the centroids ``bf16 [H, 64, d]``, then the sums of values ``bf16 [H, 64, dv]``, then the
logarithms of the sizes ``f32 [H, 64]``: -inf where a cluster is empty or none is yet. Cluster c of a request is place
``c % 64`` of the request's page ``c // 64``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvcm.gpu_tier.config import RetroInferConfig
from kvcm.gpu_tier.errors import ConfigError
from kvcm.gpu_tier.geometry import KVGeometry
from kvcm.gpu_tier.index.wave_index import most_clusters
from kvcm.gpu_tier.kernels.topk_select import topk_select
from kvcm.gpu_tier.pools.representation import RepresentationPool
from kvcm.gpu_tier.runtime import upload

__all__ = [
    "PAGE_CLUSTERS",
    "MetaIndex",
    "MetaViews",
    "ZoneSizes",
    "Zones",
    "cluster_sizes",
    "divide",
    "empty_meta_page",
    "meta_page_bytes",
    "rank",
]

PAGE_CLUSTERS = 64


def meta_page_bytes(num_heads: int, head_dim: int, v_head_dim: int) -> int:
    """Return the bytes of a page in one layer, a multiple of 256."""
    return num_heads * PAGE_CLUSTERS * (2 * head_dim + 2 * v_head_dim + 4)


def empty_meta_page(num_heads: int, head_dim: int, v_head_dim: int) -> Tensor:
    """Return a page without clusters, ``uint8 [page_bytes]``: zeros, and sizes whose logarithm is -inf."""
    page = torch.zeros(1, meta_page_bytes(num_heads, head_dim, v_head_dim), dtype=torch.uint8)
    MetaViews.of(page, num_heads, head_dim, v_head_dim).log_size.fill_(-torch.inf)
    return page[0]


@dataclass(frozen=True, slots=True)
class MetaViews:
    """The pages of a layer by content; views, so writes reach the pages.

    Attributes:
        centroids: ``bf16 [P, H, 64, d]`` means of the keys of each cluster.
        value_sums: ``bf16 [P, H, 64, dv]`` sums of its values.
        log_size: ``f32 [P, H, 64]`` logarithms of its tokens.
    """

    centroids: Tensor
    value_sums: Tensor
    log_size: Tensor

    @classmethod
    def of(cls, pages: Tensor, num_heads: int, head_dim: int, v_head_dim: int) -> MetaViews:
        """Return views of pages ``uint8 [P, page_bytes]``.

        Raises:
            ConfigError: the pages have another size.
        """
        page_bytes = meta_page_bytes(num_heads, head_dim, v_head_dim)
        if pages.dtype is not torch.uint8 or pages.ndim != 2 or pages.shape[1] != page_bytes:
            raise ConfigError("pages", (pages.dtype, *pages.shape), f"must be uint8 [pages, {page_bytes}]")
        clusters = num_heads * PAGE_CLUSTERS
        keys, values = 2 * clusters * head_dim, 2 * clusters * v_head_dim
        centroids = pages[:, :keys].view(torch.bfloat16)
        value_sums = pages[:, keys : keys + values].view(torch.bfloat16)
        log_size = pages[:, keys + values :].view(torch.float32)
        return cls(
            centroids.unflatten(1, (num_heads, PAGE_CLUSTERS, head_dim)),
            value_sums.unflatten(1, (num_heads, PAGE_CLUSTERS, v_head_dim)),
            log_size.unflatten(1, (num_heads, PAGE_CLUSTERS)),
        )


# The meta index of RetroInfer on the device: centroid, value sum and log size of every cluster, in pages of 64.


class MetaIndex:
    """The clusters of all layers and requests of one engine.

    The clusters of a request in a layer are numbered through; cluster c is place ``c % 64`` of its page ``c // 64``.
    Pages are set aside as a request grows, for the most clusters that its tokens can have, so that nothing is allocated
    while an index grows. A place that is not in use has log size -inf and is skipped by readers.

    Args:
        geometry: of the model's KV.
        settings: of the algorithm.
        max_requests: rows of the per-request tables.
        max_tokens: most tokens of a request.
        total_tokens: most tokens of all requests together.
        device: where the index is.
    """

    def __init__(
        self, geometry: KVGeometry, settings: RetroInferConfig, *, max_requests: int, max_tokens: int,
        total_tokens: int, device: torch.device,
    ) -> None:  # fmt: skip
        self._settings = settings
        self._device = device
        heads, sizes = geometry.num_kv_heads, (geometry.head_dim, geometry.v_head_dim)
        page_tokens = PAGE_CLUSTERS * settings.tokens_per_centroid
        longest = most_clusters(max_tokens, settings) * settings.tokens_per_centroid
        # A request's last page may be part-filled, so that many short ones need more pages than their tokens fill.
        pages = min(max_requests * -(-longest // page_tokens), total_tokens // page_tokens + max_requests)
        self.pool = RepresentationPool(
            num_layers=geometry.num_layers,
            page_tokens=page_tokens,
            page_bytes=meta_page_bytes(heads, *sizes),
            max_requests=max_requests,
            max_tokens=max(1, longest),
            total_tokens=max(1, pages) * page_tokens,
            device=device,
            fill=empty_meta_page(heads, *sizes),
        )
        self._views = [MetaViews.of(self.pool.layer(i), heads, *sizes) for i in range(geometry.num_layers)]

    def views(self, layer: int) -> MetaViews:
        """Return the pages of the layer at position `layer`, the pool's spare page last."""
        return self._views[layer]

    def table(self, requests: Tensor, clusters: int) -> Tensor:
        """Return the pages of the first `clusters` clusters of requests, ``int32 [B, P]``."""
        return self.pool.table[requests, : max(1, -(-clusters // PAGE_CLUSTERS))]

    def reserve(self, request: int, n_tokens: int) -> None:
        """Set pages aside for the clusters of so many tokens.

        Raises:
            ConfigError: a request cannot have so many tokens.
            PoolExhaustedError: too few pages are free; what the request had stays.
        """
        self.pool.reserve(request, self._indexed_tokens(n_tokens))

    def bytes_of(self, n_tokens: int) -> int:
        """Return the bytes that `reserve` sets aside, in all layers."""
        return self.pool.bytes_of(self._indexed_tokens(n_tokens))

    def _indexed_tokens(self, n_tokens: int) -> int:
        return most_clusters(n_tokens, self._settings) * self._settings.tokens_per_centroid

    def write(self, layer: int, request: int, first: int, centroids: Tensor, value_sums: Tensor, sizes: Tensor) -> None:
        """Store clusters ``first`` to ``first + m - 1`` of a request.

        Args:
            layer: position of the layer.
            request: whose clusters they are.
            first: number of the first.
            centroids: ``[H, m, d]``.
            value_sums: ``[H, m, dv]``.
            sizes: ``int32 [H, m]``; -inf is the log size of an empty one.
        """
        views, (pages, places) = self._views[layer], self._at(request, first, sizes.shape[1])
        views.centroids[pages, :, places] = centroids.transpose(0, 1).to(torch.bfloat16)
        views.value_sums[pages, :, places] = value_sums.transpose(0, 1).to(torch.bfloat16)
        views.log_size[pages, :, places] = sizes.T.float().log()

    def read(self, layer: int, request: int, first: int, clusters: int) -> tuple[Tensor, Tensor]:
        """Return centroids ``bf16 [H, m, d]`` and value sums ``bf16 [H, m, dv]`` of clusters from `first` on."""
        views, (pages, places) = self._views[layer], self._at(request, first, clusters)
        found = views.centroids[pages, :, places], views.value_sums[pages, :, places]
        return found[0].transpose(0, 1), found[1].transpose(0, 1)

    def _at(self, request: int, first: int, clusters: int) -> tuple[Tensor, Tensor]:
        numbers = torch.arange(first, first + clusters)
        pages = torch.tensor(self.pool.held(request))[numbers // PAGE_CLUSTERS]
        both = upload(torch.stack([pages, numbers % PAGE_CLUSTERS]), self._device)
        return both[0], both[1]

    def free(self, request: int) -> None:
        """Take a request's pages back; of one that has none nothing happens."""
        self.pool.free(request)


# Which clusters a head attends to exactly, and of which it estimates the attention: the zones of RetroInfer.

_LAST = torch.iinfo(torch.int32).max


@dataclass(frozen=True, slots=True)
class ZoneSizes:
    """The query of each row; 0 in rows that do not select.

    Clusters are ranked by their centroids' scores. The best r make the retrieval zone and the next e the estimation
    zone; empty clusters are in neither. The tokens of the retrieval zone have to fit the capacity of the head in the
    execution buffer: a cluster larger than the whole capacity is never retrieved, of the others those by rank whose
    sizes together fit. What does not fit is estimated. Everything is decided on the device.

    Attributes:
        clusters: ``int32 [B]`` clusters m.
        retrieved: ``int32 [B]`` clusters r of the retrieval zone.
        ranked: ``int32 [B]`` r and those of the estimation zone together, at most m.
        capacity: ``int32 [B]`` most tokens to retrieve.
        most_clusters: the largest m, on the host.
        most_retrieved: the largest r.
        most_ranked: the largest of `ranked`.
    """

    clusters: Tensor
    retrieved: Tensor
    ranked: Tensor
    capacity: Tensor
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
    # The logarithm of a size below 2^17 is exact enough in f32 to give the size back; larger ones fit in no buffer.
    return log_size[pages, heads, ids % PAGE_CLUSTERS].exp().round().long()


def divide(ranks: Tensor, log_size: Tensor, table: Tensor, asked: ZoneSizes, kernels: str = "auto") -> Zones:
    """Return the zones.

    Args:
        ranks: ``f32 [B, H, M]``, see `rank`.
        log_size: ``f32 [pages, H, 64]`` of the layer.
        table: ``int32 [B, P]`` pages of each row.
        asked: the query of each row.
        kernels: which implementations run.
    """
    ids, wanted = _ranked(ranks, asked, kernels)
    first = slice(0, asked.most_retrieved)
    place = torch.arange(asked.most_retrieved, device=ids.device)
    chosen = wanted[..., first] & (place < asked.retrieved[:, None, None])
    sizes = cluster_sizes(log_size, table, ids[..., first])
    capacity = asked.capacity[:, None, None]
    fits = chosen & (sizes <= capacity)
    retrieved = fits & ((sizes * fits).cumsum(-1) <= capacity)
    estimated = torch.cat([wanted[..., first] & ~retrieved, wanted[..., asked.most_retrieved :]], -1)
    return Zones(*_compact(ids[..., first], retrieved), *_compact(ids, estimated), (chosen & ~retrieved).sum())


def _ranked(ranks: Tensor, asked: ZoneSizes, kernels: str) -> tuple[Tensor, Tensor]:
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
