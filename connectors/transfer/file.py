"""Mover of storages that are directories: `file`, NFS for example, and `hf3fs` through its mount.

Bytes go straight between the file and the engine's memory with positioned vectored calls. Items that are neighbours in
a packed file go with one call. A file may be shared by other blocks and other ranks (packing), so it is never truncated
and only the items' own ranges are touched. A file is closed before its results return: network file systems make a
write visible to others, and report that it failed, on close.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import NamedTuple

from kvcm.connectors.transfer.memory import (
    MAX_PIECES,
    EndOfFileError,
    byte_views,
    item_views,
    read_exactly,
    write_exactly,
)
from kvcm.connectors.transfer.mover import Direction, Failure, Mover, TransferItem, TransferResult, moved, not_moved
from kvcm.connectors.transfer.paths import OpenFolders, check_root
from kvcm.model.errors import InvalidArgumentError
from kvcm.model.storages import PathStorageSpec, StorageConfig
from kvcm.model.uri import LocationUri

__all__ = ["DeadlinePassedError", "FileMover", "failure_of"]

_LINK_ERRORS = frozenset({errno.ELOOP, errno.ENOTDIR})
_LATE = not_moved(Failure.CANCELLED, "the deadline passed before the item was begun")
_log = logging.getLogger(__name__)


class DeadlinePassedError(Exception):
    """The caller's time is over; the `TimeoutError` of the system says that the storage failed."""


@dataclass(frozen=True, slots=True)
class _DirectionOps:
    """How bytes go in one direction.

    Attributes:
        direction: which.
        flags: to open a file with.
        once: the system call.
        finish: repeats it until every byte has moved.
    """

    direction: Direction
    flags: int
    once: Callable[[int, list[memoryview], int], int]
    finish: Callable[[int, list[memoryview], int, Callable[[int], None], int], None]


_LOAD = _DirectionOps(Direction.LOAD, os.O_RDONLY, os.preadv, read_exactly)
_SAVE = _DirectionOps(Direction.SAVE, os.O_WRONLY | os.O_CREAT, os.pwritev, write_exactly)


class _FileRun(NamedTuple):
    """Items that lie in a file one behind the other, and their memory."""

    items: Sequence[TransferItem]
    views: list[memoryview]
    size_bytes: int


class FileMover:
    """Moves items of `file://` and `hf3fs://` uris, in the calling thread.

    Args:
        roots: root directory of each storage, by the storage's name; items elsewhere are refused.
        schemes: scheme of each storage's uris, by the storage's name, `file` where none is given; others are refused.
        file_mode: mode of files made here; the default keeps KV, which reveals the prompt, from other users.
        directory_mode: mode of directories made here.
        coalesce: move neighbours with one call; False is for comparison.
        clock: seconds of a clock that never runs backwards.

    Raises:
        InvalidArgumentError: a root is not an absolute directory below `/`.
    """

    def __init__(
        self,
        roots: Mapping[str, str],
        *,
        schemes: Mapping[str, str] = MappingProxyType({}),
        file_mode: int = 0o600,
        directory_mode: int = 0o700,
        coalesce: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._roots = {storage: check_root(storage, root) for storage, root in roots.items()}
        self._schemes = schemes
        self._modes = (file_mode, directory_mode)
        self._most_pieces = MAX_PIECES if coalesce else 0
        self._clock = clock

    @classmethod
    def for_storages(cls, storages: Sequence[StorageConfig]) -> FileMover:
        """Return a mover for those of the storages that are directories; unusable roots are logged and left out."""
        specs = {storage.global_unique_name: storage.spec for storage in storages}
        roots = {name: spec.root for name, spec in specs.items() if isinstance(spec, PathStorageSpec)}
        schemes = {storage.global_unique_name: storage.storage_type.scheme for storage in storages}
        return cls({name: root for name, root in roots.items() if _is_usable(name, root)}, schemes=schemes)

    def batch(self) -> AbstractContextManager[Mover]:
        """Return what moves items of many files in one thread; it keeps their folders open until it is left."""
        return _FileBatch(self._roots, self._schemes, OpenFolders(*self._modes), self._most_pieces, self._clock)

    def load(self, items: Sequence[TransferItem], deadline_seconds: float) -> list[TransferResult]:
        """Read each item's range of its file into its buffers."""
        with self.batch() as batch:
            return batch.load(items, deadline_seconds)

    def save(self, items: Sequence[TransferItem], deadline_seconds: float) -> list[TransferResult]:
        """Write each item's buffers to its range of its file; directories and files are made when missing."""
        with self.batch() as batch:
            return batch.save(items, deadline_seconds)

    def close(self) -> None:
        """Nothing is kept open between batches: an open descriptor would keep a dead mount from being replaced."""


class _FileBatch:
    """Moves items in one thread; arguments as for `FileMover`."""

    __slots__ = ("_clock", "_folders", "_most_pieces", "_roots", "_schemes")

    def __init__(
        self,
        roots: Mapping[str, str],
        schemes: Mapping[str, str],
        folders: OpenFolders,
        most_pieces: int,
        clock: Callable[[], float],
    ) -> None:
        self._roots = roots
        self._schemes = schemes
        self._folders = folders
        self._most_pieces = most_pieces
        self._clock = clock

    def __enter__(self) -> _FileBatch:
        return self

    def __exit__(self, *error: object) -> None:
        self._folders.close()

    def load(self, items: Sequence[TransferItem], deadline_seconds: float) -> list[TransferResult]:
        return self._move(_LOAD, items, self._clock() + deadline_seconds)

    def save(self, items: Sequence[TransferItem], deadline_seconds: float) -> list[TransferResult]:
        return self._move(_SAVE, items, self._clock() + deadline_seconds)

    def close(self) -> None:
        self._folders.close()

    def _move(self, way: _DirectionOps, items: Sequence[TransferItem], deadline: float) -> list[TransferResult]:
        if len(items) == 1:
            return self._move_file(way, items, deadline)
        results: list[TransferResult] = []
        for group in _by_file(items):
            results += self._move_file(way, group, deadline)
        return results

    def _move_file(self, way: _DirectionOps, items: Sequence[TransferItem], deadline: float) -> list[TransferResult]:
        """Move items of one file; the results hold once it is closed."""
        if self._clock() >= deadline:
            return [_LATE] * len(items)
        try:
            descriptor = self._open(way, items[0].uri)
        except Exception as error:
            return [failure_of(error)] * len(items)
        move = self._move_item if len(items) == 1 else self._move_items
        try:
            results = move(way, descriptor, items, deadline)
        finally:
            closed = _close(descriptor)
        return results if closed is None else [closed] * len(items)

    def _open(self, way: _DirectionOps, uri: LocationUri) -> int:
        root = self._roots.get(uri.storage)
        if root is None:
            raise InvalidArgumentError(f"storage {uri.storage!r} is none of {sorted(self._roots)}")
        scheme = self._schemes.get(uri.storage, "file")
        if uri.scheme != scheme:
            raise InvalidArgumentError(f"uris on storage {uri.storage!r} begin with {scheme}://, not {uri.scheme}://")
        return self._folders.open(root, uri.path, way.flags)

    def _move_item(
        self, way: _DirectionOps, descriptor: int, items: Sequence[TransferItem], deadline: float
    ) -> list[TransferResult]:
        """Move the one item that a file has in most storages, with as few steps as there can be."""
        [item] = items
        try:
            views = item_views(item, way.direction)
            if len(views) == 1 and self._clock() < deadline:
                size = views[0].nbytes
                if way.once(descriptor, views, item.offset) == size:
                    return [moved(size)]
        except Exception as error:
            return [failure_of(error)]
        return self._move_run(way, descriptor, _FileRun(items, views, item.size_bytes), deadline)

    def _move_items(
        self, way: _DirectionOps, descriptor: int, items: Sequence[TransferItem], deadline: float
    ) -> list[TransferResult]:
        results: list[TransferResult] = []
        for run in _adjacent_runs(items, way.direction, self._most_pieces):
            results += [run] if isinstance(run, TransferResult) else self._move_run(way, descriptor, run, deadline)
        return results

    def _move_run(self, way: _DirectionOps, descriptor: int, run: _FileRun, deadline: float) -> list[TransferResult]:
        if self._clock() >= deadline:
            return [_LATE] * len(run.items)
        total = 0
        try:
            if len(run.views) <= MAX_PIECES:  # almost always one call does it
                total = way.once(descriptor, run.views, run.items[0].offset)
        except Exception as error:
            return self._failed_run(
                way=way, descriptor=descriptor, run=run, total=total, deadline=deadline, error=error
            )
        if total < run.size_bytes:
            return self._finish_run(way, descriptor, run, total, deadline)
        return [moved(item.size_bytes) for item in run.items]

    def _finish_run(
        self, way: _DirectionOps, descriptor: int, run: _FileRun, total: int, deadline: float
    ) -> list[TransferResult]:
        """Move what the first system call has left."""

        def progress(count: int) -> None:
            nonlocal total
            total += count
            if total < run.size_bytes and self._clock() >= deadline:
                raise DeadlinePassedError("the deadline passed while the item was moving")

        try:
            progress(0)
            way.finish(descriptor, run.views, run.items[0].offset, progress, total)
        except Exception as error:
            return self._failed_run(
                way=way, descriptor=descriptor, run=run, total=total, deadline=deadline, error=error
            )
        return [moved(item.size_bytes) for item in run.items]

    def _failed_run(
        self, way: _DirectionOps, descriptor: int, run: _FileRun, total: int, deadline: float, error: Exception
    ) -> list[TransferResult]:
        """Find out which items of a run fail: those within its first `total` bytes have moved."""
        if len(run.items) == 1:
            return [failure_of(error, total)]
        results: list[TransferResult] = []
        for item in run.items:
            total -= item.size_bytes
            if total >= 0:
                results.append(moved(item.size_bytes))
            else:
                single = _FileRun([item], byte_views(item.buffers), item.size_bytes)
                results += self._move_run(way, descriptor, single, deadline)
        return results


@cache  # registering again and again logs it once
def _is_usable(storage: str, root: str) -> bool:
    try:
        check_root(storage, root)
    except InvalidArgumentError as error:
        _log.warning("storage left out: %s", error)
        return False
    return True


def _by_file(items: Sequence[TransferItem]) -> Iterator[Sequence[TransferItem]]:
    """Yield consecutive items of one file each."""
    start = 0
    for end in range(1, len(items) + 1):
        if end == len(items) or items[end].uri[:3] != items[start].uri[:3]:
            yield items[start:end]
            start = end


def _adjacent_runs(
    items: Sequence[TransferItem], direction: Direction, most_pieces: int
) -> Iterator[_FileRun | TransferResult]:
    """Yield runs of neighbours with at most so many pieces of memory; for an item that cannot be moved its result."""
    run: list[TransferItem] = []
    views: list[memoryview] = []
    end = -1  # of the run, in the file
    for item in items:
        try:
            pieces = item_views(item, direction)
        except Exception as error:
            if run:
                yield _FileRun(run, views, end - run[0].offset)
            run, end = [], -1
            yield failure_of(error)
            continue
        offset = item.offset
        if offset != end or len(views) + len(pieces) > most_pieces:
            if run:
                yield _FileRun(run, views, end - run[0].offset)
            run, views = [], []
        run.append(item)
        views += pieces
        end = offset + item.size_bytes
    if run:
        yield _FileRun(run, views, end - run[0].offset)


def _close(descriptor: int) -> TransferResult | None:
    """Close a file; return why what moved does not count, if it does not."""
    try:
        os.close(descriptor)
    except OSError as error:  # network file systems report lost writes here
        return failure_of(error)
    return None


def failure_of(error: Exception, moved_bytes: int = 0) -> TransferResult:
    """Return the result of an item that an error of the file system, or of the item itself, has ended."""
    return not_moved(_kind(error), str(error) or type(error).__name__, moved_bytes)


def _kind(error: Exception) -> Failure:
    if isinstance(error, DeadlinePassedError):
        return Failure.CANCELLED
    if isinstance(error, (EndOfFileError, FileNotFoundError)):
        return Failure.LOST
    if isinstance(error, OSError):
        return Failure.REFUSED if error.errno in _LINK_ERRORS else Failure.ERROR
    return Failure.REFUSED  # wrong lengths, paths, memory that is not contiguous or not writable, absurd offsets
