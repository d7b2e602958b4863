"""Records as bytes: what RocksDB and Redis hold for a block.

::

    record in Redis      version · stamp (8 bytes) · body
    record in RocksDB    version · body
    body                 msgpack [parent, depth, header, chunk, header, chunk, ...], one header and chunk per location;
                         the parent's key is not mixed
    header               msgpack [id, storage, type, status, spec names, size, written_at, session, deadline,
                                  priority, pinned_until], the last two left out where both are 0

The stamp is new with every write. A compare-and-set compares it instead of the whole record, which costs neither the
encoding nor the sending of the expected record.

Blocks whose writing began in a RocksDB have no records of their own before something becomes of them. They are one
value: msgpack [version, uid, parent of the first, depth of the first, header, keys (8 bytes each), [chunk, ...]]; keys
are not mixed.

Everything of a location but its chunk is the same for all blocks of a write session, so it is encoded apart and both
directions remember the latest headers: a location is decoded with one look into a table, and a million loaded records
share their names, numbers and times instead of holding 300 bytes of them each.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import count, repeat
from struct import Struct
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvcm.model.errors import StorageIOError
from kvcm.model.keys import join_keys, mixed, mixed_array, mixed_key, split_keys, unmixed, unmixed_array, unmixed_key
from kvcm.model.locations import BlockRecord, BlockRun, Location, LocationStatus
from kvcm.model.storages import StorageType

__all__ = [
    "FORMAT_VERSION",
    "STAMP_SIZE",
    "ColumnDecoder",
    "StampedRecord",
    "StoredColumns",
    "decode_begun",
    "decode_header",
    "decode_payload",
    "decode_payloads",
    "decode_record",
    "decode_records",
    "encode_begun",
    "encode_chunk_of",
    "encode_header",
    "encode_payload",
    "encode_payloads",
    "encode_record",
    "encode_records",
    "header_of",
    "new_stamp",
]

FORMAT_VERSION: Final = 1
STAMP_SIZE: Final = 8

_BODY_AT = 1 + STAMP_SIZE
_VERSION_BYTE = bytes((FORMAT_VERSION,))
_HEADERS_REMEMBERED = 1 << 14  # of a session each, at most a few hundred bytes; stored blocks come in any order
_MOST_KINDS_KNOWN = 1 << 18  # while a store is loaded; two hundred bytes each
_DAMAGE: Final = (msgspec.MsgspecError, IndexError, TypeError, ValueError, OverflowError)
_HEADERS_WRITTEN = 1 << 10  # the blocks of a session are written together

_AnyRecord = TypeVar("_AnyRecord", bound=BlockRecord)


class StampedRecord(BlockRecord):
    """A record as it was read from a store: equal to the plain one, and knows which write it is of.

    Attributes:
        stamp: of that write; empty for a record derived from a stored one.
    """

    stamp: bytes = b""


class _Header(NamedTuple):
    id: str
    storage: str
    storage_type: StorageType
    status: LocationStatus
    spec_names: tuple[str, ...]
    size_bytes: int
    written_at: float
    session_id: str
    deadline: float
    priority: int = 0
    pinned_until: float = 0.0


_encode = msgspec.msgpack.Encoder().encode
_decode_body: Callable[[bytes], list[Any]] = msgspec.msgpack.Decoder(list[int | bytes | None]).decode
_Single: TypeAlias = tuple[int | None, int, bytes, bytes]
_decode_single: Callable[[bytes], _Single] = msgspec.msgpack.Decoder(_Single).decode
_SINGLE: Final = bytes((FORMAT_VERSION, 0x94))  # how the payload of a record with one location begins
_decode_header = msgspec.msgpack.Decoder(_Header).decode
_pack_stamp = Struct(">BQ").pack
# Starts anywhere, so that two managers never give the same stamp to two writes of a block; a random number per write
# would cost more than the encoding. Neither all zeros nor all ones: compare-and-set has a meaning for these.
_stamps = count(1 + secrets.randbits(63))


def encode_record(record: BlockRecord) -> bytes:
    """Return the record with a stamp that no other write has."""
    return new_stamp() + _encode(_body_of(record))


def encode_records(location: Location, links: Sequence[tuple[int | None, int]], chunks: Sequence[bytes]) -> list[bytes]:
    """Return what `encode_record` makes of blocks whose only locations differ in nothing but the chunk, with one stamp.

    Args:
        location: what the locations have in common.
        links: parent and depth of each block.
        chunks: of each location.
    """
    parents = unmixed([0 if parent is None else parent for parent, _ in links])
    unmixed_parents = [None if of is None else parent for parent, (of, _) in zip(parents, links, strict=True)]
    return _encode_uniform(new_stamp(), location, unmixed_parents, [depth for _, depth in links], chunks)


def new_stamp(version: int = FORMAT_VERSION) -> bytes:
    """Return what a record begins with: the version, and a stamp that no other write has."""
    return _pack_stamp(version, next(_stamps))


def encode_header(location: Location) -> bytes:
    """Return a location but its chunk as it stands in a record."""
    return _encode(header_of(location))


def header_of(location: Location) -> bytes:
    """Return the header of a location."""
    return _header_bytes(location[:5] + location[6:])


def decode_header(header: bytes) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return the fields of a location before its chunk and behind it, from what `header_of` made."""
    return _header_of(header)[:2]


def encode_chunk_of(chunk: bytes) -> bytes:
    """Return a chunk as it stands in a record, behind the header of its location."""
    return _encode(chunk)


def decode_record(data: bytes) -> StampedRecord:
    """Read what `encode_record` wrote.

    Raises:
        StorageIOError: another release wrote it, or it is damaged.
    """
    (record,) = decode_records((data,))
    return record


def decode_records(values: Sequence[bytes]) -> list[StampedRecord]:
    """Do `decode_record` for many."""
    records = _decode(StampedRecord, values, _BODY_AT)
    for record, data in zip(records, values, strict=True):
        record.stamp = data[1:_BODY_AT]
    return records


def encode_payload(record: BlockRecord) -> bytes:
    """Return the record without a stamp, for a store of one manager."""
    return _VERSION_BYTE + _encode(_body_of(record))


def encode_payloads(
    location: Location, parents: NDArray[np.int64], depths: NDArray[np.int32], chunks: Sequence[bytes]
) -> list[bytes]:
    """Return what `encode_payload` makes of blocks whose only locations differ in nothing but the chunk.

    Args:
        location: what the locations have in common.
        parents: of the blocks, as in `StoredColumns`.
        depths: of the blocks, as in `StoredColumns`.
        chunks: of each location.
    """
    unmixed_parents: list[int | None] = unmixed_array(parents).tolist()
    plain_depths: list[int] = depths.tolist()
    for place in np.flatnonzero(depths < 0).tolist():
        unmixed_parents[place], plain_depths[place] = None, ~plain_depths[place]
    return _encode_uniform(_VERSION_BYTE, location, unmixed_parents, plain_depths, chunks)


def _encode_uniform(
    head: bytes,
    location: Location,
    parents: Sequence[int | None],
    depths: Sequence[int],
    chunks: Sequence[bytes],
) -> list[bytes]:
    """Encode blocks whose parents are unmixed keys, as they are stored."""
    assert len(parents) == len(depths) == len(chunks)
    header = _header_bytes(location[:5] + location[6:])
    # Loops in C: they take a fifth less time.
    return list(map(head.__add__, map(_encode, zip(parents, depths, repeat(header), chunks))))


def decode_payload(data: bytes) -> BlockRecord:
    """Read what `encode_payload` wrote.

    Raises:
        StorageIOError: another release wrote it, or it is damaged.
    """
    (record,) = decode_payloads((data,))
    return record


def decode_payloads(values: Sequence[bytes]) -> list[BlockRecord]:
    """Do `decode_payload` for many."""
    return _decode(BlockRecord, values, 1)


class _Begun(msgspec.Struct, array_like=True, frozen=True):
    version: int
    uid: int
    parent: int | None
    depth: int
    header: bytes
    keys: bytes
    chunks: list[bytes]


_decode_begun = msgspec.msgpack.Decoder(_Begun).decode


def encode_begun(uid: int, run: BlockRun) -> bytes:
    """Return fresh blocks of a registration, whose writing begins, as one value."""
    parent = None if run.parent is None else unmixed_key(run.parent)
    header, keys = header_of(run.location), join_keys(run.keys)
    return _encode((FORMAT_VERSION, uid, parent, run.depth, header, keys, run.chunks))


def decode_begun(data: bytes) -> tuple[int, BlockRun]:
    """Read what `encode_begun` wrote.

    Raises:
        StorageIOError: another release wrote it, or it is damaged.
    """
    try:
        begun = _decode_begun(data)
        if begun.version != FORMAT_VERSION:
            raise _unknown_version(begun.version)
        keys, (before, after) = split_keys(begun.keys), decode_header(begun.header)
        if not 0 < len(keys) == len(begun.chunks):
            raise ValueError(f"it has {len(keys)} keys and {len(begun.chunks)} chunks")
    except _DAMAGE as error:
        raise _damaged(data, error) from error
    parent = None if begun.parent is None else mixed_key(begun.parent)
    location = tuple.__new__(Location, (*before, b"", *after))
    return begun.uid, BlockRun(keys, parent, begun.depth, location, begun.chunks)


class StoredColumns(NamedTuple):
    """Records in columns.

    Attributes:
        parents: mixed keys, 0 where there is no parent.
        depths: in their chains; the complement where there is no parent.
        kinds: places in `ColumnDecoder.headers`.
        chunks: of their locations, in a tuple where there are several.
    """

    parents: NDArray[np.int64]
    depths: NDArray[np.int32]
    kinds: NDArray[np.int32]
    chunks: list[bytes | tuple[bytes, ...]]


class ColumnDecoder:
    """Decodes the payloads of a store to columns, batch by batch: a third of the time of `decode_payloads`, since no
    object is made per record.

    Records of one write nearly always share all of their locations but the chunk, and are one *kind*. Keys come in no
    order, so a batch may be of as many kinds as it has records: each is read once, and then known by its bytes.

    Attributes:
        headers: by kind, the fields of the locations but the chunk, in one tuple; a tuple of such tuples where there
            are several locations. Kinds may be equal.
    """

    def __init__(self) -> None:
        self.headers: list[tuple[Any, ...]] = []
        self._known: dict[bytes | tuple[bytes, ...], int] = {}

    def decode(self, values: Sequence[bytes]) -> StoredColumns:
        """Return the columns of payloads.

        Raises:
            StorageIOError: another release wrote one, or one is damaged.
        """
        data, known = b"", self._known
        kinds, chunks = list[int](), list[bytes | tuple[bytes, ...]]()
        parents, depths = list[int](), list[int]()
        header: bytes | tuple[bytes, ...]
        chunk: bytes | tuple[bytes, ...]
        try:
            for data in values:
                if data.startswith(_SINGLE):
                    parent, depth, header, chunk = _decode_single(data[1:])
                else:
                    parent, depth, header, chunk = _decode_several(data)
                kind = known.get(header)
                kinds.append(self._add(header) if kind is None else kind)
                chunks.append(chunk)
                parents.append(parent or 0)
                depths.append(~depth if parent is None else depth)
            mixed_parents = mixed_array(parents)
            chain = np.array(depths, np.int32)
        except _DAMAGE as error:
            raise _damaged(data, error) from error
        return StoredColumns(np.where(chain < 0, 0, mixed_parents), chain, np.array(kinds, np.int32), chunks)

    def _add(self, header: bytes | tuple[bytes, ...]) -> int:
        kind = len(self.headers)
        self.headers.append(_fields_of(header) if isinstance(header, bytes) else tuple(map(_fields_of, header)))
        if len(self._known) == _MOST_KINDS_KNOWN:
            self._known.clear()
        self._known[header] = kind
        return kind


def _fields_of(header: bytes) -> tuple[Any, ...]:
    return _header_of(header)[2]


def _decode_several(data: bytes) -> tuple[int | None, int, tuple[bytes, ...], tuple[bytes, ...]]:
    if data[0] != FORMAT_VERSION:
        raise _unknown_version(data[0])
    parent, depth, *locations = _decode_body(data[1:])
    if not locations:
        raise ValueError("it has no location")
    if len(locations) % 2:
        raise ValueError("its last location is incomplete")
    return parent, depth, tuple(locations[::2]), tuple(locations[1::2])


def _body_of(record: BlockRecord) -> list[int | bytes | None]:
    parent = record[0]
    body: list[int | bytes | None] = [None if parent is None else unmixed_key(parent), record[1]]
    for location in record[2]:
        body.append(_header_bytes(location[:5] + location[6:]))
        body.append(location[5])
    return body


def _decode(form: type[_AnyRecord], values: Sequence[bytes], body_at: int) -> list[_AnyRecord]:
    try:
        data, bodies = b"", list[Any]()
        for data in values:
            if data[0] != FORMAT_VERSION:
                raise _unknown_version(data[0])
            bodies.append(_decode_body(data[body_at:]))
        parents = mixed([body[0] or 0 for body in bodies])
        records: list[_AnyRecord] = []
        for parent, body, data in zip(parents, bodies, values, strict=True):  # noqa: B007 - the error names it
            chain = (None, body[1]) if body[0] is None else (parent, body[1])
            if len(body) == 4:
                locations: tuple[Location, ...] = (_location_of(body[2], body[3]),)
            else:
                locations = tuple(map(_location_of, body[2::2], body[3::2]))
            records.append(tuple.__new__(form, (*chain, locations)))
    except _DAMAGE as error:
        raise _damaged(data, error) from error
    return records


def _damaged(data: bytes, error: Exception) -> StorageIOError:
    return StorageIOError(
        f"a stored block record of {len(data)} bytes is damaged ({error}); run `kvcm index verify --repair`"
    )


def _location_of(header: bytes, chunk: bytes) -> Location:
    before_chunk, after_chunk, _ = _header_of(header)
    # The constructor of a named tuple costs three times as much.
    return tuple.__new__(Location, (*before_chunk, chunk, *after_chunk))


@lru_cache(_HEADERS_WRITTEN)
def _header_bytes(header: tuple[Any, ...]) -> bytes:
    return _encode(header if header[9] or header[10] else header[:9])


@lru_cache(_HEADERS_REMEMBERED)
def _header_of(encoded: bytes) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]:
    header = _decode_header(encoded)
    header = header._replace(storage=sys.intern(header.storage), spec_names=_shared(header.spec_names))
    return header[:5], header[5:], header[:]


@lru_cache(1024)
def _shared(names: tuple[str, ...]) -> tuple[str, ...]:
    return names


def _unknown_version(version: int) -> StorageIOError:
    return StorageIOError(
        f"a stored block record has format version {version}, this release reads version {FORMAT_VERSION}: "
        "start the release that wrote it, or move the index with its `kvcm index export` and our `kvcm index import`"
    )
