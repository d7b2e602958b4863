"""Probes a path storage as an engine uses it: a small file is written, closed, read back and deleted.

The file lies in the deployment's directory itself, where no object lies: it is neither listed nor scrubbed. Every probe
has a file of its own, so that one that hangs and ends late is not in the way of the next.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from stat import S_ISREG
from typing import Final

from kvcm.model.errors import StorageIOError
from kvcm.storage.file_writes import write_all
from kvcm.storage.folders import opened_folder

__all__ = ["PROBE_PREFIX", "probe"]

PROBE_PREFIX: Final = ".kvcm-probe-"

_CONTENT_BYTES: Final = 4096
_LEFTOVER_SECONDS: Final = 3600.0  # by then whoever made it is dead
_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_OLD: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC


def probe(directory: str, name: str) -> None:
    """Write, read back and delete a file, then remove what dead managers left of such. Blocks.

    Args:
        directory: of the deployment.
        name: of the file; begins with `PROBE_PREFIX`, and nothing of that name is there.

    Raises:
        NoFolderError: the deployment's directory is not there.
        StorageIOError: what failed, and how.
    """
    with _step("opening its directory", directory), opened_folder(directory) as folder:
        try:
            now = _write_and_read(folder, name)
        except BaseException:
            with suppress(OSError):
                os.unlink(name, dir_fd=folder)
            raise
        with _step("deleting", name):
            os.unlink(name, dir_fd=folder)
        with suppress(OSError):
            _remove_leftovers(folder, now - _LEFTOVER_SECONDS)


def _write_and_read(folder: int, name: str) -> float:
    """Return the storage's time in unix seconds."""
    content = os.urandom(_CONTENT_BYTES)
    with _step("writing", name), os.fdopen(os.open(name, _NEW, 0o600, dir_fd=folder), "wb", buffering=0) as file:
        write_all(file.fileno(), content)
    with _step("reading", name), os.fdopen(os.open(name, _OLD, dir_fd=folder), "rb") as file:
        with suppress(OSError):  # a file system that keeps what was written in memory may still ignore it
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        found = file.read(_CONTENT_BYTES + 1)
        now = os.fstat(file.fileno()).st_mtime
    if found != content:
        raise StorageIOError(f"what was read back of {name} ({len(found)} bytes) is not what was written")
    return now


def _remove_leftovers(folder: int, older_than: float) -> None:
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries if entry.name.startswith(PROBE_PREFIX)]
    for name in names:
        with suppress(FileNotFoundError):  # others remove them too
            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if S_ISREG(status.st_mode) and status.st_mtime < older_than:
                os.unlink(name, dir_fd=folder)


@contextmanager
def _step(what: str, name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageIOError(f"{what} {name}: {error.strerror or error}") from error
