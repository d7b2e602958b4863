"""How documents lie in a RocksDB.

::

    row of a document    "t" · length of the table's name (1 byte) · table's name · document's name
    its value            due time (float64, big endian) · document
"""

from __future__ import annotations

import math
from struct import Struct
from typing import Final, NamedTuple

from kvcm.model.errors import StorageIOError
from kvcm.store.rocks.database import Row

__all__ = ["DOCUMENTS", "DocumentRow", "decode_row", "encode_value", "row_prefix", "row_title"]

DOCUMENTS: Final = b"t"

_DUE: Final = Struct(">d")
_NAME_CHARACTERS: Final = 6


class DocumentRow(NamedTuple):
    """One document.

    Attributes:
        table: its name.
        name: of the document.
        due: unix seconds when it becomes due, 0 for never.
        document: the bytes.
    """

    table: str
    name: str
    due: float
    document: bytes


def row_prefix(table: str) -> bytes:
    """Return how the keys of a table's rows begin."""
    return DOCUMENTS + bytes((len(table),)) + table.encode()


def encode_value(due: float, document: bytes) -> bytes:
    """Return the value of a row."""
    return _DUE.pack(due) + document


def decode_row(key: bytes, value: bytes) -> DocumentRow:
    """Read a row.

    Raises:
        StorageIOError: it is damaged; the message says how.
    """
    table, name = _parts(key)
    if not table:
        raise StorageIOError("its key names no table")
    if len(value) < _DUE.size:
        raise StorageIOError(f"it has {len(value)} bytes, its due time alone takes {_DUE.size}")
    (due,) = _DUE.unpack_from(value)
    if math.isnan(due):
        raise StorageIOError("its due time is no number")
    try:
        return DocumentRow(table.decode(), name.decode(), due, value[_DUE.size :])
    except UnicodeDecodeError as error:
        raise StorageIOError("its name is no UTF-8") from error


def row_title(row: Row) -> str:
    """Return what a row, damaged or not, is of, for people."""
    key, _ = row
    table, name = _parts(key)
    if not table:
        return f"document row {key.hex()}"
    shown = name.decode(errors="backslashreplace")
    if table != b"registry":  # the id of a session or a lease is the right to end it
        shown = f"{shown[:_NAME_CHARACTERS]}…"
    return f"document {shown!r} of table {table.decode(errors='backslashreplace')!r}"


def _parts(key: bytes) -> Row:
    """Return the names of table and document; no table where the key is too short for one."""
    end = 2 + key[1] if len(key) > 1 else 2
    return (key[2:end], key[end:]) if len(key) >= end else (b"", b"")
