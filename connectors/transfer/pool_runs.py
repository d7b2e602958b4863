"""Parts that follow each other in a memory pool: locked, compared and copied as if they were one.

Engines bring blocks as rows of one memory, and the manager hands extents out in order. What is next to each other on
both sides is copied as one piece: a copy of some MiB costs Python once, and lets other threads run meanwhile. Each part
keeps an answer of its own: a run that is not as it should be is looked at again part by part.

Invariants: (1) extents of a run are neighbours, ascending, without gap or overlap; (2) a run has at most `_RUN_BYTES`,
or one part, so that deadlines are looked at in between; (3) a piece of several parts is of memory that is writable and
contiguous, and that cannot be freed as long as the piece is there.

Why addresses: nothing else in Python says that the memory of two views is adjacent. That of read-only memory is told
too slowly to be worth it, so each such part is copied by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from ctypes import addressof, c_char
from typing import Any

import numpy as np

from connectors.transfer.mover import TransferItem, TransferResult, moved
from connectors.transfer.pool_checks import PartChecks
from kvcm.model.memory_pool import PAGE_BYTES

__all__ = ["Part", "Piece", "Run", "runs"]

_RUN_BYTES = 8 << 20
_BYTES_PER_STAMP_BYTE = PAGE_BYTES // 8
_NOWHERE = -1

Part = tuple[int, int, bytes, TransferItem, TransferResult]
"""Position among the items of the call, first byte of the extent in the pool, stamps of its pages, the item, and its
result when all goes well: after the copy the item is in no cache any more."""


class Piece:
    """Memory of one part, or of several that follow each other in memory, too.

    Args:
        part: the first one.
        holder: what tells where its memory is and keeps it there, None where that is not known.

    Attributes:
        offset: first byte to move, in the pool.
        parts: of the pool, in order.
    """

    __slots__ = ("_holders", "offset", "parts")

    def __init__(self, part: Part, holder: c_char | None) -> None:
        self.parts = [part]
        self.offset = part[1] + (part[3].start or 0)
        self._holders = [holder]

    def add(self, part: Part, holder: c_char | None) -> None:
        """Take in the part that follows, whole, in the pool and in memory."""
        self.parts.append(part)
        self._holders.append(holder)

    @property
    def views(self) -> Sequence[memoryview]:
        """The memory, in one view where there are several parts."""
        _, offset, _, item, _ = self.parts[-1]
        first = self._holders[0]
        if len(self.parts) == 1 or first is None:
            return item.buffers
        return [np.asarray(_Memory(addressof(first), offset + item.uri.size - self.offset, self._holders)).data]


class Run:
    """Parts whose extents follow each other in the pool.

    Attributes:
        offset: first byte of the first extent.
        end: first byte behind the last one.
        pieces: at least one.
        parts: all of them, in order.
        stamps: of all its pages, one behind the other.
    """

    __slots__ = ("end", "offset", "parts", "pieces", "stamps")

    def __init__(self, pieces: list[Piece]) -> None:
        self.pieces = pieces
        self.parts = [part for piece in pieces for part in piece.parts]
        self.stamps = b"".join([part[2] for part in self.parts])
        self.offset = self.parts[0][1]
        self.end = self.offset + len(self.stamps) * _BYTES_PER_STAMP_BYTE

    @property
    def oldest_stamp(self) -> int:
        """The smallest of them."""
        return int(np.frombuffer(self.stamps, "<u8").min())

    @property
    def is_single(self) -> bool:
        """Whether it has one part only."""
        return len(self.parts) == 1

    def split(self) -> list[Run]:
        """Return a run of each part; none when there is only one."""
        return [] if self.is_single else [Run([Piece(part, None)]) for part in self.parts]


def runs(items: Sequence[TransferItem], checks: PartChecks, refuse: Callable[[int, Exception], None]) -> Iterator[Run]:
    """Yield the items in order, those that are neighbours together.

    Args:
        items: of one call.
        checks: of them.
        refuse: is told the position of an item that cannot be moved, and why; it is in no run.
    """
    pieces: list[Piece] = []
    end = limit = memory_end = _NOWHERE
    for position, item in enumerate(items):
        try:
            offset, stamps = checks.extent_of(item)
        except Exception as error:  # whatever an item is made of
            refuse(position, error)
            continue
        address = _NOWHERE
        try:
            (view,) = item.buffers
            holder = c_char.from_buffer(view)
            address = addressof(holder)
        except Exception:  # in pieces, read-only or not contiguous: its copy says so
            holder = None
        part = position, offset, stamps, item, moved(item.size_bytes)
        extent_end = offset + len(stamps) * _BYTES_PER_STAMP_BYTE
        if offset != end or extent_end > limit:
            if pieces:
                yield Run(pieces)
            pieces, limit = [Piece(part, holder)], offset + _RUN_BYTES
        elif address == memory_end != _NOWHERE and item.start is None:
            pieces[-1].add(part, holder)
        else:
            pieces.append(Piece(part, holder))
        is_filled = offset + item.uri.size == extent_end and item.start is None and holder is not None
        end, memory_end = extent_end, address + item.uri.size if is_filled else _NOWHERE
    if pieces:
        yield Run(pieces)


class _Memory:
    """Writable memory from an address on, in the form that numpy takes, and what keeps it there."""

    __slots__ = ("__array_interface__", "holders")

    def __init__(self, address: int, size_bytes: int, holders: Sequence[object]) -> None:
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "typestr": "|u1",
            "shape": (size_bytes,),
            "data": (address, False),
        }
        self.holders = holders
