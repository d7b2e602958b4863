"""The KV on the device: dense pages and the sparse buffers of requests, in one arena.

A sparse buffer is some pages like any other, so one table addresses dense and sparse requests and a mixed batch needs
one attention call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvcm.gpu_tier.errors import AllocationError, ConfigError, PoolExhaustedError
from kvcm.gpu_tier.geometry import Addressing, KVGeometry, Layout, Rows
from kvcm.gpu_tier.kernels.io_transfer import io_transfer
from kvcm.gpu_tier.pools.allocator import PagedAllocator
from kvcm.gpu_tier.runtime import DeviceRuntime, upload
from kvcm.gpu_tier.types import LayerKV

__all__ = ["DeviceKVPool", "ReqToTokenPool"]

# Where each token of each request lies in the device pool.


class ReqToTokenPool:
    """A table of device slots, one row per request.

    Attributes:
        table: ``int32 [R, max_tokens]``, -1 where a token is not in the dense region.

    Args:
        max_requests: rows R.
        max_tokens: most tokens of a request.
        device: of the table.
    """

    def __init__(self, max_requests: int, max_tokens: int, device: torch.device) -> None:
        if max_requests < 1:
            raise ConfigError("max_requests", max_requests, "must be at least 1")
        if max_tokens < 1:
            raise ConfigError("max_tokens", max_tokens, "must be at least 1")
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        self.table = torch.full((max_requests, max_tokens), -1, dtype=torch.int32, device=device)
        self._free = list(range(max_requests - 1, -1, -1))
        self._held: set[int] = set()

    @property
    def available(self) -> int:
        """Rows that `alloc` can give out."""
        return len(self._free)

    def alloc(self) -> int:
        """Take a row.

        Raises:
            PoolExhaustedError: all rows are taken.
        """
        if not self._free:
            raise PoolExhaustedError(f"all {self.max_requests} request rows are taken; raise max_requests")
        request = self._free.pop()
        self._held.add(request)
        return request

    def alloc_row(self, request: int) -> None:
        """Take a certain row, for a second table that follows another one.

        Raises:
            AllocationError: the row is held.
        """
        if request not in self._free:
            raise AllocationError(f"request row {request} is taken")
        self._free.remove(request)
        self._held.add(request)

    def free(self, request: int) -> None:
        """Empty a row and give it back.

        Raises:
            AllocationError: the row is not held.
        """
        self._check_held(request)
        self._held.remove(request)
        self.table[request] = -1
        self._free.append(request)

    def set_slots(self, request: int, start: int, slots: Tensor) -> None:
        """Say where the tokens from `start` on lie.

        Args:
            request: row.
            start: position of the first token.
            slots: ``int [n]`` device slots, -1 for tokens that left the dense region.

        Raises:
            ConfigError: the tokens do not fit into a row.
            AllocationError: the row is not held.
        """
        self._check_held(request)
        stop = start + slots.shape[0]
        if start < 0 or stop > self.max_tokens:
            raise ConfigError("max_tokens", self.max_tokens, f"tokens {start} to {stop - 1} must fit into a row")
        self.table[request, start:stop] = upload(slots.to(self.table.dtype), self.table.device)

    def put(self, requests: Sequence[int], tokens: Sequence[int], slots: Sequence[int]) -> None:
        """Say where single tokens of several requests lie, -1 for those that left the device.

        Raises:
            AllocationError: one of the rows is not held.
        """
        for request in requests:
            self._check_held(request)
        where = upload(torch.tensor([requests, tokens, slots], dtype=torch.int64), self.table.device)
        self.table[where[0], where[1]] = where[2].int()

    def clear(self, request: int, start: int, stop: int) -> None:
        """Take note that the tokens start to stop - 1 left the device.

        Raises:
            AllocationError: the row is not held.
        """
        self._check_held(request)
        self.table[request, start:stop] = -1

    def slots(self, request: int, start: int, stop: int) -> Tensor:
        """Return the slots of tokens start to stop - 1, ``int32 [stop - start]``: a view of the table."""
        return self.table[request, start:stop]

    def _check_held(self, request: int) -> None:
        if request not in self._held:
            raise AllocationError(f"request row {request} is not taken")


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
        self.allocator = PagedAllocator(
            num_pages=num_pages, page_size=geometry.page_size, name="device pool", knob="num_pages of the device pool"
        )
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
            src=torch.cat([row.flatten() for row in rows]),
            dst=self.data,
            src_addr=self._packed(len(slots)),
            dst_addr=self.addressing,
            src_idx=torch.arange(len(slots), device=slots.device)[None],
            dst_idx=slots[None],
            layers=((0, self.geometry.layer_index(layer_id)),),
            num_heads=self.geometry.num_kv_heads,
        )

    def _packed(self, tokens: int) -> Addressing:
        """Return the addresses of the rows of tokens one behind the other: a pool of as many pages of one token."""
        one_layer = replace(self.geometry, num_layers=1, page_size=1)
        return Addressing.of(one_layer, Layout.LAYER_FIRST, tokens)

    def _rows(self, layer_id: int, part: int) -> Rows:
        strides = self.addressing.parts[part]
        start = strides.base + strides.layer * self.geometry.layer_index(layer_id)
        flat = self.data[start : start + strides.layer]
        return Rows(flat.view(self.num_slots, self.geometry.num_kv_heads, -1), self.geometry.parts[part])
