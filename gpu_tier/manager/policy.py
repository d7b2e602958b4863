"""What a residency policy is: it decides where selected items are on the device and what has to move for that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from gpu_tier.kernels.row_pool import RowPool
from gpu_tier.types import ForwardBatch, ResidencyPlan, Selection, SteadyRing

__all__ = ["BlockPolicy", "BufferFill", "ResidencyPolicy"]


@dataclass(frozen=True, slots=True)
class BufferFill:
    """Items to copy into a request's fresh buffer, the same in all layers and heads.

    Attributes:
        items: ``int64 [M]`` items, on the host.
        slots: ``int64 [M]`` device slot of each item's first token.
    """

    items: Tensor
    slots: Tensor


class ResidencyPolicy(Protocol):
    """One policy over all layers and requests of one engine."""

    def hold(self, request: int, n_tokens: int) -> None:
        """Set aside what a request of so many tokens needs beside its buffer; more than before or the same.

        Raises:
            PoolExhaustedError: there is too little; what the request had stays.
        """

    def admit(self, request: int, buffer_slots: Tensor, newest_slots: Tensor, n_tokens: int) -> BufferFill:
        """Give a request its buffer and return what to fill it with.

        Args:
            request: row of the per-request tables.
            buffer_slots: ``int32 [C]`` device slot of each item of the buffer.
            newest_slots: ``int32 [2]`` device slots of the newest item i: entry ``i % 2``.
            n_tokens: tokens whose KV exists; the last, part-filled item goes to its newest slot.
        """

    def release(self, request: int) -> None:
        """Forget a request; one that is not known too."""

    def resolve(self, layer_id: int, batch: ForwardBatch, selection: Selection, sparse_mask: Tensor) -> ResidencyPlan:
        """Return where each selected item is after the plan was fetched; no bytes move."""

    def commit(self, layer_id: int, plan: ResidencyPlan) -> None:
        """Take note that the layer's attention has read the buffer."""


class BlockPolicy(Protocol):
    """Residency `blocks`: each step an execution buffer is put together from three sources.

    A request's buffer in the arena has ``ring.capacity`` places for its steady tokens, and behind them places of the
    block cache, the same slots in every layer and head. What is in neither is on the host. Plans have `execution`:

    * steady tokens first, in ascending order, then the selected items in the order of the selection, in each the tokens
      in ascending order;
    * no byte of the result may depend on what is cached.

    Attributes:
        plans_on_host: whether plans are made on the host, of what was announced: then the copies need not wait for what
            the device computes meanwhile.
    """

    plans_on_host: bool

    def hold(self, request: int, n_tokens: int) -> None:
        """Set aside host memory for a request of so many tokens, more than before or the same.

        Raises:
            PoolExhaustedError: there is too little; what the request had stays.
        """

    def cache_slots(self, n_tokens: int) -> int:
        """Return the places (tokens) of the cache of a request of so many tokens; grows with them or stays."""

    def admit(self, request: int, ring: SteadyRing, buffer_slots: Tensor) -> None:
        """Give a request its buffer, or a grown one: places that it had stay where they are.

        Args:
            request: row of the per-request tables.
            ring: its steady places.
            buffer_slots: ``int32 [ring.capacity + cache]`` device slot of each place.
        """

    def release(self, request: int) -> None:
        """Forget a request; one that is not known too. Nothing of it is left for the next one in its row."""

    def announce(self, layer_id: int, batch: ForwardBatch, selection: Selection) -> None:
        """Hear what `resolve` will be asked, as soon as it was given to the compute stream; does not wait."""

    def resolve(self, layer_id: int, batch: ForwardBatch, selection: Selection, sparse_mask: Tensor) -> ResidencyPlan:
        """Return how the execution buffer is put together; no bytes of KV move."""

    def commit(self, layer_id: int, plan: ResidencyPlan) -> None:
        """Bring into the cache what the policy wants there, now that the layer's attention has been issued.

        What it copies out of the execution buffer is read before the buffer is written again (O4), and what it writes
        into the cache is there before the layer's next step reads it.
        """

    def host_source(self, layer_id: int) -> RowPool:
        """Return where the runs of `Source.HOST` of a layer lie."""

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory beside the host pool."""

    def close(self) -> None:
        """End threads and give host memory back; a second call does nothing. The device reads none of it any more."""
