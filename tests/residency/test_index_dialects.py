"""Requests of every dialect are read into one form, and one form of matches is written in each; JSON and msgpack."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples

from kvcm.model.errors import CapacityError, DuplicateEntityError, InvalidArgumentError
from kvcm.model.key_schemes import VLLM_SHA256_CBOR, KeyScheme, block_hashes, vllm_root
from kvcm.residency.index_dialects import (
    Dialect,
    Encoding,
    Query,
    RequestError,
    dialect_named,
    encode,
    encoding_of,
    error_answer,
    hash_query_of,
    query_answer,
    read_fields,
    registered_answer,
    registration_of,
    removal_of,
    removed_answer,
    token_query_of,
    worker_id,
)
from kvcm.residency.publishers import MOST_OF_GROUP, HashProfile, Publisher, PublisherRegistry

MOST = 1000
JSON, MSGPACK = Encoding.JSON, Encoding.MSGPACK
QUERY = {"model": "m", "token_ids": [1, 2, 3], "block_size": 16}
RFC = {"endpoint": "tcp://1.1.1.1:5557", "type": "vLLM", "modelname": "m", "instance_id": "e", "block_size": 16}
REGISTRATION = RFC | {"dp_rank": 0}
PROFILE = {
    "strategy": "vllm_v1",
    "algorithm": "sha256_cbor",
    "python_hash_seed": "0",
    "index_projection": "low64_be",
}


@dataclass
class Match:
    """What a rank holds."""

    engine: str
    rank: int
    gpu_tokens: int
    host_tokens: int
    disk_tokens: int
    matched_tokens: int
    matched_gpu_tokens: int
    matched_host_tokens: int
    matched_disk_tokens: int
    storage_tokens: int = 0
    block_size: int = 16


WORKED = Match("e", 0, 32, 48, 64, 64, 32, 16, 16)  # wire_later 3.2: two blocks on the GPU, one in memory, one on disk


def fields(content: Any, encoding: Encoding = JSON) -> Any:
    """Return fields as they are read."""
    return read_fields(encode(content, encoding), encoding, MOST)


@pytest.fixture(params=[JSON, MSGPACK], ids=["json", "msgpack"])
def encoding(request: pytest.FixtureRequest) -> Encoding:
    """Each encoding."""
    found: Encoding = request.param
    return found


# Reading.


def test_a_query_of_conductor(encoding: Encoding) -> None:
    more = {"lora_name": None, "tenant_id": "t", "instance_id": "e", "cache_salt": "s", "unknown": {"a": [1]}}
    found = token_query_of(fields(QUERY | more, encoding))
    assert found == Query(
        Dialect.CONDUCTOR, "m", "t", [1, 2, 3], block_size=16, lora_name="", cache_salt="s", engine="e"
    )
    assert (found.group, token_query_of(fields(QUERY, encoding)).group) == ("t", "")


def test_a_query_of_dynamo(encoding: Encoding) -> None:
    found = token_query_of(fields({"model_name": "m", "token_ids": [7], "routing_group": "g"}, encoding))
    assert found == Query(Dialect.DYNAMO, "m", "g", [7])


@pytest.mark.parametrize("name", ["january", "spring", "conductor", "dynamo"])
def test_a_dialect_can_be_named(name: str) -> None:
    assert token_query_of(fields(QUERY), dialect_named(name)).dialect.value == name
    assert dialect_named("") is None


def test_tokens_come_as_little_endian_bytes_too() -> None:
    packed = struct.pack("<3i", 1, 2**31 - 1, 3)
    assert token_query_of(fields(QUERY | {"token_ids": packed}, MSGPACK)).token_ids == [1, 2**31 - 1, 3]


def test_engines_have_integer_ids_too(encoding: Encoding) -> None:
    assert token_query_of(fields(QUERY | {"instance_id": 7}, encoding)).engine == "7"
    assert registration_of(fields(REGISTRATION | {"instance_id": 7}, encoding)).instance_id == 7


def test_hashes_are_signed_unsigned_or_texts(encoding: Encoding) -> None:
    given_ = [-1, 2**63, 2**64 - 1, 5, "18446744073709551615", "0xFf", "-7"]
    query = {"model": "m", "block_size": 16}
    for name in ("seq_hashes", "block_hash"):
        found = hash_query_of(fields(query | {name: given_}, encoding))
        assert found.hashes == [-1, -(2**63), -1, 5, -1, 255, -7]


def test_local_hashes_are_refused_with_a_reason() -> None:
    with pytest.raises(RequestError, match=r"local hashes .* seq_hashes, .* token_ids") as refused:
        hash_query_of(fields({"model_name": "m", "block_hashes": [1]}))
    assert refused.value.field == "block_hashes"


REFUSED = [
    ({"token_ids": [1], "block_size": 16}, "missing", "model", None),
    ({"model": "m", "block_size": 16}, "missing", "token_ids", None),
    ({"model": "m", "token_ids": [1]}, "missing", "block_size", None),
    (QUERY | {"model": 1}, "invalid_type", "model", None),
    (QUERY | {"model": ""}, "out_of_range", "model", None),
    (QUERY | {"block_size": "16"}, "invalid_type", "block_size", None),
    (QUERY | {"block_size": True}, "invalid_type", "block_size", None),
    (QUERY | {"block_size": 0}, "out_of_range", "block_size", None),
    (QUERY | {"block_size": 2**40}, "out_of_range", "block_size", None),
    (QUERY | {"token_ids": "abc"}, "invalid_type", "token_ids", None),
    (QUERY | {"token_ids": [1, "2", 3]}, "invalid_type", "token_ids", 1),
    (QUERY | {"token_ids": [1, 2, 3.5]}, "invalid_type", "token_ids", 2),
    (QUERY | {"token_ids": [1, -1]}, "out_of_range", "token_ids", 1),
    (QUERY | {"token_ids": [2**32]}, "out_of_range", "token_ids", 0),
    (QUERY | {"token_ids": [1] * (MOST + 1)}, "out_of_range", "token_ids", None),
    (QUERY | {"lora_id": 1, "lora_name": "a"}, "out_of_range", "lora_id", None),
    (QUERY | {"instance_id": [1]}, "invalid_type", "instance_id", None),
    (QUERY | {"cache_salt": "s" * 9000}, "out_of_range", "cache_salt", None),
]


@pytest.mark.parametrize(("content", "reason", "field", "index"), REFUSED)
def test_a_wrong_query_is_refused(encoding: Encoding, content: Any, reason: str, field: str, index: int | None) -> None:
    with pytest.raises(RequestError) as refused:
        token_query_of(fields(content, encoding))
    shown = error_answer(refused.value)
    assert (shown["reason"], shown["field"], shown.get("index")) == (reason, field, index), shown
    assert field in shown["error"]
    assert error_answer(refused.value, Dialect.DYNAMO) == {"error": shown["error"]}


@pytest.mark.parametrize(
    ("packed", "reason", "index"),
    [
        (b"12345", "invalid_type", None),
        (struct.pack("<2i", 1, -1), "out_of_range", 1),
        (b"0000" * 1001, "out_of_range", None),
    ],
)
def test_wrong_bytes_of_tokens_are_refused(packed: bytes, reason: str, index: int | None) -> None:
    with pytest.raises(RequestError) as refused:
        token_query_of(fields(QUERY | {"token_ids": packed}, MSGPACK))
    assert (refused.value.reason.value, refused.value.index) == (reason, index)


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"1", b"\xff", b'{"a":1', b'{"a":' * 50_000, b"[" * 100_000,
        b'{"model":"\\ud800","token_ids":[1],"block_size":1}',
        b"{" + b",".join(b'"%d":1' % at for at in range(5000)) + b"}",
        b'{"x":[' + b",".join([b"1"] * 6000) + b"]}",
    ],
    ids=range(11),
)  # fmt: skip
def test_a_body_that_is_no_json_is_refused(body: bytes) -> None:
    with pytest.raises(RequestError) as refused:
        token_query_of(read_fields(body, JSON, MOST))
    assert refused.value.reason.value in {"invalid_json", "out_of_range", "invalid_type"}


@pytest.mark.parametrize(
    "body", [b"", b"\x90", b"\xc1", b"\xde\xff\xff", b"\xdf\xff\xff\xff\xff", b"\x81\x01\x01", b"\x91" * 100_000]
)
def test_a_body_that_is_no_msgpack_is_refused(body: bytes) -> None:
    with pytest.raises(RequestError) as refused:
        read_fields(body, MSGPACK, MOST)
    assert refused.value.reason.value == "invalid_msgpack"


def test_an_array_that_only_says_that_it_is_long_is_refused() -> None:
    head = msgspec.msgpack.encode(QUERY | {"token_ids": []})
    with pytest.raises(RequestError):
        token_query_of(read_fields(head.replace(b"\x90", b"\xdd\x7f\xff\xff\xff"), MSGPACK, MOST))


@settings(max_examples=examples(300), deadline=None)
@given(st.binary(max_size=64) | st.recursive(st.integers() | st.text(), st.lists).map(lambda v: encode_safely(v)))
def test_any_bytes_are_read_or_refused(body: bytes) -> None:
    for encoding in Encoding:
        for read in (token_query_of, hash_query_of, registration_of, removal_of):
            try:
                read(read_fields(body, encoding, MOST))
            except RequestError as refused:
                encode(error_answer(refused), encoding)


def encode_safely(value: Any) -> bytes:
    """Return a value in msgpack, as far as that has it."""
    try:
        return msgspec.msgpack.encode({"model": value, "token_ids": value, "instance_id": value})
    except OverflowError:
        return b""


def test_content_types() -> None:
    assert encoding_of("Application/JSON; charset=utf-8") is JSON
    assert encoding_of("application/msgpack") is encoding_of("application/x-msgpack") is MSGPACK
    for other in ("", "text/plain", "application/jsonx"):
        with pytest.raises(RequestError) as refused:
            encoding_of(other)
        assert refused.value.reason.value == "unsupported_content_type"


# Registrations.


def test_registrations_of_both_kinds(encoding: Encoding) -> None:
    found = registration_of(fields(REGISTRATION | {"hash_profile": PROFILE, "cache_group": None}, encoding))
    assert (found.dialect, found.instance_id, found.model_name, found.rank) == (Dialect.CONDUCTOR, "e", "m", 0)
    assert found.hash_profile == PROFILE
    assert registered_answer(found) == (200, {"status": "registered successfully", "instance_id": "e"})
    dynamo = {"instance_id": 1, "endpoint": "tcp://1.1.1.1:1", "model_name": "m", "block_size": 16}
    found = registration_of(fields(dynamo | {"tenant_id": "ignored?"}, encoding))
    assert (found.dialect, found.rank, found.type, found.group) == (Dialect.DYNAMO, 0, "", "ignored?")
    assert registered_answer(found) == (201, {"status": "ok"})


@pytest.mark.parametrize(
    ("changes", "reason", "field"),
    [
        *[({name: None}, "missing", name) for name in REGISTRATION],
        ({"type": "TRT"}, "invalid_registration", "type"),
        ({"cache_group": 1}, "invalid_registration", "cache_group"),
        ({"hash_profile": PROFILE, "additionalsalt": "s"}, "invalid_registration", "additionalsalt"),
        ({"hash_profile": []}, "invalid_type", "hash_profile"),
        ({"hash_profile": PROFILE | {"python_hash_seed": 0}}, "invalid_type", "hash_profile.python_hash_seed"),
        ({"hash_profile": {"strategy": "vllm_v1"}}, "missing", "hash_profile.algorithm"),
        ({"dp_rank": -1}, "out_of_range", "dp_rank"),
        ({"block_size": 0}, "out_of_range", "block_size"),
    ],
)
def test_a_wrong_registration_is_refused(changes: Any, reason: str, field: str) -> None:
    with pytest.raises(RequestError) as refused:
        registration_of(fields(REGISTRATION | changes))
    assert (refused.value.reason.value, refused.value.field) == (reason, field)


def test_an_instance_of_dynamo_is_an_integer() -> None:
    with pytest.raises(RequestError, match="instance_id has a wrong type, must be an integer"):
        registration_of(fields({"instance_id": "1", "endpoint": "tcp://a:1", "model_name": "m", "block_size": 16}))


@dataclass
class Removed:
    """A publisher that was removed."""

    engine: str
    instance_group: str
    rank: int


def test_removals() -> None:
    found = removal_of(fields({"instance_id": "e", "dp_rank": 0, "tenant_id": "default"}))
    assert removed_answer(found, [Removed("e", "", 0)]) == (
        200, {"status": "unregistered successfully", "removed_instances": ["e|default|0"]},
    )  # fmt: skip
    assert removed_answer(found, [])[1]["removed_instances"] == []
    found = removal_of(fields({"instance_id": 1, "model_name": "m"}))
    assert (found.rank, found.engine) == (None, "1")
    assert removed_answer(found, [Removed("1", "g", 0)]) == (200, {"status": "ok"})
    assert removed_answer(found, [])[0] == 404
    assert removal_of(fields({"instance_id": 1, "model_name": "m", "dp_rank": 3})).rank == 3


# Answers.


def test_the_worked_example_of_conductor(encoding: Encoding) -> None:
    answer = query_answer(Query(Dialect.CONDUCTOR, "m"), [WORKED])
    assert msgspec_decoded(encode(answer, encoding), encoding) == {
        "instances": {
            "e": {
                "longest_matched": 64,
                "gpu": 32,
                "dp": {"0": 32},
                "cpu": 48,
                "disk": 64,
                "storage": 0,
                "rank_matches": {"0": {"gpu": 32, "cpu": 48, "disk": 64}},
            }
        }
    }


def msgspec_decoded(body: bytes, encoding: Encoding) -> Any:
    """Return a body's values."""
    return msgspec.json.decode(body) if encoding is JSON else msgspec.msgpack.decode(body)


def test_the_same_in_the_words_of_the_rfc() -> None:
    entry = {"longest_matched": 64, "GPU": 32, "DP": {"0": 32}, "CPU": 16, "DISK": 16, "STORAGE": 0}
    assert query_answer(Query(Dialect.JANUARY, "m"), [WORKED]) == {"data": {"e": entry}}
    assert query_answer(Query(Dialect.SPRING, "m"), [WORKED]) == {"default": {"e": entry}}
    assert query_answer(Query(Dialect.SPRING, "m", "t"), [WORKED]) == {"t": {"e": entry}}


def test_the_same_in_the_words_of_dynamo() -> None:
    """The example of its page: 32 tokens of worker 1 on the device, none of worker 2."""
    one = Match("1", 0, 32, 48, 48, 48, 32, 16, 0)
    two = Match("2", 1, 0, 0, 0, 0, 0, 0, 0)
    assert query_answer(Query(Dialect.DYNAMO, "m"), [one, two]) == {
        "scores": {"1": {"0": 32}, "2": {"1": 0}},
        "frequencies": [1, 1],
        "instances": {
            "1": {"longest_matched": 48, "gpu": 32, "dp": {"0": 32}, "cpu": 48, "disk": 48, "storage": 0},
            "2": {"longest_matched": 0, "gpu": 0, "dp": {"1": 0}, "cpu": 0, "disk": 0, "storage": 0},
        },
    }


def test_an_instance_has_the_most_of_its_ranks_and_ranks_the_most_of_instances() -> None:
    ranks = [Match("e", 0, 32, 32, 32, 32, 32, 0, 0), Match("e", 1, 16, 48, 64, 64, 16, 32, 16, storage_tokens=16)]
    more = Match("e", 0, 48, 48, 48, 48, 48, 0, 0)
    answer = query_answer(Query(Dialect.CONDUCTOR, "m"), [*ranks, more])["instances"]["e"]
    assert (answer["gpu"], answer["cpu"], answer["disk"], answer["longest_matched"]) == (48, 48, 64, 64)
    assert (answer["dp"], answer["storage"]) == ({"0": 48, "1": 16}, 16)
    assert query_answer(Query(Dialect.DYNAMO, "m"), ranks)["frequencies"] == [2, 1]


@pytest.mark.parametrize(
    ("dialect", "answer"),
    [
        (Dialect.CONDUCTOR, {"instances": {}}),
        (Dialect.JANUARY, {"data": {}}),
        (Dialect.SPRING, {"default": {}}),
        (Dialect.DYNAMO, {"scores": {}, "frequencies": [], "instances": {}}),
    ],
)
def test_nothing_known_is_empty(dialect: Dialect, answer: Any) -> None:
    assert query_answer(Query(dialect, "m"), ()) == answer


def test_engines_without_a_number_get_a_lasting_one() -> None:
    assert (worker_id("7"), worker_id("0"), worker_id(str(2**64 - 1))) == (7, 0, 2**64 - 1)
    assert worker_id("10.0.0.1:8000") == worker_id("10.0.0.1:8000") != worker_id("10.0.0.2:8000")
    for name in ("10.0.0.1:8000", "007", "٣", str(2**64), "-1", ""):
        assert 0 <= worker_id(name) < 2**53


def test_the_golden_vector_of_conductor() -> None:
    """wire_later 3.3: block size 4, tokens 1 to 8, seed "0"."""
    scheme = KeyScheme(VLLM_SHA256_CBOR, vllm_root(VLLM_SHA256_CBOR, "0"), 0, 4)
    hashes = block_hashes(scheme, list(range(1, 9)))
    assert [int.from_bytes(each[-8:], "big") for each in hashes] == [2164874634404590027, 17270480062156288726]


# The registry of publishers.


def publisher(engine: str = "e", group: str = "g", **changes: Any) -> Publisher:
    """Return a publisher."""
    fields_ = {"model_name": "m", "rank": 0, "endpoint": "tcp://1.1.1.1:5557", "block_size": 16} | changes
    return Publisher(group=group, engine=engine, **fields_)


def test_a_registration_is_idempotent_and_conflicts_change_nothing() -> None:
    registry = PublisherRegistry()
    assert registry.register(publisher())
    assert not registry.register(publisher())
    conflicts = [
        publisher(endpoint="tcp://1.1.1.1:1"),
        publisher(block_size=32, rank=1, endpoint="tcp://1.1.1.1:2"),
        publisher("other"),
        publisher(lora_name="l"),
    ]
    for each in conflicts:
        with pytest.raises(DuplicateEntityError):
            registry.register(each)
    assert registry.all({"g"}) == [publisher()]
    assert registry.register(publisher(group="h")), "another group is not in the way"
    assert registry.unregister({"h"}, "e") == [publisher(group="h")]
    assert registry.unregister({"g"}, "e", rank=1) == registry.unregister({"g"}, "e", model_name="n") == []
    assert registry.unregister({"g"}, "e", rank=0, model_name="m") == [publisher()]
    assert registry.all({"g", "h"}) == []


def test_a_group_cannot_register_any_number() -> None:
    registry = PublisherRegistry()
    for rank in range(MOST_OF_GROUP):
        registry.register(publisher(rank=rank, endpoint=f"tcp://a:{rank + 1}"))
    with pytest.raises(CapacityError):
        registry.register(publisher("more", endpoint="tcp://b:1"))
    assert registry.register(publisher(group="h"))


@pytest.mark.parametrize(
    "endpoint",
    ["", "ipc:///tmp/x", "inproc://x", "tcp://a", "tcp://a:0", "tcp://a:65536", "tcp://a:1/x", "tcp://a b:1", "http://a:1",
     "tcp://" + "a" * 300 + ":1", "tcp://a:1;tcp://b:1", "tcp://lo;1.1.1.1:1"],
)  # fmt: skip
def test_endpoints_are_of_tcp_alone(endpoint: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"endpoint is .* must be tcp://host:port"):
        publisher(endpoint=endpoint)
    if endpoint:
        with pytest.raises(InvalidArgumentError, match="replay_endpoint"):
            publisher(replay_endpoint=endpoint)


@pytest.mark.parametrize("endpoint", ["tcp://*:5557", "tcp://[::1]:1", "tcp://host-1.x_y:65535"])
def test_endpoints_of_engines_are_taken(endpoint: str) -> None:
    assert publisher(endpoint=endpoint).endpoint == endpoint


@pytest.mark.parametrize(
    ("field", "value"),
    [("engine", ""), ("engine", "a#1"), ("engine", "a\n"), ("engine", "e" * 257), ("model_name", ""), ("rank", -1),
     ("rank", 65_536), ("block_size", 0), ("block_size", 1 << 21), ("lora_name", "l" * 257), ("type", "\0")],
)  # fmt: skip
def test_other_fields_have_limits(field: str, value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=field):
        publisher(**{field: value})


@pytest.mark.parametrize("seed", ["random", "0", "4294967295"])
def test_seeds(seed: str) -> None:
    assert HashProfile(**PROFILE | {"python_hash_seed": seed}).python_hash_seed == seed


@pytest.mark.parametrize(
    "changes",
    [{"python_hash_seed": each} for each in ("", "00", "4294967296", "-1", "1 ")]
    + [{"strategy": "v0"}, {"algorithm": "xxhash"}, {"index_projection": "high64"}],
)
def test_other_profiles_are_refused(changes: dict[str, str]) -> None:
    with pytest.raises(InvalidArgumentError, match=f"hash_profile.{next(iter(changes))}"):
        HashProfile(**PROFILE | changes)
