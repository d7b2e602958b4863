"""Random clusters of several rows, in pages that lie anywhere, as the kernels read them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvcm.gpu_tier.index.meta_index import PAGE_CLUSTERS, MetaViews, empty_meta_page


@dataclass(frozen=True)
class Shape:
    """Heads and dims of an index."""

    heads: int
    group: int
    dims: int
    v_dims: int

    @property
    def q_heads(self) -> int:
        return self.heads * self.group

    def __str__(self) -> str:
        return f"{self.heads}x{self.group}-d{self.dims}-dv{self.v_dims}"


@dataclass(frozen=True, slots=True)
class Clusters:
    """The clusters of B rows.

    Attributes:
        views: pages of all rows; centroids of empty clusters are NaN.
        page_table: ``int32 [B, P]``; some pages are negative.
        n_clusters: ``int32 [B]``.
    """

    views: MetaViews
    page_table: Tensor
    n_clusters: Tensor

    def of(self, row: int, head: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return, in f64, centroids, sums and sizes of all places of a row, and which of them are clusters."""
        pages = self.page_table[row].long()
        parts = [
            view[pages.clamp_min(0), head].flatten(0, 1).double()
            for view in (self.views.centroids, self.views.value_sums, self.views.log_size)
        ]
        exists = (parts[2] > -torch.inf) & (pages >= 0).repeat_interleave(PAGE_CLUSTERS)
        centroids, sums = (part.masked_fill(~exists[:, None], 0.0) for part in parts[:2])
        return centroids, sums, parts[2].exp(), exists

    def to(self, device: torch.device) -> Clusters:
        """Return the same on a device."""
        moved = MetaViews(*(_moved(view, device) for view in _fields(self.views)))
        return Clusters(moved, self.page_table.to(device), self.n_clusters.to(device))


def _fields(views: MetaViews) -> tuple[Tensor, Tensor, Tensor]:
    return views.centroids, views.value_sums, views.log_size


def _moved(view: Tensor, device: torch.device) -> Tensor:
    """Return a view of the same strides on a device."""
    memory = torch.empty((view.untyped_storage().nbytes(),), dtype=torch.uint8, device=device).view(view.dtype)
    there = memory.as_strided(view.shape, view.stride(), view.storage_offset())
    return there.copy_(view)


def random_clusters(shape: Shape, counts: list[int], seed: int, *, pages: int = 3) -> Clusters:
    """Return rows of so many clusters, a tenth of which are empty."""
    g = torch.Generator().manual_seed(seed)
    rows = len(counts)
    memory = empty_meta_page(shape.heads, shape.dims, shape.v_dims).repeat(rows * pages + 2, 1)
    views = MetaViews.of(memory, shape.heads, shape.dims, shape.v_dims)
    size = torch.randint(1, 90, views.log_size.shape, generator=g).float()
    views.centroids.copy_(torch.randn(views.centroids.shape, generator=g))
    views.value_sums.copy_(torch.randn(views.value_sums.shape, generator=g) * size[..., None])
    empty = torch.rand(size.shape, generator=g) < 0.1
    views.log_size.copy_(size.log().masked_fill(empty, -torch.inf))
    views.centroids[empty] = torch.nan
    views.value_sums[empty] = 1e30
    table = torch.randperm(rows * pages, generator=g).view(rows, pages).int()
    table[-1, 1] = -1
    return Clusters(views, table, torch.tensor(counts, dtype=torch.int32))
