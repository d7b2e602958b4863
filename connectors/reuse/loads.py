"""Loads of parts through staging memory on the host, from which they are copied to the engine's memory.

Why not straight into the engine's blocks: a storage that hangs may write to its target memory at any later time. The
engine cannot wait for that, and gives its blocks to the next request. Here a tray that a storage may still write to is
abandoned, and the next load gets another one, up to a limit. A tray is reclaimed once no access to it is in flight.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvcm.connectors.reuse.statistics import ReuseStatistics
from kvcm.connectors.transfer import CancelToken, Failure, TransferEngine, TransferItem, TransferResult
from kvcm.connectors.transfer.mover import not_moved
from kvcm.model.keys import BlockKey
from kvcm.model.uri import LocationUri

__all__ = ["Deliver", "LoadReport", "PartToLoad", "StagingTray", "StagingTrays", "load_parts", "missing_report"]

Bytes = npt.NDArray[np.uint8]


class StagingTray:
    """Memory that is lent to one load at a time.

    Args:
        memory: all of it.
    """

    def __init__(self, memory: Bytes) -> None:
        self._memory = memory

    def rows(self, row_bytes: int, most: int) -> Bytes:
        """Return up to `most` rows of `row_bytes` bytes, [row, byte], without a copy; at least as many as fit."""
        count = min(most, self._memory.nbytes // row_bytes)
        return self._memory[: count * row_bytes].reshape(count, row_bytes)


class _AbandonedTray(NamedTuple):
    tray: StagingTray
    may_change: Callable[[], bool]


class StagingTrays:
    """A bounded number of trays, made when they are first needed; safe to use from several threads.

    Args:
        tray_bytes: of each.
        trays: most that are lent at once.
        most_lost: abandoned trays that are replaced; more than these are missing until they are reclaimed.
        allocate: makes memory, page-locked for an accelerator.
    """

    def __init__(
        self,
        tray_bytes: int,
        trays: int,
        most_lost: int = 4,
        allocate: Callable[[int], Bytes] = lambda size: np.empty(size, np.uint8),
    ) -> None:
        self.tray_bytes = tray_bytes
        self._allocate = allocate
        self._changed = threading.Condition()
        self._free: list[StagingTray] = []
        self._left_to_make = trays
        self._left_to_replace = most_lost
        self._replaced = 0
        self._lost: list[_AbandonedTray] = []

    @property
    def abandoned(self) -> int:
        """Trays that storages may still write to."""
        return len(self._lost)

    def acquire(self, timeout_seconds: float) -> StagingTray | None:
        """Lend a tray; None when there is none in time."""
        with self._changed:
            self._reclaim_abandoned()
            if not self._changed.wait_for(lambda: self._free or self._left_to_make, max(0.0, timeout_seconds)):
                return None
            if self._free:
                return self._free.pop()
            self._left_to_make -= 1
        return StagingTray(self._allocate(self.tray_bytes))

    def release(self, tray: StagingTray) -> None:
        """Return a tray that no storage writes to any more."""
        with self._changed:
            self._free.append(tray)
            self._changed.notify()

    def abandon(self, tray: StagingTray, may_change: Callable[[], bool]) -> None:
        """Leave a tray to a storage that may still write to it; another one is made while that is allowed.

        Args:
            tray: it.
            may_change: whether that is still so; called before the next tray is lent.
        """
        with self._changed:
            self._lost.append(_AbandonedTray(tray, may_change))
            if self._left_to_replace > 0:
                self._left_to_replace -= 1
                self._replaced += 1
                self._left_to_make += 1
                self._changed.notify()

    def _reclaim_abandoned(self) -> None:
        lost, self._lost = self._lost, []
        for each in lost:
            if each.may_change():
                self._lost.append(each)
            elif self._replaced:  # there is another one in its place
                self._replaced -= 1
                self._left_to_replace += 1
            else:
                self._free.append(each.tray)
                self._changed.notify()


# ---- loads of parts, and delivery of those that arrived whole ----

Deliver: TypeAlias = Callable[[Bytes, Sequence[int]], None]
"""Takes rows of bytes, [row, byte], and which of the parts they are; must have copied them when it returns."""


class PartToLoad(NamedTuple):
    """One part of one block.

    Attributes:
        key: of the block.
        uri: where the part lies.
        checksum: that its bytes must have, 0 for any.
        start: byte of the part from which on to load, without a checksum; None for the whole part.
    """

    key: BlockKey
    uri: LocationUri
    checksum: int = 0
    start: int | None = None


class LoadReport(NamedTuple):
    """Parts to report to the manager, as arguments of `ManagerClient.report_missing`.

    Attributes:
        lost: key and uri of parts whose bytes are gone.
        corrupt: key, uri and checksum of parts whose bytes are others.
    """

    lost: tuple[tuple[BlockKey, LocationUri], ...]
    corrupt: tuple[tuple[BlockKey, LocationUri, int], ...]

    def __bool__(self) -> bool:
        return bool(self.lost or self.corrupt)


def load_parts(
    engine: TransferEngine,
    trays: StagingTrays,
    parts: Sequence[PartToLoad],
    part_bytes: int,
    deliver: Deliver,
    deadline_seconds: float,
    cancel: CancelToken | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> list[TransferResult]:
    """Load parts, or pieces of parts, of equal size, a tray full at a time.

    Args:
        engine: moves the bytes.
        trays: memory in between.
        parts: to load.
        part_bytes: of each, or of its piece; a part of another size is refused.
        deliver: called in this thread, once per tray, with the parts that arrived.
        deadline_seconds: for everything; nothing is delivered after it.
        cancel: ends the call as its deadline does.
        clock: seconds of a clock that never runs backwards.

    Returns:
        One result per part, in order. Those that are ok were delivered.
    """
    deadline = clock() + deadline_seconds
    results: list[TransferResult] = []
    while len(results) < len(parts):
        left = parts[len(results) :]
        tray = None if cancel is not None and cancel.is_cancelled else trays.acquire(deadline - clock())
        if tray is None or part_bytes > trays.tray_bytes:
            why = "no staging memory in time" if part_bytes <= trays.tray_bytes else "the part is larger than a tray"
            results += [not_moved(Failure.CANCELLED, why)] * len(left)
            break
        rows = tray.rows(part_bytes, len(left))
        items = [
            TransferItem(part.uri, [memoryview(row)], part.start, part.checksum)
            for part, row in zip(left, rows, strict=False)
        ]
        is_reusable = False
        try:
            moved = engine.load(items, deadline - clock(), cancel)
            is_reusable = all(result.failure is not Failure.PENDING for result in moved)
            good = [row for row, result in enumerate(moved) if result.ok]
            if good:
                deliver(rows if len(good) == len(rows) else rows[good], [len(results) + row for row in good])
        finally:  # also when `deliver` raises
            if is_reusable:
                trays.release(tray)
            else:
                trays.abandon(tray, lambda: engine.hung_accesses > 0)
        results += moved
    return results


def missing_report(
    parts: Sequence[PartToLoad], results: Sequence[TransferResult], statistics: ReuseStatistics
) -> LoadReport:
    """Count how parts were loaded, and return the report for the manager, None without one."""
    outcomes = list(zip(parts, results, strict=True))
    lost = tuple((part.key, part.uri) for part, result in outcomes if result.failure is Failure.LOST)
    corrupt = tuple(
        (part.key, part.uri, part.checksum) for part, result in outcomes if result.failure is Failure.CORRUPT
    )
    failed = sum(not result.ok for result in results)
    statistics.add(
        loaded_bytes=sum(result.moved_bytes for result in results if result.ok),
        lost_parts=len(lost),
        corrupt_parts=len(corrupt),
        failed_parts=failed - len(lost) - len(corrupt),
    )
    return LoadReport(lost, corrupt)
