"""One chunk of a memory pool as the metadata store keeps it: pure values, changed by making another one.

A chunk is cut into extents of one size while any of them is taken, and into those of another size afterwards. Every
extent that is taken has the stamp of whoever it was given to; a stamp is larger than every one before it in the chunk,
also when all extents were free in between. So whoever comes late, to write, to read or to free, is known by its stamp.

Extents are taken behind those that were taken last, round and round: what was just freed is the last to be handed out
again, since a writer that is stopped may still keep its pages locked. The same few extents would otherwise fail, be
freed and be handed out for as long as it stands.

What was taken up to the pool's floor is free: the memory that held it is gone. So is whatever a chunk of another size
says, of a pool that was configured anew.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcm.model.errors import StorageIOError
from kvcm.model.memory_pool import PAGE_BYTES

__all__ = ["Extent", "PoolChunk"]

_FORMAT: Final = 1
# Format, page to begin at, bytes of the chunk, bytes of an extent, last stamp. The page was padding once: 0.
_HEADER: Final = struct.Struct("<B3xIQQQ")
_STAMPS: Final = np.dtype("<u8")
_NOTHING: Final[NDArray[np.uint64]] = np.zeros(0, _STAMPS)


class Extent(NamedTuple):
    """Memory that is taken.

    Attributes:
        offset: of its first byte, in the chunk or in the pool.
        stamp: whose it is.
    """

    offset: int
    stamp: int


@dataclass(frozen=True, slots=True, eq=False)
class PoolChunk:
    """The allocator's state of a chunk.

    Attributes:
        size_bytes: of the chunk.
        last_stamp: the largest that was ever given in it.
        extent_bytes: what it is cut into, 0 while all of it is free.
        stamps: whose each extent is, 0 for nobody's; none while all of it is free.
        next_offset: behind the extent that was taken last.
    """

    size_bytes: int
    last_stamp: int = 0
    extent_bytes: int = 0
    stamps: NDArray[np.uint64] = field(default_factory=lambda: _NOTHING)
    next_offset: int = 0

    @classmethod
    def decoded(cls, document: bytes | None, size_bytes: int, floor: int) -> PoolChunk:
        """Read a document.

        Args:
            document: None for a chunk that nothing was ever taken of.
            size_bytes: of the chunk, as the pool is configured.
            floor: what has this stamp or a smaller one is free.

        Raises:
            StorageIOError: a newer release wrote it, or it is damaged.
        """
        if document is None:
            return cls(size_bytes)
        try:
            version, next_page, stored_bytes, extent_bytes, last_stamp = _HEADER.unpack_from(document)
            stamps = np.frombuffer(document, _STAMPS, offset=_HEADER.size)
        except (struct.error, ValueError) as error:
            raise StorageIOError(f"a stored chunk of a memory pool cannot be read: {error}") from error
        if version != _FORMAT:
            raise StorageIOError(
                f"a stored chunk of a memory pool has format {version}, this release knows {_FORMAT}: upgrade it first"
            )
        if stored_bytes != size_bytes:
            return cls(size_bytes, last_stamp)
        kept = np.where(stamps > floor, stamps, 0)
        return cls(size_bytes, last_stamp, extent_bytes, kept, next_page * PAGE_BYTES)._normal()

    def encoded(self) -> bytes:
        """Return the chunk's document."""
        next_page = self.next_offset // PAGE_BYTES
        header = _HEADER.pack(_FORMAT, next_page, self.size_bytes, self.extent_bytes, self.last_stamp)
        return header + self.stamps.astype(_STAMPS).tobytes()

    def _normal(self) -> PoolChunk:
        if self.stamps.any():
            return self
        return PoolChunk(self.size_bytes, self.last_stamp, next_offset=self.next_offset)

    @property
    def taken_bytes(self) -> int:
        """What the extents that are taken take up."""
        return int(np.count_nonzero(self.stamps)) * self.extent_bytes

    @property
    def room(self) -> int:
        """Extents that are free; of a chunk that is not cut, 0."""
        return len(self.stamps) - int(np.count_nonzero(self.stamps))

    def take(self, extent_bytes: int, most: int, least_stamp: int) -> tuple[PoolChunk, list[Extent]]:
        """Take up to `most` extents, none when there is no room for them; all get one stamp.

        They are the free ones behind the extent that was taken last, then those from the beginning on.

        Args:
            extent_bytes: whole pages.
            most: extents that are wanted.
            least_stamp: the stamp that they get, unless a larger one was given before.
        """
        stamps = self.stamps if self.extent_bytes else np.zeros(self.size_bytes // extent_bytes, _STAMPS)
        if self.extent_bytes not in {0, extent_bytes}:
            return self, []
        free = np.flatnonzero(stamps == 0)
        behind = np.searchsorted(free, -(-self.next_offset // extent_bytes))
        free = np.concatenate((free[behind:], free[:behind]))[:most]
        if not len(free):
            return self, []
        stamp = max(self.last_stamp + 1, least_stamp)
        stamps = stamps.copy()
        stamps[free] = stamp
        end = (int(free[-1]) + 1) * extent_bytes
        chunk = replace(self, last_stamp=stamp, extent_bytes=extent_bytes, stamps=stamps, next_offset=end)
        return chunk, [Extent(index * extent_bytes, stamp) for index in free.tolist()]

    def free(self, extents: Iterable[Extent]) -> PoolChunk:
        """Free extents that still are whose they were; the chunk itself when there are none."""
        owned = [extent for extent in extents if self.holds(extent)]
        if not owned:
            return self
        stamps = self.stamps.copy()
        stamps[[extent.offset // self.extent_bytes for extent in owned]] = 0
        return replace(self, stamps=stamps)._normal()

    def holds(self, extent: Extent) -> bool:
        """Return whether an extent is taken, by whom its stamp says."""
        if not self.extent_bytes or extent.offset % self.extent_bytes or extent.stamp <= 0:
            return False
        index = extent.offset // self.extent_bytes
        return index < len(self.stamps) and int(self.stamps[index]) == extent.stamp

    def extents(self) -> Iterator[Extent]:
        """Return what is taken."""
        for index in np.flatnonzero(self.stamps).tolist():
            yield Extent(index * self.extent_bytes, int(self.stamps[index]))
