"""Directories: whether they are there, can be written, and have room; who has the metadata open."""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path

from kvcm.config import Settings
from kvcm.doctor.findings import Finding, fail, ok, warn
from kvcm.metadata import local_directory
from kvcm.sizes import shown_size

__all__ = ["check_directory", "check_metadata_directory", "lock_holder", "room"]

_CHECK = "data directory"
_LEAST_FREE_BYTES = 1 << 30
_LEAST_FREE_SHARE = 0.05
_FLOCK = "hhqqi4x"  # struct flock of Linux on 64 bits: type, whence, start, length, process


def check_metadata_directory(settings: Settings) -> Iterator[Finding]:
    """Yield how the directory is that holds the metadata; nothing where it is kept elsewhere."""
    directory = local_directory(settings)
    if directory is None:
        return
    yield from check_directory(_CHECK, directory, is_made=True)
    holder = lock_holder(directory / "LOCK")
    if holder:
        yield ok(_CHECK, f"{directory} is in use by process {holder}: a manager or a `kvcm index` runs on it")


def check_directory(check: str, directory: Path, *, is_made: bool) -> Iterator[Finding]:
    """Yield how a directory is.

    Args:
        check: what it is for.
        directory: its path.
        is_made: whether the manager makes it when it is not there.
    """
    if not directory.exists():
        yield _absent(check, directory, is_made=is_made)
    elif not directory.is_dir():
        yield fail(check, f"{directory} is no directory", "choose another place, or move away what is there")
    elif not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
        user = os.geteuid()
        yield fail(check, f"{directory} cannot be written by user {user}", f"run `chown -R {user} {directory}`")
    else:
        disk = shutil.disk_usage(directory)
        yield room(check, str(directory), disk.free, disk.total)


def _absent(check: str, directory: Path, *, is_made: bool) -> Finding:
    if not is_made:
        advice = "mount it at this path on every host that has managers or engines, or correct the path"
        return fail(check, f"{directory} does not exist on this host", advice)
    parent = next(each for each in directory.parents if each.exists())
    if os.access(parent, os.W_OK | os.X_OK):
        return ok(check, f"{directory} does not exist yet; the manager makes it")
    return fail(
        check, f"{directory} does not exist, and {parent} cannot be written", f"make it: `mkdir -p {directory}`"
    )


def room(check: str, name: str, free_bytes: int, whole_bytes: int) -> Finding:
    """Return whether a medium has room left."""
    found = f"{name} has {shown_size(free_bytes)} of {shown_size(whole_bytes)} free"
    if free_bytes < min(_LEAST_FREE_BYTES, whole_bytes // 10):
        return fail(check, found, "make room: writes will fail soon")
    if free_bytes < _LEAST_FREE_SHARE * whole_bytes:
        return warn(check, found, "make room, or lower the quotas of what is written there")
    return ok(check, found)


def lock_holder(path: Path) -> int:
    """Return the process that holds RocksDB's lock, 0 when nobody does. Takes nothing."""
    try:
        with path.open("rb+") as file:
            asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            kind, _, _, _, process = struct.unpack(_FLOCK, fcntl.fcntl(file, fcntl.F_GETLK, asked))
    except OSError:
        return 0
    return 0 if kind == fcntl.F_UNLCK else int(process)
