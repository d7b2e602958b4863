"""The shared memory of a pool, mapped into this process: its data, its stamps, and its writers' locks.

Why no reader gets wrong bytes, although extents are reused at once, while earlier writers and readers may still be
running. Invariants:

1. Every page of data has a stamp: that of the allocation whose writer wrote it last. Stamps of a page only grow.
2. A writer locks its pages, refuses if one has a larger stamp, sets all to its own, and only then copies. So a page
   with stamp S holds bytes of S, or of a copy to S that did not end; S is published only after one ended well.
3. A reader compares the stamps after its copy. If all are those of its address, no newer writer had begun before.
4. The lock ends with its process, and only then: a writer that is stopped in its copy keeps others away from its pages,
   one that is killed writes no more. A child that is forked meanwhile lets go of what it inherits of the lock, which
   changes nothing for its parent, before it runs anything else.

The order of memory accesses. A writer's stamps must be seen before its bytes, and a reader must read the stamps after
the bytes. x86 keeps stores, and loads, in order, except those that large copies make round the caches; ARM keeps
neither. So `fence` stands between: it takes and gives back a lock, twice. On x86 each is a locked instruction, which
waits for all stores before it; on ARMv8 a release followed by an acquire lets nothing pass in either direction. That
stamps are copied as bytes does no harm: a stamp that is read half is not the one that was asked for.

The locks are those of open file descriptions (F_OFD_SETLK), since ordinary ones are one per process and go with any
descriptor of the file that is closed. So every lock has a descriptor of its own, made from the file and not its name.
A description lives as long as any process has a descriptor of it: hence the children that close theirs. One that is
forked behind the interpreter's back, by native code that does not run its hooks, and neither ends nor executes another
program, keeps its parent's pages locked after its parent's death.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
import stat
import struct
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from kvcm.model.errors import StorageIOError
from kvcm.model.storages import PAGE_BYTES, pool_bytes
from kvcm.model.uri import path_component

__all__ = [
    "PoolAccess",
    "PoolSegment",
    "SegmentHeader",
    "WriteLock",
    "boot_id",
    "create_segment",
    "fence",
    "open_segment",
    "segment_path",
    "stamps_of",
]

# What stands at the beginning of a memory pool's segment, and where its parts lie.
#
# A segment is: one page of header, one page for self-checks, a stamp of 64 bits per page of data, the data. The data
# begins at a huge page, so that the kernel can map it with huge pages.
#
# A segment belongs to one boot of the host: on a file system that survives one, pages could be older than their
# stamps.

_HEADER_BYTES = PAGE_BYTES
_CHECK_OFFSET = _HEADER_BYTES
_MAGIC = b"KVCMPOOL"
_VERSION = 1
_STAMPS_OFFSET = _CHECK_OFFSET + PAGE_BYTES
_STAMP_BYTES = 8
_HUGE_PAGE_BYTES = 2 << 20
# magic, version, bytes per page, generation, capacity, offset of the data, boot
_FIELDS = struct.Struct("<8sIIQQQ16s")
_CHECK = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """A segment's header.

    Attributes:
        generation: random, never 0: another one is other memory.
        capacity_bytes: of the data; whole pages.
        boot: of the host, when the segment was made.
    """

    generation: int
    capacity_bytes: int
    boot: bytes

    @classmethod
    def new(cls, generation: int, capacity_bytes: int) -> SegmentHeader:
        """Return the header of a new segment, with capacity for at least `capacity_bytes`' whole pages."""
        return cls(generation, pool_bytes(capacity_bytes), boot_id())

    @property
    def stamps_offset(self) -> int:
        """First byte of the stamps."""
        return _STAMPS_OFFSET

    @property
    def pages(self) -> int:
        """Number of pages of data, which is that of stamps."""
        return self.capacity_bytes // PAGE_BYTES

    @property
    def data_offset(self) -> int:
        """First byte of the data."""
        return _rounded_up(_STAMPS_OFFSET + self.pages * _STAMP_BYTES, _HUGE_PAGE_BYTES)

    def segment_bytes(self, unit_bytes: int = 1) -> int:
        """Return the length of the segment's file, a multiple of `unit_bytes`."""
        return _rounded_up(self.data_offset + self.capacity_bytes, unit_bytes)

    def encode(self) -> bytes:
        """Return the header's bytes."""
        fields = _FIELDS.pack(
            _MAGIC, _VERSION, PAGE_BYTES, self.generation, self.capacity_bytes, self.data_offset, self.boot
        )
        return fields + _CHECK.pack(zlib.crc32(fields))

    @classmethod
    def decode(cls, encoded: bytes) -> SegmentHeader:
        """Read a header.

        Args:
            encoded: the first bytes of a segment.

        Raises:
            ValueError: it is none, a damaged one, or one of another release; says which.
        """
        if len(encoded) < _FIELDS.size + _CHECK.size or encoded[: len(_MAGIC)] != _MAGIC:
            raise ValueError("it does not begin as the segment of a memory pool does")
        _, version, page_bytes, generation, capacity_bytes, data_offset, boot = _FIELDS.unpack_from(encoded)
        if (version, page_bytes) != (_VERSION, PAGE_BYTES):
            raise ValueError(
                f"it has version {version} with pages of {page_bytes} bytes, this release knows version {_VERSION}"
                f" with pages of {PAGE_BYTES} bytes"
            )
        header = cls(generation, capacity_bytes, boot)
        (check,) = _CHECK.unpack_from(encoded, _FIELDS.size)
        if check != zlib.crc32(encoded[: _FIELDS.size]) or data_offset != header.data_offset:
            raise ValueError("its header is damaged")
        return header


@cache
def boot_id() -> bytes:
    """Return an id of the host's boot; zeros where the kernel has none."""
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_text()
        return bytes.fromhex(text.strip().replace("-", ""))[:16].ljust(16, b"\0")
    except (OSError, ValueError):
        return bytes(16)


def _rounded_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


_OFFSET_TO_STAMP = (PAGE_BYTES // _STAMP_BYTES).bit_length() - 1  # a page's stamp stands at its offset >> this
_FLOCK = struct.Struct("@hhqqi4x")  # struct flock of 64-bit Linux
# A copy of fewer bytes is over before another thread could get the interpreter's lock and give it back.
_NUMPY_FROM_BYTES = 128 << 10


def stamps_of(stamp: int, size_bytes: int) -> bytes:
    """Return the stamps of all pages of `size_bytes`, which are whole pages."""
    return stamp.to_bytes(_STAMP_BYTES, "little") * (size_bytes // PAGE_BYTES)


def fence() -> None:
    """Let no access to memory pass: what the thread did before is done before what it does afterwards."""
    lock = threading.Lock()
    for _ in range(2):
        lock.acquire()
        lock.release()


class PoolSegment:
    """A segment that is mapped. What replaces it under its name is another one.

    Args:
        descriptor: of the file, open for reading and writing; taken over.
        header: of the segment, checked.

    Attributes:
        header: generation and capacity.
        data: the bytes of the pool.
    """

    def __init__(self, descriptor: int, header: SegmentHeader) -> None:
        self.header = header
        status = os.fstat(descriptor)
        self._identity = (status.st_dev, status.st_ino)
        self._memory = mmap.mmap(descriptor, status.st_size)
        with suppress(OSError):  # most kernels have it disabled for shared memory
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._stamps_offset = header.stamps_offset
        end = header.data_offset + header.capacity_bytes
        self._view = memoryview(self._memory)[header.data_offset : end]
        self.data = np.frombuffer(self._view, np.uint8)
        self._stamps = np.frombuffer(self._memory, "<u8", header.pages, header.stamps_offset)
        self._descriptors = _Descriptors(descriptor)
        # Not at the end of the process, whose threads may still be at work.
        weakref.finalize(self, self._descriptors.close).atexit = False

    def is_at(self, path: Path) -> bool:
        """Whether the name leads to this segment, and its file is as long as it was."""
        try:
            status = os.stat(path, follow_symlinks=False)  # noqa: PTH116  half the time of a Path's
        except OSError:
            return False
        return (status.st_dev, status.st_ino) == self._identity and status.st_size >= len(self._memory)

    def has_stamps(self, offset: int, stamps: bytes) -> bool:
        """Whether the pages from `offset` on have these stamps."""
        start = self._stamps_offset + (offset >> _OFFSET_TO_STAMP)
        return self._memory[start : start + len(stamps)] == stamps

    def write_stamps(self, offset: int, stamps: bytes) -> None:
        """Set the stamps of the pages from `offset` on. Under a lock."""
        start = self._stamps_offset + (offset >> _OFFSET_TO_STAMP)
        self._memory[start : start + len(stamps)] = stamps

    def newest_stamp(self, offset: int, size_bytes: int) -> int:
        """Return the largest stamp of some pages."""
        first = offset // PAGE_BYTES
        return int(self._stamps[first : first + size_bytes // PAGE_BYTES].max())

    def copy_in(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Write pieces of contiguous memory to the data at `offset`, one behind the other.

        Raises:
            ValueError, TypeError: a piece is not contiguous.
        """
        for buffer in buffers:
            end = offset + buffer.nbytes
            if end - offset >= _NUMPY_FROM_BYTES:
                np.copyto(self.data[offset:end], np.frombuffer(buffer, np.uint8))
            elif end > offset:
                self._view[offset:end] = _flat(buffer)
            offset = end

    def copy_out(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill pieces of contiguous memory with the data at `offset`, one behind the other.

        Raises:
            ValueError, TypeError: a piece is not contiguous, or not writable.
        """
        for buffer in buffers:
            end = offset + buffer.nbytes
            if end - offset >= _NUMPY_FROM_BYTES:
                np.copyto(np.frombuffer(buffer, np.uint8), self.data[offset:end])
            elif end > offset:
                _flat(buffer)[:] = self._view[offset:end]
            offset = end

    @contextmanager
    def write_lock(self) -> Iterator[WriteLock]:
        """Return what to lock pages with; at the end nothing is locked."""
        descriptor, process = self._descriptors.acquire(), os.getpid()
        try:
            yield WriteLock(descriptor, self.header.data_offset)
        finally:
            if os.getpid() == process:  # a child has nothing to release, and must not unlock its parent's pages
                _lock(descriptor=descriptor, kind=fcntl.F_UNLCK, start=0, size_bytes=0)
                self._descriptors.release(descriptor)

    def touch(self) -> None:
        """Have the kernel map all of it now, so that no later access waits for a page.

        Raises:
            OSError: it cannot, or knows no such request (before Linux 5.14).
        """
        populate_write = 23  # MADV_POPULATE_WRITE
        self._memory.madvise(populate_write)

    def passes_check(self, token: bytes) -> bool:
        """Whether bytes that are written through the mapping are read back from the file.

        Args:
            token: what to write, less than a page; several processes may check at once.

        Raises:
            OSError: reading failed.
        """
        with self.write_lock() as lock:
            if not lock.lock(_CHECK_OFFSET - self.header.data_offset, PAGE_BYTES):
                return True  # another process is at it
            self._memory[_CHECK_OFFSET : _CHECK_OFFSET + len(token)] = token
            return os.pread(lock.descriptor, len(token), _CHECK_OFFSET) == token


class WriteLock:
    """Locks pages of a segment for one writer until it ends; never waits.

    Args:
        descriptor: of an open file description of its own.
        data_offset: first byte of the data.
    """

    __slots__ = ("_data_offset", "descriptor")

    def __init__(self, descriptor: int, data_offset: int) -> None:
        self.descriptor = descriptor
        self._data_offset = data_offset

    def lock(self, offset: int, size_bytes: int) -> bool:
        """Lock pages; False when another writer has one of them.

        Raises:
            OSError: the system cannot lock.
        """
        try:
            _lock(self.descriptor, fcntl.F_WRLCK, self._data_offset + offset, size_bytes)
        except (BlockingIOError, PermissionError):  # EAGAIN or EACCES: either may say that it is locked
            return False
        return True


class _Descriptors:
    """Descriptors of one file, each of an open file description of its own. Safe to use from several threads.

    Args:
        descriptor: the first one, taken over; never lent.
    """

    def __init__(self, descriptor: int) -> None:
        self._first = descriptor
        self._free: list[int] = []
        self._locking: list[int] = []  # all but the first: lent or free
        self._process = os.getpid()
        _all_descriptors.add(self)

    def acquire(self) -> int:
        """Lend a descriptor."""
        if self._process != os.getpid():  # a fork without Python's hooks
            self._free, self._locking, self._process = [], [], os.getpid()
        try:
            return self._free.pop()
        except IndexError:
            with _fork_lock:
                descriptor = os.open(f"/proc/self/fd/{self._first}", os.O_RDWR | os.O_CLOEXEC)
                self._locking.append(descriptor)
            return descriptor

    def after_fork(self) -> None:
        """In a forked child, close the descriptors of the parent's locks, and unlock nothing."""
        for descriptor in self._locking:
            with suppress(OSError):  # the forking code may have closed everything
                os.close(descriptor)
        self._free, self._locking, self._process = [], [], os.getpid()

    def release(self, descriptor: int) -> None:
        """Take a descriptor back."""
        self._free.append(descriptor)

    def close(self) -> None:
        """Close all; none is lent."""
        descriptors = (*self._free, self._first)
        self._free, self._locking = [], []  # first: a child must not close what has the number by then
        for descriptor in descriptors:
            os.close(descriptor)


_all_descriptors: weakref.WeakSet[_Descriptors] = weakref.WeakSet()
# Held while a descriptor is opened and noted, and over every fork. Reentrant, since signal handlers may fork.
_fork_lock = threading.RLock()


def _after_fork() -> None:
    _fork_lock.release()
    for descriptors in _all_descriptors:
        descriptors.after_fork()


os.register_at_fork(before=_fork_lock.acquire, after_in_child=_after_fork, after_in_parent=_fork_lock.release)


def _flat(buffer: memoryview) -> memoryview:
    return buffer if buffer.format == "B" and buffer.ndim == 1 and buffer.c_contiguous else buffer.cast("B")


def _lock(descriptor: int, kind: int, start: int, size_bytes: int) -> None:
    """Lock or unlock bytes of a file; all of them when `size_bytes` is 0."""
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, start, size_bytes, 0))


# Opens the segment of a memory pool by its name, and makes it.
#
# A segment is made under another name, filled, and renamed: whatever stands under its own name is complete. The file
# that is being made is locked by its maker, so of several makers one goes on, memory is never taken twice, and what a
# maker leaves that is killed is used by the next one.
#
# All memory is taken at once: a segment that is not wholly backed would kill a process (SIGBUS) at its first access to
# a page that the full file system cannot allocate.

_OPEN_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_FALLOCATE_BYTES = 256 << 20  # a signal interrupts one step, not hours of work
_NO_SPACE = frozenset({errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFBIG})
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
        StorageIOError: the file must not or cannot be used; names it and the reason.
    """
    with _with_path(path):
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


def create_segment(path: Path, capacity_bytes: int, new_generation: Callable[[], int]) -> None:
    """Make the segment unless it is there. Takes as long as clearing so much memory does.

    Args:
        path: of the segment.
        capacity_bytes: of its data.
        new_generation: draws 64 random bits.

    Raises:
        StorageIOError: there is no space, another process is creating it, or the file cannot be used.
    """
    draft = path.with_name(f".{path.name}.new")
    with _with_path(path):
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
    header = SegmentHeader.decode(os.pread(descriptor, _HEADER_BYTES, 0))
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
    os.ftruncate(descriptor, 0)  # left by a killed maker, and mapped by no process
    unit_bytes = os.fstatvfs(descriptor).f_bsize  # a huge page, in a file system of those
    length = header.segment_bytes(unit_bytes)
    _check_free_space(descriptor, path, length)
    os.ftruncate(descriptor, length)
    for start in range(0, length, _FALLOCATE_BYTES):
        os.posix_fallocate(descriptor, start, min(_FALLOCATE_BYTES, length - start))
    with mmap.mmap(descriptor, length) as memory:  # file systems of huge pages know no write
        encoded = header.encode()
        memory[: len(encoded)] = encoded


def _check_free_space(descriptor: int, path: Path, length: int) -> None:
    """Refuse at once what would fail after a long while."""
    filesystem = os.fstatvfs(descriptor)
    free_bytes = filesystem.f_bavail * filesystem.f_frsize
    if filesystem.f_blocks and free_bytes < length:
        all_bytes = filesystem.f_blocks * filesystem.f_frsize
        raise ValueError(f"it needs {length} bytes, {path.parent} has {free_bytes} free of {all_bytes}: {_LARGER}")


@contextmanager
def _with_path(path: Path) -> Iterator[None]:
    """Name the segment in whatever goes wrong."""
    try:
        yield
    except ValueError as error:
        raise StorageIOError(f"memory pool {path}: {error}") from error
    except OSError as error:
        reason = error.strerror or repr(error)
        if error.errno == errno.ELOOP:
            reason = "it is a link"
        elif error.errno in _NO_SPACE:
            reason = f"{path.parent} has no room for it ({reason}): {_LARGER}"
        raise StorageIOError(f"memory pool {path}: {reason}") from error


# Finds the segment of a memory pool by its name, again and again: it may come later than we, go, and come back.

_RETRY_SECONDS = 1.0


def _new_generation() -> int:
    return secrets.randbits(64)


class PoolAccess:
    """The segment under one name. Safe to use from several threads.

    Args:
        path: of the segment.
        capacity_bytes: that it must have.
        creates: make it when it is missing.
        clock: seconds of a clock that never runs backwards.
        new_generation: draws 64 random bits.
    """

    def __init__(
        self,
        path: Path,
        capacity_bytes: int,
        *,
        creates: bool = True,
        clock: Callable[[], float] = time.monotonic,
        new_generation: Callable[[], int] = _new_generation,
    ) -> None:
        self.path = path
        self._capacity_bytes = capacity_bytes
        self._creates = creates
        self._clock = clock
        self._new_generation = new_generation
        self._attached: PoolSegment | None = None
        self._attaching = threading.Lock()
        self._making = threading.Lock()
        self._failure = (0.0, "")  # when making may be tried again, and why it failed

    @property
    def attached(self) -> PoolSegment | None:
        """The segment that was there when somebody last looked."""
        return self._attached

    def find(self) -> PoolSegment | None:
        """Return the segment that is there, None when there is none.

        Raises:
            StorageIOError: the file cannot be used.
        """
        segment = self._attached
        if segment is not None and segment.is_at(self.path):
            return segment
        with self._attaching:
            if self._attached is None or not self._attached.is_at(self.path):
                self._attached = None  # also when opening fails
                self._attached = open_segment(self.path, self._capacity_bytes)
            return self._attached

    def find_or_create(self) -> PoolSegment:
        """Return the segment that is there, or a new one; a failure is remembered for a second.

        Raises:
            StorageIOError: there is none and none could be created, or the file cannot be used.
        """
        segment = self.find()
        if segment is None:
            self._create()
            segment = self.find()
        if segment is None:
            raise StorageIOError(f"memory pool {self.path}: it was removed as soon as it was made")
        return segment

    def close(self) -> None:
        """Let go of the memory; it stays mapped as long as somebody copies."""
        with self._attaching:
            self._attached = None

    def _create(self) -> None:
        if not self._creates:
            raise StorageIOError(f"memory pool {self.path}: it is not there, is the host agent running?")
        if not self._making.acquire(blocking=False):
            raise StorageIOError(f"memory pool {self.path}: it is being made")
        try:
            self._try_create()
        finally:
            self._making.release()

    def _try_create(self) -> None:
        retry_at, reason = self._failure
        if reason and self._clock() < retry_at:
            raise StorageIOError(reason)
        try:
            create_segment(self.path, self._capacity_bytes, self._new_generation)
        except StorageIOError as error:
            self._failure = (self._clock() + _RETRY_SECONDS, str(error))
            raise
        self._failure = (0.0, "")
