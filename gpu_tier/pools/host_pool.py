"""The whole KV in host memory, pinned so that the device can read it; see `kvcm.gpu_tier.geometry` for its layouts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from enum import StrEnum

from torch import Tensor

from kvcm.gpu_tier.errors import AllocationError, ConfigError, StateError
from kvcm.gpu_tier.geometry import Addressing, KVGeometry, Layout
from kvcm.gpu_tier.kernels.operands import pool_rows
from kvcm.gpu_tier.pools.allocator import PagedAllocator
from kvcm.gpu_tier.pools.pinned import PinnedMemory
from kvcm.gpu_tier.runtime import DeviceRuntime

__all__ = ["HostKVPool", "HostPages", "PageState"]

# Pages of the host pool: their content, and which of them outlive their requests.


class PageState(StrEnum):
    """Content of a host page.

                    alloc            filled           begin_write
        FREE ─────────────► FILLING ────────► VALID ◄────────────► WRITING_L3
         ▲                     │                │     end_write
         └─────────────────────┴────────────────┘  free of the last reference, or eviction

    Invariants:
    1. A page in WRITING_L3 is held: `begin_write` takes a reference of its own and `end_write` drops it. The owner that
       lets bytes arrive in a FILLING page holds a reference of its own likewise, so that an aborted request cannot give
       the page away.
    2. A page with a key is VALID or WRITING_L3, and a key names one page.
    3. A VALID page with a key and without references stays readable until `alloc` needs it; the least recently held
       goes first. It counts as available.
    """

    FREE = "free"
    FILLING = "filling"
    VALID = "valid"
    WRITING_L3 = "writing_l3"


_TRANSITIONS = {
    PageState.FREE: {PageState.FILLING},
    PageState.FILLING: {PageState.VALID, PageState.FREE},
    PageState.VALID: {PageState.WRITING_L3, PageState.FREE},
    PageState.WRITING_L3: {PageState.VALID},
}


class HostPages(PagedAllocator):
    """Reference-counted pages with states and a cache of those that have a key."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        super().__init__(num_pages, page_size, "host pool", "host_bytes (or host_to_device_ratio)")
        self._state = [PageState.FREE] * num_pages
        self._key_of: dict[int, Hashable] = {}
        self._page_of: dict[Hashable, int] = {}
        self._idle: dict[int, None] = {}  # cached pages without references, least recently held first

    @property
    def available(self) -> int:
        """Pages that `alloc` can give out: the free ones, and cached ones that are not held."""
        return len(self._free) + len(self._idle)

    @property
    def cached(self) -> int:
        """Pages that have a key."""
        return len(self._key_of)

    def counts(self) -> dict[PageState, int]:
        """Return how many pages are in each state; goes through all of them, for metrics."""
        counts = Counter(self._state)
        return {state: counts[state] for state in PageState}

    def state(self, page: int) -> PageState:
        """Return the state of a page."""
        return self._state[page]

    def filled(self, pages: Iterable[int]) -> None:
        """Say that all bytes of the pages are there: FILLING → VALID.

        Raises:
            StateError: one of them is in another state; those before it were changed.
        """
        for page in pages:
            self._set_state(page, PageState.FILLING, PageState.VALID)

    def begin_write(self, pages: Iterable[int]) -> None:
        """Hold pages while the storage reads them: VALID → WRITING_L3.

        Raises:
            StateError: one of them is not VALID, or twice among them; nothing was changed.
            AllocationError: one of them is not held.
        """
        pages = list(pages)
        if len(set(pages)) < len(pages) or any(self._state[page] is not PageState.VALID for page in pages):
            raise StateError(f"pages {pages} cannot be written: {[self._state[page].value for page in pages]}")
        self.share(pages)
        for page in pages:
            self._set_state(page, PageState.VALID, PageState.WRITING_L3)

    def end_write(self, pages: Iterable[int]) -> None:
        """Let go of pages after the storage has read them, well or not: WRITING_L3 → VALID."""
        pages = list(pages)
        for page in pages:
            self._set_state(page, PageState.WRITING_L3, PageState.VALID)
        self.free(pages)

    def cache(self, page: int, key: Hashable) -> int:
        """Give a page a key, so that later requests find it.

        Returns:
            The page that has the key: another one, when two requests computed the same block.

        Raises:
            StateError: the page is neither VALID nor WRITING_L3, or has another key.
        """
        if self._state[page] not in (PageState.VALID, PageState.WRITING_L3):
            raise StateError(f"page {page} cannot get a key: it is {self._state[page].value}")
        if self._key_of.get(page, key) != key:
            raise StateError(f"page {page} has another key")
        holder = self._page_of.setdefault(key, page)
        if holder == page:
            self._key_of[page] = key
        return holder

    def lookup(self, key: Hashable) -> int | None:
        """Return the page that has a key, with a reference for the caller; None when there is none."""
        page = self._page_of.get(key)
        if page is None:
            return None
        self._idle.pop(page, None)
        self._references[page] += 1
        return page

    def forget(self, page: int) -> None:
        """Take a page's key away; one without a key stays as it is."""
        key = self._key_of.pop(page, None)
        if key is None:
            return
        del self._page_of[key]
        if page in self._idle:
            del self._idle[page]
            self._on_unreferenced(page)

    def _evict(self, n: int) -> None:
        while len(self._free) < n:
            self.forget(next(iter(self._idle)))

    def _on_alloc(self, page: int) -> None:
        self._set_state(page, PageState.FREE, PageState.FILLING)

    def _check_free(self, page: int, left: int) -> None:
        if not left and self._state[page] is PageState.WRITING_L3:
            raise AllocationError(f"page {page} of the host pool is being written: its last reference is the writer's")

    def _on_release(self, page: int) -> None:
        if page in self._key_of:
            self._idle[page] = None
        else:
            self._on_unreferenced(page)

    def _on_unreferenced(self, page: int) -> None:
        self._set_state(page, self._state[page], PageState.FREE)
        self._free.append(page)

    def _set_state(self, page: int, old: PageState, new: PageState) -> None:
        if self._state[page] is not old or new not in _TRANSITIONS[old]:
            raise StateError(f"page {page} of the host pool is {self._state[page].value}, cannot become {new.value}")
        self._state[page] = new


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
