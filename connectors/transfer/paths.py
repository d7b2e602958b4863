"""Opens files below a storage's root and nowhere else.

The manager is trusted little: a uri it hands out must not make an engine read or overwrite a file outside the storage.
Comparing `realpath` with the root leaves a gap between the check and the open, in which a directory can be swapped for
a link. So every component below the root is opened relative to its parent and never through a link; the root itself is
the operator's and may be a link. That costs a microsecond or two per component and needs no cache that could go stale.

Most files are opened in one call instead: the kernel walks the whole path and refuses any link (`direct_open.py`). A
path below the root, without `..` and without links, cannot lead outside. Where that does not work, because something is
missing, the root is a link, or the kernel is old, the walk above is done; its errors name the cause.

With many files of one folder the folder is opened like that, and each file by its name alone, not through a link: a
shorter path for the kernel, and Python has that call itself. The folder stays open for that long and not longer.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
from contextlib import suppress
from functools import cache

from kvcm.model.errors import InvalidArgumentError

__all__ = ["NotMountedError", "OpenFolders", "check_root", "open_below", "open_without_links", "walk_below"]

# Opens a file by a path in which no component is a link, in one system call.
#
# `openat2` with RESOLVE_NO_SYMLINKS makes the kernel itself refuse links while it walks the path, so there is no gap
# between a check and the open. Python has no such call, so libc's `syscall` is used; its number is the same on all
# architectures. A kernel without it (before 5.6), or a sandbox that forbids it, answers with an error like any other.

_SYS_OPENAT2 = 437
_AT_FDCWD = -100
_RESOLVE_NO_SYMLINKS = 0x04


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


_syscall = ctypes.CDLL(None).syscall
_syscall.argtypes = (ctypes.c_long, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t)
_syscall.restype = ctypes.c_long


def open_without_links(path: str, flags: int, mode: int) -> int | None:
    """Open `path` and return the descriptor; None when that fails, for whatever reason, or a component is a link.

    Args:
        path: absolute, without `.` and `..` components and null characters.
        flags: of `os.open`.
        mode: of a file made here.
    """
    if "\0" in path:
        return None
    how, size = _how(flags, mode if flags & os.O_CREAT else 0)
    descriptor: int = _syscall(_SYS_OPENAT2, _AT_FDCWD, path.encode("utf-8", "surrogateescape"), how, size)
    return descriptor if descriptor >= 0 else None


@cache
def _how(flags: int, mode: int) -> tuple[object, int]:
    how = _OpenHow(flags, mode, _RESOLVE_NO_SYMLINKS)
    return ctypes.byref(how), ctypes.sizeof(how)  # the reference keeps the structure alive


_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
# O_NONBLOCK: opening a pipe that somebody left in the storage must not hang; for regular files it means nothing.
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class NotMountedError(OSError):
    """The storage's root, or the first directory below it that everything lies in, is not there."""


def check_root(storage: str, root_path: str) -> str:
    """Return the root of a storage without trailing slashes.

    Raises:
        InvalidArgumentError: it is not an absolute directory below `/`.
    """
    root = root_path.rstrip("/")
    if not root_path.startswith("/") or not root or "\0" in root:
        raise InvalidArgumentError(f"root_path {root_path!r} of storage {storage} is not an absolute path below /")
    return root


def _components_below(root: str, path: str) -> tuple[str, ...]:
    """Return the components of `path` after `root`.

    Raises:
        InvalidArgumentError: the path does not lie below the root, or has empty, `.` or `..` components.
    """
    prefix = root + "/"
    components = tuple(path[len(prefix) :].split("/"))
    if not path.startswith(prefix) or "\0" in path or not {"", ".", ".."}.isdisjoint(components):
        raise InvalidArgumentError(f"path {path!r} does not lie below the storage's root {root!r}")
    return components


def open_below(root: str, components: tuple[str, ...], flags: int, file_mode: int, directory_mode: int) -> int:
    """Open the regular file `root/components` and return its descriptor.

    The root and the first component are never made: the manager made them when the storage was configured. Where they
    are missing the storage is not mounted, and a file made in their place would be on a local disk, which no other
    host sees.

    Args:
        root: directory of the storage.
        components: path below it, at least the file's name.
        flags: access mode, and O_CREAT when the file and the directories below the first are to be made.
        file_mode: mode of a file made here.
        directory_mode: mode of directories made here.

    Raises:
        NotMountedError: the root or the first component is missing.
        OSError: as `os.open`; ELOOP or ENOTDIR when a component is a link.
        InvalidArgumentError: it is not a regular file.
    """
    descriptor = open_without_links("/".join((root, *components)), flags | _FILE, file_mode)
    if descriptor is not None:
        return _regular(descriptor, components[-1])
    return walk_below(root, components, flags, file_mode, directory_mode)


def _open_folder_below(root: str, components: tuple[str, ...]) -> int:
    """Open the directory `root/components`, as a place to open files in, and return its descriptor.

    Raises:
        OSError: as `os.open`; ELOOP or ENOTDIR when a component is a link.
    """
    descriptor = open_without_links("/".join((root, *components)), _DIRECTORY, 0)
    return _walk_directories(root, components) if descriptor is None else descriptor


def _open_in_folder(folder: int, name: str, flags: int, file_mode: int) -> int:
    """Open the regular file `name` of a folder and return its descriptor; no directory is made.

    Args:
        folder: from `_open_folder_below`.
        name: one component, checked as `_components_below` does.
        flags: as for `open_below`.
        file_mode: as for `open_below`.

    Raises:
        OSError: as `os.open`; ELOOP when it is a link.
        InvalidArgumentError: it is not a regular file.
    """
    return _regular(os.open(name, flags | _FILE, file_mode, dir_fd=folder), name)


def walk_below(root: str, components: tuple[str, ...], flags: int, file_mode: int, directory_mode: int) -> int:
    """Open a file component by component; arguments, result and errors as for `open_below`."""
    create = bool(flags & os.O_CREAT)
    is_mounted = False
    try:
        directory = os.open(root, _DIRECTORY)
        try:
            for name in components[:-1]:
                make = create and is_mounted
                parent, directory = directory, _open_directory(name, directory, directory_mode if make else None)
                os.close(parent)
                is_mounted = True
            return _open_regular(components[-1], directory, flags, file_mode)
        finally:
            os.close(directory)
    except FileNotFoundError as error:
        if is_mounted:
            raise
        missing = f"{root}/{components[0]}"
        raise NotMountedError(errno.ENOENT, "The storage is not mounted here, or was emptied", missing) from error


def _walk_directories(root: str, components: tuple[str, ...]) -> int:
    directory = os.open(root, _DIRECTORY)
    for name in components:
        parent = directory
        try:
            directory = _open_directory(name, parent, None)
        finally:
            os.close(parent)
    return directory


def _open_directory(name: str, parent: int, create_mode: int | None) -> int:
    """Open a directory below `parent`, made when it is missing and `create_mode` is given."""
    try:
        return os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
    except FileNotFoundError:
        if create_mode is None:
            raise
        with contextlib.suppress(FileExistsError):  # another engine was quicker
            os.mkdir(name, create_mode, dir_fd=parent)
        return os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)


def _open_regular(name: str, parent: int, flags: int, mode: int) -> int:
    return _regular(os.open(name, flags | _FILE, mode, dir_fd=parent), name)


def _regular(descriptor: int, name: str) -> int:
    """Return the descriptor of a regular file; any other is closed, also one that cannot be examined."""
    is_regular = False
    try:
        is_regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
    finally:
        if not is_regular:
            os.close(descriptor)
    if not is_regular:
        raise InvalidArgumentError(f"{name!r} is not a regular file")
    return descriptor


# ---- folders that stay open while one thread moves one batch ----
#
# Blocks of one prompt lie beside each other, so the way to their folder is walked once per batch, and each file is
# opened by its name in it (`paths.py`). Nothing outlives the batch: an open folder keeps its mount from being taken
# away, and a folder that was replaced meanwhile would be another one. A file that is missing in an open folder is
# opened from the root again: only that distinguishes a lost file from an unmounted storage, and creates folders.

_MAX_FOLDERS = 16
_NO_NAMES = frozenset({"", ".", ".."})
_RECHECK_AFTER = frozenset({errno.ENOENT, errno.ESTALE})


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
            return _open_in_folder(folder, name, flags, self._file_mode)
        except OSError as error:
            if error.errno not in _RECHECK_AFTER:
                raise
            return open_below(root, _components_below(root, path), flags, self._file_mode, self._directory_mode)

    def _open_first(self, root: str, path: str, flags: int) -> int:
        """Open a file from the root, and its folder for the next one."""
        components = _components_below(root, path)
        try:
            folder = _open_folder_below(root, components[:-1])
        except OSError:  # `open_below` raises the exact error, or creates the folders
            return open_below(root, components, flags, self._file_mode, self._directory_mode)
        if len(self._folders) >= _MAX_FOLDERS:
            self.close()
        self._folders[root, path.rpartition("/")[0]] = folder
        return self.open(root, path, flags)

    def close(self) -> None:
        """Keep nothing open."""
        while self._folders:
            with suppress(OSError):  # nothing is written through them, so nothing is lost
                os.close(self._folders.popitem()[1])
