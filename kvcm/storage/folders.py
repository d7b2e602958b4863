"""Directories of a storage, opened one component after the other and never through a link.

So nothing outside a storage is listed, made or removed, whatever somebody puts into its tree, and whenever.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

__all__ = ["NoFolderError", "made_folder", "opened_folder"]

_NO_FOLDER: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MODE: Final = 0o700  # as engines make them: KV tells the prompt


class NoFolderError(Exception):
    """There is no directory of that name, or it is gone, or it is a link."""


@contextmanager
def opened_folder(name: str, above: int | None = None) -> Iterator[int]:
    """Open a directory; without `above`, by its absolute path.

    Raises:
        NoFolderError: there is none of that name, or it is a link.
        OSError: it cannot be opened.
    """
    try:
        descriptor = os.open(name.rstrip("/"), _FOLDER, dir_fd=above)  # a slash would have a link followed
    except OSError as error:
        if error.errno in _NO_FOLDER:
            raise NoFolderError(name) from error
        raise
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def made_folder(name: str, above: int) -> Iterator[int]:
    """Open a directory, made if there is nothing of that name.

    Raises:
        OSError: it cannot be made or opened; ENOTDIR when it is a link or no directory.
    """
    with suppress(FileExistsError):
        os.mkdir(name, _MODE, dir_fd=above)
    try:
        with opened_folder(name, above) as descriptor:
            yield descriptor
    except NoFolderError as error:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), name) from error
