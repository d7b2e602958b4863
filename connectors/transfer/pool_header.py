"""What stands at the beginning of a memory pool's segment, and where its parts lie.

A segment is: one page of header, one page for self-checks, a stamp of 64 bits per page of data, the data. The data
begins at a huge page, so that the kernel can map it with huge pages.

A segment belongs to one boot of the host: on a file system that survives one, pages could be older than their stamps.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from kvcm.model.memory_pool import PAGE_BYTES, pool_bytes

__all__ = ["CHECK_OFFSET", "HEADER_BYTES", "SegmentHeader", "boot_id"]

HEADER_BYTES = PAGE_BYTES
CHECK_OFFSET = HEADER_BYTES

_MAGIC = b"KVCMPOOL"
_VERSION = 1
_STAMPS_OFFSET = CHECK_OFFSET + PAGE_BYTES
_STAMP_BYTES = 8
_HUGE_PAGE_BYTES = 2 << 20
# magic, version, bytes per page, generation, capacity, offset of the data, boot
_FIELDS = struct.Struct("<8sIIQQQ16s")
_CHECK = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """A segment's header.

    Attributes:
        generation: random, never 0: another one is other memory.
        capacity_bytes: of the data; whole pages.
        boot: of the host, when the segment was made.
    """

    generation: int
    capacity_bytes: int
    boot: bytes

    @classmethod
    def new(cls, generation: int, capacity_bytes: int) -> SegmentHeader:
        """Return the header of a segment that is made now, with room for at least `capacity_bytes`' whole pages."""
        return cls(generation, pool_bytes(capacity_bytes), boot_id())

    @property
    def stamps_offset(self) -> int:
        """First byte of the stamps."""
        return _STAMPS_OFFSET

    @property
    def pages(self) -> int:
        """Number of pages of data, which is that of stamps."""
        return self.capacity_bytes // PAGE_BYTES

    @property
    def data_offset(self) -> int:
        """First byte of the data."""
        return _rounded_up(_STAMPS_OFFSET + self.pages * _STAMP_BYTES, _HUGE_PAGE_BYTES)

    def segment_bytes(self, unit_bytes: int = 1) -> int:
        """Return the length of the segment's file, a multiple of `unit_bytes`."""
        return _rounded_up(self.data_offset + self.capacity_bytes, unit_bytes)

    def encode(self) -> bytes:
        """Return the header's bytes."""
        fields = _FIELDS.pack(
            _MAGIC, _VERSION, PAGE_BYTES, self.generation, self.capacity_bytes, self.data_offset, self.boot
        )
        return fields + _CHECK.pack(zlib.crc32(fields))

    @classmethod
    def decode(cls, encoded: bytes) -> SegmentHeader:
        """Read a header.

        Args:
            encoded: the first bytes of a segment.

        Raises:
            ValueError: it is none, a damaged one, or one of another release; says which.
        """
        if len(encoded) < _FIELDS.size + _CHECK.size or encoded[: len(_MAGIC)] != _MAGIC:
            raise ValueError("it does not begin as the segment of a memory pool does")
        _, version, page_bytes, generation, capacity_bytes, data_offset, boot = _FIELDS.unpack_from(encoded)
        if (version, page_bytes) != (_VERSION, PAGE_BYTES):
            raise ValueError(
                f"it has version {version} with pages of {page_bytes} bytes, this release knows version {_VERSION}"
                f" with pages of {PAGE_BYTES} bytes"
            )
        header = cls(generation, capacity_bytes, boot)
        (check,) = _CHECK.unpack_from(encoded, _FIELDS.size)
        if check != zlib.crc32(encoded[: _FIELDS.size]) or data_offset != header.data_offset:
            raise ValueError("its header is damaged")
        return header


@cache
def boot_id() -> bytes:
    """Return what tells the host's boots apart; zeros where the kernel does not say."""
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_text()
        return bytes.fromhex(text.strip().replace("-", ""))[:16].ljust(16, b"\0")
    except (OSError, ValueError):
        return bytes(16)


def _rounded_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
