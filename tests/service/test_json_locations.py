"""Encoded locations as JSON: byte for byte what the general codec prints of their messages."""

import asyncio
import json
from typing import Any

import pytest
from any_message import messages
from google.protobuf.message import Message
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvcm.model.locations import SpecUri, encode_chunk, retag
from kvcm.model.storages import StorageType
from kvcm.protocol import admin_service_pb2 as admin
from kvcm.protocol import meta_service_pb2 as meta
from kvcm.service.calls import Reply
from kvcm.service.json_codec import MalformedBody, parse_request, print_response
from kvcm.service.json_integers import plain_integers
from kvcm.service.json_locations import LocationTexts, location_text, print_reply

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
@given(chunk=CHUNKS)
def test_what_the_index_holds_is_printed_as_by_the_general_codec(chunk: bytes) -> None:
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


REPLIES = [
    (meta.GetCacheLocationResponse, 2),
    (meta.StartWriteCacheResponse, 4),
    (meta.GetCacheMetaResponse, 2),
    (admin.GetCacheMetaResponse, 2),
]


async def printed_twice(reply: Reply, texts: LocationTexts) -> list[bytes]:
    return [await print_reply(reply, texts) for _ in range(2)]


@pytest.mark.parametrize(("response_type", "field_number"), REPLIES)
@FIXED
@given(data=st.data())
def test_replies_are_printed_as_their_complete_messages(
    response_type: type[Any], field_number: int, data: st.DataObject
) -> None:
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
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    chunks = [numbered(number) for number in range(10_000)]
    body = await print_reply(Reply(meta.GetCacheLocationResponse(), chunks), LocationTexts())
    counting.cancel()
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


@FIXED
@given(numbers=st.lists(st.integers(-(1 << 63), (1 << 63) - 1), min_size=1))
def test_usual_numbers_are_read_at_once(numbers: list[int]) -> None:
    assert plain_integers(list(map(str, numbers))) == numbers
