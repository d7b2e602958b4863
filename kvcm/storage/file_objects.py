"""Directories and objects of a path storage.

Invariant: directories are opened one component after the other and never through a link. So nothing outside a storage
is listed, created or removed, whatever other processes put into its tree, and whenever.
"""

from __future__ import annotations

import errno
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import groupby
from stat import S_ISREG
from typing import Final

from kvcm.model.errors import StorageIOError
from kvcm.storage.backend import ObjectBatch, StoredObject, owner_of, slot_count

__all__ = [
    "NEW_SUFFIX",
    "NOTES_SUFFIX",
    "PROBE_PREFIX",
    "NoFolderError",
    "made_folder",
    "make_files",
    "make_folders",
    "object_batches",
    "opened_folder",
    "probe",
    "remove_objects",
    "write_all",
]

_NO_FOLDER: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MODE: Final = 0o700  # as engines create them: KV reveals the prompt


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


# Writes that end: a storage that takes a part of the bytes gets the rest, one that takes none has failed.


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


# Makes the empty files of fresh addresses, for storages whose clients want to find them there.

_FILE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE_MAKING_MODE: Final = 0o600  # as engines create them: KV reveals the prompt
_DEPTH: Final = 3  # instance, spec, file


def make_files(directory: str, paths: Iterable[str]) -> None:
    """Make empty files below a deployment's directory, and the directories that they lie in. Blocks.

    A file that is there stays as it is. No link is followed.

    Args:
        directory: of the deployment, with a slash at its end.
        paths: of the files, absolute.

    Raises:
        StorageIOError: a path does not lie where objects lie.
        NoFolderError: the deployment's directory is not there.
        OSError: a file or a directory cannot be made, or something else lies there.
    """
    names: defaultdict[tuple[str, str], dict[str, None]] = defaultdict(dict)
    for path in paths:
        instance, spec, name = _components(directory, path)
        names[instance, spec][name] = None
    with opened_folder(directory) as top:
        for (instance, spec), files in names.items():
            with made_folder(instance, top) as above, made_folder(spec, above) as inside:
                for name in files:
                    _make(inside, name)


def make_folders(directory: str, path: str) -> None:
    """Make the directories that a file lies in, below a deployment's directory; no link is followed. Blocks.

    Raises:
        StorageIOError: the path does not lie where objects lie.
        NoFolderError: the deployment's directory is not there.
        OSError: a directory cannot be made.
    """
    instance, spec, _ = _components(directory, path)
    with opened_folder(directory) as top, made_folder(instance, top) as above, made_folder(spec, above):
        pass


def _components(directory: str, path: str) -> list[str]:
    components = path.removeprefix(directory).split("/")
    if not path.startswith(directory) or len(components) != _DEPTH or {"", ".", ".."} & {*components}:
        raise StorageIOError(f"path {path!r} is not that of an object below {directory!r}")
    return components


def _make(inside: int, name: str) -> None:
    try:
        os.close(os.open(name, _FILE, _FILE_MAKING_MODE, dir_fd=inside))
    except FileExistsError:
        if not S_ISREG(os.stat(name, dir_fd=inside, follow_symlinks=False).st_mode):
            raise


# The objects of a path storage on the disk: listing them, and removing orphans.
#
# Everything is opened from the deployment's directory downwards, so nothing outside can be listed or
# removed. What does not lie where an object lies, two directories deep, is not ours and is left alone, and so is what
# is not named like one.
#
# The records beside a packed file (file.py) belong to it: both are one object, also while only one of them is
# there.

NOTES_SUFFIX: Final = ".deleted"
NEW_SUFFIX: Final = ".new"
"""Of records being compacted: a leftover of a process that ended meanwhile goes with its object."""
_BATCH_OBJECTS: Final = 1000
_BLOCK_BYTES: Final = 512


def object_batches(directory: str, batch_size: int = _BATCH_OBJECTS) -> Iterator[ObjectBatch]:
    """Yield the objects below a deployment's directory, which may be missing. Blocks; memory does not grow with their
    number.

    Raises:
        OSError: the directory cannot be read.
    """
    batch, failed = list[StoredObject](), 0
    for found in _all_objects(directory):
        if found is None:
            failed += 1
            continue
        batch.append(found)
        if len(batch) == batch_size:
            yield ObjectBatch(batch, failed)
            batch, failed = [], 0
    if batch or failed:
        yield ObjectBatch(batch, failed)


def remove_objects(directory: str, objects: Sequence[StoredObject]) -> list[str | None]:
    """Remove objects as they were listed; one that changed since stays. Blocks.

    Returns:
        Per object None, or the reason why it is still there; a missing one counts as removed.

    Raises:
        OSError: the directory cannot be read.
    """
    reasons: dict[str, str | None] = {}
    for place, group in groupby(objects, lambda each: each.name.rpartition("/")[0]):
        members, folders = list(group), place.split("/")
        reasons |= dict.fromkeys((each.name for each in members), None)
        if len(folders) != 2 or {"", ".", ".."} & {*folders}:
            reasons |= dict.fromkeys((each.name for each in members), "it is not the name of an object")
            continue
        with suppress(NoFolderError), opened_folder(directory) as top:
            with opened_folder(folders[0], top) as instance, opened_folder(folders[1], instance) as spec:
                reasons |= {each.name: _remove(spec, each) for each in members}
    return [reasons[each.name] for each in objects]


def _all_objects(directory: str) -> Iterator[StoredObject | None]:
    """Yield every object, None for what could not be looked at."""
    with suppress(NoFolderError), opened_folder(directory) as top:
        for instance in _folder_names(top):
            try:
                with suppress(NoFolderError), opened_folder(instance, top) as inside:
                    for spec in _folder_names(inside):
                        yield from _objects_of(inside, spec, f"{instance}/{spec}/")
            except OSError:
                yield None


def _objects_of(instance: int, spec: str, place: str) -> Iterator[StoredObject | None]:
    try:
        with suppress(NoFolderError), opened_folder(spec, instance) as inside:
            yield from _objects_in(inside, place)
    except OSError:
        yield None


def _folder_names(folder: int) -> list[str]:
    with os.scandir(folder) as entries:
        return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]


def _objects_in(folder: int, place: str) -> Iterator[StoredObject | None]:
    with os.scandir(folder) as entries:
        for entry in entries:
            name = entry.name.removesuffix(NOTES_SUFFIX)
            if owner_of(place + name) is None:
                continue
            try:
                if not entry.is_file(follow_symlinks=False):  # which asks the medium, on some
                    continue
                if name != entry.name and _status(folder, name) is not None:
                    continue  # counted with its file
                found = _stat_entry(folder, name)
            except OSError:
                yield None
                continue
            if found is not None:  # else it went while it was being listed
                yield found._replace(name=place + name)


def _stat_entry(folder: int, name: str) -> StoredObject | None:
    parts = [status for _, status in _parts(folder, name)]
    if not parts:
        return None
    # Of a file with holes only what it takes up is there to be gained.
    has_holes = slot_count(name) > 1
    sizes = [min(each.st_size, each.st_blocks * _BLOCK_BYTES) if has_holes else each.st_size for each in parts]
    return StoredObject(name, sum(sizes), max(each.st_mtime for each in parts))


def _remove(folder: int, listed: StoredObject) -> str | None:
    name = listed.name.rpartition("/")[2]
    try:
        found = _stat_entry(folder, name)
        if found is not None and found.modified_at != listed.modified_at:
            return "it changed since it was listed"
        # The listed file goes last, so that a remainder of an interrupted attempt is found again.
        for part in (name + NOTES_SUFFIX + NEW_SUFFIX, name, name + NOTES_SUFFIX):
            with suppress(FileNotFoundError):
                os.unlink(part, dir_fd=folder)
    except OSError as error:
        return error.strerror
    return None


def _parts(folder: int, name: str) -> list[tuple[str, os.stat_result]]:
    """Return the files that an object consists of, by name."""
    found = ((part, _status(folder, part)) for part in (name, name + NOTES_SUFFIX))
    return [(part, status) for part, status in found if status is not None]


def _status(folder: int, name: str) -> os.stat_result | None:
    """Return the status of a file, None where there is none."""
    try:
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return status if S_ISREG(status.st_mode) else None


# Probes a path storage as an engine uses it: a small file is written, closed, read back and deleted.
#
# The file lies in the deployment's directory itself, where no object lies: it is neither listed nor scrubbed. Every
# probe has a file of its own, so that one that hangs and ends late is not in the way of the next.

PROBE_PREFIX: Final = ".kvcm-probe-"
_CONTENT_BYTES: Final = 4096
_LEFTOVER_SECONDS: Final = 3600.0  # by then its writer is dead
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
        with suppress(OSError):  # a file system that keeps written data in memory may still ignore it
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
