"""Layers that always attend densely (Quest skips the first two): all of their KV stays on the device.

They have an arena of their own that holds only these layers, so that a request costs their share of its KV and no more.
Every request is in it from its first token on, whatever its state, so attention of these layers is the same for all.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from gpu_tier.geometry import KVGeometry
from gpu_tier.manager.dense_tokens import DenseTokens
from gpu_tier.pools.device_pool import DeviceKVPool
from gpu_tier.pools.req_to_token import ReqToTokenPool
from gpu_tier.pools.transfer import KVTransfer
from gpu_tier.runtime import DeviceRuntime

__all__ = ["ResidentLayers"]


class ResidentLayers:
    """The arena of the first `count` layers.

    Args:
        geometry: of all layers.
        count: layers that are resident.
        num_pages: pages of the arena; tokens of all requests must fit.
        max_requests: rows of the table.
        max_tokens: most tokens of a request.
        transfer: between the host pool and the arena of all layers.
        runtime: of the device.
    """

    def __init__(
        self, geometry: KVGeometry, count: int, num_pages: int, max_requests: int, max_tokens: int,
        transfer: KVTransfer, runtime: DeviceRuntime,
    ) -> None:  # fmt: skip
        first = replace(geometry, num_layers=min(count, geometry.num_layers))
        self.layers = first.layers
        self.pool = DeviceKVPool(first, num_pages, runtime)
        self._transfer = transfer.to(self.pool)
        self._tables = ReqToTokenPool(max_requests, max_tokens, runtime.device)
        self._dense = DenseTokens(self.pool, self._tables)

    @property
    def table(self) -> Tensor:
        """Slots of every token in this arena, ``int32 [R, max_tokens]``."""
        return self._tables.table

    def begin(self, request: int) -> None:
        """Make room for a request's row."""
        self._tables.take(request)

    def cover(self, request: int, n_tokens: int) -> None:
        """Hold pages for so many tokens.

        Raises:
            PoolExhaustedError: there are too few; then nothing changed.
        """
        self._dense.cover(request, 0, n_tokens)

    def fill(self, request: int, host_slots: Tensor) -> None:
        """Load the first tokens of a request from the host pool, for an attached prefix."""
        slots = self.table[request, : len(host_slots)].long()
        self._transfer.load(host_slots[None], slots[None], layers=self.layers)

    def release(self, request: int) -> None:
        """Release everything of a request."""
        self._dense.release(request)
        self._tables.free(request)
