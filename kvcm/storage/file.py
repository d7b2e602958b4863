"""Path storages: directories that all engines have mounted at the same path. Which types there are: path_types.py.

Engines create and write the files; the manager makes up names and deletes. A packed file holds several parts side
by side in slots of equal size. Deleting one part punches its slot out of the file, so that the space returns at once
and no neighbour is touched; the file itself goes with its last part. A slot is never handed out twice (decision 16).

Which slots are deleted stands beside the file (slot_notes.py): whoever deletes the last one, another manager or this
one after a restart, finds all the others there. Notes are only ever appended, each by one write, so two of one host
that delete at the same time lose nothing. NFS has no atomic append: of two managers on different hosts that delete
slots of one file at the same moment one may overwrite the other's notes. Then the file and what stands beside it are
left when their last slot is deleted: their space (that of one file, at most, and only names where slots are punched
out) is left to the scrub, and a slot whose note is lost counts as present in `exists`. No other bytes are harmed.
Rejected: a table in the manager's memory, gone with it; a document in the metadata store, which would bind the storage
to it; a marker file per slot, to be counted by listing folders that hold millions of files.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from stat import S_ISDIR
from typing import NamedTuple, TypeVar

from kvcm.model.errors import StorageIOError
from kvcm.model.names import path_component
from kvcm.model.uri import LocationUri
from kvcm.storage.backend import Allocation, ObjectPage, StorageBackend, StorageSpace, StoredObject
from kvcm.storage.file_listing import object_pages, remove_objects
from kvcm.storage.file_making import make_files, make_folders
from kvcm.storage.file_probe import PROBE_PREFIX, probe
from kvcm.storage.folders import NoFolderError
from kvcm.storage.packing import pack, slot_count
from kvcm.storage.slot_notes import beside, note_slots, noted_slots
from kvcm.storage.threads import StorageThreads

__all__ = ["FileStorage"]

Answer = TypeVar("Answer")

_PUNCH_HOLE_KEEP_SIZE = 0x03  # fallocate(2): FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
_CANNOT_PUNCH = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
_MOST_THREADS = 64  # more than ever delete at the same time
_MOST_PROBES = 8  # that hang: with threads of their own they take none of those
_libc = ctypes.CDLL(None, use_errno=True)


class _Deletion(NamedTuple):
    """Slots of one file that have to go: byte range by number; none for a file that is one part as a whole."""

    path: str
    slots: dict[int, tuple[int, int]]


class FileStorage:
    """A directory tree `<root>/<cluster id>/<instance>/<spec>/<key>.<location id>`.

    Args:
        name: of the storage.
        scheme: of its uris.
        root: directory that everything lies below.
        cluster_id: of the deployment.
        keys_per_file: parts that are packed into a file.
        makes_objects: whether files are made here, empty, before engines get their addresses.
    """

    def __init__(
        self, name: str, scheme: str, root: str, cluster_id: str, keys_per_file: int, *, makes_objects: bool = False
    ) -> None:
        self._name = name
        self._scheme = scheme
        self._root = root.rstrip("/")  # otherwise as it was configured, since engines compare it letter by letter
        self.directory = self._directory_of(cluster_id)
        self._keys_per_file = keys_per_file
        self._makes_objects = makes_objects
        self._threads = StorageThreads(f"storage-{name}", _MOST_THREADS)
        self._probe_threads = StorageThreads(f"probe-{name}", _MOST_PROBES)
        self._probe_prefix = f"{PROBE_PREFIX}{secrets.token_hex(8)}-"
        self._probe_numbers = count()

    def allocate(self, allocation: Allocation) -> list[str]:
        uris = [""] * len(allocation.parts)
        for slots in pack(allocation, self._keys_per_file):
            path = self.directory + slots[0][1]
            for index, _, slot in slots:
                size = allocation.parts[index].size_bytes
                uris[index] = str(LocationUri(self._scheme, self._name, path, size, slot))
        return uris

    @property
    def makes_objects(self) -> bool:
        return self._makes_objects

    async def make_objects(self, uris: Sequence[str]) -> None:
        paths = [LocationUri.parse(uri).path for uri in uris]
        await self._ask(lambda: make_files(self.directory, paths))

    async def probe(self) -> None:
        name = f"{self._probe_prefix}{next(self._probe_numbers)}"
        await self._told(self._probe_threads, lambda: self._probe(name))

    def _probe(self, name: str) -> None:
        try:
            probe(self.directory, name)
        except StorageIOError as error:
            raise self._failure(f"probe failed: {error}") from error

    async def delete(self, uris: Sequence[str]) -> list[str | None]:
        return await self._for_each_file(uris, _delete)

    async def discard(self, uris: Sequence[str]) -> list[str | None]:
        return await self._for_each_file(uris, partial(_discard, self.directory))

    async def _for_each_file(self, uris: Sequence[str], work: Callable[[_Deletion], None]) -> list[str | None]:
        """Do the work in a thread, file by file; return per uri why it failed, None where it did not."""
        return await self._threads.run(lambda: self._file_by_file([LocationUri.parse(uri) for uri in uris], work))

    def _file_by_file(self, uris: Sequence[LocationUri], work: Callable[[_Deletion], None]) -> list[str | None]:
        """Files that are missing because the storage went away, before or meanwhile, do not count as gone."""
        try:
            before = self._mounted_device()
        except StorageIOError as error:
            return [str(error)] * len(uris)
        reasons = _file_by_file(uris, work)
        try:
            after = self._mounted_device()
        except StorageIOError as error:
            return [reason or str(error) for reason in reasons]
        if after != before:
            return [reason or f"storage {self._name} was mounted anew meanwhile" for reason in reasons]
        return reasons

    def _mounted_device(self) -> int:
        """Return the device that the deployment's directory is on; inodes are not the same for ever everywhere."""
        try:
            status = Path(self.directory).stat()
        except (FileNotFoundError, NotADirectoryError) as error:
            raise self._not_mounted() from error
        except OSError as error:
            raise self._failure(f"{self.directory}: {error.strerror}") from error
        if not S_ISDIR(status.st_mode):
            raise self._not_mounted()
        return status.st_dev

    async def exists(self, uris: Sequence[str]) -> list[bool]:
        return await self._ask(lambda: self._exist([LocationUri.parse(uri) for uri in uris]))

    def _exist(self, uris: Sequence[LocationUri]) -> list[bool]:
        found = list(map(_is_complete, uris))
        if not all(found):
            self.check_mounted()
        return found

    async def objects(self, cluster_id: str) -> AsyncIterator[ObjectPage]:
        directory = self._directory_of(cluster_id)
        pages = object_pages(directory)
        while (page := await self._ask(lambda: next(pages, None))) is not None:
            yield page
        if directory == self.directory:
            await self._ask(self.check_mounted)

    async def remove_objects(self, cluster_id: str, objects: Sequence[StoredObject]) -> list[str | None]:
        return await self._ask(lambda: self._remove_objects(self._directory_of(cluster_id), objects))

    def _remove_objects(self, directory: str, objects: Sequence[StoredObject]) -> list[str | None]:
        reasons = remove_objects(directory, objects)
        if directory == self.directory:
            self.check_mounted()
        return reasons

    def _directory_of(self, cluster_id: str) -> str:
        return f"{self._root}/{path_component(cluster_id)}/"

    def check_mounted(self) -> None:
        """Refuse to take what is not mounted here for what is not there. Blocks.

        Raises:
            StorageIOError: the deployment's directory is not there, or nobody can say.
        """
        self._mounted_device()

    def _not_mounted(self) -> StorageIOError:
        return self._failure(
            f"{self.directory} is not there, is it mounted on this host? "
            "If it is gone for good, UpdateStorage makes it anew"
        )

    def _failure(self, reason: str) -> StorageIOError:
        return StorageIOError(f"storage {self._name}: {reason}")

    async def _ask(self, question: Callable[[], Answer]) -> Answer:
        return await self._told(self._threads, question)

    async def _told(self, threads: StorageThreads, question: Callable[[], Answer]) -> Answer:
        """Run what asks the medium; its failures name the storage."""
        try:
            return await threads.run(question)
        except OSError as error:
            raise self._failure(str(error.strerror)) from error
        except NoFolderError as error:
            raise self._not_mounted() from error

    async def space(self) -> StorageSpace:
        status = await self._ask(lambda: os.statvfs(self._root))
        return StorageSpace(status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize)

    def inherit(self, previous: StorageBackend) -> None:
        """All there is to remember lies beside the files."""

    def close(self) -> None:
        """Nothing is held open."""


def _file_by_file(uris: Sequence[LocationUri], work: Callable[[_Deletion], None]) -> list[str | None]:
    deletions: dict[str, _Deletion] = {}
    for uri in uris:
        slots = deletions.setdefault(uri.path, _Deletion(uri.path, {})).slots
        if uri.blkid is not None:
            slots[uri.blkid] = (uri.offset, uri.size)
    reasons = {path: _reason(deletion, work) for path, deletion in deletions.items()}
    return [reasons[uri.path] for uri in uris]


def _reason(deletion: _Deletion, work: Callable[[_Deletion], None]) -> str | None:
    """Do the work and return why it failed, None when it did not."""
    try:
        work(deletion)
    except OSError as error:
        return f"{deletion.path}: {error.strerror}"
    except (NoFolderError, StorageIOError) as error:
        return f"{deletion.path}: {error}"
    return None


def _delete(deletion: _Deletion) -> None:
    path = deletion.path
    if not deletion.slots or len(deletion.slots) >= slot_count(path):
        _unlink(path)
        return
    was_there = _is_there(path)
    if not was_there and not _is_there(beside(path)):
        return
    for offset, size in deletion.slots.values():
        _punch(path, offset, size)
    noted = _note_deleted(deletion)
    # Whoever deletes the last slot removes both. If that was done meanwhile, these slots had been noted before, and now
    # they are noted once more: nobody would come for that.
    if not _is_there(path) and (was_there or noted == deletion.slots.keys()):
        _unlink(path)


def _discard(directory: str, deletion: _Deletion) -> None:
    """Slots of a file that others are still to be written to: it may not be there yet."""
    if 0 < len(deletion.slots) < slot_count(deletion.path):
        make_folders(directory, deletion.path)
        _note_deleted(deletion)


def _note_deleted(deletion: _Deletion) -> set[int]:
    """Note slots, and remove the file with the last of them; return what is noted now."""
    note_slots(deletion.path, deletion.slots)
    noted = noted_slots(deletion.path)
    if len(noted) >= slot_count(deletion.path):
        _unlink(deletion.path)
    return noted


def _unlink(path: str) -> None:
    Path(path).unlink(missing_ok=True)
    Path(beside(path)).unlink(missing_ok=True)


def _is_there(path: str) -> bool:
    """Return whether there is anything; a storage that does not say raises its error."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _punch(path: str, offset: int, size: int) -> None:
    """Give a slot's blocks back to the file system. Where it cannot punch, the space returns with the whole file."""
    if size <= 0:
        return
    with suppress(FileNotFoundError):
        descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            punched = _libc.fallocate(descriptor, _PUNCH_HOLE_KEEP_SIZE, ctypes.c_int64(offset), ctypes.c_int64(size))
            code = ctypes.get_errno()
        finally:
            os.close(descriptor)
        if punched != 0 and code not in _CANNOT_PUNCH:
            raise OSError(code, os.strerror(code))


def _is_complete(uri: LocationUri) -> bool:
    try:
        if Path(uri.path).lstat().st_size < uri.offset + uri.size:
            return False
    except (FileNotFoundError, NotADirectoryError):
        return False
    # A slot that was punched out still lies inside its file.
    return uri.blkid is None or uri.blkid not in noted_slots(uri.path)
