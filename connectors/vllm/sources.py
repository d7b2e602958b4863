"""Which of vLLM's tiers a stored block counts as."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvcm.protocol.meta_service_pb2 import ST_3FS, ST_MOONCAKE, ST_NFS, ST_TAIRMEMPOOL, ST_VCNS_3FS

__all__ = ["tokens_by_source"]

_SOURCES: Mapping[int, CacheHitSource] = {
    ST_NFS: CacheHitSource.DISK,
    ST_3FS: CacheHitSource.DISK,
    ST_VCNS_3FS: CacheHitSource.DISK,
    ST_MOONCAKE: CacheHitSource.P2P,
    ST_TAIRMEMPOOL: CacheHitSource.HOST,
}
_TYPE_FIELD = b"\x08"  # a location begins with field 1, its type, as a varint


def tokens_by_source(locations: Sequence[bytes], block_tokens: int) -> dict[CacheHitSource, int]:
    """Return how many tokens come from where.

    Args:
        locations: of the blocks, encoded. They are not decoded here: the type is their second byte.
        block_tokens: tokens per block.
    """
    types = Counter([each[1] if each[:1] == _TYPE_FIELD else 0 for each in locations])
    tokens: Counter[CacheHitSource] = Counter()
    for storage_type, blocks in types.items():
        tokens[_SOURCES.get(storage_type, CacheHitSource.EXTERNAL_UNSPECIFIED)] += blocks * block_tokens
    return dict(tokens)
