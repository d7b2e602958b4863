"""The Protocol of movers, their items and results, and checksums of parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Protocol, runtime_checkable

from xxhash import xxh3_64, xxh3_64_intdigest

from kvcm.model.errors import InvalidArgumentError
from kvcm.model.uri import LocationUri

__all__ = [
    "BatchingMover",
    "Direction",
    "Failure",
    "Move",
    "Mover",
    "RegisteringMover",
    "TransferItem",
    "TransferResult",
    "checksum_of",
    "moved",
    "not_moved",
    "range_items",
    "record_checksums",
    "verify_loads",
]


class Direction(StrEnum):
    """Which way bytes go."""

    LOAD = "load"
    SAVE = "save"


class Failure(StrEnum):
    """Why an item was not moved. For a load each of them is a miss."""

    REFUSED = "refused"  # the item itself is wrong: unknown scheme or storage, path escape, length mismatch
    LOST = "lost"  # the storage is there, and the bytes are not (load only)
    CORRUPT = "corrupt"  # the bytes are not those of the item's checksum (load only): the buffers hold garbage
    ERROR = "error"  # the storage failed: not mounted, no space, I/O error
    BUSY = "busy"  # not begun: another writer has the memory locked, which may be stopped (save only)
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
        start: byte of the part from which on the buffers are filled, for a load of some layers only: they may then be
            shorter than the rest of the part. None for the whole part. A part is saved whole, and loads of pieces of it
            are not verified: its checksum is that of the whole.
        checksum: that the bytes of a load must have, 0 for any; see `checksums.checksum_of`. A save does not look at
            it.
    """

    uri: LocationUri
    buffers: Sequence[memoryview]
    start: int | None = None
    checksum: int = 0

    @property
    def size_bytes(self) -> int:
        """Bytes to move."""
        return self.uri.size if self.start is None else sum([buffer.nbytes for buffer in self.buffers])

    @property
    def offset(self) -> int:
        """First byte to move inside the object, or the memory pool."""
        return self.uri.offset if self.start is None else self.uri.offset + self.start


@dataclass(frozen=True, slots=True)
class TransferResult:
    """What became of one item.

    Attributes:
        ok: every byte of the item moved and the storage has confirmed it. Of a load also: they are those of the item's
            checksum, if it has one.
        moved_bytes: bytes that moved, also when the item as a whole failed.
        failure: why not, None when ok.
        reason: the same in words, "" when ok.
        checksum: of the bytes as they were given to a save that takes checksums and is ok, else 0.
    """

    ok: bool
    moved_bytes: int
    failure: Failure | None = None
    reason: str = ""
    checksum: int = 0


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


@runtime_checkable
class BatchingMover(Mover, Protocol):
    """A mover that is quicker when one thread moves several groups in a row."""

    def batch(self) -> AbstractContextManager[Mover]:
        """Return what to move the groups of one batch with, in one thread.

        It may keep things open until it is left, which never raises.
        """


@runtime_checkable
class BoundedMover(Mover, Protocol):
    """A mover that few threads and large groups are best for.

    Attributes:
        most_threads: > 0.
        group_bytes: most bytes of a group; others may have to wait for that long.
    """

    most_threads: int
    group_bytes: int


@runtime_checkable
class RegisteringMover(Mover, Protocol):
    """A mover that moves memory without a copy once it knows it."""

    def register(self, memory: memoryview) -> None:
        """Let items in this memory move without a copy, until the mover is closed. It must outlive the mover.

        Raises:
            InvalidArgumentError: it is not contiguous or overlaps registered memory; the storage rejects it.
        """


# ---- loads of byte ranges of a part: a few layers of a block, or the heads of one rank ----
#
# `StoredFormat.reads` in `connectors/layout` gives the ranges; concatenated in memory they are in a stored format
# again. An engine that starts with layer 0 while the others still load makes one call per group of layers.
#
# A part that is loaded in ranges is not verified, since its checksum is that of the whole.


def range_items(
    uri: LocationUri, ranges: Sequence[tuple[int, int]], memory: memoryview, checksum: int = 0
) -> list[TransferItem]:
    """Return items that load ranges of a part, one behind the other, into memory.

    Args:
        uri: of the part.
        ranges: first byte in the part and number of bytes of each, `SpecRead.ranges` for example. A single one that is
            the whole part is loaded, and verified, as such.
        memory: flat bytes, as many as all ranges have.
        checksum: of the whole part, 0 when there is none.

    Raises:
        InvalidArgumentError: a range does not lie in the part, or memory has another size.
    """
    for first, count in ranges:
        if first < 0 or not 0 < count <= uri.size - first:
            raise InvalidArgumentError(f"range is {count} bytes from {first} on, must lie in the part's {uri.size}")
    wanted = sum([count for _, count in ranges])
    if memory.nbytes != wanted:
        raise InvalidArgumentError(f"memory has {memory.nbytes} bytes, the ranges have {wanted}; both must be equal")
    if list(ranges) == [(0, uri.size)]:
        return [TransferItem(uri, [memory], checksum=checksum)]
    items, end = [], 0
    for first, count in ranges:
        items.append(TransferItem(uri, [memory[end : end + count]], first))
        end += count
    return items


# ---- checksums of parts: returned by saves, compared by loads ----
#
# XXH3 with 64 bits and seed 0 over the bytes in order, however many pieces of memory they lie in. A digest of 0 becomes
# 1, since 0 means that there is none. It detects accidents (a flipped bit, a slot that another writer overwrote, zeros
# of a hole); it does not protect against forged bytes.
#
# Both are done by the thread that moves the bytes, without the interpreter's lock for large pieces: parts of several
# threads are hashed at the same time. A part is hashed before it is written, so memory that changes in between is
# detected by the load.

Move = Callable[[Sequence[TransferItem], float], list[TransferResult]]
"""Either half of a mover: items and deadline in seconds from now; a result per item."""


def checksum_of(buffers: Sequence[memoryview]) -> int:
    """Return the checksum of the bytes of some pieces of memory, one behind the other: 1 to 2**64 - 1.

    Raises:
        BufferError: a piece is not contiguous.
    """
    if len(buffers) == 1:
        return xxh3_64_intdigest(buffers[0]) or 1
    digest = xxh3_64()
    for buffer in buffers:
        digest.update(buffer)
    return digest.intdigest() or 1


def verify_loads(load: Move) -> Move:
    """Return a load after which items whose bytes are not those of their checksum are corrupt."""

    def load_verified(items: Sequence[TransferItem], deadline_seconds: float) -> list[TransferResult]:
        results = load(items, deadline_seconds)
        for position, (item, result) in enumerate(zip(items, results, strict=False)):
            if result.ok and item.checksum and item.start is None:
                found = checksum_of(item.buffers)
                if found != item.checksum:
                    results[position] = _corrupt(item, found)
        return results

    return load_verified


def record_checksums(save: Move, clock: Callable[[], float]) -> Move:
    """Return a save that returns checksums; their time counts, too."""

    def save_recorded(items: Sequence[TransferItem], deadline_seconds: float) -> list[TransferResult]:
        begun = clock()
        checksums = [_checksum_or_none(item) for item in items]
        results = save(items, deadline_seconds - (clock() - begun))
        for position, (result, checksum) in enumerate(zip(results, checksums, strict=False)):
            if result.ok:
                results[position] = TransferResult(True, result.moved_bytes, checksum=checksum)
        return results

    return save_recorded


def _checksum_or_none(item: TransferItem) -> int:
    try:
        return checksum_of(item.buffers)
    except (BufferError, TypeError, ValueError):  # memory that cannot be saved either, which the mover says
        return 0


def _corrupt(item: TransferItem, found: int) -> TransferResult:
    reason = f"the bytes have checksum {found:016x}, what was saved has {item.checksum:016x}"
    return not_moved(Failure.CORRUPT, reason, item.uri.size)
