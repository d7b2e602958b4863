"""Pages of the meta index: what is where."""

from __future__ import annotations

import pytest
import torch

from gpu_tier.errors import ConfigError
from gpu_tier.index.meta_pages import PAGE_CLUSTERS, MetaViews, empty_meta_page, meta_page_bytes


@pytest.mark.parametrize(("heads", "dims", "v_dims"), [(2, 16, 8), (1, 576, 512), (8, 3, 5)])
def test_views_tile_the_page(heads: int, dims: int, v_dims: int) -> None:
    pages = torch.randint(0, 256, (3, meta_page_bytes(heads, dims, v_dims)), dtype=torch.uint8)
    views = MetaViews.of(pages, heads, dims, v_dims)
    assert views.centroids.shape == (3, heads, PAGE_CLUSTERS, dims)
    assert views.value_sums.shape == (3, heads, PAGE_CLUSTERS, v_dims)
    assert views.log_size.shape == (3, heads, PAGE_CLUSTERS)
    parts = [view.contiguous().view(torch.uint8).flatten(1) for view in (views.centroids, views.value_sums)]
    assert torch.equal(torch.cat([*parts, views.log_size.contiguous().view(torch.uint8).flatten(1)], dim=1), pages)


def test_an_empty_page_has_no_clusters() -> None:
    views = MetaViews.of(empty_meta_page(2, 8, 4)[None], 2, 8, 4)
    assert bool((views.log_size == -torch.inf).all())
    assert not views.centroids.any()
    assert not views.value_sums.any()


def test_pages_of_another_size_are_refused() -> None:
    pages = torch.zeros(2, meta_page_bytes(2, 8, 4), dtype=torch.uint8)
    with pytest.raises(ConfigError, match="pages"):
        MetaViews.of(pages, 2, 8, 8)
    with pytest.raises(ConfigError, match="pages"):
        MetaViews.of(pages.int(), 2, 8, 4)
