"""Locations and block records: what the index stores for a block.

A location keeps its `CacheLocation` message *already encoded* as the repeated field 2 of an answer (tag, length,
message). An answer to a match is then a join of such chunks, with no per-block object (design.md 6); uris are decoded
from the chunk only where they are needed (deletion, metadata queries). The few lines of encoding below are proven
equal to protobuf's by a property test.

Named tuples instead of dataclasses: a start and a finish build several per block, and a tuple costs a third.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from operator import add, itemgetter
from typing import NamedTuple, cast

import numpy as np

from kvcm.model.storages import StorageType

__all__ = [
    "BlockRecord",
    "BlockRun",
    "DecodedLocation",
    "DeletionItem",
    "Location",
    "LocationStatus",
    "SpecUri",
    "StorageKey",
    "decode_chunk",
    "encode_chunk",
    "encode_chunks",
    "encode_varint",
    "event_hash_of",
    "event_hashes_of",
    "gaps_between_uris",
    "read_varint",
    "retag",
    "retag_all",
    "signed64",
    "uris_of",
    "with_checksums",
    "with_event_hashes",
]

# Numbers in protobuf's variable length, read from encoded messages without making objects of them.

_MOST_SHIFT = 63


def read_varint(data: bytes, position: int) -> tuple[int, int]:
    """Return the number at a position and where it ends.

    Raises:
        IndexError: the data ends within it.
        ValueError: it is longer than 64 bits.
    """
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position
        shift += 7
        if shift > _MOST_SHIFT:
            raise ValueError("a number is longer than 64 bits")


def signed64(value: int) -> int:
    """Return 64 bits as a signed number, as protobuf has an int64."""
    return value - (1 << 64) if value >> 63 else value


_ANSWER_TAG = 0x12  # field 2, length-delimited: GetCacheLocationResponse.locations, GetCacheMetaResponse.locations
_TYPE_TAG = b"\x08"  # CacheLocation.type
_TYPE_FIELD_SIZE = 2
_SPEC_SIZE_TAG, _SPEC_TAG = 0x10, 0x1A  # CacheLocation.spec_size, CacheLocation.location_specs
_NAME_TAG, _URI_TAG = 0x0A, 0x12  # LocationSpec.name, LocationSpec.uri
_CHECKSUM = 1000  # field of LocationSpec
_CHECKSUM_TAG = b"\xc1\x3e"  # the same, 64 bits as they are
_CHECKSUM_FIELD_SIZE = 10
_CHECKSUM_OF_ALL_TAG = b"\x20"  # CacheLocation.checksum, which is that of the only spec
_EVENT_HASH = 1000  # field of CacheLocation
_EVENT_HASH_TAG = b"\xc0\x3e"  # the same, a varint
_EVENT_HASH_BYTES = 10  # of the varint, see below
_EVENT_HASH_FIELD_SIZE = 12
_WIRE_VARINT, _WIRE_FIXED64, _WIRE_LEN = 0, 1, 2


class LocationStatus(IntEnum):
    """Life of a location: writing → serving → deleting. Numbers and names (with CLS_) are those of the original."""

    WRITING = 2
    SERVING = 3
    DELETING = 4


class SpecUri(NamedTuple):
    """One spec of a location.

    Attributes:
        name: as registered.
        uri: where it lies; empty means not there.
        checksum: of its bytes, as reported by its writer (meta_service.proto); 0 for none.
    """

    name: str
    uri: str
    checksum: int = 0


class StorageKey(NamedTuple):
    """Where bytes count: a storage, and its type when they were written there."""

    storage: str
    storage_type: StorageType


class Location(NamedTuple):
    """One place where (parts of) a block lie.

    Attributes:
        id: unique within the block; all locations made by one write session share it.
        storage: name of the storage.
        storage_type: its type.
        status: writing, serving or deleting.
        spec_names: names of the specs it holds; a tuple shared by all locations of the same selection.
        chunk: the encoded `CacheLocation`, as field 2 of an answer.
        size_bytes: bytes of all its specs.
        written_at: unix seconds of StartWriteCache.
        session_id: write session that owns it while writing; kept for good by what never served.
        deadline: unix seconds: while writing when the session expires, while deleting when the bytes may go, while
            serving when it has to be evicted though there is space (a writer's hint), 0 for never.
        priority: what has a lower one is evicted first; a writer's hint.
        pinned_until: unix seconds until which it must not be evicted.
    """

    id: str
    storage: str
    storage_type: StorageType
    status: LocationStatus
    spec_names: tuple[str, ...]
    chunk: bytes
    size_bytes: int
    written_at: float
    session_id: str = ""
    deadline: float = 0.0
    priority: int = 0
    pinned_until: float = 0.0

    @property
    def place(self) -> StorageKey:
        """Where its bytes count."""
        return StorageKey(self.storage, self.storage_type)

    @property
    def has_served(self) -> bool:
        """Whether its writer finished the session, so that its bytes are not written any more."""
        return not self.session_id


class BlockRecord(NamedTuple):
    """Everything the index knows of one block.

    Attributes:
        parent: key of the block before it in its prefix chain, None at the head (or where no writer reported it).
        depth: position in the chain, counted from 0.
        locations: oldest first; never empty in a stored record.
    """

    parent: int | None
    depth: int
    locations: tuple[Location, ...]

    @property
    def due(self) -> float | None:
        """Unix seconds when something has to be done: a session expires, bytes may go, or the time is up that a writer
        gave. None: nothing ever."""
        deadlines = [
            location.deadline
            for location in self.locations
            if location.deadline or location.status is not LocationStatus.SERVING
        ]
        return min(deadlines) if deadlines else None


class DecodedLocation(NamedTuple):
    """The fields of an encoded `CacheLocation`; `event_hash` is 0 for none."""

    storage_type: StorageType
    spec_size: int
    specs: tuple[SpecUri, ...]
    event_hash: int = 0


def encode_chunk(storage_type: StorageType, spec_size: int, specs: Iterable[SpecUri], event_hash: int = 0) -> bytes:
    """Encode a `CacheLocation` as field 2 of an answer.

    Args:
        storage_type: kind of storage that the uris belong to.
        spec_size: number of specs the location has, also when `specs` is filtered.
        specs: the parts to list.
        event_hash: an int64 by which the events of an engine name the block; 0 for none, as where there is no storage.
    """
    message = bytearray()
    if storage_type:
        message += _TYPE_TAG + encode_varint(storage_type)
    if event_hash:
        assert storage_type
        message += _EVENT_HASH_TAG + _encode_event_hashes((event_hash,))
    if spec_size:
        message += b"\x10" + encode_varint(spec_size)
    checksum = 0
    for name, uri, checksum in specs:
        fields = _text_field(b"\x0a", name) + _text_field(b"\x12", uri)
        if checksum:
            fields += _CHECKSUM_TAG + checksum.to_bytes(8, "little")
        message += b"\x1a" + encode_varint(len(fields)) + fields
    return _close_chunk(message, spec_size, checksum)


@lru_cache(4096)
def gaps_between_uris(
    storage_type: StorageType, spec_names: tuple[str, ...], lengths: tuple[int, ...]
) -> tuple[bytes, ...]:
    """Return what stands before each uri in an encoded location whose uris have these lengths, in bytes, and no
    checksums: with the uris in between it is what `encode_chunk` returns."""
    heads = []
    for name, length in zip(spec_names, lengths, strict=True):
        head = _text_field(b"\x0a", name) + (b"\x12" + encode_varint(length) if length else b"")
        heads.append(b"\x1a" + encode_varint(len(head) + length) + head)
    kind = b"\x08" + encode_varint(storage_type) if storage_type else b""
    count = b"\x10" + encode_varint(len(heads)) if heads else b""
    size = len(kind) + len(count) + sum(map(len, heads)) + sum(lengths)
    return (b"\x12" + encode_varint(size) + kind + count + heads[0], *heads[1:])


def with_checksums(chunk: bytes, checksums: Mapping[str, int]) -> bytes:
    """Return a chunk that has no checksums yet with those of its specs: half the cost of decoding it.

    Args:
        chunk: of a location that is being written.
        checksums: by name of the spec; 0 for none, and so for those that are left out.
    """
    message = bytearray()
    spec_size = checksum = 0
    _, position = read_varint(chunk, 1)
    end = len(chunk)
    while position < end:
        start, tag = position, chunk[position]
        if tag == _EVENT_HASH_TAG[0]:
            position += _EVENT_HASH_FIELD_SIZE
            message += chunk[start:position]
            continue
        value, position = read_varint(chunk, start + 1)
        if tag != _SPEC_TAG:
            spec_size = value if tag == _SPEC_SIZE_TAG else spec_size
            message += chunk[start:position]
            continue
        fields = chunk[position : position + value]
        position += value
        checksum = checksums.get(_name_within(fields), 0)
        if checksum:
            fields += _CHECKSUM_TAG + checksum.to_bytes(8, "little")
        message += b"\x1a" + encode_varint(len(fields)) + fields
    return _close_chunk(message, spec_size, checksum)


def _close_chunk(message: bytearray, spec_size: int, last_checksum: int) -> bytes:
    """Return an encoded location that lacks only its own checksum as field 2 of an answer."""
    if last_checksum and spec_size == 1:
        message += _CHECKSUM_OF_ALL_TAG + encode_varint(last_checksum)
    return b"\x12" + encode_varint(len(message)) + message


def _name_within(fields: bytes) -> str:
    if not fields or fields[0] != _NAME_TAG:
        return ""
    length, position = read_varint(fields, 1)
    return fields[position : position + length].decode()


def decode_chunk(chunk: bytes) -> DecodedLocation:
    """Read what `encode_chunk` wrote."""
    _, position = read_varint(chunk, 1)
    storage_type, spec_size, specs, event_hash = 0, 0, [], 0
    for number, value in _fields(chunk, position, len(chunk)):
        if number == 1:
            storage_type = _as_number(value)
        elif number == 2:
            spec_size = _as_number(value)
        elif number == 3:
            specs.append(_decode_spec(_as_bytes(value)))
        elif number == _EVENT_HASH:
            event_hash = signed64(_as_number(value))
    return DecodedLocation(StorageType(storage_type), spec_size, tuple(specs), event_hash)


def uris_of(chunk: bytes) -> list[str]:
    """Return the uris of an encoded `CacheLocation`, one per spec: `decode_chunk` in a third of the time."""
    uris: list[str] = []
    _, position = read_varint(chunk, 1)
    end = len(chunk)
    while position < end:
        tag = chunk[position]
        if tag == _EVENT_HASH_TAG[0]:
            position += _EVENT_HASH_FIELD_SIZE
            continue
        value, position = read_varint(chunk, position + 1)
        if tag == _SPEC_TAG:
            uris.append(_uri_within(chunk, position, position + value))
            position += value
    return uris


def _uri_within(chunk: bytes, position: int, end: int) -> str:
    uri = ""
    while position < end:
        tag = chunk[position]
        if tag == _CHECKSUM_TAG[0]:
            position += _CHECKSUM_FIELD_SIZE
            continue
        length, position = read_varint(chunk, position + 1)
        if tag == _URI_TAG:
            uri = chunk[position : position + length].decode()
        position += length
    return uri


def retag(chunk: bytes, field_number: int) -> bytes:
    """Return the chunk as another repeated field (1 to 15) of a message."""
    return bytes(((field_number << 3) | _WIRE_LEN,)) + chunk[1:]


def retag_all(chunks: Iterable[bytes], field_number: int) -> list[bytes]:
    """Do `retag` for many chunks."""
    tag = bytes(((field_number << 3) | _WIRE_LEN,))
    return [tag + chunk[1:] for chunk in chunks]


def _decode_spec(encoded: bytes) -> SpecUri:
    values = {number: _as_bytes(value) for number, value in _fields(encoded, 0, len(encoded))}
    checksum = int.from_bytes(values.get(_CHECKSUM, b""), "little")
    return SpecUri(values.get(1, b"").decode(), values.get(2, b"").decode(), checksum)


def _text_field(tag: bytes, text: str) -> bytes:
    encoded = text.encode()
    return tag + encode_varint(len(encoded)) + encoded if encoded else b""


_ONE_BYTE = tuple(bytes((value,)) for value in range(128))


def encode_varint(value: int) -> bytes:
    if value < 128:
        return _ONE_BYTE[value]
    encoded = bytearray()
    while value >= 128:
        encoded.append(value & 127 | 128)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _fields(data: bytes, position: int, end: int) -> Sequence[tuple[int, int | bytes]]:
    fields: list[tuple[int, int | bytes]] = []
    while position < end:
        tag, position = read_varint(data, position)
        if tag & 7 == _WIRE_FIXED64:
            fields.append((tag >> 3, data[position : position + 8]))
            position += 8
            continue
        value, position = read_varint(data, position)
        if tag & 7 == _WIRE_VARINT:
            fields.append((tag >> 3, value))
        else:
            fields.append((tag >> 3, data[position : position + value]))
            position += value
    return fields


def _as_number(value: int | bytes) -> int:
    assert isinstance(value, int)
    return value


def _as_bytes(value: int | bytes) -> bytes:
    assert isinstance(value, bytes)
    return value


# Many locations encoded at once: what `encode_chunk` makes of each, in a fraction of its time.
#
# The locations of one write have the same type and the same specs. Their encodings differ in the uris, and before
# those in lengths, of which there are few: all bytes between two uris are looked up by the lengths of what follows.


def encode_chunks(storage_type: StorageType, spec_names: Sequence[str], uris: Sequence[Sequence[str]]) -> list[bytes]:
    """Encode locations that have no checksums yet.

    Args:
        storage_type: kind of storage that the uris belong to.
        spec_names: of every location, in order.
        uris: a sequence per spec, with one uri per location.

    Returns:
        Each location as field 2 of an answer.
    """
    columns = [list(map(str.encode, of_spec)) for of_spec in uris]
    if len(columns) == 1:
        return _encode_one_spec(storage_type, spec_names[0], columns[0])
    names, forms = tuple(spec_names), dict[tuple[int, ...], tuple[bytes, ...]]()
    chunks = []
    for row in zip(*columns, strict=True):
        lengths = tuple(map(len, row))
        gaps = forms.get(lengths)
        if gaps is None:
            gaps = forms[lengths] = gaps_between_uris(storage_type, names, lengths)
        parts = [b""] * (2 * len(row))
        parts[::2], parts[1::2] = gaps, row
        chunks.append(b"".join(parts))
    return chunks


def _encode_one_spec(storage_type: StorageType, name: str, uris: Sequence[bytes]) -> list[bytes]:
    lengths = list(map(len, uris))
    heads = {length: gaps_between_uris(storage_type, (name,), (length,))[0] for length in set(lengths)}
    return list(map(add, map(heads.__getitem__, lengths), uris))  # loops in C


# Event hashes: the numbers by which an engine's KV events name its blocks (meta_service.proto), in the locations that
# it writes. So every store holds them, and answers and exports have them, without a column of their own.
#
# In an encoded location the field stands right behind the type, at a place that is known without parsing: protobuf
# allows any order. A location without a type is a placeholder and has none. The field is an int64 whose varint always
# takes ten bytes, also where fewer would do, which protobuf allows, too: all but the last have their high bit set.
#
# The reason for both is the release before. Its managers may work on the same store; they take every tag for one byte
# with a varint behind it (`uris_of`, `with_checksums`), and so skip this field as two numbers: C0 3E, and the first of
# the ten bytes with the other nine. Of a fixed64 they would take bytes of the hash for tags, and delete bytes that no
# uri names. Its vLLM connector takes the second byte of a location for the type.

_SHIFTS = 7 * np.arange(_EVENT_HASH_BYTES, dtype=np.uint64)
_MORE_FOLLOWS = np.array([128] * (_EVENT_HASH_BYTES - 1) + [0], np.uint8)
_FEW_CHUNKS = 16  # below, arrays cost more than they save
_HEAD_SIZE = 16  # of a chunk without its first byte: length (of two bytes at most), type, event hash
_cut_head = itemgetter(slice(1, 1 + _HEAD_SIZE))


def _encode_event_hashes(hashes: Sequence[int]) -> bytes:
    """Return the varints of int64 numbers, ten bytes each."""
    numbers = np.array(hashes, np.int64).view(np.uint64)
    groups = (numbers[:, None] >> _SHIFTS).astype(np.uint8) & np.uint8(127)
    return (groups | _MORE_FOLLOWS).tobytes()


def with_event_hashes(chunks: Sequence[bytes], hashes: Sequence[int]) -> list[bytes]:
    """Return freshly encoded locations, which have none yet, with their event hashes.

    Args:
        chunks: of one storage type.
        hashes: one int64 per chunk; 0 for none.
    """
    encoded = _encode_event_hashes(hashes)
    heads = dict[int, tuple[bytes, int]]()  # by length of the chunk; there are few
    found: list[bytes] = []
    for chunk, event_hash, at in zip(chunks, hashes, range(0, len(encoded), _EVENT_HASH_BYTES), strict=True):
        if not event_hash:
            found.append(chunk)
            continue
        head = heads.get(len(chunk))
        if head is None:
            head = heads[len(chunk)] = _head_before_hash(chunk)
        found.append(b"".join((head[0], encoded[at : at + _EVENT_HASH_BYTES], chunk[head[1] :])))
    return found


def _head_before_hash(chunk: bytes) -> tuple[bytes, int]:
    """Return what stands before the hash that a location is to get, and where the location goes on behind it."""
    size, position = read_varint(chunk, 1)
    assert chunk.startswith(_TYPE_TAG, position)
    begin, position = position, position + _TYPE_FIELD_SIZE
    return chunk[:1] + encode_varint(size + _EVENT_HASH_FIELD_SIZE) + chunk[begin:position] + _EVENT_HASH_TAG, position


def event_hash_of(chunk: bytes) -> int:
    """Return the event hash of an encoded `CacheLocation`, an int64; 0 for none. A long one takes no more time."""
    position = 2 if chunk[1] < 128 else read_varint(chunk, 1)[1]
    begin = position + _TYPE_FIELD_SIZE
    end = begin + len(_EVENT_HASH_TAG)
    if chunk[begin:end] != _EVENT_HASH_TAG or not chunk.startswith(_TYPE_TAG, position):
        return 0
    return signed64(read_varint(chunk, end)[0])


def event_hashes_of(chunks: Sequence[bytes]) -> list[int]:
    """Do `event_hash_of` for many chunks: of some hundred each takes a tenth of a microsecond."""
    if len(chunks) < _FEW_CHUNKS:
        return list(map(event_hash_of, chunks))
    joined = b"".join(map(_cut_head, chunks))
    if len(joined) != _HEAD_SIZE * len(chunks):  # one is shorter than its head could be
        return list(map(event_hash_of, chunks))
    heads = np.frombuffer(joined, np.uint8).reshape(-1, _HEAD_SIZE)
    is_long = heads[:, 0] > 127
    if (is_long & (heads[:, 1] > 127)).any():  # its length takes three bytes
        return list(map(event_hash_of, chunks))
    hashes = np.zeros(len(chunks), np.int64)
    for rows, begin in ((~is_long, 1), (is_long, 2)):
        has_hash = rows & (heads[:, begin] == _TYPE_TAG[0])
        for place, byte in enumerate(_EVENT_HASH_TAG, begin + _TYPE_FIELD_SIZE):
            has_hash &= heads[:, place] == byte
        if has_hash.any():
            first = begin + _TYPE_FIELD_SIZE + len(_EVENT_HASH_TAG)
            groups = heads[has_hash, first : first + _EVENT_HASH_BYTES] & np.uint8(127)
            hashes[has_hash] = np.bitwise_or.reduce(groups.astype(np.uint64) << _SHIFTS, axis=1).view(np.int64)
    return hashes.tolist()


# Runs: blocks one behind the other in a prefix chain that are written alike.
#
# Nearly every write is one run: fresh blocks, the same parts of each, all of them on one storage. What differs from
# block to block is the key and the encoded location; all the rest is said once. So a run goes through a write as a few
# columns, and no object is made per block. `records` returns the blocks one by one.

# A named tuple's own constructor binds its arguments in Python; from a ready tuple it takes a third of the time.
_new_location = cast("Callable[[type[Location], tuple[object, ...]], Location]", tuple.__new__)
_new_record = cast("Callable[[type[BlockRecord], tuple[object, ...]], BlockRecord]", tuple.__new__)


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Consecutive blocks with one location each.

    Attributes:
        keys: of the blocks, distinct, each the parent of the next; one at least.
        parent: of the first, None at the head of a chain.
        depth: of the first.
        location: what the locations have in common; its `chunk` is empty.
        chunks: of the locations, by block.
    """

    keys: Sequence[int]
    parent: int | None
    depth: int
    location: Location
    chunks: Sequence[bytes]

    def cut(self, begin: int, end: int) -> BlockRun:
        """Return the run of its blocks from `begin` to before `end`."""
        parent = self.keys[begin - 1] if begin else self.parent
        return BlockRun(self.keys[begin:end], parent, self.depth + begin, self.location, self.chunks[begin:end])

    def locations(self) -> list[Location]:
        """Return the location of every block."""
        before, after = self.location[:5], self.location[6:]
        return [_new_location(Location, (*before, chunk, *after)) for chunk in self.chunks]

    def records(self) -> list[BlockRecord]:
        """Return every block as the index knows it when it has this location only."""
        pairs = zip(self.links(), self.locations(), strict=True)
        return [_new_record(BlockRecord, (parent, depth, (location,))) for (parent, depth), location in pairs]

    def links(self) -> list[tuple[int | None, int]]:
        """Return parent and depth of every block."""
        depths = range(self.depth, self.depth + len(self.keys))
        return list(zip((self.parent, *self.keys[:-1]), depths, strict=True))


# What it takes to delete one location for good.


class DeletionItem(NamedTuple):
    """A location whose bytes and then metadata have to go.

    Attributes:
        instance_id: owner of the block.
        uid: number of that instance's registration.
        key: the block.
        location_id: the location within the block.
        storage: name of the storage that holds the bytes.
        uris: one per spec.
        session_id: write session that may still be writing the bytes, "" when it said that it is done.
        size_bytes: bytes of all of it.
    """

    instance_id: str
    uid: int
    key: int
    location_id: str
    storage: str
    uris: tuple[str, ...]
    session_id: str = ""
    size_bytes: int = 0

    @classmethod
    def of(cls, instance_id: str, uid: int, key: int, location: Location) -> DeletionItem:
        """Return the item for a location of a block."""
        uris = tuple(uris_of(location.chunk))
        return cls(instance_id, uid, key, location.id, location.storage, uris, location.session_id, location.size_bytes)
