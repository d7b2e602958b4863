"""Mover of memory pools: memory of this node that all engines on it share; how that is safe stands in `pool_segment`.

A pool's memory may be missing, or other memory than before (a new generation). Loads are lost then; the next save makes
it again, unless only the host agent may. Nothing ever waits: pages that another writer has locked are busy at once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from connectors.node import NodeSettings
from connectors.transfer.mover import Failure, TransferItem, TransferResult, moved, not_moved
from connectors.transfer.pool_access import PoolAccess
from connectors.transfer.pool_making import segment_path
from connectors.transfer.pool_segment import Claim, PoolSegment, fence, stamps_of
from kvcm.model.errors import InvalidArgumentError, StorageIOError
from kvcm.model.memory_pool import PAGE_BYTES, chunk_bytes, extent_bytes, pool_bytes
from kvcm.model.storages import StorageConfig, TairMemPoolStorageSpec
from kvcm.model.uri import LocationUri

__all__ = ["AttachedPool", "MemPoolMover"]

_LATE = not_moved(Failure.CANCELLED, "the deadline passed before the item was begun")
_GONE = not_moved(Failure.LOST, "the pool's memory is not there")
_OTHER_BYTES = not_moved(Failure.LOST, "the pool holds other bytes by now")
_LOCKED = not_moved(Failure.BUSY, "another writer has the memory locked")
_NEWER = not_moved(Failure.REFUSED, "the memory belongs to a newer allocation")
_IN_PIECES = not_moved(Failure.REFUSED, "start is given, parts are saved whole")
_REPLACED = not_moved(Failure.ERROR, "the pool's memory was replaced meanwhile")
_STAMPS_END = 1 << 64
_BYTES_PER_STAMP_BYTE = PAGE_BYTES // len(stamps_of(0, PAGE_BYTES))
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AttachedPool:
    """A pool whose memory is mapped here, as the manager wants to be told.

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


class _Part(NamedTuple):
    """One item to save, checked."""

    position: int
    offset: int  # bytes, in the pool
    stamps: bytes
    item: TransferItem


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
        self._capacity_bytes = pool_bytes(capacity_bytes)
        self._chunk_bytes = chunk_bytes(capacity_bytes)
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
                self._access.find_or_make()
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
            return [_GONE] * len(items)
        results: list[TransferResult] = [_LATE] * len(items)
        copied = self._copy_out(segment, items, results, deadline)
        fence()
        for position, offset, stamps in copied:
            is_whole = segment.holds(offset, stamps)
            results[position] = moved(items[position].size_bytes) if is_whole else _OTHER_BYTES
        return results

    def save(self, items: Sequence[TransferItem], deadline_seconds: float) -> list[TransferResult]:
        """Write the buffers of each item, see `Mover`."""
        deadline = self._clock() + deadline_seconds
        results: list[TransferResult] = [_LATE] * len(items)
        try:
            segment = self._access.find_or_make()
            with segment.claim() as claim:
                for run in _runs(self._parts(items, results)):
                    if self._clock() >= deadline:
                        break
                    _save_run(segment, claim, run, results)
        except (StorageIOError, OSError) as error:
            failed = not_moved(Failure.ERROR, str(error))
            return [failed if result.ok or result is _LATE else result for result in results]
        if not segment.is_at(self._access.path):
            return [_REPLACED if result.ok else result for result in results]
        return results

    def close(self) -> None:
        """Let go of the memory."""
        self._access.close()

    def _copy_out(
        self,
        segment: PoolSegment,
        items: Sequence[TransferItem],
        results: list[TransferResult],
        deadline: float,
    ) -> list[tuple[int, int, bytes]]:
        """Fill buffers; return position, offset and stamps of those that are filled, enter others' results."""
        copied: list[tuple[int, int, bytes]] = []
        stamps = _Stamps()
        for position, item in enumerate(items):
            if self._clock() >= deadline:
                break
            try:
                offset, expected = self._checked_offset(item), stamps.of(item.uri)
                if segment.holds(offset, expected):
                    segment.copy_out(offset + (item.start or 0), item.buffers)
                    copied.append((position, offset, expected))
                else:
                    results[position] = _OTHER_BYTES
            except Exception as error:  # whatever an item is made of
                results[position] = _refused(error)
        return copied

    def _parts(self, items: Sequence[TransferItem], results: list[TransferResult]) -> Iterator[_Part]:
        """Yield the items that can be saved; enter the results of the others."""
        stamps = _Stamps()
        for position, item in enumerate(items):
            if item.start is not None:
                results[position] = _IN_PIECES
                continue
            try:
                part = _Part(position, self._checked_offset(item), stamps.of(item.uri), item)
            except Exception as error:  # whatever an item is made of
                results[position] = _refused(error)
                continue
            yield part

    def _checked_offset(self, item: TransferItem) -> int:
        """Return where the part of an item begins in the pool.

        Raises:
            InvalidArgumentError: no manager hands that out, or the memory is of another length.
        """
        uri, start, buffers = item.uri, item.start, item.buffers
        length = buffers[0].nbytes if len(buffers) == 1 else sum([buffer.nbytes for buffer in buffers])
        size = uri.size
        if not length or (length != size if start is None else start < 0 or start + length > size):
            raise InvalidArgumentError(
                f"buffers hold {length} bytes from {start or 0} on, the uri's size is {size}; must be all of it, > 0"
            )
        if uri.node_id != self._node_id:
            raise InvalidArgumentError(f"node_id is {uri.node_id!r}, this node is {self._node_id!r}")
        if uri.range_id is None or not 0 < uri.range_id < _STAMPS_END:
            raise InvalidArgumentError(f"range_id is {uri.range_id}, must be 1 to 2^64 - 1")
        offset = uri.offset
        if offset % PAGE_BYTES or offset + size > self._capacity_bytes:
            raise InvalidArgumentError(
                f"offset {offset} with {size} bytes must begin at a page of {PAGE_BYTES} and end within"
                f" {self._capacity_bytes} bytes"
            )
        if offset % self._chunk_bytes + size > self._chunk_bytes:
            raise InvalidArgumentError(
                f"offset {offset} with {size} bytes goes over the border of two chunks of {self._chunk_bytes}"
            )
        return offset


class _Stamps:
    """The stamps that the pages of an item have; neighbours often have the same."""

    __slots__ = ("_size", "_stamp", "_stamps")

    def __init__(self) -> None:
        self._stamp: int | None = None
        self._size = 0
        self._stamps = b""

    def of(self, uri: LocationUri) -> bytes:
        """Return them, one behind the other."""
        if uri.range_id != self._stamp or uri.size != self._size:
            self._stamp, self._size = uri.range_id, uri.size
            self._stamps = stamps_of(uri.range_id or 0, extent_bytes(uri.size))
        return self._stamps


def _refused(error: Exception) -> TransferResult:
    return not_moved(Failure.REFUSED, str(error) or type(error).__name__)


def _runs(parts: Iterator[_Part]) -> Iterator[list[_Part]]:
    """Yield parts together whose extents are neighbours."""
    run: list[_Part] = []
    end = -1
    for part in parts:
        if run and part.offset != end:
            yield run
            run = []
        run.append(part)
        end = part.offset + len(part.stamps) * _BYTES_PER_STAMP_BYTE
    if run:
        yield run


def _save_run(segment: PoolSegment, claim: Claim, run: Sequence[_Part], results: list[TransferResult]) -> None:
    """Write parts that are neighbours under one lock, or, where one of them cannot be written, each under its own."""
    start, stamps = run[0].offset, b"".join([part.stamps for part in run])
    size_bytes = len(stamps) * _BYTES_PER_STAMP_BYTE
    failure = _LOCKED
    if claim.lock(start, size_bytes):
        if segment.newest_stamp(start, size_bytes) <= min([part.item.uri.range_id or 0 for part in run]):
            _write(segment, run, stamps, results)
            return
        failure = _NEWER
    if len(run) == 1:
        results[run[0].position] = failure
        return
    for part in run:
        _save_run(segment, claim, [part], results)


def _write(segment: PoolSegment, run: Sequence[_Part], stamps: bytes, results: list[TransferResult]) -> None:
    segment.put_stamps(run[0].offset, stamps)
    fence()
    for position, offset, _, item in run:
        try:
            segment.copy_in(offset, item.buffers)
            results[position] = moved(item.uri.size)
        except Exception as error:  # whatever its memory is
            results[position] = _refused(error)
    fence()
    if not segment.holds(run[0].offset, stamps):
        for part in run:
            results[part.position] = _REPLACED
