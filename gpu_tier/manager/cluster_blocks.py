"""The cluster mapping table on the device: which blocks each cluster of a request consists of, and where on the host.

The blocks of a request, layer and head are numbered through, cluster after cluster, so a cluster is a first block and a
number of tokens. Both lie in pages of the request, and so does the place of every block in the `WaveStore`: from there
a kernel expands selected clusters to their blocks (`gpu_tier.kernels.cluster_expand`).
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpu_tier.errors import StateError
from gpu_tier.geometry import KVGeometry
from gpu_tier.kernels.cluster_expand import ClusterPages
from gpu_tier.pools.representation import RepresentationPool
from gpu_tier.runtime import DeviceRuntime, upload

__all__ = ["ClusterBlocks"]

_PAGE_TOKENS = 1024
_ODD_CLUSTERS = 4  # more than the average says, of segments that end with a prompt or its prefix
_ID_BYTES = 4


class ClusterBlocks:
    """The tables of all layers and requests.

    Args:
        geometry: of the model's KV.
        block_tokens: tokens of a block.
        tokens_per_centroid: tokens of a cluster on average; some segments have a cluster more.
        max_requests: rows of the per-request tables.
        max_tokens: most tokens of a request.
        total_tokens: most tokens of all requests together.
        runtime: of the device.

    Attributes:
        most_blocks: more blocks no head of a request has.
    """

    def __init__(
        self, geometry: KVGeometry, *, block_tokens: int, tokens_per_centroid: int, max_requests: int, max_tokens: int,
        total_tokens: int, runtime: DeviceRuntime,
    ) -> None:  # fmt: skip
        self._geometry, self._device, self._block_tokens = geometry, runtime.device, block_tokens
        heads = geometry.num_kv_heads
        self._page_clusters = -(-_PAGE_TOKENS // tokens_per_centroid) + _ODD_CLUSTERS
        self._page_blocks = -(-(_PAGE_TOKENS + self._page_clusters * (block_tokens - 1)) // block_tokens)
        self.pool = RepresentationPool(
            num_layers=geometry.num_layers, page_tokens=_PAGE_TOKENS,
            page_bytes=_ID_BYTES * heads * (2 * self._page_clusters + self._page_blocks), max_requests=max_requests,
            max_tokens=max_tokens, total_tokens=(-(-total_tokens // _PAGE_TOKENS) + max_requests) * _PAGE_TOKENS,
            device=runtime.device,
        )  # fmt: skip
        self.most_blocks = self.pool.table.shape[1] * self._page_blocks
        self._layers = [self._views(layer) for layer in range(geometry.num_layers)]
        self._known: dict[tuple[int, int], tuple[int, NDArray[np.int64]]] = {}  # clusters, and blocks of each head

    def _views(self, layer: int) -> ClusterPages:
        heads = self._geometry.num_kv_heads
        widths = (self._page_clusters, self._page_clusters, self._page_blocks)
        ids = self.pool.layer(layer).view(torch.int32)
        firsts, sizes, hosts = (
            part.unflatten(1, (heads, -1)) for part in ids.split([heads * width for width in widths], dim=1)
        )
        return ClusterPages(self.pool.table, firsts, sizes, hosts, self._block_tokens)

    def reserve(self, request: int, n_tokens: int) -> None:
        """Make room for a request of so many tokens.

        Raises:
            PoolExhaustedError: there is none; what the request had stays.
        """
        self.pool.reserve(request, n_tokens)

    def release(self, request: int) -> None:
        """Forget a request; one that is not known too."""
        self.pool.free(request)
        for layer in range(self._geometry.num_layers):
            self._known.pop((layer, request), None)

    def clusters(self, layer: int, request: int) -> int:
        """Return the clusters of a request that are known in the layer at a position."""
        return self._known.get((layer, request), (0, np.zeros(0)))[0]

    def append(self, layer: int, request: int, sizes: NDArray[np.int32], hosts: NDArray[np.int32]) -> None:
        """Add the clusters of a segment.

        Args:
            layer: position of the layer.
            request: row of the per-request tables.
            sizes: ``int32 [H, m]`` tokens of each.
            hosts: their blocks of the store: head after head, in each cluster after cluster.

        Raises:
            StateError: no room was made for so many.
        """
        heads, new = sizes.shape
        known, blocks = self._known.get((layer, request), (0, np.zeros(heads, np.int64)))
        counts = -(-sizes // self._block_tokens)
        added = counts.sum(1)
        pages = np.asarray(self.pool.held(request), np.int64)
        if known + new > len(pages) * self._page_clusters or (blocks + added).max() > len(pages) * self._page_blocks:
            raise StateError(f"request {request} has room for {len(pages) * _PAGE_TOKENS} tokens of clusters only")
        firsts = blocks[:, None] + counts.cumsum(1) - counts
        clusters = np.broadcast_to(np.arange(known, known + new), (heads, new))
        of_clusters = np.repeat(np.arange(heads), new)
        tables = self._layers[layer]
        self._put(tables.firsts, pages, of_clusters, clusters.ravel(), firsts.ravel())
        self._put(tables.sizes, pages, of_clusters, clusters.ravel(), sizes.ravel())
        numbers = np.concatenate([np.arange(first, first + count) for first, count in zip(blocks, added, strict=True)])
        self._put(tables.hosts, pages, np.repeat(np.arange(heads), added), numbers, hosts)
        self._known[layer, request] = known + new, blocks + added

    def _put(
        self, table: Tensor, pages: NDArray[np.int64], heads: NDArray[np.int64], numbers: NDArray[np.int64],
        values: NDArray[np.int32] | NDArray[np.int64],
    ) -> None:  # fmt: skip
        width = table.shape[2]
        where = np.stack([pages[numbers // width], heads, numbers % width, values])
        page, head, place, value = upload(torch.from_numpy(where), self._device)
        table[page, head, place] = value.int()

    def pages(self, layer: int) -> ClusterPages:
        """Return what is known of the clusters and blocks of the layer at a position."""
        return self._layers[layer]

    @property
    def nbytes(self) -> int:
        """Bytes of the tables."""
        return self.pool.nbytes
