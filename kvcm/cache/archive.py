"""The file of an export: frames, each with a checksum of its own, and a trailer with one over all.

::

    file     "KVCMIDX" · format version (1 byte) · frame · frame · ... · trailer
    frame    kind (1 byte) · length of the body (uint32, big endian) · xxh3_128 of kind and body (16 bytes) · body
    head     "H"  msgpack [release, cluster id, group or "", unix seconds]
    document "D"  msgpack [kind, document]            kind: storage, quota, group, instance, account, key, taken_key,
                                                      pin; document: kvcm/registry/codec.py
    records  "R"  msgpack [instance id, [[key, record, last access, reads], ...]]       record: kvcm/index/codec.py
    trailer  "E"  msgpack [documents, records, xxh3_128 of all bytes before the trailer]

Invariants:

* The documents of an instance and of the storages of its records come before the records.
* A file without a trailer, or with something behind it, is refused: it was cut off.
* Reading and writing hold one frame at a time.

Rejected: zip and tar (their directories are at the end, a pipe cannot be checked on the way); JSON lines (three times
the size, chunks are bytes).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from struct import Struct
from typing import BinaryIO, Final, NamedTuple, TypeVar

import msgspec
from xxhash import xxh3_128, xxh3_128_digest

from kvcm.index.backends.backend import Access
from kvcm.index.codec import decode_payload, encode_payload
from kvcm.model.errors import InvalidArgumentError, StorageIOError
from kvcm.model.locations import BlockRecord

__all__ = ["ArchiveReader", "ArchiveWriter", "Document", "Head", "Row", "Rows", "Trailer"]

FORMAT_VERSION: Final = 1

_MAGIC: Final = b"KVCMIDX"
_FRAME: Final = Struct(">cI16s")
_MOST_FRAME_BYTES: Final = 1 << 28  # a damaged length must not ask for all memory
_HEAD, _DOCUMENT, _ROWS, _TRAILER = b"H", b"D", b"R", b"E"

Body = TypeVar("Body")


class Head(NamedTuple):
    """What an export is of.

    Attributes:
        release: that wrote it.
        cluster_id: of the deployment.
        group: the only one that it holds, "" for all.
        written_at: unix seconds.
    """

    release: str
    cluster_id: str
    group: str
    written_at: float


class Document(NamedTuple):
    """A document of the registry.

    Attributes:
        kind: as above.
        document: as the registry encodes it.
    """

    kind: str
    document: bytes


class Row(NamedTuple):
    """A block: its record, and when it was last read."""

    key: int
    record: BlockRecord
    access: Access


class Rows(NamedTuple):
    """Some blocks of one instance."""

    instance_id: str
    rows: Sequence[Row]


class Trailer(NamedTuple):
    """How much came before it."""

    documents: int
    records: int


class _StoredRow(NamedTuple):
    key: int
    record: bytes
    read_at: int
    reads: int


class _StoredRows(NamedTuple):
    instance_id: str
    rows: list[_StoredRow]


class _StoredTrailer(NamedTuple):
    documents: int
    records: int
    digest: bytes


_encode = msgspec.msgpack.encode


class ArchiveWriter:
    """Writes an export.

    Args:
        file: takes the bytes.
        head: what it is of.
    """

    def __init__(self, file: BinaryIO, head: Head) -> None:
        self._file = file
        self._all = xxh3_128()
        self.documents = 0
        self.records = 0
        self._put(_MAGIC + bytes((FORMAT_VERSION,)))
        self._put(_framed(_HEAD, _encode(head)))

    def document(self, document: Document) -> None:
        """Write a document of the registry."""
        self._put(_framed(_DOCUMENT, _encode(document)))
        self.documents += 1

    def rows(self, rows: Rows) -> None:
        """Write blocks."""
        stored = [_StoredRow(row.key, encode_payload(row.record), *row.access) for row in rows.rows]
        self._put(_framed(_ROWS, _encode(_StoredRows(rows.instance_id, stored))))
        self.records += len(stored)

    def finish(self) -> None:
        """Write the trailer, without which nobody takes the file."""
        trailer = _StoredTrailer(self.documents, self.records, self._all.digest())
        self._put(_framed(_TRAILER, _encode(trailer)))

    def _put(self, data: bytes) -> None:
        self._all.update(data)
        self._file.write(data)


class ArchiveReader:
    """Reads an export, checking every frame and, at the trailer, all of them.

    Args:
        file: gives the bytes.
        name: of the file, for messages.

    Attributes:
        head: what it is of.

    Raises:
        InvalidArgumentError: it is no export, or of a version that this release does not know.
    """

    def __init__(self, file: BinaryIO, name: str) -> None:
        self._file = file
        self._name = name
        self._all = xxh3_128()
        self._documents = 0
        self._records = 0
        self._check_format(self._exactly(len(_MAGIC) + 1, "its first bytes"))
        kind, body = self._frame()
        if kind != _HEAD:
            raise self._damaged("it has no head")
        self.head = self._decoded(Head, body)

    def frames(self) -> Iterator[Document | Rows | Trailer]:
        """Yield what is in the file, the trailer last.

        Raises:
            InvalidArgumentError: the file is damaged, or cut off. What was yielded before is as it was written.
        """
        while True:
            before = self._all.digest()
            kind, body = self._frame()
            if kind == _TRAILER:
                yield self._trailer(body, before)
                return
            if kind == _DOCUMENT:
                self._documents += 1
                yield self._decoded(Document, body)
            elif kind == _ROWS:
                rows = self._rows(body)
                self._records += len(rows.rows)
                yield rows
            else:
                raise self._damaged(f"it has a frame of the unknown kind {kind!r}")

    def _check_format(self, start: bytes) -> None:
        if not start.startswith(_MAGIC):
            raise InvalidArgumentError(f"{self._name} is not an export of `kvcm index export`")
        version = start[len(_MAGIC)]
        if version != FORMAT_VERSION:
            raise InvalidArgumentError(
                f"{self._name} has format version {version}, this release reads version {FORMAT_VERSION}: "
                "import it with the release that wrote it"
            )

    def _frame(self) -> tuple[bytes, bytes]:
        header = self._exactly(_FRAME.size, "the header of a frame")
        kind, length, digest = _FRAME.unpack(header)
        if length > _MOST_FRAME_BYTES:
            raise self._damaged(f"a frame says that it has {length} bytes")
        body = self._exactly(length, "a frame")
        if xxh3_128_digest(kind + body) != digest:
            raise self._damaged("the checksum of a frame is wrong")
        return kind, body

    def _rows(self, body: bytes) -> Rows:
        instance_id, stored = self._decoded(_StoredRows, body)
        try:
            rows = [Row(key, decode_payload(record), Access(at, reads)) for key, record, at, reads in stored]
        except StorageIOError as error:
            raise self._damaged(str(error)) from error
        return Rows(instance_id, rows)

    def _trailer(self, body: bytes, before: bytes) -> Trailer:
        trailer = self._decoded(_StoredTrailer, body)
        if (trailer.documents, trailer.records) != (self._documents, self._records):
            raise self._damaged(
                f"it holds {self._documents} documents and {self._records} records instead of "
                f"{trailer.documents} and {trailer.records}"
            )
        if trailer.digest != before:
            raise self._damaged("the checksum over all of it is wrong")
        if self._file.read(1):
            raise self._damaged("there is something behind its end")
        return Trailer(trailer.documents, trailer.records)

    def _decoded(self, kind: type[Body], body: bytes) -> Body:
        try:
            return msgspec.msgpack.decode(body, type=kind)
        except msgspec.MsgspecError as error:
            raise self._damaged(f"a frame cannot be read: {error}") from error

    def _exactly(self, size: int, what: str) -> bytes:
        data = self._file.read(size)
        while len(data) < size and (more := self._file.read(size - len(data))):
            data += more
        if len(data) < size:
            raise InvalidArgumentError(f"{self._name} was cut off: {what} is missing at its end")
        self._all.update(data)
        return data

    def _damaged(self, reason: str) -> InvalidArgumentError:
        return InvalidArgumentError(f"{self._name} is damaged: {reason}")


def _framed(kind: bytes, body: bytes) -> bytes:
    return _FRAME.pack(kind, len(body), xxh3_128_digest(kind + body)) + body
