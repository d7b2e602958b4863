"""A second copy of the registry's documents, beside the RocksDB that holds them.

They are few and small, and lie in one or two blocks of a table: one flipped bit there would take the names of all
groups, instances and storages, and with them every block of KV. The copy is written from what was loaded when the
database is opened, and each change is appended to it after the database has it and before it is acknowledged. So a
repair takes all of them from here: none is missing, and none is back that was removed.

The format is that of the write-ahead log, a record per change with a checksum of its own::

    record    number of the manifest (8 bytes) · 1 for a document, 0 for a removed one (4)
              · length of the key (4) · key · value

A copy with another manifest than the database's is of an earlier opening; another release has written since.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from struct import Struct
from typing import Final, NamedTuple

from kvcm.store.rocks_wal import BATCH_HEADER, BadBytes, encode_record, read_log
from kvcm.store.synced_file import SyncedFile

__all__ = ["COPY", "CopyRead", "DocumentCopy", "read_copy"]

COPY: Final = "kvcm.registry"
_KEY_LENGTH: Final = Struct("<I")
_FLAGS: Final = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW


class DocumentCopy(SyncedFile):
    """The copy of one directory, written anew.

    Args:
        directory: of the database.
        manifest: number of its manifest.
        rows: all rows to copy.

    Raises:
        OSError: the disk failed.
    """

    def __init__(self, directory: Path, manifest: int, rows: Iterable[tuple[bytes, bytes]]) -> None:
        self._manifest = manifest
        self._size_bytes = 0
        new = directory / f"{COPY}.new"
        super().__init__(os.open(new, _FLAGS, 0o600))
        try:
            self.append(list(rows))
            self.sync()
            new.rename(directory / COPY)
        except OSError:
            self.close()
            raise

    def append(self, rows: Sequence[tuple[bytes, bytes | None]]) -> None:
        """Add changes.

        Raises:
            OSError: the disk failed.
        """
        encoded = bytearray()
        for key, value in rows:
            head = BATCH_HEADER.pack(self._manifest, value is not None) + _KEY_LENGTH.pack(len(key))
            encoded += encode_record(head + key + (value or b""), self._size_bytes + len(encoded))
        if encoded and os.pwrite(self._descriptor, encoded, self._size_bytes) != len(encoded):
            raise OSError("the disk takes no more bytes")
        self._size_bytes += len(encoded)
        self._is_synced = self._is_synced and not encoded


class CopyRead(NamedTuple):
    """A copy as it was read.

    Attributes:
        rows: by key.
        is_whole: whether all of it could be read.
    """

    rows: Mapping[bytes, bytes]
    is_whole: bool


def read_copy(directory: Path, manifest: int) -> CopyRead | None:
    """Return the copy that belongs to a manifest; None if there is none."""
    try:
        data = (directory / COPY).read_bytes()
    except OSError:
        return None
    rows, is_whole = dict[bytes, bytes](), True
    for item in read_log(data):
        if isinstance(item, BadBytes):
            is_whole = False
            continue
        if item.sequence != manifest:
            return None
        key, value = _row(item.batch)
        rows.pop(key, None)
        if item.changes:
            rows[key] = value
    return CopyRead(rows, is_whole) if rows else None


def _row(batch: bytes) -> tuple[bytes, bytes]:
    begin = BATCH_HEADER.size + _KEY_LENGTH.size
    (length,) = _KEY_LENGTH.unpack_from(batch, BATCH_HEADER.size)
    return batch[begin : begin + length], batch[begin + length :]
