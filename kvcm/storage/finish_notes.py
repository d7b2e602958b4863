"""Files of finish notes beside the blocks of a path storage: which bytes there were finished.

Bytes alone do not say whether their writer came to an end. Managers append to files of their own which blocks did, and
where they lie; `kvcm.cache.finish_notes` has what stands in them. Files are opened below the deployment's directory and
never through a link, as all others there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from stat import S_ISREG
from typing import BinaryIO, Final, NamedTuple

from kvcm.storage.file_objects import opened_folder, write_all

__all__ = ["NotesFile", "NotesFolder"]

_PREFIX: Final = ".kvcm-finished-"
_APPEND: Final = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_READ: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC


class NotesFile(NamedTuple):
    """A file of notes.

    Attributes:
        writer: who wrote it.
        size_bytes: its size.
        changed_at: when it was written last, unix seconds of the storage.
    """

    writer: str
    size_bytes: int
    changed_at: float


class NotesFolder:
    """The files of notes of one storage. All methods block.

    Args:
        storage: its name; two storages may share a directory.
        directory: of the deployment.

    Attributes:
        storage: as given.
        directory: as given.

    Raises of every other method:
        NoFolderError: the deployment's directory is not there.
        OSError: the storage failed.
    """

    def __init__(self, storage: str, directory: str) -> None:
        self.storage = storage
        self.directory = directory
        self._prefix = f"{_PREFIX}{storage}-"

    @classmethod
    def found_below(cls, root: Path) -> list[NotesFolder]:
        """Return those of all deployments and storages that have notes below the root of a storage."""
        files = root.glob(f"*/{_PREFIX}*-*")
        found = {(file.parent, file.name.removeprefix(_PREFIX).rpartition("-")[0]) for file in files}
        return [cls(storage, f"{directory}/") for directory, storage in sorted(found)]

    def files(self) -> list[NotesFile]:
        """Return the files, those that were written last at the end."""
        found = []
        with opened_folder(self.directory) as folder:
            with os.scandir(folder) as entries:
                names = [entry.name for entry in entries if entry.name.startswith(self._prefix)]
            for name in names:
                writer = name.removeprefix(self._prefix)
                with suppress(FileNotFoundError):
                    if "-" not in writer:  # else a storage of a longer name
                        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
                        if S_ISREG(status.st_mode):
                            found.append(NotesFile(writer, status.st_size, status.st_mtime))
        return sorted(found, key=lambda file: file.changed_at)

    def append(self, writer: str, content: Callable[[bool], bytes]) -> bool:
        """Append to a file, which is made where it is missing; returns whether it was empty.

        Args:
            writer: of the file; without a hyphen.
            content: returns what to append; is called with whether the file is empty, and again where it was removed
                meanwhile.
        """
        while True:
            with opened_folder(self.directory) as folder:
                descriptor = os.open(self._prefix + writer, _APPEND, 0o600, dir_fd=folder)
                try:
                    size = os.fstat(descriptor).st_size
                    _write_or_nothing(descriptor, size, content(size == 0))
                    if os.fstat(descriptor).st_nlink > 0:
                        return size == 0
                finally:
                    os.close(descriptor)  # removed by a leader: a new one is begun

    def rename(self, writer: str, new: str) -> None:
        """Give a file another name."""
        with opened_folder(self.directory) as folder:
            os.replace(self._prefix + writer, self._prefix + new, src_dir_fd=folder, dst_dir_fd=folder)

    def remove(self, writers: Collection[str]) -> None:
        """Remove files."""
        with opened_folder(self.directory) as folder:
            for writer in writers:
                with suppress(FileNotFoundError):
                    os.unlink(self._prefix + writer, dir_fd=folder)

    @contextmanager
    def opened(self, writer: str) -> Iterator[BinaryIO]:
        """Open a file for reading."""
        with opened_folder(self.directory) as folder:
            descriptor = os.open(self._prefix + writer, _READ, dir_fd=folder)
        with os.fdopen(descriptor, "rb") as file:
            yield file


def _write_or_nothing(descriptor: int, size: int, content: bytes) -> None:
    """Write at the end of a file of so many bytes; a part that was written before a failure is cut off again."""
    try:
        write_all(descriptor, content)
    except OSError:
        with suppress(OSError):
            os.ftruncate(descriptor, size)
        raise
