"""The JSON form of messages, of encoded locations, and of values of the model."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any, get_args

import pytest
from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import example, given, settings
from hypothesis import strategies as st
from loop_turns import turns_of_others
from model_values import model_values
from test_transport_drivers import SERVICES

from kvcm.model.groups import InstanceGroup
from kvcm.model.locations import SpecUri, encode_chunk, retag
from kvcm.model.storages import StorageConfig, StorageSpec, StorageType
from kvcm.protocol import admin_service_pb2 as admin
from kvcm.protocol import debug_service_pb2 as debug
from kvcm.protocol import kv_meta_service_pb2 as kv_meta
from kvcm.protocol import meta_service_pb2 as meta
from kvcm.service.calls import Reply
from kvcm.service.json_codec import (
    MAX_DEPTH,
    LocationTexts,
    MalformedBody,
    location_text,
    parse_request,
    print_reply,
    print_response,
)
from kvcm.service.translate import fill, read, read_storage, write_storage

Request = meta.GetCacheLocationRequest
Indexer = admin.MetaIndexerConfig


SCALARS: dict[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.TYPE_BOOL: st.booleans(),
    FieldDescriptor.TYPE_DOUBLE: st.floats(allow_nan=False),
    FieldDescriptor.TYPE_INT32: st.integers(-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_INT64: st.integers(-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_FIXED64: st.integers(0, 2**64 - 1),
    FieldDescriptor.TYPE_SFIXED64: st.integers(-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_UINT64: st.integers(0, 2**64 - 1),
    FieldDescriptor.TYPE_STRING: st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
}


def field_values(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    if field.message_type and field.message_type.GetOptions().map_entry:
        key, value = (SCALARS[each.type] for each in field.message_type.fields)
        return st.dictionaries(key, value, max_size=3)
    if field.message_type:
        single = messages(field.message_type)
    elif field.enum_type:
        single = st.sampled_from([*field.enum_type.values_by_number, 4242])
    else:
        single = SCALARS[field.type]
    return st.lists(single, max_size=3) if field.is_repeated else single


@st.composite
def messages(draw: st.DrawFn, descriptor: Descriptor) -> Message:
    """Any message of that type: each field set or not, at most one member of a oneof."""
    chosen: dict[str, Any] = {}
    oneofs: set[str] = set()
    for field in descriptor.fields:
        oneof = field.containing_oneof
        if draw(st.booleans()) and not (oneof and oneof.name in oneofs):
            chosen[field.name] = draw(field_values(field))
            oneofs |= {oneof.name} if oneof else set()
    return GetMessageClass(descriptor)(**chosen)


def parsed(text: str, message_type: type[Message] = Request) -> Any:
    return parse_request(text.encode(), message_type)


def printed(message: Message) -> Any:
    return json.loads(print_response(message))


def refusal(text: str, message_type: type[Message] = Request) -> str:
    with pytest.raises(MalformedBody) as caught:
        parsed(text, message_type)
    return str(caught.value)


# ── Parsing: accepted input ──────────────────────────────────────────────────────────────────────────────────────────
ACCEPTED: list[tuple[str, Message]] = [
    ("{}", Request()),
    (" {} \n", Request()),
    ('{"trace_id": "t", "nope": {"a": [1, null, "x", 1e400]}}', Request(trace_id="t")),  # unknown keys are ignored
    ('{"block_keys": [7]}', Request(block_keys=[7])),
    ('{"blockKeys": [7]}', Request(block_keys=[7])),
    ('{"query_type": "QT_PREFIX_MATCH"}', Request(query_type=meta.QT_PREFIX_MATCH)),
    ('{"query_type": 2}', Request(query_type=meta.QT_PREFIX_MATCH)),
    ('{"query_type": 99}', Request(query_type=99)),  # type: ignore[arg-type]
    ('{"query_type": -1}', Request(query_type=-1)),  # type: ignore[arg-type]
    *((f'{{"query_type": "{name}", "sw_size": 3}}', Request(sw_size=3)) for name in ("QT_NO_SUCH", "2", "", "qt_get")),
    *((f'{{"{key}": null}}', Request()) for key in ("trace_id", "query_type", "block_keys", "block_mask", "sw_size")),
    ('{"offset": null, "bool_masks": {"values": [true]}}', meta.BlockMask(bool_masks={"values": [True]})),
    ('{"block_mask": {}}', Request(block_mask={})),
    ('{"offset": 0}', meta.BlockMask(offset=0)),
    ('{"parent_block_key": 0}', meta.StartWriteCacheRequest(parent_block_key=0)),
    ("{}", meta.StartWriteCacheRequest()),
    ('{"trace_id": "\\u00e9 é \\ud83d\\ude00 \\u0000"}', Request(trace_id="é é 😀 \0")),
    ('{"persist_metadata_interval_time_ms": "600"}', Indexer(persist_metadata_interval_time_ms={"value": 600})),
    ('{"persistMetadataIntervalTimeMs": 0}', Indexer(persist_metadata_interval_time_ms={})),
    ('{"persist_metadata_interval_time_ms": null}', Indexer()),
    ('{"system_status": {"load": "0.5"}}', meta.HeartbeatEventParams(system_status={"load": "0.5"})),
    ('{"retry_after_ms": "18446744073709551615"}', meta.ReportEventResponse(retry_after_ms=2**64 - 1)),
    *(
        (f'{{"{key}": ["s"]}}', admin.InstanceGroup(event_report_storage_candidates=["s"]))
        for key in (
            "event_report_storage_candidates",
            "eventReportStorageCandidates",
            "event_reporting_storage_candidates",
            "eventReportingStorageCandidates",
        )
    ),
    ('{"\\ud800": 1, "query_type": "\\ud800"}', Request()),
    (json.dumps({"trace_id": "[{" * 1000}), Request(trace_id="[{" * 1000)),  # brackets in strings are no nesting
    (json.dumps({"token_ids": list(range(-(2**63), -(2**63) + 65_536))}),
     Request(token_ids=range(-(2**63), -(2**63) + 65_536))),
    (json.dumps({"locations": [{"location_specs": [{}]}] * 1000}),
     meta.FinishWriteCacheRequest(locations=[{"location_specs": [{}]}] * 1000)),
    ('{"success_blocks": {"bool_masks": {"offset": 0}}}',  # the stray key of the vLLM connector
     meta.FinishWriteCacheRequest(success_blocks={"bool_masks": {}})),
    *((f'{{"used_percentage": {literal}}}', admin.TriggerStrategy(used_percentage=value)) for literal, value in (
        ("0.8", 0.8), ("1", 1.0), ('"0.8"', 0.8), ("1e-400", 0.0), ('"-Infinity"', -math.inf))),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), ACCEPTED, ids=range(len(ACCEPTED)))
def test_accepted_input(text: str, message: Message) -> None:
    assert parsed(text, type(message)) == message


INT64 = {
    "7": 7, '"7"': 7, "-0": 0, "1.0": 1, '"1.0"': 1, "1e3": 1000, '"1e3"': 1000, "0e99999": 0,
    "9223372036854775807": 2**63 - 1, '"9223372036854775807"': 2**63 - 1, '"-9223372036854775808"': -(2**63),
    "9223372036854775807.0": 2**63 - 1, "9007199254740993.0": 2**53 + 1,
}  # fmt: skip


def test_int64_is_a_number_or_a_decimal_string() -> None:
    for literal, value in INT64.items():
        single = parsed(f'{{"parent_block_key": {literal}}}', meta.StartWriteCacheRequest)
        assert (single.parent_block_key, parsed(f'{{"block_keys": [0, {literal}]}}').block_keys) == (value, [0, value])


def test_a_checksum_has_64_bits_and_no_sign_and_is_shown_as_a_decimal_string() -> None:
    for value in (0, 1, 2**53 + 1, 2**63, 2**64 - 1):
        for literal in (f"{value}", f'"{value}"'):
            spec = parsed(f'{{"checksum": {literal}}}', meta.LocationSpec)
            assert (spec.checksum, printed(spec)["checksum"]) == (value, str(value))
    for literal in ("-1", '"-1"', "18446744073709551616", '"18446744073709551616"'):
        assert refusal(f'{{"checksum": {literal}}}', meta.LocationSpec) == "checksum: is out of the range of fixed64"


# ── Parsing: refused input ───────────────────────────────────────────────────────────────────────────────────────────
_BROKEN = "body: is not acceptable JSON: "


def _sizes(reason: str, *literals: str) -> list[tuple[str, Any, str]]:
    return [(f'{{"sw_size": {literal}}}', Request, f"sw_size: {reason}") for literal in literals]


def _shares(reason: str, *literals: str) -> list[tuple[str, Any, str]]:
    return [(f'{{"used_percentage": {literal}}}', admin.TriggerStrategy, reason) for literal in literals]


REFUSED: list[tuple[str, Any, str]] = [
    ("", Request, "body: is empty; a message of only defaults is {}"),
    *((text, Request, _BROKEN) for text in (
        "{", "{}}", "{'a': 1}", '{"a": 1,}', " ", "{} {}", "\ufeff{}", '{"a": 01}', "nul",
        '{"sw_size": 1e9999999999999999999}', f'{{"sw_size": {"1" * 5000}}}')),
    *((text, Request, "body: must be an object, not ") for text in (
        "[]", "[{}]", '"{}"', "1", "1.5", "true", "null")),
    ('{"trace_id": 7}', Request, "trace_id: must be a string, not a number"),
    ('{"trace_id": ["t"]}', Request, "trace_id: must be a string, not an array"),
    ('{"trace_id": true}', Request, "trace_id: must be a string, not a boolean"),
    *_sizes("must be an integer, not a boolean", "true"),
    *_sizes("must be an integer, not an object", "{}"),
    *_sizes("must be an integer, not a fraction", "1.5", '"1.5"', "1e-3", "1e-1000000000000000000"),
    *_sizes("is out of the range of int32", "2147483648", "-2147483649", '"2147483648"', "2147483648.0"),
    *_sizes("is out of the range of integers",
            "1e30", "1e999999999999999999", '"1e999999999"', "1" * 4000 + ".0"),
    *_sizes("must be a number, or a string that holds", *(f'"{text}"' for text in (
        "", " ", " 7", "7 ", "+7", "007", "0x7", "1_000", "٣", "1٣", "7\\n", "--7", "1e", ".5", "NaN"))),
    ('{"query_type": 2147483648}', Request, "query_type: is out of the range of int32"),
    ('{"query_type": true}', Request, "query_type: must be an integer, not a boolean"),
    ('{"query_type": []}', Request, "query_type: must be an integer, not an array"),
    ('{"block_keys": 1}', Request, "block_keys: must be an array, not a number"),
    ('{"block_keys": {"0": 1}}', Request, "block_keys: must be an array, not an object"),
    ('{"block_keys": [1, [2]]}', Request, "block_keys[1]: must be an integer, not an array"),
    ('{"block_keys": [1, null]}', Request, "block_keys[1]: must be an integer, not null"),
    ('{"block_keys": [true]}', Request, "block_keys[0]: must be an integer, not a boolean"),
    *((f'{{"block_keys": [1, {literal}]}}', Request, "block_keys[1]: is out of the range of int64") for literal in (
        "9223372036854775808", "-9223372036854775809", '"9223372036854775808"', "9.3e18")),
    ('{"location_spec_names": ["a", 1]}', Request, "location_spec_names[1]: must be a string, not a number"),
    ('{"block_mask": []}', Request, "block_mask: must be an object, not an array"),
    ('{"block_mask": {"bool_masks": {"values": [true, 1]}}}', Request, "block_mask.bool_masks.values[1]: must be true"),
    ('{"block_mask": {"bool_masks": {"values": ["true"]}}}', Request, "block_mask.bool_masks.values[0]: must be true"),
    ('{"locations": [{}, {"location_specs": [{"uri": 1}]}]}', meta.FinishWriteCacheRequest,
     "locations[1].location_specs[0].uri: must be a string, not a number"),
    ('{"locations": [null]}', meta.FinishWriteCacheRequest, "locations[0]: must be an object, not null"),
    *_shares("used_percentage: is out of the range of double", "1e400", "-1e400", '"1e400"', "1" * 400),
    *_shares("used_percentage: must be a n", "true", "{}", '"x"', '"nan"', '"inf"', '" 1"'),
    ('{"sw_size": 1, "swSize": 2}', Request, "sw_size: is given in both spellings"),
    *((f'{{"used_percentage": {name}}}', admin.TriggerStrategy, f"{name} is no JSON number")
      for name in ("NaN", "Infinity", "-Infinity")),
    ('{"offset": 0, "bool_masks": {}}', meta.BlockMask, "which is given too"),
    ('{"bool_masks": {}, "offset": 1}', meta.BlockMask, "which is given too"),
    ('{"sw_size": 1, "sw_size": 2}', Request, "the key 'sw_size' is given twice"),
    ('{"\\ud800": 1, "\\ud800": 2}', Request, "is given twice"),
    ('{"trace_id": "\\ud800"}', Request, "is not valid Unicode"),
    ('{"location_spec_names": ["a", "\\udc00x"]}', Request, "is not valid Unicode"),
    ("[" * 200_000, Request, "nested deeper"),
    ('{"a":' * 200_000, Request, "nested deeper"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message_type", "reason"), REFUSED, ids=range(len(REFUSED)))
def test_refused_input(text: str, message_type: type[Message], reason: str) -> None:
    found = refusal(text, message_type)
    assert reason in found
    found.encode()


@pytest.mark.parametrize("body", [b"\xff{}", b'{"trace_id": "\xed\xa0\x80"}', "{}".encode("utf-16")])
def test_invalid_utf_8(body: bytes) -> None:
    with pytest.raises(MalformedBody, match="body: is not acceptable JSON"):
        parse_request(body, Request)


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}"), ('[{"a":', "}]")])
def test_nesting_too_deep(opening: str, closing: str) -> None:
    """Levels below an unknown key of the object, which is the first level itself."""
    per_step = opening.count("[") + opening.count("{")
    deepest = (MAX_DEPTH - 1) // per_step
    for steps, is_read in ((deepest, True), (deepest + 1, False), (900, False)):
        text = '{"x":' + opening * steps + "1" + closing * steps + "}"
        if is_read:
            parsed(text)
        else:
            assert "nested deeper" in refusal(text)


# ── Printing ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_no_white_space_and_no_escapes_beyond_those_of_json() -> None:
    assert print_response(meta.Status(message='é "x" 😀')) == '{"code":"UNSPECIFIED","message":"é \\"x\\" 😀"}'.encode()


@pytest.mark.parametrize("name", ["NaN", "Infinity", "-Infinity"])
def test_doubles_that_json_has_no_number_for_have_names(name: str) -> None:
    strategy = parsed(f'{{"used_percentage": "{name}"}}', admin.TriggerStrategy)
    assert repr(strategy.used_percentage) == repr(float(name))
    assert printed(strategy)["used_percentage"] == name


FILES = {service.file.name: service.file for service in SERVICES.values()} | {
    module.DESCRIPTOR.name: module.DESCRIPTOR for module in (debug, kv_meta)
}
ALL_MESSAGES = [message for file in FILES.values() for message in file.message_types_by_name.values()]

ROUND_TRIP = [
    *(meta.GetCacheLocationRequest, meta.StartWriteCacheRequest, meta.FinishWriteCacheRequest),
    *(meta.StartWriteCacheResponse, admin.InstanceGroup),
    *(meta.ReportEventRequest, meta.ReportEventResponse, meta.GetHostCacheStateResponse),
]


@pytest.mark.parametrize("message_type", ROUND_TRIP, ids=lambda message_type: message_type.DESCRIPTOR.name)
@given(data=st.data())
def test_output_is_that_of_json_format_and_can_be_read_back(message_type: type[Message], data: st.DataObject) -> None:
    message = data.draw(messages(message_type.DESCRIPTOR))
    body = print_response(message)
    assert json.loads(body) == json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    assert parse_request(body, message_type) == message


@pytest.mark.parametrize("descriptor", ALL_MESSAGES, ids=lambda descriptor: descriptor.full_name)
def test_every_message_of_the_contract_can_be_read_and_printed(descriptor: Descriptor) -> None:
    message_type = GetMessageClass(descriptor)
    assert parse_request(print_response(message_type()), message_type) == message_type()


@pytest.mark.parametrize("descriptor", ALL_MESSAGES, ids=lambda descriptor: descriptor.full_name)
def test_our_messages_refuse_unknown_fields_and_names_and_the_others_ignore_them(descriptor: Descriptor) -> None:
    message_type, unknown = GetMessageClass(descriptor), {"NOPE": "NOPE"}
    unknown |= {field.name: ["NOPE"] if field.is_repeated else "NOPE" for field in descriptor.fields if field.enum_type}
    for key, value in unknown.items():
        text = json.dumps({key: value})
        if descriptor.file.package == "kvcm.v1":
            assert "'NOPE'" in refusal(text, message_type)
        else:
            assert parsed(text, message_type) == message_type()


KEYS = st.sampled_from(
    [name for message in ALL_MESSAGES for field in message.fields for name in (field.name, field.json_name)]
)
ODD = ["1e3", " 1", "NaN", "1_0", "\ud800", "QT_BATCH_GET", "9223372036854775808", 2**63, -1e30]
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(ODD)
TREES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=6))


def only_malformed_body_escapes(body: bytes, message_type: type[Message]) -> None:
    try:
        message = parse_request(body, message_type)
    except MalformedBody:
        return
    again = parse_request(print_response(message), message_type)
    # Compared as bytes, because a message with a NaN does not equal itself.
    assert again.SerializeToString(deterministic=True) == message.SerializeToString(deterministic=True)


TYPES = st.sampled_from([GetMessageClass(descriptor) for descriptor in ALL_MESSAGES])


@given(body=st.binary() | st.text().map(str.encode), message_type=TYPES)
def test_fuzz_with_arbitrary_bytes(body: bytes, message_type: type[Message]) -> None:
    only_malformed_body_escapes(body, message_type)


@given(data=st.data(), message_type=TYPES)
def test_fuzz_with_fields_of_the_message_and_wrong_values(data: st.DataObject, message_type: type[Message]) -> None:
    fields = [field.name for field in message_type.DESCRIPTOR.fields] or ["x"]
    tree = data.draw(st.dictionaries(st.sampled_from(fields), TREES))
    only_malformed_body_escapes(json.dumps(tree).encode(), message_type)


FIXED = settings(max_examples=100, deadline=None, derandomize=True)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=300)
SPECS = st.lists(st.builds(SpecUri, TEXT, TEXT, st.integers(0, (1 << 64) - 1)), max_size=3)
CHUNKS = st.builds(encode_chunk, st.sampled_from(StorageType), st.integers(0, 300), SPECS)


def encoded(location: Message) -> bytes:
    return meta.GetCacheLocationResponse(locations=[location]).SerializeToString()


@FIXED
@given(location=messages(meta.CacheLocation.DESCRIPTOR))
@example(location=meta.CacheLocation())
@example(location=meta.CacheLocation(spec_size=-1))
@example(location=meta.CacheLocation(type=-1))  # type: ignore[arg-type]
@example(location=meta.CacheLocation(spec_size=200, checksum=-5))
def test_any_location_is_printed_as_by_the_general_codec(location: Message) -> None:
    assert location_text(encoded(location)) == print_response(location)


@FIXED
@given(event_hash=st.integers(-(2**63), 2**63 - 1), checksum=st.integers(0, 2**64 - 1))
def test_event_hashes_are_printed_as_by_the_general_codec(event_hash: int, checksum: int) -> None:
    """They stand elsewhere in stored locations than protobuf writes them."""
    chunk = encode_chunk(StorageType.ST_NFS, 1, [SpecUri("kv", "u", checksum)], event_hash)
    (location,) = meta.GetCacheLocationResponse.FromString(chunk).locations
    assert location_text(chunk) == print_response(location)


def test_fields_that_are_new_to_the_printer_are_left_to_the_general_codec() -> None:
    location = b"\x08\x01" + b"\x7a\x03abc" + b"\x1a\x09" + b"\x0a\x01n" + b"\x7a\x01x" + b"\x12\x01u"
    chunk = b"\x12" + bytes((len(location),)) + location
    assert location_text(chunk) == print_response(meta.CacheLocation.FromString(location))


def test_the_messages_of_both_packages_have_the_same_form() -> None:
    """One printer serves both."""
    for name in ("CacheLocation", "LocationSpec"):
        fields = [
            [(f.name, f.number, f.type, f.is_repeated) for f in module.DESCRIPTOR.message_types_by_name[name].fields]
            for module in (meta, admin)
        ]
        assert fields[0] == fields[1]
    types = [module.DESCRIPTOR.enum_types_by_name["StorageType"].values_by_name.keys() for module in (meta, admin)]
    assert types[0] == types[1]


_OF_TWO = (meta.GetCacheLocationResponse, meta.GetCacheMetaResponse, admin.GetCacheMetaResponse)
REPLIES = [(meta.StartWriteCacheResponse, 4), *((message, 2) for message in _OF_TWO)]


async def printed_twice(reply: Reply, texts: LocationTexts) -> list[bytes]:
    return [await print_reply(reply, texts) for _ in range(2)]


@pytest.mark.parametrize(("response_type", "field_number"), REPLIES)
@FIXED
@given(data=st.data())
def test_replies_print_as_complete_messages(response_type: type[Any], field_number: int, data: st.DataObject) -> None:
    texts = LocationTexts(most_bytes=400)
    for _ in range(3):
        message = data.draw(messages(response_type.DESCRIPTOR))
        del message.locations[:]
        chunks = [retag(chunk, field_number) for chunk in data.draw(st.lists(CHUNKS, max_size=4))]
        printed = asyncio.run(printed_twice(Reply(message, chunks), texts))
        complete = json.loads(print_response(Reply(message, chunks).complete()))
        assert [json.loads(each) for each in printed] == [complete, complete]


def numbered(number: int) -> bytes:
    return encode_chunk(StorageType.ST_NFS, 1, [SpecUri("tp0", f"file://nfs_01/{number}?size=1")])


def test_texts_are_kept_up_to_their_bound() -> None:
    texts = LocationTexts(most_bytes=10_000)
    for number in range(1000):
        assert texts.of([numbered(number)]) == [location_text(numbered(number))]
        assert texts.kept_bytes <= 5_000 + 1_000


def test_addresses_for_fresh_blocks_are_not_kept() -> None:
    texts = LocationTexts()
    texts.of([retag(numbered(number), 4) for number in range(100)])
    assert texts.kept_bytes == 0


async def test_a_long_answer_gives_way_to_other_requests() -> None:
    chunks = [numbered(number) for number in range(10_000)]
    reply = Reply(meta.GetCacheLocationResponse(), chunks)
    body, turns = await turns_of_others(print_reply(reply, LocationTexts()))
    assert len(json.loads(body)["locations"]) == 10_000
    assert turns >= 5


NUMBERS = st.integers(-(1 << 65), 1 << 65)
WRITTEN = NUMBERS.map(str) | st.sampled_from(
    ["", "-0", "01", "+1", "1_0", " 1", "1e3", "1.0", "٣", "--1", "1-2", "1,2"]
)


def read_each(texts: list[str]) -> list[int] | None:
    """What the codec makes of numbers that it reads one by one, since the list holds one that is no text."""
    try:
        request = parse_request(json.dumps({"block_keys": [*texts, 7]}).encode(), meta.GetCacheLocationRequest)
    except MalformedBody:
        return None
    return list(request.block_keys)[:-1]


@FIXED
@given(texts=st.lists(WRITTEN, min_size=1))
def test_numbers_as_texts_are_read_as_one_by_one(texts: list[str]) -> None:
    try:
        request = parse_request(json.dumps({"block_keys": texts}).encode(), meta.GetCacheLocationRequest)
    except MalformedBody:
        assert read_each(texts) is None
    else:
        assert list(request.block_keys) == read_each(texts)


_PLAIN: dict[object, st.SearchStrategy[Any]] = {
    str: st.text(st.characters(exclude_categories=["Cs"]), max_size=4),
    int: st.integers(-(1 << 31), (1 << 31) - 1),
    float: st.floats(allow_nan=False),
    bool: st.booleans(),
}


@settings(max_examples=200, deadline=None, derandomize=True)
@given(group=model_values(InstanceGroup, _PLAIN))
def test_a_group_reads_back_from_both_forms_of_the_wire(group: InstanceGroup) -> None:
    message = admin.InstanceGroup()
    fill(message, group)
    assert read(InstanceGroup, admin.InstanceGroup.FromString(message.SerializeToString())) == group
    assert read(InstanceGroup, parse_request(print_response(message), admin.InstanceGroup)) == group


@pytest.mark.parametrize("spec", [each() for each in get_args(StorageSpec)])
def test_a_storage_reads_back_with_its_limit(spec: StorageSpec) -> None:
    """But for the switch, which has calls of its own."""
    config = StorageConfig("s", spec, True, capacity_bytes=1 << 62, used_percentage=0.75)
    request = admin.AddStorageRequest()
    write_storage(request.storage, config)
    assert read_storage("AddStorage", request) == config
