"""Locations packed for memory.

A million blocks hold a million locations that differ in their chunk only, page by page: everything else of a location
is the same for all blocks of one write session. So a location is kept as two values: its chunk, the very object that
the answers share, and its *header*, all other fields in one tuple that equal locations share. A block with one location
(nearly every block) needs no tuple around them.
"""

from __future__ import annotations

from collections.abc import Callable
from sys import getrefcount
from typing import TypeAlias, cast

from kvcm.model.locations import Location, LocationStatus
from kvcm.model.storages import StorageType

__all__ = ["Chunks", "Header", "HeaderPool", "Headers", "header_of", "unpack"]

Header: TypeAlias = tuple[str, str, StorageType, LocationStatus, tuple[str, ...], int, float, str, float, int, float]
"""The fields of a `Location` in their order, without the chunk."""

Headers: TypeAlias = Header | tuple[Header, ...]
"""Header of the only location, or those of several; which of them, the type of the chunks tells."""

Chunks: TypeAlias = bytes | tuple[bytes, ...]
"""Chunk of the only location, or those of several."""

_LEAST_POOL_SIZE = 1024
_OWN_REFERENCES = 4  # key and value of the pool, the loop variable, the argument of getrefcount

# A named tuple's own constructor binds its arguments in Python; from a ready tuple it takes a third of the time.
_new_location = cast("Callable[[type[Location], tuple[object, ...]], Location]", tuple.__new__)


def header_of(location: Location) -> Header:
    """Return all fields of a location but the chunk."""
    return location[:5] + location[6:]


def unpack(headers: Headers, chunks: Chunks) -> tuple[Location, ...]:
    """Return the locations of a block."""
    if type(chunks) is bytes:
        of = cast("Header", headers)
        # Spelled out: slices and a function call would double the time.
        fields = (of[0], of[1], of[2], of[3], of[4], chunks, of[5], of[6], of[7], of[8], of[9], of[10])
        return (_new_location(Location, fields),)
    pairs = zip(cast("tuple[Header, ...]", headers), cast("tuple[bytes, ...]", chunks), strict=True)
    return tuple([_new_location(Location, (*head[:5], chunk, *head[5:])) for head, chunk in pairs])


class HeaderPool:
    """Equal headers as one object. Holds at most twice as many as blocks use, plus a constant."""

    __slots__ = ("_headers", "_last", "_most")

    def __init__(self) -> None:
        self._headers: dict[Header, Header] = {}
        self._last: Header | None = None
        self._most = _LEAST_POOL_SIZE

    def __len__(self) -> int:
        return len(self._headers)

    def pack(self, locations: tuple[Location, ...]) -> tuple[Headers, Chunks]:
        """Return the two values that stand for the locations of a block."""
        if len(locations) == 1:
            location = locations[0]
            return self.share(location[:5] + location[6:]), location[5]
        return (
            tuple([self.share(header_of(location)) for location in locations]),
            tuple([location.chunk for location in locations]),
        )

    def clear(self) -> None:
        """Forget all headers; those in use stay as they are."""
        self._headers.clear()
        self._last = None
        self._most = _LEAST_POOL_SIZE

    def share(self, header: Header) -> Header:
        """Return the one object that stands for all headers equal to this one."""
        # The blocks of a page mostly share one header, and comparing is cheaper than hashing.
        if header == self._last:
            return self._last
        shared = self._last = self._headers.setdefault(header, header)
        if len(self._headers) > self._most:
            self._forget_unused()
        return shared

    def _forget_unused(self) -> None:
        # Tuples take no weak references; their number of references tells as well which of them no block uses.
        self._headers = {header: header for header in self._headers if getrefcount(header) > _OWN_REFERENCES}
        self._most = 2 * len(self._headers) + _LEAST_POOL_SIZE
