"""One test per rule of the JSON form of messages; the properties are tested in test_json_codec_properties.py."""

import json
import math
from typing import Any

import pytest
from google.protobuf.message import Message

from kvcm.protocol import admin_service_pb2 as admin
from kvcm.protocol import meta_service_pb2 as meta
from kvcm.service.json_codec import MAX_DEPTH, MalformedBody, parse_request, print_response

Request = meta.GetCacheLocationRequest


def parsed(text: str, message_type: type[Message] = Request) -> Any:
    return parse_request(text.encode(), message_type)


def printed(message: Message) -> Any:
    return json.loads(print_response(message))


def refusal(text: str, message_type: type[Message] = Request) -> str:
    with pytest.raises(MalformedBody) as caught:
        parsed(text, message_type)
    return str(caught.value)


# ── Parsing: what is accepted ────────────────────────────────────────────────────────────────────────────────────────


def test_a_message_of_only_defaults_is_an_empty_object() -> None:
    assert parsed("{}") == Request()
    assert parsed(" {} \n") == Request()


def test_unknown_keys_are_ignored() -> None:
    assert parsed('{"trace_id": "t", "nope": {"a": [1, null, "x", 1e400]}}') == Request(trace_id="t")


def test_the_stray_key_of_the_vllm_connector_leaves_an_empty_bool_mask() -> None:
    finish = parsed('{"success_blocks": {"bool_masks": {"offset": 0}}}', meta.FinishWriteCacheRequest)
    assert finish.success_blocks.WhichOneof("info") == "bool_masks"
    assert not finish.success_blocks.bool_masks.values


@pytest.mark.parametrize("key", ["block_keys", "blockKeys"])
def test_both_spellings_of_a_field(key: str) -> None:
    assert parsed(f'{{"{key}": [7]}}') == Request(block_keys=[7])


@pytest.mark.parametrize(
    ("literal", "value"),
    [
        ("7", 7),
        ('"7"', 7),
        ("-0", 0),
        ("1.0", 1),
        ('"1.0"', 1),
        ("1e3", 1000),
        ('"1e3"', 1000),
        ("0e99999", 0),
        ("9223372036854775807", 2**63 - 1),
        ('"9223372036854775807"', 2**63 - 1),
        ('"-9223372036854775808"', -(2**63)),
        ("9223372036854775807.0", 2**63 - 1),
        ("9007199254740993.0", 2**53 + 1),
    ],
)
def test_int64_is_a_number_or_a_decimal_string(literal: str, value: int) -> None:
    assert parsed(f'{{"parent_block_key": {literal}}}', meta.StartWriteCacheRequest).parent_block_key == value
    assert parsed(f'{{"block_keys": [0, {literal}]}}').block_keys == [0, value]


@pytest.mark.parametrize("value", [0, 1, 2**53 + 1, 2**63, 2**64 - 1])
def test_a_checksum_is_a_number_or_a_decimal_string_and_is_shown_as_one(value: int) -> None:
    for literal in (f"{value}", f'"{value}"'):
        spec = parsed(f'{{"checksum": {literal}}}', meta.LocationSpec)
        assert spec.checksum == value
        assert printed(spec)["checksum"] == str(value)


@pytest.mark.parametrize("literal", ["-1", '"-1"', "18446744073709551616", '"18446744073709551616"'])
def test_a_checksum_has_64_bits_and_no_sign(literal: str) -> None:
    assert refusal(f'{{"checksum": {literal}}}', meta.LocationSpec) == "checksum: is out of the range of fixed64"


def test_enum_by_name_and_by_number() -> None:
    assert parsed('{"query_type": "QT_PREFIX_MATCH"}').query_type == meta.QT_PREFIX_MATCH
    assert parsed('{"query_type": 2}').query_type == meta.QT_PREFIX_MATCH


@pytest.mark.parametrize("name", ["QT_NO_SUCH", "2", "", "qt_prefix_match"])
def test_an_unknown_enum_name_is_ignored(name: str) -> None:
    assert parsed(f'{{"query_type": "{name}", "sw_size": 3}}') == Request(sw_size=3)


def test_an_unknown_enum_number_is_kept() -> None:
    assert parsed('{"query_type": 99}').query_type == 99
    assert parsed('{"query_type": -1}').query_type == -1


@pytest.mark.parametrize("key", ["trace_id", "query_type", "block_keys", "block_mask", "sw_size"])
def test_null_is_the_default(key: str) -> None:
    assert parsed(f'{{"{key}": null}}') == Request()


def test_null_does_not_count_as_a_member_of_a_oneof() -> None:
    mask = parsed('{"offset": null, "bool_masks": {"values": [true]}}', meta.BlockMask)
    assert mask.bool_masks.values == [True]


def test_an_empty_object_sets_a_message_field() -> None:
    assert parsed('{"block_mask": {}}').HasField("block_mask")


def test_a_default_value_sets_a_oneof_member_and_an_optional_field() -> None:
    assert parsed('{"offset": 0}', meta.BlockMask).WhichOneof("info") == "offset"
    assert parsed('{"parent_block_key": 0}', meta.StartWriteCacheRequest).HasField("parent_block_key")
    assert not parsed("{}", meta.StartWriteCacheRequest).HasField("parent_block_key")


@pytest.mark.parametrize(
    ("literal", "value"), [("0.8", 0.8), ("1", 1.0), ('"0.8"', 0.8), ("1e-400", 0.0), ('"-Infinity"', -math.inf)]
)
def test_double(literal: str, value: float) -> None:
    assert parsed(f'{{"used_percentage": {literal}}}', admin.TriggerStrategy).used_percentage == value


def test_double_takes_the_name_of_not_a_number() -> None:
    assert math.isnan(parsed('{"used_percentage": "NaN"}', admin.TriggerStrategy).used_percentage)


def test_strings_keep_every_character() -> None:
    assert parsed('{"trace_id": "\\u00e9 é \\ud83d\\ude00 \\u0000"}').trace_id == "é é 😀 \0"


def test_sixty_five_thousand_tokens() -> None:
    tokens = list(range(-(2**63), -(2**63) + 65_536))
    assert parsed(json.dumps({"token_ids": tokens})).token_ids == tokens


# ── Parsing: what is refused ─────────────────────────────────────────────────────────────────────────────────────────


def test_an_empty_body() -> None:
    assert refusal("") == "body: is empty; a message of only defaults is {}"


@pytest.mark.parametrize("text", ["{", "{}}", "{'a': 1}", '{"a": 1,}', " ", "{} {}", "\ufeff{}", '{"a": 01}', "nul"])
def test_broken_json(text: str) -> None:
    assert refusal(text).startswith("body: is not acceptable JSON: ")


@pytest.mark.parametrize("text", ["[]", "[{}]", '"{}"', "1", "1.5", "true", "null"])
def test_anything_but_an_object(text: str) -> None:
    assert refusal(text).startswith("body: must be an object, not ")


@pytest.mark.parametrize("body", [b"\xff{}", b'{"trace_id": "\xed\xa0\x80"}', "{}".encode("utf-16")])
def test_invalid_utf_8(body: bytes) -> None:
    with pytest.raises(MalformedBody, match="body: is not acceptable JSON"):
        parse_request(body, Request)


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity"])
def test_constants_that_are_not_json(literal: str) -> None:
    assert f"{literal} is no JSON number" in refusal(f'{{"used_percentage": {literal}}}', admin.TriggerStrategy)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"trace_id": 7}', "trace_id: must be a string, not a number"),
        ('{"trace_id": ["t"]}', "trace_id: must be a string, not an array"),
        ('{"trace_id": true}', "trace_id: must be a string, not a boolean"),
        ('{"sw_size": true}', "sw_size: must be an integer, not a boolean"),
        ('{"sw_size": {}}', "sw_size: must be an integer, not an object"),
        ('{"query_type": true}', "query_type: must be an integer, not a boolean"),
        ('{"query_type": []}', "query_type: must be an integer, not an array"),
        ('{"block_keys": 1}', "block_keys: must be an array, not a number"),
        ('{"block_keys": {"0": 1}}', "block_keys: must be an array, not an object"),
        ('{"block_keys": [1, [2]]}', "block_keys[1]: must be an integer, not an array"),
        ('{"block_keys": [1, null]}', "block_keys[1]: must be an integer, not null"),
        ('{"block_keys": [true]}', "block_keys[0]: must be an integer, not a boolean"),
        ('{"location_spec_names": ["a", 1]}', "location_spec_names[1]: must be a string, not a number"),
        ('{"block_mask": []}', "block_mask: must be an object, not an array"),
        (
            '{"block_mask": {"bool_masks": {"values": [true, 1]}}}',
            "block_mask.bool_masks.values[1]: must be true or fa",
        ),
        (
            '{"block_mask": {"bool_masks": {"values": ["true"]}}}',
            "block_mask.bool_masks.values[0]: must be true or fal",
        ),
    ],
)
def test_a_wrong_type(text: str, reason: str) -> None:
    assert refusal(text).startswith(reason)


def test_wrong_elements_of_a_repeated_message() -> None:
    wrong = '{"locations": [{}, {"location_specs": [{"uri": 1}]}]}'
    reason = "locations[1].location_specs[0].uri: must be a string, not a number"
    assert refusal(wrong, meta.FinishWriteCacheRequest) == reason
    null = refusal('{"locations": [null]}', meta.FinishWriteCacheRequest)
    assert null == "locations[0]: must be an object, not null"


@pytest.mark.parametrize("literal", ["1.5", '"1.5"', "1e-3", "1e-1000000000000000000"])
def test_a_fraction_for_an_integer(literal: str) -> None:
    assert refusal(f'{{"sw_size": {literal}}}') == "sw_size: must be an integer, not a fraction"


@pytest.mark.parametrize("literal", ["2147483648", "-2147483649", '"2147483648"', "2147483648.0"])
def test_overflow_of_int32(literal: str) -> None:
    assert refusal(f'{{"sw_size": {literal}}}') == "sw_size: is out of the range of int32"
    assert refusal(f'{{"query_type": {literal.replace(chr(34), "")}}}') == "query_type: is out of the range of int32"


@pytest.mark.parametrize("literal", ["9223372036854775808", "-9223372036854775809", '"9223372036854775808"', "9.3e18"])
def test_overflow_of_int64(literal: str) -> None:
    assert refusal(f'{{"block_keys": [1, {literal}]}}') == "block_keys[1]: is out of the range of int64"


@pytest.mark.parametrize("literal", ["1e30", "1e999999999999999999", '"1e999999999"', "1" * 4000 + ".0"])
def test_huge_numbers_are_refused_without_being_computed(literal: str) -> None:
    assert refusal(f'{{"sw_size": {literal}}}') == "sw_size: is out of the range of integers"


@pytest.mark.parametrize("literal", ["1e9999999999999999999", "1" * 5000])
def test_numbers_that_python_cannot_hold(literal: str) -> None:
    assert refusal(f'{{"sw_size": {literal}}}').startswith("body: is not acceptable JSON: ")


@pytest.mark.parametrize(
    "text", ["", " ", " 7", "7 ", "+7", "007", "0x7", "1_000", "٣", "1٣", "7\\n", "--7", "1e", ".5", "NaN"]
)
def test_strings_that_are_no_decimal_number(text: str) -> None:
    assert refusal(f'{{"sw_size": "{text}"}}').startswith("sw_size: must be a number, or a string that holds")


@pytest.mark.parametrize("literal", ["1e400", "-1e400", '"1e400"', "1" * 400])
def test_overflow_of_double(literal: str) -> None:
    reason = "used_percentage: is out of the range of double"
    assert refusal(f'{{"used_percentage": {literal}}}', admin.TriggerStrategy) == reason


@pytest.mark.parametrize("literal", ["true", "{}", '"x"', '"nan"', '"inf"', '" 1"'])
def test_a_wrong_type_for_a_double(literal: str) -> None:
    assert refusal(f'{{"used_percentage": {literal}}}', admin.TriggerStrategy).startswith(
        "used_percentage: must be a n"
    )


@pytest.mark.parametrize("text", ['{"offset": 0, "bool_masks": {}}', '{"bool_masks": {}, "offset": 1}'])
def test_both_members_of_a_oneof(text: str) -> None:
    assert "which is given too" in refusal(text, meta.BlockMask)


def test_a_key_given_twice() -> None:
    assert "the key 'sw_size' is given twice" in refusal('{"sw_size": 1, "sw_size": 2}')
    assert refusal('{"sw_size": 1, "swSize": 2}') == "sw_size: is given in both spellings"


@pytest.mark.parametrize("text", ['{"trace_id": "\\ud800"}', '{"location_spec_names": ["a", "\\udc00x"]}'])
def test_half_of_a_surrogate_pair(text: str) -> None:
    assert "is not valid Unicode" in refusal(text)


def test_half_of_a_surrogate_pair_in_a_key_or_an_enum_name_is_unknown() -> None:
    assert parsed('{"\\ud800": 1, "query_type": "\\ud800"}') == Request()
    refusal('{"\\ud800": 1, "\\ud800": 2}').encode()


def nested(opening: str, closing: str, levels: int) -> str:
    """An object whose unknown key holds the rest; the object itself is the first level."""
    return '{"x":' + opening * (levels - 1) + "1" + closing * (levels - 1) + "}"


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}"), ('[{"a":', "}]")])
def test_nesting_too_deep(opening: str, closing: str) -> None:
    per_step = opening.count("[") + opening.count("{")
    deepest = 1 + (MAX_DEPTH - 1) // per_step
    parsed(nested(opening, closing, deepest))
    assert "nested deeper" in refusal(nested(opening, closing, deepest + 1))


@pytest.mark.parametrize("text", ["[" * 200_000, '{"a":' * 200_000, nested("[", "]", 900)])
def test_nesting_too_deep_for_the_decoder(text: str) -> None:
    assert "nested deeper" in refusal(text)


def test_brackets_in_strings_are_not_nesting() -> None:
    assert parsed(json.dumps({"trace_id": "[{" * 1000})).trace_id == "[{" * 1000


def test_many_shallow_objects_are_not_nesting() -> None:
    finish = parsed(json.dumps({"locations": [{"location_specs": [{}]}] * 1000}), meta.FinishWriteCacheRequest)
    assert len(finish.locations) == 1000


# ── Printing ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_defaults_and_empty_lists_are_printed_and_unset_messages_are_not() -> None:
    assert print_response(meta.GetCacheLocationResponse()) == (
        b'{"locations":[],"read_lease_id":"","read_lease_deadline_ms":"0"}'
    )
    assert printed(meta.RegisterInstanceResponse()) == {"storage_configs": ""}


def test_a_header_as_the_meta_calls_print_it() -> None:
    response = meta.CommonResponse(header={"status": {"code": meta.OK}, "request_id": "t_1"})
    status = {"code": "OK", "message": ""}
    assert printed(response) == {"header": {"status": status, "request_id": "t_1", "tracer_result": ""}}


def test_a_set_message_field_is_printed_even_when_it_is_empty() -> None:
    response = meta.CommonResponse()
    response.header.status.SetInParent()
    assert printed(response)["header"]["status"] == {"code": "UNSPECIFIED", "message": ""}


def test_int64_as_string_int32_and_double_as_numbers() -> None:
    strategy = admin.CacheReclaimStrategy(delay_before_delete_ms=5)
    strategy.trigger_strategy.used_size = 2**63 - 1
    strategy.trigger_strategy.used_percentage = 0.8
    shown = printed(strategy)
    assert shown["delay_before_delete_ms"] == 5
    assert shown["trigger_strategy"] == {"used_size": "9223372036854775807", "used_percentage": 0.8}


def test_repeated_int64_as_strings() -> None:
    assert printed(Request(block_keys=[-1, 0]))["block_keys"] == ["-1", "0"]


def test_enums_as_names_and_unknown_numbers_as_they_are() -> None:
    assert printed(meta.CacheLocation(type=meta.ST_NFS))["type"] == "ST_NFS"
    location = meta.CacheLocation()
    location.MergeFromString(b"\x08\x63")
    assert printed(location)["type"] == 99


def test_a_set_oneof_member_is_printed_even_when_it_is_zero() -> None:
    assert print_response(meta.BlockMask(offset=0)) == b'{"offset":0}'
    assert print_response(meta.BlockMask(bool_masks={})) == b'{"bool_masks":{"values":[]}}'
    assert print_response(meta.BlockMask()) == b"{}"


def test_an_optional_field_is_printed_only_when_it_is_set() -> None:
    assert "parent_block_key" not in printed(meta.StartWriteCacheRequest())
    assert printed(meta.StartWriteCacheRequest(parent_block_key=0))["parent_block_key"] == "0"


def test_no_white_space_and_no_escapes_beyond_those_of_json() -> None:
    assert print_response(meta.Status(message='é "x" 😀')) == '{"code":"UNSPECIFIED","message":"é \\"x\\" 😀"}'.encode()


@pytest.mark.parametrize(("value", "shown"), [(math.nan, "NaN"), (math.inf, "Infinity"), (-math.inf, "-Infinity")])
def test_doubles_that_json_has_no_number_for(value: float, shown: str) -> None:
    assert printed(admin.TriggerStrategy(used_percentage=value))["used_percentage"] == shown
