"""The write-ahead log of RocksDB, read and written without RocksDB.

RocksDB replays a log up to the first record that it cannot read, and says nothing of those behind it. This reader finds
them, so that a start can tell a torn tail from damage, and a repair can keep them.

A log consists of blocks of 32 KiB, a block of fragments, a record of one fragment or of several
(https://github.com/facebook/rocksdb/wiki/Write-Ahead-Log-File-Format)::

    fragment    crc32c (4 bytes, masked) · length (2) · kind (1) · bytes, all little endian
    record      a batch of changes: sequence number of its first change (8) · number of changes (4) · changes

The checksum covers kind and bytes. Sequence numbers have no holes, so those that a damaged record had are known.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from struct import Struct
from typing import Final, NamedTuple

import google_crc32c

__all__ = ["BATCH_HEADER", "BadBytes", "LogRecord", "encode_log", "encode_record", "read_log"]

_BLOCK_BYTES: Final = 32 << 10
_HEADER: Final = Struct("<IHB")
BATCH_HEADER: Final = Struct("<QI")
_FULL, _FIRST, _MIDDLE, _LAST = range(1, 5)
_MASK_DELTA: Final = 0xA282EAD8


class LogRecord(NamedTuple):
    """One readable batch of changes.

    Attributes:
        offset: of its first byte in the log.
        sequence: number of its first change.
        changes: their number.
        batch: all of its bytes.
    """

    offset: int
    sequence: int
    changes: int
    batch: bytes

    @property
    def next_sequence(self) -> int:
        """Number of the first change behind it."""
        return self.sequence + self.changes


class BadBytes(NamedTuple):
    """Bytes that are no readable record.

    Attributes:
        offset: of the first one in the log.
    """

    offset: int


class _Fragment(NamedTuple):
    kind: int
    start: int
    end: int


def read_log(data: bytes) -> Iterator[LogRecord | BadBytes]:
    """Yield the records of a log, and where bytes between them or behind them cannot be read.

    Behind damage it goes on with the next fragment whose checksum fits, also within the same block.
    """
    at, parts, begin = 0, list[bytes](), 0
    while at < len(data):
        if _left_in_block(at) < _HEADER.size:  # padding
            at += _left_in_block(at)
            continue
        fragment = _fragment(data, at)
        if fragment is None or (fragment.kind in (_MIDDLE, _LAST)) != bool(parts):
            yield BadBytes(begin if parts else at)
            parts = []
        if fragment is None:
            at = _next_fragment(data, at + 1)
            continue
        if fragment.kind in (_FULL, _FIRST):
            begin, parts = at, [data[fragment.start : fragment.end]]
        elif parts:
            parts.append(data[fragment.start : fragment.end])
        if fragment.kind in (_FULL, _LAST) and parts:
            yield _record(begin, b"".join(parts))
            parts = []
        at = fragment.end
    if parts:
        yield BadBytes(begin)


def encode_log(batches: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the bytes of a log that holds these batches."""
    at = 0
    for batch in batches:
        encoded = encode_record(batch, at)
        at += len(encoded)
        yield encoded


def _left_in_block(at: int) -> int:
    return _BLOCK_BYTES - at % _BLOCK_BYTES


def _fragment(data: bytes, at: int) -> _Fragment | None:
    """Return the fragment that begins at an offset, None where there is none, or a damaged one."""
    if at + _HEADER.size > len(data):
        return None
    checksum, length, kind = _HEADER.unpack_from(data, at)
    start = at + _HEADER.size
    end = start + length
    if not _FULL <= kind <= _LAST or end > min(at + _left_in_block(at), len(data)):
        return None
    return _Fragment(kind, start, end) if _checksum(data[start - 1 : end]) == checksum else None


def _next_fragment(data: bytes, at: int) -> int:
    """Return the offset of the next readable fragment of the block, else where the next block begins."""
    block_end = at - 1 + _left_in_block(at - 1)
    for candidate in range(at, block_end - _HEADER.size + 1):
        if _fragment(data, candidate) is not None:
            return candidate
    return block_end


def _checksum(kind_and_bytes: bytes) -> int:
    crc: int = google_crc32c.value(kind_and_bytes)
    return ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF


def _record(offset: int, batch: bytes) -> LogRecord | BadBytes:
    if len(batch) < BATCH_HEADER.size:
        return BadBytes(offset)
    sequence, changes = BATCH_HEADER.unpack_from(batch)
    return LogRecord(offset, sequence, changes, batch)


def encode_record(batch: bytes, at: int) -> bytes:
    """Return the bytes of a record that begins at an offset of a log."""
    cuts, encoded = [0], bytearray()
    left = _left_in_block(at)
    if left < _HEADER.size:
        encoded += bytes(left)
        left = _BLOCK_BYTES
    while cuts[-1] < len(batch):
        cuts.append(min(cuts[-1] + left - _HEADER.size, len(batch)))
        left = _BLOCK_BYTES
    pieces = list(pairwise(cuts))
    for number, (start, end) in enumerate(pieces):
        kind = _kind(is_first=number == 0, is_last=number == len(pieces) - 1)
        body = bytes((kind,)) + batch[start:end]
        encoded += _HEADER.pack(_checksum(body), end - start, kind) + body[1:]
    return bytes(encoded)


def _kind(*, is_first: bool, is_last: bool) -> int:
    if is_first:
        return _FULL if is_last else _FIRST
    return _LAST if is_last else _MIDDLE
