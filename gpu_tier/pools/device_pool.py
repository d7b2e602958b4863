"""The KV on the device: dense pages and the sparse buffers of requests, in one arena.

A sparse buffer is some pages like any other, so one table addresses dense and sparse requests and a mixed batch needs
one attention call.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from gpu_tier.errors import ConfigError
from gpu_tier.geometry import Addressing, KVGeometry, Layout
from gpu_tier.kernels.io_transfer import io_transfer
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
        rows = [part.encode(numbers) for part, numbers in zip(self.geometry.parts, parts, strict=True)]
        io_transfer(
            torch.cat([row.flatten() for row in rows]), self.data, self._packed(len(slots)), self.addressing,
            torch.arange(len(slots), device=slots.device)[None], slots[None],
            layers=((0, self.geometry.layer_index(layer_id)),), num_heads=self.geometry.num_kv_heads,
        )  # fmt: skip

    def _packed(self, tokens: int) -> Addressing:
        """Return the addresses of the rows of tokens one behind the other: a pool of as many pages of one token."""
        one_layer = replace(self.geometry, num_layers=1, page_size=1)
        return Addressing.of(one_layer, Layout.LAYER_FIRST, tokens)

    def _rows(self, layer_id: int, part: int) -> Rows:
        strides = self.addressing.parts[part]
        start = strides.base + strides.layer * self.geometry.layer_index(layer_id)
        flat = self.data[start : start + strides.layer]
        return Rows(flat.view(self.num_slots, self.geometry.num_kv_heads, -1), self.geometry.parts[part])
