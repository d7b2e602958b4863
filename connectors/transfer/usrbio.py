"""Mover of `hf3fs` storages through USRBIO, the interface of 3FS that goes round the kernel. **UNTESTED against 3FS.**

Not one byte has gone through a real 3FS with it: its binding, `hf3fs_fuse`, comes with 3FS and was not at hand. Only
this mover over a stand-in of `_Rings` is tested. So it is never the default: `hf3fs` moves through the mount, and users
pass `UsrbioMover` to `TransferEngine` to try it.

Files are opened in the mount as ever, and nothing else goes through the kernel: requests name a descriptor that was
registered, and memory that is shared with the client of 3FS. Bytes go through that memory, by one copy.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from kvcm.connectors.transfer.file import DeadlinePassedError, failure_of
from kvcm.connectors.transfer.memory import EndOfFileError, gather_bytes, groups_that_fit, scatter_bytes, writable_views
from kvcm.connectors.transfer.mover import Direction, Failure, TransferItem, TransferResult, moved, not_moved
from kvcm.connectors.transfer.paths import OpenFolders, check_root
from kvcm.model.errors import InvalidArgumentError

__all__ = ["Request", "UsrbioMover"]

_FLAGS = {Direction.LOAD: os.O_RDONLY, Direction.SAVE: os.O_WRONLY | os.O_CREAT}


class Request(NamedTuple):
    """Bytes of a file and of the shared memory."""

    descriptor: int
    file_offset: int
    memory_offset: int
    size_bytes: int


class _Rings(Protocol):
    """The used part of USRBIO: memory that is registered once, and a ring each for reads and writes.

    Attributes:
        memory: flat bytes, registered.
    """

    memory: memoryview

    def register(self, descriptor: int) -> None:
        """Let requests name a file; raises OSError."""

    def submit(self, requests: Sequence[Request], *, is_read: bool) -> None:
        """Begin requests; raises OSError."""

    def wait(self, count: int) -> Sequence[int]:
        """Return the bytes that each request has moved, in order, or -errno; raises OSError when they are lost."""

    def deregister(self, descriptor: int) -> None:
        """Take the permission back, before the file is closed; raises OSError."""

    def close(self) -> None:
        """Give the memory and the rings back."""


class UsrbioMover:
    """Moves items of one storage, one batch at a time.

    Args:
        storage: its name.
        root: its directory in the mount, absolute and below `/`.
        rings: to its 3FS. An item is at most as large as their memory.
        clock: seconds of a clock that never runs backwards.

    Attributes:
        most_threads: the memory is used by one batch at a time.
        group_bytes: of a batch.
    """

    def __init__(self, storage: str, root: str, rings: _Rings, clock: Callable[[], float] = time.monotonic) -> None:
        self.most_threads = 1
        self.group_bytes = rings.memory.nbytes
        self._storage, self._root = storage, check_root(storage, root)
        self._rings = rings
        self._clock = clock
        self._turn = threading.Lock()
        self._is_broken = False

    def load(self, items: Sequence[TransferItem], deadline_seconds: float) -> list[TransferResult]:
        """Read each item's range of its file into its buffers."""
        return self._move(Direction.LOAD, items, self._clock() + deadline_seconds)

    def save(self, items: Sequence[TransferItem], deadline_seconds: float) -> list[TransferResult]:
        """Write each item's buffers to its range of its file."""
        return self._move(Direction.SAVE, items, self._clock() + deadline_seconds)

    def close(self) -> None:
        """Give the rings back."""
        self._rings.close()

    def _move(self, direction: Direction, items: Sequence[TransferItem], deadline: float) -> list[TransferResult]:
        ring_bytes = self._rings.memory.nbytes
        too_large = not_moved(Failure.REFUSED, f"more than {ring_bytes} bytes, the memory of the rings")
        results = [too_large] * len(items)
        with self._turn:
            for batch in groups_that_fit(range(len(items)), lambda position: items[position].size_bytes, ring_bytes):
                for position, result in self._batch(direction, {at: items[at] for at in batch}, deadline):
                    results[position] = result
        return results

    def _batch(
        self, direction: Direction, items: Mapping[int, TransferItem], deadline: float
    ) -> Iterator[tuple[int, TransferResult]]:
        """Yield the results of items that fit the memory together, by position."""
        requests: dict[int, Request] = {}
        folders, place = OpenFolders(0o600, 0o700), 0
        for position, item in items.items():
            try:
                requests[position] = self._request(direction, item, place, folders, deadline)
            except Exception as error:  # whatever an item is made of
                yield position, failure_of(error)
            place += item.size_bytes
        folders.close()
        is_read = direction is Direction.LOAD
        codes = self._exchange(list(requests.values()), is_read=is_read) if requests else []
        for (position, request), code in zip(requests.items(), codes, strict=True):
            if is_read and code == request.size_bytes:
                memory = self._rings.memory[request.memory_offset : request.memory_offset + code]
                scatter_bytes(memory, writable_views(items[position], direction))
            yield position, self._close(request.descriptor) or _result(code, request.size_bytes, is_read=is_read)

    def _request(
        self, direction: Direction, item: TransferItem, place: int, folders: OpenFolders, deadline: float
    ) -> Request:
        if (item.uri.scheme, item.uri.storage) != ("hf3fs", self._storage):
            raise InvalidArgumentError(f"uri {str(item.uri)!r} is not of hf3fs://{self._storage}")
        views = writable_views(item, direction)
        if self._is_broken:
            raise OSError(errno.EIO, "3FS failed before, and may still write to the memory of its rings")
        if self._clock() >= deadline:
            raise DeadlinePassedError("the deadline passed before the item was begun")
        descriptor = folders.open(self._root, item.uri.path, _FLAGS[direction])
        try:
            self._rings.register(descriptor)
        except OSError:
            os.close(descriptor)
            raise
        if direction is Direction.SAVE:
            gather_bytes(views, self._rings.memory[place : place + item.size_bytes])
        return Request(descriptor, item.offset, place, item.size_bytes)

    def _exchange(self, requests: Sequence[Request], *, is_read: bool) -> Sequence[int]:
        """Return the answers to requests. If one is missing, any of them may still be in flight."""
        code = errno.EIO
        try:
            self._rings.submit(requests, is_read=is_read)
            codes = self._rings.wait(len(requests))
            if len(codes) == len(requests):
                return codes
        except OSError as error:
            code = error.errno or errno.EIO
        self._is_broken = True
        return [-code] * len(requests)

    def _close(self, descriptor: int) -> TransferResult | None:
        try:
            try:
                self._rings.deregister(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            return failure_of(error)
        return None


def _result(code: int, size_bytes: int, *, is_read: bool) -> TransferResult:
    if code == size_bytes:
        return moved(code)
    if is_read and code >= 0:
        return failure_of(EndOfFileError(f"the file ends after {code} of {size_bytes} bytes"), code)
    return failure_of(OSError(-code if code < 0 else errno.EIO, f"3FS answers {code} for {size_bytes} bytes"))
