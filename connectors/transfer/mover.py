"""What every mover is and what it takes and returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from kvcm.model.uri import LocationUri

__all__ = ["Failure", "Mover", "TransferItem", "TransferResult", "moved", "not_moved"]


class Failure(StrEnum):
    """Why an item was not moved."""

    REFUSED = "refused"  # the item itself is wrong: unknown scheme or storage, path escape, length mismatch
    LOST = "lost"  # the storage is there, and the bytes are not (load only)
    ERROR = "error"  # the storage failed: not mounted, no space, I/O error
    CANCELLED = "cancelled"  # the deadline passed before the item was begun
    PENDING = "pending"  # the deadline passed while the item was moving: its buffers may still change


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


def moved(count_bytes: int) -> TransferResult:
    """Return the result of an item that moved completely."""
    return TransferResult(True, count_bytes)


def not_moved(failure: Failure, reason: str, moved_bytes: int = 0) -> TransferResult:
    """Return the result of an item that did not move completely."""
    return TransferResult(False, moved_bytes, failure, reason)


class Mover(Protocol):
    """Moves items of one uri scheme. Never raises for an item; results stand in the order of the items."""

    def load(self, items: Sequence[TransferItem], deadline_seconds: float) -> list[TransferResult]:
        """Fill the buffers of each item from its uri, within `deadline_seconds` from now."""

    def save(self, items: Sequence[TransferItem], deadline_seconds: float) -> list[TransferResult]:
        """Write the buffers of each item to its uri, within `deadline_seconds` from now."""

    def close(self) -> None:
        """Release threads and handles; items in flight end first or are given up."""
