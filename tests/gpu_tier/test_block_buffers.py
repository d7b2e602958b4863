"""The buffers of residency `blocks`: steady places stay where they are, the cache behind them grows."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from gpu_tier.errors import PoolExhaustedError
from gpu_tier.geometry import KVGeometry, KVKind
from gpu_tier.manager.block_residency import BlockResidency
from gpu_tier.manager.buffers import SparseBuffers
from gpu_tier.manager.execution_buffer import ExecutionBuffer
from gpu_tier.pools.device_pool import DeviceKVPool
from gpu_tier.rows import KVDtype
from gpu_tier.runtime import NullRuntime
from gpu_tier.types import SteadyRing

GEOMETRY = KVGeometry(KVKind.MHA, 1, 1, 4, 4, KVDtype.F32, page_size=4)
RING = SteadyRing(3, 5)


class HalfCached:
    """A policy whose cache has room for half of a request's tokens; it only remembers what it was given."""

    def __init__(self) -> None:
        self.places: dict[int, list[list[int]]] = {}

    def cache_slots(self, n_tokens: int) -> int:
        return n_tokens // 8 * 4

    def admit(self, request: int, ring: SteadyRing, buffer_slots: Tensor) -> None:
        assert ring is RING
        self.places.setdefault(request, []).append(buffer_slots.tolist())

    def release(self, request: int) -> None:
        self.places.pop(request, None)


def parts(pages: int = 12) -> tuple[BlockResidency, HalfCached, SparseBuffers]:
    policy: Any = HalfCached()
    runtime = NullRuntime()
    buffers = SparseBuffers(DeviceKVPool(GEOMETRY, pages, runtime), 1)
    return BlockResidency(policy, ExecutionBuffer(GEOMETRY, 2, 8, runtime)), policy, buffers


def test_a_buffer_grows_when_its_cache_does_and_places_stay() -> None:
    blocks, policy, buffers = parts()
    blocks.admit(0, RING, 16, buffers)
    for n in range(17, 41):
        blocks.grow(0, n, buffers)
    lengths = [len(places) for places in policy.places[0]]
    assert lengths == [RING.capacity + cache for cache in (8, 12, 16, 20)]
    for before, after in zip(policy.places[0], policy.places[0][1:], strict=False):
        assert after[: len(before)] == before
        assert len(set(after)) == len(after)
    assert buffers.item_slot(0, RING.position(9)) == policy.places[0][-1][RING.position(9)]


def test_a_buffer_that_cannot_grow_stays_as_it_was() -> None:
    blocks, policy, buffers = parts(pages=5)
    blocks.admit(0, RING, 16, buffers)
    with pytest.raises(PoolExhaustedError):
        blocks.grow(0, 24, buffers)
    assert len(policy.places[0]) == 1
    blocks.grow(0, 23, buffers)
    assert len(policy.places[0]) == 1


@pytest.mark.parametrize("n", [1, 3, 4, 8, 9, 30])
def test_steady_tokens_have_places_of_their_own(n: int) -> None:
    blocks, _, buffers = parts()
    blocks.admit(1, RING, n, buffers)
    spans = blocks.steady_spans(1, n)
    tokens = [token for span in spans for token in span]
    assert tokens == [token for token in range(n) if token < RING.sink or token >= n - RING.ring]
    slots = [slot for span in spans for slot in blocks.places(1, span, buffers).tolist()]
    assert len(set(slots)) == len(slots)
    assert all(buffers.item_slot(1, RING.position(t)) == slot for t, slot in zip(tokens, slots, strict=True))
    overwritten = blocks.overwritten(1, n)
    assert overwritten == (n - RING.ring if n - RING.ring >= RING.sink else -1)
    if overwritten >= 0:
        assert RING.position(overwritten) == RING.position(n)


def test_the_shortest_ring_is_of_requests_that_have_a_buffer() -> None:
    blocks, _, buffers = parts()
    assert blocks.shortest_ring([0, 1]) > 1000
    blocks.admit(0, RING, 16, buffers)
    assert blocks.shortest_ring([0, 1]) == RING.ring
    blocks.release(0)
    blocks.release(0)
    assert blocks.shortest_ring([0, 1]) > 1000
