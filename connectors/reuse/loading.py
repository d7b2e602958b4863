"""Loads parts of blocks through staging memory, and hands on those whose bytes are all there."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from connectors.reuse.staging import Bytes, StagingTrays
from connectors.reuse.statistics import ReuseStatistics
from connectors.transfer import CancelToken, Failure, TransferEngine, TransferItem, TransferResult
from connectors.transfer.mover import not_moved
from kvcm.model.keys import BlockKey
from kvcm.model.uri import LocationUri

__all__ = ["Deliver", "LoadReport", "PartToLoad", "load_parts", "report_of"]

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
    """Parts to tell the manager of, as `ManagerClient.report_missing` takes them.

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
        parts: what to load.
        part_bytes: of each, or of its piece; a part of another size is refused.
        deliver: is called in this thread, once per tray, with what arrived.
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
        tray = None if cancel is not None and cancel.is_cancelled else trays.take(deadline - clock())
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
        finally:  # also when whoever takes the bytes raises
            if is_reusable:
                trays.give_back(tray)
            else:
                trays.lose(tray, lambda: engine.hung_accesses > 0)
        results += moved
    return results


def report_of(
    parts: Sequence[PartToLoad], results: Sequence[TransferResult], statistics: ReuseStatistics
) -> LoadReport:
    """Count how parts were loaded, and return what the manager has to hear."""
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
