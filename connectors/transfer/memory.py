"""Positioned reads and writes of an iovec that end when every byte moved, or say why not."""

from __future__ import annotations

import errno
import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import addressof, c_char
from typing import NamedTuple, TypeVar

import numpy as np

from kvcm.connectors.transfer.mover import Direction, TransferItem
from kvcm.model.errors import InvalidArgumentError

__all__ = [
    "MAX_PIECES",
    "EndOfFileError",
    "MemorySpan",
    "RegisteredMemory",
    "StagingMemory",
    "byte_views",
    "gather_bytes",
    "groups_that_fit",
    "item_views",
    "read_exactly",
    "scatter_bytes",
    "span_of",
    "writable_views",
    "write_exactly",
]

MAX_PIECES: int = os.sysconf("SC_IOV_MAX")
"""Most pieces that one system call takes."""


class EndOfFileError(Exception):
    """The file ends before the buffers are full."""


def byte_views(buffers: Sequence[memoryview]) -> list[memoryview]:
    """Return the buffers as flat bytes, empty ones left out.

    Raises:
        TypeError: a buffer is not contiguous.
    """
    return [
        buffer if buffer.format == "B" and buffer.ndim == 1 and buffer.c_contiguous else memoryview(buffer).cast("B")
        for buffer in buffers
        if buffer.nbytes
    ]


def item_views(item: TransferItem, direction: Direction) -> list[memoryview]:
    """Return an item's memory as flat bytes, empty pieces left out.

    Raises:
        InvalidArgumentError: the lengths of the pieces do not add up to the bytes to move, or the range lies outside
            the part.
        TypeError: a piece is not contiguous.
    """
    views = byte_views(item.buffers)
    length = views[0].nbytes if len(views) == 1 else sum([view.nbytes for view in views])
    if item.start is not None:
        _check_range(item, length, direction)
    elif length != item.uri.size or not length:
        raise InvalidArgumentError(
            f"buffers hold {length} bytes, the uri's size is {item.uri.size}; both must be equal, > 0"
        )
    return views


def writable_views(item: TransferItem, direction: Direction) -> list[memoryview]:
    """Return the same where Python itself copies, and not a system call that would notice read-only memory.

    Raises:
        InvalidArgumentError: as for `item_views`; a piece to load into is read-only.
        TypeError: as for `item_views`.
    """
    views = item_views(item, direction)
    if direction is Direction.LOAD and True in [view.readonly for view in views]:
        raise InvalidArgumentError("a buffer to load into is read-only")
    return views


def _check_range(item: TransferItem, length: int, direction: Direction) -> None:
    start, size = item.start or 0, item.uri.size
    if direction is not Direction.LOAD:
        raise InvalidArgumentError(f"start is {start}, must be None for a save: a part is saved whole")
    if start < 0 or not 0 < length <= size - start:
        raise InvalidArgumentError(
            f"start is {start} and buffers hold {length} bytes, must be > 0 and end within the part's {size}"
        )


def read_exactly(
    descriptor: int, views: list[memoryview], offset: int, progress: Callable[[int], None], done_bytes: int = 0
) -> None:
    """Fill `views` from the file's bytes at `offset`.

    Args:
        descriptor: of the file.
        views: flat and writable.
        offset: in bytes.
        progress: called with the bytes of every system call; may raise to stop.
        done_bytes: that have moved already.

    Raises:
        EndOfFileError: the file is too short.
        OSError: the read failed.
    """

    def step(window: list[memoryview], position: int) -> int:
        count = os.preadv(descriptor, window, position)
        if count == 0:
            raise EndOfFileError(f"the file ends at byte {position}")
        return count

    _move(step, views, offset, progress, done_bytes)


def write_exactly(
    descriptor: int, views: list[memoryview], offset: int, progress: Callable[[int], None], done_bytes: int = 0
) -> None:
    """Write `views` to the file at `offset`; arguments as for `read_exactly`.

    Raises:
        OSError: the write failed, for example ENOSPC.
    """

    def step(window: list[memoryview], position: int) -> int:
        count = os.pwritev(descriptor, window, position)
        if count == 0:
            raise OSError(errno.EIO, f"the storage takes no bytes at {position}")
        return count

    _move(step, views, offset, progress, done_bytes)


def _move(
    step: Callable[[list[memoryview], int], int],
    views: list[memoryview],
    offset: int,
    progress: Callable[[int], None],
    done_bytes: int,
) -> None:
    """Repeat `step` over windows of the views until all are moved; interrupted calls are repeated by `os` itself."""
    index, skipped = _advance(views, 0, done_bytes)  # skipped: bytes of views[index] that moved already
    offset += done_bytes
    while index < len(views):
        window = views[index : index + MAX_PIECES]
        if skipped:
            window[0] = window[0][skipped:]
        count = step(window, offset)
        progress(count)
        offset += count
        index, skipped = _advance(views, index, skipped + count)


def _advance(views: list[memoryview], index: int, count: int) -> tuple[int, int]:
    """Return the view that byte `count` from the start of `views[index]` falls into, and the byte's position there."""
    while index < len(views) and count >= views[index].nbytes:
        count -= views[index].nbytes
        index += 1
    return index, count


# Memory that a storage's client knows by address: the engine's own, and slots that everything else goes through.
#
# Numpy copies between them, since it lets other threads run meanwhile.

T = TypeVar("T")
_SLOTS = 4
_MAX_ADDRESS = 1 << 64  # no span has so many bytes


class MemorySpan(NamedTuple):
    """Bytes of this process from an address on."""

    address: int
    size_bytes: int

    @property
    def end(self) -> int:
        """First address behind it."""
        return self.address + self.size_bytes


def span_of(memory: memoryview) -> MemorySpan:
    """Return where memory lies.

    Raises:
        InvalidArgumentError: it is not contiguous.
    """
    if not memory.c_contiguous:
        raise InvalidArgumentError("memory is not contiguous")
    size_bytes = memory.nbytes
    if not size_bytes:
        return MemorySpan(0, 0)
    if not memory.readonly:
        return MemorySpan(addressof(c_char.from_buffer(memory)), size_bytes)
    address: int = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]  # slower, and for constants too
    return MemorySpan(address, size_bytes)


def groups_that_fit(things: Sequence[T], size_of: Callable[[T], int], most_bytes: int) -> Iterator[list[T]]:
    """Yield the things in order, in groups that fit the memory; those that are larger are left out."""
    group: list[T] = []
    left = most_bytes
    for thing in things:
        if size_of(thing) > most_bytes:
            continue
        if size_of(thing) > left:
            yield group
            group, left = [], most_bytes
        group.append(thing)
        left -= size_of(thing)
    if group:
        yield group


def gather_bytes(views: Sequence[memoryview], place: memoryview) -> None:
    """Copy pieces of memory to one place, one behind the other; all are flat bytes."""
    target, start = np.frombuffer(place, np.uint8), 0
    for view in views:
        target[start : start + view.nbytes] = np.frombuffer(view, np.uint8)
        start += view.nbytes


def scatter_bytes(place: memoryview, views: Sequence[memoryview]) -> None:
    """Copy one piece of memory to several; all are flat bytes."""
    source, start = np.frombuffer(place, np.uint8), 0
    for view in views:
        np.frombuffer(view, np.uint8)[:] = source[start : start + view.nbytes]
        start += view.nbytes


class RegisteredMemory:
    """Spans that do not overlap. Changed by one thread at a time, asked by any."""

    def __init__(self) -> None:
        self.spans: tuple[MemorySpan, ...] = ()

    def add(self, span: MemorySpan) -> None:
        """Remember a span.

        Raises:
            InvalidArgumentError: it is empty or overlaps another.
        """
        if not span.size_bytes:
            raise InvalidArgumentError("memory of 0 bytes cannot be registered")
        if any(span.address < other.end and other.address < span.end for other in self.spans):
            raise InvalidArgumentError(f"{span.size_bytes} bytes of memory overlap what is registered already")
        self.spans = tuple(sorted((*self.spans, span)))

    def remove(self, span: MemorySpan) -> None:
        """Forget a span."""
        self.spans = tuple(other for other in self.spans if other != span)

    def contains(self, span: MemorySpan) -> bool:
        """Whether a span lies inside one of them."""
        address, size_bytes = span
        spans = self.spans
        index = bisect_right(spans, (address, _MAX_ADDRESS)) - 1
        return index >= 0 and address + size_bytes <= spans[index].end


class StagingMemory:
    """Slots of equal size in one piece of memory, each lent to one thread at a time.

    Args:
        size_bytes: of all slots together; untouched slots take up nothing.
    """

    def __init__(self, size_bytes: int) -> None:
        self.slot_bytes = size_bytes // _SLOTS
        self._memory = np.empty(self.slot_bytes * _SLOTS, np.uint8).data
        self._free = list(range(_SLOTS))
        self._returned = threading.Condition()

    @property
    def span(self) -> MemorySpan:
        """All of it."""
        return span_of(self._memory)

    def batches(self, things: Sequence[T], size_of: Callable[[T], int]) -> Iterator[list[T]]:
        """Yield the things in order, in groups that fit a slot; those that are larger are left out."""
        return groups_that_fit(things, size_of, self.slot_bytes)

    @contextmanager
    def slot(self, seconds_left: Callable[[], float]) -> Iterator[memoryview | None]:
        """Lend a slot; None when none is returned in time."""
        with self._returned:
            index = self._free.pop() if self._returned.wait_for(lambda: self._free, max(0.0, seconds_left())) else None
        if index is None:
            yield None
            return
        try:
            yield self._memory[index * self.slot_bytes : (index + 1) * self.slot_bytes]
        finally:
            with self._returned:
                self._free.append(index)
                self._returned.notify()
