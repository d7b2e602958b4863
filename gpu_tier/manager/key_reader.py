"""Reads a request's KV as numbers wherever it lies; for prefill over a prefix, rebuilding, and algorithms that need it.

Not for the decode path of a deployment: it waits for copies on their way and for the device.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from gpu_tier.manager.host_tokens import HostTokens
from gpu_tier.pools.device_pool import DeviceKVPool

__all__ = ["KVReader"]


class KVReader:
    """Reads rows from the arena where the table names a slot, else from the host.

    Args:
        device: the arena.
        table: ``int32 [R, max_tokens]`` device slot of every token, -1 where it is not on the device.
        host: who holds which host pages.
        settle: waits until the copies to the host of a request are complete.
    """

    def __init__(self, device: DeviceKVPool, table: Tensor, host: HostTokens, settle: Callable[[int], None]) -> None:
        self._device = device
        self._table = table
        self._host = host
        self._settle = settle

    def keys(self, layer_id: int, request: int, start: int, stop: int) -> Tensor:
        """Return the keys (latents of MLA) of tokens start to stop - 1, ``f32 [n, H, d]``."""
        return self._read(layer_id, 0, request, start, stop)

    def rows(self, layer_id: int, request: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return keys ``f32 [n, H, d]`` and values ``f32 [n, H, dv]`` of tokens start to stop - 1."""
        k = self.keys(layer_id, request, start, stop)
        if len(self._device.geometry.parts) == 1:
            return k, k[..., : self._device.geometry.v_head_dim]
        return k, self._read(layer_id, 1, request, start, stop)

    def raw(self, layer_id: int, part: int, request: int, start: int, stop: int) -> Tensor:
        """Return the rows of a part (0 for keys and latents, 1 for values) as bytes, ``uint8 [n, H, row_bytes]``."""
        slots = self._table[request, start:stop].long()
        layer = self._device.layer(layer_id)
        rows = layer.k if part == 0 or layer.v is None else layer.v
        data = rows.data[slots.clamp_min(0)]
        absent = (slots < 0).nonzero().flatten().cpu()
        if len(absent):
            self._settle(request)
            host_slots = self._host.slots(request, start, stop)[absent]
            data[absent.to(data.device)] = self._host.pool.read(layer_id, part, host_slots).to(data.device)
        return data

    def _read(self, layer_id: int, part: int, request: int, start: int, stop: int) -> Tensor:
        return self._device.geometry.parts[part].decode(self.raw(layer_id, part, request, start, stop))
