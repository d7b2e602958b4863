"""Storage `file`: NFS or any directory that all engines have mounted at the same path.

Engines create and write the files; the manager only makes up names and deletes. A packed file holds several parts side
by side in slots of equal size. Deleting one part punches its slot out of the file, so that the space returns at once
and no neighbour is touched; the file itself goes with its last part. A slot is never handed out twice (decision 16).
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from kvcm.model.errors import InvalidArgumentError, StorageIOError
from kvcm.model.names import path_component
from kvcm.model.storages import NfsStorageSpec, StorageConfig
from kvcm.model.uri import LocationUri
from kvcm.storage.backend import Allocation, StorageBackend, StorageSpace
from kvcm.storage.packing import pack

__all__ = ["FileStorage"]

_PUNCH_HOLE_KEEP_SIZE = 0x03  # fallocate(2): FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
_CANNOT_PUNCH = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
_libc = ctypes.CDLL(None, use_errno=True)


class _Removal(NamedTuple):
    """What has to happen on disk for one uri: unlink the file, or punch a slot out of it."""

    path: str
    punch: tuple[int, int] | None


class FileStorage:
    """A directory tree `<root_path>/<cluster id>/<instance>/<spec>/<key>.<location id>`."""

    def __init__(self, name: str, root: Path, cluster_id: str, keys_per_file: int) -> None:
        self._name = name
        self._root = root
        self._directory = f"{str(root).rstrip('/')}/{path_component(cluster_id)}/"
        self._keys_per_file = keys_per_file
        self._live_slots: dict[str, set[int]] = {}

    @classmethod
    def open(cls, config: StorageConfig, cluster_id: str) -> FileStorage:
        """Open the directory, creating it if it is missing.

        Raises:
            InvalidArgumentError: root_path is not absolute.
            StorageIOError: the directory cannot be created or written.
        """
        assert isinstance(config.spec, NfsStorageSpec)
        root = Path(config.spec.root_path)
        if not root.is_absolute():
            raise InvalidArgumentError(f"root_path {config.spec.root_path!r} is not an absolute path")
        if root == Path(root.anchor):
            raise InvalidArgumentError("root_path is '/', must be a directory below it")
        if set(str(root)) & set("?#") or not str(root).isprintable():
            raise InvalidArgumentError(f"root_path {config.spec.root_path!r} holds characters that a uri cannot carry")
        try:
            # With the cluster's directory: an engine that does not find it knows that the storage is not mounted there.
            (root / path_component(cluster_id)).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageIOError(f"root_path {str(root)!r} cannot be created: {error.strerror}") from error
        if not os.access(root, os.W_OK | os.X_OK):
            raise StorageIOError(f"root_path {str(root)!r} is not writable")
        return cls(config.global_unique_name, root, cluster_id, config.spec.key_count_per_file)

    def allocate(self, allocation: Allocation) -> list[str]:
        uris = [""] * len(allocation.parts)
        for slots in pack(allocation, self._keys_per_file):
            path = self._directory + slots[0][1]
            for index, _, slot in slots:
                uris[index] = str(LocationUri("file", self._name, path, allocation.parts[index].size_bytes, slot))
            if slots[0][2] is not None:
                self._live_slots[path] = {slot for _, _, slot in slots if slot is not None}
        return uris

    async def delete(self, uris: Sequence[str]) -> list[str | None]:
        # What is left in a file is decided here on the loop, in one step; only the system calls go to a thread.
        removals = [self._plan_removal(LocationUri.parse(uri)) for uri in uris]
        reasons = await asyncio.to_thread(_remove_all, removals)
        for removal, reason in zip(removals, reasons, strict=True):
            if removal.punch is None and reason is None:
                self._live_slots.pop(removal.path, None)
        return reasons

    def _plan_removal(self, uri: LocationUri) -> _Removal:
        if uri.blkid is None:
            return _Removal(uri.path, None)
        live = self._live_slots.get(uri.path)
        if live is not None:
            live.discard(uri.blkid)
            if not live:
                return _Removal(uri.path, None)
        return _Removal(uri.path, (uri.offset, uri.size))

    async def exists(self, uris: Sequence[str]) -> list[bool]:
        parsed = [LocationUri.parse(uri) for uri in uris]
        there = await asyncio.to_thread(lambda: list(map(_is_complete, parsed)))
        return [found and self._may_be_live(uri) for found, uri in zip(there, parsed, strict=True)]

    def _may_be_live(self, uri: LocationUri) -> bool:
        """A slot that was punched out still lies inside its file: only this manager's memory tells."""
        live = self._live_slots.get(uri.path)
        return live is None or uri.blkid in live

    async def space(self) -> StorageSpace:
        try:
            status = await asyncio.to_thread(os.statvfs, self._root)
        except OSError as error:
            raise StorageIOError(f"storage {self._name}: {error.strerror}") from error
        return StorageSpace(status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize)

    def inherit(self, previous: StorageBackend) -> None:
        if isinstance(previous, FileStorage):
            self._live_slots.update(previous._live_slots)

    def close(self) -> None:
        """Nothing is held open."""


def _remove_all(removals: Sequence[_Removal]) -> list[str | None]:
    return [_remove(removal) for removal in removals]


def _remove(removal: _Removal) -> str | None:
    try:
        if removal.punch is None:
            Path(removal.path).unlink(missing_ok=True)
        else:
            _punch(removal.path, *removal.punch)
    except OSError as error:
        return f"{removal.path}: {error.strerror}"
    return None


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
        return Path(uri.path).lstat().st_size >= uri.offset + uri.size
    except OSError:
        return False
