"""The witness of a path storage: beside its packed files it says how new the metadata was when slots were deleted last.

A slot that is deleted reads as zeros, and later as another block. Metadata from before that, of a backup, an older
dump or a replica that lagged, still names it; so does metadata of now where the storage itself was put back. Before a
slot is deleted, the store gets a larger deletion number and then the witness the same (`kvcm.store.numbers`): which of
the two is older can be seen from then on.

Nothing of that is written for files of one part: their names are never used twice.

A second file has the times that managers wrote into the store (`kvcm.registry.loss_journal`): a store that is put back
whole, with all that lies beside it, has older ones.

On a full medium nothing could be deleted if the witness could not be written. So a spare file beside it is given up
for it; without one the witness is overwritten where it is, which takes no space. A crash in that very write may leave
one that cannot be read, and the storage is verified.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

from kvcm.model.errors import StorageIOError
from kvcm.storage.backend import is_full
from kvcm.storage.file_objects import NEW_SUFFIX, NoFolderError, opened_folder, write_all
from kvcm.storage.threads import StorageThreads
from kvcm.store.numbers import DeletionNumbers, Witnessed, decode_witness, encode_witness

__all__ = ["WITNESS_PREFIX", "Witness"]

WITNESS_PREFIX: Final = ".kvcm-witness-"
_TIMES_PREFIX: Final = ".kvcm-times-"
_MOST_BYTES: Final = 1 << 20
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_WRITE: Final = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
_OVERWRITE: Final = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_SPARE_PREFIX: Final = ".kvcm-spare-"
_SPARE_BYTES: Final = 64 << 10
_MICROSECONDS: Final = 1_000_000


class Witness:
    """The witness of one storage.

    Args:
        storage: its name; two storages may share a directory.
        directory: of the deployment.
        threads: where the medium is asked.
        now: unix seconds.
    """

    def __init__(self, storage: str, directory: str, threads: StorageThreads, now: Callable[[], float]) -> None:
        self._storage = storage
        self._directory = directory
        self._name = WITNESS_PREFIX + storage
        self._spare = _SPARE_PREFIX + storage
        self._times = _TIMES_PREFIX + storage
        self._threads = threads
        self._now = now
        self._advancing = asyncio.Lock()
        self._begun = self._ended = 0  # number of the last advance that began, and of the last that ended well
        self._deletions: set[asyncio.Future[None]] = set()

    def read(self) -> Witnessed | None:
        """Return what it says, None where there is none. Blocks.

        Raises:
            NoFolderError: the deployment's directory is not there.
            OSError: the storage failed.
        """
        content = self._read(self._name)
        return decode_witness(content) if content is not None else None

    def _read(self, name: str) -> bytes | None:
        with opened_folder(self._directory) as folder:
            try:
                descriptor = os.open(name, _READ, dir_fd=folder)
            except FileNotFoundError:
                return None
            with os.fdopen(descriptor, "rb") as file:
                return file.read(_MOST_BYTES)

    def read_times(self) -> bytes | None:
        """Return the times of the store as they were written here last, None where they were not. Blocks.

        Raises:
            NoFolderError: the deployment's directory is not there.
            OSError: the storage failed.
        """
        return self._read(self._times)

    def write_times(self, content: bytes) -> None:
        """Write the times of the store. Blocks.

        Raises:
            NoFolderError: the deployment's directory is not there.
            OSError: the storage failed.
        """
        with opened_folder(self._directory) as folder:
            _replace_file(folder, self._times, content)

    def keep_spare(self) -> None:
        """Make the spare file where it is missing and the medium has space for it. Blocks."""
        with suppress(NoFolderError, OSError), opened_folder(self._directory) as folder:
            if not _exists(folder, self._spare):
                try:
                    _write_file(folder, self._spare, bytes(_SPARE_BYTES), _WRITE)
                except OSError:
                    os.unlink(self._spare, dir_fd=folder)  # a part of one is none
                    raise

    def _write(self, witnessed: Witnessed) -> None:
        content = encode_witness(witnessed)
        with opened_folder(self._directory) as folder:
            try:
                _replace_file(folder, self._name, content)
            except OSError as error:
                if not is_full(error):
                    raise
                self._write_on_full_medium(folder, content, error)

    def _write_on_full_medium(self, folder: int, content: bytes, full: OSError) -> None:
        for name in (self._spare, self._name + NEW_SUFFIX):
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=folder)
        try:
            _replace_file(folder, self._name, content)
        except OSError as error:
            if not is_full(error) or not _exists(folder, self._name):
                raise full from error
            _write_file(folder, self._name, content, _OVERWRITE)

    async def advance(self, numbers: DeletionNumbers, *, force: bool = False) -> None:
        """Give store and witness a larger number. What was marked as deleting before may be deleted now.

        Args:
            numbers: of the store.
            force: also where one of the two is older: everything there was verified.

        Raises:
            StorageIOError: they are not of the same time, or one of them failed.
            NoFolderError: the deployment's directory is not there.
            OSError: the storage failed.
        """
        begun = self._begun
        async with self._advancing:
            if begun < self._ended and not force:
                return  # another one began after this call, and covers it
            self._begun += 1
            witnessed = await self._threads.run(self.read)
            least = int(self._now() * _MICROSECONDS)
            given = await numbers.advance(self._storage, least, witnessed or {}, force=force)
            if given is None:
                raise StorageIOError(
                    f"storage {self._storage}: its packed files and the metadata are not of the same time: nothing of "
                    "them is deleted until the leader has verified them"
                )
            await self._threads.run(lambda: self._write(given))
            await numbers.confirm(self._storage, witnessed or {}, given)
            self._ended = self._begun

    @contextmanager
    def deleting(self) -> Iterator[None]:
        """Count a deletion while the context lasts."""
        done = asyncio.get_running_loop().create_future()
        self._deletions.add(done)
        try:
            yield
        finally:
            self._deletions.remove(done)
            done.set_result(None)

    async def deletions_ended(self, seconds: float) -> bool:
        """Wait for the deletions in flight, which may be of metadata that was rolled back; return whether all ended."""
        if not self._deletions:
            return True
        _, running = await asyncio.wait(set(self._deletions), timeout=seconds)
        return not running


def _replace_file(folder: int, name: str, content: bytes) -> None:
    _write_file(folder, name + NEW_SUFFIX, content, _WRITE)
    os.replace(name + NEW_SUFFIX, name, src_dir_fd=folder, dst_dir_fd=folder)


def _write_file(folder: int, name: str, content: bytes, flags: int) -> None:
    descriptor = os.open(name, flags, 0o600, dir_fd=folder)
    try:
        write_all(descriptor, content)
        os.ftruncate(descriptor, len(content))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exists(folder: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True
