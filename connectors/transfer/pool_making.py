"""Opens the segment of a memory pool by its name, and makes it.

A segment is made under another name, filled, and renamed: whatever stands under its own name is complete. The file that
is being made is locked by its maker, so of several makers one goes on, memory is never taken twice, and what a maker
leaves that is killed is used by the next one.

All memory is taken at once: a segment that is not wholly backed would kill whoever touches a page for which the file
system has no room (SIGBUS).
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from connectors.transfer.pool_header import HEADER_BYTES, SegmentHeader, boot_id
from connectors.transfer.pool_segment import PoolSegment
from kvcm.model.errors import StorageIOError
from kvcm.model.memory_pool import pool_bytes
from kvcm.model.names import path_component

__all__ = ["make_segment", "open_segment", "segment_path"]

_OPEN_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_FALLOCATE_BYTES = 256 << 20  # a signal interrupts one step, not hours of work
_NO_ROOM = frozenset({errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFBIG})
_LARGER = (
    "enlarge it (mount -o remount,size=..., docker run --shm-size=..., or mount the host's) or make the pool smaller"
)


def segment_path(directory: Path, cluster_id: str, storage: str) -> Path:
    """Return where the segment of a pool is: no other cluster and storage have the same name for it."""
    return directory / f"kvcm-{path_component(cluster_id)}+{storage}"


def open_segment(path: Path, capacity_bytes: int) -> PoolSegment | None:
    """Map the segment that is there.

    Args:
        path: of the segment.
        capacity_bytes: that it must have at least.

    Returns:
        The segment, None when there is none, or only one from before the host was booted.

    Raises:
        StorageIOError: what is there must not or cannot be used; names it and says why.
    """
    with _explained(path):
        try:
            descriptor = os.open(path, _OPEN_FLAGS)
        except FileNotFoundError:
            return None
        try:
            header = _checked_header(descriptor, capacity_bytes)
            segment = None if header is None else PoolSegment(descriptor, header)
        except BaseException:
            os.close(descriptor)
            raise
        if segment is None:
            os.close(descriptor)
        return segment


def make_segment(path: Path, capacity_bytes: int, new_generation: Callable[[], int]) -> None:
    """Make the segment unless it is there. Takes as long as clearing so much memory does.

    Args:
        path: of the segment.
        capacity_bytes: of its data.
        new_generation: draws 64 random bits.

    Raises:
        StorageIOError: there is no room, another process is making it, or what is there cannot be used.
    """
    draft = path.with_name(f".{path.name}.new")
    with _explained(path):
        descriptor = os.open(draft, _OPEN_FLAGS | os.O_CREAT, 0o600)
        try:
            _check_file(os.fstat(descriptor))
            _lock_draft(descriptor)
            if not _is_at(draft, descriptor):
                return  # another process was faster, and has renamed it
            try:
                if open_segment(path, capacity_bytes) is None:
                    _fill(descriptor, path, SegmentHeader.new(new_generation() or 1, capacity_bytes))
                    draft.rename(path)
            finally:
                if _is_at(draft, descriptor):  # not needed, or not finished
                    draft.unlink()
        finally:
            os.close(descriptor)


def _checked_header(descriptor: int, capacity_bytes: int) -> SegmentHeader | None:
    status = os.fstat(descriptor)
    _check_file(status)
    header = SegmentHeader.decode(os.pread(descriptor, HEADER_BYTES, 0))
    if header.boot != boot_id():
        return None
    if status.st_size < header.segment_bytes():
        raise ValueError(f"it has {status.st_size} bytes, its header says {header.segment_bytes()}")
    if header.capacity_bytes < pool_bytes(capacity_bytes):
        raise ValueError(
            f"it has room for {header.capacity_bytes} bytes, the storage's capacity_bytes is {capacity_bytes}"
        )
    return header


def _check_file(status: os.stat_result) -> None:
    """Refuse what another user could write to, or has made to be written to."""
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("it is no regular file")
    if status.st_uid != os.geteuid():
        raise ValueError(f"it belongs to user {status.st_uid}, this process runs as user {os.geteuid()}")
    if status.st_mode & 0o077:
        raise ValueError(f"its mode is {stat.S_IMODE(status.st_mode):04o}, others must have no rights: 0600")


def _lock_draft(descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ValueError("another process is making it now") from error


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        there, here = path.stat(follow_symlinks=False), os.fstat(descriptor)
    except FileNotFoundError:
        return False
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)


def _fill(descriptor: int, path: Path, header: SegmentHeader) -> None:
    """Give a file its memory and its header."""
    os.ftruncate(descriptor, 0)  # what a killed maker left; nobody has mapped it
    unit_bytes = os.fstatvfs(descriptor).f_bsize  # a huge page, in a file system of those
    length = header.segment_bytes(unit_bytes)
    _check_room(descriptor, path, length)
    os.ftruncate(descriptor, length)
    for start in range(0, length, _FALLOCATE_BYTES):
        os.posix_fallocate(descriptor, start, min(_FALLOCATE_BYTES, length - start))
    with mmap.mmap(descriptor, length) as memory:  # file systems of huge pages know no write
        encoded = header.encode()
        memory[: len(encoded)] = encoded


def _check_room(descriptor: int, path: Path, length: int) -> None:
    """Refuse at once what would fail after a long while."""
    room = os.fstatvfs(descriptor)
    free_bytes = room.f_bavail * room.f_frsize
    if room.f_blocks and free_bytes < length:
        raise ValueError(
            f"it needs {length} bytes, {path.parent} has {free_bytes} free of {room.f_blocks * room.f_frsize}:"
            f" {_LARGER}"
        )


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Name the segment in whatever goes wrong."""
    try:
        yield
    except ValueError as error:
        raise StorageIOError(f"memory pool {path}: {error}") from error
    except OSError as error:
        reason = error.strerror or repr(error)
        if error.errno == errno.ELOOP:
            reason = "it is a link"
        elif error.errno in _NO_ROOM:
            reason = f"{path.parent} has no room for it ({reason}): {_LARGER}"
        raise StorageIOError(f"memory pool {path}: {reason}") from error
