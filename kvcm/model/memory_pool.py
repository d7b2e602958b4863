"""How the memory of a pool is divided: what the manager that hands it out and the engines that fill it must agree on.

A pool is cut into pages of 4096 bytes and, for handing out, into chunks. An extent is a run of whole pages inside one
chunk, so whoever is given an extent across the border of two chunks was given something wrong.
"""

from __future__ import annotations

__all__ = ["MIN_POOL_BYTES", "PAGE_BYTES", "chunk_bytes", "extent_bytes", "pool_bytes"]

PAGE_BYTES = 4096
MIN_POOL_BYTES = 1 << 20

_CHUNK_BYTES = 64 << 20
_LEAST_CHUNKS = 64  # of smaller pools too: a chunk serves one size of extents at a time


def extent_bytes(size: int) -> int:
    """Return how many bytes of a pool a part of `size` bytes takes: whole pages, at least one."""
    return max(1, -(-size // PAGE_BYTES)) * PAGE_BYTES


def chunk_bytes(capacity_bytes: int) -> int:
    """Return the size of the chunks of a pool of `capacity_bytes`; its last one may be shorter."""
    if capacity_bytes >= _LEAST_CHUNKS * _CHUNK_BYTES:
        return _CHUNK_BYTES
    return max(1, capacity_bytes // _LEAST_CHUNKS // PAGE_BYTES) * PAGE_BYTES


def pool_bytes(capacity_bytes: int) -> int:
    """Return how many of `capacity_bytes` can be handed out: whole pages."""
    return capacity_bytes // PAGE_BYTES * PAGE_BYTES
