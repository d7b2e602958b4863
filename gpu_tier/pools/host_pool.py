"""The whole KV in host memory, pinned so that the device can read it; see `gpu_tier.geometry` for its layouts."""

from __future__ import annotations

from collections.abc import Hashable

from torch import Tensor

from gpu_tier.errors import ConfigError
from gpu_tier.geometry import Addressing, KVGeometry, Layout
from gpu_tier.kernels.pool_rows import pool_rows
from gpu_tier.pools.host_pages import HostPages
from gpu_tier.pools.pinned import PinnedMemory
from gpu_tier.runtime import DeviceRuntime

__all__ = ["HostKVPool"]


class HostKVPool:
    """Pages of KV in host memory, and beside each page the sidecars of algorithms.

    Attributes:
        geometry: of the KV.
        data: the pool, flat ``uint8``.
        addressing: where each row lies in it.
        allocator: of its pages, with their states.

    Args:
        geometry: of the KV.
        num_pages: pages.
        layout: order of the pool.
        runtime: of the device that reads it.

    Raises:
        PoolExhaustedError: the host has too little memory.
    """

    def __init__(self, geometry: KVGeometry, num_pages: int, layout: Layout, runtime: DeviceRuntime) -> None:
        self.geometry = geometry
        self.allocator = HostPages(num_pages, geometry.page_size)
        self.addressing = Addressing.of(geometry, layout, num_pages)
        self._runtime = runtime
        self._memory = PinnedMemory(self.addressing.total_bytes, geometry.page_bytes, runtime)
        self._sidecars: dict[str, tuple[PinnedMemory, int]] = {}

    @property
    def data(self) -> Tensor:
        """The pool, flat ``uint8``."""
        return self._memory.data

    @property
    def is_device_readable(self) -> bool:
        """Whether kernels may read and write the pool: it is pinned, or there is no device."""
        return self._memory.is_pinned or not self._runtime.is_cuda

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a registered piece of the pool; one copy must not span two of them."""
        return self._memory.chunk_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of the pool, sidecars included."""
        return self._memory.nbytes + sum(memory.nbytes for memory, _ in self._sidecars.values())

    def page_pieces(self, page: int) -> tuple[Tensor, ...]:
        """Return the bytes of a page as views: one for page_first and page_head, one per part and layer otherwise."""
        if self.addressing.layout is not Layout.LAYER_FIRST:
            return (self.data[page * self.geometry.page_bytes :][: self.geometry.page_bytes],)
        starts = [
            (part.address(page, 0, layer, 0), part.page)
            for part in self.addressing.parts
            for layer in range(self.geometry.num_layers)
        ]
        return tuple(self.data[start : start + size] for start, size in starts)

    def read(self, layer_id: int, part: int, slots: Tensor) -> Tensor:
        """Return a copy of rows in host memory.

        Args:
            layer_id: id of the layer.
            part: 0 for keys and latents, 1 for values.
            slots: ``int [n]`` host slots, not negative.

        Returns:
            ``uint8 [n, H, row_bytes]``.
        """
        layer = self.geometry.layer_index(layer_id)
        rows = pool_rows(self.data, self.addressing, part, layer, self.geometry.num_kv_heads)
        slots = slots.long().to(self.data.device)
        return rows[slots // self.geometry.page_size, slots % self.geometry.page_size]

    def cache(self, page: int, key: Hashable) -> int:
        """See `HostPages.cache`."""
        return self.allocator.cache(page, key)

    def lookup(self, key: Hashable) -> int | None:
        """See `HostPages.lookup`."""
        return self.allocator.lookup(key)

    def add_sidecar(self, name: str, page_bytes: int) -> None:
        """Reserve bytes beside each page.

        Args:
            name: of the sidecar.
            page_bytes: bytes per page.

        Raises:
            ConfigError: the name is taken, or there are no bytes.
            PoolExhaustedError: the host has too little memory.
        """
        if name in self._sidecars:
            raise ConfigError("name", name, "there is such a sidecar already")
        if page_bytes < 1:
            raise ConfigError("page_bytes", page_bytes, "a sidecar has at least one byte per page")
        memory = PinnedMemory(self.allocator.num_pages * page_bytes, page_bytes, self._runtime)
        self._sidecars[name] = (memory, page_bytes)

    def sidecar(self, name: str) -> Tensor:
        """Return a sidecar, ``uint8 [num_pages, page_bytes]``.

        Raises:
            ConfigError: there is no such sidecar.
        """
        if name not in self._sidecars:
            raise ConfigError.choice("name", name, self._sidecars)
        memory, page_bytes = self._sidecars[name]
        return memory.data.view(self.allocator.num_pages, page_bytes)

    def close(self) -> None:
        """Give the memory back; views of it must not be used any more. A second call does nothing."""
        for memory, _ in self._sidecars.values():
            memory.close()
        self._memory.close()
