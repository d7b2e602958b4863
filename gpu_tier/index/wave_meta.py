"""The meta index of RetroInfer on the device: centroid, value sum and log size of every cluster, in pages of 64.

The clusters of a request in a layer are numbered through; cluster c is place ``c % 64`` of its page ``c // 64``. Pages
are set aside as a request grows, for the most clusters that its tokens can have, so that nothing is allocated while an
index grows. A place that is not in use has log size -inf and is passed over by whoever reads it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_tier.geometry import KVGeometry
from gpu_tier.index.meta_pages import PAGE_CLUSTERS, MetaViews, empty_meta_page, meta_page_bytes
from gpu_tier.index.wave_index import most_clusters
from gpu_tier.pools.representation import RepresentationPool
from gpu_tier.retrieval_config import RetroInferConfig
from gpu_tier.runtime import upload

__all__ = ["MetaIndex"]


class MetaIndex:
    """The clusters of all layers and requests of one engine.

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
