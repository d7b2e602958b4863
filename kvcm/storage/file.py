"""Path storages: directories that all engines have mounted at the same path.

Engines create and write the files; the manager makes up names and deletes. A packed file holds several parts side
by side in slots of equal size, which are deleted one by one and handed out again (decision 16), see `file_slots.py`.

The deleted slots are recorded beside the file: the manager that deletes the last one, another one or this one after a
restart, finds all the others there. Notes are only ever appended, each by one write, so two of one host
that delete at the same time lose nothing. NFS has no atomic append: of two managers on different hosts that delete
slots of one file at the same moment one may overwrite the other's notes. Then the file and what stands beside it are
left when their last slot is deleted: their space (that of one file, at most, and only names where slots are punched
out) is left to the scrub, and a slot whose note is lost counts as present in `exists`. No other bytes are harmed.
Rejected: a table in the manager's memory, gone with it; a document in the metadata store, which would bind the storage
to it; a marker file per slot, to be counted by listing folders that hold millions of files.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from stat import S_ISDIR
from typing import TypeVar

from kvcm.model.errors import InvalidArgumentError, StorageIOError
from kvcm.model.storages import (
    NfsStorageSpec,
    PathStorageSpec,
    StorageConfig,
    ThreeFSStorageSpec,
    VcnsThreeFSStorageSpec,
)
from kvcm.model.uri import LocationUri, path_component
from kvcm.storage.backend import (
    Allocation,
    NotHereError,
    ObjectBatch,
    Parts,
    StorageBackend,
    StorageSpace,
    StoredObject,
    packed_uris,
)
from kvcm.storage.file_objects import PROBE_PREFIX, NoFolderError, make_files, object_batches, probe, remove_objects
from kvcm.storage.file_slots import (
    FreeSlots,
    PackedFiles,
    SlotAllocator,
    SlotReuse,
    SlotsOfFile,
    is_certain,
    is_complete,
    slots_by_file,
)
from kvcm.storage.finish_notes import NotesFolder
from kvcm.storage.threads import StorageThreads
from kvcm.storage.witness import Witness
from kvcm.store.numbers import DeletionNumbers, Witnessed

__all__ = ["FILE", "HF3FS", "FileStorage", "PathType", "is_missing"]

Answer = TypeVar("Answer")
_MOST_THREADS = 64  # more than ever delete at the same time
_LEAST_FILES = 256  # with fewer to be made a medium is full; more than the metadata on it leave KV (`store/reserve.py`)
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
        mountpoint: of the medium, where that may be missing on this host; "" where it has to be there.
        reuse: when slots of packed files are handed out again; None is never.

    Attributes:
        device: the file system that it was found on last, None before that.
        witness: of its packed files.
        notes: of its finished blocks.
        is_verified: false until its witness was compared with the store; only then may its blocks be served.
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
        mountpoint: str = "",
        reuse: SlotReuse | None = None,
    ) -> None:
        self._name = name
        self._mountpoint = mountpoint
        self._scheme = scheme
        self._root = root.rstrip("/")  # otherwise as it was configured, since engines compare it letter by letter
        self.directory = self._directory_of(cluster_id)
        self._keys_per_file = keys_per_file
        self._makes_objects = makes_objects
        self._threads = StorageThreads(f"storage-{name}", _MOST_THREADS)
        self._probe_threads = StorageThreads(f"probe-{name}", _MOST_PROBES)
        self._probe_prefix = f"{PROBE_PREFIX}{secrets.token_hex(8)}-"
        self._probe_numbers = count()
        self._reuse = reuse if reuse is not None else SlotReuse()
        self.witness = Witness(name, self.directory, self._threads, lambda: self._reuse.now())
        self.notes = NotesFolder(name, self.directory)
        self.is_verified = True
        self._files = PackedFiles(self.directory, FreeSlots(self._reuse))
        self._slot_allocator = SlotAllocator(name, self._files, self._threads)
        self._is_succeeded = False
        self.device: int | None = None

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
        directory = LocationUri(scheme=self._scheme, storage=self._name, path=self.directory, size=0)
        return packed_uris(directory, allocation, self._keys_per_file)

    async def _reused(self, allocation: Allocation) -> dict[int, str]:
        """Return the uris of parts that got a slot which others had before, by their index."""
        location_id = allocation.location_id
        if not self._is_packed or not self._files.free.count or not (location_id.isascii() and location_id.isalnum()):
            return {}
        parts = Parts.of(allocation.parts)
        places = await self._slot_allocator.allocate(path_component(allocation.instance_id), parts, location_id)
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
        if self.is_elsewhere:
            return  # engines make them, too
        paths = [LocationUri.parse(uri).path for uri in uris]
        await self._run(lambda: make_files(self.directory, paths))

    async def probe(self) -> None:
        name = f"{self._probe_prefix}{next(self._probe_numbers)}"
        await self._run_on(self._probe_threads, lambda: self._probe(name))

    def _probe(self, name: str) -> None:
        if self.is_elsewhere:
            raise NotHereError(str(self._not_mounted()))
        try:
            probe(self.directory, name)
        except StorageIOError as error:
            raise self._failure(f"probe failed: {error}") from error
        self._mounted_device()
        if self._is_packed:
            self.witness.keep_spare()
        # A file system that just made a file and says that it can make none does not count them.
        if 0 < (files := os.statvfs(self.directory).f_favail) < _LEAST_FILES:
            full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            raise self._failure(f"full: only {files} more files can be made on its medium (inodes)") from full

    async def delete(self, uris: Sequence[str]) -> list[str | None]:
        numbers = self._reuse.numbers
        if numbers is None or not any("blkid=" in uri for uri in uris):  # names of unpacked files are used once
            return await self._for_each_file(uris, self._files.delete)
        with self.witness.deleting():
            await self.advance_witness(numbers, force=False)
            return await self._for_each_file(uris, self._files.delete)

    async def advance_witness(self, numbers: DeletionNumbers, *, force: bool = True) -> None:
        """Do `Witness.advance`; without `force`, before bytes are deleted.

        Raises:
            StorageIOError: store or storage failed, or they are not of the same time.
        """
        try:
            await self.witness.advance(numbers, force=force)
        except OSError as error:
            raise self._failure(str(error.strerror)) from error
        except NoFolderError as error:
            raise self._not_mounted() from error

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
            return [reason or f"storage {self._name} was mounted again meanwhile" for reason in reasons]
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
        self.device = status.st_dev
        return status.st_dev

    async def forgotten(self, uris: Sequence[str]) -> None:
        if self._is_packed:
            for file in slots_by_file(map(LocationUri.parse, uris)).values():
                self._files.free.forgotten(file.path, [slot for slot, _ in file.slots])

    async def exists(self, uris: Sequence[str]) -> list[bool]:
        return await self._run(lambda: self._exist([LocationUri.parse(uri) for uri in uris]))

    async def verify(self, uris: Sequence[str], *, is_written: bool) -> list[bool]:
        """Return per uri whether its slot is still its location's, though notes and metadata may be of different times.

        Args:
            uris: of parts.
            is_written: whether the bytes have to be there, too.

        Raises:
            StorageIOError: the storage failed.
        """
        there = await self.exists(uris) if is_written else [True] * len(uris)
        certain = await self._run(lambda: list(map(is_certain, map(LocationUri.parse, uris))))
        return [is_there and is_its for is_there, is_its in zip(there, certain, strict=True)]

    async def read_witness(self) -> Witnessed | None:
        """Return what the witness says, None without one.

        Raises:
            StorageIOError: the storage failed.
        """
        return await self._run_on(self._probe_threads, self.witness.read)

    async def read_times(self) -> bytes | None:
        """Return the times of the store as they were written here last, None where they were not.

        Raises:
            StorageIOError: the storage failed.
        """
        return await self._run_on(self._probe_threads, self.witness.read_times)

    async def write_times(self, content: bytes) -> None:
        """Write the times of the store, where the deployment's directory is.

        Raises:
            StorageIOError: the storage failed.
        """
        await self._run_on(self._probe_threads, lambda: self.witness.write_times(content))

    async def with_notes(self, work: Callable[[NotesFolder], Answer]) -> Answer:
        """Work on the files of finish notes in a thread.

        Raises:
            StorageIOError: the storage failed.
        """
        return await self._run(lambda: work(self.notes))

    def has_bytes(self, uri: LocationUri) -> bool:
        """Return whether a part lies on this storage with all its bytes, and is of no other location. Blocks.

        Args:
            uri: that may say anything.

        Raises:
            OSError: the storage failed.
        """
        is_mine = uri.path.startswith(self.directory) and (uri.scheme, uri.storage) == (self._scheme, self._name)
        below = uri.path.removeprefix(self.directory)
        is_plain = os.path.realpath(uri.path) == os.path.join(os.path.realpath(self.directory), below)  # noqa: PTH118
        return is_mine and is_plain and is_complete(uri) and is_certain(uri)

    def doubt(self, *, is_new: bool) -> None:
        """Have the storage compared with the store before its blocks are served, but for one that is being added and
        has no witness. One that is elsewhere cannot be compared: its names are used once if it is not packed. Blocks.
        """
        if self.is_elsewhere and not self._is_packed:
            return
        try:
            self.is_verified = is_new and self.witness.read() is None
        except (NoFolderError, OSError):
            self.is_verified = False

    def _exist(self, uris: Sequence[LocationUri]) -> list[bool]:
        found = list(map(is_complete, uris))
        if not all(found):
            self.check_mounted()
        return found

    async def objects(self, cluster_id: str) -> AsyncIterator[ObjectBatch]:
        directory = self._directory_of(cluster_id)
        batches = object_batches(directory)
        while (batch := await self._run(lambda: next(batches, None))) is not None:
            yield batch
        if directory == self.directory:
            await self._run(self.check_mounted)

    async def remove_objects(self, cluster_id: str, objects: Sequence[StoredObject]) -> list[str | None]:
        return await self._run(lambda: self._remove_objects(self._directory_of(cluster_id), objects))

    def _remove_objects(self, directory: str, objects: Sequence[StoredObject]) -> list[str | None]:
        if directory != self.directory:
            return remove_objects(directory, objects)
        reasons = self._files.remove_objects(objects)
        self.check_mounted()
        return reasons

    def _directory_of(self, cluster_id: str) -> str:
        return f"{self._root}/{path_component(cluster_id)}/"

    def check_mounted(self) -> None:
        """Check that the storage is mounted, so that unmounted bytes do not count as missing. Blocks.

        Raises:
            StorageIOError: the deployment's directory is missing, or the check failed.
        """
        self._mounted_device()

    @property
    def is_elsewhere(self) -> bool:
        """Whether the medium was never seen on this host, on which there is not even a place to mount it. Blocks."""
        return bool(self._mountpoint) and self.device is None and is_missing(self._mountpoint)

    def _not_mounted(self) -> StorageIOError:
        if self.is_elsewhere:
            return self._failure(
                f"there is no {self._mountpoint} on this host: this manager neither probes it nor deletes there. "
                f"Engines use it where {self.directory} was made; a manager that has it mounted and leads deletes"
            )
        return self._failure(
            f"{self.directory} is not there, is it mounted on this host? "
            "If it is gone for good, UpdateStorage creates it again"
        )

    def _failure(self, reason: str) -> StorageIOError:
        return StorageIOError(f"storage {self._name}: {reason}")

    async def _run(self, question: Callable[[], Answer]) -> Answer:
        return await self._run_on(self._threads, question)

    async def _run_on(self, threads: StorageThreads, question: Callable[[], Answer]) -> Answer:
        """Run what asks the medium; its failures name the storage."""
        try:
            return await threads.run(question)
        except OSError as error:
            raise self._failure(str(error.strerror)) from error
        except NoFolderError as error:
            raise self._not_mounted() from error

    async def space(self) -> StorageSpace:
        status = await self._run(lambda: os.statvfs(self._root))
        return StorageSpace(status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize)

    def take_over(self, previous: StorageBackend) -> None:
        """Go on with the same files, whose free slots stay free unless files are packed otherwise by now."""
        if isinstance(previous, FileStorage) and previous.directory == self.directory:
            self._files, previous._is_succeeded = previous._files, True
            self.witness = previous.witness
            self._slot_allocator = SlotAllocator(self._name, self._files, self._threads)
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


# Types of path storages: where the root is, and when the deployment's directory in it is made.
#
# A storage that is being configured gets its directory made. One that was configured earlier is only opened: where its
# medium is not mounted yet, after a restart for example, there is an empty mount point. A directory made in that would
# turn every deletion into one of a file that is gone already, and its bytes would stay for ever.
#
# One case looks the same and is none: a deployment that was moved, whose storages are configured and to which it has
# never written. Its directory is made when the root holds blocks of another deployment: so it is mounted.


@dataclass(frozen=True, slots=True)
class PathType:
    """Opens storages of a type, which is a call of it.

    Attributes:
        root_field: what of the config says where the root is, for messages.
        check: raises KvcmError when something else is wrong with a config; may block.
        mountpoint: returns where a config has its medium mounted if that may be missing on this host, else "".
    """

    root_field: str
    check: Callable[[StorageConfig], None]
    mountpoint: Callable[[StorageConfig], str] = lambda _config: ""

    def make(self, config: StorageConfig, cluster_id: str) -> None:
        """Make the directory of a deployment, for a storage that is being configured. Blocks.

        Raises:
            InvalidArgumentError: the root cannot be one.
            StorageIOError: the directory cannot be made.
        """
        storage = self._storage(config, cluster_id)
        if storage.is_elsewhere:
            return  # it would be made on a local disk, and hide the medium from nobody but this manager
        try:
            Path(storage.directory).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            reason = f"{self.root_field} {_root(config)!r} cannot be created: {error.strerror}"
            raise StorageIOError(reason) from error

    def __call__(self, config: StorageConfig, cluster_id: str, reuse: SlotReuse | None = None) -> FileStorage:
        """Open a storage, and make nothing where its medium may not be mounted. Blocks.

        Args:
            config: of the storage.
            cluster_id: of the deployment.
            reuse: when slots of packed files are handed out again; None is never.

        Raises:
            InvalidArgumentError: the root cannot be one.
            StorageIOError: the deployment's directory is not there or cannot be written.
        """
        storage = self._storage(config, cluster_id, reuse)
        if storage.is_elsewhere:
            return storage
        if not os.path.lexists(storage.directory.rstrip("/")) and _holds_blocks(_root(config)):
            self.make(config, cluster_id)
        # An engine that does not find the directory either knows that the storage is not mounted where it is.
        storage.check_mounted()
        if not os.access(storage.directory, os.W_OK | os.X_OK):
            raise StorageIOError(f"{self.root_field} {_root(config)!r}: {storage.directory} is not writable")
        return storage

    def _storage(self, config: StorageConfig, cluster_id: str, reuse: SlotReuse | None = None) -> FileStorage:
        spec = config.spec
        assert isinstance(spec, PathStorageSpec)
        self._check_text(spec.root)
        self.check(config)
        return FileStorage(
            config.global_unique_name,
            scheme=config.storage_type.scheme,
            root=spec.root,
            cluster_id=cluster_id,
            keys_per_file=spec.key_count_per_file,
            makes_objects=not isinstance(spec, NfsStorageSpec) and spec.touch_file_when_create,
            mountpoint=self.mountpoint(config),
            reuse=reuse,
        )

    def _check_text(self, root: str) -> None:
        if not root.startswith("/"):
            raise InvalidArgumentError(f"{self.root_field} {root!r} is not an absolute path")
        if not os.path.normpath(root).strip("/"):
            raise InvalidArgumentError(f"{self.root_field} is {root!r}, must be a directory below /")
        if set(root) & set("?#") or not root.isprintable():
            raise InvalidArgumentError(f"{self.root_field} {root!r} holds characters that a uri cannot carry")


def _root(config: StorageConfig) -> str:
    assert isinstance(config.spec, PathStorageSpec)
    return config.spec.root


def _holds_blocks(root: str) -> bool:
    """Return whether there is a directory of any deployment with something in it: no mount point has that."""
    with suppress(OSError), os.scandir(root) as entries:
        return any(entry.is_dir(follow_symlinks=False) and _holds_folders(entry.path) for entry in entries)
    return False


def _holds_folders(directory: str) -> bool:
    with suppress(OSError), os.scandir(directory) as entries:
        return any(entry.is_dir(follow_symlinks=False) for entry in entries)
    return False


def _accept(_config: StorageConfig) -> None:
    """The root is all there is to check."""


FILE = PathType("root_path", _accept)
"""Type `file`: NFS, or any directory that all engines have mounted at the same path."""


def _check_3fs(config: StorageConfig) -> None:
    spec = config.spec
    assert isinstance(spec, (ThreeFSStorageSpec, VcnsThreeFSStorageSpec))
    if not spec.mountpoint.startswith("/"):
        raise InvalidArgumentError(f"mountpoint {spec.mountpoint!r} is not an absolute path")
    if ".." in spec.root_dir.split("/"):
        raise InvalidArgumentError(f"root_dir {spec.root_dir!r} has a component '..', must lie below the mountpoint")
    if not _mountpoint_3fs(config) or not is_missing(spec.mountpoint):
        _check_directory("mountpoint", spec.mountpoint)
    if config.check_storage_available_when_open:
        _check_directory("mountpoint/root_dir", spec.root)


def _mountpoint_3fs(config: StorageConfig) -> str:
    """Return the mountpoint that may be missing here: without the check, engines alone may have 3FS mounted."""
    assert isinstance(config.spec, (ThreeFSStorageSpec, VcnsThreeFSStorageSpec))
    return "" if config.check_storage_available_when_open else config.spec.mountpoint


def is_missing(path: str) -> bool:
    """Return whether there is nothing of a name. A mount whose server is gone is there, and fails. Blocks."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


def _check_directory(field: str, directory: str) -> None:
    try:
        is_there = Path(directory).is_dir()
    except OSError as error:
        raise StorageIOError(f"{field} {directory!r}: {error.strerror}") from error
    if not is_there:
        raise StorageIOError(f"{field} {directory!r} is no directory, is 3FS mounted on this host?")


HF3FS = PathType("mountpoint/root_dir", _check_3fs, _mountpoint_3fs)
"""Types `hf3fs` and `vcns_hf3fs`: 3FS through its POSIX mount. The config of the latter names its metadata service."""
