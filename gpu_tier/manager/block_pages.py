"""Pages of the host pool as blocks of a storage: their keys, their memory, and what is known of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from gpu_tier.connector import KV_SPEC
from gpu_tier.errors import ConfigError
from gpu_tier.manager.prefix_attach import SidecarRun
from gpu_tier.pools.host_pages import PageState
from gpu_tier.pools.host_pool import HostKVPool

__all__ = ["BlockPages", "SidecarSpec"]


@dataclass(frozen=True, slots=True)
class SidecarSpec:
    """The sidecar of the engine's algorithm.

    Attributes:
        name: of its spec, see `KVFormat.sidecar_spec`.
        page_bytes: of one page.
        is_required: whether a block without it is none.
    """

    name: str
    page_bytes: int
    is_required: bool


class BlockPages:
    """The host pool's cached pages, by key of the block.

    What is known of a page is that of the block that it was last kept as; a page that is given to another block is kept
    anew before anybody looks.

    Args:
        host: the pool.
        sidecar: of the engine's algorithm, None when it has none.
    """

    def __init__(self, host: HostKVPool, sidecar: SidecarSpec | None) -> None:
        self.host = host
        self.allocator = host.allocator
        self.sidecar = sidecar
        self._key_of: dict[int, int] = {}
        self._has_sidecar: set[int] = set()
        self._is_stored: set[int] = set()
        if sidecar is not None:
            host.add_sidecar(sidecar.name, sidecar.page_bytes)

    @property
    def required(self) -> tuple[str, ...]:
        """Specs without which a block is none."""
        return (KV_SPEC, self.sidecar.name) if self.sidecar is not None and self.sidecar.is_required else (KV_SPEC,)

    @property
    def optional(self) -> tuple[str, ...]:
        """Specs that are good to have."""
        return (self.sidecar.name,) if self.sidecar is not None and not self.sidecar.is_required else ()

    @property
    def all_memory(self) -> tuple[memoryview, ...]:
        """The memory of all pages and sidecars."""
        rows = () if self.sidecar is None else (self._rows().flatten(),)
        return tuple(data.numpy().data for data in (self.host.data, *rows))

    def find(self, keys: Sequence[int]) -> list[int]:
        """Return the pages of the leading blocks that are in the pool, with a reference to each for the caller."""
        pages: list[int] = []
        for key in keys:
            page = self.host.lookup(key)
            if page is None:
                break
            pages.append(page)
            if len(self.required) > 1 and page not in self._has_sidecar:
                self.allocator.free([pages.pop()])
                break
        return pages

    def keep(self, page: int, key: int, *, has_sidecar: bool, is_stored: bool) -> None:
        """Cache a page whose bytes are all there. If another page has the key already, that one will be found.

        Args:
            page: it.
            key: of its block.
            has_sidecar: whether its sidecar is there.
            is_stored: whether the storage is known to have the block.
        """
        self.host.cache(page, key)
        self._key_of[page] = key
        _put(self._has_sidecar, page, has_sidecar)
        _put(self._is_stored, page, is_stored)

    def mark_stored(self, keys: Sequence[int], pages: Sequence[int], is_stored: bool) -> None:
        """Note whether the storage has blocks; pages that were given to others meanwhile are left alone."""
        for key, page in zip(keys, pages, strict=True):
            if self._key_of.get(page) == key:
                _put(self._is_stored, page, is_stored)

    def is_stored(self, page: int) -> bool:
        """Return whether the storage had the block when it was last heard of."""
        return page in self._is_stored

    def with_sidecar(self, pages: Sequence[int]) -> int:
        """Return how many leading pages have their sidecar."""
        return next((n for n, page in enumerate(pages) if page not in self._has_sidecar), len(pages))

    def is_busy(self, page: int) -> bool:
        """Return whether a page is being written to the storage."""
        return self.allocator.state(page) is PageState.WRITING_L3

    def filled(self, pages: Sequence[int]) -> None:
        """Say that all bytes of pages are there; of some it may have been said before."""
        self.allocator.filled(page for page in pages if self.allocator.state(page) is PageState.FILLING)

    def memory(self, page: int, names: Sequence[str]) -> Mapping[str, tuple[memoryview, ...]]:
        """Return the memory of a page's parts."""
        return {name: self._pieces(page, name) for name in names}

    def sidecars(self, pages: Sequence[int]) -> tuple[SidecarRun, ...]:
        """Return the sidecars of the leading pages that have one; no bytes move."""
        if self.sidecar is None:
            return ()
        rows = self._rows()
        runs = _runs(pages[: self.with_sidecar(pages)])
        return tuple(SidecarRun(first, rows[page : page + count]) for first, page, count in runs)

    def set_sidecars(self, pages: Sequence[int], data: Tensor) -> None:
        """Store sidecars beside their pages.

        Args:
            pages: whose they are.
            data: ``uint8 [pages, page_bytes]``.

        Raises:
            ConfigError: `data` has another shape.
        """
        rows = self._rows()
        if data.shape != (len(pages), rows.shape[1]):
            raise ConfigError("sidecar", tuple(data.shape), f"must be {(len(pages), rows.shape[1])}")
        for first, page, count in _runs(pages):  # an index for each page would make it many times slower
            rows[page : page + count] = data[first : first + count]

    def _rows(self) -> Tensor:
        if self.sidecar is None:
            raise ConfigError("sidecar", None, "the algorithm has none")
        return self.host.sidecar(self.sidecar.name)

    def _pieces(self, page: int, name: str) -> tuple[memoryview, ...]:
        pieces = self.host.page_pieces(page) if name == KV_SPEC else (self._rows()[page],)
        return tuple(piece.numpy().data for piece in pieces)


def _runs(pages: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield position, first page and number of pages that follow each other."""
    start = 0
    for i in range(1, len(pages) + 1):
        if i == len(pages) or pages[i] != pages[i - 1] + 1:
            yield start, pages[start], i - start
            start = i


def _put(pages: set[int], page: int, is_in: bool) -> None:
    if is_in:
        pages.add(page)
    else:
        pages.discard(page)
