"""The execution buffer of residency `blocks`: what a layer attends to, put together anew in every step.

One buffer serves all layers, one after the other, so the next layer's tokens are gathered only when this layer's
attention and its admissions to the cache have read it (O3 and O4). Row b of a batch owns slots b·S to (b + 1)·S - 1,
the same ones for all its heads, whose lengths differ.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from gpu_tier.errors import ConfigError
from gpu_tier.geometry import KVGeometry
from gpu_tier.kernels.row_pool import RowPool
from gpu_tier.pools.device_pool import DeviceKVPool
from gpu_tier.runtime import DeviceRuntime
from gpu_tier.types import LayerKV

__all__ = ["ExecutionBuffer"]


class ExecutionBuffer:
    """Room for the tokens that each row and head attends to in one layer.

    Args:
        geometry: of the model's KV.
        rows: most requests of a batch.
        tokens_per_row: most tokens that a head attends to; rounded up to whole pages.
        runtime: of the device.

    Attributes:
        rows: most requests of a batch.
        tokens_per_row: slots S of a row.
        pool: the pool of one layer that they lie in.
    """

    def __init__(self, geometry: KVGeometry, rows: int, tokens_per_row: int, runtime: DeviceRuntime) -> None:
        if rows < 1 or tokens_per_row < 1:
            raise ConfigError("rows, tokens_per_row", (rows, tokens_per_row), "must be at least 1")
        pages = -(-tokens_per_row // geometry.page_size)
        self.rows = rows
        self.tokens_per_row = pages * geometry.page_size
        self.pool = DeviceKVPool(replace(geometry, num_layers=1), rows * pages, runtime)
        slots = torch.arange(rows * self.tokens_per_row, dtype=torch.int32, device=runtime.device)
        self._table = slots.view(rows, 1, -1).expand(-1, geometry.num_kv_heads, -1)
        self._padded: dict[int, Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return self.pool.nbytes

    @property
    def table(self) -> Tensor:
        """Slots of every row and head, ``int32 [rows, H, S]``."""
        return self._table

    def table_of(self, rows: int) -> Tensor:
        """Return the slots of a batch of so many rows, ``int32 [B, H, S]``; rows beyond the buffer's are padding."""
        if rows <= self.rows:
            return self._table[:rows]
        if rows not in self._padded:
            padding = self._table[:1].new_full((rows - self.rows, *self._table.shape[1:]), -1)
            self._padded[rows] = torch.cat([self._table, padding])
        return self._padded[rows]

    def source(self) -> RowPool:
        """Return the buffer as a copy kernel sees it: its target, and the source of admissions to a cache."""
        return RowPool(self.pool.data, self.pool.addressing, 0)

    def layer_kv(self) -> LayerKV:
        """Return the rows that attention reads."""
        return self.pool.layer(self.pool.geometry.start_layer)
