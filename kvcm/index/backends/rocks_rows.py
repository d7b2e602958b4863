"""How blocks lie in a RocksDB: rows of records and rows of reads, by registration and block key."""

from __future__ import annotations

from struct import Struct
from typing import Final

__all__ = ["ADDRESS", "BLOCKS", "READS"]

BLOCKS: Final = b"b"
READS: Final = b"a"
ADDRESS: Final = Struct(">cIq")  # kind of row, uid, key
