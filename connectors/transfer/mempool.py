"""Mover of memory pools: memory of this node that all engines on it share; `pool_segment` explains why that is safe.

A pool's memory may be missing, or other memory than before (a new generation). Loads are lost then; the next save makes
it again, unless only the host agent may. Nothing ever waits: pages that another writer has locked are busy at once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from ctypes import addressof, c_char
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvcm.connectors.node import NodeSettings
from kvcm.connectors.transfer.mover import Direction, Failure, TransferItem, TransferResult, moved, not_moved
from kvcm.connectors.transfer.pool_segment import PoolAccess, PoolSegment, WriteLock, fence, segment_path, stamps_of
from kvcm.model.errors import InvalidArgumentError, StorageIOError
from kvcm.model.storages import PAGE_BYTES, StorageConfig, TairMemPoolStorageSpec, chunk_bytes, extent_bytes, pool_bytes
from kvcm.model.uri import LocationUri

__all__ = ["AttachedPool", "ItemChecks", "MemPoolMover", "Part", "PoolPiece", "PoolRun", "adjacent_runs"]

# ---- checks of items, so that only extents that a manager allocated are read and written ----

_STAMPS_END = 1 << 64


class ItemChecks:
    """Looks at one item after the other, in one thread; what neighbours have in common is looked at once.

    Args:
        node_id: the node that the pool is on.
        capacity_bytes: that the manager hands out.
        direction: of the items.
    """

    __slots__ = ("_capacity_bytes", "_chunk_bytes", "_direction", "_node_id", "_size", "_stamp", "_stamps")

    def __init__(self, node_id: str, capacity_bytes: int, direction: Direction) -> None:
        self._node_id = node_id
        self._capacity_bytes = pool_bytes(capacity_bytes)
        self._chunk_bytes = chunk_bytes(capacity_bytes)
        self._direction = direction
        self._stamp: int | None = None
        self._size = 0
        self._stamps = b""

    def extent_of(self, item: TransferItem) -> tuple[int, bytes]:
        """Return where an item's part begins in the pool, in bytes, and the stamps of its pages.

        Raises:
            InvalidArgumentError: no manager hands that out, the memory is of another length, or a save has a start.
        """
        uri = item.uri
        size = uri.size
        if uri.range_id != self._stamp or size != self._size or uri.node_id != self._node_id:
            self._check_uri(uri)
        buffers = item.buffers
        length = buffers[0].nbytes if len(buffers) == 1 else sum([buffer.nbytes for buffer in buffers])
        if length != size or not length or item.start is not None:
            self._check_range(item, length)
        offset = int(uri.path[1:])  # which `uri.offset` is for memory pools, in half the time
        if offset % PAGE_BYTES or not 0 <= offset <= self._capacity_bytes - size:
            raise InvalidArgumentError(
                f"offset {offset} with {size} bytes must begin at a page of {PAGE_BYTES} and end within"
                f" {self._capacity_bytes} bytes"
            )
        if offset % self._chunk_bytes + size > self._chunk_bytes:
            raise InvalidArgumentError(
                f"offset {offset} with {size} bytes goes over the border of two chunks of {self._chunk_bytes}"
            )
        return offset, self._stamps

    def _check_uri(self, uri: LocationUri) -> None:
        if uri.node_id != self._node_id:
            raise InvalidArgumentError(f"node_id is {uri.node_id!r}, this node is {self._node_id!r}")
        stamp = uri.range_id
        if stamp is None or not 0 < stamp < _STAMPS_END:
            raise InvalidArgumentError(f"range_id is {stamp}, must be 1 to 2^64 - 1")
        if uri.size > self._chunk_bytes:
            raise InvalidArgumentError(
                f"{uri.size} bytes go over the border of two chunks of {self._chunk_bytes}, wherever they begin"
            )
        self._stamps = stamps_of(stamp, extent_bytes(uri.size))
        self._stamp, self._size = stamp, uri.size

    def _check_range(self, item: TransferItem, length: int) -> None:
        start, size = item.start, item.uri.size
        if start is not None and self._direction is Direction.SAVE:
            raise InvalidArgumentError(f"start is {start}, must be None for a save: a part is saved whole")
        if not length or (length != size if start is None else start < 0 or start + length > size):
            raise InvalidArgumentError(
                f"buffers hold {length} bytes from {start or 0} on, the uri's size is {size}; must be all of it, > 0"
            )


# ---- runs: adjacent parts of a memory pool, locked, compared and copied as one ----
#
# Engines bring blocks as rows of one memory, and the manager hands extents out in order. Parts that are adjacent on
# both sides are copied as one piece: a copy of some MiB costs Python once, and lets other threads run meanwhile. Each
# part has a result of its own: a run that fails is repeated part by part.
#
# Invariants: (1) extents of a run are neighbours, ascending, without gap or overlap; (2) a run has at most
# `_RUN_BYTES`, or one part, so that deadlines are checked in between; (3) a piece of several parts is of memory that
# is writable and contiguous, and that cannot be freed as long as the piece is there.
#
# Why addresses: nothing else in Python says that the memory of two views is adjacent. Finding the
# address of read-only memory is too slow to be worth it, so each such part is copied by itself.

_RUN_BYTES = 8 << 20
_BYTES_PER_STAMP_BYTE = PAGE_BYTES // 8
_NOWHERE = -1
Part = tuple[int, int, bytes, TransferItem, TransferResult]
"""Position among the items of the call, first byte of the extent in the pool, stamps of its pages, the item, and its
result when all goes well: after the copy the item is in no cache any more."""


class PoolPiece:
    """Memory of one part, or of several that follow each other in memory, too.

    Args:
        part: the first one.
        holder: has the address of its memory and keeps it alive; None if the address is not known.

    Attributes:
        offset: first byte to move, in the pool.
        parts: of the pool, in order.
    """

    __slots__ = ("_holders", "offset", "parts")

    def __init__(self, part: Part, holder: c_char | None) -> None:
        self.parts = [part]
        self.offset = part[1] + (part[3].start or 0)
        self._holders = [holder]

    def add(self, part: Part, holder: c_char | None) -> None:
        """Take in the part that follows, whole, in the pool and in memory."""
        self.parts.append(part)
        self._holders.append(holder)

    @property
    def views(self) -> Sequence[memoryview]:
        """The memory, in one view where there are several parts."""
        _, offset, _, item, _ = self.parts[-1]
        first = self._holders[0]
        if len(self.parts) == 1 or first is None:
            return item.buffers
        return [np.asarray(_Memory(addressof(first), offset + item.uri.size - self.offset, self._holders)).data]


class PoolRun:
    """Parts whose extents follow each other in the pool.

    Attributes:
        offset: first byte of the first extent.
        end: first byte behind the last one.
        pieces: at least one.
        parts: all of them, in order.
        stamps: of all its pages, one behind the other.
    """

    __slots__ = ("end", "offset", "parts", "pieces", "stamps")

    def __init__(self, pieces: list[PoolPiece]) -> None:
        self.pieces = pieces
        self.parts = [part for piece in pieces for part in piece.parts]
        self.stamps = b"".join([part[2] for part in self.parts])
        self.offset = self.parts[0][1]
        self.end = self.offset + len(self.stamps) * _BYTES_PER_STAMP_BYTE

    @property
    def oldest_stamp(self) -> int:
        """The smallest of them."""
        return int(np.frombuffer(self.stamps, "<u8").min())

    @property
    def is_single(self) -> bool:
        """Whether it has one part only."""
        return len(self.parts) == 1

    def split(self) -> list[PoolRun]:
        """Return a run of each part; none when there is only one."""
        return [] if self.is_single else [PoolRun([PoolPiece(part, None)]) for part in self.parts]


def adjacent_runs(
    items: Sequence[TransferItem], checks: ItemChecks, refuse: Callable[[int, Exception], None]
) -> Iterator[PoolRun]:
    """Yield the items in order, those that are neighbours together.

    Args:
        items: of one call.
        checks: of them.
        refuse: called with the position of an item that cannot be moved, and the reason; it is in no run.
    """
    pieces: list[PoolPiece] = []
    end = limit = memory_end = _NOWHERE
    for position, item in enumerate(items):
        try:
            offset, stamps = checks.extent_of(item)
        except Exception as error:  # whatever an item is made of
            refuse(position, error)
            continue
        address = _NOWHERE
        try:
            (view,) = item.buffers
            holder = c_char.from_buffer(view)
            address = addressof(holder)
        except Exception:  # in pieces, read-only or not contiguous: its copy says so
            holder = None
        part = position, offset, stamps, item, moved(item.size_bytes)
        extent_end = offset + len(stamps) * _BYTES_PER_STAMP_BYTE
        if offset != end or extent_end > limit:
            if pieces:
                yield PoolRun(pieces)
            pieces, limit = [PoolPiece(part, holder)], offset + _RUN_BYTES
        elif address == memory_end != _NOWHERE and item.start is None:
            pieces[-1].add(part, holder)
        else:
            pieces.append(PoolPiece(part, holder))
        is_filled = offset + item.uri.size == extent_end and item.start is None and holder is not None
        end, memory_end = extent_end, address + item.uri.size if is_filled else _NOWHERE
    if pieces:
        yield PoolRun(pieces)


class _Memory:
    """Writable memory from an address on, in the form that numpy takes, and what keeps it there."""

    __slots__ = ("__array_interface__", "holders")

    def __init__(self, address: int, size_bytes: int, holders: Sequence[object]) -> None:
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "typestr": "|u1",
            "shape": (size_bytes,),
            "data": (address, False),
        }
        self.holders = holders


_LATE = not_moved(Failure.CANCELLED, "the deadline passed before the item was begun")
_LOST = not_moved(Failure.LOST, "the pool's memory is not there")
_OTHER_BYTES = not_moved(Failure.LOST, "the pool holds other bytes by now")
_LOCKED = not_moved(Failure.BUSY, "another writer has the memory locked")
_NEWER = not_moved(Failure.REFUSED, "the memory belongs to a newer allocation")
_REPLACED = not_moved(Failure.ERROR, "the pool's memory was replaced meanwhile")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AttachedPool:
    """A pool whose memory is mapped here, as reports to the manager describe it.

    Attributes:
        storage: name of the storage.
        node_id: of this node.
        generation: of the memory.
        capacity_bytes: of its data.
    """

    storage: str
    node_id: str
    generation: int
    capacity_bytes: int


class MemPoolMover:
    """Moves items of one pool.

    Args:
        storage: its name.
        node_id: the node that it is on, this one.
        capacity_bytes: that the manager hands out.
        access: to its segment.
        clock: seconds of a clock that never runs backwards.
    """

    def __init__(
        self,
        storage: str,
        node_id: str,
        capacity_bytes: int,
        access: PoolAccess,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._storage = storage
        self._node_id = node_id
        self._capacity_bytes = capacity_bytes
        self._access = access
        self._clock = clock
        self._trouble = ""  # why there is no memory, as it was logged

    @classmethod
    def for_storages(cls, storages: Sequence[StorageConfig], node: NodeSettings | None = None) -> MemPoolMover | None:
        """Return the mover of a pool of this node, with its memory mapped if it is there; `attach` makes it.

        Args:
            storages: one.
            node: this one; None for what the environment says.

        Returns:
            None for a pool of another node, and for one across hosts.

        Raises:
            InvalidArgumentError: a variable of the environment is malformed.
        """
        (config,) = storages
        spec = config.spec
        node = node or NodeSettings.from_environment()
        if not isinstance(spec, TairMemPoolStorageSpec) or not spec.node_id or spec.node_id != node.node_id:
            return None
        path = segment_path(node.pool_directory, node.cluster_id, config.global_unique_name)
        access = PoolAccess(path, spec.capacity_bytes, creates=node.creates_pools)
        mover = cls(config.global_unique_name, spec.node_id, spec.capacity_bytes, access)
        try:
            access.find()
        except StorageIOError as error:
            mover._failed(error)
        return mover

    @property
    def attached(self) -> AttachedPool | None:
        """The pool as it was when somebody last used it, None when its memory was not there."""
        segment = self._access.attached
        if segment is None:
            return None
        header = segment.header
        return AttachedPool(self._storage, self._node_id, header.generation, header.capacity_bytes)

    def attach(self) -> AttachedPool | None:
        """Return the pool as `attached`, and where there is none find or make it. That takes as long as clearing so
        much memory does; when it fails it is said once in the log, and making is tried again a second later."""
        if self._access.attached is None:
            try:
                self._access.find_or_create()
                self._trouble = ""
            except StorageIOError as error:
                self._failed(error)
        return self.attached

    def _failed(self, error: StorageIOError) -> None:
        if str(error) != self._trouble:
            _log.warning("storage %s is not used until this is resolved: %s", self._storage, error)
        self._trouble = str(error)

    def load(self, items: Sequence[TransferItem], deadline_seconds: float) -> list[TransferResult]:
        """Fill the buffers of each item, see `Mover`."""
        deadline = self._clock() + deadline_seconds
        try:
            segment = self._access.find()
        except StorageIOError as error:
            return [not_moved(Failure.ERROR, str(error))] * len(items)
        if segment is None:
            return [_LOST] * len(items)
        results: list[TransferResult] = [_LATE] * len(items)
        filled: list[PoolRun] = []
        for run in self._runs(items, Direction.LOAD, results):
            if self._clock() >= deadline:
                break
            _fill(segment, run, filled, results)
        fence()
        for run in filled:
            _confirm(segment, run, results)
        return results

    def save(self, items: Sequence[TransferItem], deadline_seconds: float) -> list[TransferResult]:
        """Write the buffers of each item, see `Mover`."""
        deadline = self._clock() + deadline_seconds
        results: list[TransferResult] = [_LATE] * len(items)
        try:
            segment = self._access.find_or_create()
            with segment.write_lock() as lock:
                for run in self._runs(items, Direction.SAVE, results):
                    if self._clock() >= deadline:
                        break
                    _save_run(segment, lock, run, results)
        except (StorageIOError, OSError) as error:
            failed = not_moved(Failure.ERROR, str(error))
            return [failed if result.ok or result is _LATE else result for result in results]
        if not segment.is_at(self._access.path):
            return [_REPLACED if result.ok else result for result in results]
        return results

    def close(self) -> None:
        """Let go of the memory."""
        self._access.close()

    def _runs(
        self, items: Sequence[TransferItem], direction: Direction, results: list[TransferResult]
    ) -> list[PoolRun]:
        """Return the items that can be moved; enter the results of the others.

        All before anything is copied: a copy of some MiB leaves nothing of the interpreter in the processor's caches.
        """

        def refuse(position: int, error: Exception) -> None:
            results[position] = _refused_result(error)

        return list(adjacent_runs(items, ItemChecks(self._node_id, self._capacity_bytes, direction), refuse))


def _refused_result(error: Exception) -> TransferResult:
    return not_moved(Failure.REFUSED, str(error) or type(error).__name__)


def _fill(segment: PoolSegment, run: PoolRun, filled: list[PoolRun], results: list[TransferResult]) -> None:
    """Copy parts that are there to their memory; where one of a run is not, or cannot be filled, each by itself."""
    failure = _OTHER_BYTES
    if segment.has_stamps(run.offset, run.stamps):
        try:
            for piece in run.pieces:
                segment.copy_out(piece.offset, piece.views)
        except Exception as error:  # whatever its memory is
            failure = _refused_result(error)
        else:
            filled.append(run)
            return
    for single in run.split():
        _fill(segment, single, filled, results)
    if run.is_single:
        results[run.parts[0][0]] = failure


def _confirm(segment: PoolSegment, run: PoolRun, results: list[TransferResult]) -> None:
    """Enter the results of parts that were copied, after a fence."""
    if segment.has_stamps(run.offset, run.stamps):
        for position, _, _, _, done in run.parts:
            results[position] = done
        return
    for single in run.split():
        _confirm(segment, single, results)
    if run.is_single:
        results[run.parts[0][0]] = _OTHER_BYTES


def _save_run(segment: PoolSegment, lock: WriteLock, run: PoolRun, results: list[TransferResult]) -> None:
    """Write parts that are neighbours under one lock, or, where one of them cannot be written, each under its own."""
    failure = _LOCKED
    if lock.lock(run.offset, run.end - run.offset):
        if segment.newest_stamp(run.offset, run.end - run.offset) <= run.oldest_stamp:
            _write(segment, run, results)
            return
        failure = _NEWER
    for single in run.split():
        _save_run(segment, lock, single, results)
    if run.is_single:
        results[run.parts[0][0]] = failure


def _write(segment: PoolSegment, run: PoolRun, results: list[TransferResult]) -> None:
    stamps = run.stamps
    segment.write_stamps(run.offset, stamps)
    fence()
    for piece in run.pieces:
        try:
            segment.copy_in(piece.offset, piece.views)
            for position, _, _, _, done in piece.parts:
                results[position] = done
        except Exception as error:  # whatever its memory is
            for position, *_ in piece.parts:
                results[position] = _refused_result(error)
    fence()
    if not segment.has_stamps(run.offset, stamps):
        for position, *_ in run.parts:
            results[position] = _REPLACED
