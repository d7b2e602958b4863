"""The KV on the device: dense pages and the sparse buffers of requests, in one arena.

A sparse buffer is some pages like any other, so one table addresses dense and sparse requests and a mixed batch needs
one attention call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_tier.errors import ConfigError
from gpu_tier.geometry import Addressing, KVGeometry, Layout
from gpu_tier.pools.allocator import PagedAllocator
from gpu_tier.rows import Rows
from gpu_tier.runtime import DeviceRuntime
from gpu_tier.types import LayerKV

__all__ = ["DeviceKVPool"]


class DeviceKVPool:
    """Pages of KV on the device, layer_first.

    Attributes:
        geometry: of the KV.
        data: the pool, flat ``uint8``.
        addressing: where each row lies in it.
        allocator: of its pages.

    Args:
        geometry: of the KV.
        num_pages: pages.
        runtime: of the device.
    """

    def __init__(self, geometry: KVGeometry, num_pages: int, runtime: DeviceRuntime) -> None:
        self.geometry = geometry
        self.allocator = PagedAllocator(num_pages, geometry.page_size, "device pool", "num_pages of the device pool")
        self.addressing = Addressing.of(geometry, Layout.LAYER_FIRST, num_pages)
        self.data = torch.zeros(self.addressing.total_bytes, dtype=torch.uint8, device=runtime.device)

    @property
    def num_slots(self) -> int:
        """Tokens that fit."""
        return self.allocator.num_pages * self.geometry.page_size

    @property
    def nbytes(self) -> int:
        """Bytes of the pool."""
        return self.addressing.total_bytes

    def layer(self, layer_id: int) -> LayerKV:
        """Return the rows of a layer, views of the pool.

        Raises:
            ConfigError: the layer is not held here.
        """
        rows = [self._rows(layer_id, part) for part in range(len(self.geometry.parts))]
        return LayerKV(rows[0], rows[1] if len(rows) > 1 else None, self.geometry.v_head_dim)

    def write(self, layer_id: int, slots: Tensor, k: Tensor, v: Tensor | None = None) -> None:
        """Store the KV of tokens.

        Args:
            layer_id: id of the layer.
            slots: ``int64 [T]`` slot of each token, unique; negative ones are skipped.
            k: ``[T, H, d]`` keys, or latents.
            v: ``[T, H, dv]`` values; None for MLA.

        Raises:
            ConfigError: the number of parts is not that of the geometry, or the layer is not held here.
        """
        parts = (k,) if v is None else (k, v)
        if len(parts) != len(self.geometry.parts):
            raise ConfigError("v", v is not None, f"{self.geometry.kind} stores {len(self.geometry.parts)} rows a head")
        if not slots.numel():
            return
        for part, numbers in enumerate(parts):
            rows = self._rows(layer_id, part)
            _scatter(rows.data, slots.long(), rows.format.encode(numbers))

    def _rows(self, layer_id: int, part: int) -> Rows:
        strides = self.addressing.parts[part]
        start = strides.base + strides.layer * self.geometry.layer_index(layer_id)
        flat = self.data[start : start + strides.layer]
        return Rows(flat.view(self.num_slots, self.geometry.num_kv_heads, -1), self.geometry.parts[part])


def _scatter(rows: Tensor, slots: Tensor, values: Tensor) -> None:
    # Selecting the valid slots would wait for the device. Instead the skipped tokens repeat what the first valid one
    # writes, or when none is valid what slot 0 holds: equal writes to one place are harmless. Indices stay [1]: torch
    # reads an index without dimensions on the host.
    valid = slots >= 0
    first = valid.to(torch.uint8).argmax(0, keepdim=True)
    target = slots[first].clamp_min(0)
    value = torch.where(valid[first, None, None], values[first], rows[target])
    rows[torch.where(valid, slots, target)] = torch.where(valid[:, None, None], values, value)
