"""Sidecars of algorithms whose representations are pages of fixed bytes: a page's sidecar is its pages, one by one.

A page of the KV pools is a whole number of the representation's pages, so sidecars of neighbouring pages concatenate.
"""

from __future__ import annotations

from gpu_tier.algorithms.base import Sidecar
from gpu_tier.errors import ConfigError
from gpu_tier.pools.representation import RepresentationPool

__all__ = ["export_pages", "import_pages"]


def export_pages(pool: RepresentationPool, page_size: int, request: int, start: int, stop: int) -> Sidecar:
    """Return the representations of the whole pages in [start, stop); waits for the device."""
    first, end = -(-start // page_size), stop // page_size
    end = max(first, end)
    per_page = page_size // pool.page_tokens
    data = pool.export_pages(request, first * per_page, end * per_page)
    return Sidecar(first * page_size, data.reshape(end - first, per_page * data.shape[1]))


def import_pages(pool: RepresentationPool, page_size: int, request: int, sidecar: Sidecar) -> int:
    """Take a sidecar over and return the tokens it covers.

    Raises:
        ConfigError: it does not start at a page or has another shape.
        AllocationError: too little was reserved for the request.
    """
    if sidecar.start % page_size:
        raise ConfigError("start", sidecar.start, f"must be a multiple of the page size {page_size}")
    per_page = page_size // pool.page_tokens
    page_bytes = per_page * pool.num_layers * pool.page_bytes
    if sidecar.data.ndim != 2 or sidecar.data.shape[1] != page_bytes:
        raise ConfigError("data", tuple(sidecar.data.shape), f"must be rows of {page_bytes} bytes")
    pages = len(sidecar.data)
    data = sidecar.data.reshape(pages * per_page, pool.num_layers * pool.page_bytes)
    pool.import_pages(request, sidecar.start // pool.page_tokens, data)
    return pages * page_size
