"""Bodies as they come: honest ones of any size are read, those that are made to be slow to read are not."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf import json_format
from google.protobuf.message import DecodeError

from kvcm.protocol import admin_service_pb2 as admin
from kvcm.protocol import meta_service_pb2 as meta
from kvcm.service.bodies import BodyReader
from kvcm.service.calls import Call, Plane, Reply
from kvcm.service.json_codec import MalformedBody
from kvcm.service.lanes import Lane
from kvcm.service.limits import RequestLimits
from kvcm.service.turned_away import TurnedAwayError

READER = BodyReader(RequestLimits(), Lane(time.monotonic, 1, 10, 0.0))
STRICT = BodyReader(RequestLimits(max_keys=4096, max_tokens=65_536), Lane(time.monotonic, 1, 10, 0.0))


async def _nothing(_request: Any) -> Reply:
    return Reply(meta.CommonResponse())


def _call(request_type: type[Any]) -> Call:
    return Call("s", "c", Plane.DATA, request_type, meta.CommonResponse, _nothing)


MATCH, FINISH = _call(meta.GetCacheLocationRequest), _call(meta.FinishWriteCacheRequest)
LOAD = _call(admin.LoadConfigSnapshotRequest)


def _match(keys: int, tokens: int) -> Any:
    flags = {"bool_masks": {"values": [True, False] * (keys // 2)}}
    return meta.GetCacheLocationRequest(
        trace_id="t", instance_id="i", block_keys=range(keys), token_ids=range(tokens), block_mask=flags
    )


def _finish(locations: int, parts: int, name_bytes: int = 0) -> Any:
    request = meta.FinishWriteCacheRequest(instance_id="i", write_session_id="s")
    for number in range(locations):
        location = request.locations.add(type=meta.ST_NFS, spec_size=parts)
        for part in range(parts):
            location.location_specs.add(name=f"tp{part}".ljust(name_bytes), checksum=(1 << 60) + number)
    return request


def _snapshot(groups: int) -> Any:
    values = [{f"field{field}": field for field in range(100)} for _ in range(groups)]
    return admin.LoadConfigSnapshotRequest(config_snapshot=json.dumps({"groups": values}))


HONEST = {
    "small": (MATCH, lambda: _match(4, 4)),
    "all keys and tokens": (MATCH, lambda: _match(65_536, 1 << 20)),
    "many locations": (FINISH, lambda: _finish(3000, 8, 200)),
    "the snapshot of a large deployment": (LOAD, lambda: _snapshot(300)),
}


@pytest.mark.parametrize("case", HONEST)
async def test_honest_requests_are_read(case: str) -> None:
    call, make = HONEST[case]
    request = make()
    assert await READER.proto(call, request.SerializeToString()) == request
    plain = json_format.MessageToDict(request, preserving_proto_field_name=True)
    assert await READER.json(call, json.dumps(plain).encode()) == request


def _sized(number: int, content: bytes) -> bytes:
    size, length = len(content), b""
    while size > 127:
        size, length = size >> 7, length + bytes([size & 127 | 128])
    return bytes([number << 3 | 2]) + length + bytes([size]) + content


MANY = (2 << 20) + (1 << 19)
PROTO_BOMBS: dict[str, tuple[Call, Callable[[], bytes]]] = {
    "empty locations": (FINISH, lambda: _sized(5, b"") * MANY),
    "empty parts of one location": (FINISH, lambda: _sized(5, _sized(3, b"") * MANY)),
    "empty parts of many locations": (FINISH, lambda: _sized(5, _sized(3, b"") * 100) * (MANY // 100)),
    "empty names": (MATCH, lambda: _sized(8, b"") * MANY),
    "keys one by one": (MATCH, lambda: b"\x20\x01" * MANY),
    "flags one by one": (MATCH, lambda: b"\x08\x01" * MANY),
    "a field that is cut off": (MATCH, lambda: b"\x0a\x05" * 2 + b"\x00" * (5 << 20) + b"\x0a\xff"),
    "a number without end": (MATCH, lambda: b"\x20" + b"\xff" * (5 << 20)),
    "a group": (MATCH, lambda: b"\x0b" * (5 << 20)),
}


@pytest.mark.parametrize("bomb", PROTO_BOMBS)
async def test_many_fields_are_not_read(bomb: str) -> None:
    call, make = PROTO_BOMBS[bomb]
    with pytest.raises(DecodeError):
        await STRICT.proto(call, make())


JSON_BOMBS: dict[str, tuple[Call, Callable[[], bytes], str]] = {
    "values": (MATCH, lambda: b'{"x":[' + b"1," * MANY + b"1]}", "values"),
    "objects": (FINISH, lambda: b'{"x":[' + b"{}," * MANY + b"{}]}", "objects"),
    "keys": (MATCH, lambda: b"{" + b",".join(b'"%d":1' % key for key in range(200_000)) + b"}", "pairs"),
    "keys of a call with locations": (FINISH, lambda: b"{" + b'"":1,' * MANY + b'"":1}', "pairs"),
}


@pytest.mark.parametrize("bomb", JSON_BOMBS)
async def test_many_values_are_not_read(bomb: str) -> None:
    call, make, what = JSON_BOMBS[bomb]
    with pytest.raises(MalformedBody, match=f"^body: has [0-9]+ {what}, no request has more than [0-9]+$"):
        await STRICT.json(call, make())


async def test_a_key_that_is_given_twice_among_many_is_found(caplog: pytest.LogCaptureFixture) -> None:
    pairs = [b'"%d":1' % key for key in range(16_000)]
    body = b"{" + b",".join([*pairs, b'"15999":1']) + b"}"
    with pytest.raises(MalformedBody, match="'15999' is given twice"):
        await READER.json(MATCH, body)


async def test_the_loop_goes_on_while_a_large_body_is_read() -> None:
    body = json.dumps(json_format.MessageToDict(_finish(3000, 8), preserving_proto_field_name=True)).encode()
    turns = 0
    reading = asyncio.create_task(READER.json(FINISH, body))
    while not reading.done():
        await asyncio.sleep(0)
        turns += 1
    await reading
    assert turns > 20


async def test_large_bodies_are_read_one_at_a_time_and_those_that_find_no_place_turned_away() -> None:
    reader = BodyReader(RequestLimits(), Lane(time.monotonic, 1, 1, 0.0))
    body = json.dumps(json_format.MessageToDict(_finish(1000, 8), preserving_proto_field_name=True)).encode()
    results = await asyncio.gather(*(reader.json(FINISH, body) for _ in range(3)), return_exceptions=True)
    assert [isinstance(result, TurnedAwayError) for result in results] == [False, False, True]
    assert results[0] == results[1] == _finish(1000, 8)
    assert await reader.json(FINISH, b"{}") == meta.FinishWriteCacheRequest()
