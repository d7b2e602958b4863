"""Residency `blocks`: what a request holds on the device, and how a layer's execution buffer is put together.

A request's buffer in the arena has places for its steady tokens, and behind them those of its block cache. A steady
token has a fixed place as long as it is steady, so that the engine writes a new token where it stays; the token that
was there before has been clustered, or has its host copy, by then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_tier.kernels.row_pool import RowPool
from gpu_tier.manager.buffers import SparseBuffers
from gpu_tier.manager.execution_buffer import ExecutionBuffer
from gpu_tier.manager.policy import BlockPolicy
from gpu_tier.manager.wave_store import WaveStore
from gpu_tier.types import SteadyRing

__all__ = ["BlockResidency"]


@dataclass(frozen=True, slots=True)
class _Buffer:
    """The buffer that the policy knows of a request: its ring, and the places of its cache."""

    ring: SteadyRing
    cache: int


class BlockResidency:
    """The buffers of requests, and the policy that decides what is in them.

    Args:
        policy: decides what is cached.
        execution: what a layer attends to.
        store: where the policy keeps clusters on the host; None when the host pool has all.
    """

    def __init__(self, policy: BlockPolicy, execution: ExecutionBuffer, store: WaveStore | None = None) -> None:
        self.policy = policy
        self.execution = execution
        self.store = store
        self._buffers: dict[int, _Buffer] = {}

    def capacity(self, ring: SteadyRing, n_tokens: int) -> int:
        """Return the places of the buffer of a request of so many tokens."""
        return ring.capacity + self.policy.cache_slots(n_tokens)

    def admit(self, request: int, ring: SteadyRing, n_tokens: int, buffers: SparseBuffers) -> None:
        """Let the policy know of a request's buffer, whose pages are held.

        Raises:
            PoolExhaustedError: there are too few pages; then nothing changed.
        """
        buffers.cover(request, self.capacity(ring, n_tokens))
        self._admit(request, _Buffer(ring, self.policy.cache_slots(n_tokens)), buffers)

    def grow(self, request: int, n_tokens: int, buffers: SparseBuffers) -> None:
        """Let the cache of a request grow with its tokens.

        Raises:
            PoolExhaustedError: there are too few pages; then nothing changed.
        """
        known, cache = self._buffers[request], self.policy.cache_slots(n_tokens)
        if cache > known.cache:
            buffers.cover(request, known.ring.capacity + cache)
            self._admit(request, _Buffer(known.ring, cache), buffers)

    def _admit(self, request: int, buffer: _Buffer, buffers: SparseBuffers) -> None:
        places = buffers.buffer(request).items[: buffer.ring.capacity + buffer.cache]
        self.policy.admit(request, buffer.ring, places)
        self._buffers[request] = buffer

    def ring(self, request: int) -> SteadyRing:
        """Return the steady places of a request that has a buffer."""
        return self._buffers[request].ring

    def shortest_ring(self, requests: Sequence[int]) -> int:
        """Return the fewest steps after which a request's newest token may lose its place; of those with a buffer."""
        rings = [self._buffers[request].ring.ring for request in requests if request in self._buffers]
        return min(rings, default=1 << 30)

    def overwritten(self, request: int, token: int) -> int:
        """Return the token whose place a token takes, -1 when that was free or is the token's for good."""
        ring = self._buffers[request].ring
        return token - ring.ring if token - ring.ring >= ring.sink else -1

    def steady_spans(self, request: int, n_tokens: int) -> list[range]:
        """Return the tokens that have a place when a request has so many."""
        ring = self._buffers[request].ring
        sink = min(ring.sink, n_tokens)
        return [span for span in (range(sink), range(max(sink, n_tokens - ring.ring), n_tokens)) if span]

    def places(self, request: int, tokens: range, buffers: SparseBuffers) -> Tensor:
        """Return the device slots of steady tokens, ``int32 [n]``, on the host."""
        ring, slots = self._buffers[request].ring, buffers.buffer(request).items
        return slots[torch.tensor([ring.position(token) for token in tokens], dtype=torch.int64)]

    def sources(self, layer_id: int, arena: RowPool) -> tuple[RowPool, RowPool, RowPool]:
        """Return what the runs of a plan name by `Source`; steady places and the cache both lie in the arena."""
        return arena, arena, self.policy.host_source(layer_id)

    def release(self, request: int) -> None:
        """Forget a request; one that is not known too."""
        self._buffers.pop(request, None)
        self.policy.release(request)
