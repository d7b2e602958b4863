"""A file that knows whether everything that was written to it is on the disk."""

from __future__ import annotations

import os
from contextlib import suppress

__all__ = ["SyncedFile"]


class SyncedFile:
    """An open file.

    Args:
        descriptor: of the file, which this closes.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._is_synced = True

    def sync(self) -> None:
        """Put all writes on the disk.

        Raises:
            OSError: the disk failed.
        """
        if not self._is_synced:
            os.fsync(self._descriptor)
            self._is_synced = True

    def close(self) -> None:
        """Let go of the file."""
        with suppress(OSError):
            os.close(self._descriptor)
