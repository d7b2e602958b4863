"""The shared memory of a pool, mapped into this process: its data, its stamps, and who writes.

Why nobody ever reads wrong bytes, although extents are handed out again at once, and writers and readers of before may
still be about:

1. Every page of data has a stamp: that of the allocation whose writer wrote it last. Stamps of a page only grow.
2. A writer locks its pages, refuses if one has a larger stamp, sets all to its own, and only then copies. So a page
   with stamp S holds bytes of S, or of a copy to S that did not end; nobody is told of S before one ended well.
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
descriptor of the file that is closed. So every claim has a descriptor of its own, made from the file and not its name.
A description lives as long as any process has a descriptor of it: hence the children that close theirs. One that is
forked behind the interpreter's back, by native code that does not run its hooks, and neither ends nor executes another
program, keeps its parent's pages locked after its parent's death.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from connectors.transfer.pool_header import CHECK_OFFSET, SegmentHeader
from kvcm.model.memory_pool import PAGE_BYTES

__all__ = ["Claim", "PoolSegment", "fence", "stamps_of"]

_STAMP_BYTES = 8
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
        with suppress(OSError):  # most kernels are told not to do it for shared memory
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

    def holds(self, offset: int, stamps: bytes) -> bool:
        """Whether the pages from `offset` on have these stamps."""
        start = self._stamps_offset + (offset >> _OFFSET_TO_STAMP)
        return self._memory[start : start + len(stamps)] == stamps

    def put_stamps(self, offset: int, stamps: bytes) -> None:
        """Set the stamps of the pages from `offset` on. Under a claim."""
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
    def claim(self) -> Iterator[Claim]:
        """Return what to lock pages with; at the end nothing is locked."""
        descriptor, process = self._descriptors.take(), os.getpid()
        try:
            yield Claim(descriptor, self.header.data_offset)
        finally:
            if os.getpid() == process:  # a child has nothing to give back, and must not unlock what is its parent's
                _lock(descriptor, fcntl.F_UNLCK, 0, 0)
                self._descriptors.give_back(descriptor)

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
        with self.claim() as claim:
            if not claim.lock(CHECK_OFFSET - self.header.data_offset, PAGE_BYTES):
                return True  # another process is at it
            self._memory[CHECK_OFFSET : CHECK_OFFSET + len(token)] = token
            return os.pread(claim.descriptor, len(token), CHECK_OFFSET) == token


class Claim:
    """Locks pages of a segment for one writer until it ends; never waits.

    Args:
        descriptor: of an open file description that nobody else uses.
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
        _everywhere.add(self)

    def take(self) -> int:
        """Lend a descriptor."""
        if self._process != os.getpid():  # a fork that we were not told of
            self._free, self._locking, self._process = [], [], os.getpid()
        try:
            return self._free.pop()
        except IndexError:
            with _forking:
                descriptor = os.open(f"/proc/self/fd/{self._first}", os.O_RDWR | os.O_CLOEXEC)
                self._locking.append(descriptor)
            return descriptor

    def forked(self) -> None:
        """Hear that this is a child: close what the parent locks with, and unlock nothing."""
        for descriptor in self._locking:
            with suppress(OSError):  # whoever forked may have closed everything
                os.close(descriptor)
        self._free, self._locking, self._process = [], [], os.getpid()

    def give_back(self, descriptor: int) -> None:
        """Take a descriptor back."""
        self._free.append(descriptor)

    def close(self) -> None:
        """Close all; none is lent."""
        descriptors = (*self._free, self._first)
        self._free, self._locking = [], []  # first: a child must not close what has the number by then
        for descriptor in descriptors:
            os.close(descriptor)


_everywhere: weakref.WeakSet[_Descriptors] = weakref.WeakSet()
# Held while a descriptor is opened and noted, and over every fork. Reentrant, since signal handlers may fork.
_forking = threading.RLock()


def _forked() -> None:
    _forking.release()
    for descriptors in _everywhere:
        descriptors.forked()


os.register_at_fork(before=_forking.acquire, after_in_child=_forked, after_in_parent=_forking.release)


def _flat(buffer: memoryview) -> memoryview:
    return buffer if buffer.format == "B" and buffer.ndim == 1 and buffer.c_contiguous else buffer.cast("B")


def _lock(descriptor: int, kind: int, start: int, size_bytes: int) -> None:
    """Lock or unlock bytes of a file; all of them when `size_bytes` is 0."""
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, start, size_bytes, 0))
