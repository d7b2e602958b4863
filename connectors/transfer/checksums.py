"""Checksums of parts: taken of what a caller saves, compared with what a caller loads.

XXH3 with 64 bits and seed 0 over the bytes in order, however many pieces of memory they lie in. A digest of 0 is told
as 1, since 0 means that there is none. It finds bytes that changed by accident (a bit that flipped, a slot that another
writer overwrote, zeros of a hole); it is no proof against somebody who makes up bytes.

Both are done by the thread that moves the bytes, without the interpreter's lock for large pieces: parts of several
threads are hashed at the same time. A part is hashed before it is written, so memory that changes in between is found
out when it is loaded, and not believed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from xxhash import xxh3_64, xxh3_64_intdigest

from connectors.transfer.mover import Failure, TransferItem, TransferResult, not_moved

__all__ = ["Move", "checksum_of", "recorded", "verified"]

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


def verified(load: Move) -> Move:
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


def recorded(save: Move, clock: Callable[[], float]) -> Move:
    """Return a save that tells the checksums of what it saved; the time that they take counts, too."""

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
