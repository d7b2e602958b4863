"""Positioned reads and writes of an iovec that end when every byte moved, or say why not."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence

from connectors.transfer.mover import Direction, TransferItem
from kvcm.model.errors import InvalidArgumentError

__all__ = [
    "MAX_PIECES",
    "EndOfFileError",
    "byte_views",
    "item_views",
    "read_exactly",
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
        InvalidArgumentError: the lengths of the pieces do not add up to what is to be moved, or that is no part of what
            is stored.
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
