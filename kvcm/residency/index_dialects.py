"""The dialects of the index API (RFC 1403): many encodings of one request and answer.

Five dialects exist, none of which is a subset of another (wire_later 3):

=============  ============  ==========================================  =============================================
dialect        model field   answer of a query                           numbers
=============  ============  ==========================================  =============================================
`january`      model         {"data": {instance: …}}, GPU, CPU, DISK     independent media
`spring`       model         {tenant: {instance: …}}, GPU, CPU, DISK     independent media
`conductor`    model         {"instances": {instance: …}}, gpu, cpu, …   ordered tiers, with those of each rank
`dynamo`       model_name    scores, frequencies, instances              ordered tiers; instances are integers
=============  ============  ==========================================  =============================================

Conductor speaks JSON and, since August 2026, msgpack. A request with the field `model_name` is Dynamo's; any other is
Conductor's, unless a setting or the query parameter `dialect` names another one. Fields that are not known are ignored.
All numbers are tokens. `storage` is a medium of ours, and its blocks count as `disk`, too: routers that know three
tiers see them there.

Bodies are read field by field: unknown ones are skipped and never become objects.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from hashlib import blake2b
from typing import Annotated, Any, Final, Protocol

import msgspec
import numpy as np

__all__ = [
    "Dialect",
    "Encoding",
    "ErrorReason",
    "Fields",
    "Query",
    "RankMatch",
    "Registration",
    "Removal",
    "RequestError",
    "dialect_named",
    "encode",
    "encoding_of",
    "error_answer",
    "global_view_answer",
    "group_of_tenant",
    "hash_query_of",
    "query_answer",
    "read_fields",
    "registered_answer",
    "registration_of",
    "removal_of",
    "removed_answer",
    "services_answer",
    "token_query_of",
    "worker_id",
    "workers_answer",
]

_DEFAULT_TENANT: Final = "default"
_MOST_FIELDS: Final = 1024
_MOST_SIGNS: Final = 4096  # of JSON: colons, and commas beside those between tokens
_MOST_SCALAR_BYTES: Final = 8192
_MAX_TOKEN: Final = (1 << 32) - 1
_MIN_HASH, _MAX_HASH = -(1 << 63), (1 << 64) - 1
_MAX_INT32: Final = (1 << 31) - 1
_HASH_TEXT: Final = re.compile(r"-?[0-9]{1,20}|0[xX][0-9A-Fa-f]{1,16}")
_PLACE: Final = re.compile(r"at `\$\[(\d+)\]")
_ID_BITS: Final = 53  # that every reader of JSON keeps


class Dialect(Enum):
    """Whose words an answer has."""

    JANUARY = "january"
    SPRING = "spring"
    CONDUCTOR = "conductor"
    DYNAMO = "dynamo"


class Encoding(Enum):
    """How a body is written down."""

    JSON = "application/json"
    MSGPACK = "application/msgpack"


class ErrorReason(Enum):
    """Conductor's reasons of a refusal."""

    MISSING = "missing"
    INVALID_TYPE = "invalid_type"
    OUT_OF_RANGE = "out_of_range"
    INVALID_REGISTRATION = "invalid_registration"
    INVALID_JSON = "invalid_json"
    INVALID_MSGPACK = "invalid_msgpack"
    UNSUPPORTED_CONTENT_TYPE = "unsupported_content_type"


class RequestError(Exception):
    """A request is not one of the API.

    Args:
        text: the error and the allowed values.
        reason: of the refusal.
        field: that is wrong, "" for the whole body.
        index: of the entry in it, None for the whole field.
    """

    def __init__(self, text: str, reason: ErrorReason, field: str = "", index: int | None = None) -> None:
        super().__init__(text)
        self.reason = reason
        self.field = field
        self.index = index


# Reading.


def encoding_of(content_type: str) -> Encoding:
    """Return the encoding of a body.

    Raises:
        RequestError: it is another one.
    """
    kind = content_type.partition(";")[0].strip().lower()
    if kind in {"application/msgpack", "application/x-msgpack"}:
        return Encoding.MSGPACK
    if kind == "application/json":
        return Encoding.JSON
    raise RequestError(
        f"content-type is {content_type[:80]!r}, must be application/json or application/msgpack",
        ErrorReason.UNSUPPORTED_CONTENT_TYPE,
    )


def dialect_named(name: str) -> Dialect | None:
    """Return the dialect that a query parameter names, None for "".

    Raises:
        RequestError: there is no such dialect.
    """
    if not name:
        return None
    try:
        return Dialect(name)
    except ValueError:
        allowed = ", ".join(each.value for each in Dialect)
        text = f"query parameter dialect is {name[:80]!r}, must be one of {allowed}"
        raise RequestError(text, ErrorReason.OUT_OF_RANGE, "dialect") from None


_READERS: Final[Mapping[Encoding, Any]] = {
    Encoding.JSON: msgspec.json,
    Encoding.MSGPACK: msgspec.msgpack,
}
_MAPS: Final = {encoding: module.Decoder(dict[str, msgspec.Raw]) for encoding, module in _READERS.items()}
_TOKENS: Final = {
    encoding: module.Decoder(list[Annotated[int, msgspec.Meta(ge=0, le=_MAX_TOKEN)]])
    for encoding, module in _READERS.items()
}
_HASHES: Final = {encoding: module.Decoder(list[int | str]) for encoding, module in _READERS.items()}


def read_fields(body: bytes, encoding: Encoding, most_values: int) -> Fields:
    """Return the fields of a body.

    Args:
        body: of the request.
        encoding: of it.
        most_values: tokens or hashes that it may have.

    Raises:
        RequestError: it is no map, or has more values than any request.
    """
    reason = ErrorReason.INVALID_JSON if encoding is Encoding.JSON else ErrorReason.INVALID_MSGPACK
    if encoding is Encoding.JSON:
        is_bulky = body.count(b":") > _MOST_SIGNS or body.count(b",") > most_values + _MOST_SIGNS
    else:
        is_bulky = _entries(body) > _MOST_FIELDS
    if is_bulky:
        raise RequestError("the body has more values than any request", reason)
    try:
        return Fields(_MAPS[encoding].decode(body), encoding, most_values)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise RequestError(f"the body is no map of fields: {str(error)[:200]}", reason) from None


def _entries(data: bytes | msgspec.Raw) -> int:
    """Return how many entries a msgpack array or map has; 0 for something else."""
    head = bytes(memoryview(data)[:5])
    if not head:
        return 0
    if 0x80 <= head[0] <= 0x9F:
        return head[0] & 0x0F
    if head[0] in {0xDC, 0xDE}:
        return int.from_bytes(head[1:3], "big")
    return int.from_bytes(head[1:5], "big") if head[0] in {0xDD, 0xDF} else 0


class Fields:
    """The fields of a request, which are decoded when they are read.

    Args:
        raw: encoded values by name.
        encoding: of them.
        most_values: entries that a list may have.
    """

    def __init__(self, raw: Mapping[str, msgspec.Raw], encoding: Encoding, most_values: int) -> None:
        self._raw = raw
        self._encoding = encoding
        self._most_values = most_values

    def has(self, name: str) -> bool:
        """Return whether a field is there and not null."""
        return name in self._raw and bytes(memoryview(self._raw[name])[:4]) not in {b"null", b"\xc0"}

    @cached_property
    def is_dynamo(self) -> bool:
        """Whether the request is one of Dynamo's."""
        return self.has("model_name") and not (self.has("model") or self.has("modelname"))

    def first(self, *names: str) -> str:
        """Return the first of some names that is there, the first of all when none is."""
        return next((name for name in names if self.has(name)), names[0])

    def text(self, name: str, default: str | None = None) -> str:
        """Return a text; without a default it must be there, and not be empty.

        Raises:
            RequestError: it is missing, or no text.
        """
        value: object = self._scalar(name, default)
        if not isinstance(value, str):
            raise _wrong_type(name, "a text")
        if default is None and not value:
            raise RequestError(f"{name} is empty, must be a text", ErrorReason.OUT_OF_RANGE, name)
        try:
            value.encode()
        except UnicodeEncodeError:
            raise RequestError(f"{name} is no valid text", ErrorReason.OUT_OF_RANGE, name) from None
        return value

    def integer(self, name: str, least: int, default: int | None = None, most: int = _MAX_INT32) -> int:
        """Return an integer; without a default it must be there.

        Raises:
            RequestError: it is missing, no integer, or out of range.
        """
        value = self._scalar(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise _wrong_type(name, "an integer")
        if not least <= value <= most:
            raise RequestError(
                f"{name} is out of range, must be from {least} to {most}", ErrorReason.OUT_OF_RANGE, name
            )
        return value

    def instance_id(self, *, is_integer: bool) -> str | int:
        """Return the id of an engine, a text or an integer.

        Raises:
            RequestError: it is missing or neither.
        """
        if is_integer or isinstance(self._scalar("instance_id", None), int):
            return self.integer("instance_id", 0, most=_MAX_HASH)
        return self.text("instance_id")

    def document(self, name: str) -> dict[str, Any] | None:
        """Return a map, None for none.

        Raises:
            RequestError: it is no map.
        """
        if not self.has(name):
            return None
        value = self._scalar(name, None)
        if not isinstance(value, dict):
            raise _wrong_type(name, "a map")
        return value

    def tokens(self, name: str) -> list[int]:
        """Return tokens: an array, or bytes with 32 bits each, little endian.

        Raises:
            RequestError: they are missing, too many, or no tokens.
        """
        raw = self._required(name)
        if self._encoding is Encoding.MSGPACK and bytes(memoryview(raw)[:1]) in {b"\xc4", b"\xc5", b"\xc6"}:
            return self._packed_tokens(name, raw)
        found: list[int] = self._list(name, raw, _TOKENS[self._encoding], f"from 0 to {_MAX_TOKEN}")
        return found

    def _packed_tokens(self, name: str, raw: msgspec.Raw) -> list[int]:
        data: bytes = msgspec.msgpack.decode(raw, type=bytes)
        if len(data) % 4:
            raise RequestError(
                f"{name} has {len(data)} bytes, must have 4 for each token", ErrorReason.INVALID_TYPE, name
            )
        if len(data) // 4 > self._most_values:
            raise self._too_many(name, len(data) // 4)
        tokens = np.frombuffer(data, "<i4")
        if len(tokens) and int(tokens.min()) < 0:
            index = int((tokens < 0).argmax())
            raise RequestError(f"{name}[{index}] is negative, must be a token", ErrorReason.OUT_OF_RANGE, name, index)
        found: list[int] = tokens.tolist()
        return found

    def hashes(self, name: str) -> list[int]:
        """Return hashes of 64 bits as signed integers; they may be integers of either sign, or texts, decimal or
        hexadecimal behind 0x.

        Raises:
            RequestError: they are missing, too many, or no hashes.
        """
        rule = "a hash of 64 bits: an integer, or its decimal or 0x hexadecimal text"
        found = []
        for index, value in enumerate(self._list(name, self._required(name), _HASHES[self._encoding], rule)):
            number = _hash_of(value)
            if not _MIN_HASH <= number <= _MAX_HASH:
                raise RequestError(f"{name}[{index}] must be {rule}", ErrorReason.OUT_OF_RANGE, name, index)
            found.append(number - (1 << 64) if number >= 1 << 63 else number)
        return found

    def _list(self, name: str, raw: msgspec.Raw, decoder: Any, rule: str) -> list[Any]:
        if self._encoding is Encoding.MSGPACK and _entries(raw) > self._most_values:
            raise self._too_many(name, _entries(raw))
        try:
            values: list[Any] = decoder.decode(raw)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise _wrong_entry(name, str(error), rule) from None
        if len(values) > self._most_values:
            raise self._too_many(name, len(values))
        return values

    def _too_many(self, name: str, count: int) -> RequestError:
        text = f"{name} has {count} entries, at most {self._most_values} are allowed"
        return RequestError(text, ErrorReason.OUT_OF_RANGE, name)

    def _required(self, name: str) -> msgspec.Raw:
        if not self.has(name):
            raise RequestError(f"{name} is missing", ErrorReason.MISSING, name)
        return self._raw[name]

    def _scalar(self, name: str, default: Any) -> object:
        if not self.has(name):
            if default is None:
                raise RequestError(f"{name} is missing", ErrorReason.MISSING, name)
            return default
        raw = self._raw[name]
        if len(memoryview(raw)) > _MOST_SCALAR_BYTES:
            text = f"{name} has more than {_MOST_SCALAR_BYTES} bytes"
            raise RequestError(text, ErrorReason.OUT_OF_RANGE, name)
        try:
            return _READERS[self._encoding].decode(raw)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            raise _wrong_type(name, "a value") from None


def _wrong_type(name: str, wanted: str) -> RequestError:
    return RequestError(f"{name} has a wrong type, must be {wanted}", ErrorReason.INVALID_TYPE, name)


def _wrong_entry(name: str, message: str, rule: str) -> RequestError:
    """Return the error of a list, from msgspec's text: it names the entry, and a type where that is wrong."""
    place = _PLACE.search(message)
    index = int(place[1]) if place else None
    is_range = ">=" in message or "<=" in message or "out of range" in message
    shown = name if index is None else f"{name}[{index}]"
    reason = ErrorReason.OUT_OF_RANGE if is_range else ErrorReason.INVALID_TYPE
    return RequestError(f"{shown} is wrong, each entry must be an integer, {rule}", reason, name, index)


def _hash_of(value: int | str) -> int:
    """Return a hash, or a number that is none."""
    if isinstance(value, int):
        return value
    if not _HASH_TEXT.fullmatch(value):
        return _MAX_HASH + 1
    return int(value, 16 if value[:2].lower() == "0x" else 10)


# Requests.


@dataclass(frozen=True, slots=True)
class Query:
    """A prompt, and which instances are asked.

    Attributes:
        dialect: of the answer.
        model_name: of the instances.
        tenant: as the request calls it; "default" for any.
        token_ids: of the prompt; none with `hashes`.
        hashes: rolling ones of its blocks.
        block_size: of the instances; 0 for any.
        lora_name: adapter.
        lora_id: its number, None for none.
        cache_salt: of the request.
        engine: that is wanted, "" for all.
    """

    dialect: Dialect
    model_name: str
    tenant: str = _DEFAULT_TENANT
    token_ids: Sequence[int] = ()
    hashes: Sequence[int] = ()
    block_size: int = 0
    lora_name: str = ""
    lora_id: int | None = None
    cache_salt: str = ""
    engine: str = ""

    @property
    def group(self) -> str:
        """The instance group, "" for any."""
        return group_of_tenant(self.tenant)


def group_of_tenant(tenant: str) -> str:
    """Return the instance group of a tenant, "" for any."""
    return "" if tenant == _DEFAULT_TENANT else tenant


def _tenant_of(fields: Fields) -> str:
    return fields.text(fields.first("tenant_id", "routing_group"), _DEFAULT_TENANT) or _DEFAULT_TENANT


def token_query_of(fields: Fields, named: Dialect | None = None, usual: Dialect = Dialect.CONDUCTOR) -> Query:
    """Return a query by tokens.

    Args:
        fields: of the request.
        named: dialect that the client named, None to find it in the fields.
        usual: dialect of a request that is not Dynamo's.

    Raises:
        RequestError: a field is missing or wrong.
    """
    return _query_of(fields, _dialect_of(fields, named, usual), {"token_ids": fields.tokens("token_ids")})


def hash_query_of(fields: Fields, named: Dialect | None = None, usual: Dialect = Dialect.CONDUCTOR) -> Query:
    """Return a query by rolling hashes; see `token_query_of`.

    Raises:
        RequestError: a field is missing or wrong; or hashes are local ones, which say nothing of a block's place.
    """
    name = fields.first("seq_hashes", "block_hash")
    if fields.has("block_hashes") and not fields.has(name):
        raise RequestError(
            "block_hashes are local hashes of single blocks, which no block key follows from: give seq_hashes, the "
            "rolling hashes, or POST /query with token_ids",
            ErrorReason.OUT_OF_RANGE,
            "block_hashes",
        )
    return _query_of(fields, _dialect_of(fields, named, usual), {"hashes": fields.hashes(name)})


def _dialect_of(fields: Fields, named: Dialect | None, usual: Dialect) -> Dialect:
    return named or (Dialect.DYNAMO if fields.is_dynamo else usual)


def _query_of(fields: Fields, dialect: Dialect, prompt: Mapping[str, Any]) -> Query:
    is_dynamo = dialect is Dialect.DYNAMO
    names = ("model_name", "model", "modelname") if is_dynamo else ("model", "modelname", "model_name")
    model_name = fields.text(fields.first(*names))
    if fields.has("lora_id") and fields.text("lora_name", ""):
        text = "lora_id and lora_name are both given, must be one of the two"
        raise RequestError(text, ErrorReason.OUT_OF_RANGE, "lora_id")
    return Query(
        dialect=dialect,
        model_name=model_name,
        tenant=_tenant_of(fields),
        block_size=0 if is_dynamo and not fields.has("block_size") else fields.integer("block_size", 1),
        lora_name=fields.text("lora_name", ""),
        lora_id=fields.integer("lora_id", 0, most=1 << 62) if fields.has("lora_id") else None,
        cache_salt=fields.text("cache_salt", ""),
        engine=str(fields.instance_id(is_integer=False)) if fields.has("instance_id") else "",
        **prompt,
    )


@dataclass(frozen=True, slots=True)
class Registration:
    """A publisher to register.

    Attributes:
        dialect: of the answer: Conductor's or Dynamo's.
        instance_id: of the engine, as it was given.
        model_name: of its model.
        tenant: as the request calls it.
        endpoint: of its events.
        replay_endpoint: of its replays.
        type: kind of publisher.
        lora_name: adapter.
        block_size: tokens of a block.
        rank: data-parallel rank.
        hash_profile: as it was given, None for none.
    """

    dialect: Dialect
    instance_id: str | int
    model_name: str
    tenant: str
    endpoint: str
    block_size: int
    rank: int
    replay_endpoint: str = ""
    type: str = ""
    lora_name: str = ""
    hash_profile: Mapping[str, str] | None = None

    @property
    def group(self) -> str:
        """The instance group, "" for any."""
        return group_of_tenant(self.tenant)


_TYPES: Final = ("vLLM", "SGLang", "Mooncake")
_PROFILE_FIELDS: Final = ("strategy", "algorithm", "python_hash_seed", "index_projection")


def registration_of(fields: Fields) -> Registration:
    """Return what a request registers.

    Raises:
        RequestError: a field is missing or wrong.
    """
    is_dynamo = fields.is_dynamo
    kind = fields.text("type", "" if is_dynamo else None)
    if kind and kind not in _TYPES:
        raise _unfit("type", f"type is {kind[:80]!r}, must be one of {', '.join(_TYPES)}")
    if fields.has("cache_group") and fields.integer("cache_group", 0) != 0:
        raise _unfit("cache_group", "cache_group must be 0 or null")
    profile = _profile_of(fields)
    if profile is not None and fields.text("additionalsalt", ""):
        raise _unfit("additionalsalt", "additionalsalt has no effect: queries have a cache_salt")
    return Registration(
        dialect=Dialect.DYNAMO if is_dynamo else Dialect.CONDUCTOR,
        instance_id=fields.instance_id(is_integer=is_dynamo),
        model_name=fields.text(_model_field(fields)),
        tenant=_tenant_of(fields),
        endpoint=fields.text("endpoint"),
        replay_endpoint=fields.text("replay_endpoint", ""),
        type=kind,
        lora_name=fields.text("lora_name", ""),
        block_size=fields.integer("block_size", 1),
        rank=fields.integer("dp_rank", 0, 0 if is_dynamo else None),
        hash_profile=profile,
    )


def _model_field(fields: Fields) -> str:
    return "model_name" if fields.is_dynamo else fields.first("modelname", "model")


def _profile_of(fields: Fields) -> Mapping[str, str] | None:
    given = fields.document("hash_profile")
    if given is None:
        return None
    found = {}
    for name in _PROFILE_FIELDS:
        value = given.get(name)
        if value is None:
            raise RequestError(f"hash_profile.{name} is missing", ErrorReason.MISSING, f"hash_profile.{name}")
        if not isinstance(value, str):
            raise _wrong_type(f"hash_profile.{name}", "a text")
        found[name] = value
    return found


def _unfit(name: str, text: str) -> RequestError:
    return RequestError(text, ErrorReason.INVALID_REGISTRATION, name)


@dataclass(frozen=True, slots=True)
class Removal:
    """Registrations to remove.

    Attributes:
        dialect: of the answer: Conductor's or Dynamo's.
        engine: of them.
        tenant: as the request calls it; "default" for any.
        model_name: of them, "" for all.
        rank: of them, None for all.
    """

    dialect: Dialect
    engine: str
    tenant: str
    model_name: str
    rank: int | None

    @property
    def group(self) -> str:
        """The instance group, "" for any."""
        return group_of_tenant(self.tenant)


def removal_of(fields: Fields) -> Removal:
    """Return what a request removes.

    Raises:
        RequestError: a field is missing or wrong.
    """
    is_dynamo = fields.is_dynamo
    engine = str(fields.instance_id(is_integer=is_dynamo))
    is_of_all_ranks = is_dynamo and not fields.has("dp_rank")
    return Removal(
        dialect=Dialect.DYNAMO if is_dynamo else Dialect.CONDUCTOR,
        engine=engine,
        tenant=_tenant_of(fields),
        model_name=fields.text("model_name") if is_dynamo else fields.text(_model_field(fields), ""),
        rank=None if is_of_all_ranks else fields.integer("dp_rank", 0),
    )


# Answers.


class RankMatch(Protocol):
    """What one rank holds of a prompt, in tokens; the message of MatchModel is one."""

    engine: str
    rank: int
    gpu_tokens: int
    host_tokens: int
    disk_tokens: int
    matched_tokens: int
    matched_gpu_tokens: int
    matched_host_tokens: int
    matched_disk_tokens: int
    storage_tokens: int
    block_size: int


@dataclass(slots=True)
class _EngineMatches:
    """What the ranks of an engine hold; of several instances the most."""

    storage: int = 0
    matched: int = 0
    ordered: dict[int, tuple[int, ...]] = field(default_factory=dict)
    independent: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def add(self, match: RankMatch) -> None:
        rank = match.rank
        ordered = (match.gpu_tokens, match.host_tokens, match.disk_tokens)
        independent = (match.matched_gpu_tokens, match.matched_host_tokens, match.matched_disk_tokens)
        self.ordered[rank] = _most([ordered, self.ordered.get(rank, ordered)])
        self.independent[rank] = _most([independent, self.independent.get(rank, independent)])
        self.storage = max(self.storage, match.storage_tokens)
        self.matched = max(self.matched, match.matched_tokens)


def _most(counts: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(map(max, zip(*counts, strict=True)))


def encode(value: Any, encoding: Encoding) -> bytes:
    """Return an answer as a body."""
    body: bytes = _READERS[encoding].encode(value)
    return body


def query_answer(query: Query, matches: Iterable[RankMatch]) -> dict[str, Any]:
    """Return the answer to a query."""
    found: defaultdict[str, _EngineMatches] = defaultdict(_EngineMatches)
    rows = list(matches)
    for match in rows:
        found[match.engine].add(match)
    if query.dialect is Dialect.DYNAMO:
        return _dynamo_answer(found, rows)
    if query.dialect is Dialect.CONDUCTOR:
        return {"instances": {engine: _conductor_entry(each) for engine, each in found.items()}}
    envelope = "data" if query.dialect is Dialect.JANUARY else query.tenant
    return {envelope: {engine: _rfc_entry(each) for engine, each in found.items()}}


def _ordered_entry(of_engine: _EngineMatches) -> dict[str, Any]:
    gpu, cpu, disk = _most(of_engine.ordered.values())
    ranks = {str(rank): counts[0] for rank, counts in of_engine.ordered.items()}
    return {
        "longest_matched": disk,
        "gpu": gpu,
        "dp": ranks,
        "cpu": cpu,
        "disk": disk,
        "storage": of_engine.storage,
    }


def _conductor_entry(of_engine: _EngineMatches) -> dict[str, Any]:
    ranks = {
        str(rank): dict(zip(("gpu", "cpu", "disk"), counts, strict=True)) for rank, counts in of_engine.ordered.items()
    }
    return _ordered_entry(of_engine) | {"rank_matches": ranks}


def _rfc_entry(of_engine: _EngineMatches) -> dict[str, Any]:
    gpu, cpu, disk = _most(of_engine.independent.values())
    ranks = {str(rank): counts[0] for rank, counts in of_engine.independent.items()}
    return {
        "longest_matched": of_engine.matched,
        "GPU": gpu,
        "DP": ranks,
        "CPU": cpu,
        "DISK": disk,
        "STORAGE": of_engine.storage,
    }


def _dynamo_answer(found: Mapping[str, _EngineMatches], rows: Sequence[RankMatch]) -> dict[str, Any]:
    entries = {str(worker_id(engine)): _ordered_entry(each) for engine, each in found.items()}
    depths = np.array([match.gpu_tokens // max(1, match.block_size) for match in rows], np.int64)
    most = int(depths.max(initial=0))
    # At each depth, the ranks that hold the prompt so far.
    frequencies = np.cumsum(np.bincount(depths, minlength=most + 1)[::-1])[::-1][1:]
    return {
        "scores": {worker: entry["dp"] for worker, entry in entries.items()},
        "frequencies": frequencies.tolist(),
        "instances": entries,
    }


def worker_id(engine: str) -> int:
    """Return the integer that stands for an engine in Dynamo's dialect: its name where that is one, else a hash of 53
    bits, which /workers lists with the name."""
    if engine.isascii() and engine.isdecimal() and str(int(engine)) == engine and int(engine) <= _MAX_HASH:
        return int(engine)
    return int.from_bytes(blake2b(engine.encode(), digest_size=8).digest(), "big") >> (64 - _ID_BITS)


def error_answer(error: RequestError, dialect: Dialect = Dialect.CONDUCTOR) -> dict[str, Any]:
    """Return the body of a refusal."""
    if dialect is Dialect.DYNAMO:
        return {"error": str(error)}
    shown: dict[str, Any] = {"error": str(error), "reason": error.reason.value}
    if error.field:
        shown["field"] = error.field
    if error.index is not None:
        shown["index"] = error.index
    return shown


def registered_answer(registration: Registration) -> tuple[int, dict[str, Any]]:
    """Return status and body of a registration that was made."""
    if registration.dialect is Dialect.DYNAMO:
        return 201, {"status": "ok"}
    return 200, {"status": "registered successfully", "instance_id": registration.instance_id}


def removed_answer(removal: Removal, removed: Sequence[Any]) -> tuple[int, dict[str, Any]]:
    """Return status and body of a removal.

    Args:
        removal: as it was asked for.
        removed: publishers with `engine`, `instance_group` and `rank`.
    """
    if removal.dialect is Dialect.DYNAMO:
        if not removed:
            return 404, {"error": f"worker {removal.engine} of model {removal.model_name!r} is not registered"}
        return 200, {"status": "ok"}
    names = [f"{each.engine}|{each.instance_group or _DEFAULT_TENANT}|{each.rank}" for each in removed]
    return 200, {"status": "unregistered successfully", "removed_instances": names}


# Lists. Publishers and contexts are those of DescribeIndex.

_STATUS: Final = {"PUBLISHER_PENDING": "pending", "PUBLISHER_ACTIVE": "active", "PUBLISHER_QUIET": "paused"}
_RANK_OF_STATUS: Final = ("failed", "pending", "active", "paused")  # the first one of its ranks counts for a worker


def services_answer(publishers: Iterable[Any]) -> dict[str, Any]:
    """Return the answer of /services: Conductor's names, and three of ours."""
    services = [
        {
            "Endpoint": each.endpoint,
            "ReplayEndpoint": each.replay_endpoint,
            "Type": each.type,
            "ModelName": each.model_name,
            "LoraName": each.lora_name,
            "TenantID": each.instance_group or _DEFAULT_TENANT,
            "InstanceID": each.engine,
            "BlockSize": each.block_size,
            "DPRank": each.rank,
            "CacheGroup": None,
            "HashProfile": _profile_document(each.hash_profile) if each.HasField("hash_profile") else None,
            "KvcmInstance": each.instance_id,
            "State": _status_of(each),
            "Problem": each.problem,
        }
        for each in publishers
    ]
    return {"count": len(services), "services": services}


def _profile_document(profile: Any) -> dict[str, str]:
    return {name: getattr(profile, name) for name in (*_PROFILE_FIELDS, "root_digest")}


def _status_of(publisher: Any) -> str:
    return _STATUS[_name(publisher, "state")]


def _name(message: Any, name: str) -> str:
    known: str = message.DESCRIPTOR.fields_by_name[name].enum_type.values_by_number[getattr(message, name)].name
    return known


def workers_answer(publishers: Iterable[Any], contexts: Iterable[Any]) -> list[dict[str, Any]]:
    """Return the answer of /workers: registered ones, and engines that report without a registration."""
    found: dict[str, dict[str, Any]] = {}
    for each in publishers:
        worker = found.setdefault(each.engine, _worker(each.engine, "zmq"))
        listener = {"endpoint": each.endpoint, "status": _status_of(each)}
        worker["endpoints"][str(each.rank)] = each.endpoint
        worker["listeners"][str(each.rank)] = listener | ({"last_error": each.problem} if each.problem else {})
        worker["status"] = min(worker["status"], listener["status"], key=_RANK_OF_STATUS.index)
    for context in contexts:
        for reporter in context.reporters:
            if reporter.engine not in found:
                found[reporter.engine] = _worker(reporter.engine, "discovery")
            if found[reporter.engine]["source"] == "discovery" and _name(reporter, "state") != "REPORTER_QUIET":
                found[reporter.engine]["status"] = "active"
    return sorted(found.values(), key=lambda worker: worker["instance_id"])


def _worker(engine: str, source: str) -> dict[str, Any]:
    return {
        "instance_id": worker_id(engine),
        "name": engine,
        "source": source,
        "status": "paused",
        "endpoints": {},
        "listeners": {},
    }


def global_view_answer(publishers: Iterable[Any], contexts: Iterable[Any]) -> dict[str, Any]:
    """Return the answer of /global_view: engines by model, adapter, block size and tenant."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for each in contexts:
        view = _context(found, each.instance_group, each)
        view["prefix_count"] += each.blocks
        for reporter in each.reporters:
            view["instances"].setdefault(reporter.engine, set()).add(reporter.rank)
    for each in publishers:
        view = _context(found, each.instance_group, each)
        if each.HasField("hash_profile"):
            view["hash_profile"] = _profile_document(each.hash_profile)
        view["instances"].setdefault(each.engine, set()).add(each.rank)
    shown = [found[key] for key in sorted(found)]
    for view in shown:
        view["instances"] = {engine: sorted(ranks) for engine, ranks in sorted(view["instances"].items())}
    return {"context_count": len(shown), "contexts": shown}


def _context(found: dict[tuple[Any, ...], dict[str, Any]], group: str, of: Any) -> dict[str, Any]:
    tenant = group or _DEFAULT_TENANT
    return found.setdefault(
        (of.model_name, of.lora_name, of.block_size, tenant),
        {
            "model_name": of.model_name,
            "lora_name": of.lora_name,
            "block_size": of.block_size,
            "tenant_id": tenant,
            "prefix_count": 0,
            "hash_profile": None,
            "instances": {},
        },
    )
