"""Mover of `file` storages: a directory that all engines have mounted, NFS for example.

Bytes go straight between the file and the engine's memory with positioned vectored calls in a bounded pool of threads.
A file may be shared by other blocks and other ranks (packing), so it is never truncated and only the item's own range
is touched. A file is closed before its results are told: network file systems make a write visible to others, and
report that it failed, on close.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import cache

from connectors.transfer.mover import Failure, TransferItem, TransferResult, moved, not_moved
from connectors.transfer.paths import NotMountedError, check_root, components_below, open_below
from connectors.transfer.pool import PRIORITY_LOAD, PRIORITY_SAVE, WorkerPool
from connectors.transfer.vectored import EndOfFileError, byte_views, read_exactly, write_exactly
from kvcm.model.errors import InvalidArgumentError
from kvcm.model.storages import NfsStorageSpec, StorageConfig

__all__ = ["FileMover"]

# Items of one file share one open and close; more than a few of them are worth a second thread.
_ITEMS_PER_TASK = 8
_LINK_ERRORS = frozenset({errno.ELOOP, errno.ENOTDIR})
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Direction:
    flags: int
    priority: int
    move: Callable[[int, list[memoryview], int, Callable[[int], None]], None]


_LOAD = _Direction(os.O_RDONLY, PRIORITY_LOAD, read_exactly)
_SAVE = _Direction(os.O_WRONLY | os.O_CREAT, PRIORITY_SAVE, write_exactly)


class FileMover:
    """Moves items of `file://` uris.

    Args:
        roots: root directory of each storage, by the storage's name; items elsewhere are refused.
        threads: most files moved at once; default is the number of cores, at most 4.
        file_mode: mode of files made here; the default keeps KV, which tells the prompt, from other users.
        directory_mode: mode of directories made here.
        clock: seconds of a clock that never runs backwards.

    Raises:
        InvalidArgumentError: a root is not an absolute directory below `/`.
    """

    def __init__(
        self,
        roots: Mapping[str, str],
        threads: int | None = None,
        *,
        file_mode: int = 0o600,
        directory_mode: int = 0o700,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._roots = {storage: check_root(storage, root) for storage, root in roots.items()}
        self._pool = WorkerPool(threads or min(4, os.cpu_count() or 1), "kvcm-file")
        self._modes = (file_mode, directory_mode)
        self._clock = clock
        # Storages that a load found not mounted. A save must not make their directories on the local disk: nobody else
        # would see the blocks, and what other engines stored would look lost from then on.
        self._not_mounted: set[str] = set()

    @classmethod
    def for_storages(cls, storages: Sequence[StorageConfig], threads: int | None = None) -> FileMover:
        """Return a mover for those of the storages that are directories; unusable roots are logged and left out."""
        specs = {storage.global_unique_name: storage.spec for storage in storages}
        roots = {name: spec.root_path for name, spec in specs.items() if isinstance(spec, NfsStorageSpec)}
        return cls({name: root for name, root in roots.items() if _is_usable(name, root)}, threads)

    def load(self, items: Sequence[TransferItem], deadline_seconds: float) -> list[TransferResult]:
        """Read each item's range of its file into its buffers."""
        return self._transfer(_LOAD, items, deadline_seconds)

    def save(self, items: Sequence[TransferItem], deadline_seconds: float) -> list[TransferResult]:
        """Write each item's buffers to its range of its file; directories and files are made when missing."""
        return self._transfer(_SAVE, items, deadline_seconds)

    def close(self) -> None:
        """End the threads; what moves now ends first, within 5 s."""
        self._pool.close()

    def _transfer(
        self, direction: _Direction, items: Sequence[TransferItem], deadline_seconds: float
    ) -> list[TransferResult]:
        deadline = self._clock() + deadline_seconds
        tasks = [self._task(direction, group, deadline) for group in _by_file(items)]
        futures = [self._pool.submit(direction.priority, task) for task in tasks]
        wait(futures, max(0.0, deadline_seconds))
        results: dict[int, TransferResult] = {}
        for task, future in zip(tasks, futures, strict=True):
            results |= task.results if _finished(future) else dict.fromkeys(task.items, _unfinished(future))
        return [results[index] for index in range(len(items))]

    def _task(self, direction: _Direction, items: dict[int, TransferItem], deadline: float) -> _FileTask:
        return _FileTask(
            self._roots, self._not_mounted, direction, items, self._modes, lambda: self._clock() >= deadline
        )


class _FileTask:
    """Moves items of one file, in order, and holds their results once the file is closed."""

    def __init__(
        self,
        roots: Mapping[str, str],
        not_mounted: set[str],
        direction: _Direction,
        items: dict[int, TransferItem],
        modes: tuple[int, int],
        is_late: Callable[[], bool],
    ) -> None:
        self.items = items
        self.results: dict[int, TransferResult] = {}
        self._roots = roots
        self._not_mounted = not_mounted
        self._direction = direction
        self._modes = modes
        self._is_late = is_late

    def __call__(self) -> None:
        if self._is_late():
            self._fail_all(not_moved(Failure.CANCELLED, "the deadline passed before the item was begun"))
            return
        try:
            descriptor = self._open()
        except Exception as error:
            self._fail_all(_failure(error))
            return
        results = {index: self._move(descriptor, item) for index, item in self.items.items()}
        try:
            os.close(descriptor)
        except OSError as error:  # network file systems report lost writes here
            self._fail_all(_failure(error))
        else:
            self.results = results

    def _open(self) -> int:
        uri = next(iter(self.items.values())).uri
        root = self._roots.get(uri.storage)
        if root is None:
            raise InvalidArgumentError(f"storage {uri.storage!r} is none of {sorted(self._roots)}")
        components = components_below(root, uri.path)
        begin = uri.storage not in self._not_mounted
        try:
            return open_below(root, components, self._direction.flags, *self._modes, begin=begin)
        except NotMountedError:
            self._not_mounted.add(uri.storage)
            raise

    def _move(self, descriptor: int, item: TransferItem) -> TransferResult:
        total = 0

        def progress(count: int) -> None:
            nonlocal total
            total += count
            if total < item.uri.size and self._is_late():
                raise TimeoutError("the deadline passed while the item was moving")

        try:
            self._direction.move(descriptor, _checked_views(item), item.uri.offset, progress)
        except Exception as error:
            return _failure(error, total)
        return moved(total)

    def _fail_all(self, result: TransferResult) -> None:
        self.results = dict.fromkeys(self.items, result)


@cache  # registering again and again logs it once
def _is_usable(storage: str, root: str) -> bool:
    try:
        check_root(storage, root)
    except InvalidArgumentError as error:
        _log.warning("storage left out: %s", error)
        return False
    return True


def _by_file(items: Sequence[TransferItem]) -> Iterator[dict[int, TransferItem]]:
    """Yield groups of at most `_ITEMS_PER_TASK` items of one file each, by their positions."""
    files: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for index, item in enumerate(items):
        files[item.uri.storage, item.uri.path].append(index)
    for indices in files.values():
        for start in range(0, len(indices), _ITEMS_PER_TASK):
            yield {index: items[index] for index in indices[start : start + _ITEMS_PER_TASK]}


def _checked_views(item: TransferItem) -> list[memoryview]:
    views = byte_views(item.buffers)
    length = sum(view.nbytes for view in views)
    if length != item.uri.size or not length:
        raise InvalidArgumentError(
            f"buffers hold {length} bytes, the uri's size is {item.uri.size}; both must be equal, > 0"
        )
    return views


def _failure(error: Exception, moved_bytes: int = 0) -> TransferResult:
    return not_moved(_kind(error), str(error) or type(error).__name__, moved_bytes)


def _kind(error: Exception) -> Failure:
    if isinstance(error, TimeoutError):
        return Failure.CANCELLED
    if isinstance(error, (EndOfFileError, FileNotFoundError)):
        return Failure.LOST
    if isinstance(error, OSError):
        return Failure.REFUSED if error.errno in _LINK_ERRORS else Failure.ERROR
    return Failure.REFUSED  # wrong lengths, paths, memory that is not contiguous or not writable, absurd offsets


def _finished(future: Future[None]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None


def _unfinished(future: Future[None]) -> TransferResult:
    """Return the result of items whose task did not end: a task that has not begun is taken back."""
    if future.cancel():
        return not_moved(Failure.CANCELLED, "the deadline passed before the item was begun")
    return not_moved(Failure.PENDING, "the deadline passed while the storage was busy with the item")
