"""Ties with libcachesim, which was written by others in another language: the same hits, to the last one.

It knows objects, not prefixes, so hits of objects are compared; its Belady inserts what it misses, and its S3-FIFO
fills main while it warms up.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from libcachesim import FIFO, LFU, LRU, S3FIFO, Belady, Request, Sieve

from kvcm.optimizer.policy_spec import parse_policy
from kvcm.optimizer.replay import replay
from kvcm.optimizer.trace import Trace

CACHES = {"lru": LRU, "fifo": FIFO, "lfu": LFU, "sieve": Sieve, "s3fifo:warmup": S3FIFO, "belady:forced": Belady}
NEVER = (1 << 63) - 1
POWER_OF_TABLE = 18


def next_accesses(blocks: list[int]) -> list[int]:
    ahead: dict[int, int] = {}
    found = []
    for position in range(len(blocks) - 1, -1, -1):
        found.append(ahead.get(blocks[position], NEVER))
        ahead[blocks[position]] = position
    return found[::-1]


@pytest.mark.parametrize("name", ["mooncake_conversation", "mooncake_synthetic"])
@pytest.mark.parametrize("policy", CACHES)
def test_hits_of_objects_are_those_of_libcachesim(name: str, policy: str, real_trace: Callable[[str], Trace]) -> None:
    trace = real_trace(name)
    blocks = trace.blocks.tolist()
    coming = next_accesses(blocks) if policy == "belady:forced" else [NEVER] * len(blocks)
    request = Request()
    for capacity in (100, trace.unique_blocks // 10, trace.unique_blocks // 3):
        cache = CACHES[policy](capacity, hashpower=POWER_OF_TABLE)
        hits = 0
        for block, following in zip(blocks, coming, strict=True):
            request.obj_id, request.next_access_vtime = block + 1, following
            hits += cache.get(request)
        assert replay(trace, parse_policy(policy), capacity).hits.object_blocks == hits
