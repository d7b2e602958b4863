"""The meta index in memory: pages of 64 clusters, as the kernels that rank and estimate read them.

A page has, of each KV head, the centroids ``bf16 [H, 64, d]``, then the sums of values ``bf16 [H, 64, dv]``, then the
logarithms of the sizes ``f32 [H, 64]``: -inf where a cluster is empty or none is yet. Cluster c of a request is place
``c % 64`` of the request's page ``c // 64``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_tier.errors import ConfigError

__all__ = ["PAGE_CLUSTERS", "MetaViews", "empty_meta_page", "meta_page_bytes"]

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
    """The pages of a layer by what is in them; views, so what is written here is in the pages.

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
