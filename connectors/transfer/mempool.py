"""Mover of memory pools: memory of this node that all engines on it share; how that is safe stands in `pool_segment`.

A pool's memory may be missing, or other memory than before (a new generation). Loads are lost then; the next save makes
it again, unless only the host agent may. Nothing ever waits: pages that another writer has locked are busy at once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from connectors.node import NodeSettings
from connectors.transfer.mover import Direction, Failure, TransferItem, TransferResult, not_moved
from connectors.transfer.pool_access import PoolAccess
from connectors.transfer.pool_checks import PartChecks
from connectors.transfer.pool_making import segment_path
from connectors.transfer.pool_runs import Run, runs
from connectors.transfer.pool_segment import Claim, PoolSegment, fence
from kvcm.model.errors import StorageIOError
from kvcm.model.storages import StorageConfig, TairMemPoolStorageSpec

__all__ = ["AttachedPool", "MemPoolMover"]

_LATE = not_moved(Failure.CANCELLED, "the deadline passed before the item was begun")
_GONE = not_moved(Failure.LOST, "the pool's memory is not there")
_OTHER_BYTES = not_moved(Failure.LOST, "the pool holds other bytes by now")
_LOCKED = not_moved(Failure.BUSY, "another writer has the memory locked")
_NEWER = not_moved(Failure.REFUSED, "the memory belongs to a newer allocation")
_REPLACED = not_moved(Failure.ERROR, "the pool's memory was replaced meanwhile")
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
        filled: list[Run] = []
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
            segment = self._access.find_or_make()
            with segment.claim() as claim:
                for run in self._runs(items, Direction.SAVE, results):
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

    def _runs(self, items: Sequence[TransferItem], direction: Direction, results: list[TransferResult]) -> list[Run]:
        """Return the items that can be moved; enter the results of the others.

        All before anything is copied: a copy of some MiB leaves nothing of the interpreter in the processor's caches.
        """

        def refuse(position: int, error: Exception) -> None:
            results[position] = _refused(error)

        return list(runs(items, PartChecks(self._node_id, self._capacity_bytes, direction), refuse))


def _refused(error: Exception) -> TransferResult:
    return not_moved(Failure.REFUSED, str(error) or type(error).__name__)


def _fill(segment: PoolSegment, run: Run, filled: list[Run], results: list[TransferResult]) -> None:
    """Copy parts that are there to their memory; where one of a run is not, or cannot be filled, each by itself."""
    failure = _OTHER_BYTES
    if segment.holds(run.offset, run.stamps):
        try:
            for piece in run.pieces:
                segment.copy_out(piece.offset, piece.views)
        except Exception as error:  # whatever its memory is
            failure = _refused(error)
        else:
            filled.append(run)
            return
    for single in run.split():
        _fill(segment, single, filled, results)
    if run.is_single:
        results[run.parts[0][0]] = failure


def _confirm(segment: PoolSegment, run: Run, results: list[TransferResult]) -> None:
    """Enter the results of parts that were copied, after a fence."""
    if segment.holds(run.offset, run.stamps):
        for position, _, _, _, done in run.parts:
            results[position] = done
        return
    for single in run.split():
        _confirm(segment, single, results)
    if run.is_single:
        results[run.parts[0][0]] = _OTHER_BYTES


def _save_run(segment: PoolSegment, claim: Claim, run: Run, results: list[TransferResult]) -> None:
    """Write parts that are neighbours under one lock, or, where one of them cannot be written, each under its own."""
    failure = _LOCKED
    if claim.lock(run.offset, run.end - run.offset):
        if segment.newest_stamp(run.offset, run.end - run.offset) <= run.oldest_stamp:
            _write(segment, run, results)
            return
        failure = _NEWER
    for single in run.split():
        _save_run(segment, claim, single, results)
    if run.is_single:
        results[run.parts[0][0]] = failure


def _write(segment: PoolSegment, run: Run, results: list[TransferResult]) -> None:
    stamps = run.stamps
    segment.put_stamps(run.offset, stamps)
    fence()
    for piece in run.pieces:
        try:
            segment.copy_in(piece.offset, piece.views)
            for position, _, _, _, done in piece.parts:
                results[position] = done
        except Exception as error:  # whatever its memory is
            for position, *_ in piece.parts:
                results[position] = _refused(error)
    fence()
    if not segment.holds(run.offset, stamps):
        for position, *_ in run.parts:
            results[position] = _REPLACED
