"""Encoded locations as JSON, with no message per block: what `json_codec.print_response` prints of the same bytes.

An answer to a match is a join of encoded locations, and so is its JSON form a join of texts. Hot blocks are asked for
again and again: the texts of the latest are kept by their bytes, which never change and keep their hash, so a known
location costs one lookup in C. Addresses for fresh blocks are told once and not kept. Whatever a location holds that
this module does not know goes through the general codec.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from kvcm.index.chunk_memo import ChunkMemo
from kvcm.model.varints import read_varint
from kvcm.protocol import meta_service_pb2 as pb
from kvcm.service.calls import Reply
from kvcm.service.json_codec import print_response, shaped

__all__ = ["LocationTexts", "location_text", "print_reply"]

_FIELD = "locations"  # the one that the encoded fields of every reply belong to
_READ_TAG = 0x12  # field 2, of answers to reads; that of StartWriteCache is another one
_TYPE_TAG, _SIZE_TAG, _SPEC_TAG, _CHECKSUM_TAG = 0x08, 0x10, 0x1A, 0x20
_NAME_TAG, _URI_TAG = 0x0A, 0x12
_SPEC_CHECKSUM_TAG = b"\xc1\x3e"
_SPEC_CHECKSUM_SIZE = 10  # of the field, tag included
_NEGATIVE = 1 << 31  # from here on numbers of 32 bits wrap around
_MOST_AT_ONCE = 1024  # locations printed before other requests get their turn
_MOST_BYTES_AT_ONCE = 256 << 10  # the same, in bytes as encoded: some milliseconds
_MOST_BYTES = 64 << 20
_MOST_HEADS = 4096

_quoted = json.encoder.encode_basestring
_TYPES = {value.number: f'"{value.name}"' for value in pb.StorageType.DESCRIPTOR.values}


class LocationTexts:
    """Texts of the locations that were read lately.

    Args:
        most_bytes: kept, about; half of it may be of texts that nobody asks for any more.
    """

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        self._memo = ChunkMemo(location_text, most_bytes)

    def of(self, chunks: Sequence[bytes]) -> list[bytes]:
        """Return the text of every location, in order."""
        if not chunks or chunks[0][0] != _READ_TAG:
            return list(map(location_text, chunks))
        return self._memo.map(chunks)

    @property
    def kept_bytes(self) -> int:
        """Bytes of the locations and texts of the younger half, about."""
        return self._memo.young_bytes


async def print_reply(reply: Reply, texts: LocationTexts) -> bytes:
    """Print an answer as one line of JSON in UTF-8, giving way to other requests where it is long.

    Args:
        reply: the answer; its encoded fields are entries of `locations`, and its message has no others.
        texts: of locations.
    """
    if not reply.chunks:
        return print_response(reply.message)
    printed: list[bytes] = []
    most = min(_MOST_AT_ONCE, 1 + _MOST_BYTES_AT_ONCE // len(reply.chunks[0]))  # those of one answer are alike
    for start in range(0, len(reply.chunks), most):
        if start:
            await asyncio.sleep(0)
        printed += texts.of(reply.chunks[start : start + most])
    rest: dict[str, Any] = shaped(reply.message)
    del rest[_FIELD]
    behind = json.dumps(rest, ensure_ascii=False, separators=(",", ":")).encode()
    printed[0] = b'{"%s":[%s' % (
        _FIELD.encode(),
        printed[0],
    )  # so that all is copied once: an answer may be of megabytes
    printed[-1] += b"]," + behind[1:]
    return b",".join(printed)


def location_text(chunk: bytes) -> bytes:
    """Return a `CacheLocation` that is encoded as a repeated field (1 to 15) of an answer as JSON."""
    size, position = read_varint(chunk, 1)
    kind = spec_size = checksum = 0
    specs: list[str] = []
    end = len(chunk)
    while position < end:
        tag = chunk[position]
        value = chunk[position + 1]
        position += 2
        if value > 127:
            value, position = read_varint(chunk, position - 1)
        if tag == _SPEC_TAG:
            specs.append(_spec_text(chunk[position : position + value]))
            position += value
        elif tag == _TYPE_TAG:
            kind = value
        elif tag == _SIZE_TAG:
            spec_size = value
        elif tag == _CHECKSUM_TAG:
            checksum = value if value < 1 << 63 else value - (1 << 64)
        else:
            return _by_message(pb.CacheLocation, chunk[-size:])
    if max(kind, spec_size) >= _NEGATIVE:
        return _by_message(pb.CacheLocation, chunk[-size:])
    name = _TYPES.get(kind, kind)
    text = f'{{"type":{name},"spec_size":{spec_size},"location_specs":[{",".join(specs)}],"checksum":"{checksum}"}}'
    return text.encode()


def _spec_text(fields: bytes) -> str:
    """Return an encoded `LocationSpec` as JSON; its usual form is a name of less than 128 bytes and a uri."""
    if not fields or fields[0] != _NAME_TAG or fields[1] > 127:
        return _by_message(pb.LocationSpec, fields).decode()
    uri_at = 2 + fields[1]
    has_uri = uri_at < len(fields) and fields[uri_at] == _URI_TAG
    size, start = read_varint(fields, uri_at + 1) if has_uri else (0, uri_at)
    uri = fields[start : start + size].decode()
    checksum = 0
    behind = fields[start + size :]
    if behind:
        if len(behind) != _SPEC_CHECKSUM_SIZE or behind[:2] != _SPEC_CHECKSUM_TAG:
            return _by_message(pb.LocationSpec, fields).decode()
        checksum = int.from_bytes(behind[2:], "little")
    head = _heads.get(fields[:uri_at]) or _head(fields[:uri_at])
    return f'{head}{_quoted(uri)},"checksum":"{checksum}"}}'


_heads: dict[bytes, str] = {}


def _head(encoded_name: bytes) -> str:
    """Return how a spec of that name begins; there are few names."""
    if len(_heads) >= _MOST_HEADS:
        _heads.clear()
    head = _heads[encoded_name] = f'{{"name":{_quoted(encoded_name[2:].decode())},"uri":'
    return head


def _by_message(message_type: type[Any], fields: bytes) -> bytes:
    return print_response(message_type.FromString(fields))
