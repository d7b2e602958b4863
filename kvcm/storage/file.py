"""Path storages: directories that all engines have mounted at the same path. Which types there are: path_types.py.

Engines create and write the files; the manager makes up names and deletes. A packed file holds several parts side
by side in slots of equal size, which are deleted one by one and handed out again (decision 16): file_slots.py.

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

import os
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import count
from pathlib import Path
from stat import S_ISDIR
from typing import TypeVar

from kvcm.model.errors import StorageIOError
from kvcm.model.names import path_component
from kvcm.model.uri import LocationUri
from kvcm.storage.backend import Allocation, ObjectPage, Parts, StorageBackend, StorageSpace, StoredObject
from kvcm.storage.file_listing import object_pages, remove_objects
from kvcm.storage.file_making import make_files
from kvcm.storage.file_probe import PROBE_PREFIX, probe
from kvcm.storage.file_reuse import SlotGiver
from kvcm.storage.file_slots import PackedFiles, SlotsOfFile, is_complete, slots_by_file
from kvcm.storage.folders import NoFolderError
from kvcm.storage.packing import packed_uris
from kvcm.storage.slots import FreeSlots, SlotReuse
from kvcm.storage.threads import StorageThreads

__all__ = ["FileStorage"]

Answer = TypeVar("Answer")

_MOST_THREADS = 64  # more than ever delete at the same time
_MOST_PROBES = 8  # that hang: with threads of their own they take none of those


class FileStorage:
    """A directory tree `<root>/<cluster id>/<instance>/<spec>/<key>.<location id>`.

    Args:
        name: of the storage.
        scheme: of its uris.
        root: directory that everything lies below.
        cluster_id: of the deployment.
        keys_per_file: parts that are packed into a file.
        makes_objects: whether files are made here, empty, before engines get their addresses.
        reuse: when slots of packed files are handed out again; None is never.
    """

    def __init__(
        self,
        name: str,
        scheme: str,
        root: str,
        cluster_id: str,
        keys_per_file: int,
        *,
        makes_objects: bool = False,
        reuse: SlotReuse | None = None,
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
        self._files = PackedFiles(self.directory, FreeSlots(reuse if reuse is not None else SlotReuse()))
        self._giver = SlotGiver(name, self._files, self._threads)
        self._is_succeeded = False

    async def allocate(self, allocation: Allocation) -> list[str]:
        reused = await self._reused(allocation)
        if not reused:
            return self._fresh(allocation)
        parts = Parts.of(allocation.parts)
        rest = parts.only([index for index in range(len(parts)) if index not in reused])
        fresh = iter(self._fresh(allocation._replace(parts=rest)))
        return [reused.get(index) or next(fresh) for index in range(len(parts))]

    def _fresh(self, allocation: Allocation) -> list[str]:
        """Return the uris of parts in files of their own."""
        directory = LocationUri(self._scheme, self._name, self.directory, 0)
        return packed_uris(directory, allocation, self._keys_per_file)

    async def _reused(self, allocation: Allocation) -> dict[int, str]:
        """Return the uris of parts that got a slot which others had before, by their index."""
        location_id = allocation.location_id
        if not self._is_packed or not (location_id.isascii() and location_id.isalnum()):
            return {}
        parts = Parts.of(allocation.parts)
        places = await self._giver.give(path_component(allocation.instance_id), parts, location_id)
        return {
            index: str(LocationUri(self._scheme, self._name, path, parts.sizes[index], slot, location_id=location_id))
            for index, (path, slot) in places.items()
        }

    @property
    def _is_packed(self) -> bool:
        return self._keys_per_file > 1

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
        return await self._for_each_file(uris, self._files.delete)

    async def discard(self, uris: Sequence[str]) -> list[str | None]:
        return await self._for_each_file(uris, self._files.discard)

    async def _for_each_file(self, uris: Sequence[str], work: Callable[[SlotsOfFile], None]) -> list[str | None]:
        """Do the work in a thread, file by file; return per uri why it failed, None where it did not."""
        return await self._threads.run(lambda: self._file_by_file([LocationUri.parse(uri) for uri in uris], work))

    def _file_by_file(self, uris: Sequence[LocationUri], work: Callable[[SlotsOfFile], None]) -> list[str | None]:
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

    async def forgotten(self, uris: Sequence[str]) -> None:
        if self._is_packed:
            for file in slots_by_file(map(LocationUri.parse, uris)).values():
                self._files.free.forgotten(file.path, [slot for slot, _ in file.slots])

    async def exists(self, uris: Sequence[str]) -> list[bool]:
        return await self._ask(lambda: self._exist([LocationUri.parse(uri) for uri in uris]))

    def _exist(self, uris: Sequence[LocationUri]) -> list[bool]:
        found = list(map(is_complete, uris))
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
        if directory != self.directory:
            return remove_objects(directory, objects)
        reasons = self._files.remove_objects(objects)
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
        """Go on with the same files, whose free slots stay free unless files are packed otherwise by now."""
        if isinstance(previous, FileStorage) and previous.directory == self.directory:
            self._files, previous._is_succeeded = previous._files, True
            self._giver = SlotGiver(self._name, self._files, self._threads)
            if previous._keys_per_file != self._keys_per_file:
                self._files.free.clear()

    def close(self) -> None:
        """Nothing is held open. While a storage is gone its blocks may be forgotten, and their files with them: none of
        these is filled when it comes back."""
        if not self._is_succeeded:
            self._files.free.clear()


def _file_by_file(uris: Sequence[LocationUri], work: Callable[[SlotsOfFile], None]) -> list[str | None]:
    reasons = {path: _reason(file, work) for path, file in slots_by_file(uris).items()}
    return [reasons[uri.path] for uri in uris]


def _reason(file: SlotsOfFile, work: Callable[[SlotsOfFile], None]) -> str | None:
    """Do the work and return why it failed, None when it did not."""
    try:
        work(file)
    except OSError as error:
        return f"{file.path}: {error.strerror}"
    except (NoFolderError, StorageIOError) as error:
        return f"{file.path}: {error}"
    return None
