"""Turns bodies into requests: small ones at once, large ones beside the event loop, and those that are made to be
slow to read not at all.

A body may be of 64 MiB and hold a value in every second byte. Reading that takes seconds and gigabytes, and takes
them under Python's global lock, so a thread alone does not help: the values of a large body are counted first. What
honest requests hold at most follows from how many keys and tokens they may have.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError

from kvcm.model.principals import STRANGER, Principal
from kvcm.model.varints import read_varint
from kvcm.service.calls import Call
from kvcm.service.json_codec import MalformedBody, parse_request
from kvcm.service.lanes import Lane
from kvcm.service.limits import RequestLimits

__all__ = ["BodyReader", "most_body_bytes"]

_MOST_STRANGER_BYTES: Final = 1 << 16  # of a login, say
_SMALL_JSON_BYTES: Final = 1 << 16  # some milliseconds to read, whatever it holds
_SMALL_PROTO_BYTES: Final = 1 << 22
_MOST_PARTS_PER_KEY: Final = 16  # a location with a part for each of so many ranks
_MOST_PAIRS_PER_KEY: Final = 40  # of JSON: name and checksum of each, and some more
_DOCUMENT: Final = "config_snapshot"  # a text of thousands of pairs, which count here although they are no values
_MOST_PAIRS: Final = 16_384  # of requests without such locations


def most_body_bytes(principal: Principal, most: int) -> int:
    """Return how large a body may be, where it may be so large at all: what strangers may do needs little."""
    return min(_MOST_STRANGER_BYTES, most) if principal is STRANGER else most


class BodyReader:
    """Reads bodies. Large ones take a lane: threads that read share Python's lock with the event loop, and several of
    them would leave it little.

    Args:
        limits: of keys and tokens.
        lane: of large bodies.
    """

    def __init__(self, limits: RequestLimits, lane: Lane) -> None:
        self._limits = limits
        self._lane = lane

    async def json(self, call: Call, body: bytes, deadline: float | None = None) -> Any:
        """Read a JSON body.

        Raises:
            MalformedBody: it is not the JSON form of the request, or holds more values than any request may.
            TurnedAwayError: it is large, and cannot be read in time.
        """
        if len(body) <= _SMALL_JSON_BYTES:
            return parse_request(body, call.request_type)
        keys = self._limits.max_keys
        kind = call.request_type.DESCRIPTOR
        is_bulky = bool(_messages_of(kind)) or _DOCUMENT in kind.fields_by_name
        most_pairs = _MOST_PAIRS_PER_KEY * keys if is_bulky else _MOST_PAIRS
        _refuse_more(body.count(b":"), most_pairs, "pairs")
        _refuse_more(body.count(b","), most_pairs + 2 * keys + self._limits.max_tokens, "values")
        _refuse_more(body.count(b"{"), _MOST_PARTS_PER_KEY * keys, "objects")
        return await self._in_turn(deadline, parse_request, body, call.request_type)

    async def proto(self, call: Call, body: bytes, deadline: float | None = None) -> Any:
        """Read a protobuf body.

        Raises:
            DecodeError: it is no such message, or has more fields than any request may.
            TurnedAwayError: it is large, and cannot be read in time.
        """
        if len(body) <= _SMALL_PROTO_BYTES:
            return call.request_type.FromString(body)
        most = _MOST_PARTS_PER_KEY * self._limits.max_keys
        return await self._in_turn(deadline, _read_proto, body, call.request_type, most)

    async def _in_turn(self, deadline: float | None, read: Callable[..., Any], *arguments: Any) -> Any:
        began = await self._lane.enter(deadline)
        try:
            return await asyncio.to_thread(read, *arguments)
        finally:
            self._lane.leave(began)


def _read_proto(body: bytes, request_type: type[Any], most: int) -> Any:
    _check_fields(body, request_type.DESCRIPTOR, most)
    return request_type.FromString(body)


def _refuse_more(count: int, most: int, what: str) -> None:
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
