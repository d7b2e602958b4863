"""What every mover is and what it takes and returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Protocol

from kvcm.model.uri import LocationUri

__all__ = ["Direction", "Failure", "Mover", "TransferItem", "TransferResult", "moved", "not_moved"]


class Direction(StrEnum):
    """Which way bytes go."""

    LOAD = "load"
    SAVE = "save"


class Failure(StrEnum):
    """Why an item was not moved. For a load each of them is a miss."""

    REFUSED = "refused"  # the item itself is wrong: unknown scheme or storage, path escape, length mismatch
    LOST = "lost"  # the storage is there, and the bytes are not (load only)
    ERROR = "error"  # the storage failed: not mounted, no space, I/O error
    CANCELLED = "cancelled"  # not begun: deadline, cancellation, or a save that gave way until its deadline
    PENDING = "pending"  # still moving at the deadline or the cancellation: its buffers may still change
    UNAVAILABLE = "unavailable"  # not begun: the storage failed again and again, and is left alone for a while


@dataclass(frozen=True, slots=True)
class TransferItem:
    """One part of one block and the memory it moves to or from.

    Attributes:
        uri: where the part lies; `uri.size` bytes.
        buffers: contiguous pieces of memory that together are the part, in order (an iovec); writable for a load. Their
            lengths must add up to `uri.size`.
    """

    uri: LocationUri
    buffers: Sequence[memoryview]


@dataclass(frozen=True, slots=True)
class TransferResult:
    """What became of one item.

    Attributes:
        ok: every byte of the item moved and the storage has confirmed it.
        moved_bytes: bytes that moved, also when the item as a whole failed.
        failure: why not, None when ok.
        reason: the same in words, "" when ok.
    """

    ok: bool
    moved_bytes: int
    failure: Failure | None = None
    reason: str = ""


@lru_cache(maxsize=64)  # results are values, and the parts of a model have few sizes
def moved(count_bytes: int) -> TransferResult:
    """Return the result of an item that moved completely."""
    return TransferResult(True, count_bytes)


def not_moved(failure: Failure, reason: str, moved_bytes: int = 0) -> TransferResult:
    """Return the result of an item that did not move completely."""
    return TransferResult(False, moved_bytes, failure, reason)


class Mover(Protocol):
    """Moves items of one storage, in the thread that calls it.

    The engine brings the threads, so a mover may block for as long as its storage does: callers are answered at their
    deadline all the same, and the items count as in flight until the call returns. It is called from several threads at
    once, each time with items of one object (equal path), ascending by offset; where there are no paths, with many.
    It never raises for an item; results stand in the order of the items.
    """

    def load(self, items: Sequence[TransferItem], deadline_seconds: float) -> list[TransferResult]:
        """Fill the buffers of each item from its uri; begin nothing later than `deadline_seconds` from now."""

    def save(self, items: Sequence[TransferItem], deadline_seconds: float) -> list[TransferResult]:
        """Write the buffers of each item to its uri; begin nothing later than `deadline_seconds` from now."""

    def close(self) -> None:
        """Release handles; items in flight end first or are given up."""
