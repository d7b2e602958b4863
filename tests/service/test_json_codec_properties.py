"""Properties of the JSON form: the round trip, agreement with json_format, and that only MalformedBody escapes."""

import json

import pytest
from any_message import messages
from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import given
from hypothesis import strategies as st

from kvcm.protocol import admin_service_pb2 as admin
from kvcm.protocol import debug_service_pb2 as debug
from kvcm.protocol import kv_meta_service_pb2 as kv_meta
from kvcm.protocol import meta_service_pb2 as meta
from kvcm.protocol.kvcm.v1 import group_service_pb2 as group
from kvcm.protocol.kvcm.v1 import lease_service_pb2 as lease
from kvcm.protocol.kvcm.v1 import pin_service_pb2 as pin
from kvcm.protocol.kvcm.v1 import pool_service_pb2 as pool
from kvcm.protocol.kvcm.v1 import storage_service_pb2 as storage
from kvcm.service.json_codec import MalformedBody, parse_request, print_response

MODULES = [meta, admin, debug, kv_meta, lease, group, pin, pool, storage]
ALL_MESSAGES = [message for module in MODULES for message in module.DESCRIPTOR.message_types_by_name.values()]

ROUND_TRIP = [
    meta.GetCacheLocationRequest,
    meta.FinishWriteCacheRequest,
    meta.StartWriteCacheResponse,
    admin.InstanceGroup,
]


@pytest.mark.parametrize("message_type", ROUND_TRIP, ids=lambda message_type: message_type.DESCRIPTOR.name)
@given(data=st.data())
def test_round_trip(message_type: type[Message], data: st.DataObject) -> None:
    message = data.draw(messages(message_type.DESCRIPTOR))
    body = print_response(message)
    assert parse_request(body, message_type) == message
    assert json_format.Parse(body, message_type()) == message


@pytest.mark.parametrize("message_type", ROUND_TRIP, ids=lambda message_type: message_type.DESCRIPTOR.name)
@given(data=st.data())
def test_prints_what_json_format_prints(message_type: type[Message], data: st.DataObject) -> None:
    message = data.draw(messages(message_type.DESCRIPTOR))
    assert json.loads(print_response(message)) == json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )


@pytest.mark.parametrize("descriptor", ALL_MESSAGES, ids=lambda descriptor: descriptor.full_name)
def test_every_message_of_the_contract_can_be_read_and_printed(descriptor: Descriptor) -> None:
    message_type = GetMessageClass(descriptor)
    assert parse_request(print_response(message_type()), message_type) == message_type()


KEYS = st.sampled_from(
    [name for message in ALL_MESSAGES for field in message.fields for name in (field.name, field.json_name)]
)
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.sampled_from(["1e3", " 1", "NaN", "1_0", "\ud800", "QT_BATCH_GET", "9223372036854775808", 2**63, -1e30]),
)
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
