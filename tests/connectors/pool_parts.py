"""Memory pools for tests, and items in them whose bytes identify their allocation."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kvcm.connectors.transfer import TransferItem, TransferResult
from kvcm.connectors.transfer.mempool import MemPoolMover
from kvcm.connectors.transfer.pool_segment import PoolAccess
from kvcm.model.uri import LocationUri

STORAGE, NODE = "pool", "node-a"
MIB = 1 << 20
CAPACITY = 64 * MIB  # chunks of 1 MiB
DEADLINE = 30.0


def content(stamp: int, offset: int, size: int) -> bytes:
    """Return the bytes that the allocation with this stamp at this offset holds: no two have any 8 in common."""
    words = np.arange(-(-size // 8), dtype="<u8") * np.uint64(0x9E3779B97F4A7C15)
    mark = (stamp * 0xBF58476D1CE4E5B9 + offset) & ((1 << 64) - 1)
    return (words ^ np.uint64(mark)).tobytes()[:size]


def uri(offset: int, size: int, stamp: int | None, node_id: str = NODE) -> LocationUri:
    return LocationUri("pace", STORAGE, f"/{offset}", size, node_id=node_id, range_id=stamp)


def save_item(offset: int, size: int, stamp: int) -> TransferItem:
    return TransferItem(uri(offset, size, stamp), [memoryview(content(stamp, offset, size))])


def load_item(offset: int, size: int, stamp: int) -> TransferItem:
    return TransferItem(uri(offset, size, stamp), [memoryview(bytearray(size))])


def bytes_of(item: TransferItem) -> bytes:
    return b"".join(item.buffers)


def access_at(directory: Path, capacity: int = CAPACITY, **options: bool) -> PoolAccess:
    return PoolAccess(directory / "segment", capacity, **options)


def mover_at(directory: Path, capacity: int = CAPACITY, **options: bool) -> MemPoolMover:
    return MemPoolMover(STORAGE, NODE, capacity, access_at(directory, capacity, **options))


def save_one(mover: MemPoolMover, offset: int, size: int, stamp: int) -> TransferResult:
    (result,) = mover.save([save_item(offset, size, stamp)], DEADLINE)
    return result


def load_one(mover: MemPoolMover, offset: int, size: int, stamp: int) -> TransferResult:
    """Load one extent; bytes that are not those of its allocation fail the test."""
    item = load_item(offset, size, stamp)
    (result,) = mover.load([item], DEADLINE)
    if result.ok:
        assert bytes_of(item) == content(stamp, offset, size)
    return result
