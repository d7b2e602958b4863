"""Wire messages as JSON bodies: `parse_request` and `print_response`.

The rules are those of proto3 JSON: wrong types are refused, answers print every field that has no presence. Unknown
keys and unknown names of enums are ignored in the messages of the original, as its server does, and refused in ours:
there a misspelled limit would grant more than was meant, such as all verbs to a key.

Why not google.protobuf.json_format: it takes ints such as "1_000" and "٣", rounds 9007199254740993.0 (which is then the
key of another block), and holds the event loop for more than 50 ms to read the 65,536 tokens of one request, this
module for about 5 ms. Tests use json_format as the oracle wherever both must agree.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from functools import cache
from typing import Any, Final, NoReturn, TypeVar

import msgspec
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message

from kvcm.index.search_cache import ChunkCache
from kvcm.model.locations import read_varint, signed64
from kvcm.protocol import meta_service_pb2 as pb
from kvcm.service.calls import Reply

__all__ = [
    "INT64_VALUE",
    "MAX_DEPTH",
    "LocationTexts",
    "MalformedBody",
    "integers_as_text",
    "is_own",
    "location_text",
    "parse_request",
    "plain_integers",
    "print_reply",
    "print_response",
]

# 64-bit numbers as JSON has them: as texts. A request holds a thousand and more, nearly all written in one way.

_MAX_DIGITS_INT64 = 20  # of a number of 64 bits, with its sign


def plain_integers(texts: list[str]) -> list[int]:
    """Read numbers that are all written as Python writes them; return nothing if one is not, and the caller reads them
    one by one."""
    if max(map(len, texts)) > _MAX_DIGITS_INT64:
        return []
    try:
        numbers = list(map(int, texts))
    except ValueError:
        return []
    return numbers if _are_plain(texts) or list(map(str, numbers)) == texts else []


def _are_plain(texts: list[str]) -> bool:
    """Whether texts that int() takes are written as Python writes numbers: it takes "1_0", " 1", "+1" and "01", too.
    False for some that are, such as "0"; but in half the time that writing all numbers takes."""
    joined = "," + ",".join(texts)
    if ",0" in joined or "-0" in joined or not joined.isascii():
        return False
    return not joined.encode().translate(None, b",-0123456789")


MAX_DEPTH = 100
"""Objects and arrays that may be nested in a body; the contract itself needs fewer than 10."""
M = TypeVar("M", bound=Message)
_OWN_PACKAGE = "kvcm.v1"
INT64_VALUE: Final = "google.protobuf.Int64Value"
"""Full name of the message that makes a number unset or set; JSON has the number alone."""
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_MAX_DIGITS = 20  # of a number of 64 bits


class MalformedBody(ValueError):  # noqa: N818 - it says what the body is
    """The body is not the JSON form of the expected message; the text names the place and the error."""


def is_own(descriptor: Descriptor | None) -> bool:
    """Return whether a message is not one of the original's, so that its unknown fields and names are refused."""
    return descriptor is not None and descriptor.file.package == _OWN_PACKAGE


def parse_request(body: bytes, message_type: type[M]) -> M:
    """Makes a message out of a JSON body.

    Args:
        body: UTF-8 text that holds one JSON object.
        message_type: Class of the message to make.

    Raises:
        MalformedBody: The body cannot be read as such a message. Nothing else is raised.
    """
    message = message_type()
    try:
        _fill(message, _decoded(body))
    except _WrongValueError as wrong:
        raise MalformedBody(f"{wrong.place}: {wrong}") from None
    return message


_encode_json = msgspec.json.Encoder().encode  # a few fields in 0.3 us; json.dumps makes an encoder first, in 10


def print_response(message: Message) -> bytes:
    """Prints a message as one line of JSON in UTF-8."""
    return _encode_json(integers_as_text(message))


class _WrongValueError(ValueError):
    """An error in one value. `path` grows from the inside out while the exception rises."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.path: list[str] = []

    @property
    def place(self) -> str:
        return "".join(reversed(self.path)).lstrip(".") or "body"


# ── Text to plain values ─────────────────────────────────────────────────────────────────────────────────────────────


def _decoded(body: bytes) -> object:
    if not body:
        raise _WrongValueError("is empty; a message of only defaults is {}")
    try:
        text = body.decode()
        value: object = _DECODER.decode(text)
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise _WrongValueError(f"is not acceptable JSON: {error}") from None
    # Text with few brackets cannot be deep, and most requests have few: they need no walk.
    if text.count("{") + text.count("[") > MAX_DEPTH:
        _check_depth(value)
    return value


def _check_depth(value: object) -> None:
    """Refuses deep nesting wherever it is: how deep the decoder gets by itself depends on its caller's stack."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [child for parent in level for child in _children(parent) if type(child) in (dict, list)]
        if not level:
            return
    raise _too_deep()


def _children(value: Any) -> Any:
    return value.values() if type(value) is dict else value if type(value) is list else ()


def _too_deep() -> _WrongValueError:
    return _WrongValueError(f"is nested deeper than {MAX_DEPTH} levels")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuses a repeated key: readers disagree about which of its values counts."""
    found = dict(pairs)
    if len(found) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        repeated = next(key for key, count in counts.items() if count > 1)
        raise _WrongValueError(f"the key {repeated!r:.80} is given twice")
    return found


def _decimal(text: str) -> Decimal:
    """Keeps every digit: a float would turn one block key into another."""
    try:
        return Decimal(text)
    except InvalidOperation:
        raise _WrongValueError("a number's exponent is out of range") from None


def _refuse_constant(name: str) -> NoReturn:
    raise _WrongValueError(f"{name} is no JSON number")


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_float=_decimal, parse_constant=_refuse_constant)


# ── Plain values to fields ───────────────────────────────────────────────────────────────────────────────────────────


def _fill(message: Message, value: Any) -> None:
    if type(value) is not dict:
        raise _unexpected("an object", value)
    fields = _fields_by_key(message.DESCRIPTOR)
    given: set[str] = set()
    for key, item in value.items():
        field = fields.get(key)
        if field is None:
            _check_is_ignored(key, message.DESCRIPTOR)
            continue
        try:
            if field.name in given:
                raise _WrongValueError("is given in both spellings")  # noqa: TRY301 - the handler adds the place
            given.add(field.name)
            if item is not None:
                field.read(message, item)
        except _WrongValueError as wrong:
            wrong.path.append(f".{field.name}")
            raise


def _check_is_ignored(key: str, descriptor: Any) -> None:
    if is_own(descriptor):
        names = ", ".join(field.name for field in descriptor.fields)
        raise _WrongValueError(f"has no field {key!r:.80}: {names or 'none'} are allowed")


@dataclass(frozen=True, slots=True)
class _Field:
    """How one field is read and printed.

    `plain` is the Python type that needs no conversion; `convert` is None for messages, `show` for values shown as they
    are.
    """

    name: str
    is_repeated: bool
    has_presence: bool
    oneof: str | None
    plain: type | None
    convert: Callable[[Any], Any] | None
    show: Callable[[Any], Any] | None
    is_map: bool = False
    is_wrapper: bool = False

    def read(self, message: Message, item: Any) -> None:
        """Sets the field from a decoded value that is not null."""
        if self.oneof is not None and (other := message.WhichOneof(self.oneof)) is not None:
            raise _WrongValueError(f"excludes {other}, which is given too")
        if self.is_map:
            self._read_map(getattr(message, self.name), item)
        elif self.is_repeated:
            self._read_array(getattr(message, self.name), item)
        elif self.convert is None:
            part = getattr(message, self.name)
            part.SetInParent()
            _fill(part, item)
        elif self.is_wrapper:
            part = getattr(message, self.name)
            part.SetInParent()  # a wrapped 0 is not the same as none
            part.value = self.convert(item)
        elif (value := self.convert(item)) is not None:
            setattr(message, self.name, value)

    def _read_map(self, container: Any, items: Any) -> None:
        assert self.convert is not None
        if type(items) is not dict:
            raise _unexpected("an object", items)
        for key, item in items.items():
            try:
                container[_string(key)] = self.convert(item)
            except _WrongValueError as wrong:
                wrong.path.append(f"[{key!r:.80}]")
                raise

    def _read_array(self, container: Any, items: Any) -> None:
        if type(items) is not list:
            raise _unexpected("an array", items)
        if self.plain is None or not _extend_plain(container, items, self.plain):
            self._read_items(container, items)

    def _read_items(self, container: Any, items: list[Any]) -> None:
        for index, item in enumerate(items):
            try:
                if self.convert is None:
                    _fill(container.add(), item)
                elif (value := self.convert(item)) is not None:
                    container.append(value)
            except _WrongValueError as wrong:
                wrong.path.append(f"[{index}]")
                raise


def _extend_plain(container: Any, items: list[Any], plain: type) -> bool:
    """Takes a list whose values need no conversion in one step; False leaves the container empty."""
    kinds = set(map(type, items))
    if kinds == {str} and plain is int:
        items = plain_integers(items)
        if not items:
            return False
    elif not kinds <= {plain}:
        return False
    try:
        container.extend(items)
    except ValueError:  # Out of range, or no valid Unicode: the slow way finds out where.
        del container[:]
        return False
    return True


@cache
def _fields(descriptor: Descriptor) -> tuple[_Field, ...]:
    return tuple(_field(field) for field in descriptor.fields)


# Earlier spellings of the original, which clients of that time send.
_OLD_KEYS = {
    "kv_cache_manager.proto.admin.InstanceGroup": {
        "event_reporting_storage_candidates": "event_report_storage_candidates",
        "eventReportingStorageCandidates": "event_report_storage_candidates",
    },
}


@cache
def _fields_by_key(descriptor: Descriptor) -> dict[str, _Field]:
    """The fields under both spellings of their names."""
    camel = {source.json_name: field for source, field in zip(descriptor.fields, _fields(descriptor), strict=True)}
    found = camel | {field.name: field for field in _fields(descriptor)}
    return found | {key: found[name] for key, name in _OLD_KEYS.get(descriptor.full_name, {}).items()}


def _field(source: FieldDescriptor) -> _Field:
    if source.message_type is not None and source.message_type.GetOptions().map_entry:
        return _map_field(source)
    plain, convert, show = (None, _int64, _shown_wrapper) if _is_wrapper(source) else _kind(source)
    oneof = source.containing_oneof.name if source.containing_oneof else None
    return _Field(
        name=source.name,
        is_repeated=source.is_repeated,
        has_presence=source.has_presence,
        oneof=oneof,
        plain=plain,
        convert=convert,
        show=show,
        is_wrapper=_is_wrapper(source),
    )


def _map_field(source: FieldDescriptor) -> _Field:
    assert source.message_type is not None
    key, value = source.message_type.fields
    if key.type != FieldDescriptor.TYPE_STRING or value.type != FieldDescriptor.TYPE_STRING:
        raise TypeError(f"{source.full_name} is a map of a type that the contract did not use so far")
    return _Field(
        source.name,
        is_repeated=False,
        has_presence=False,
        oneof=None,
        plain=None,
        convert=_string,
        show=dict,
        is_map=True,
    )


def _is_wrapper(source: FieldDescriptor) -> bool:
    """Whether a field is a number that can be unset: JSON has the number alone."""
    return source.message_type is not None and source.message_type.full_name == INT64_VALUE


_Kind = tuple[type | None, Callable[[Any], Any] | None, Callable[[Any], Any] | None]
"""The Python type that needs no conversion, how to convert others, how to print."""


def _kind(source: FieldDescriptor) -> _Kind:
    if source.enum_type is not None:
        return None, _enum_reader(source.enum_type, is_own(source.containing_type)), _enum_printer(source.enum_type)
    if source.message_type is not None:
        return None, None, integers_as_text
    kind = _SCALARS.get(source.type)
    if kind is None:
        raise TypeError(f"{source.full_name} has a type that the contract did not use so far")
    return kind


# ── Single values ────────────────────────────────────────────────────────────────────────────────────────────────────

_INT32 = range(-(1 << 31), 1 << 31)
_INT64 = range(-(1 << 63), 1 << 63)
_UINT64 = range(1 << 64)
_NAMES: dict[type, str] = {
    dict: "an object",
    list: "an array",
    str: "a string",
    bool: "a boolean",
    int: "a number",
    Decimal: "a number",
    type(None): "null",
}


def _unexpected(wanted: str, value: object) -> _WrongValueError:
    return _WrongValueError(f"must be {wanted}, not {_NAMES[type(value)]}")


def _integer(value: Any, allowed: range, kind: str) -> int:
    if type(value) is str:
        value = _quoted_number(value)
    if type(value) is Decimal:
        value = _whole(value)
    if type(value) is not int:
        raise _unexpected("an integer", value)
    if value not in allowed:
        raise _WrongValueError(f"is out of the range of {kind}")
    return value


def _int32(value: Any) -> int:
    return _integer(value, _INT32, "int32")


def _int64(value: Any) -> int:
    return _integer(value, _INT64, "int64")


def _fixed64(value: Any) -> int:
    return _integer(value, _UINT64, "fixed64")


def _uint64(value: Any) -> int:
    return _integer(value, _UINT64, "uint64")


def _sfixed64(value: Any) -> int:
    return _integer(value, _INT64, "sfixed64")


def _bytes(value: Any) -> bytes:
    if type(value) is not str:
        raise _unexpected("a string in base64", value)
    try:
        return b64decode(value, validate=True)
    except ValueError as error:
        raise _WrongValueError(f"is not base64: {error}") from None


def _shown_bytes(value: bytes) -> str:
    return b64encode(value).decode()


def _quoted_number(text: str) -> Decimal:
    if not _NUMBER.fullmatch(text):
        raise _WrongValueError("must be a number, or a string that holds nothing but a decimal number")
    return _decimal(text)


def _whole(value: Decimal) -> int:
    """1.0 and 1e3 are integers. The length is checked first: 1e999999999 would fill the memory."""
    if value and value.adjusted() >= _MAX_DIGITS:
        raise _WrongValueError("is out of the range of integers")
    whole = int(value) if value else 0
    if whole != value:
        raise _WrongValueError("must be an integer, not a fraction")
    return whole


def _double(value: Any) -> float:
    if type(value) is str:
        if value in _NON_FINITE:
            return _NON_FINITE[value]
        value = _quoted_number(value)
    if type(value) not in (int, Decimal):
        raise _unexpected("a number", value)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if math.isinf(number):
        raise _WrongValueError("is out of the range of double")
    return number


def _bool(value: Any) -> bool:
    if type(value) is not bool:
        raise _unexpected("true or false", value)
    return value


def _string(value: Any) -> str:
    if type(value) is not str:
        raise _unexpected("a string", value)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _WrongValueError("is not valid Unicode: it has half of a surrogate pair") from None
    return value


def _enum_reader(enum: EnumDescriptor, is_strict: bool) -> Callable[[Any], int | None]:
    numbers = {value.name: value.number for value in enum.values}

    def read(value: Any) -> int | None:
        """None for an unknown name that is ignored."""
        if type(value) is not str:
            return _int32(value)
        if is_strict and value not in numbers:
            raise _WrongValueError(f"is {value!r:.80}, must be one of {', '.join(numbers)}")
        return numbers.get(value)

    return read


# ── Messages to plain values ─────────────────────────────────────────────────────────────────────────────────────────


def integers_as_text(message: Message) -> dict[str, Any]:
    """Returns the values that a message is printed as."""
    values: dict[str, Any] = {}
    for field in _fields(message.DESCRIPTOR):
        name, show = field.name, field.show
        if field.has_presence and not message.HasField(name):
            continue
        value = getattr(message, name)
        if field.is_repeated:
            values[name] = list(value) if show is None else [show(item) for item in value]
        else:
            values[name] = value if show is None else show(value)
    return values


def _shown_wrapper(wrapper: Any) -> str:
    return str(wrapper.value)


def _shown_double(value: float) -> float | str:
    """JSON has no numbers for these three; proto3 JSON writes their names."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


_SCALARS: Final[dict[int, _Kind]] = {
    FieldDescriptor.TYPE_INT32: (int, _int32, None),
    FieldDescriptor.TYPE_INT64: (int, _int64, str),
    FieldDescriptor.TYPE_FIXED64: (int, _fixed64, str),
    FieldDescriptor.TYPE_UINT64: (int, _uint64, str),
    FieldDescriptor.TYPE_SFIXED64: (int, _sfixed64, str),
    FieldDescriptor.TYPE_STRING: (str, _string, None),
    FieldDescriptor.TYPE_BYTES: (None, _bytes, _shown_bytes),
    FieldDescriptor.TYPE_BOOL: (bool, _bool, None),
    FieldDescriptor.TYPE_DOUBLE: (None, _double, _shown_double),
}


def _enum_printer(enum: EnumDescriptor) -> Callable[[int], str | int]:
    names = {value.number: value.name for value in enum.values}
    return lambda number: names.get(number, number)


# Encoded locations as JSON, with no message per block: the same text as that of `print_response`.
#
# An answer to a match is a join of encoded locations, and so is its JSON form a join of texts. Hot blocks are read
# again and again: the texts of the latest are cached by their bytes, which never change and keep their hash, so a
# cached location costs one lookup in C. Addresses of fresh blocks are printed once and not cached. A location with
# fields that this section does not know goes through the general codec.

_FIELD = "locations"  # the one that the encoded fields of every reply belong to
_READ_TAG = 0x12  # field 2, of answers to reads; that of StartWriteCache is another one
_TYPE_TAG, _SIZE_TAG, _SPEC_TAG, _CHECKSUM_TAG = 0x08, 0x10, 0x1A, 0x20
_NAME_TAG, _URI_TAG = 0x0A, 0x12
_SPEC_CHECKSUM_TAG = b"\xc1\x3e"
_EVENT_HASH_TAG, _EVENT_HASH_TAG_END = 0xC0, 0x3E  # of two bytes
_SPEC_CHECKSUM_SIZE = 10  # of the field, tag included
_NEGATIVE = 1 << 31  # from here on numbers of 32 bits wrap around
_BATCH_LOCATIONS = 1024  # locations printed before other requests get their turn
_BATCH_BYTES = 256 << 10  # the same, in bytes as encoded: some milliseconds
_MAX_CACHED_BYTES = 64 << 20
_MAX_CACHED_HEADS = 4096
_quoted = json.encoder.encode_basestring
_TYPES = {value.number: f'"{value.name}"' for value in pb.StorageType.DESCRIPTOR.values}


class LocationTexts:
    """Texts of the locations that were read lately.

    Args:
        most_bytes: of the cache, about; half of it may be texts that are read no more.
    """

    def __init__(self, most_bytes: int = _MAX_CACHED_BYTES) -> None:
        self._memo = ChunkCache(location_text, most_bytes)

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
        reply: the answer; where its message has `locations`, its encoded fields are their entries, and there are no
            others.
        texts: of locations.
    """
    if not reply.chunks or _FIELD not in reply.message.DESCRIPTOR.fields_by_name:
        return print_response(reply.complete())
    printed: list[bytes] = []
    most = min(_BATCH_LOCATIONS, 1 + _BATCH_BYTES // len(reply.chunks[0]))  # those of one answer are alike
    for start in range(0, len(reply.chunks), most):
        if start:
            await asyncio.sleep(0)
        printed += texts.of(reply.chunks[start : start + most])
    rest: dict[str, Any] = integers_as_text(reply.message)
    del rest[_FIELD]
    behind = _encode_json(rest)
    printed[0] = b'{"%s":[%s' % (
        _FIELD.encode(),
        printed[0],
    )  # so that all is copied once: an answer may be of megabytes
    printed[-1] += b"]," + behind[1:]
    return b",".join(printed)


def location_text(chunk: bytes) -> bytes:
    """Return a `CacheLocation` that is encoded as a repeated field (1 to 15) of an answer as JSON."""
    size, position = read_varint(chunk, 1)
    kind = spec_size = checksum = event_hash = 0
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
            checksum = value
        elif tag == _EVENT_HASH_TAG and value == _EVENT_HASH_TAG_END:
            event_hash, position = read_varint(chunk, position)
        else:
            return _by_message(pb.CacheLocation, chunk[-size:])
    if max(kind, spec_size) >= _NEGATIVE:
        return _by_message(pb.CacheLocation, chunk[-size:])
    name = _TYPES.get(kind, kind)
    numbers = f'"checksum":"{signed64(checksum)}","event_hash":"{signed64(event_hash)}"'
    return f'{{"type":{name},"spec_size":{spec_size},"location_specs":[{",".join(specs)}],{numbers}}}'.encode()


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
    if len(_heads) >= _MAX_CACHED_HEADS:
        _heads.clear()
    head = _heads[encoded_name] = f'{{"name":{_quoted(encoded_name[2:].decode())},"uri":'
    return head


def _by_message(message_type: type[Any], fields: bytes) -> bytes:
    return print_response(message_type.FromString(fields))
