"""Writes that end: a storage that takes a part of the bytes gets the rest, one that takes none has failed."""

from __future__ import annotations

import errno
import os

__all__ = ["write_all"]


def write_all(descriptor: int, content: bytes) -> None:
    """Write bytes where the file's position is. Blocks.

    A buffered file of Python's would try for ever where a write moves nothing.

    Raises:
        OSError: the storage failed, or takes no bytes.
    """
    left = memoryview(content)
    while left:
        count = os.write(descriptor, left)
        if not count:
            raise OSError(errno.EIO, "the storage takes no bytes")
        left = left[count:]
