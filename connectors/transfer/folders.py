"""Folders that stay open while one thread moves one batch.

Blocks of one prompt lie beside each other, so the way to their folder is walked once per batch, and each file is opened
by its name in it (`paths.py`). Nothing outlives the batch: an open folder keeps its mount from being taken away, and a
folder that was replaced meanwhile would be another one. What is not found in an open folder is looked for from the
root, which alone can tell a lost file from a storage that is not mounted, and makes what a save needs.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress

from connectors.transfer.paths import components_below, open_below, open_folder_below, open_in_folder

__all__ = ["OpenFolders"]

_MOST_FOLDERS = 16
_NO_NAMES = frozenset({"", ".", ".."})
_LOOK_AGAIN = frozenset({errno.ENOENT, errno.ESTALE})


class OpenFolders:
    """Opens files below one or several roots; for one thread.

    Args:
        file_mode: mode of files made here.
        directory_mode: mode of directories made here.
    """

    __slots__ = ("_directory_mode", "_file_mode", "_folders")

    def __init__(self, file_mode: int, directory_mode: int) -> None:
        self._file_mode = file_mode
        self._directory_mode = directory_mode
        self._folders: dict[tuple[str, str], int] = {}

    def open(self, root: str, path: str, flags: int) -> int:
        """Open the regular file `path` and return its descriptor.

        Args:
            root: directory of the storage, without a slash at its end.
            path: absolute, below the root.
            flags: as for `open_below`, whose errors are raised.
        """
        directory, _, name = path.rpartition("/")
        folder = self._folders.get((root, directory))
        if folder is None or name in _NO_NAMES:
            return self._open_first(root, path, flags)
        try:
            return open_in_folder(folder, name, flags, self._file_mode)
        except OSError as error:
            if error.errno not in _LOOK_AGAIN:
                raise
            return open_below(root, components_below(root, path), flags, self._file_mode, self._directory_mode)

    def _open_first(self, root: str, path: str, flags: int) -> int:
        """Open a file from the root, and its folder for the next one."""
        components = components_below(root, path)
        try:
            folder = open_folder_below(root, components[:-1])
        except OSError:  # what is wrong, or is to be made, is found out on the way to the file
            return open_below(root, components, flags, self._file_mode, self._directory_mode)
        if len(self._folders) >= _MOST_FOLDERS:
            self.close()
        self._folders[root, path.rpartition("/")[0]] = folder
        return self.open(root, path, flags)

    def close(self) -> None:
        """Keep nothing open."""
        while self._folders:
            with suppress(OSError):  # nothing is written through them, so nothing is lost
                os.close(self._folders.popitem()[1])
