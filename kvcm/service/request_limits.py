"""Limits on the size of requests, checked before any work: bytes of bodies, entries of lists, bytes of texts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError

from kvcm.model.errors import InvalidArgumentError
from kvcm.model.locations import read_varint
from kvcm.model.principals import ANONYMOUS, Principal
from kvcm.service.admission import RequestQueue
from kvcm.service.calls import Call
from kvcm.service.json_codec import MalformedBody, parse_request

__all__ = [
    "MAX_ENTRIES",
    "MAX_FREE_TEXT_BYTES",
    "MAX_NAME_BYTES",
    "MAX_SNAPSHOT_BYTES",
    "MAX_TEXT_BYTES",
    "BodyReader",
    "RequestLimits",
    "RequestSizes",
    "check_text",
    "max_body_bytes",
]


Read = TypeVar("Read")


@dataclass(slots=True)
class RequestLimits:
    """Most keys and tokens of one request, most bytes of one body. All calls share one object, whose first two
    change with the settings."""

    max_keys: int = 65536
    max_tokens: int = 1 << 20
    max_body_bytes: int = 64 << 20


# Parsing of bodies: small ones at once, large ones in a thread. Bodies that are made to be slow to parse are rejected.
#
# A body may be of 64 MiB and hold a value in every second byte. Reading that takes seconds and gigabytes, and takes
# them under Python's global lock, so a thread alone does not help: the values of a large body are counted first. What
# honest requests hold at most follows from how many keys and tokens they may have.

_MAX_UNAUTHENTICATED_BYTES: Final = 1 << 16  # of a login, say
_SMALL_JSON_BYTES: Final = 1 << 16  # some milliseconds to read, whatever it holds
_SMALL_PROTO_BYTES: Final = 1 << 22
_MAX_SUBMESSAGES_PER_KEY: Final = 16  # a location with a part for each of so many ranks
_MAX_JSON_PAIRS_PER_KEY: Final = 40  # of JSON: name and checksum of each, and some more
_DOCUMENT: Final = "config_snapshot"  # a text of thousands of pairs, which count here although they are no values
_MAX_JSON_PAIRS: Final = 16_384  # of requests without such locations


def max_body_bytes(principal: Principal, most: int) -> int:
    """Return the limit of a body, `most` or less: requests without authentication are small."""
    return min(_MAX_UNAUTHENTICATED_BYTES, most) if principal is ANONYMOUS else most


class BodyReader:
    """Parses bodies. Large ones wait in a queue: parsing threads share Python's lock with the event loop, and several
    of them would leave it little.

    Args:
        limits: of keys and tokens.
        lane: of large bodies.
    """

    def __init__(self, limits: RequestLimits, lane: RequestQueue) -> None:
        self._limits = limits
        self._lane = lane

    async def json(self, call: Call, body: bytes, deadline: float | None = None) -> Any:
        """Read a JSON body.

        Raises:
            MalformedBody: it is not the JSON form of the request, or holds more values than any request may.
            RejectedError: it is large, and cannot be read in time.
        """
        if len(body) <= _SMALL_JSON_BYTES:
            return parse_request(body, call.request_type)
        keys = self._limits.max_keys
        kind = call.request_type.DESCRIPTOR
        is_bulky = bool(_messages_of(kind)) or _DOCUMENT in kind.fields_by_name
        most_pairs = _MAX_JSON_PAIRS_PER_KEY * keys if is_bulky else _MAX_JSON_PAIRS
        _check_part_count(body.count(b":"), most_pairs, "pairs")
        _check_part_count(body.count(b","), most_pairs + 3 * keys + self._limits.max_tokens, "values")
        _check_part_count(body.count(b"{"), _MAX_SUBMESSAGES_PER_KEY * keys, "objects")
        return await self._read_queued(deadline, parse_request, body, call.request_type)

    async def proto(self, call: Call, body: bytes, deadline: float | None = None) -> Any:
        """Read a protobuf body.

        Raises:
            DecodeError: it is no such message, or has more fields than any request may.
            RejectedError: it is large, and cannot be read in time.
        """
        if len(body) <= _SMALL_PROTO_BYTES:
            return call.request_type.FromString(body)
        most = _MAX_SUBMESSAGES_PER_KEY * self._limits.max_keys
        return await self._read_queued(deadline, _read_proto, body, call.request_type, most)

    async def read(self, body: bytes, read: Callable[[bytes], Read]) -> Read:
        """Return what a function reads in a body, which it bounds itself.

        Raises:
            RejectedError: it is large, and cannot be read in time.
        """
        if len(body) <= _SMALL_JSON_BYTES:
            return read(body)
        found: Read = await self._read_queued(None, read, body)
        return found

    async def _read_queued(self, deadline: float | None, read: Callable[..., Any], *arguments: Any) -> Any:
        began = await self._lane.enter(deadline)
        try:
            return await asyncio.to_thread(read, *arguments)
        finally:
            self._lane.leave(began)


def _read_proto(body: bytes, request_type: type[Any], most: int) -> Any:
    _check_fields(body, request_type.DESCRIPTOR, most)
    return request_type.FromString(body)


def _check_part_count(count: int, most: int, what: str) -> None:
    if count > most:
        raise MalformedBody(f"body: has {count} {what}, no request has more than {most}")


def _check_fields(body: bytes, descriptor: Any, most: int) -> None:
    """Refuse a body with more fields than that, or with one that is cut off. Counted with those of messages inside, but
    of such as hold no messages themselves: any number of them is one value in the end."""
    left = most
    spans = [(0, len(body), descriptor)]
    try:
        while spans:
            position, end, kind = spans.pop()
            below = _messages_of(kind)
            while position < end:
                left -= 1
                if left < 0:
                    raise DecodeError(f"more than {most} fields")
                tag, position = read_varint(body, position)
                match tag & 7:
                    case 0:
                        _, position = read_varint(body, position)
                    case 1:
                        position += 8
                    case 2:
                        size, position = read_varint(body, position)
                        inner = below.get(tag >> 3)
                        if inner is not None and _messages_of(inner):
                            spans.append((position, min(position + size, end), inner))
                        position += size
                    case 5:
                        position += 4
                    case _:
                        raise DecodeError("a group or an unknown kind of field")
    except (IndexError, ValueError) as error:
        raise DecodeError("a field is cut off, or a number is longer than 64 bits") from error


def _messages_of(descriptor: Any) -> dict[int, Any]:
    """Return the fields that can hold any number of messages, by number, however deep inside."""
    found = _messages.get(descriptor.full_name)
    if found is None:
        found = _messages[descriptor.full_name] = {}
        for field in descriptor.fields:
            inner = field.message_type if field.type == FieldDescriptor.TYPE_MESSAGE else None
            if inner is not None and (field.is_repeated or _messages_of(inner)):
                found[field.number] = inner
    return found


_messages: dict[str, dict[int, Any]] = {}

# Limits of fields.
#
# Every field of every request has a limit, by its content. Lists that belong to keys may have as many entries as there
# may be keys. So may the parts of locations and of reports, whose handlers check the limits inside them.

MAX_ENTRIES: Final = 1024
"""Of a list that has nothing to do with keys; more than any model has parts."""
MAX_NAME_BYTES: Final = 256
MAX_TEXT_BYTES: Final = 1024
"""Of texts that are no names: uris, paths, trace ids."""
MAX_FREE_TEXT_BYTES: Final = 1 << 16
MAX_SNAPSHOT_BYTES: Final = 8 << 20
"""Of a whole configuration: some thousand instances."""
_PER_KEY: Final = {
    *("block_keys", "values", "location_spec_group_names", "locations", "parts"),
    *("block_cache_keys", "block_hashes", "events", "blocks", "event_hashes"),
}
_PER_KEY_IN: Final = {"kv_cache_manager.proto.meta.GetCacheLocationsByBackendRequest.location_spec_names"}
_PACKED_KEYS: Final = {"added_keys", "removed_keys"}
"""Their handler counts the keys of all of them together."""
_NAMES: Final = {"instance_id", "engines", "node_id", "owner", "location_spec_names", "location_spec_group_names"}
_FREE_TEXTS: Final = {"extra", "user_data", "lora_name", "extra_info"}


class _List(NamedTuple):
    """Limit of a list: of so many entries, 0 as many as keys, -1 as many as tokens; and of `most` bytes each if they
    are texts. `has_parts` if they are messages to be looked at, too."""

    field: str
    entries: int
    most: int
    has_parts: bool


class _Bounds(NamedTuple):
    """Limits of a message: its texts with their most bytes, its lists, the messages in it."""

    texts: tuple[tuple[str, int], ...]
    lists: tuple[_List, ...]
    parts: tuple[str, ...]


class RequestSizes:
    """Checks requests.

    Args:
        limits: of keys and tokens.
    """

    def __init__(self, limits: RequestLimits) -> None:
        self._limits = limits

    def check(self, message: Any, path: str = "") -> None:
        """Reject a request with a field above its limit.

        Args:
            message: the request, or a message in it.
            path: of that message in the request, with the dot behind it.

        Raises:
            InvalidArgumentError: naming the field, its size and the limit.
        """
        bounds = _known.get(type(message)) or _bounds(type(message))
        for field, most in bounds.texts:
            text = getattr(message, field)
            if len(text) * 4 > most:
                check_text(f"{path}{field}", text, most)
        for field, entries, most, has_parts in bounds.lists:
            if items := getattr(message, field):
                if entries <= 0:
                    entries = self._limits.max_tokens if entries else self._limits.max_keys
                if len(items) > entries:
                    raise InvalidArgumentError(f"{path}{field} has {len(items)} entries, at most {entries} are allowed")
                if most or has_parts:
                    self._check_items(items, f"{path}{field}", most, has_parts)
        for field in bounds.parts:
            if message.HasField(field):
                self.check(getattr(message, field), f"{path}{field}.")

    def _check_items(self, items: Any, path: str, most: int, has_parts: bool) -> None:
        if isinstance(items, Mapping):
            items = [*items, *items.values()]
        if most and max(map(len, items)) * 4 > most:
            for position, text in enumerate(items):
                check_text(f"{path}[{position}]", text, most)
        if has_parts:
            for position, item in enumerate(items):
                self.check(item, f"{path}[{position}].")


def check_text(name: str, text: str | bytes, most: int) -> None:
    """Refuse a text of more bytes than that.

    Raises:
        InvalidArgumentError: naming it, its size and the limit.
    """
    if len(text) * 4 <= most:
        return
    encoded, what = (text, "bytes") if isinstance(text, bytes) else (text.encode(), "bytes of UTF-8")
    if len(encoded) > most:
        raise InvalidArgumentError(f"{name} has {len(encoded)} {what}, at most {most} are allowed")


_known: dict[type[Any], _Bounds] = {}


def _bounds(message_type: type[Any]) -> _Bounds:
    texts: list[tuple[str, int]] = []
    lists: list[_List] = []
    parts: list[str] = []
    for field in message_type.DESCRIPTOR.fields:
        name, is_text = field.name, field.type in {FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES}
        if name in _PACKED_KEYS:
            continue
        is_message = field.type == FieldDescriptor.TYPE_MESSAGE
        is_map = is_message and field.message_type.GetOptions().map_entry  # those there are hold texts
        most = _max_bytes(name) if is_text or is_map else 0
        if field.is_repeated:
            is_per_key = name in _PER_KEY or field.full_name in _PER_KEY_IN
            entries = -1 if name == "token_ids" else 0 if is_per_key else MAX_ENTRIES
            lists.append(_List(name, entries, most, is_message and not is_map and entries > 0))
        elif is_text:
            texts.append((name, most))
        elif is_message:
            parts.append(name)
    bounds = _known[message_type] = _Bounds(tuple(texts), tuple(lists), tuple(parts))
    return bounds


def _max_bytes(name: str) -> int:
    if name == "config_snapshot":
        return MAX_SNAPSHOT_BYTES
    return MAX_NAME_BYTES if name in _NAMES else MAX_FREE_TEXT_BYTES if name in _FREE_TEXTS else MAX_TEXT_BYTES
